"""A round of FedLSM at a site: images by uncertainty, a teacher that labels, and what it has counted.

Deng, Luo, Chen. FedLSM, MICCAI 2023, Sec. 2.3; hyperparameters of its Table 4 and Sec. 3.2.

Uncertainty and pseudo-labels of FedLSM, once for any subset of classes and once for exactly one.

    Deng, Luo, Chen. Scale Federated Learning for Label Set Mismatch in Medical Image Classification.
    MICCAI 2023, Sec. 2.3. c runs over the M classes; U are those that an image's site does not know.

Both kinds answer the same questions: how uncertain is an image, what is it taught, and how much does each
entry count. What differs is a sigmoid or a softmax.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Annotated, Literal, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, PlainValidator
from pydantic.dataclasses import dataclass as validated
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from suture.core.errors import ConfigError
from suture.core.labels import LabelType
from suture.core.runtime import generator_for, seed_for
from suture.core.validation import LIMIT, STRICT
from suture.data.batch import STRONG, WEAK, Augmentation, Batch, endless
from suture.learning.steps import probabilities, weighted_bce
from suture.learning.training import LocalRound, SiteContext, predict, prefetch, ready_inputs, view, view_key
from suture.models.classifier import Classifier, frozen_copy

Reading = Literal["paper", "program"]
"""Where the paper and its published program differ, which of the two is followed."""


@dataclasses.dataclass(frozen=True)
class Thresholds:
    """How sure the teacher must be.

    Attributes:
        positive, negative: of a class by itself (multilabel): at least, and at most.
        best: of the most likely unknown class (multiclass).
    """

    positive: float
    negative: float
    best: float


@dataclasses.dataclass(frozen=True)
class Targets:
    """What a batch is taught.

    Attributes:
        y: ``[n, c]``: the label, the pseudo-label, or the teacher's probability where it is unsure.
        sure: ``[n, c]``: entries with a label or a pseudo-label.
        made: ``[n, c]``: entries with a pseudo-label.
    """

    y: Tensor
    sure: Tensor
    made: Tensor

    def positives(self) -> Tensor:
        """Entries that are labelled or pseudo-labelled positive, ``[n, c]``."""
        return self.sure & (self.y == 1)


class _MultiLabel:
    """Any subset of the classes is true of an image."""

    def entropy(self, p: Tensor, known: Tensor, reading: Reading) -> Tensor:
        """mean over U of H(p_c) / ln 2, which is in [0, 1]; over all classes where U is empty.

        The program: mean over all M of -p_c ln p_c, that of known classes being 0.
        """
        if reading == "program":
            return torch.where(known, 0.0, -torch.xlogy(p, p)).mean(dim=1)
        binary = -(torch.xlogy(p, p) + torch.xlogy(1 - p, 1 - p)) / math.log(2)
        counted = ~known | known.all(dim=1, keepdim=True)
        return torch.where(counted, binary, 0.0).sum(dim=1) / counted.sum(dim=1)

    def targets(
        self,
        p: Tensor,
        y: Tensor,
        known: Tensor,
        limits: Thresholds,
        reading: Reading,
        *,
        mixing: bool = False,
    ) -> Targets:
        """Labels where they are known, pseudo-labels where the teacher is sure: the indicators of Eq. 5.

        The program takes a known class of a mixture only where the teacher is sure of it too.

        Args:
            p: the teacher's probabilities; with y and known ``[n, c]``.
            mixing: whether the image is one of a mixture.
        """
        present, absent = p >= limits.positive, p <= limits.negative
        made = ~known & (present | absent)
        sure = present | absent if mixing and reading == "program" else known | made
        taught = torch.where(known, y, torch.where(made, present.to(p.dtype), p))
        return Targets(taught, sure, made)

    def weights(self, targets: Targets) -> Tensor:
        """1 / (N M) for every sure entry."""
        return targets.sure.to(targets.y) / targets.sure.numel()

    def mixed_weights(self, targets: Targets) -> Tensor:
        return self.weights(targets)

    def losses(self, logits: Tensor, y: Tensor, weight: Tensor | None) -> Tensor:
        """Entry by entry, ``[n, c]``; `weight` ``[c]`` is that of a positive of each class."""
        return weighted_bce(logits, y, weight)


class _SingleLabel:
    """Exactly one class is true of an image; a labelled image is therefore known altogether."""

    def entropy(self, p: Tensor, known: Tensor, reading: Reading) -> Tensor:
        """-sum_c p_c ln p_c (Eq. 3)."""
        return -torch.xlogy(p, p).sum(dim=1)

    def targets(
        self,
        p: Tensor,
        y: Tensor,
        known: Tensor,
        limits: Thresholds,
        reading: Reading,
        *,
        mixing: bool = False,
    ) -> Targets:
        """The indicator of Eq. 4: the most likely unknown class of an unlabelled image.

        The program takes the most likely of all classes, and gives the images of a mixture no pseudo-label.
        """
        labelled = (known & (y == 1)).any(dim=1, keepdim=True)
        allowed = torch.ones_like(known) if reading == "program" else ~known
        best, which = torch.where(allowed, p, -1.0).max(dim=1, keepdim=True)
        made = ~labelled & (best >= limits.best)
        if mixing and reading == "program":
            made = torch.zeros_like(made)
        guess = torch.zeros_like(p).scatter_(1, which, 1.0)
        taught = torch.where(labelled, torch.where(known, y, 0.0), guess)
        return Targets(taught, (labelled | made).expand_as(known), made.expand_as(known))

    def weights(self, targets: Targets) -> Tensor:
        """1 / N_I for a labelled image and 1 / N_U for a pseudo-labelled one, of N_I labelled, N_U others."""
        labelled = targets.sure & ~targets.made
        of_labelled = labelled[:, 0].sum().clamp(min=1)
        of_others = (~labelled[:, 0]).sum().clamp(min=1)
        return labelled.to(targets.y) / of_labelled + targets.made.to(targets.y) / of_others

    def mixed_weights(self, targets: Targets) -> Tensor:
        """1 / N for a mixture of two images that have a label or a pseudo-label each."""
        return targets.sure.to(targets.y) / len(targets.sure)

    def losses(self, logits: Tensor, y: Tensor, weight: Tensor | None) -> Tensor:
        return -y * F.log_softmax(logits, dim=1)


KINDS: dict[LabelType, _MultiLabel | _SingleLabel] = {
    "multilabel": _MultiLabel(),
    "multiclass": _SingleLabel(),
}


def mix(certain: Targets, uncertain: Targets, share: float) -> Targets:
    """What a mixture of `share` certain and 1 - `share` uncertain image is taught (Eq. 6).

    An entry is sure where it is in both images.
    """
    y = share * certain.y + (1 - share) * uncertain.y
    return Targets(y, certain.sure & uncertain.sure, certain.made | uncertain.made)


T = TypeVar("T", bound=Tensor)


def _share(value: object) -> object:
    """Refuses what pydantic would take for a number of images: true, and 1.0 as 1."""
    whole = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= LIMIT
    if whole or (isinstance(value, float) and 0 < value < 1):
        return value
    raise ValueError("must be a share below 1, or a number of images up to a million")


Share = Annotated[float | int, PlainValidator(_share)]
"""A share of a site's training images, or a number of them."""
Probability = Annotated[float, Field(ge=0, le=1)]

