"""Autocast as CUDA has it, for the simulated device: its lists of operations are those of torch's header."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

_HEADER = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
_KEY = "AutocastPrivateUse1"
_OFF = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
_LIBRARIES = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")

_Cast = Callable[[Any, Any, Any], tuple[Any, Any]]
"""The operation, its arguments and its named ones to the arguments in another type."""


def _listed(name: str) -> list[Any]:
    """The operations of a list, such as ``_(sum, dim_IntList)``; torch keeps some that it no longer has."""
    text = re.search(rf"#define AT_FORALL_{name}\(_\)(.*?[^\\])\n", _HEADER.read_text(), re.DOTALL)
    assert text is not None, f"{_HEADER} has no list {name}"
    entries = [entry.replace(" ", "").split(",") for entry in re.findall(r"_\(([^()]*)\)", text[1])]
    found = [getattr(torch.ops.aten, operation, None) for operation, *_ in entries]
    overloads = [overload[0] if overload else "default" for _, *overload in entries]
    pairs = zip(found, overloads, strict=True)
    return [getattr(packet, overload) for packet, overload in pairs if hasattr(packet, overload)]


def _floats(args: Any, kwargs: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and _cast(leaf)]


def _cast(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype != torch.float64


def _all_to(dtype: torch.dtype, args: Any, kwargs: Any) -> Any:
    return tree_map_only(Tensor, lambda t: t.to(dtype) if _cast(t) else t, (args, kwargs))


def _to_half(_: Any, args: Any, kwargs: Any) -> Any:
    return _all_to(torch.get_autocast_dtype("privateuseone"), args, kwargs)


def _to_single(_: Any, args: Any, kwargs: Any) -> Any:
    return _all_to(torch.float32, args, kwargs)


def _to_widest(_: Any, args: Any, kwargs: Any) -> Any:
    types = {tensor.dtype for tensor in _floats(args, kwargs)}
    return _all_to(torch.float32, args, kwargs) if torch.float32 in types else (args, kwargs)


def _result_in_single(operation: Any, args: Any, kwargs: Any) -> Any:
    names = [argument.name for argument in operation._schema.arguments]
    given = kwargs.get("dtype") or next((a for a in args if isinstance(a, torch.dtype)), None)
    if given is None and "dtype" in names and _floats(args, kwargs):
        args, kwargs = args[: names.index("dtype")], {**kwargs, "dtype": torch.float32}
    return args, kwargs


def _kernel(operation: Any, cast: _Cast) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_OFF):
            args, kwargs = cast(operation, args, kwargs)
            return operation(*args, **kwargs)

    return run


def _banned(*_: Any) -> Any:
    raise RuntimeError("binary_cross_entropy is unsafe to autocast")


def register() -> None:
    """Give the device CUDA's autocast; once in a process."""
    aten, every = _LIBRARIES
    every.fallback(torch.library.fallthrough_kernel, _KEY)
    lists: dict[str, _Cast] = {
        "LOWER_PRECISION_FP": _to_half,
        "FP32": _to_single,
        "FP32_SET_OPT_DTYPE": _result_in_single,
        "PROMOTE": _to_widest,
    }
    for name, cast in lists.items():
        for operation in _listed(name):
            aten.impl(operation, _kernel(operation, cast), _KEY)
    aten.impl(torch.ops.aten.binary_cross_entropy.default, _kernel(None, _banned), _KEY)
