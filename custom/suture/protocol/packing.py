"""Messages and states as named tensors and a JSON header: the form that is sent and saved.

The name of each tensor begins with the field that it belongs to (``shared/backbone.conv.weight``).

Transport in fewer bits: in a round of training, the model's weights travel in 16 or in 8 bits.

    to a site:        q(w)               the site trains on exactly these values
    to the server:    q(v - q(w))        v is what the site has trained
    the server takes: w + q(v - q(w))    w in float32, as it holds it

``float16``: q rounds float32 to the nearest float16 of IEEE 754: the error is at most 2^-11 of a number, or
2^-25. ``int8``: each row of a tensor (its first axis) is cut into blocks of `BLOCK` numbers, with a scale
s = max |x| / 127 each (block-wise absmax quantisation as in Dettmers et al., 8-bit Optimizers via Block-wise
Quantization, ICLR 2022, but with equally spaced codes): q(x) = s round(x / s), whose error is at most s / 2.
Vectors (biases, batch norm) travel in float16, because a block would round small variances to 0; and so do
rows of up to 4 numbers, of which float16 has fewer bytes.

Sites send changes, which are smaller than weights and so lose less; the server adds them to its own weights,
so that the rounding of what it sends does not add up over the rounds. Gradients travel as they are. Clipping
and noise come before the rounding, so ε does not change. No error is fed back into the next round: a site
would have to keep a residual as large as the model, and `benchmarks/studies.py transport` finds no loss.

A tensor with a number beyond the range of float16 travels in float32, by its values, in either direction.
Only float32 tensors of ``shared`` and ``head`` are converted: integers, channels and weights of means are
exact, as are the models that are evaluated and the tensors that are sent once.

FLARE's own quantisation (nvflare.app_opt.pt.quantization) is not used: it needs bitsandbytes, of an extra of
FLARE, and a GPU for its 8 bits; code book and scales come from the message, unchecked; as a filter it would
change an answer after the site has checked and kept it; and it clamps what float16 cannot hold.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import torch
import torch.nn.functional as F
from blake3 import blake3
from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from suture.core.errors import RejectedUpdate, SutureError, as_word, show_value
from suture.core.files import LARGEST_FILE, open_regular, parse_json, replacing
from suture.core.validation import in_words
from suture.protocol.egress import Egress, Form, Layout, Shapes
from suture.protocol.egress import Transport as Transport
from suture.protocol.messages import (
    MOST_TENSORS,
    Abstain,
    Evaluation,
    Masking,
    Message,
    Scores,
    SiteInfo,
    TaskData,
    Update,
)

VARIANCE = ".running_var"
"""The end of the names of batch norm's variances, which must not become negative."""

BLOCK = 128
"""Numbers of a row that share a scale: with it, they take 0.26 of the bytes of float32."""

M = TypeVar("M", TaskData, Update)

_GROUPS = ("shared/", "head/")

_LARGEST = torch.finfo(torch.float16).max

_CODES, _SCALE = 127, 4  # the largest code; the bytes of a scale

_MOST = float(torch.tensor(_LARGEST) / _CODES)  # the largest scale, rounded as `_encode` rounds it


def narrow(tensor: Tensor, transport: Transport) -> Tensor:
    """Return a float32 tensor as it travels: float16, or int8 ``[n, row + 4 blocks]``, see `_encode`.

    It is unchanged where a number of it is beyond the range of float16, or is none.
    """
    if tensor.dtype != torch.float32 or transport == "float32":
        return tensor
    if tensor.numel():
        low, high = tensor.aminmax()
        if not bool((low >= -_LARGEST) & (high <= _LARGEST)):
            return tensor
    return _encode(tensor) if transport == "int8" and _in_bytes(tuple(tensor.shape)) else tensor.half()


def _in_bytes(shape: tuple[int, ...]) -> tuple[int, int] | None:
    """The shape of the int8 tensor in which one of this shape travels; None where it travels in float16."""
    row = math.prod(shape[1:])
    width = row + _SCALE * math.ceil(row / BLOCK)
    return (shape[0], width) if len(shape) > 1 and shape[0] and width < 2 * row else None


def _encode(tensor: Tensor) -> Tensor:
    """Return int8 ``[n, row + 4 blocks]``: of each row the codes, then the bytes of its float32 scales."""
    rows = tensor.reshape(len(tensor), -1)
    length = rows.shape[1]
    blocks = F.pad(rows, (0, -length % BLOCK)).view(len(rows), -1, BLOCK)
    scales = blocks.abs().amax(dim=2) / _CODES
    # A scale of 0 has only zeros, or numbers so small that it underflows: they become 0.
    codes = (blocks / torch.where(scales > 0, scales, torch.inf).unsqueeze(2)).round_()
    codes = codes.clamp_(-_CODES, _CODES).to(torch.int8).view(len(rows), -1)[:, :length]
    return torch.cat([codes, scales.view(torch.int8)], dim=1)


