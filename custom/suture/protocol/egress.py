"""The declaration of a method of what may leave a site, against which every answer is checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from suture.core.labels import LabelType

Range = tuple[float, float]

IMAGES: Literal["images"] = "images"
"""In place of a range of the site's weight: exactly the number of training images that it announced; in place
of one of a tensor of classes: at most that number."""

WEIGHT: Literal["weight"] = "weight"
"""In place of a range of the class weights: each row has exactly the site's weight."""

OWNERS: Literal["owners"] = "owners"
"""Likewise, but only for the classes that the site annotates; every other row has weight 0."""

ALIKE: Literal["alike"] = "alike"
"""In place of a range of a tensor of classes: `max_update` bounds its norm by that of the model, and of what
was sent before."""


CLASSES = -1
"""In the shape of a row, in place of a length: the number of classes that the site has been sent."""


def whole(row: tuple[int, ...], classes: int) -> tuple[int, ...]:
    """The shape of a tensor of so many classes whose rows have the given shape."""
    return (classes, *(classes if length == CLASSES else length for length in row))


@dataclass(frozen=True)
class Egress:
    """Everything that may leave a site in an update; the site's filter and the server both check against it.

    Attributes:
        shared: shape and type of each shared tensor, by name.
        head: shape of one row and type of each tensor of the head, by name.
        class_tensors: likewise, of further tensors with one row per class; see `CLASSES`.
        class_ranges: closed range of the numbers of a tensor of classes, `IMAGES` or `ALIKE`; without one, of
            any number up to `LARGEST`.
        class_rows: the classes of which a tensor says something, by its name: the site's ``own``, or all
            ``others``. The rest of its rows is zero; without an entry, every row may be sent.
        weight: closed range of the site's weight; `IMAGES` for the number of training images.
        weight_name: name of the weight in error messages.
        class_weight: closed range of the class weights; `WEIGHT` or `OWNERS` for the site's own weight.
        over_classes: whether the weight is a sum over the site's classes; the range is that of one.
        scalars: names and closed ranges of further numbers.
        losses: likewise, of further mean losses of the round, which a site withholds like its training loss.
        kind: whether tensors are weights or gradients.
        counts: the label types for which a site sends its label counts in the handshake.
        prior: whether it sends the digest of its frozen network in the handshake.
        why: for the report, a sentence on the purpose of each part.
    """

    shared: Mapping[str, tuple[tuple[int, ...], str]]
    head: Mapping[str, tuple[tuple[int, ...], str]]
    class_tensors: Mapping[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)
    class_ranges: Mapping[str, Range | Literal["images", "alike"]] = field(default_factory=dict)
    class_rows: Mapping[str, Literal["own", "others"]] = field(default_factory=dict)
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


_LOCAL = "the model that the site trained in the selected round, before aggregation, on its test data"


def declared(egress: Egress, *, local: bool = False, half: bool = False) -> list[dict[str, str]]:
    """Return the fields that may leave a site, each with its shape and purpose.

    Args:
        local: whether a site also evaluates the model that it trained itself.
        half: whether tensors of the model travel in half precision; see `suture.protocol.half`.
    """
    how = ", in float16" if half else ""
    how += ", as changes of what the site received" if half and egress.kind == "weights" else ""
    shapes = (
        {
            "shared": f"the model's tensors{how}",
            "head": f"one row for each class that the site sees{how}",
            "weight": _weight(egress),
            "class_weights": _class_weights(egress),
            "counts": "two numbers per class of the site, once, at the start",
            "train_loss": "a number",
            "metrics": "loss, AUROC, recall and counts of the site's classes; accuracy and its like, also by "
            "attribute where the site names one",
            "local_metrics": "the same",
        }
        | dict(class_tensors(egress))
        | dict(numbers(egress))
    )
    if egress.counts:
        shapes["counts"] += f", with {' or '.join(egress.counts)} labels"
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


def class_tensors(egress: Egress) -> Iterable[tuple[str, str]]:
    """Yield the name and the row of each tensor of classes; its lengths only where the model is known."""
    for name, (row, _) in egress.class_tensors.items():
        lengths = " × ".join("classes" if length == CLASSES else str(length) for length in row)
        several = f"for each class {lengths} numbers" if egress.shared else "numbers for each class"
        yield name, (several if row else "a number for each class") + _class_range(egress, name)


def _class_range(egress: Egress, name: str) -> str:
    declared = egress.class_ranges.get(name, ALIKE)
    if declared == ALIKE:
        return ""
    if declared == IMAGES:
        return ", at most that of training images"
    low, high = declared
    return f" in [{low:g}, {high:g}]"


def numbers(egress: Egress) -> Iterable[tuple[str, str]]:
    """Yield the name and the range of each scalar."""
    for name, (low, high) in egress.scalars.items():
        yield name, f"a number in [{low:g}, {high:g}]"
    for name, (low, high) in egress.losses.items():
        yield name, f"a number in [{low:g}, {high:g}]; withheld below `min_loss` samples"
