"""The registry of methods: one file, one line."""

from __future__ import annotations

from suture.errors import unknown
from suture.methods.central import Central, CentralFull
from suture.methods.contract import Method
from suture.methods.fedavg import FedAvg
from suture.methods.fedlsm import FedLSM
from suture.methods.fedmas import FedMAS
from suture.methods.fl import FL
from suture.methods.individual import Individual
from suture.methods.metafl import MetaFL
from suture.methods.partial import PartialLoss
from suture.methods.pfl import PersonalisedFL
from suture.methods.pmfl import PMFL
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
