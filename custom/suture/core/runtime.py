"""What a computation depends on besides code and data: seeds, the device, versions.

A seed is one number for each site, round and purpose, always passed as an argument and never global.
"""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from typing import Any

import torch

from suture.core import VERSION
from suture.core.errors import ConfigError

_PACKAGES = ("nvflare", "torch", "torchvision", "monai", "numpy", "pandas", "scikit-learn")


def now() -> str:
    """Return the current time in UTC, in ISO 8601 to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@cache
def versions() -> dict[str, str]:
    """Return the versions of Suture, of Python and of the packages that results depend on; read once."""
    found = {name: version(name) for name in _PACKAGES}
    return {"suture": VERSION, "python": platform.python_version(), **found, "torch build": torch.__version__}


# Read once, when CUDA starts in a process, which everything here comes before; see `repeatable`.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

DEVICES = {"cpu", "cuda"}
"""The kinds of devices that Suture computes on. Apple's `mps` has no double precision, and where a copy does
not wait it reads released memory (pytorch issue 139550): its results would be wrong without an error."""

_FULL = re.compile(
    r"out.of.memory|(can't|cannot) allocate memory|not enough memory|alloc(ation)?_failed"
    r"|CU(BLAS|DNN|SOLVER|SPARSE)_STATUS_NOT_INITIALIZED",  # what a library says that finds no room to start
    re.IGNORECASE,
)


def unusable(device: str) -> str:
    """Say in one line why torch cannot compute on a device; empty if it can, even if its memory is full."""
    try:
        if torch.device(device).type not in DEVICES:
            return f"Suture supports {' and '.join(sorted(DEVICES))} only"
        torch.zeros(1, device=device).item()
    # torch has an error of its own for an unknown name, and for a build without such devices.
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        return "" if out_of_memory(error) else str(error).splitlines()[0].partition(". ")[0]
    return ""


@contextmanager
def repeatable(device: torch.device | str) -> Iterator[None]:
    """On a GPU, choose operations whose results do not depend on the order in which it computes.

    An operation without such a variant warns. On the CPU nothing changes.
    """
    if torch.device(device).type != "cuda":
        yield
        return
    mode, cudnn = torch.get_deterministic_debug_mode(), torch.backends.cudnn
    memory: Any = torch.utils.deterministic
    before = cudnn.benchmark, cudnn.deterministic, memory.fill_uninitialized_memory
    try:
        torch.set_deterministic_debug_mode("warn")
        cudnn.benchmark, cudnn.deterministic = False, True
        memory.fill_uninitialized_memory = False  # nothing reads it, and filling takes time
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        cudnn.benchmark, cudnn.deterministic, memory.fill_uninitialized_memory = before


def device_name(device: torch.device | str) -> str:
    """Return the model of a GPU, and ``cpu`` for the CPU."""
    if torch.device(device).type != "cuda":
        return torch.device(device).type
    return re.sub(r"[^\w ./()-]", " ", torch.cuda.get_device_name(device))


def check_device(device: str, party: str) -> None:
    """Refuse a device of a suture.toml that cannot be used.

    Raises:
        ConfigError: names the party and the device, with the reason.
    """
    if reason := unusable(device):
        raise ConfigError(
            f"{party}: device {device!r} cannot be used: {reason}; correct device under [training] in "
            "suture.toml"
        )


def out_of_memory(error: BaseException) -> bool:
    """Return whether memory was full: of a GPU, of Python or of the CPU.

    torch has a type of its own only for its allocator on a GPU; CUDA, its libraries, pinned memory and the
    CPU say it in the text of a RuntimeError.
    """
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    in_text = isinstance(error, RuntimeError) and _FULL.search(str(error)) is not None
    return in_text or isinstance(error, (torch.OutOfMemoryError, MemoryError))


def seed_for(*parts: str | int) -> int:
    """Return a seed of 63 bits that depends on all parts and their order, and not on the machine."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator_for(*parts: str | int) -> torch.Generator:
    """Return a CPU generator with the seed of these parts."""
    return torch.Generator().manual_seed(seed_for(*parts))


@contextmanager
def seed_torch(seed: int, device: torch.device | str = "cpu") -> Iterator[None]:
    """Seed the global generators, which dropout uses, within the block; restore their state afterwards."""
    cuda = [torch.device(device)] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        if torch.device(device).type == "cpu":
            # `torch.manual_seed` formats a traceback for each kind of device that is not there: 1 ms.
            torch.default_generator.manual_seed(seed)
        else:
            torch.manual_seed(seed)
        yield
