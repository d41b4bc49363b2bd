"""Half-precision transport: in a round of training, the model's weights travel in 16 bits.

    to a site:        q(w)               the site trains on exactly these values
    to the server:    q(v - q(w))        v is what the site has trained
    the server takes: w + q(v - q(w))    w in float32, as it holds it

q rounds float32 to the nearest float16 of IEEE 754: the error is at most 2^-11 of a number, or 2^-25. Sites
send changes, which are smaller than weights and so lose less; the server adds them to its own weights, so
that the rounding of what it sends does not add up over the rounds. Gradients travel as they are. A tensor
with a number beyond the range of float16 travels in float32, by its values, in either direction. Only float32
tensors of ``shared`` and ``head`` are converted: integers, channels and weights of means are exact,
as are the models that are evaluated and the tensors that are sent once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from suture.protocol.egress import Egress
from suture.protocol.messages import TaskData, Update
from suture.protocol.packing import Packed

Transport = Literal["float32", "float16"]
"""The type in which the model's float32 tensors travel in a round of training."""

VARIANCE = ".running_var"
"""The end of the names of batch norm's variances, which must not become negative."""

_GROUPS = ("shared/", "head/")
_LARGEST = torch.finfo(torch.float16).max


def narrow(tensor: Tensor) -> Tensor:
    """Return a float32 tensor in float16; unchanged where a number of it is beyond that range, or is none."""
    if tensor.dtype != torch.float32:
        return tensor
    if not tensor.numel():
        return tensor.half()
    low, high = tensor.aminmax()
    return tensor.half() if bool((low >= -_LARGEST) & (high <= _LARGEST)) else tensor


class Narrow:
    """Converts the payloads of one exchange; what several of them share is converted once."""

    def __init__(self) -> None:
        self._done: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, packed: Packed) -> Packed:
        """Return a packed payload as it travels."""
        tensors = {n: self._once(t) if n.startswith(_GROUPS) else t for n, t in packed.tensors.items()}
        return Packed(tensors, packed.header)

    def _once(self, tensor: Tensor) -> Tensor:
        # The tensor is held with its conversion: an identity is unique only while it lives.
        return self._done.setdefault(id(tensor), (tensor, narrow(tensor)))[1]


def received(payload: TaskData) -> TaskData:
    """Return the payload on which a site trains: what arrived in float16, in float32."""
    shared, head = ({n: _widened(t) for n, t in part.items()} for part in (payload.shared, payload.head))
    return replace(payload, shared=shared, head=head)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype == torch.float16 else tensor


def sent(update: Update, trained_on: TaskData) -> Update:
    """Return an update as it travels.

    Args:
        trained_on: what the site has received, in float32.
    """
    bases = _bases(update, trained_on)

    def converted(name: str, tensor: Tensor) -> Tensor:
        if tensor.dtype != torch.float32:
            return tensor
        change = narrow(tensor - bases[name] if name in bases else tensor)
        return change if change.dtype == torch.float16 else tensor

    return _each(update, converted)


def restored(update: Update, model: TaskData, egress: Egress) -> Update:
    """Return the weights, or gradients, that an update stands for, in the types that `egress` declares.

    A variance of batch norm that becomes negative, because the two bases differ by a rounding, is 0.

    Args:
        model: what the server has sent, before it was converted.
    """
    bases, declared = _bases(update, model), {**egress.shared, **egress.head}

    def converted(name: str, tensor: Tensor) -> Tensor:
        if tensor.dtype != torch.float16 or declared[name][1] != "torch.float32":
            return tensor
        if name not in bases:
            return tensor.float()
        value = bases[name] + tensor
        return value.clamp_min(0) if name.endswith(VARIANCE) else value

    return _each(update, converted)


def _bases(update: Update, model: TaskData) -> Mapping[str, Tensor]:
    """Return the tensors of which an update sends the change."""
    return {} if update.kind == "gradient" else {**model.shared, **model.head}


def _each(update: Update, convert: Callable[[str, Tensor], Tensor]) -> Update:
    shared, head = ({n: convert(n, t) for n, t in part.items()} for part in (update.shared, update.head))
    return replace(update, shared=shared, head=head)