_MIXUP = 0.2
"""a of Beta(a, a), of which a batch draws its share once."""

MIXED_WEIGHT = 0.1
"""lambda of L_UDE."""

EMA = 0.999
"""How much of the teacher stays in a step."""


@validated(frozen=True, config=STRICT)
class Teaching:
    """How a site learns what it does not know.

    Attributes:
        start_round: the first round with pseudo-labels. Before it the site learns what it knows, as the first
            global model has a random head; the published program begins in round 1.
        estimation: D^h and D^l by ``entropy`` (UE), or at ``random`` and of the same size.
        uncertain, confident: size of D^h and D^l: a share of the site's training images, or a number of them.
        positive, negative: tau_p and tau_n, how sure the teacher must be of a class (multilabel).
        best: tau, how sure it must be of an image's one class (multiclass).
        enhancing: ``mixup`` of confident and uncertain images (UDE), or ``none``.
        mixed: mixtures among a batch.
        mixed_positive, mixed_negative, mixed_best: tau_lp, tau_ln and tau_l, for images of D^h.
        weak, strong: views of the teacher and of the student.
        loss, entropy, labels: where paper and published program differ, which one is followed; the
            differences stand in docs/methods/. The loss ``both`` is the paper's, but the class weight is on
            both terms, as in the program (multilabel).
    """

    start_round: Annotated[int, Field(ge=1, le=LIMIT)] = 2
    estimation: Literal["entropy", "random"] = "entropy"
    uncertain: Share = 0.05
    confident: Share = 0.21
    positive: Probability = 0.85
    negative: Probability = 0.005
    best: Probability = 0.95
    enhancing: Literal["mixup", "none"] = "mixup"
    mixed: Annotated[int, Field(ge=1, le=LIMIT)] = 4
    mixed_positive: Probability = 0.7
    mixed_negative: Probability = 0.01
    mixed_best: Probability = 0.85
    weak: Augmentation = WEAK
    strong: Augmentation = STRONG
    loss: Reading | Literal["both"] = "paper"
    entropy: Reading = "paper"
    labels: Reading = "paper"

    @property
    def limits(self) -> Thresholds:
        """For the images of D^l and D^m."""
        return Thresholds(self.positive, self.negative, self.best)

    @property
    def mixed_limits(self) -> Thresholds:
        """For the images of D^h."""
        return Thresholds(self.mixed_positive, self.mixed_negative, self.mixed_best)


