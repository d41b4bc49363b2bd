"""The rules by which figures leave a site: what is withheld, how far figures are rounded, bounded losses.

    share       s = k / m of the patient with the most, k of m images
    influence   this patient's labels move a mean over the m images by at most s; without the patient AUROC
                and recall of a class, means over its positives or negatives, differ by at most s / (1 - s),
                the two added
    grid        a figure is rounded to a multiple of the smallest g in {1, 2, 5} x 10^-j with g >= influence,
                and withheld where the influence is more than half of its range
    loss        a probability below e^-5 counts as e^-5, so that no label has a loss above 5
    withheld    what has fewer than `min_count` images; where the total is known, with it the next smallest,
                until at least two parts with `min_count` images together are left out; labels of a
                withheld class enter no figure of the others

Withholding the next smallest is complementary suppression (Cox, JASA 75:377, 1980). At a site with
`min_count` 0 (for losses: `min_loss` 0), as simulated ones are, figures have six digits and none is withheld.

The declaration of a method of what may leave a site, against which every answer is checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar, get_args, overload

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from suture.core.errors import ConfigError
from suture.core.labels import LabelType
from suture.core.privacy import PrivacyConfig
from suture.protocol.messages import Labels, Trait, Update, align_rows, fields_with

Range = tuple[float, float]

Form = tuple[tuple[int, ...], str]
"""Shape and type of a tensor."""

Shapes = Mapping[str, Form]

Way = Literal["up", "down", "facts", "site", "server"]

Transport = Literal["float32", "float16", "int8"]
"""The type in which the model's float32 tensors travel in a round of training."""

T = TypeVar("T")

NUM_SAMPLES: Literal["images"] = "images"
"""In place of a range of the site's weight: exactly the number of training images that it announced; in place
of one of a channel: at most that number."""

WEIGHT: Literal["weight"] = "weight"
"""In place of a range of the class weights: each row has exactly the site's weight."""

OWNED_CLASSES: Literal["owners"] = "owners"
"""Likewise, but only for the classes that the site annotates; every other row has weight 0."""

SCALE_OF_MODEL: Literal["alike"] = "alike"
"""In place of a range of a channel: `max_update` bounds its norm by that of the model, and of what was sent
before."""

CLASSES = -1
"""In a shape, in place of a length: the number of classes, at a site of those that it has been sent. Such an
axis is cut to them, and ordered by their names."""

VARIABLE = -2
"""In a shape, in place of a length that is the site's own: of what it keeps, such as the number of its
images; or of what goes up, one length in all channels of an update, at most the number of classes."""


def resolve_shape(shape: tuple[int, ...], classes: int, own: int = VARIABLE) -> tuple[int, ...]:
    """The shape for so many classes, and a length of the site's own."""
    lengths = {CLASSES: classes, VARIABLE: own}
    return tuple(lengths.get(length, length) for length in shape)


def shape_mismatch(form: Form, tensor: Tensor | None, classes: int) -> str:
    """Say what a tensor of so many classes is instead of the form; empty where it has the form."""
    shape, dtype = resolve_shape(form[0], classes), form[1]
    actual = () if tensor is None else tuple(tensor.shape)
    alike = len(shape) == len(actual) and all(a in (VARIABLE, b) for a, b in zip(shape, actual, strict=True))
    if tensor is not None and alike and str(tensor.dtype) == dtype:
        return ""
    needs = str(shape).replace(str(VARIABLE), "any")
    return f"{'missing' if tensor is None else f'{actual} {tensor.dtype}'} instead of {needs} {dtype}"


def shape_mismatches(forms: Shapes, tensors: Mapping[str, Tensor], classes: int) -> dict[str, str]:
    """What is wrong with tensors of so many classes, by name: not declared, missing, or of another form."""
    found = dict.fromkeys(tensors.keys() - forms.keys(), "not declared")
    found |= {name: shape_mismatch(form, tensors.get(name), classes) for name, form in forms.items()}
    return {name: wrong for name, wrong in sorted(found.items()) if wrong}


def zeros(form: Form, classes: int) -> Tensor:
    """Zeros of the form."""
    return torch.zeros(resolve_shape(form[0], classes), dtype=getattr(torch, form[1].removeprefix("torch.")))


