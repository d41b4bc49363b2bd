"""The registry of methods: those of the engine, and those of installed packages by entry point."""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint
from typing import Any

from suture.core.entry_points import METHOD_GROUP, Registry, find_foreign, package_of
from suture.core.errors import ConfigError, unknown
from suture.methods.base import Method
from suture.methods.central import Central, CentralFull
from suture.methods.fedavg import FedAvg
from suture.methods.individual import Individual
from suture.methods.partial import PartialLoss
from suture.methods.pfl import PersonalisedFL
from suture.methods.surgical import SurgicalAggregation
from suture.methods.vanilla import VanillaFL

METHODS: Registry[type[Method]] = Registry(
    METHOD_GROUP,
    "method",
    {
        method.about.name: method
        for method in (
            SurgicalAggregation,
            VanillaFL,
            PartialLoss,
            FedAvg,
            PersonalisedFL,
            Individual,
            Central,
            CentralFull,
        )
    },
    "a subclass of suture.Method",
    lambda kind: isinstance(kind, type) and issubclass(kind, Method),
)
"""The methods of this distribution, by name."""


def method_class(name: str) -> type[Method]:
    """The method of that name, of this distribution or of another package.

    Raises:
        ConfigError: unknown (names the nearest), or as `outside_method`.
    """
    if name in METHODS:
        return METHODS[name]
    found = find_foreign()
    if name not in found:
        raise unknown("method", name, {*METHODS, *found})
    return outside_method(name)


def outside_method(name: str) -> type[Method]:
    """The method that another package registers under a name.

    Raises:
        ConfigError: its package cannot be imported, takes another method's name, or registers something
            that is no method.
    """
    return _load(METHODS.only(name, find_foreign()[name]))


def entry_of(name: str) -> EntryPoint | None:
    """The entry point of another package's method; None for any other name.

    Raises:
        ConfigError: two packages register it.
    """
    found = find_foreign()
    return None if name in METHODS or name not in found else METHODS.only(name, found[name])


def outside() -> dict[str, EntryPoint]:
    """The methods that other packages register, by name; none of them is imported.

    Raises:
        ConfigError: two packages register one name, or a package the name of a method of this distribution.
    """
    return {name: METHODS.only(name, points) for name, points in find_foreign().items()}


@cache
def _load(point: EntryPoint) -> type[Method]:
    where = f"the method {point.name!r} of {package_of(point)} ({point.value})"
    kind = METHODS.load(point)
    check_kind(kind, where)
    if kind.about.name != point.name:
        raise ConfigError(f"{where} has the name {kind.about.name!r}; give the entry point the same name")
    return kind


def check_kind(kind: Any, where: str) -> None:
    """Check that something is the class of a method, complete and decorated.

    Raises:
        ConfigError: it is not; the message begins with `where`.
    """
    if not (isinstance(kind, type) and issubclass(kind, Method)):
        raise ConfigError(f"{where} is not a subclass of suture.Method; name the class")
    missing = [n for n in ("about", "labels") if not hasattr(kind, n) or n in kind.__abstractmethods__]
    if missing:
        raise ConfigError(f"{where} lacks {' and '.join(missing)}; see suture.Method")
    if "__pydantic_fields__" not in vars(kind):
        raise ConfigError(f"{where} is not decorated; add @hyperparameters above the class")
