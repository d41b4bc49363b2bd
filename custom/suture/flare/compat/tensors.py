"""Tensors within FLARE's messages, and in files beside them within one machine.

FLARE 2.9.0: a sender offers each tensor for download, in parts that the receiver requests. A message is
asked for again when it has not come within `communication_timeout`, however far it is, so that large ones
would never pass a slow line. Where there is none, one message takes less time, and less memory at the
server. FLARE's own `tensor_download_chunk_size: 0` puts every tensor into the message, however large, and
copies it more often: of 28 MB, 34 ms of CPU to write and read them, not 12 (of 0.25 MB the same).
Where: nvflare/fuel/utils/fobs/decomposers/via_downloader.py: decompose
Expires with: test_flare_offers_a_small_tensor_for_download
"""

from __future__ import annotations

import logging
import math
import warnings
from typing import Any

import torch
from nvflare.apis.utils.decomposers import flare_decomposers
from nvflare.app_opt.pt.decomposers import TensorDecomposer
from nvflare.fuel.utils import fobs
from nvflare.fuel.utils.fobs.datum import Datum, DatumManager, DatumType
from nvflare.fuel.utils.fobs.decomposers.via_downloader import EncKey, EncType
from torch import Tensor

from suture.flare.compat.tensor_files import Incoming, Outgoing, bytes_of, folder
from suture.flare.workspace import is_simulated

log = logging.getLogger(__name__)

INLINE = 2 * 2**20
"""Bytes of tensors that travel within a message: on a slow line, too, they pass within a request's time."""

_INLINE_HERE = 32 * 2**20
"""The same within one machine, in the simulator."""

_INLINE = "suture.inline"
"""Key of FLARE's context of one message: bytes of tensors that are in it so far."""

LARGE = 2**16
"""Bytes of a tensor from which on it is a section of the message, which FLARE sends without copying it,
or lies in a file."""

_ONE_HEADER = 4096
"""Bytes of the header of safetensors that one tensor has."""

_FILES = "suture.files"
"""Key of the same context: the files of the message."""

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_TYPES = {str(t): t for t in (*_FLOATS, torch.int8, torch.int64)}
"""The types of such tensors, by the name that travels; others go as FLARE sends them."""


class Tensors(TensorDecomposer):
    """Puts tensors into the message, up to `INLINE` bytes; in the simulator, large ones into files."""

    def decompose(self, target: Any, manager: DatumManager | None = None) -> Any:
        if isinstance(target, Tensor) and manager:
            if place := _in_file(target, manager):
                return {EncKey.TYPE: EncType.NATIVE, EncKey.DATA: place}
            size = manager.fobs_ctx.get(_INLINE, 0) + target.numel() * target.element_size()
            if size <= (_INLINE_HERE if is_simulated() else INLINE):
                manager.fobs_ctx[_INLINE] = size
                return {EncKey.TYPE: EncType.NATIVE, EncKey.DATA: self.native_decompose(target, manager)}
        return super().decompose(target, manager)

    def native_decompose(self, target: Tensor, manager: DatumManager | None = None) -> bytes | list[Any]:
        """Return the bytes of safetensors; of a large tensor [the section's name, its type, its shape]."""
        if not _is_large(target) or manager is None:
            content: bytes = super().native_decompose(target.contiguous(), manager)
            return content
        section = Datum.blob_datum(bytes_of(target))
        manager.add_datum(section)
        return [section.datum_id, str(target.dtype), list(target.shape)]

    def native_recompose(self, data: bytes | list[Any], manager: DatumManager | None = None) -> Tensor:
        """Return the tensor of `native_decompose`, on the bytes that came.

        Raises:
            ValueError: what came is no tensor of that type and shape.
        """
        if not isinstance(data, list) or manager is None:
            if isinstance(data, bytes) and int.from_bytes(data[:8], "little") > _ONE_HEADER:
                raise ValueError("a tensor whose header is of many")
            tensor: Tensor = super().native_recompose(data, manager)
            return tensor
        match data:
            case [*place, str(type_), [*shape]] if type_ in _TYPES and all(map(_is_side, shape)):
                dtype = _TYPES[type_]
            case _:
                raise ValueError("a tensor of an unknown type, or of an impossible shape")
        match place:
            case [str(section)]:
                return _of_section(manager, section, shape, dtype)
            case [str(file), int(start)]:
                return _of_file(manager, file, start, shape, dtype)
        raise ValueError("a tensor has neither an inline section nor a file")


def _of_section(manager: DatumManager, name: str, shape: list[int], dtype: torch.dtype) -> Tensor:
    section = manager.get_datum(name)
    if section is None or section.datum_type != DatumType.BLOB:
        raise ValueError("a tensor without its bytes")
    if len(section.value) != math.prod(shape) * dtype.itemsize:
        raise ValueError("a tensor whose bytes do not fit its shape")
    return torch.frombuffer(section.value, dtype=dtype).view(shape)


def _of_file(manager: DatumManager, name: str, start: int, shape: list[int], dtype: torch.dtype) -> Tensor:
    if (where := folder()) is None:
        raise ValueError("a tensor in a file, which only the simulator has")
    incoming: Incoming = manager.fobs_ctx.setdefault(_FILES, Incoming(where))
    return incoming.take(name, start, shape, dtype)


def _is_large(tensor: Tensor) -> bool:
    return tensor.nbytes >= LARGE and str(tensor.dtype) in _TYPES


def _in_file(tensor: Tensor, manager: DatumManager) -> list[Any] | None:
    """Put a large tensor into a file, in the simulator; return [the file's name, its place, type, shape]."""
    where = folder()
    if where is None or not _is_large(tensor):
        return None
    if _FILES not in manager.fobs_ctx:
        manager.fobs_ctx[_FILES] = outgoing = Outgoing(where)
        manager.register_post_cb(lambda _: outgoing.close())
    try:
        name, start = manager.fobs_ctx[_FILES].put(tensor)
    except OSError as error:
        log.warning("a tensor is sent within its message, because its file could not be written: %s", error)
        return None
    return [name, start, str(tensor.dtype), list(tensor.shape)]


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
