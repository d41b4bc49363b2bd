"""The registry of methods: one file, one line."""

from __future__ import annotations

from suture.errors import unknown
from suture.methods.contract import Method
from suture.methods.partial import PartialLoss
from suture.methods.surgical import SurgicalAggregation
from suture.methods.vanilla import VanillaFL

METHODS: dict[str, type[Method]] = {m.name: m for m in (SurgicalAggregation, VanillaFL, PartialLoss)}


def method_class(name: str) -> type[Method]:
    """The method of that name.

    Raises:
        ConfigError: unknown; names the nearest.
    """
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    return METHODS[name]
