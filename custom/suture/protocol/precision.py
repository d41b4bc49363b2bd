"""Transport in fewer bits: in a round of training, the model's weights travel in 16 or in 8 bits.

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

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from suture.core.errors import RejectedUpdate
from suture.protocol.egress import Egress, Form, Layout, Shapes
from suture.protocol.egress import Transport as Transport
from suture.protocol.messages import TaskData, Update
from suture.protocol.packing import Packed

"""The type in which the model's float32 tensors travel in a round of training."""

VARIANCE = ".running_var"
"""The end of the names of batch norm's variances, which must not become negative."""

BLOCK = 128
"""Numbers of a row that share a scale: with it, they take 0.26 of the bytes of float32."""

M = TypeVar("M", TaskData, Update)

_GROUPS = ("shared/", "head/")
_LARGEST = torch.finfo(torch.float16).max
_CODES, _SCALE = 127, 4  # the largest code; the bytes of a scale
_MOST = float(torch.tensor(_LARGEST) / _CODES)  # the largest scale, rounded as `_encoded` rounds it


def narrow(tensor: Tensor, transport: Transport) -> Tensor:
    """Return a float32 tensor as it travels: float16, or int8 ``[n, row + 4 blocks]``, see `_encoded`.

    It is unchanged where a number of it is beyond the range of float16, or is none.
    """
    if tensor.dtype != torch.float32 or transport == "float32":
        return tensor
    if tensor.numel():
        low, high = tensor.aminmax()
        if not bool((low >= -_LARGEST) & (high <= _LARGEST)):
            return tensor
    return _encoded(tensor) if transport == "int8" and _in_bytes(tuple(tensor.shape)) else tensor.half()


def _in_bytes(shape: tuple[int, ...]) -> tuple[int, int] | None:
    """The shape of the int8 tensor in which one of this shape travels; None where it travels in float16."""
    row = math.prod(shape[1:])
    width = row + _SCALE * math.ceil(row / BLOCK)
    return (shape[0], width) if len(shape) > 1 and shape[0] and width < 2 * row else None


def _encoded(tensor: Tensor) -> Tensor:
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
    """The codes ``[n, row]`` and the scales ``[n, blocks]`` of what `_encoded` has made."""
    length = math.prod(shape[1:])
    scales = tensor[:, length:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return tensor[:, :length], scales


def _decoded(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
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


def _widened(name: str, tensor: Tensor, form: Form, transport: Transport) -> Tensor:
    if not check_narrowed(name, tensor, form, transport):
        return tensor
    return _decoded(tensor, form[0]) if tensor.dtype == torch.int8 else tensor.float()


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


def received(payload: TaskData, layout: Layout, transport: Transport) -> TaskData:
    """Return the payload on which a site trains: what arrived in fewer bits, in float32.

    Args:
        layout: of what is exchanged each round, by the site's own model.

    Raises:
        RejectedUpdate: a tensor in fewer bits does not fit the layout.
    """
    if transport == "float32":
        return payload
    forms = _forms(layout.shared, layout.head, len(payload.labels))
    return _each(payload, lambda n, t: _widened(n, t, forms[n], transport) if n in forms else t)


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


def restored(update: Update, model: TaskData, egress: Egress, transport: Transport) -> Update:
    """Return the weights, or gradients, that an update stands for, in the types that `egress` declares.

    A variance of batch norm that becomes negative, because the two bases differ by a rounding, is 0.

    Args:
        model: what the server has sent, before it was converted.
    """
    if transport == "float32":
        return update
    bases, forms = _bases(update, model), _forms(egress.shared, egress.head, len(update.labels))

    def converted(name: str, tensor: Tensor) -> Tensor:
        change = _widened(name, tensor, forms[name], transport)
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
