"""A device beside the CPU that is not there: the CPU computes what runs on it, and it is watched.

Its tensors hold tensors of the CPU and say that they are on the device. So what torch refuses on a GPU is
refused here, and what makes the host wait for a GPU is counted. Nothing is said of speed and rounding.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

import suture
from cuda_autocast import register
from suture.core.runtime import DEVICES

NAME = "simulated"
"""The device, as torch and a site's configuration name it."""

WAITS: Counter[str] = Counter()
"""How often the host had to wait for the device, by the function of the package that made it."""

OPERATIONS: Counter[str] = Counter()
"""How often each operation ran on the device: the host takes time to start a kernel for each."""

_LIVE: dict[int, weakref.ref[_OnDevice]] = {}

_COPIED: list[tuple[weakref.ref[Tensor], int]] = []
"""What a GPU may still be copying from pinned memory, and how often it had been changed before."""

STAGED = 2**16
"""Bytes of memory that is not pinned that a copy takes without waiting."""

_PACKAGES = Path(suture.__file__).parents[1]

_READS = {
    "_local_scalar_dense",  # a number that Python looks at
    "equal",
    # Values decide the shape of the result.
    "nonzero",
    "masked_select",
    "_unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
    "repeat_interleave",
}

_PIN = "_is_pinned_for_the_simulated_device"

_COPIES = {"_to_copy", "copy_"}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
"""Unlike all other operations they take rows that are on the CPU."""


class Simulated(TorchDispatchMode):
    """The device is there while this is entered; in other threads only its tensors are."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and to keep the compiler out takes a fifth of each operation

    def __enter__(self) -> Any:
        self._in_one_thread = torch.autograd.set_multithreading_enabled(False)  # the device has none
        self._in_one_thread.__enter__()
        DEVICES.add(NAME)
        self._pin = Tensor.pin_memory
        Tensor.pin_memory = _pinned  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        DEVICES.discard(NAME)
        Tensor.pin_memory = self._pin  # type: ignore[method-assign]
        _arrive()
        self._in_one_thread.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _OnDevice(Tensor):
    """A tensor of the device."""

    on_cpu: Tensor

    @staticmethod
    def __new__(cls, on_cpu: Tensor) -> _OnDevice:
        """The tensor of the CPU is held, not copied."""
        made: _OnDevice = Tensor._make_wrapper_subclass(
            cls,
            on_cpu.shape,
            strides=on_cpu.stride(),
            storage_offset=on_cpu.storage_offset(),
            dtype=on_cpu.dtype,
            device=torch.device(NAME, 0),
        )
        made.on_cpu = on_cpu
        key = id(made)
        _LIVE[key] = weakref.ref(made, lambda _: _LIVE.pop(key, None))
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    # What torch does not have for tensors like these.

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.on_cpu.untyped_storage()


def live_bytes() -> int:
    """The memory that tensors of the device hold."""
    gc.collect()
    tensors = [tensor for ref in list(_LIVE.values()) if (tensor := ref()) is not None]
    storages = {t.on_cpu.untyped_storage().data_ptr(): t.on_cpu.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The result of an operation, on the device if its tensors are there or it is made there."""
    ours: dict[int, _OnDevice] = {}
    for value in (*args, *kwargs.values()):  # of each operation there is, here and elsewhere
        for tensor in value if isinstance(value, list | tuple) else (value,):
            if isinstance(tensor, _OnDevice):
                ours[id(tensor.on_cpu)] = tensor
    asked = kwargs.get("device")
    if not ours and (asked is None or torch.device(asked).type != NAME):
        return func(*args, **kwargs)
    name = func._schema.name.removeprefix("aten::")
    there = name != "copy_" or isinstance(args[0], _OnDevice)
    if asked is not None:
        there = torch.device(asked).type == NAME
    if ours and name not in _COPIES:
        _check_alike(name, args, kwargs)
    if _waits(name, args, kwargs, there):
        WAITS[_where()] += 1
        _arrive()
    OPERATIONS[name] += 1
    args = [_mapped(_computed, value) for value in args]
    kwargs = {key: _mapped(_computed, value) for key, value in kwargs.items()}
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    out = func(*args, **kwargs)
    if not there:
        return out
    # What was changed in place stays the same object.
    return _mapped(lambda t: ours[id(t)] if id(t) in ours else _OnDevice(t), out)


