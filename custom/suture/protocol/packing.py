"""Messages and states as named tensors and a JSON header: the form that is sent and saved.

The name of each tensor begins with the field that it belongs to (``shared/backbone.conv.weight``).
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import torch
from blake3 import blake3
from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from suture.core.errors import RejectedUpdate, SutureError, as_word, shown
from suture.core.files import replacing
from suture.core.plain import LARGEST_FILE, open_regular, parse_json
from suture.core.validation import in_words
from suture.protocol.messages import (
    MOST,
    Abstain,
    Evaluation,
    Masking,
    Message,
    Scores,
    SiteInfo,
    TaskData,
    Update,
)

# The words of the headers stay as they are when a class is renamed: kept answers and requests hold them.
_TYPES: dict[str, type[Message]] = {
    "payload": TaskData,
    "siteinfo": SiteInfo,
    "masking": Masking,
    "update": Update,
    "scores": Scores,
    "evaluation": Evaluation,
    "abstain": Abstain,
}
_WORDS = {kind: word for word, kind in _TYPES.items()}
_ADAPTERS: dict[type[Message], TypeAdapter[Any]] = {t: TypeAdapter(t) for t in _TYPES.values()}
_TENSORS: dict[type[Message], dict[str, bool]] = {
    kind: {
        name: hint is not Tensor
        for name, hint in get_type_hints(kind).items()
        if hint in (Tensor, dict[str, Tensor])
    }
    for kind in _TYPES.values()
}
"""The fields of each message that are tensors, by their types: whether each is several, by name."""

_M = TypeVar("_M", TaskData, Update)

_NO_CHECKSUM = "-" * 8

_MOST_STORED = 100_000
"""Largest number of tensors in a file: a table of vectors by name may have many."""

TEXT = 4 * 2**20
"""Largest number of characters in a header: the most classes, twice, with names of 150 characters; or three
times, with names of 90 characters and codes.
"""

VALUES = 200_000
"""Largest number of values in a header."""

_DEPTH = 6
"""Largest depth to which the values of a header are nested."""


@dataclass(frozen=True)
class Packed:
    """Named tensors and a JSON header."""

    tensors: Mapping[str, Tensor]
    header: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        """The size of the tensors and the header in bytes."""
        return sum(t.nbytes for t in self.tensors.values()) + len(json.dumps(self.header))


def pack(message: Message) -> Packed:
    """Convert a message into tensors and a header. Contiguous tensors of the CPU are not copied."""
    apart = _TENSORS[type(message)]
    names = [field.name for field in dataclasses.fields(message) if field.name not in apart]
    header = {"type": _WORDS[type(message)], **{name: getattr(message, name) for name in names}}
    return Packed(tensors_of(message), to_jsonable_python(header))


def without_tensors(message: _M) -> _M:
    """Return a message with no tensor by name, and no value in any other."""
    apart = _TENSORS[type(message)]
    empty = {field: {} if named else getattr(message, field)[:0].clone() for field, named in apart.items()}
    return dataclasses.replace(message, **empty)


def tensors_of(message: Message) -> dict[str, Tensor]:
    """Return the tensors of a message, on the CPU, each under its field and name; see `pack`."""
    tensors: dict[str, Tensor] = {}
    for field, named in _TENSORS[type(message)].items():
        value = getattr(message, field)
        each = {f"{field}/{name}": t for name, t in value.items()} if named else {field: value}
        tensors |= {name: tensor.cpu().contiguous() for name, tensor in each.items()}
    return tensors


def tensor_fields(kind: type[Message], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the values of a message's tensor fields from tensors that `tensors_of` has named.

    Raises:
        RejectedUpdate: a tensor belongs to no field of this type of message.
    """
    groups = _TENSORS[kind]
    fields: dict[str, Any] = {group: {} for group, named in groups.items() if named}
    for name, tensor in tensors.items():
        group, _, rest = name.partition("/")
        if groups.get(name) is False:
            fields[name] = tensor
        elif groups.get(group) and rest:
            fields[group][rest] = tensor
        else:
            raise RejectedUpdate(f"{kind.__name__}: undeclared tensor {name[:200]!r}")
    return fields


def unpack(packed: Packed) -> Message:
    """Convert tensors and a header into the message that they represent, and validate it.

    Raises:
        RejectedUpdate: the type, a field or a tensor is unknown, a value has the wrong type or lies outside
            its range, or there is more than any message holds.
    """
    check_size(packed)
    return message_of(packed)


def message_of(packed: Packed) -> Message:
    """Convert what `check_size` has passed; see `unpack`."""
    fields = dict(packed.header)
    kind = _TYPES.get(str(fields.pop("type", None)))
    if kind is None:
        raise RejectedUpdate(f"unknown message type {shown(packed.header.get('type'))}")
    if stray := _TENSORS[kind].keys() & fields.keys():
        raise RejectedUpdate(f"{kind.__name__}: {min(stray)} must be tensors")
    fields |= tensor_fields(kind, packed.tensors)
    try:
        message: Message = _ADAPTERS[kind].validate_python(fields)
    except ValidationError as error:
        raise RejectedUpdate(f"{kind.__name__}: {_first(error)}") from None
    return message


