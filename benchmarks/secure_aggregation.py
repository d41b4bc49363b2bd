"""What secure aggregation costs: `python benchmarks/secure_aggregation.py`.

Federations of 4, 16 and 64 sites in the loop of one process, of 18 images each, with and without it. Of each:
bytes of one site and CPU seconds of all sites and the server together, a round. The models must be equal.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

from harness import command, show

from suture import ModelSpec
from suture.federation.plan import Plan
from suture.learning.training import LocalTraining
from suture.methods.base import GlobalModel
from suture.methods.surgical import SurgicalAggregation
from suture.privacy.secure_aggregation import SecureAggregation
from suture_synthetic import trial
from suture_synthetic.trial import Trial

MASKED = partial(Plan, secure_aggregation=SecureAggregation())
CLASSES = ("Fibrosis", "Hernia", "Mass", "Nodule")


def run(
    model: str, sites: int, rounds: int, plan: Callable[..., Plan]
) -> tuple[float, float, float, GlobalModel]:
    """CPU seconds of a round, bytes up and down of a site in it, and the model at the end."""
    members = {f"site-{k:02d}": CLASSES for k in range(sites)}
    method = SurgicalAggregation(local=LocalTraining(lr=1e-2, batch_size=18))
    with (
        patch.object(trial, "SITES", members),
        patch.object(trial, "Plan", plan),
        Trial(method, ModelSpec(model, size=32), "multilabel", rounds=rounds) as federation,
    ):
        began = time.process_time()
        federation.run()
        seconds = (time.process_time() - began) / rounds
        lines = federation.history()
        up, down = (sum(line[way] for line in lines) / sites / rounds for way in ("bytes_up", "bytes_down"))
        return seconds, up, down, federation.server.model


def row(model: str, sites: int, rounds: int) -> list[str]:
    """Figures without masks beside those with them."""
    runs = [run(model, sites, rounds, plan) for plan in (Plan, MASKED)]
    one, two = ({**merged.shared, **merged.head} for *_, merged in runs)
    apart = max(float((one[name] - two[name]).abs().max()) for name in one)
    assert apart < 1e-6, apart
    seconds, up, down, _ = zip(*runs, strict=True)
    sizes = [f"{size / 1e3:,.0f}" for size in (*up, *down)]
    numbers = f"{sum(t.numel() for t in one.values()):,}"
    return [f"{model}, {numbers}", str(sites), *sizes, *(f"{one:.2f}" for one in seconds)]


def main(models: tuple[str, ...] = ("cnn",), sites: tuple[int, ...] = (4, 16, 64), rounds: int = 3) -> None:
    """Print a table."""
    head = ("model, numbers", "sites", "kB up", "masked", "kB down", "masked", "CPU s a round", "masked")
    show(head, (row(model, count, rounds) for model in models for count in sites))


if __name__ == "__main__":
    command(main, sites=(4,), rounds=1)
