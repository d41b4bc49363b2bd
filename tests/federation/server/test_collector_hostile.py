"""An inbox never raises, whatever comes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from suture.federation.server.collector import Inbox
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
        Packed({}, {"type": "hello", "labels": DEEP}),
        Packed({}, {"type": "hello", "labels": {1, 2}}),
        Packed({}, {"type": "hello", "labels": torch.ones(2)}),
        Packed({}, {3: "hello"}),  # type: ignore[dict-item]
        Packed({}, {"type": "hello", "labels": ["Mass"] * 1_000_000}),
        Packed({"w": "no tensor"}, {"type": "update"}),  # type: ignore[dict-item]
    ],
    ids=["deep", "a set", "a tensor", "a number as a name", "a million labels", "text as a tensor"],
)
def test_what_is_no_message_is_rejected_and_the_exchange_goes_on(packed: Packed, tmp_path: Path) -> None:
    inbox = Inbox(tmp_path / "spool", lambda *_, **__: None)
    expected = Expectation("hello", 0, 0, "", (), (), Egress({}, {}))
    inbox.open({site: (Payload("hello"), expected) for site in ("a", "b")})
    inbox.receive("a", packed)
    lines = inbox.close({})
    assert lines["a"]["status"] == "rejected"
    assert lines["a"]["reason"]
    assert lines["b"]["status"] == "missing"
