"""Conversion of packed messages to FLARE's Shareable and back."""

from __future__ import annotations

from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.shareable import Shareable

from suture.core.errors import RejectedUpdate, show_value
from suture.core.privacy import NO_ENCRYPTION
from suture.protocol.packing import Packed

_HEADER = "suture"


def to_shareable(packed: Packed) -> Shareable:
    """Return a Shareable with the tensors as the weights of a DXO and the header as its meta."""
    return DXO(DataKind.WEIGHTS, dict(packed.tensors), {_HEADER: dict(packed.header)}).to_shareable()


def from_shareable_(shareable: Shareable) -> Packed:
    """Return the packed message of a Shareable.

    Raises:
        RejectedUpdate: it is no DXO of weights, is encrypted, or its meta has more than the header.
    """
    try:
        dxo = from_shareable(shareable)
    except Exception:  # noqa: BLE001 - FLARE's code has no one error for what is no DXO
        raise RejectedUpdate("not a message of suture: it is not a DXO") from None
    if not isinstance(dxo.data_kind, str) or dxo.data_kind != DataKind.WEIGHTS:
        raise RejectedUpdate(f"unexpected kind of data {show_value(dxo.data_kind)}")
    if not isinstance(dxo.data, dict):
        raise RejectedUpdate("the message has no tensors")
    if {MetaKey.PROCESSED_ALGORITHM, MetaKey.PROCESSED_KEYS} & dxo.meta.keys():
        raise RejectedUpdate(NO_ENCRYPTION)
    if stray := dxo.meta.keys() - {_HEADER}:
        raise RejectedUpdate(f"undeclared field {show_value(min(map(str, stray)))}")
    header = dxo.meta.get(_HEADER)
    if not isinstance(header, dict):
        raise RejectedUpdate("the message has no header")
    return Packed(dxo.data, header)
