"""Conversion of packed messages to FLARE's Shareable and back, and of settings to text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.shareable import Shareable

from suture.core.errors import ConfigError, RejectedUpdate, shown
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
        raise RejectedUpdate(f"unexpected kind of data {shown(dxo.data_kind)}")
    if not isinstance(dxo.data, dict):
        raise RejectedUpdate("the message has no tensors")
    if {MetaKey.PROCESSED_ALGORITHM, MetaKey.PROCESSED_KEYS} & dxo.meta.keys():
        raise RejectedUpdate(NO_ENCRYPTION)
    if stray := dxo.meta.keys() - {_HEADER}:
        raise RejectedUpdate(f"undeclared field {shown(min(map(str, stray)))}")
    header = dxo.meta.get(_HEADER)
    if not isinstance(header, dict):
        raise RejectedUpdate("the message has no header")
    return Packed(dxo.data, header)


def as_text(settings: Mapping[str, Any]) -> str:
    """Return settings as an argument of a component of a job.

    As text, because FLARE takes a dict with a `path` for the configuration of a component and builds it; and
    with angle brackets for braces, because it replaces what is in braces in a text.
    """
    text = json.dumps(settings).replace("<", r"\u003c").replace(">", r"\u003e")
    return text.replace("{", "<").replace("}", ">")


def from_text(text: str) -> dict[str, Any]:
    """Return the settings of `as_text`.

    Raises:
        ConfigError: the text holds something else.
    """
    try:
        settings = json.loads(text.replace("<", "{").replace(">", "}"))
    except (AttributeError, ValueError, RecursionError) as error:
        raise ConfigError(f"the job's settings are not JSON ({error}); export the job again") from error
    if not isinstance(settings, dict):
        raise ConfigError("the job's settings are not a table; export the job again")
    return settings
