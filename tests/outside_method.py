"""A method of another package, as pip installs it: FedProx in a module of its own, with its metadata."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from suture.methods import _load
from suture.methods.source import _hash

NAME, DISTRIBUTION, MODULE = "prox", "outside-prox", "outside_prox"
METADATA = "outside_prox-1.0.dist-info"
CLASS = f"{MODULE}.Prox"

TEXT = '''
"""FedProx (Li et al., MLSys 2020): the local objective has a proximal term, mu / 2 |w - w_received|^2."""

from suture.sdk import About, LabelUse, LocalAveraging, hyperparameters


@hyperparameters
class Prox(LocalAveraging):
    about = About("prox", "FedProx", "Li et al., MLSys 2020")
    labels = LabelUse(view="own")
    mu: float = 0.1

    def objective(self, model, batch, reference):
        pairs = zip(model.parameters(), reference.parameters())
        drift = sum((w - old).square().sum() for w, old in pairs)
        return super().objective(model, batch, reference) + self.mu / 2 * drift
'''


def install(folder: Path, code: Path | None = None, *, package: bool = False) -> Path:
    """Install the distribution in `folder`; return the file of the module.

    Args:
        code: where the code lies, if not in `folder`: an editable install.
        package: whether it is a package with a module in it, not a single module.
    """
    code = code or folder
    info = folder / METADATA
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[suture.methods]\n{NAME} = {MODULE}:Prox\n")
    path = code / MODULE / "__init__.py" if package else code / f"{MODULE}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    if package:
        path.write_text("from outside_prox.method import Prox\n")
        path = path.with_name("method.py")
    path.write_text(TEXT)
    return path


@contextmanager
def on_path(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> Iterator[None]:
    """Put folders on the path of this process; forget at the end what was imported from them."""
    forget()
    with monkeypatch.context() as patch:
        for folder in folders:
            patch.syspath_prepend(str(folder))
        importlib.invalidate_caches()
        yield
    forget()


def forget() -> None:
    """Forget the module, and the class and hash that were read from it."""
    for name in [name for name in sys.modules if name.partition(".")[0] == MODULE]:
        del sys.modules[name]
    _load.cache_clear()
    _hash.cache_clear()