def reorder_axis(form: Form, tensor: Tensor, before: Labels, now: Labels) -> Tensor:
    """Return the tensor with every axis of the classes `before` as one of `now`; a new class gets zeros."""
    for axis, length in enumerate(form[0]):
        if length == CLASSES and before != now:
            tensor = align_rows(tensor, before, now, axis=axis)
    return tensor


@dataclass(frozen=True)
class Layout:
    """Shapes and types of the tensors that a model shares: whole ones, and one row of each of the head's.

    Attributes:
        buffers: those of `shared` that no gradient trains, such as the statistics of batch norm.
    """

    shared: Shapes
    head: Shapes
    buffers: frozenset[str] = frozenset()

    @property
    def features(self) -> int:
        """Number of features that the head reads; 0 where the layout has no head."""
        return self.head["head.weight"][0][0] if "head.weight" in self.head else 0

    @property
    def trained(self) -> Layout:
        """The layout of the parameters alone, without the buffers."""
        return Layout(
            {name: form for name, form in self.shared.items() if name not in self.buffers}, self.head
        )

    @classmethod
    def of(
        cls, shared: Mapping[str, Tensor], head: Mapping[str, Tensor], buffers: frozenset[str] = frozenset()
    ) -> Layout:
        """Return the layout of tensors; those of the head have a row for each class."""
        return cls(
            {name: (tuple(t.shape), str(t.dtype)) for name, t in shared.items()},
            {name: (tuple(t.shape[1:]), str(t.dtype)) for name, t in head.items()},
            buffers & shared.keys(),
        )


@dataclass(frozen=True)
class Channel:
    """What a method exchanges or keeps besides the model: one tensor, or one for each tensor of the model.

    Attributes:
        name: of the tensor; of several, each is called ``name/tensor``.
        way: ``up``, from each site with its update; ``down``, from the server, whose state has it, to each
            site with every task; ``facts``, likewise, but what the method's `class_facts` has counted at the
            start, where the type of labels has it; or kept in the state of each ``site``, or of the
            ``server``.
        shape: of the tensor, with `CLASSES` for the number of classes; of what a site keeps or sends also
            `VARIABLE`. Or a `Layout`, such as `Layout.trained`: a tensor for each of its own, of their shapes
            and types. What the server keeps begins as zeros, as does what a site keeps where the shape is
            known, and the row of a new class.
        dtype: where the shape is no layout.
        range: of what goes up, the closed range of its numbers, `NUM_SAMPLES` or `SCALE_OF_MODEL`;
            None for any up to `LARGEST`.
        rows: of what goes up with a row for each class, the classes that it tells of: the site's ``own``, or
            all ``others``. The rest of its rows is zero; with None, every row may be sent.
        why: what goes up, and the facts, are for: a sentence of the report.
    """

    name: str
    way: Way
    shape: tuple[int, ...] | Layout = ()
    dtype: str = "torch.float32"
    range: Range | Literal["images", "alike"] | None = None
    rows: Literal["own", "others"] | None = None
    why: str = ""

    @property
    def of_classes(self) -> bool:
        """Whether it is a tensor with a row for each class."""
        return not isinstance(self.shape, Layout) and self.shape[:1] == (CLASSES,)

    @property
    def forms(self) -> dict[str, Form]:
        """The shape and type of each of its tensors, with `CLASSES` for the number of classes."""
        if not isinstance(self.shape, Layout):
            return {self.name: (self.shape, self.dtype)}
        rows = {name: ((CLASSES, *row), dtype) for name, (row, dtype) in self.shape.head.items()}
        return add_prefix(self.name, {**self.shape.shared, **rows})


def add_prefix(name: str, values: Mapping[str, T]) -> dict[str, T]:
    """Name the tensors of the model as those of a channel: ``name/tensor``."""
    return {f"{name}/{key}": value for key, value in values.items()}


def strip_prefix(name: str, values: Mapping[str, T]) -> dict[str, T]:
    """Return the tensors of one channel by the names of the model's: what `add_prefix` has named."""
    return {key.removeprefix(f"{name}/"): t for key, t in values.items() if key.startswith(f"{name}/")}