def check_size(packed: Packed) -> None:
    """Refuse what is larger than any message, before it is converted; needs no memory of its own.

    Raises:
        RejectedUpdate: the header has too much text, too many values, too deep a nesting or a value that JSON
            does not have; or there are too many tensors, or ones that are sparse, without values or without
            a text as a name.
    """
    if len(packed.tensors) > MOST:
        raise RejectedUpdate(f"{len(packed.tensors)} tensors; the limit is {MOST}")
    if not isinstance(packed.header, Mapping):
        raise RejectedUpdate("the message has no header")
    if any(not isinstance(name, str) for name in packed.tensors):
        raise RejectedUpdate("a tensor whose name is not text")
    if any(not isinstance(t, Tensor) or t.layout != torch.strided for t in packed.tensors.values()):
        raise RejectedUpdate("a value that is not a tensor, or a sparse tensor")
    if any(t.is_nested or t.requires_grad for t in packed.tensors.values()):
        raise RejectedUpdate("a nested tensor, or one with a gradient")
    if any(t.is_meta for t in packed.tensors.values()):
        raise RejectedUpdate("a tensor without values (of the device meta)")
    text, values = 0, 0
    left: list[tuple[Any, int]] = [(packed.header, 0)]
    while left:
        value, depth = left.pop()
        inner: Iterable[Any] = ()
        if isinstance(value, Mapping):
            if not all(isinstance(key, str) for key in value):
                raise RejectedUpdate("the header has a key that is not text")
            values, inner = values + len(value), chain.from_iterable(value.items())
        elif isinstance(value, (list, tuple)):
            values, inner = values + len(value), value
        elif isinstance(value, str):
            text += len(value)
        elif value is not None and not isinstance(value, (int, float)):
            raise RejectedUpdate(f"the header has a {type(value).__name__} that does not belong there")
        elif isinstance(value, int) and abs(value) >= 2**63:
            raise RejectedUpdate("the header has an integer of more than 64 bits")
        if values > VALUES or text > TEXT or depth > _DEPTH:
            raise RejectedUpdate("the header exceeds the size limit")
        left += ((one, depth + 1) for one in inner)


def _first(error: ValidationError) -> str:
    """Describe the first problem of a validation, without the value: it may not be fit for a log."""
    problem = error.errors(include_input=False, include_url=False)[0]
    where = ".".join(map(as_word, problem["loc"]))
    return f"{where}: {in_words(problem)}"


def save(path: Path, packed: Packed, durable: bool = True) -> None:
    """Write tensors and a header to `path`, completely or not at all, with a checksum.

    Args:
        durable: see `replacing`. A file that only this process reads back needs no checksum either.

    Raises:
        DiskError: the disk is full or the folder cannot be written; the file that was there is untouched.
    """
    with replacing(path, durable, private=True) as temporary:
        try:
            header = json.dumps(packed.header, allow_nan=False)
            checksum = _checksum(packed.tensors, header) if durable else _NO_CHECKSUM
            # One field: safetensors writes several in any order, and equal states must give equal files.
            save_file(_apart(packed.tensors), temporary, {"suture": checksum + header})
        except SafetensorError as error:
            # safetensors gives the system's error only as text: "... (os error 28)".
            code = re.search(r"os error (\d+)", str(error))
            number = int(code[1]) if code else errno.EIO
            raise OSError(number, os.strerror(number), str(path)) from error


def load(path: Path) -> Packed:
    """Read what `save` has written.

    Raises:
        SutureError: the file is corrupt, or `save` did not write it.
    """
    try:
        with _opened(path) as file:
            text = file.metadata()["suture"]
            checksum, header = text[:8], text[8:]
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if checksum != _NO_CHECKSUM and checksum != _checksum(tensors, header):
                raise ValueError("its content was changed after it was written")
            content = parse_json(header)
            if not isinstance(content, dict):
                raise ValueError("its header is not a JSON object")
            return Packed(tensors, content)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise SutureError(f"{path} is corrupt ({as_word(error)})") from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a file of safetensors that anybody may have made.

    Raises:
        OSError: the file cannot be read.
        SafetensorError: it is none, or holds more than any model.
    """
    with _opened(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    with open_regular(path) as raw:
        size = int.from_bytes(raw.read(8), "little")
        _check_header(raw.read(min(size, LARGEST_FILE + 1)))
        with safe_open(f"/dev/fd/{raw.fileno()}", framework="pt") as file:
            if len(file.keys()) > _MOST_STORED:
                raise SafetensorError(f"it contains more than {_MOST_STORED:,} tensors")
            yield file


def _check_header(header: bytes) -> None:
    """Refuse the header of a file of safetensors that holds more than any model, before it is parsed.

    Raises:
        SafetensorError: it does.
    """
    # Marks in texts count too: those of a state's own header, which has fewer.
    if len(header) > LARGEST_FILE or max(header.count(b"{") / 2, header.count(b",") / 10) > _MOST_STORED:
        raise SafetensorError(f"its header lists more than {_MOST_STORED:,} tensors")


def digest(packed: Packed) -> str:
    """Return the BLAKE3 of all names, types, shapes, bytes and the header, in hexadecimal digits.

    A cryptographic hash, as SHA-256 is, in a quarter of its time.
    """
    total = blake3(json.dumps(packed.header, sort_keys=True).encode())
    for name, content in _contents(packed.tensors):
        tensor = packed.tensors[name]
        total.update(f"\0{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        total.update(content)
    return total.hexdigest()


def _checksum(tensors: Mapping[str, Tensor], header: str) -> str:
    """Return a CRC-32 of all names, bytes and the header: safetensors does not detect damaged bytes."""
    total = zlib.crc32(header.encode())
    for name, content in _contents(tensors):
        total = zlib.crc32(name.encode(), total)
        total = zlib.crc32(content, total)
    return f"{total:08x}"


def _contents(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, memoryview]]:
    """Yield the bytes of each tensor, in the order of the names."""
    for name in sorted(tensors):
        yield name, tensors[name].detach().contiguous().view(-1).view(torch.uint8).numpy().data


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy what shares memory, as tied tensors do: safetensors refuses it."""
    seen: set[int] = set()
    apart = {}
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if memory in seen else tensor
        seen.add(memory)
    return apart
