"""What a result depends on besides the code: the time, the versions of the software, the device."""

from __future__ import annotations

import errno
import platform
import re
from datetime import UTC, datetime
from importlib.metadata import version

import torch

from suture.core import VERSION
from suture.core.errors import ConfigError

DEVICES = {"cpu", "cuda"}
"""The kinds of devices that Suture computes on. Apple's `mps` has no double precision, and where a copy does
not wait it reads released memory (pytorch issue 139550): its results would be wrong without an error."""

_FULL = re.compile(
    r"out.of.memory|(can't|cannot) allocate memory|not enough memory|alloc(ation)?_failed"
    r"|CU(BLAS|DNN|SOLVER|SPARSE)_STATUS_NOT_INITIALIZED",  # what a library says that finds no room to start
    re.IGNORECASE,
)

_PACKAGES = ("nvflare", "torch", "torchvision", "monai", "numpy", "pandas", "scikit-learn")


def now() -> str:
    """Return the current time in UTC, in ISO 8601 to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Return the versions of Suture, of Python and of the packages that results depend on."""
    return {
        "suture": VERSION,
        "python": platform.python_version(),
        **{name: version(name) for name in _PACKAGES},
        "torch build": torch.__version__,
    }


def unusable(device: str) -> str:
    """Say in one line why torch cannot compute on a device; empty if it can, even if its memory is full."""
    try:
        if torch.device(device).type not in DEVICES:
            return f"results are correct on {' and '.join(sorted(DEVICES))} only"
        torch.zeros(1, device=device).item()
    # torch has an error of its own for an unknown name, and for a build without such devices.
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        return "" if out_of_memory(error) else str(error).splitlines()[0].partition(". ")[0]
    return ""


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