@dataclass(frozen=True)
class Egress:
    """Everything that may leave a site in an update; the site's filter and the server both check against it.

    Attributes:
        shared: shape and type of each shared tensor, by name.
        head: shape of one row and type of each tensor of the head, by name.
        channels: what goes up, down, or is kept besides; see `Channel`.
        weight: closed range of the site's weight; `NUM_SAMPLES` for the number of training images.
        class_weight: closed range of the class weights; `WEIGHT` for the site's weight in each row, or
            `OWNED_CLASSES` for that weight in the rows of the classes that it labels, and 0 elsewhere.
        over_classes: whether the weight is a sum over the site's classes; the range is that of one.
        scalars: names and closed ranges of further numbers.
        losses: likewise, of further mean losses of the round, which a site withholds like its training loss.
        kind: whether tensors are weights or gradients.
        counts: the label types for which a site sends its label counts in the handshake.
        loss_parts: the losses of a round are of one of so many equal parts of the site's training images;
            None where they are of all that `LocalTraining` passes over.
        why: for the report, a sentence on the purpose of each part.
        check: raises a `RejectedUpdate` where parts of an update, each as it is declared, contradict each
            other, so that no such update reaches `aggregate`.
        local, prior, transport: no part of a method's declaration; see `suture.federation.plan.Plan.egress`.
    """

    shared: Shapes
    head: Shapes
    channels: tuple[Channel, ...] = ()
    weight: Range | Literal["images"] = (1.0, 1.0)
    class_weight: Range | Literal["weight", "owners"] = (1.0, 1.0)
    over_classes: bool = False
    scalars: Mapping[str, Range] = field(default_factory=dict)
    losses: Mapping[str, Range] = field(default_factory=dict)
    kind: Literal["weights", "gradient"] = "weights"
    counts: tuple[LabelType, ...] = ()
    loss_parts: int | None = None
    why: Mapping[str, str] = field(default_factory=dict)
    check: Callable[[Update], None] | None = None
    local: bool = False
    prior: bool = False
    transport: Transport = "float32"

    @property
    def with_masks(self) -> Egress:
        """The same for masked updates, whose tensors are integers modulo 2^64."""
        shared = {name: (shape, "torch.int64") for name, (shape, _) in self.shared.items()}
        head = {name: (row, "torch.int64") for name, (row, _) in self.head.items()}
        return replace(self, shared=shared, head=head, check=None)

    def going(self, *ways: Way) -> list[Channel]:
        """The channels of some ways."""
        return [channel for channel in self.channels if channel.way in ways]

    def forms(self, *ways: Way) -> dict[str, Form]:
        """The shapes and types of their tensors, by name; see `Channel.forms`."""
        return {name: form for channel in self.going(*ways) for name, form in channel.forms.items()}


def check_declared(egress: Egress, method: str) -> None:
    """Refuse the channels of a method that cannot hold what they are declared for.

    Args:
        method: its title, for the message.

    Raises:
        ConfigError: names the method, the first wrong channel, and the remedy.
    """
    taken: set[tuple[str, str]] = set()
    for channel in egress.channels:
        # What comes up may be called as what goes down, such as a site's part of a mean and the mean.
        place = "server" if channel.way in ("down", "facts") else channel.way
        names = {(place, name) for name in (channel.name, *channel.forms)}
        twice = "and so does another channel: give each a name of its own" if names & taken else ""
        if fault := twice or _fault(channel):
            raise ConfigError(f"{method} declares the channel {channel.name!r}, {fault}")
        taken |= names


def _fault(channel: Channel) -> str:
    """What is wrong with a channel, and the remedy; empty where nothing is."""
    if channel.way not in get_args(Way):
        return f"whose way is {channel.way!r}: set it to {', '.join(get_args(Way))}"
    for shape, dtype in channel.forms.values():
        kind = getattr(torch, dtype.removeprefix("torch."), None)
        if not isinstance(kind, torch.dtype) or str(kind) != dtype or kind.is_complex:
            return f"whose type is {dtype!r}: set it to that of real numbers, such as 'torch.float32'"
        if VARIABLE in shape and channel.way not in ("site", "up"):
            return (
                f"which has an axis VARIABLE and goes {channel.way}: only the ways site and up may have one"
            )
    if channel.rows is not None and not channel.of_classes:
        return "whose rows are not classes: remove rows, or let its shape begin with CLASSES"
    if channel.way == "facts" and not channel.of_classes:
        return "which tells of each class: let its shape begin with CLASSES"
    return ""


