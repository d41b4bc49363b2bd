"""A collector never raises, whatever it receives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from suture.federation.server.collector import UpdateCollector
from suture.protocol.check import Expectation
from suture.protocol.egress import Egress
from suture.protocol.messages import Payload
from suture.protocol.packing import Packed

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
    ],
    ids=["deep", "a set", "a tensor", "a number as a name", "a million labels", "text as a tensor"],
)
def test_what_is_no_message_is_rejected_and_the_exchange_goes_on(packed: Packed, tmp_path: Path) -> None:
    collector = UpdateCollector(tmp_path / "spool", lambda *_, **__: None)
    expected = Expectation("handshake", 0, 0, "", (), (), Egress({}, {}))
    collector.open({site: (Payload("handshake"), expected) for site in ("a", "b")})
    collector.receive("a", packed)
    lines = collector.close({})
    assert lines["a"]["status"] == "rejected"
    assert lines["a"]["reason"]
    assert lines["b"]["status"] == "missing"