def _parts(tensor: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The codes ``[n, row]`` and the scales ``[n, blocks]`` of what `_encode` has made."""
    length = math.prod(shape[1:])
    scales = tensor[:, length:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return tensor[:, :length], scales


def _decode(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    codes, scales = _parts(tensor, shape)
    each = scales.repeat_interleave(BLOCK, dim=1)[:, : codes.shape[1]]
    return codes.float().mul_(each).view(shape)


def check_narrowed(name: str, tensor: Tensor, form: Form, transport: Transport) -> bool:
    """Whether a tensor is one of this form in fewer bits; False where it is something else.

    Args:
        name: of the tensor, for the message.

    Raises:
        RejectedUpdate: it is in fewer bits and has another shape, or a scale that no tensor gives.
    """
    shape, dtype = form
    in_bytes = _in_bytes(shape) if transport == "int8" else None
    needs = {torch.float16: shape, torch.int8: in_bytes}.get(tensor.dtype)
    if needs is None or dtype != "torch.float32" or transport == "float32":
        return False
    if tuple(tensor.shape) != needs:
        raise RejectedUpdate(f"{name} has shape {tuple(tensor.shape)} instead of {needs} in {transport}")
    if tensor.dtype == torch.int8:
        _, scales = _parts(tensor, shape)
        if not bool(((scales >= 0) & (scales <= _MOST)).all()):  # no NaN passes
            raise RejectedUpdate(f"{name} has a scale that is negative, too large or not a number")
    return True


def _widen(name: str, tensor: Tensor, form: Form, transport: Transport) -> Tensor:
    if not check_narrowed(name, tensor, form, transport):
        return tensor
    return _decode(tensor, form[0]) if tensor.dtype == torch.int8 else tensor.float()


class Narrow:
    """Converts the payloads of one exchange; what several of them share is converted once."""

    def __init__(self) -> None:
        self._done: dict[tuple[int, Transport], tuple[Tensor, Tensor]] = {}

    def __call__(self, packed: Packed, transport: Transport) -> Packed:
        """Return a packed payload as it travels."""
        if transport == "float32":
            return packed

        def once(tensor: Tensor) -> Tensor:
            if (key := (id(tensor), transport)) not in self._done:
                # The tensor is held with its conversion: an identity is unique only while it lives.
                self._done[key] = tensor, narrow(tensor, transport)
            return self._done[key][1]

        tensors = {n: once(t) if n.startswith(_GROUPS) else t for n, t in packed.tensors.items()}
        return Packed(tensors, packed.header)


def restore_task(payload: TaskData, layout: Layout, transport: Transport) -> TaskData:
    """Return the payload on which a site trains: what arrived in fewer bits, in float32.

    Args:
        layout: of what is exchanged each round, by the site's own model.

    Raises:
        RejectedUpdate: a tensor in fewer bits does not fit the layout.
    """
    if transport == "float32":
        return payload
    forms = _forms(layout.shared, layout.head, len(payload.labels))
    return _each(payload, lambda n, t: _widen(n, t, forms[n], transport) if n in forms else t)


def sent(update: Update, trained_on: TaskData, transport: Transport) -> Update:
    """Return an update as it travels.

    Args:
        trained_on: what the site has received, in float32.
    """
    if transport == "float32":
        return update
    bases = _bases(update, trained_on)

    def converted(name: str, tensor: Tensor) -> Tensor:
        if tensor.dtype != torch.float32:
            return tensor
        # Of the weights as the site has received them, rounded: the server adds the change to its exact ones,
        # so what is rounded is a step and not the model.
        change = narrow(tensor - bases[name] if name in bases else tensor, transport)
        return change if change.dtype != torch.float32 else tensor

    return _each(update, converted)


def restore_update(update: Update, model: TaskData, egress: Egress, transport: Transport) -> Update:
    """Return the weights, or gradients, that an update stands for, in the types that `egress` declares.

    A variance of batch norm that becomes negative, because the two bases differ by a rounding, is 0.

    Args:
        model: what the server has sent, before it was converted.
    """
    if transport == "float32":
        return update
    bases, forms = _bases(update, model), _forms(egress.shared, egress.head, len(update.labels))

    def converted(name: str, tensor: Tensor) -> Tensor:
        change = _widen(name, tensor, forms[name], transport)
        if change is tensor or name not in bases:
            return change
        value = bases[name] + change
        return value.clamp_min(0) if name.endswith(VARIANCE) else value

    return _each(update, converted)


def _bases(update: Update, model: TaskData) -> Mapping[str, Tensor]:
    """Return the tensors of which an update sends the change."""
    return {} if update.kind == "gradient" else {**model.shared, **model.head}


def _forms(shared: Shapes, head: Shapes, classes: int) -> dict[str, Form]:
    """Return shape and type of each tensor, with a row for each class in those of the head."""
    return {**shared, **{name: ((classes, *row), dtype) for name, (row, dtype) in head.items()}}


def _each(message: M, convert: Callable[[str, Tensor], Tensor]) -> M:
    shared, head = ({n: convert(n, t) for n, t in part.items()} for part in (message.shared, message.head))
    return replace(message, shared=shared, head=head)


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
        raise RejectedUpdate(f"unknown message type {show_value(packed.header.get('type'))}")
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
    if len(packed.tensors) > MOST_TENSORS:
        raise RejectedUpdate(f"{len(packed.tensors)} tensors; the limit is {MOST_TENSORS}")
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
    pending: list[tuple[Any, int]] = [(packed.header, 0)]
    while pending:
        value, depth = pending.pop()
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
        pending += ((one, depth + 1) for one in inner)


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
        with _open(path) as file:
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
    with _open(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@contextmanager
def _open(path: Path) -> Iterator[Any]:
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
    memories: set[int] = set()
    apart = {}
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if memory in memories else tensor
        memories.add(memory)
    return apart
