"""Methods of other packages, as pip installs them."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from suture.methods import _load
from suture.methods.source import _hash


@contextmanager
def installed(
    folder: Path, distribution: str, version: str, method: str, entry: str, code: Path
) -> Iterator[None]:
    """Install the module of a method in a folder, which this process and those that it starts look into.

    Args:
        method, entry: name and value of its entry point.
        code: what the module contains.
    """
    module = entry.partition(":")[0]
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[suture.methods]\n{method} = {entry}\n")
    (folder / f"{module}.py").write_text(code.read_text())
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        for cached in (_load, _hash):
            cached.cache_clear()
        importlib.invalidate_caches()
        yield
    sys.modules.pop(module, None)
    for cached in (_load, _hash):
        cached.cache_clear()
