"""Optimisers: torch's steps to the bit, and no compiler in a process that trains."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from suture.learning import training as optimisers

SETTINGS: dict[str, dict[str, Any]] = {
    "Adam": {"lr": 0.01, "betas": (0.8, 0.99), "weight_decay": 0.1},
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
    "SGD": {"lr": 0.01, "momentum": 0.9, "nesterov": True},
}


def trained(kind: type[torch.optim.Optimizer], settings: dict[str, Any]) -> list[torch.Tensor]:
    """The parameters after ten steps, each with a hook that changes the gradient, and the moments."""
    draw = torch.Generator().manual_seed(1)
    parameters = [torch.randn(3, 2, generator=draw).requires_grad_() for _ in range(2)]
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.05}]
    optimiser = kind(groups, **settings)
    optimiser.register_step_pre_hook(lambda *_: torch.nn.utils.clip_grad_norm_(parameters, 0.5) and None)
    for _ in range(10):
        optimiser.zero_grad()
        sum((p * torch.randn(3, 2, generator=draw)).square().sum() for p in parameters).backward()  # type: ignore[union-attr]
        optimiser.step()
    return [*parameters, *(t for p in parameters for t in optimiser.state[p].values() if t is not None)]


@pytest.mark.parametrize("name", SETTINGS)
def test_steps_are_those_of_torch(name: str) -> None:
    ours = trained(getattr(optimisers, name), SETTINGS[name])
    theirs = trained(getattr(torch.optim, name), SETTINGS[name])
    assert len(ours) == len(theirs) > 2
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert all(not tensor.grad_fn for tensor in ours), "a step was recorded for the gradient"


SCRIPT = """
import sys
from pathlib import Path
from small_job import SMALL
from suture.execution.run import run_job
run_job(SMALL, "local", Path(sys.argv[1]))
print("compiler:", "torch._dynamo" in sys.modules)
"""


@pytest.mark.complete
def test_a_process_that_trains_does_not_import_the_compiler(tmp_path: Path) -> None:
    words = [sys.executable, "-c", SCRIPT, str(tmp_path / "r")]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1])
    assert done.stdout.splitlines()[-1] == "compiler: False"
