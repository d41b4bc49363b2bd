"""Measuring models and counting labels; a site withholds what is below its privacy limits.

Of some classes a site knows positives alone. A site that annotates consolidation knows a lung opacity where
there is a consolidation, and nothing where there is none. To learn from positives alone makes everything
positive; to take the others for negatives makes every other opacity negative. So a round begins with an E
step (Dempster, Laird, Rubin 1977) under the received model: where the annotated classes below a class are
known to be absent, its target is

    q = (1 - rho) p / (1 - rho p)

with p its probability, and rho the share of its images that show one of the classes below: of the site's
images the share with one, by the mean of p. This is the weight of an unlabelled image where labelled ones
are drawn at random from all positives (Elkan, Noto, KDD 2008), which rho, the same for all images,
supposes. Of images with the same p a share rho p is taught 1 and the others q, so that for every p

    rho p + (1 - rho p) q = p

and the positives alone do not draw the class upwards. Where the classes below are all that there are, rho
is 1 and q is 0.

The model's own probability of the classes below, image by image, would take the place of rho p in a model
that is right. One that has seen an image in training remembers that they are absent: q is then p, and
nothing balances the positives. And p is taken with the batch statistics that training sees, without
dropout: under the averaged ones, targets and steps would disagree, and the targets drift.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from suture.core.labels import LabelSet, LabelType
from suture.core.privacy import PrivacyConfig
from suture.core.runtime import repeatable
from suture.data.batch import Samples
from suture.learning.decisions import decided_classes, score_counts
from suture.learning.metrics import (
    bootstrap_mean,
    class_recalls,
    mean_defined,
    multiclass_metrics,
    rarer,
    score_classes,
)
from suture.learning.steps import LabelLoss, NonFiniteLoss, masked_loss
from suture.learning.training import LocalRound, SiteContext, predict, ready_inputs
from suture.models.classifier import ENCODER, frozen_copy
from suture.protocol.decisions import DecidedClass, Decision, Rule
from suture.protocol.egress import (
    MOST_INFLUENCE,
    bound_losses,
    complementary,
    influence_without_one,
    largest_loss,
    largest_share,
    near,
    on_grid,
    round_figure,
    step_of,
)
from suture.protocol.messages import FEW, LARGEST, ClassScore, Counts, Figures, Labels, Metrics, Scores


def expect_context(site: SiteContext, own: LabelSet, round_: LocalRound) -> SiteContext:
    """Return the site with targets for the unknown labels of its one-sided classes; the same without any.

    Args:
        own: the site's classes.
    """
    labels, train = site.model.labels, site.samples["train"]
    classes = [name for name in own.one_sided if name in labels]
    if not classes or not len(train):
        return site
    p = torch.sigmoid(as_trained(site, round_).double())
    taught = torch.full_like(train.y, torch.nan) if train.taught is None else train.taught.clone()
    for name in classes:
        column = labels.index(name)
        below = train.y[:, [labels.index(child) for child in own.one_sided[name]]]
        absent = (below == 0).all(dim=1)
        present = (below == 1).any(dim=1)
        rho = present.sum() / p[present | absent, column].sum().clamp(min=1e-9)
        q = given_absent(p[:, column], min(float(rho), 1.0))
        unknown = absent & train.y[:, column].isnan()
        taught[unknown, column] = q[unknown].to(taught)
    return replace(site, samples={**site.samples, "train": replace(train, taught=taught)})


@torch.no_grad()
def as_trained(site: SiteContext, round_: LocalRound) -> Tensor:
    """Return the logits of the training images, ``[n, c]``, in batches and with batch norm as in training."""
    model, train = frozen_copy(site.model), site.samples["train"]
    for name, module in model.named_modules():
        frozen = round_.norm == "frozen" or (name.startswith(ENCODER) and model.trains == "head")
        if isinstance(module, _BatchNorm) and not frozen:
            module.train()
    with repeatable(site.device):
        batches = train.batches(round_.local.batch_size)
        return torch.cat([model(ready_inputs(site, batch).inputs).cpu() for batch in batches])


def given_absent(p: Tensor, rho: float) -> Tensor:
    """Return the probability of a class in images without any of the annotated classes below it.

    Args:
        p: of the class, before this is known, ``[n]``.
        rho: the share of images with the class that show one of these, at most 1.

    >>> given_absent(torch.tensor([0.6, 0.1]), 0.5)
    tensor([0.4286, 0.0526])
    """
    return (1 - rho) * p / (1 - rho * p).clamp(min=1e-9)


_T = TypeVar("_T")

NOTHING = ClassScore(None, None, None, None, None)
"""The score of a class that is withheld."""


@dataclass(frozen=True)
class Measurement:
    """How a site measures every model.

    Attributes:
        loss: the method's, for validation data.
        own: the classes that the site annotates.
        limits: the site's; a figure of too few images is withheld.
        seed: of the bootstrap.
        decisions, rule: by what classes are decided, where that is measured on test data.
    """

    loss: LabelLoss
    own: LabelSet
    limits: PrivacyConfig
    seed: int
    decisions: Mapping[str, Decision] = field(default_factory=dict)
    rule: Rule = "sensitivity"


def measure(
    context: SiteContext,
    how: Measurement,
    split: Literal["validation", "test"],
    of_round: int,
    bootstrap: int = 0,
) -> Metrics:
    """Return the loss of the site's model on one split, and the figures of the site's own classes.

    The loss on validation data is the method's own, by which rounds are selected; on test data it is
    `entropy`, the same for all methods.

    Args:
        of_round: the round of the model.
        bootstrap: draws for the intervals; 0 computes none.

    Raises:
        NonFiniteLoss: a logit or the loss is not finite, or the loss is larger than any that is sent.
    """
    part = context.samples.get(split)
    if part is None or not len(part):
        return Metrics(of_round, split, 0, None, {})
    logits, labels = predict(context, part), context.model.labels
    names, limits, test = common(how.own, labels), how.limits, split == "test"
    _check_finite(bool(torch.isfinite(logits).all()), context.name, of_round)
    annotated = among_annotated(logits, part.y, labels.label_type)
    scores = class_scores(part, annotated, labels, names, limits, bootstrap=bootstrap, seed=how.seed)
    visible = without_withheld(part, scores, labels)
    loss, step = split_loss(visible, annotated if test else logits, how, test=test)
    _check_finite(abs(loss or 0.0) <= LARGEST, context.name, of_round)
    attributes: dict[str, Figures] = {}
    decided: dict[str, DecidedClass] = {}
    if test:
        attributes = by_attribute(part, annotated, labels, names, limits)
        shown, visible_classes = _show(how.decisions, scores), _show(scores, scores)
        decided = decided_classes(part, logits, labels, shown, how.rule, limits, attributes, visible_classes)
    return Metrics(
        of_round,
        split,
        len(part),
        loss,
        scores,
        overall(visible, annotated, labels.label_type, limits),
        attributes,
        decided,
        step,
    )


def common(own: LabelSet, labels: LabelSet) -> Labels:
    """Return the classes that the site annotates and a model has; one of an earlier round may lack some that
    joined since.
    """
    return tuple(name for name in own.annotated if name in labels)


def _show(values: Mapping[str, _T], scores: Mapping[str, ClassScore]) -> dict[str, _T]:
    """Return what is about classes that are not withheld."""
    return {name: value for name, value in values.items() if scores.get(name, NOTHING) != NOTHING}


def count_scores(
    context: SiteContext, how: Measurement, of_round: int, as_first: Callable[[Metrics], Metrics]
) -> Scores:
    """Return how the scores of the site's validation images are distributed, of the classes that it shows.

    Args:
        of_round: the round of the model.
        as_first: returns figures with the numbers of images that the site has first sent. A class that was
            withheld then, or had another number, has no counts here.

    Raises:
        NonFiniteLoss: a logit is not finite.
    """
    part, labels, limits = context.samples.get("validation"), context.model.labels, how.limits
    if part is None or not len(part):
        return Scores(of_round, (), {})
    logits = predict(context, part)
    _check_finite(bool(torch.isfinite(logits).all()), context.name, of_round)
    now = class_scores(part, logits, labels, common(how.own, labels), limits)
    sent = as_first(Metrics(of_round, "validation", len(part), None, now)).classes
    names = [name for name in _show(now, sent) if now[name] == sent[name]]
    return Scores(of_round, *score_counts(part, logits, labels, names, limits))


def without_withheld(part: Samples, scores: Mapping[str, ClassScore], labels: LabelSet) -> Samples:
    """Return the samples without the labels of the withheld classes, on which then no figure depends.

    An image of a withheld class of a multiclass task has no label at all.
    """
    hidden = [labels.index(name) for name, score in scores.items() if score == NOTHING]
    y = part.y.clone()
    if labels.label_type == "multilabel":
        y[:, hidden] = torch.nan
    else:
        y[(y[:, hidden] == 1).any(dim=1)] = torch.nan
    return replace(part, y=y)


def _check_finite(finite: bool, site: str, of_round: int) -> None:
    if not finite:
        raise NonFiniteLoss(f"{site}: the model of round {of_round} diverged; lower the learning rate")


def split_loss(
    part: Samples, logits: Tensor, how: Measurement, *, test: bool
) -> tuple[float | None, float | None]:
    """Return the loss of a split as it may leave the site, of bounded logits, and the step of its grid."""
    limits, label_type = how.limits, how.own.label_type
    known = ~torch.isnan(part.y) if test else part.targets()[1]
    counted = (part.y == 1).any(dim=1) if label_type == "multiclass" else known.sum(dim=1)
    if int((counted > 0).sum()) < limits.min_loss:
        return None, None
    scores = bound_losses(logits, label_type) if limits.min_loss else logits
    value = (
        entropy(part, scores, label_type) if test else float(how.loss(scores, *part.targets(), label_type))
    )
    if not limits.min_loss:
        return round_figure(value), None
    largest = largest_loss(label_type, part.y.shape[1])
    influence = largest * largest_share(part.patient_numbers, counted.numpy())
    return on_grid(value, influence, largest), step_of(influence, largest)


def loss_leaves(part: Samples | None, labels: LabelSet, how: Measurement) -> bool:
    """Return whether the site's limits let a validation loss leave, whatever the model."""
    if part is None or not len(part):
        return False
    logits = torch.zeros(part.y.shape)
    scores = class_scores(part, logits, labels, how.own.names, how.limits)
    return split_loss(without_withheld(part, scores, labels), logits, how, test=False)[0] is not None


