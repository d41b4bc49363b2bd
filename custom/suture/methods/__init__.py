"""The registry of methods: one file, one line."""

from __future__ import annotations

from suture.core.errors import unknown
from suture.methods.base import Method
from suture.methods.central import Central, CentralFull
from suture.methods.fedavg import FedAvg
from suture.methods.fedlsm.fedlsm import FedLSM
from suture.methods.fedmas.fedmas import FedMAS
from suture.methods.individual import Individual
from suture.methods.meta.fl import FL
from suture.methods.meta.metafl import MetaFL
from suture.methods.meta.pmfl import PMFL
from suture.methods.partial import PartialLoss
from suture.methods.pfl import PersonalisedFL
from suture.methods.surgical import SurgicalAggregation
from suture.methods.vanilla import VanillaFL

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        SurgicalAggregation,
        VanillaFL,
        PartialLoss,
        FedAvg,
        FedLSM,
        FedMAS,
        FL,
        MetaFL,
        PMFL,
        PersonalisedFL,
        Individual,
        Central,
        CentralFull,
    )
}


def method_class(name: str) -> type[Method]:
    """The method of that name.

    Raises:
        ConfigError: unknown; names the nearest.
    """
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    return METHODS[name]
