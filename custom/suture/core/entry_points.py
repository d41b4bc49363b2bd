"""What packages register by entry point: methods, data sets, priors, simulations and commands; and extras."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import lru_cache
from importlib import import_module
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import Any, TypeVar, cast

from suture.core.errors import ConfigError, as_word, check_known, show_value

METHOD_GROUP = "suture.methods"
"""The entry points by which a package names its methods."""

MODEL_GROUP, PRIOR_GROUP = "suture.encoders", "suture.priors"
"""Those by which it names its encoders and its priors."""

PACKAGES = ("suture", "suture_encoders", "suture_papers")
"""The packages that a party of a federation runs: they travel together, and one hash covers their code."""

DISTRIBUTED = (*PACKAGES, "suture_admin", "suture_prepare", "suture_results", "suture_synthetic")
"""All packages of this distribution."""

NAMES_GROUP = "suture.names"
"""The entry points by which packages of this distribution add names to `suture` and `suture.testing`."""

HOOKS_GROUP = "suture.hooks"
"""Those by which they do something for the engine."""

T = TypeVar("T")


def needed(package: str, name: str, extra: str) -> Any:
    """Import an optional package.

    Args:
        name: of the model, the setting or the option that needs it.
        extra: of Suture, which has it.

    Raises:
        ConfigError: it is not installed; names the extra that has it.
    """
    try:
        return import_module(package)
    except ImportError as error:
        raise ConfigError(
            f'{as_word(name)} needs {package}, which cannot be imported: pip install "suture[{extra}]"'
        ) from error


def of_this_distribution(module: str) -> bool:
    """Whether a module, or what it defines, is part of this distribution."""
    return module.partition(".")[0] in DISTRIBUTED


def find_foreign(group: str = METHOD_GROUP) -> dict[str, list[EntryPoint]]:
    """The entry points of other packages by name: several where packages register different ones."""
    return find_entry_points(group, ours=False)


def find_entry_points(group: str, *, ours: bool | None = None) -> dict[str, list[EntryPoint]]:
    """The entry points by name: this distribution's, those of others, or all. Nothing is imported for it."""
    points = [point for point in _read_group(group) if ours in (None, _ours(point))]
    by_name: dict[str, list[EntryPoint]] = {}
    for point in sorted(points, key=lambda point: (not _ours(point), point.name)):
        if point not in by_name.setdefault(point.name, []):  # a folder may be on the path twice
            by_name[point.name].append(point)
    return by_name


def _read_group(group: str) -> EntryPoints:
    """The entry points of a group; they are read again where a folder of the path has changed."""
    return _read(group, tuple(map(_state, sys.path)))


@lru_cache(maxsize=32)  # a reading opens a file of every package, and a run asks dozens of times
def _read(group: str, _: tuple[tuple[int, ...], ...]) -> EntryPoints:
    return entry_points(group=group)


def _state(folder: str) -> tuple[int, ...]:
    """Another one for another folder, and after a package was installed in it or removed."""
    try:
        status = os.stat(folder or ".")
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _ours(point: EntryPoint) -> bool:
    return of_this_distribution(point.module)


def _load_own(group: str, name: str) -> Any:
    """What a package of this distribution registers under that name; None where none does."""
    points = find_entry_points(group, ours=True).get(name)
    return points[0].load() if points else None


def public_name(name: str) -> Any:
    """What a package of this distribution adds to `suture` under that name.

    Raises:
        AttributeError: none does.
    """
    if (value := _load_own(NAMES_GROUP, name)) is None:
        raise AttributeError(f"no package of this installation adds {name!r} to suture")
    return value


def hook(name: str) -> Callable[..., Any]:
    """What a package of this distribution does for the engine under that name.

    Raises:
        ConfigError: none does.
    """
    if (function := _load_own(HOOKS_GROUP, name)) is None:
        raise ConfigError(f"no package of this installation has {name!r}; install all of suture")
    return cast(Callable[..., Any], function)


def if_installed(name: str) -> Callable[..., Any]:
    """`hook`, or a function that does nothing where no package has one: the engine runs without it."""
    return _load_own(HOOKS_GROUP, name) or (lambda *_, **__: None)


def package_of(point: EntryPoint) -> str:
    """The name and version of the package that registers an entry point."""
    return f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown package"


def load(point: EntryPoint, what: str, needed: str, fits: Callable[[Any], bool] = callable) -> Any:
    """What an entry point names.

    Args:
        what: of which kind, for the message.
        needed: what it must be, for the message.
        fits: tells whether it is that.

    Raises:
        ConfigError: its package cannot be imported, or it is something else.
    """
    where = f"the {what} {point.name!r} of {package_of(point)} ({point.value})"
    try:
        value = point.load()
    except (Exception, SystemExit) as error:  # whatever another package does when it is imported
        raise ConfigError(f"{where} cannot be imported: {type(error).__name__}: {error}") from error
    if not fits(value):
        raise ConfigError(f"{where} must be {needed}, not {show_value(value)}; correct the entry point")
    return value


class Registry(MutableMapping[str, T]):
    """What this distribution has of one kind, by name: the engine's, and the papers' by entry point.

    What is registered by entry point is imported as it is first used.

    Args:
        group: of the entry points.
        what: one of them, for messages.
        engine: those of the engine.
        needed: what each of them is, for messages.
        fits: tells whether what an entry point names is that.
    """

    def __init__(
        self, group: str, what: str, engine: Mapping[str, T], needed: str, fits: Callable[[Any], bool]
    ) -> None:
        self.group = group
        self._kind = (what, needed, fits)
        self._values = dict(engine)
        self._loaded: dict[str, T] = {}

    def __getitem__(self, name: str) -> T:
        if name in self._values:
            return self._values[name]
        if name not in self._loaded:
            self._loaded[name] = self.load(self._points()[name][0])
        return self._loaded[name]

    def __setitem__(self, name: str, value: T) -> None:
        self._values[name] = value

    def __delitem__(self, name: str) -> None:
        del self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**self._values, **self._points()})

    def __len__(self) -> int:
        return len({**self._values, **self._points()})

    def __contains__(self, name: object) -> bool:
        return name in self._values or name in self._points()

    def _points(self) -> dict[str, list[EntryPoint]]:
        return find_entry_points(self.group, ours=True)

    def names(self) -> set[str]:
        """Those of this distribution and of other packages."""
        return {*self, *find_foreign(self.group)}

    def find(self, name: str) -> T:
        """The one of that name, of this distribution or of another package.

        Raises:
            ConfigError: there is none (names the nearest), its package cannot be imported, or two packages
                register it, or it is of another kind.
        """
        others = find_foreign(self.group)
        if name not in self:
            check_known(self._kind[0], name, self.names())
        return self[name] if name not in others else self.load(self.only(name, others[name]))

    def load(self, point: EntryPoint) -> T:
        """What an entry point of this kind names.

        Raises:
            ConfigError: see `load`.
        """
        return cast(T, load(point, *self._kind))

    def only(self, name: str, points: list[EntryPoint]) -> EntryPoint:
        """The entry point of another package, which no other package registers.

        Raises:
            ConfigError: another one does, or this distribution.
        """
        first, *others = points
        if name in self or others:
            rival, other = (first, "suture") if name in self else (others[0], package_of(first))
            raise ConfigError(
                f"{package_of(rival)} and {other} both register a {self._kind[0]} {name!r}; "
                "rename or uninstall one"
            )
        return first
