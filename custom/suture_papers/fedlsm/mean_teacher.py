"""A round of FedLSM at a site: images by uncertainty, a teacher that labels, and what it has counted.

Deng, Luo, Chen. FedLSM, MICCAI 2023, Sec. 2.3; hyperparameters of its Table 4 and Sec. 3.2.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Annotated, Literal, TypeVar

import numpy as np
import torch
from pydantic import Field, PlainValidator
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from suture.core.errors import ConfigError
from suture.core.seeds import generator_for, seed_for
from suture.core.validation import LIMIT, STRICT
from suture.data.augmentation import STRONG, WEAK, Augmentation
from suture.data.batch import Batch, endless, viewed
from suture.data.prefetch import prefetch
from suture.learning.losses import probabilities
from suture.learning.training import LocalRound, SiteContext, predict, ready_inputs, view
from suture.models.classifier import Classifier, frozen_copy
from suture_papers.fedlsm.pseudo_labels import KINDS, Reading, Targets, Thresholds, mix

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


@dataclass(frozen=True, config=STRICT)
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
            differences stand in docs/methods.md. The loss ``both`` is the paper's, but the class weight is on
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
        self._task, self._input = site.model.labels.label_type, viewed(site.samples["train"].inputs)
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
        site, see = self._site, partial(self._seen, noise)
        read = map(self._read, self._drawn(shuffle))
        if site.device.type == "cpu":
            seen = prefetch(map(see, read), min(site.prefetch, 1))  # views are large, and made in no time
        else:
            seen = map(see, prefetch(read, site.prefetch))
        return map(self._taught, seen)

    def _drawn(self, shuffle: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
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
        return drawn[0], batch if self._site.device.type == "cpu" else batch.pinned()

    def _seen(self, noise: torch.Generator, read: tuple[Tensor, Batch]) -> Views:
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