NOBODY = Thresholds(math.inf, -math.inf, math.inf)
"""No teacher is as sure as that."""


@dataclasses.dataclass(frozen=True)
class Views:
    """Images of a batch, and of the pairs that are mixed, which are seen as they are.

    Attributes:
        rows: ``[n]`` of the images without pairs.
        teacher: their weak views, then the images of the pairs, ``[n + 2 m, channels, h, w]``; or features of
            a frozen encoder, ``[n + 2 m, d]``.
        student: their strong views, likewise.
        y, known: labels as in the data, ``[n + 2 m, c]``.
    """

    rows: Tensor
    teacher: Tensor
    student: Tensor
    y: Tensor
    known: Tensor


class MeanTeacher:
    """One round at a site.

    Args:
        weight: of a positive of each class, ``[c]``; None for 1.

    Attributes:
        images: how many images were drawn.

    Raises:
        ConfigError: the site has fewer images than the subsets ask for, or batches of mixtures alone.
    """

    def __init__(
        self,
        how: Teaching,
        site: SiteContext,
        round_: LocalRound,
        weight: Tensor | None,
    ) -> None:
        self._how, self._site, self._local = how, site, round_.local
        self._task, self._input = site.model.labels.label_type, view_key(site.samples["train"].inputs)
        self._kind = KINDS[self._task]
        self._weight = None if weight is None else weight.to(site.device)
        self._pseudo = round_.round >= how.start_round
        self._mixed = how.mixed if self._pseudo and how.enhancing == "mixup" else 0
        if self._local.batch_size <= self._mixed:
            raise ConfigError(
                f"{site.name}: batches of {self._local.batch_size} have no room for {self._mixed} mixtures; "
                "raise the batch size, or lower method.teaching.mixed"
            )
        self._certain, self._usual, self._uncertain = subsets(
            how, site, self._pseudo, round_.seed, round_.round
        )
        self._teacher = frozen_copy(site.model)
        self._follow = follower(self._teacher, site.model, EMA)
        self._shares = np.random.default_rng(seed_for(round_.seed, site.name, round_.round, "mixup"))
        self.images = 0
        # Of each class: drawn, and pseudo-labels 1 and 0. A GPU is waited for where they are read.
        self._counts = torch.zeros(3, len(site.model.labels), dtype=torch.float64, device=site.device)

    @property
    def drawn(self) -> Tensor:
        """q_c: how often each class was drawn positive, by a label or a pseudo-label, ``[c]``."""
        return self._counts[0].cpu()

    @property
    def positive(self) -> float:
        """Positive pseudo-labels among the images drawn."""
        return float(self._counts[1].sum())

    @property
    def negative(self) -> float:
        """Negative ones; with one label an image there are none."""
        return float(self._counts[2].sum()) if self._task == "multilabel" else 0.0

    def batches(self, shuffle: torch.Generator, noise: torch.Generator) -> Iterator[Batch]:
        """The batches of an epoch, or of all iterations; each is made when the teacher has learned from the
        one before.

        A thread reads the images ahead, of which no teacher is asked: the only one that draws from `shuffle`.
        On a CPU it makes the views as well, on a GPU that is the work of the GPU; one of the two draws from
        `noise`. What is drawn does not depend on `prefetch`.
        """
        site, see = self._site, partial(self._see, noise)
        read = map(self._read, self._draw(shuffle))
        if site.device.type == "cpu":
            seen = prefetch(map(see, read), min(site.prefetch, 1))  # views are large, and made in no time
        else:
            seen = map(see, prefetch(read, site.prefetch))
        return map(self._taught, seen)

    def _draw(self, shuffle: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """The rows of each batch, and those of its mixtures: of D^l, then as many of D^h."""
        mixed = self._mixed
        pool = torch.cat([self._certain, self._usual])
        size = self._local.batch_size - mixed
        draws = endless(len(pool), size, shuffle)
        pairs = [endless(len(rows), mixed, shuffle) for rows in (self._certain, self._uncertain)]
        for _ in range(self._local.iterations or math.ceil(len(pool) / size)):
            rows = pool[next(draws)]
            low, high = (next(p) for p in pairs) if mixed else (pool[:0], pool[:0])
            yield rows, torch.cat([self._certain[low], self._uncertain[high]])

    def objective(self, model: Classifier, batch: Batch) -> Tensor:
        """L_I + L_U + lambda L_UDE."""
        return self.loss(model(batch.inputs), batch)

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """The same of the student's logits ``[n, c]``."""
        losses = self._kind.losses(logits, batch.y, None if self._on_both else self._weight)
        return torch.sum(losses * batch.weight) if batch.weight is not None else losses.mean()

    def follow_student(self) -> None:
        """The teacher follows the student: a moving average of its weights, a copy of its statistics."""
        self._follow()

    @property
    def _on_both(self) -> bool:
        """Whether the class weight is of both terms of the cross-entropy."""
        loss = self._how.loss  # the program's multiplies by pseudo-labels, which are made later
        return self._task == "multilabel" and (loss == "both" or (loss == "program" and self._pseudo))

    def _read(self, drawn: tuple[Tensor, Tensor]) -> tuple[Tensor, Batch]:
        """The rows without those of mixtures, and the images of all of them."""
        batch = self._site.samples["train"].batch(torch.cat(drawn))
        return drawn[0], batch if self._site.device.type == "cpu" else batch.pin()

    def _see(self, noise: torch.Generator, read: tuple[Tensor, Batch]) -> Views:
        """What teacher and student see of them; both before the teacher, whose pass fills the cache."""
        rows, batch = read
        ready, n = ready_inputs(self._site, batch), len(rows)
        image, first = ready.inputs[self._input], slice(n)
        weak, strong = (
            view(self._site, ready, noise, each, first) for each in (self._how.weak, self._how.strong)
        )
        return Views(rows, torch.cat([weak, image[n:]]), strong, ready.y, ready.known)

    def _taught(self, views: Views) -> Batch:
        """The images as the student sees them, with what the teacher says of them; and the mixtures."""
        how, kind, y, known = self._how, self._kind, views.y, views.known
        n = len(views.rows)
        p = self._ask(views.teacher, y)
        limits = how.limits if self._pseudo else NOBODY
        targets = kind.targets(p[:n], y[:n], known[:n], limits, how.labels)
        self._count(views.rows, targets)
        weights = self._weights(targets, kind.weights(targets))
        if not self._mixed:
            return Batch({self._input: views.student}, targets.y, targets.sure, weights)
        share, middle = float(self._shares.beta(_MIXUP, _MIXUP)), n + self._mixed
        certain, uncertain = (
            kind.targets(p[part], y[part], known[part], limit, how.labels, mixing=True)
            for part, limit in ((slice(n, middle), limits), (slice(middle, None), how.mixed_limits))
        )
        mixed = mix(certain, uncertain, share)
        both = share * views.teacher[n:middle] + (1 - share) * views.teacher[middle:]
        return Batch(
            {self._input: torch.cat([views.student, both])},
            torch.cat([targets.y, mixed.y]),
            torch.cat([targets.sure, mixed.sure]),
            torch.cat([weights, MIXED_WEIGHT * self._weights(mixed, kind.mixed_weights(mixed))]),
        )

    @torch.no_grad()
    def _ask(self, image: Tensor, y: Tensor) -> Tensor:
        """The teacher's probabilities ``[n, c]``; nobody asks it before it has learned anything."""
        if not self._pseudo:
            return torch.zeros_like(y)
        return probabilities(self._teacher({self._input: image}), self._task)

    def _weights(self, targets: Targets, paper: Tensor) -> Tensor:
        """How much each entry counts; in the program a mean loss times a mean weight (see the docs)."""
        if not self._on_both:
            return paper
        weight = torch.ones_like(targets.y) if self._weight is None else self._weight
        if self._how.loss == "both":
            return paper * weight
        return ((targets.sure * weight).mean() / targets.y.numel()).expand_as(targets.y)

    def _count(self, rows: Tensor, targets: Targets) -> None:
        guessed, absent = (targets.made & (targets.y == value) for value in (1, 0))
        self.images += len(rows)
        self._counts += torch.stack([targets.positives(), guessed, absent]).sum(dim=1)
        if self._site.observe:
            self._site.observe(rows, guessed.cpu())


def subsets(
    how: Teaching, site: SiteContext, pseudo: bool, seed: int, round_: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of D^l, D^m and D^h; without pseudo-labels all of them are in D^m.

    Every image is read once, as it is.
    """
    train = site.samples["train"]
    n = len(train)
    if not pseudo:
        return torch.arange(0), torch.arange(n), torch.arange(0)
    low, high = (s if isinstance(s, int) else max(1, round(s * n)) for s in (how.confident, how.uncertain))
    if low + high > n:
        raise ConfigError(
            f"{site.name} has {n} training images, fewer than {low} confident and {high} uncertain "
            "ones; lower method.teaching.confident and uncertain, or give them as shares"
        )
    if how.estimation == "random":
        order = torch.randperm(n, generator=generator_for(seed, site.name, round_, "subsets"))
    else:
        p = probabilities(predict(site, train), site.model.labels.label_type)
        kind = KINDS[site.model.labels.label_type]
        order = torch.argsort(kind.entropy(p, ~torch.isnan(train.y), how.entropy), stable=True)
    return order[:low], order[low : n - high], order[n - high :]


def follower(teacher: Classifier, student: Classifier, ema: float) -> Callable[[], None]:
    """A step of the teacher after the student: parameters <- ema teacher + (1 - ema) student; buffers are
    copied.
    """
    # All parameters in one call, and found once: to find them takes longer than to average them.
    average = get_ema_multi_avg_fn(ema)  # type: ignore[no-untyped-call]
    averaged = _pairs(teacher.parameters(), student.parameters())
    copied = _pairs(teacher.buffers(), student.buffers())

    @torch.no_grad()
    def follow() -> None:
        average(*averaged, None)
        if copied[0]:
            torch._foreach_copy_(*copied)

    return follow


def _pairs(teacher: Iterable[T], student: Iterable[T]) -> tuple[list[T], list[T]]:
    """The tensors of either that are not the same tensor, as those of a frozen encoder are."""
    pairs = [(t, s) for t, s in zip(teacher, student, strict=True) if t is not s]
    return [t for t, _ in pairs], [s for _, s in pairs]
