"""Conversion of packed messages to FLARE's Shareable and back, and of settings to text."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.shareable import Shareable
from nvflare.apis.utils.decomposers import flare_decomposers
from nvflare.app_opt.pt.decomposers import TensorDecomposer
from nvflare.fuel.utils import fobs
from nvflare.fuel.utils.fobs.datum import Datum, DatumManager, DatumType
from nvflare.fuel.utils.fobs.decomposers.via_downloader import EncKey, EncType
from torch import Tensor

from suture.core.errors import ConfigError, RejectedUpdate, shown
from suture.flare.workspace import simulated
from suture.protocol.packing import Packed
from suture.protocol.privacy import NO_ENCRYPTION

_HEADER = "suture"

INLINE = 2 * 2**20
"""Bytes of tensors that travel within a message: on a slow line, too, they pass within a request's time."""

INLINE_HERE = 32 * 2**20
"""The same within one machine, in the simulator."""

_INLINE = "suture.inline"
"""Key of FLARE's context of one message: bytes of tensors that are in it so far."""

_LARGE = 2**16
"""Bytes of a tensor from which on it is a section of the message, which FLARE sends without copying it."""

_TYPES = {str(t): t for t in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64)}
"""The types of such tensors, by the name that travels; others go as FLARE sends them."""


class Tensors(TensorDecomposer):
    """Puts tensors into the message, up to `INLINE` bytes.

    FLARE offers tensors for download, which the receiver requests in parts. A message is asked for again when
    it has not come within `communication_timeout`, however far it is, so that large ones would never pass a
    slow line. Where there is none, one message takes less time, and less memory at the server.
    """

    def decompose(self, target: Any, manager: DatumManager | None = None) -> Any:
        if isinstance(target, Tensor) and manager:
            size = manager.fobs_ctx.get(_INLINE, 0) + target.numel() * target.element_size()
            if size <= (INLINE_HERE if simulated() else INLINE):
                manager.fobs_ctx[_INLINE] = size
                return {EncKey.TYPE: EncType.NATIVE, EncKey.DATA: self.native_decompose(target, manager)}
        return super().decompose(target, manager)

    def native_decompose(self, target: Tensor, manager: DatumManager | None = None) -> bytes | list[Any]:
        """Return the bytes of safetensors; of a large tensor [the section's name, its type, its shape]."""
        large = target.numel() * target.element_size() >= _LARGE
        if not large or str(target.dtype) not in _TYPES or manager is None:
            content: bytes = super().native_decompose(target.contiguous(), manager)
            return content
        section = Datum.blob_datum(target.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        manager.add_datum(section)
        return [section.datum_id, str(target.dtype), list(target.shape)]

    def native_recompose(self, data: bytes | list[Any], manager: DatumManager | None = None) -> Tensor:
        """Return the tensor of `native_decompose`, on the bytes that came.

        Raises:
            ValueError: what came is no tensor of that type and shape.
        """
        if not isinstance(data, list) or manager is None:
            tensor: Tensor = super().native_recompose(data, manager)
            return tensor
        match data:
            case [str(name), str(type_), [*shape]] if type_ in _TYPES and all(map(_is_side, shape)):
                section = manager.get_datum(name)
            case _:
                raise ValueError("a tensor of an unknown type, or of an impossible shape")
        if section is None or section.datum_type != DatumType.BLOB:
            raise ValueError("a tensor without its bytes")
        if len(section.value) != math.prod(shape) * _TYPES[type_].itemsize:
            raise ValueError("a tensor whose bytes do not fit its shape")
        return torch.frombuffer(section.value, dtype=_TYPES[type_]).view(shape)


def _is_side(value: object) -> bool:
    return type(value) is int and value > 0


def register() -> None:
    """Register FLARE's own messages and torch tensors with its serialiser; call it once in each process.

    A serialiser that meets a Shareable before this treats it as a class without fields, until the process
    ends, and writes it empty.
    """
    flare_decomposers.register()
    fobs.register(Tensors)
    # The bytes of a section belong to its tensor alone, so that writing to them would harm nobody.
    warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)


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
        raise RejectedUpdate("not a message of suture: it is no DXO") from None
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
        raise ConfigError(f"the job's settings are no JSON text ({error}); export the job again") from error
    if not isinstance(settings, dict):
        raise ConfigError("the job's settings are no table; export the job again")
    return settings