_LOCAL = "the model that the site trained in the selected round, before aggregation, on its test data"


def list_declared(egress: Egress) -> list[dict[str, str]]:
    """Return the fields that may leave a site, each with its shape and purpose."""
    narrowed = egress.transport != "float32"
    how = f", in {egress.transport}" if narrowed else ""
    how += ", as changes of what the site received" if narrowed and egress.kind == "weights" else ""
    shapes = {
        "shared": f"the model's tensors{how}",
        "head": f"one row for each class that the site sees{how}",
        "weight": _weight(egress),
        "class_weights": _class_weights(egress),
        "counts": "two numbers per class of the site, once, at the start",
        **dict.fromkeys(fields_with(Update, Trait.LOSS), "a number"),
        "metrics": "loss, AUROC, recall and counts of the site's classes; accuracy and its like, also by "
        "attribute where the site names one",
        "local_metrics": "the same",
    }
    shapes |= {**dict(channels(egress)), **dict(numbers(egress))}
    if egress.counts:
        shapes["counts"] += f", with {' or '.join(egress.counts)} labels"
    whys = {**egress.why, **{channel.name: channel.why for channel in egress.going("up", "facts")}}
    whys |= {"local_metrics": _LOCAL} if egress.local else {}
    return [{"field": f, "shape": shapes.get(f, ""), "why": why} for f, why in whys.items()]


def _weight(egress: Egress) -> str:
    if egress.weight == NUM_SAMPLES:
        return "the number of training images"
    low, high = egress.weight
    return f"a number in [{low:g}, {high:g}]" + (" for each class of the site" if egress.over_classes else "")


def _class_weights(egress: Egress) -> str:
    if egress.class_weight == WEIGHT:
        return "the weight, for each class"
    if egress.class_weight == OWNED_CLASSES:
        return "the weight for each class of the site, 0 for every other"
    low, high = egress.class_weight
    return f"a number per class in [{low:g}, {high:g}]"


def channels(egress: Egress) -> Iterable[tuple[str, str]]:
    """Yield the name and the shape of what goes up besides; its lengths only where the model is known.

    The facts that the server makes of the sites' counts are among them: other sites receive them.
    """
    for channel in egress.going("up", "facts"):
        to = "from the server to the sites: " if channel.way == "facts" else ""
        yield channel.name, to + _shape(channel, bool(egress.shared)) + _range(channel)


def _shape(channel: Channel, known: bool) -> str:
    if isinstance(channel.shape, Layout):
        return "a tensor for each of the model that is trained"
    row, each = (channel.shape[1:], "for each class") if channel.of_classes else (channel.shape, "")
    if not row:
        return f"a number {each}".strip()
    words = {CLASSES: "classes", VARIABLE: "up to classes"}
    lengths = " × ".join(words.get(length, str(length)) for length in row)
    return f"{each} {lengths} numbers".strip() if known else f"numbers {each}".strip()


def _range(channel: Channel) -> str:
    if channel.range == NUM_SAMPLES:
        return ", at most that of training images"
    if channel.range is None or channel.range == SCALE_OF_MODEL:
        return ""
    low, high = channel.range
    return f" in [{low:g}, {high:g}]"


def numbers(egress: Egress) -> Iterable[tuple[str, str]]:
    """Yield the name and the range of each scalar."""
    for name, (low, high) in egress.scalars.items():
        yield name, f"a number in [{low:g}, {high:g}]"
    for name, (low, high) in egress.losses.items():
        yield name, f"a number in [{low:g}, {high:g}]; withheld below `min_loss` samples"


Count = TypeVar("Count", int, NDArray[np.int64], Tensor)

BOUND = 5.0
"""The largest loss of a label."""

MOST_INFLUENCE = 0.5
"""The largest influence, in parts of a figure's range, that a patient may have on a figure that leaves."""

_GRIDS = tuple(m * 10.0**-j for j in range(6, -1, -1) for m in (1, 2, 5))