def _tensors(values: Any) -> Iterator[Tensor]:
    """The tensors of an operation's arguments: values, or lists of them. torch's own functions are slow."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (part for part in value if isinstance(part, Tensor))


def _mapped(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """An argument or a result of an operation with other tensors."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)([change(part) if isinstance(part, Tensor) else part for part in value])
    return value


def _computed(tensor: Tensor) -> Tensor:
    return tensor.on_cpu if isinstance(tensor, _OnDevice) else tensor


def _check_alike(name: str, args: Any, kwargs: Mapping[str, Any]) -> None:
    """Refuse tensors of both; the CPU's may be single numbers, or the rows of an index."""
    if name in _INDEXING and isinstance(args[0], _OnDevice):
        args = (args[0], *args[2:])
    elsewhere = [tensor for tensor in _tensors((*args, *kwargs.values())) if _is_elsewhere(tensor)]
    if any(tensor.dim() for tensor in elsewhere):
        raise RuntimeError(f"Expected all tensors to be on the same device: {name} in {_where()}")


def _is_elsewhere(tensor: Tensor) -> bool:
    return not isinstance(tensor, _OnDevice)


def _waits(name: str, args: Any, kwargs: Mapping[str, Any], there: bool) -> bool:
    """Whether the host waits until the operation is done, whose result is `there` on the device or not."""
    first = args[0] if args else None
    if name in _COPIES:
        converts = name == "_to_copy"
        from_there = isinstance(first if converts else args[1], _OnDevice)
        non_blocking = kwargs.get("non_blocking", not converts and len(args) > 2 and args[2])
        if from_there == there:
            return False
        source = first if converts else args[1]
        if non_blocking and not from_there and hasattr(source, _PIN):
            _COPIED.append((weakref.ref(source), source._version))
            return False
        return from_there or not non_blocking or source.nbytes > STAGED
    if name in _INDEXING and isinstance(first, _OnDevice):
        # A mask is looked at; rows that are on the CPU are copied.
        return any(i is not None and (i.dtype == torch.bool or _is_elsewhere(i)) for i in args[1])
    return name in _READS and isinstance(first, _OnDevice)


def _pinned(tensor: Tensor) -> Tensor:
    """`Tensor.pin_memory`, which needs a GPU."""
    if not hasattr(tensor, _PIN):
        tensor = tensor.clone()
        setattr(tensor, _PIN, True)
    return tensor


def _arrive() -> None:
    """All copies are done; one of memory that was changed meanwhile may hold its new values, or half of them.

    Released memory is no fault: torch gives pinned memory to nobody else before it was copied.
    """
    found = [(source(), version) for source, version in _COPIED]
    _COPIED.clear()
    for source, version in found:
        if source is not None and source._version != version:
            raise RuntimeError(f"pinned memory was changed while it was copied, before {_where()} has waited")


def _where() -> str:
    """The innermost function of the package that runs, with its file."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not frame.f_code.co_filename.startswith(str(_PACKAGES)):
        frame = frame.f_back
    file = Path(frame.f_code.co_filename)
    if not file.is_relative_to(_PACKAGES):
        return "outside of the packages"
    within = file.relative_to(_PACKAGES)
    return f"{within.relative_to(within.parts[0])}: {frame.f_code.co_qualname}"


class _Module:
    """What torch asks of a kind of devices."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Dropout draws from the CPU's generator."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def _empty_strided(size: list[int], stride: list[int], **options: Any) -> Tensor:
    return _OnDevice(torch.empty_strided(size, stride, dtype=options["dtype"]))


def _copied(source: Tensor, to: Tensor, non_blocking: bool = False) -> Any:
    return _run(torch.ops.aten.copy_.default, (to, source, non_blocking), {})


# The first backward pass makes a thread for each device that there is, after which no fork can train.
torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]
if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
    pytest.skip("torch 2.9, the lowest that Suture takes, has no devices in Python", allow_module_level=True)
backend_registration._setup_privateuseone_for_python_backend(NAME, _Module())
_KERNELS = torch.library.Library("aten", "IMPL")
# `torch.tensor(numbers, device=...)` calls these by itself, past every mode.
_KERNELS.impl("empty_strided", _empty_strided, "PrivateUse1")
_KERNELS.impl("_copy_from", _copied, "PrivateUse1")
register()
