"""The registry of methods: those of this package, and those of installed packages by entry point."""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint
from typing import Any, cast

from suture.core.entry_points import package_of, registered
from suture.core.errors import ConfigError, unknown
from suture.methods.base import Method
from suture.methods.central import Central, CentralFull
from suture.methods.combined import Combined
from suture.methods.condist import ConDist
from suture.methods.creff.creff import CReFF
from suture.methods.crt import Decoupling
from suture.methods.fedalign import FedAlign
from suture.methods.fedavg import FedAvg
from suture.methods.fedlc import FedLC
from suture.methods.fedlsm.fedlsm import FedLSM
from suture.methods.fedmas import FedMAS
from suture.methods.fedmlp import FedMLP
from suture.methods.fednml import FedNML
from suture.methods.fedprox import FedProx
from suture.methods.fedpu import FedPU
from suture.methods.fedrs import FedRS
from suture.methods.fedvls import FedVLS
from suture.methods.fixmatch import FixMatch
from suture.methods.focal import FocalFedAvg
from suture.methods.fpsl import FPSL
from suture.methods.fssl import FSSL
from suture.methods.individual import Individual
from suture.methods.ldam import LDAM
from suture.methods.meta.fl import FL
from suture.methods.meta.metafl import MetaFL
from suture.methods.meta.pmfl import PMFL
from suture.methods.moon import MOON
from suture.methods.partial import PartialLoss
from suture.methods.pfl import PersonalisedFL
from suture.methods.surgical import SurgicalAggregation
from suture.methods.vanilla import VanillaFL

METHODS: dict[str, type[Method]] = {
    method.about.name: method
    for method in (
        SurgicalAggregation,
        VanillaFL,
        PartialLoss,
        FedAvg,
        FedLSM,
        ConDist,
        FSSL,
        FixMatch,
        FedPU,
        FPSL,
        FedVLS,
        FedMAS,
        FedMLP,
        FedNML,
        FedProx,
        MOON,
        FedRS,
        FocalFedAvg,
        FedLC,
        LDAM,
        Decoupling,
        CReFF,
        FedAlign,
        FL,
        MetaFL,
        PMFL,
        PersonalisedFL,
        Individual,
        Combined,
        Central,
        CentralFull,
    )
}
"""The methods of this package, by name."""


def method_class(name: str) -> type[Method]:
    """The method of that name, of this package or of an installed one.

    Raises:
        ConfigError: unknown (names the nearest), or as `outside_method`.
    """
    if name in METHODS:
        return METHODS[name]
    found = registered()
    if name not in found:
        raise unknown("method", name, {*METHODS, *found})
    return outside_method(name)


def outside_method(name: str) -> type[Method]:
    """The method that an installed package registers under a name.

    Raises:
        ConfigError: its package cannot be imported, takes another method's name, or registers something
            that is no method.
    """
    return _load(_only(name, registered()[name]))


def entry_of(name: str) -> EntryPoint | None:
    """The entry point of a method; None for one of this package, of this process or unknown.

    Raises:
        ConfigError: two packages register it.
    """
    found = registered()
    return None if name in METHODS or name not in found else _only(name, found[name])


def outside() -> dict[str, EntryPoint]:
    """The methods that installed packages register, by name; none of them is imported.

    Raises:
        ConfigError: two packages register one name, or a package the name of a method of this one.
    """
    return {name: _only(name, points) for name, points in registered().items()}


def _only(name: str, points: list[EntryPoint]) -> EntryPoint:
    """The entry point of a name that one package registers."""
    first, *others = points
    if name in METHODS or others:
        rival, other = (first, "suture") if name in METHODS else (others[0], package_of(first))
        raise ConfigError(
            f"{package_of(rival)} and {other} both register a method {name!r}; rename or uninstall one"
        )
    return first


@cache
def _load(point: EntryPoint) -> type[Method]:
    where = f"the method {point.name!r} of {package_of(point)} ({point.value})"
    try:
        kind: Any = point.load()
    except (Exception, SystemExit) as error:  # whatever another package does when it is imported
        raise ConfigError(f"{where} cannot be imported: {type(error).__name__}: {error}") from error
    check_kind(kind, where)
    if kind.about.name != point.name:
        raise ConfigError(f"{where} has the name {kind.about.name!r}; give the entry point the same name")
    return cast(type[Method], kind)


def check_kind(kind: Any, where: str) -> None:
    """Check that something is the class of a method, complete and decorated.

    Raises:
        ConfigError: it is not; the message begins with `where`.
    """
    if not (isinstance(kind, type) and issubclass(kind, Method)):
        raise ConfigError(f"{where} is not a subclass of suture.Method; name the class")
    missing = [name for name in ("about", "labels") if not hasattr(kind, name)]
    if missing:
        raise ConfigError(f"{where} lacks {' and '.join(missing)}; see suture.Method")
    if "__pydantic_fields__" not in vars(kind):
        raise ConfigError(f"{where} is not decorated; add @hyperparameters above the class")