def class_scores(
    part: Samples,
    logits: Tensor,
    labels: LabelSet,
    names: Sequence[str],
    limits: PrivacyConfig | None = None,
    *,
    bootstrap: int = 0,
    seed: int = 0,
) -> dict[str, ClassScore]:
    """Return AUROC, counts and, for multiclass labels, recall of some classes.

    Args:
        part: the samples; the columns of their y, and of the logits ``[n, c]``, are those of `labels`.
        names: the classes to score.
        limits: of a site: the score of a class with too few images is `NOTHING`. None for the server's own
            data.
    """
    columns = [labels.index(name) for name in names]
    ranked = ranking(logits, labels.label_type)[:, columns]
    scores = score_classes(
        tuple(names), part.y[:, columns].numpy(), ranked.numpy(), part.patients, bootstrap, seed
    )
    if labels.label_type == "multiclass":
        recalls = class_recalls(part.y.numpy(), logits.numpy())
        scores = {name: replace(score, recall=recalls[labels.index(name)]) for name, score in scores.items()}
    return scores if limits is None else _disclose(scores, part, columns, labels.label_type, limits)


def _disclose(
    scores: Mapping[str, ClassScore],
    part: Samples,
    columns: Sequence[int],
    label_type: LabelType,
    limits: PrivacyConfig,
) -> dict[str, ClassScore]:
    """Return the scores as they may leave a site: a class that is withheld, for itself or because another
    would follow from it, has `NOTHING`; the figures of the others are on their grids.

    Args:
        columns: of the classes in y.
    """
    moved: Mapping[str, float | None] = dict.fromkeys(scores)  # None: figures have six digits
    if limits.min_count:
        moved = influences(scores, part.y[:, columns].numpy(), part.patient_numbers, label_type, limits)
    shown = dict.fromkeys(scores, NOTHING)
    for name, influence in moved.items():
        score, step = scores[name], None if influence is None else step_of(influence)
        auroc, low, high, recall = (
            round_figure(value) if influence is None else on_grid(value, influence)
            for value in (score.auroc, score.low, score.high, score.recall)
        )
        positives, negatives = (
            None if count is None else near(count, limits.round_counts)
            for count in (score.positives, score.negatives)
        )
        shown[name] = ClassScore(auroc, low, high, positives, negatives, recall, step)
    return shown


