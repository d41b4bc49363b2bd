"""FedLSM's steps at a site against the equations, written out entry by entry for either kind of task."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from one_step import context_with
from rounds import Precise, train_round
from suture.core.labels import LabelSet, LabelType
from suture.core.runtime import generator_for, seed_for
from suture.data.batch import Samples, augment, endless
from suture.learning.training import LocalTraining, SiteContext
from suture.methods.base import Phase, RoundContext
from suture.models import build
from suture.models.classifier import Classifier, split_state
from suture.protocol.messages import TaskData
from suture_papers.fedlsm.fedlsm import FedLSM
from suture_papers.fedlsm.mean_teacher import EMA, MIXED_WEIGHT, Teaching, follower
from suture_synthetic.method_checks import SMALL

LABELS = ("A", "B", "C", "D")
KNOWN = (False, False, True, True)
CLASSES = range(len(LABELS))
PLAIN, MIXED, CONFIDENT, UNCERTAIN, IMAGES = 6, 2, 6, 5, 24
"""Images of a step, mixtures among them, and the sizes of D^l and D^h among all images."""

Rows = list[list[float]]


@dataclass
class Step:
    """A step's images: rows of the data, the teacher's probabilities, labels, and the student's logits."""

    first: list[int]
    low: list[int]
    high: list[int]
    guess: Rows
    y: Rows
    s: Tensor
    share: float


@dataclass
class Tally:
    """What the literal steps have counted: q_c, negative pseudo-labels, and which cases occurred."""

    q: list[float] = field(default_factory=lambda: [0.0] * len(LABELS))
    negative: int = 0
    seen: set[str] = field(default_factory=set)


StepLoss = Callable[[Step, Teaching, Tally], Tensor]


def site_of(task: LabelType) -> tuple[SiteContext, TaskData]:
    """A site that knows C and D of four classes, and the payload of the model that it holds."""
    g = torch.Generator().manual_seed(3)
    images = torch.randint(0, 256, (IMAGES, 1, 16, 16), generator=g, dtype=torch.uint8)
    y = torch.randint(0, 2, (IMAGES, 4), generator=g).float()
    if task == "multiclass":
        y = torch.eye(4)[torch.randint(0, 4, (IMAGES,), generator=g)]
    y[:, ~torch.tensor(KNOWN)] = torch.nan
    model = build(SMALL, LabelSet(LABELS, task), 1, pretrained=False).double()
    if task == "multiclass":
        with torch.no_grad():
            model.head.weight.mul_(20)  # else the teacher is as sure of one image as of another
    shared, head = split_state(copy.deepcopy(model.state_dict()))
    train = Samples({"image": images}, y, tuple(map(str, range(IMAGES))))
    site = replace(context_with(model, train, "site"), prepare=Precise(SMALL.preprocessing))  # type: ignore[arg-type]
    return site, TaskData("train", 1, labels=LABELS, shared=shared, head=head)


def method_of(**limits: float) -> FedLSM:
    how = Teaching(start_round=1, confident=CONFIDENT, uncertain=UNCERTAIN, mixed=MIXED, **limits)
    adam = {"betas": (0.9, 0.99), "weight_decay": 5e-4}
    return FedLSM(local=LocalTraining(lr=1e-2, iterations=4, batch_size=PLAIN + MIXED, **adam), teaching=how)