def largest_share(patients: NDArray[np.intp], counted: ArrayLike) -> float:
    """Return the largest share that one patient has of what is counted; 1 where nothing is.

    Args:
        patients: number of the patient of each image, [n].
        counted: of each image, such as 1 where it is positive, or its number of known labels, [n].
    """
    found = np.bincount(patients, np.asarray(counted, dtype=np.float64))
    return float(found.max() / found.sum()) if found.sum() else 1.0


def influence_without_one(patients: NDArray[np.intp], y: NDArray[np.float32]) -> float:
    """Return the influence of a patient on the figures of a class: s / (1 - s) of both kinds of images.

    Args:
        patients: as for `largest_share`.
        y: labels of the class, [n]: 1, 0 or NaN.

    Returns:
        infinity where all positives or all negatives are of one patient, or there are none.
    """
    influence = 0.0
    for kind in (y == 1, y == 0):
        found = np.bincount(patients, kind)
        rest = found.sum() - found
        influence = influence + np.divide(found, rest, out=np.full(found.shape, math.inf), where=rest > 0)
    return float(np.max(influence))


def on_grid(value: float | None, influence: float, largest: float = 1.0) -> float | None:
    """Return a figure in [0, largest] rounded to its grid; None where a patient moves it too far."""
    step = step_of(influence, largest)
    return None if value is None or step is None else _nearest(value, step)


def step_of(influence: float, largest: float = 1.0) -> float | None:
    """Return the step to which a figure in [0, largest] is rounded; None where it is withheld."""
    return None if influence > MOST_INFLUENCE * largest else next(s for s in _GRIDS if s >= influence)


def near(count: Count, step: int) -> Count:
    """Return whole numbers rounded to multiples of a site's `round_counts`, halves up.

    What a site shows is never rounded to 0: it is at least `min_count`, and so half a step (`PrivacyConfig`).
    """
    return (2 * count + step) // (2 * step) * step


def may_be(value: float, influence: float) -> bool:
    """Whether a figure lies on some grid of a figure on which a patient has at least this influence."""
    return any(value == _nearest(value, step) for step in _GRIDS if step >= influence)


def is_multiple(value: float | None, step: float) -> bool:
    """Whether the step is one of a grid, and a figure, if there is one, on it."""
    return step in _GRIDS and (value is None or value == _nearest(value, step))


@overload
def round_figure(value: float) -> float: ...


@overload
def round_figure(value: float | None) -> float | None: ...


def round_figure(value: float | None) -> float | None:
    """Round a number that leaves a site to six significant digits: further digits could carry information."""
    return None if value is None else float(f"{value:.6g}")


def _nearest(value: float, step: float) -> float:
    return round_figure(round(value / step) * step)


def bound_losses(logits: Tensor, label_type: LabelType) -> Tensor:
    """Return logits ``[n, c]`` whose losses are at most `largest_loss`; ordinary ones are unchanged."""
    if label_type == "multilabel":
        most = math.log(math.expm1(BOUND))  # its sigmoid is 1 - e^-5
        return logits.clamp(-most, most)
    return torch.log_softmax(logits, dim=1).clamp_min(-BOUND)


def largest_loss(label_type: LabelType, classes: int) -> float:
    """Return the largest loss of an image: bounded probabilities of several classes exceed 1 in sum."""
    return BOUND if label_type == "multilabel" else BOUND + math.log1p((classes - 1) * math.exp(-BOUND))


def training_loss(value: float | None, samples: int, limits: PrivacyConfig) -> float | None:
    """Return the mean loss of local steps as it may leave a site: at most `BOUND`, on its samples' grid.

    What a single sample adds to it is not bounded, which would change the training.
    """
    if value is None or samples < limits.min_loss:
        return None
    return on_grid(min(value, BOUND), BOUND / samples, BOUND) if limits.min_loss else round_figure(value)


def complementary(counts: Mapping[str, int], large: Iterable[str], min_count: int) -> list[str]:
    """Return which parts of a known total may be shown; a hidden part fits the total with many values.

    Args:
        counts: of every part; they add up to the total.
        large: the parts that need not be withheld for themselves.
    """
    if not min_count:
        return list(large)
    shown = sorted(large, key=lambda name: counts[name])
    hidden = [name for name in counts if name not in shown]
    while hidden and shown and (len(hidden) < 2 or sum(counts[n] for n in hidden) < min_count):
        hidden.append(shown.pop(0))
    return shown