def influences(
    names: Iterable[str],
    y: NDArray[np.float32],
    patients: NDArray[np.intp],
    label_type: LabelType,
    limits: PrivacyConfig,
) -> dict[str, float]:
    """Return how far one patient moves the figures of each class that is not withheld.

    Args:
        names: of the columns of y, ``[n, c]``.
        patients: as for `influence_without_one`.
    """
    truth = dict(zip(names, y.T, strict=True))
    counts = {name: (int((own == 1).sum()), int((own == 0).sum())) for name, own in truth.items()}
    moved = {name: influence_without_one(patients, own) for name, own in truth.items()}
    large = [n for n in truth if min(counts[n]) >= limits.min_count and moved[n] <= MOST_INFLUENCE]
    if label_type == "multiclass":
        large = complementary({n: positives for n, (positives, _) in counts.items()}, large, limits.min_count)
    return {name: moved[name] for name in large}


def counts_of(score: ClassScore) -> Counts | None:
    """Return the counts of a class; None where they are withheld."""
    return None if score.positives is None or score.negatives is None else (score.positives, score.negatives)


def entropy(part: Samples, logits: Tensor, label_type: LabelType) -> float | None:
    """Return the cross-entropy of the known labels, by which papers compare models (MIDL 2023, Tables 1, 2).

    For multilabel data it is the mean binary cross-entropy over known labels, for multiclass data the mean
    over labelled images; None where there are none.
    """
    known = ~torch.isnan(part.y)
    some = known if label_type == "multilabel" else part.y == 1
    return float(masked_loss(logits.double(), part.y, known, label_type)) if bool(some.any()) else None