def literal_round(
    site: SiteContext,
    method: FedLSM,
    seed: int,
    probabilities: Callable[[Tensor], Tensor],
    entropy: Callable[[list[float]], float],
    loss_of: StepLoss,
) -> tuple[Classifier, Tally]:
    """Four steps as the paper has them, with the same draws as the site makes."""
    how, train, local = method.teaching, site.samples["train"], method.local
    student, teacher = copy.deepcopy(site.model), copy.deepcopy(site.model).eval()
    images = site.prepare(train.inputs["image"])
    with torch.no_grad():
        p = probabilities(teacher({"image": images})).tolist()
    order = np.argsort([entropy(row) for row in p], kind="stable")
    low, pool, high = order[:CONFIDENT], order[: IMAGES - UNCERTAIN], order[IMAGES - UNCERTAIN :]
    shuffle = generator_for(seed, site.name, 1, "shuffle")
    noise = generator_for(seed, site.name, 1, "augmentation")
    share = np.random.default_rng(seed_for(seed, site.name, 1, "mixup"))
    draws = [endless(len(r), n, shuffle) for r, n in ((pool, PLAIN), (low, MIXED), (high, MIXED))]
    adam = torch.optim.Adam(
        student.parameters(), lr=local.lr, betas=local.betas, weight_decay=local.weight_decay
    )
    student.train()
    tally = Tally()
    for _ in range(local.iterations or 0):
        rows, xl, xh = (r[next(d)].tolist() for r, d in zip((pool, low, high), draws, strict=True))
        weak = augment(images[rows], noise, how.weak, std=site.prepare.std)
        with torch.no_grad():
            guess = probabilities(teacher({"image": torch.cat([weak, images[xl], images[xh]])})).tolist()
        strong = augment(images[rows], noise, how.strong, std=site.prepare.std)
        b = float(share.beta(0.2, 0.2))
        s = student({"image": torch.cat([strong, b * images[xl] + (1 - b) * images[xh]])})
        loss = loss_of(Step(rows, xl, xh, guess, train.y.tolist(), s, b), how, tally)
        adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        adam.step()
        follower(teacher, student, EMA)()
    return student, tally


def assert_trained_alike(
    site: SiteContext, task: TaskData, method: FedLSM, expected: Classifier, tally: Tally
) -> None:
    done, optimiser_state = train_round(method, site, task, RoundContext(1, Phase("main", 1), 5))
    for name, tensor in {**done.shared, **done.head}.items():
        torch.testing.assert_close(tensor, expected.state_dict()[name], rtol=1e-6, atol=1e-6)
    assert done.class_weights.tolist() == tally.q
    assert sum(tally.q[:2]) > 0  # classes that the site does not know were counted too
    assert done.weight == IMAGES
    assert done.scalars == {"pseudo_positive": sum(tally.q[:2]), "pseudo_negative": tally.negative}
    assert optimiser_state


WEIGHT = [2.0, 1.0, 0.5, 3.0]


def several_labels(step: Step, how: Teaching, tally: Tally) -> Tensor:
    """L_I + L_U of Eq. 5 over all N M entries, and L_UDE of the entries that both images have."""

    def target(row: int, c: int, guess: float, positive: float, negative: float) -> float | None:
        if KNOWN[c]:
            return step.y[row][c]
        return 1.0 if guess >= positive else 0.0 if guess <= negative else None

    def entry(t: float, s: Tensor, c: int) -> Tensor:
        return -WEIGHT[c] * t * torch.log(torch.sigmoid(s)) - (1 - t) * torch.log(1 - torch.sigmoid(s))

    loss = torch.zeros((), dtype=torch.float64)
    for i in range(PLAIN):
        for c in CLASSES:
            t = target(step.first[i], c, step.guess[i][c], how.positive, how.negative)
            tally.seen.add("unsure" if t is None else "sure")
            if t is not None:
                loss = loss + entry(t, step.s[i, c], c) / (PLAIN * len(LABELS))
                tally.q[c] += t
                tally.negative += t == 0 and not KNOWN[c]
    for i in range(MIXED):
        for c in CLASSES:
            p_low, p_high = step.guess[PLAIN + i][c], step.guess[PLAIN + MIXED + i][c]
            t_low = target(step.low[i], c, p_low, how.positive, how.negative)
            t_high = target(step.high[i], c, p_high, how.mixed_positive, how.mixed_negative)
            if t_low is not None and t_high is not None:
                t = step.share * t_low + (1 - step.share) * t_high
                loss = loss + MIXED_WEIGHT * entry(t, step.s[PLAIN + i, c], c) / (MIXED * len(LABELS))
    return loss


