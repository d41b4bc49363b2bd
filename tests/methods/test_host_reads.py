"""How often a local step waits for the device: never, but for what `NEEDED` lists.

Two rounds of one epoch and of two are profiled. What they differ in is what the steps of one epoch cost.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from suture.methods import METHODS
from suture.methods.base import Method
from suture.protocol.messages import Update
from suture.simulation.method_checks import subject_of

ITEM, ROWS = "aten::_local_scalar_dense", "aten::nonzero"
"""A number that Python looks at; a result whose shape depends on values, which a boolean mask as an index is
too. `Tensor.cpu` is counted beside them: where the device is the CPU, torch has nothing to do for it."""

NEEDED = {
    "fedlsm": {ITEM, ROWS, "cpu"},  # a median's scale, counts of pseudo-labels, rows that a filter is for
    "fixmatch": {ITEM, ROWS},  # a median's scale, the images that are seen again
    "fedpu": {ROWS},  # the rows of each class of a batch
    "fedvls": {ITEM, ROWS},  # the labelled rows of a batch, and whether there are any
    "fedmas": {"cpu"},  # sums of distances by class in double precision
}
"""What the steps of some methods wait for; FSSL is like FixMatch."""

LOOPS = ["surgical", "condist", "fpsl", "fedmlp", "fednml", "moon", "fedalign", "fl", "pmfl"]
"""Methods that each have batches, a loop or terms of their own; the others share theirs."""


def reads(method: Method, monkeypatch: pytest.MonkeyPatch) -> tuple[int, Counter[str]]:
    """The steps of a round at a site, and its reads but for the optimiser's, whose counter is on the CPU."""
    subject, copied = subject_of(method), Counter[str]()
    real = Tensor.cpu

    def cpu(tensor: Tensor, *args: Any, **named: Any) -> Tensor:
        copied["cpu"] += 1
        return real(tensor, *args, **named)

    monkeypatch.setattr(Tensor, "cpu", cpu)
    with subject.trial(subject.first) as trial:
        task = trial.payload("alpha")
        with profile(activities=[ProfilerActivity.CPU]) as found:
            copied.clear()
            assert isinstance(trial.sites["alpha"].answer(task), Update)
    monkeypatch.undo()
    events = [event for event in found.events() if not _in_optimiser(event)]
    steps = sum(event.name.startswith("Optimizer.step") for event in found.events())
    return steps, Counter(event.name for event in events if event.name in (ITEM, ROWS)) + copied


def _in_optimiser(event: Any) -> bool:
    return event is not None and (event.name.startswith("Optimizer.step") or _in_optimiser(event.cpu_parent))


def of_an_epoch(name: str, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    kind: Any = METHODS[name]
    method = kind(**{"batches": 2} if kind.limits.fixed_batches else {})
    length = "iterations" if method.local.iterations else "epochs"
    once, twice = (replace(method, local=replace(method.local, **{length: n})) for n in (1, 2))
    (few, one), (many, two) = reads(once, monkeypatch), reads(twice, monkeypatch)
    assert many == 2 * few  # both 0 where a method takes its steps by hand
    two.subtract(one)
    return +two


@pytest.mark.parametrize("name", [*LOOPS, *NEEDED])
def test_a_step_reads_nothing_back_from_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert of_an_epoch(name, monkeypatch).keys() <= NEEDED.get(name, set())


def test_a_read_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One in each of the three steps of an epoch."""
    kind: Any = METHODS["surgical"]
    loss = kind.loss
    monkeypatch.setattr(kind, "loss", lambda *args: loss(*args) * float(loss(*args) >= 0))
    with monkeypatch.context() as inner:
        assert of_an_epoch("surgical", inner) == {ITEM: 3}