def mean_interval(
    part: Samples,
    logits: Tensor,
    labels: LabelSet,
    scores: Mapping[str, ClassScore],
    bootstrap: int,
    seed: int,
) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean AUROC of some classes; arguments as for `class_scores`.

    If a class has few patients, or nothing varies, it is at least as wide as the intervals of the classes
    make it, as if these were independent.

    Args:
        scores: of these classes, with their intervals.
    """
    columns = [labels.index(name) for name in scores]
    ranked = ranking(logits, labels.label_type)[:, columns]
    drawn = bootstrap_mean(part.y[:, columns].numpy(), ranked.numpy(), part.patients, bootstrap, seed)
    bounds = [(s.auroc, s.low, s.high) for s in scores.values() if s.auroc is not None]
    defined = [(a, a - low, high - a) for a, low, high in bounds if low is not None and high is not None]
    sparse = any(rarer(part.y[:, i], part.patients) < FEW for i in columns)
    if drawn is None or not defined or (drawn[0] < drawn[1] and not sparse):
        return drawn
    areas, below, above = zip(*defined, strict=True)
    middle, n = sum(areas) / len(areas), len(areas)
    return min(drawn[0], middle - math.hypot(*below) / n), max(drawn[1], middle + math.hypot(*above) / n)


def by_attribute(
    part: Samples,
    logits: Tensor,
    labels: LabelSet,
    names: Sequence[str],
    limits: PrivacyConfig | None = None,
) -> dict[str, Figures]:
    """Return figures of the images with each value of the attribute.

    Their mean AUROCs are over the classes that have one at every value with any.
    At a site the value of too few images is left out, and so is each from which its number would follow.
    """
    images = Counter(part.attributes)
    values = [value for value in images if value]
    if limits is not None:
        large = [value for value in values if images[value] >= limits.min_count]
        values = complementary(images, large, limits.min_count)
    parts = {}
    for value in sorted(values):
        rows = [attribute == value for attribute in part.attributes]
        samples, sample_logits = Samples({}, part.y[rows], tuple(compress(part.patients, rows))), logits[rows]
        parts[value] = samples, sample_logits, class_scores(samples, sample_logits, labels, names, limits)
    defined = ({n for n, s in scores.items() if s.auroc is not None} for *_, scores in parts.values())
    measured = [found for found in defined if found]
    common = sorted(set.intersection(*measured)) if measured else []
    figures = {}
    for value, (samples, sample_logits, scores) in parts.items():
        area = mean_defined(scores[name].auroc for name in common)
        figures[value] = Figures(
            len(samples),
            area if limits is None else round_figure(area),
            overall(without_withheld(samples, scores, labels), sample_logits, labels.label_type, limits),
        )
    return figures


def among_annotated(logits: Tensor, y: Tensor, label_type: LabelType) -> Tensor:
    """Return logits whose softmax is over the classes that the data annotate, with known labels in `y`.

    The data cannot tell whether another class is right. And so a site's figures are the same whether or not
    it sees the rows of the other sites.

    Args:
        logits, y: ``[n, c]``.
    """
    if label_type == "multilabel":
        return logits
    return logits.masked_fill(torch.isnan(y).all(dim=0), torch.finfo(logits.dtype).min)


def ranking(logits: Tensor, label_type: LabelType) -> Tensor:
    """Return the scores ``[n, c]`` that rank images: logits, or probabilities for multiclass labels.

    A multiclass label competes with all others, so its logit alone does not rank images.
    """
    return logits if label_type == "multilabel" else torch.softmax(logits.double(), dim=1)


def overall(
    part: Samples,
    logits: Tensor,
    label_type: LabelType,
    limits: PrivacyConfig | None = None,
) -> dict[str, float | None]:
    """Return `multiclass_metrics` over the labelled images; {} for multilabel data or too few images."""
    labelled = (part.y == 1).any(dim=1)
    if label_type == "multilabel" or int(labelled.sum()) < max(limits.min_count if limits else 0, 1):
        return {}
    figures = multiclass_metrics(part.y.numpy(), logits.numpy())
    if limits is None or not limits.min_count:
        return figures if limits is None else {name: round_figure(value) for name, value in figures.items()}
    moved = {"accuracy": largest_share(part.patient_numbers, labelled.numpy())} | influence_on_means(part)
    sent = {name: on_grid(figures[name], most) for name, most in moved.items()}
    return {name: value for name, value in sent.items() if value is not None}


def influence_on_means(part: Samples) -> dict[str, float]:
    """Return how far one patient moves the means over the classes.

    A patient with k images, in classes of at least p, moves the recalls of the classes that they leave and
    enter by 2k / (p - k) in all, and the F1 scores of these and of the predicted ones by four times that.
    Precision has no limit: an image that alone is predicted as a class moves it by 1.
    """
    positives = (part.y == 1).sum(dim=0)
    positives = positives[positives > 0]
    most = np.bincount(part.patient_numbers, (part.y == 1).any(dim=1).numpy()).max()
    rest = float(positives.min()) - most
    recall = 2 * most / rest / len(positives) if rest > 0 else math.inf
    return {"balanced_accuracy": recall, "recall": recall, "f1": 4 * recall}


def label_counts(own: LabelSet, train: Samples, limits: PrivacyConfig) -> dict[str, Counts | None]:
    """Return the rounded numbers of training images with and without each class; None where withheld.

    Those of a one-sided class are withheld: a frequency of positives without negatives would mislead.
    """
    positives, negatives = (train.y == 1).sum(dim=0).tolist(), (train.y == 0).sum(dim=0).tolist()
    counts = dict(zip(own.names, zip(positives, negatives, strict=True), strict=True))
    large = [name for name in own.annotated if min(counts[name]) >= limits.min_count]
    if own.label_type == "multiclass":
        large = complementary({name: p for name, (p, _) in counts.items()}, large, limits.min_count)
    return {
        name: (near(p, limits.round_counts), near(n, limits.round_counts)) if name in large else None
        for name, (p, n) in counts.items()
    }
