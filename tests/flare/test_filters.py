"""FLARE's form of a message, and the site's filter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.fuel.utils import fobs

from suture.core.errors import RejectedUpdate
from suture.flare.codec import from_shareable_, to_shareable
from suture.flare.compat.tensors import register
from suture.flare.executor import ALLOWED, EgressFilter
from suture.protocol.check import AllowedReply
from suture.protocol.egress import Egress
from suture.protocol.messages import Abstain, TaskData, Update, ones
from suture.protocol.packing import Packed, pack, unpack

F32 = "torch.float32"
UPDATE = Update(1, ("Mass",), {"w": torch.arange(3.0)}, {"b": torch.ones(1)}, ones(("Mass",)))
REPLY = AllowedReply(
    TaskData("train", 1, labels=("Mass",)), Egress({"w": ((3,), F32)}, {"b": ((), F32)}), ("Mass",)
)


def context(allowed: AllowedReply | None = REPLY) -> FLContext:
    fl_ctx = FLContext()
    fl_ctx.set_prop(ALLOWED, allowed, private=True, sticky=False)
    return fl_ctx


def test_a_message_survives_flares_serialiser() -> None:
    register()
    sent = fobs.dumps(to_shareable(pack(UPDATE)))
    got = unpack(from_shareable_(fobs.loads(sent)))
    assert isinstance(got, Update)
    assert torch.equal(got.shared["w"], UPDATE.shared["w"])
    assert got.labels == ("Mass",)


def test_what_was_declared_passes_unchanged() -> None:
    out = EgressFilter().process(to_shareable(pack(UPDATE)), context())
    assert pack(unpack(from_shareable_(out))).header == pack(UPDATE).header


def stray(where: str) -> Shareable:
    packed = pack(UPDATE)
    if where == "tensor":
        return to_shareable(Packed({**packed.tensors, "shared/more": torch.ones(1)}, packed.header))
    if where == "size":
        return to_shareable(Packed({**packed.tensors, "shared/w": torch.ones(4)}, packed.header))
    if where == "field":
        return to_shareable(Packed(packed.tensors, {**packed.header, "note": "patient 17"}))
    if where == "meta":
        dxo = from_shareable(to_shareable(packed))
        dxo.set_meta_prop("diary", "patient 17")
        return dxo.to_shareable()
    if where == "kind":
        return DXO(DataKind.METRICS, {"loss": 1.0}).to_shareable()
    if where == "task":
        return to_shareable(pack(TaskData("train")))
    return Shareable({"raw": b"pixels"})


@pytest.mark.parametrize("where", ["tensor", "size", "field", "meta", "kind", "task", "raw"])
def test_anything_undeclared_raises(where: str) -> None:
    with pytest.raises(RejectedUpdate):
        EgressFilter().process(stray(where), context())


def test_an_encrypted_answer_is_refused_with_the_reason() -> None:
    """What FLARE's HEModelEncryptor makes of an update, added to the job by hand."""
    dxo = from_shareable(to_shareable(pack(UPDATE)))
    dxo.set_meta_prop(MetaKey.PROCESSED_KEYS, {"shared/w": True})
    dxo.set_meta_prop(MetaKey.PROCESSED_ALGORITHM, "CKKS")
    with pytest.raises(RejectedUpdate, match="homomorphic encryption is not supported"):
        from_shareable_(dxo.to_shareable())


def test_a_return_code_is_a_word_of_flares() -> None:
    out = EgressFilter().process(make_reply("patient 17"), context())
    assert out.get_return_code() == ReturnCode.EXECUTION_EXCEPTION


def test_nothing_leaves_unasked() -> None:
    with pytest.raises(RejectedUpdate, match="held back"):
        EgressFilter().process(to_shareable(pack(UPDATE)), context(None))


def test_abstentions_and_error_codes_pass_without_their_luggage() -> None:
    out = EgressFilter().process(to_shareable(pack(Abstain("disk_full", "OSError"))), context(None))
    assert isinstance(unpack(from_shareable_(out)), Abstain)
    reply: Any = make_reply(ReturnCode.EXECUTION_EXCEPTION)
    reply["text"] = "patient 17"
    out = EgressFilter().process(reply, context())
    assert out.get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    assert "text" not in out


def test_an_answer_is_rebuilt_so_that_no_form_of_a_value_carries_more_than_the_value() -> None:
    """A number as text is valid, and its digits could say anything."""
    packed = pack(UPDATE)
    disguised = Packed(packed.tensors, {**packed.header, "weight": "1.00000000000000000", "round": "1"})
    out = from_shareable_(EgressFilter().process(to_shareable(disguised), context()))
    assert out.header == packed.header
    assert type(out.header["weight"]) is float
