"""What a method declares that may leave a site; the site's filter and the server check against it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from suture.core.labels import LabelType

Range = tuple[float, float]

IMAGES: Literal["images"] = "images"
"""As the range of a site's weight: exactly the number of training images that it announced."""

WEIGHT: Literal["weight"] = "weight"
"""As the range of its class weights: each row counts exactly as the site does."""

OWNERS: Literal["owners"] = "owners"
"""The same for the classes that the site annotates, and 0 for every other."""


@dataclass(frozen=True)
class Egress:
    """All that may leave a site in an update; the site's filter and the server both check against it.

    Attributes:
        shared: names of the tensors that leave, with their shapes and types.
        head: names of the head's tensors, with the shape of one row.
        class_tensors: further tensors with one row per class.
        weight: closed range; `IMAGES` for the number of training images.
        weight_name: what it is called where it is refused.
        class_weight: closed range of each class; `WEIGHT` or `OWNERS` for the site's own weight.
        over_classes: whether the weight is a sum over the site's classes; its upper end is then that of one.
        counts: the tasks in which a site says before round 1 how many images have each of its classes.
        prior: whether it says then which frozen network it holds.
        scalars: names and closed ranges of the numbers that leave.
        losses: further ones, mean losses of the round; a site withholds them as it does its training loss.
        why: a sentence for the report, what each part is for.
    """

    shared: Mapping[str, tuple[tuple[int, ...], str]]
    head: Mapping[str, tuple[tuple[int, ...], str]]
    class_tensors: Mapping[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)
    weight: Range | Literal["images"] = (1.0, 1.0)
    weight_name: str = "weight"
    class_weight: Range | Literal["weight", "owners"] = (1.0, 1.0)
    over_classes: bool = False
    scalars: Mapping[str, Range] = field(default_factory=dict)
    losses: Mapping[str, Range] = field(default_factory=dict)
    kind: Literal["weights", "gradient"] = "weights"
    counts: tuple[LabelType, ...] = ()
    prior: bool = False
    why: Mapping[str, str] = field(default_factory=dict)


_LOCAL = "the model that the site trained in the selected round, before the merge, on its test data"


def declared(egress: Egress, *, local: bool = False) -> list[dict[str, str]]:
    """What an update holds, and what each part is for.

    Args:
        local: whether a site also measures the model that it trained itself.
    """
    shapes = {
        "shared": "the model's tensors",
        "head": "one row per class of the site",
        "weight": _weight(egress),
        "class_weights": _class_weights(egress),
        "counts": "two numbers per class of the site, once, at the start",
        "train_loss": "a number",
        "metrics": "loss, AUROC, recall and counts of the site's classes; accuracy and its like, also by "
        "attribute where the site names one",
        "local_metrics": "the same",
    } | dict(numbers(egress))
    if egress.counts:
        shapes["counts"] += f", in a {' or '.join(egress.counts)} task"
    whys = {**egress.why, **({"local_metrics": _LOCAL} if local else {})}
    return [{"field": f, "shape": shapes.get(f, ""), "why": why} for f, why in whys.items()]


def _weight(egress: Egress) -> str:
    if egress.weight == IMAGES:
        return "the number of training images"
    low, high = egress.weight
    return f"a number in [{low:g}, {high:g}]" + (" for each class of the site" if egress.over_classes else "")


def _class_weights(egress: Egress) -> str:
    if egress.class_weight == WEIGHT:
        return "the weight, for each class"
    if egress.class_weight == OWNERS:
        return "the weight for each class of the site, 0 for every other"
    low, high = egress.class_weight
    return f"a number per class in [{low:g}, {high:g}]"


def numbers(egress: Egress) -> Iterable[tuple[str, str]]:
    """Each scalar and its range."""
    for name, (low, high) in egress.scalars.items():
        yield name, f"a number in [{low:g}, {high:g}]"
    for name, (low, high) in egress.losses.items():
        yield name, f"a number in [{low:g}, {high:g}]; withheld below `min_loss` samples"
