"""Where the code of a method comes from: this package, or another one whose code the parties compare too."""

from __future__ import annotations

import hashlib
import inspect
import sys
from dataclasses import dataclass
from functools import cache
from importlib.metadata import Distribution, EntryPoint
from pathlib import Path

from suture.core.entry_points import PACKAGES, of_this_distribution
from suture.core.errors import ConfigError
from suture.methods import entry_of
from suture.methods.base import Method

_ROOT = Path(__file__).parents[2]
"""The folder of the packages of this distribution."""

_HASHED = (".py", ".txt")


@dataclass(frozen=True)
class Source:
    """The package that a method from outside comes from.

    Attributes:
        package: name of the top-level package or module.
        path: its folder, or its file where it is a single module.
        distribution, version: what is installed.
        entry: the entry point's value, ``module:Class``.
        method: the method's name.
    """

    package: str
    path: Path
    distribution: str
    version: str
    entry: str
    method: str

    @property
    def class_path(self) -> str:
        """The dotted path of the class."""
        return self.entry.replace(":", ".")


def class_path(point: EntryPoint) -> str:
    """The dotted path of the class of an entry point, which need not be imported."""
    return f"{point.module}.{point.attr}"


def list_entry(point: EntryPoint) -> str:
    """The entry of a party's class_allow_list that allows the package of an entry point: ``PACKAGE.``."""
    return f"{point.module.partition('.')[0]}."


def source_of(kind: type[Method]) -> Source | None:
    """The installed package of a method from outside; None for a method of this distribution.

    Raises:
        ConfigError: the class is in no installed package under an entry point, or in one of several of its
            distribution: only one travels with a job.
    """
    if of_this_distribution(kind.__module__):
        return None
    point = entry_of(kind.about.name)
    package = kind.__module__.partition(".")[0]
    file = getattr(sys.modules.get(package), "__file__", None)
    if point is None or point.dist is None or point.load() is not kind:
        raise ConfigError(
            f"the method {kind.about.name!r} ({kind.__module__}.{kind.__qualname__}) is in no installed "
            "package under the entry point 'suture.methods', so other processes and sites cannot load "
            "it. Put it into a package, register and install it, or run with --env local"
        )
    if file is None:
        raise ConfigError(
            f"{package}/ of {point.dist.name} has no __init__.py; add one, so that it can be sent with a job"
        )
    if others := _top_level(point.dist) - {package}:
        raise ConfigError(
            f"{point.dist.name} installs {package} and {', '.join(sorted(others))}; only {package} is "
            "sent with a job and hashed, so put everything into that package"
        )
    path = Path(file)
    folder = path.parent if path.name == "__init__.py" else path
    return Source(package, folder, point.dist.name, point.dist.version, point.value, kind.about.name)


def _top_level(distribution: Distribution) -> set[str]:
    """The packages and modules that a distribution installs, by its metadata or else by its files."""
    if listed := distribution.read_text("top_level.txt"):
        return set(listed.split())
    files = [path for path in distribution.files or () if path.suffix == ".py" and path.parts[0] != ".."]
    return {path.parts[0].removesuffix(".py") for path in files if not path.parts[0].startswith("_")}


def code_hash(kind: type[Method] | None = None) -> str:
    """A hash of the code that computes: parties that run other code do not take part.

    It covers the source and vocabularies of this distribution; and of a method from outside its distribution,
    version and files, or the source of its class alone where it is not installed (it then runs in one
    process only; the source of a class in a notebook is not known, and counts by its name).
    """
    try:
        return _hash(source_of(kind) if kind else None)
    except ConfigError:
        own = _own_source(kind)
        return _short(hashlib.sha256(f"{_hash(None)}\0{own}".encode()))


def _own_source(kind: type[Method] | None) -> str:
    try:
        return inspect.getsource(kind) if kind and kind.__module__ != "__main__" else repr(kind)
    except (OSError, TypeError):  # a class that exec made has no file
        return repr(kind)


@cache
def _hash(source: Source | None) -> str:
    digest = hashlib.sha256()
    for package in PACKAGES:
        _add(digest, _ROOT / package)
    if source:
        digest.update(f"{source.distribution}\0{source.version}\0{source.entry}\0".encode())
        _add(digest, source.path, every=True)
    return _short(digest)


def _short(digest: hashlib._Hash) -> str:
    return digest.hexdigest()[:16]


def _add(digest: hashlib._Hash, root: Path, every: bool = False) -> None:
    inside = (p for p in root.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    files = [root] if root.is_file() else [p for p in inside if every or p.suffix in _HASHED]
    for path in sorted(files):
        name = path.name if root.is_file() else path.relative_to(root).as_posix()
        digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
