"""The check of a site's answer as a whole, by the site's filter before it leaves and by the server."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from suture.core.errors import LabelError, RejectedUpdate
from suture.core.ontology import check_stated
from suture.core.privacy import PrivacyConfig
from suture.protocol.decisions import CELLS, JOINED, Decided, DecidedGroup
from suture.protocol.egress import (
    BOUND,
    CLASSES,
    NUM_SAMPLES,
    SCALE_OF_MODEL,
    VARIABLE,
    WEIGHT,
    Channel,
    Egress,
    Range,
    Shapes,
    Transport,
    is_multiple,
    may_be,
    resolve_shape,
    round_figure,
)
from suture.protocol.messages import (
    KEYS,
    LARGEST,
    Abstain,
    Evaluation,
    Labels,
    Masking,
    MaskTask,
    Metrics,
    Reply,
    Scores,
    SiteInfo,
    Spent,
    TaskData,
    TaskName,
    Trait,
    Update,
    fields_with,
)
from suture.protocol.packing import VARIANCE, check_narrowed

_ANSWERS: dict[TaskName, type[Reply]] = {
    "handshake": SiteInfo,
    "mask": Masking,
    "train": Update,
    "calibrate": Scores,
    "evaluate": Evaluation,
}


@dataclass(frozen=True)
class AllowedReply:
    """What a site may answer to a task: its filter and the server check the answer against the same.

    Each side makes it of its own model and plan, never of a message's tensors, so that neither can widen what
    the other lets through.

    Attributes:
        task: with the classes of the rows in the site's own names.
        egress: what the plan declares; before there is a model, of an empty layout.
        own: the classes that the site annotates, likewise.
        images: number of training images that it has announced.
        limits: of the site, by its own filter. The server does not know them; a site that sends finer figures
            harms itself alone.
        ledger: the digest of its ledger that the site states, by its own filter; None at the server.
    """

    task: TaskData
    egress: Egress
    own: Labels = ()
    images: int = 0
    limits: PrivacyConfig | None = None
    ledger: str | None = None

    @property
    def transport(self) -> Transport:
        """The type in which float32 tensors of the model may come."""
        return self.egress.transport if self.task.task == "train" else "float32"


def check_reply(reply: Reply, allowed: AllowedReply) -> None:
    """Check a reply against what is allowed, and so against what the method declares.

    Raises:
        RejectedUpdate: names the first deviation. The caller has to drop the whole reply.
    """
    if isinstance(reply, Abstain):
        return
    if not isinstance(reply, _ANSWERS[allowed.task.task]):
        raise RejectedUpdate(f"a {type(reply).__name__} is not an answer to {allowed.task.task!r}")
    if isinstance(reply, Masking):
        _check_masking(reply, allowed.task.mask)
        return
    if allowed.ledger is not None and reply.ledger != allowed.ledger:
        raise RejectedUpdate("the digest of another ledger")
    if isinstance(reply, SiteInfo):
        _check_labels(reply.labels)
        if not reply.labels:
            raise RejectedUpdate("no labels")
        if reply.counts.keys() != (set(reply.labels) if reply.label_type in allowed.egress.counts else set()):
            raise RejectedUpdate("counts of other classes than were asked for")
        if (reply.prior is not None) != allowed.egress.prior:
            raise RejectedUpdate("a prior that was not asked for, or none where one was")
        _check_codes(reply)
    elif isinstance(reply, Scores):
        _check_scores(reply, allowed)
    elif isinstance(reply, Evaluation):
        _check_spent(reply.spent)
        _check_metrics(reply.metrics, allowed, allowed.task.round)
        if reply.local is not None:
            if not allowed.egress.local or allowed.task.split != "test":
                raise RejectedUpdate("figures of a local model that were not asked for")
            _check_metrics(reply.local, allowed, allowed.task.round)
    elif isinstance(reply, Update):
        _check_update(reply, allowed)


def _check_masking(reply: Masking, task: MaskTask | None) -> None:
    """Check that a step of secure aggregation has what is asked for, and nothing else."""
    if task is None or reply.step != task.step:
        raise RejectedUpdate(f"the step {reply.step!r} of secure aggregation was not asked for")
    needed = {"keys": {"keys"}, "shares": {"sealed"}, "survivors": {"signature"}, "reveal": {"seeds"}}
    further = {"survivors": {"unopened"}, "reveal": {"secrets"}}.get(reply.step, set())
    fields = ("keys", "sealed", "signature", "unopened", "seeds", "secrets")
    given = {name for name in fields if getattr(reply, name)}
    if given - further != needed[reply.step]:
        raise RejectedUpdate(f"{', '.join(sorted(given)) or 'nothing'} in the step {reply.step!r}")
    if reply.keys and set(reply.keys.rows) != set(task.numbers.values()):
        raise RejectedUpdate("keys for other rows than those that were asked for")


def _check_codes(info: SiteInfo) -> None:
    if stray := info.codes.keys() - set(info.labels):
        raise RejectedUpdate(f"codes of the unknown label {min(stray)!r}")
    try:
        check_stated(info.codes)
    except LabelError as error:
        raise RejectedUpdate(f"codes: {error}") from None


def _check_scores(scores: Scores, allowed: AllowedReply) -> None:
    """Check that every count is of enough images of a class that the site annotates."""
    if scores.round != allowed.task.round:
        raise RejectedUpdate(f"scores of round {scores.round} instead of {allowed.task.round}")
    _check_spent(scores.spent)
    _check_labels(scores.labels)
    if stray := set(scores.labels) - set(allowed.own):
        raise RejectedUpdate(f"scores of the unknown label {min(stray)!r}")
    declared = ((len(scores.labels), CELLS), "torch.int32")
    _check_tensors("class_tensors", scores.class_tensors, {"positives": declared, "negatives": declared})
    limits = allowed.limits
    step = limits.round_counts if limits else 1
    least = max(limits.min_count if limits else 0, step if step > 1 else 0)
    for name, counts in scores.class_tensors.items():
        shown = counts[counts != JOINED]
        few = (shown < least // step * step) | (shown % step != 0)
        if few.any() or (counts[:, -1] == JOINED).any():
            raise RejectedUpdate(f"class_tensors/{name} has a count of too few images, or none at its end")
        if (shown > LARGEST).any():
            raise RejectedUpdate(f"class_tensors/{name} has a count above {LARGEST:,}")


def _check_update(update: Update, allowed: AllowedReply) -> None:
    # Masked numbers fill the whole ring: of them only names, shapes and types can be checked.
    egress = allowed.egress.with_masks if allowed.task.mask else allowed.egress
    if update.round != allowed.task.round:
        raise RejectedUpdate(f"round {update.round} instead of {allowed.task.round}")
    if update.state > allowed.task.committed:
        raise RejectedUpdate(f"the state of round {update.state}, which was not committed")
    if update.kind != egress.kind:
        raise RejectedUpdate(f"kind {update.kind!r} instead of {egress.kind!r}")
    # Names before tensors, whose shapes depend on their number.
    _check_labels(update.labels)
    if stray := set(update.labels) - set(allowed.task.labels):
        raise RejectedUpdate(f"unknown label {min(stray)!r}")
    if update.labels != allowed.task.labels:
        raise RejectedUpdate(
            f"labels of {len(update.labels)} rows instead of the {len(allowed.task.labels)} asked"
        )
    rows = len(update.labels)
    _check_tensors("shared", update.shared, egress.shared, allowed.transport)
    if update.kind == "weights" and not allowed.task.mask:  # in fewer bits they are changes
        for name, tensor in update.shared.items():
            whole_one = name.endswith(VARIANCE) and str(tensor.dtype) == egress.shared[name][1]
            if whole_one and bool((tensor < 0).any()):  # no site could compute with it
                raise RejectedUpdate(f"{name} has a negative variance")
    head = {name: ((CLASSES, *row), dtype) for name, (row, dtype) in egress.head.items()}
    _check_tensors("head", update.head, _whole(head, rows), allowed.transport)
    channels = egress.forms("up")
    _check_tensors("channels", update.channels, _whole(channels, rows, _own(update.channels, channels, rows)))
    for channel in egress.going("up"):
        _check_channel(channel, update, allowed)
    _check_tensors("", {"class_weights": update.class_weights}, {"class_weights": ((rows,), "torch.float64")})
    _check_weights(update, allowed)
    # Each name that was declared and no other: a name could carry information, and so could its absence.
    numbers = update.scalars.keys() - egress.losses.keys()  # losses may be withheld
    if numbers != egress.scalars.keys():
        raise RejectedUpdate(_difference("scalars", numbers, egress.scalars.keys()))
    for name, value in update.scalars.items():
        _check_rounded(name, value, {**egress.scalars, **egress.losses}[name])
    # Of all numbers that are fields, the method's declaration bounds the weight alone.
    for name, value in vars(update).items():
        if isinstance(value, float) and name != "weight":
            _check_rounded(name, value)
    _check_spent(update.spent)
    if allowed.limits and allowed.limits.min_loss:
        losses = {name: getattr(update, name) for name in fields_with(Update, Trait.LOSS)}
        losses |= {name: update.scalars.get(name) for name in egress.losses}
        for name, number in losses.items():
            _check_grid(name, number, BOUND, allowed.images)
    if update.metrics is not None:
        _check_metrics(update.metrics, allowed, allowed.task.committed)
    if egress.check:
        egress.check(update)


def _check_channel(channel: Channel, update: Update, allowed: AllowedReply) -> None:
    """Check the range of a channel, and that it says nothing of classes that it is not about."""
    low, high = _range_of(channel, allowed.images)
    for name in channel.forms:
        tensor = update.channels[name]
        if tensor.numel():
            least, most = (float(extreme) for extreme in tensor.aminmax())
            if least < low or most > high:
                raise RejectedUpdate(f"channels/{name} has numbers outside [{low:g}, {high:g}]")
    if channel.rows is None:
        return
    own = set(allowed.own)
    for label, row in zip(update.labels, update.channels[channel.name], strict=True):
        if (label in own) != (channel.rows == "own") and bool(row.any()):
            whose = "the site" if channel.rows == "own" else "others"
            raise RejectedUpdate(
                f"channels/{channel.name} has a row of {label!r}; it is of classes of {whose}"
            )


def _range_of(channel: Channel, images: int) -> Range:
    if channel.range is None or channel.range == SCALE_OF_MODEL:
        return -LARGEST, LARGEST
    return (0, images) if channel.range == NUM_SAMPLES else channel.range


def _check_weights(update: Update, allowed: AllowedReply) -> None:
    """Check the weight of the site in the mean of shared tensors, and in that of each row."""
    egress = allowed.egress
    if egress.weight == NUM_SAMPLES:
        low = high = float(allowed.images)
    else:
        low, high = egress.weight
        high *= len(allowed.own) if egress.over_classes else 1
    _check_range("weight", update.weight, (low, high))
    rows = update.class_weights
    if isinstance(egress.class_weight, tuple):
        low, high = egress.class_weight
        if not bool(((rows >= low) & (rows <= high)).all()):
            raise RejectedUpdate(f"class_weights outside [{low}, {high}]")
        return
    own = set(allowed.own)
    for label, weight in zip(update.labels, rows.tolist(), strict=True):
        counts = egress.class_weight == WEIGHT or label in own
        right = update.weight if counts else 0.0
        if weight != right:
            raise RejectedUpdate(f"the class weight of {label!r} is {weight} instead of {right}")


def _check_labels(labels: Labels) -> None:
    if len(set(labels)) != len(labels):
        twice = next(name for name, times in Counter(labels).items() if times > 1)
        raise RejectedUpdate(f"label {twice!r} appears twice")


def _check_tensors(
    group: str, tensors: Mapping[str, Tensor], declared: Shapes, transport: Transport = "float32"
) -> None:
    if tensors.keys() != declared.keys():
        raise RejectedUpdate(_difference(group, tensors.keys(), declared.keys()))
    for name, tensor in tensors.items():
        shape, dtype = declared[name]
        narrowed = check_narrowed(f"{group}/{name}", tensor, declared[name], transport)
        if tuple(tensor.shape) != tuple(shape) and not narrowed:
            raise RejectedUpdate(f"{group}/{name} has shape {tuple(tensor.shape)} instead of {tuple(shape)}")
        if str(tensor.dtype) != dtype and not narrowed:
            raise RejectedUpdate(f"{group}/{name} is {tensor.dtype} instead of {dtype}")
        if tensor.is_floating_point() and not all_finite(tensor):
            raise RejectedUpdate(f"{group}/{name} is not finite")


def all_finite(tensor: Tensor) -> bool:
    """Whether all values are; its extremes are exactly then: one pass, and no mask in memory."""
    return not tensor.numel() or all(math.isfinite(extreme.item()) for extreme in tensor.aminmax())


def _check_metrics(metrics: Metrics, allowed: AllowedReply, of_round: int) -> None:
    split = allowed.task.split if allowed.task.task == "evaluate" else "validation"
    if metrics.round != of_round or metrics.split != split:
        raise RejectedUpdate(f"metrics of round {metrics.round} ({metrics.split}) were not asked for")
    if stray := metrics.classes.keys() - set(allowed.own):
        raise RejectedUpdate(f"metrics of the unknown label {min(stray)!r}")
    if metrics.attributes and allowed.task.split != "test":
        raise RejectedUpdate("figures by attribute are of test data alone")
    if stray := metrics.decided.keys() - (set(allowed.task.decisions) if split == "test" else set()):
        raise RejectedUpdate(f"the decisions of {min(stray)!r} were not asked for")
    groups = {value for one in metrics.decided.values() for value in one.groups}
    if stray := groups - metrics.attributes.keys():
        raise RejectedUpdate(f"the group {min(stray)!r} has no figures by attribute")
    for value in _check_decided(metrics):
        _check_rounded("a figure of decisions", value, (0.0, 1.0))
    _check_rounded("loss", metrics.loss)
    _check_step("loss", metrics.loss, metrics.loss_step)
    for found in (metrics.overall, *(part.overall for part in metrics.attributes.values())):
        if stray := found.keys() - set(KEYS):
            raise RejectedUpdate(f"the metric {min(stray)!r} was not asked for")
        for name, value in found.items():
            _check_rounded(name, value, (0.0, 1.0))
    counts: list[int | None] = [metrics.n]
    for part in metrics.attributes.values():
        _check_rounded("AUROC", part.auroc, (0.0, 1.0))
        counts.append(part.n)
    for score in metrics.classes.values():
        for value in (score.auroc, score.low, score.high, score.recall):
            _check_rounded("AUROC", value, (0.0, 1.0))
            _check_step("AUROC", value, score.step)
        counts += [score.positives, score.negatives]
    for count in counts:
        _check_range("a count", count or 0, (0, LARGEST))
    if allowed.limits:
        _check_grids(metrics, allowed.limits)


def _check_decided(metrics: Metrics) -> list[float | None]:
    """Return the figures of decisions, of all classes."""
    figures: list[float | None] = []
    for decided in metrics.decided.values():
        points: list[Decided | DecidedGroup] = [p for p in (decided.own, decided.pooled, decided.half) if p]
        points += decided.groups.values()
        figures += [value for point in points for value in (point.sensitivity, point.specificity)]
        figures += [*decided.ece, *decided.brier]
    return figures


def _check_grids(metrics: Metrics, limits: PrivacyConfig) -> None:
    """Check that no figure is finer than a site's limits permit for its number of images."""
    if limits.min_loss and metrics.loss is not None:
        _check_grid("loss", metrics.loss, BOUND, metrics.n)
    if not limits.min_count:
        return
    parts = [(metrics.overall, metrics.n), *((part.overall, part.n) for part in metrics.attributes.values())]
    for figures, n in parts:
        for name, value in figures.items():
            _check_grid(name, value, 1.0, n)
    for score in metrics.classes.values():
        for value in (score.auroc, score.low, score.high, score.recall):
            _check_grid("AUROC", value, 1.0, metrics.n)
    for value in _check_decided(metrics):
        _check_grid("a figure of decisions", value, 1.0, metrics.n)