def test_a_round_of_several_labels_is_that_of_the_equations() -> None:
    bits = lambda v: -(v * math.log2(v) + (1 - v) * math.log2(1 - v))  # noqa: E731
    method = method_of(positive=0.505, negative=0.495, mixed_positive=0.5, mixed_negative=0.5)
    site, task = site_of("multilabel")
    expected, tally = literal_round(
        site,
        method,
        5,
        torch.sigmoid,
        lambda p: float(np.mean([bits(p[c]) for c in CLASSES if not KNOWN[c]])),
        several_labels,
    )
    assert tally.seen == {"sure", "unsure"}
    told = replace(task, channels={"positive_weight": torch.tensor(WEIGHT)})
    assert_trained_alike(site, told, method, expected, tally)


def one_label(step: Step, how: Teaching, tally: Tally) -> Tensor:
    """L_I over the N_I labelled images, L_U of Eq. 4 over all N_U others, L_UDE over all mixtures."""

    def target(row: int, guess: list[float], limit: float) -> tuple[str, list[float] | None]:
        label = [c for c in CLASSES if KNOWN[c] and step.y[row][c] == 1]
        best = max((c for c in CLASSES if not KNOWN[c]), key=lambda c: guess[c])
        if not label and guess[best] < limit:
            return "unsure", None
        which = label[0] if label else best
        return "labelled" if label else "sure", [1.0 if c == which else 0.0 for c in CLASSES]

    def cross_entropy(t: list[float], s: Tensor) -> Tensor:
        log_p = s - torch.log(torch.exp(s).sum())
        return -sum((t[c] * log_p[c] for c in CLASSES), torch.zeros((), dtype=torch.float64))

    taught = [target(step.first[i], step.guess[i], how.best) for i in range(PLAIN)]
    n_labelled = sum(kind == "labelled" for kind, _ in taught)
    loss = torch.zeros((), dtype=torch.float64)
    for i, (kind, t) in enumerate(taught):
        tally.seen.add(kind)
        if t is not None:
            among = n_labelled if kind == "labelled" else PLAIN - n_labelled
            loss = loss + cross_entropy(t, step.s[i]) / among
            tally.q = [q + value for q, value in zip(tally.q, t, strict=True)]
    for i in range(MIXED):
        p_low, p_high = step.guess[PLAIN + i], step.guess[PLAIN + MIXED + i]
        (kind, t_low), (_, t_high) = (
            target(step.low[i], p_low, how.best),
            target(step.high[i], p_high, how.mixed_best),
        )
        stricter = target(step.high[i], p_high, how.best)[1]
        if t_low is not None and t_high is not None:
            tally.seen.add(
                "a mixture that only the looser threshold makes" if stricter is None else "mixture"
            )
            t = [step.share * a + (1 - step.share) * b for a, b in zip(t_low, t_high, strict=True)]
            loss = loss + MIXED_WEIGHT * cross_entropy(t, step.s[PLAIN + i]) / MIXED
        else:
            tally.seen.add("no mixture")
    return loss


def test_a_round_of_one_label_is_that_of_the_equations() -> None:
    """Labelled images, others of which the teacher is sure or not, and mixtures by either threshold."""
    method = method_of(best=0.3, mixed_best=0.2)
    site, task = site_of("multiclass")
    expected, tally = literal_round(
        site,
        method,
        5,
        lambda s: torch.softmax(s, dim=1),
        lambda p: -sum(v * math.log(v) for v in p),
        one_label,
    )
    mixtures = {"mixture", "no mixture", "a mixture that only the looser threshold makes"}
    assert tally.seen == {"labelled", "sure", "unsure"} | mixtures
    assert_trained_alike(site, task, method, expected, tally)
