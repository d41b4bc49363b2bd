"""A mean over the sites holds no more updates than fit a fixed memory, whatever their number."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
import torch

from suture.federation.server.aggregator import Updates
from suture.federation.server.collector import UpdateCollector
from suture.federation.server.registry import Member, SiteRegistry
from suture.methods import averaging
from suture.methods.averaging import weighted_mean
from suture.methods.base import GlobalModel
from suture.protocol.messages import Update, ones

SITES = ("a", "b", "c")


class _Reading(UpdateCollector):
    """Reads updates as a collector does, and notes how many of those before are still held."""

    def __init__(self) -> None:
        self.held: list[int] = []

    def updates(self) -> Iterator[tuple[str, Update]]:
        read: list[weakref.ref[torch.Tensor]] = []

        def next_one() -> Update:
            self.held.append(sum(one() is not None for one in read))
            tensor = torch.ones(2)
            read.append(weakref.ref(tensor))
            return Update(1, ("Masse",), {"w": tensor}, {"b": torch.ones(1)}, ones(("Masse",)))

        for site in SITES:
            yield site, next_one()


@pytest.mark.parametrize(
    ("together", "waiting", "held"),
    [(9, 7, [0, 0, 0]), (9, 8, [0, 1, 0]), (9, 16, [0, 1, 2]), (0, 99, [0, 0, 0]), (1, 99, [0, 1, 0])],
)
def test_a_mean_lets_go_of_updates_before_the_next_one_is_read(
    together: int, waiting: int, held: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has 8 bytes."""
    monkeypatch.setattr(averaging, "_TOGETHER", together)
    monkeypatch.setattr(averaging, "_WAITING", waiting)
    member = Member(("Masse",), ("Mass",), {"train": 1}, 1)
    collector, registry = _Reading(), SiteRegistry(dict.fromkeys(SITES, member), ("Mass",))
    model = GlobalModel(("Mass",), {"w": torch.zeros(2)}, {"b": torch.zeros(1)})
    mean = weighted_mean(model, Updates(collector, registry))
    assert mean.head()["b"].tolist() == [1.0]
    assert mean.shared()["w"].tolist() == [1.0, 1.0]
    assert collector.held == held