def _check_grid(name: str, value: float | None, largest: float, images: int) -> None:
    if value is not None and not may_be(value, largest / max(images, 1)):
        raise RejectedUpdate(f"{name} has more digits than {images} images support")


def _check_step(name: str, value: float | None, step: float | None) -> None:
    if step is not None and not is_multiple(value, step):
        raise RejectedUpdate(f"{name} is not rounded to the stated step of {step:g}")


def _check_spent(spent: Spent | None) -> None:
    if spent and spent.epsilon is not None and spent.epsilon != float(f"{spent.epsilon:.3g}"):
        raise RejectedUpdate("ε has more than three digits")


def _check_range(name: str, value: float, declared: Range) -> None:
    low, high = declared
    if not low <= value <= high:
        raise RejectedUpdate(f"{name} is {value}, outside [{low}, {high}]")


def _check_rounded(name: str, value: float | None, declared: Range = (-math.inf, math.inf)) -> None:
    """Check that a figure lies in its range and is rounded: further digits could carry information."""
    if value is None:
        return
    _check_range(name, value, declared)
    if value != round_figure(value):
        raise RejectedUpdate(f"{name} has more than six digits")


def _whole(declared: Shapes, classes: int, own: int = VARIABLE) -> Shapes:
    return {name: (resolve_shape(shape, classes, own), dtype) for name, (shape, dtype) in declared.items()}


def _own(sent: Mapping[str, Tensor], declared: Shapes, classes: int) -> int:
    """Return the length that the axes `VARIABLE` of what goes up have: that of the first, or the most."""
    for name, (shape, _) in declared.items():
        if VARIABLE in shape and name in sent and sent[name].dim() == len(shape):
            return min(sent[name].shape[shape.index(VARIABLE)], classes)
    return classes


def _difference(group: str, found: object, declared: object) -> str:
    have, want = set(found), set(declared)  # type: ignore[call-overload]
    if extra := have - want:
        return f"{group}/{min(extra)} was not declared"
    return f"{group}/{min(want - have)} is missing"
