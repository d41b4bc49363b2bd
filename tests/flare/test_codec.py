"""What FLARE hands over is a message or a rejection, whatever the other side has put into it."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from nvflare.apis.shareable import Shareable
from nvflare.fuel.utils import fobs
from nvflare.fuel.utils.fobs.datum import Datum, DatumManager

from suture.core.errors import RejectedUpdate
from suture.flare.codec import from_shareable_, to_shareable
from suture.flare.compat.tensors import Tensors, register
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
    with pytest.raises(RejectedUpdate, match="DXO"):
        from_shareable_(Shareable())


TYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]


def passed_on(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the other side of FLARE's serialiser, both with sections as a list and as one piece."""
    register()
    sent = to_shareable(Packed({"shared/w": tensor}, {"type": "update"}))
    as_list = fobs.loads(fobs.dumps(sent, buffer_list=True, fobs_ctx={}), fobs_ctx={})
    as_one = fobs.loads(fobs.dumps(sent, fobs_ctx={}), fobs_ctx={})
    assert torch.equal(*(from_shareable_(each).tensors["shared/w"] for each in (as_list, as_one)))
    found: torch.Tensor = from_shareable_(as_list).tensors["shared/w"]
    return found


@given(
    st.sampled_from(TYPES),
    st.sampled_from([(), (0,), (3,), (2**15 - 1,), (2**15,), (2**14 + 1, 3), (1, 2**16, 1)]),
    st.booleans(),
)
def test_tensors_of_any_size_pass_flares_serialiser(
    type_: torch.dtype, shape: tuple[int, ...], transposed: bool
) -> None:
    tensor = torch.arange(prod(shape)).remainder(251).to(type_).view(shape)
    tensor = tensor.mT if transposed and len(shape) > 1 else tensor
    found = passed_on(tensor)
    assert found.dtype == tensor.dtype
    assert torch.equal(found, tensor)


def test_a_large_tensor_is_sent_from_where_it_is() -> None:
    register()
    tensor = torch.arange(2.0**16)
    pieces = fobs.dumps({"w": tensor}, buffer_list=True, fobs_ctx={})
    own = [piece for piece in pieces if isinstance(piece, memoryview)]
    assert [torch.frombuffer(piece, dtype=torch.float32).data_ptr() for piece in own] == [tensor.data_ptr()]


def test_nobody_else_sees_what_is_written_into_a_tensor_that_came() -> None:
    tensor = torch.ones(2**16)
    found = passed_on(tensor)
    found += 1
    assert tensor.unique().tolist() == [1]
    assert found.unique().tolist() == [2]


@pytest.mark.parametrize(
    "claimed",
    [
        ["other", "torch.float32", [4]],
        ["w", "torch.float32", [5]],
        ["w", "torch.float32", [-2, -2]],
        ["w", "torch.float32", [True, 4]],
        ["w", "torch.float32", [4.0]],
        ["w", "torch.float32", "4"],
        ["w", "torch.qint8", [16]],
        ["w", "torch.float32"],
        ["w", "torch.float32", [4], 1],
        [["w"], "torch.float32", [4]],
        ["text", "torch.float32", [4]],
        [],
    ],
    ids=str,
)
def test_a_tensor_that_is_not_as_it_claims_is_refused(claimed: list[Any]) -> None:
    manager = DatumManager()
    sections = {"w": Datum.blob_datum(bytes(16)), "text": Datum.text_datum("0" * 16)}
    for name, section in sections.items():
        section.datum_id = name
        manager.add_datum(section)
    assert Tensors().native_recompose(["w", "torch.float32", [2, 2]], manager).tolist() == [[0, 0], [0, 0]]
    with pytest.raises(ValueError, match="a tensor"):
        Tensors().native_recompose(claimed, manager)


def test_a_tensor_with_the_header_of_many_is_refused_before_it_is_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a message within a message, such a header would be parsed for minutes."""
    many = safetensors.torch.save({f"t{i}": torch.zeros(0) for i in range(200)})
    monkeypatch.setattr("nvflare.app_opt.pt.decomposers.load", lambda _: pytest.fail("it was parsed"))
    with pytest.raises(ValueError, match="header is of many"):
        Tensors().native_recompose(many)
