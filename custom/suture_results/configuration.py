"""The settings of a run for its page: those that were set and those that matter first, the rest apart."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from suture.core.errors import SutureError
from suture.data.augmentation import Augmentation
from suture.methods import method_class
from suture.models import ModelSpec
from suture.protocol.records import Run
from suture_results.formatting import leaves

_MATTER = frozenset({"local.lr", "local.epochs", "local.batch_size", "name", "size"})
"""Settings that a reader looks for, whether or not they were changed."""


@dataclass(frozen=True)
class Settings:
    """The settings of one part of a run.

    Attributes:
        title: of the part.
        shown: those that differ from their defaults, and those of `_MATTER`.
        rest: those left at their defaults.
    """

    title: str
    shown: tuple[tuple[str, Any], ...]
    rest: tuple[tuple[str, Any], ...]


def configuration(run: Run) -> list[Settings]:
    """Return the settings of method, model, augmentation and merge; an empty part is left out.

    Where a method's defaults are not known here, as its package is not installed, all of it was set.
    """
    parts = [
        (f"Method: {run.method.name}", run.method.hyperparameters, lambda: method_class(run.method.name)()),
        ("Model", run.model, lambda: ModelSpec(run.model["name"])),
        ("Augmentation", run.augmentation, Augmentation),
        ("Robust merge", run.robust, dict),
        ("Secure aggregation (experimental)", run.secure_aggregation, dict),
    ]
    return [_parted(title, values, default) for title, values, default in parts if values]


def _parted(title: str, values: Mapping[str, Any], default: Callable[[], Any]) -> Settings:
    try:
        usual = dict(leaves(json.loads(json.dumps(asdict(default())))))
    except (SutureError, TypeError, KeyError, ValueError):  # a method unknown here, or one without defaults
        usual = {}
    given = leaves(values)
    shown = [(k, v) for k, v in given if k in _MATTER or k not in usual or usual[k] != v]
    return Settings(title, tuple(shown), tuple(pair for pair in given if pair not in shown))
