"""A collector never raises, whatever it receives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from suture.federation.server.collector import UpdateCollector
from suture.methods import METHODS
from suture.models.classifier import Layout
from suture.protocol.check import AllowedReply
from suture.protocol.egress import Egress
from suture.protocol.messages import TaskData, Update
from suture.protocol.packing import Packed, pack

DEEP: Any = []
for _ in range(3_000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    "packed",
    [
        Packed({}, {"type": "handshake", "labels": DEEP}),
        Packed({}, {"type": "handshake", "labels": {1, 2}}),
        Packed({}, {"type": "handshake", "labels": torch.ones(2)}),
        Packed({}, {3: "handshake"}),  # type: ignore[dict-item]
        Packed({}, {"type": "handshake", "labels": ["Mass"] * 1_000_000}),
        Packed({"w": "no tensor"}, {"type": "update"}),  # type: ignore[dict-item]
        Packed({"shared/w": torch.zeros(3, device="meta")}, {"type": "update"}),
        Packed({3: torch.zeros(3)}, {"type": "update"}),  # type: ignore[dict-item]
    ],
    ids=[
        "deep",
        "a set",
        "a tensor",
        "a number as a name",
        "a million labels",
        "text as a tensor",
        "a tensor without values",
        "a number as the name of a tensor",
    ],
)
def test_what_is_no_message_is_rejected_and_the_exchange_goes_on(packed: Packed, tmp_path: Path) -> None:
    collector = UpdateCollector(tmp_path / "spool", lambda *_, **__: None)
    collector.open(dict.fromkeys(("a", "b"), AllowedReply(TaskData("handshake"), Egress({}, {}))))
    collector.receive("a", packed)
    lines = collector.close({})
    assert lines["a"].status == "rejected"
    assert lines["a"].reason
    assert lines["b"].status == "missing"


def collected(tensors: dict[str, torch.Tensor], spool: Path) -> tuple[UpdateCollector, str]:
    """Send an update with these tensors in the place of its own; return the collector and the status."""
    shared, head = {"backbone.w": torch.zeros(3)}, {"head.weight": torch.zeros(2, 4)}
    task = TaskData("train", round=1, labels=("A", "B"))
    egress = METHODS["surgical"]().egress(Layout.of(shared, head))
    update = pack(Update(1, ("A", "B"), shared, head, torch.ones(2, dtype=torch.float64)))
    collector = UpdateCollector(spool, lambda *_, **__: None)
    collector.open({"a": AllowedReply(task, egress, ("A", "B"), 10)})
    collector.receive("a", Packed({**update.tensors, **tensors}, update.header))
    return collector, collector.close({})["a"].status


def test_an_update_without_values_is_rejected(tmp_path: Path) -> None:
    _, status = collected({"shared/backbone.w": torch.zeros(3, device="meta")}, tmp_path)
    assert status == "rejected"


def test_tensors_that_share_memory_are_spooled_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("suture.federation.server.collector.IN_MEMORY", 0)
    whole = torch.arange(8.0)
    tied = {"shared/backbone.w": whole[:3], "head/head.weight": whole.view(2, 4)}
    collector, status = collected(tied, tmp_path)
    assert status == "accepted"
    ((_, update),) = collector.updates()
    assert torch.equal(update.shared["backbone.w"], whole[:3])
    assert torch.equal(update.head["head.weight"], whole.view(2, 4))
