"""What FLARE hands over is a message or a rejection, whatever the other side has put into it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nvflare.apis.shareable import Shareable

from suture.core.errors import RejectedUpdate
from suture.flare.codec import from_shareable_, to_shareable
from suture.protocol.packing import Packed


def deep() -> object:
    value: object = 0
    for _ in range(20_000):
        value = [value]
    return value


@pytest.mark.parametrize("strange", [torch.ones(3), deep(), "\ud800", None, 3, {}, [1]], ids=type)
@pytest.mark.parametrize(
    "place",
    [("DXO",), ("__headers__",), ("__headers__", "__content_type__"), ("DXO", "kind"), ("DXO", "data")],
    ids=".".join,
)
def test_a_strange_value_in_any_place_is_rejected(place: tuple[str, ...], strange: Any) -> None:
    shareable = to_shareable(Packed({"shared/w": torch.ones(2)}, {"type": "update"}))
    inner: Any = shareable
    for key in place[:-1]:
        inner = inner[key]
    assert place[-1] in inner
    inner[place[-1]] = strange
    if place == ("DXO", "data") and (strange is None or strange == {}):  # FLARE takes both for no tensors
        assert from_shareable_(shareable).tensors == {}
        return
    with pytest.raises(RejectedUpdate) as caught:
        from_shareable_(shareable)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300


def test_an_empty_shareable_is_rejected() -> None:
    with pytest.raises(RejectedUpdate, match="no DXO"):
        from_shareable_(Shareable())
