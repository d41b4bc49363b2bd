"""What a result depends on besides the code: the time and the versions of the software."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version

import torch

from suture.core import VERSION

_PACKAGES = ("nvflare", "torch", "torchvision", "monai", "numpy", "pandas", "scikit-learn")


def now() -> str:
    """Return the current time in UTC, in ISO 8601 to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@cache
def versions() -> dict[str, str]:
    """Return the versions of Suture, of Python and of the packages that results depend on; read once."""
    found = {name: version(name) for name in _PACKAGES}
    return {"suture": VERSION, "python": platform.python_version(), **found, "torch build": torch.__version__}
