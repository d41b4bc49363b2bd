"""What a local step minimises in ConDist, FedRS, FedVLS and FedPU: by hand, and written out."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from federated import LOCAL, ROUND, at_site, moved, objective_of, random_batch
from one_step import site_of, step_of
from suture.core.errors import ConfigError
from suture.core.labels import LabelType
from suture.data.batch import Batch
from suture.learning.training import SiteContext
from suture.methods.composed import CrossEntropy, Step
from suture.methods.fedavg import FedAvg
from suture.protocol.messages import TaskData
from suture_papers.missing_labels.condist import Distillation, log_probabilities
from suture_papers.missing_labels.fedpu import FedPU, PositiveUnlabelled, unlabelled_risk
from suture_papers.missing_labels.fedrs import FedRS, Restricted, Restricting
from suture_papers.missing_labels.fedvls import LogitSuppression, VacantDistillation, suppress
from suture_synthetic.method_checks import SMALL
from suture_synthetic.trial import Trial

# ConDist

NO_RECEIVED: Any = TaskData
CONSTANT = {"first": 1.0, "last": 1.0}
BOTH = pytest.mark.parametrize("label_type", ["multilabel", "multiclass"])


def test_condist_of_several_labels_by_hand() -> None:
    """z = (1, -2), z' = (2, 0), T = 2: .608548 and .813262; squares at T = 1."""
    z, received = torch.tensor([[1.0, -2]]), torch.tensor([[2.0, 0]])
    value = Distillation(**CONSTANT).begin(site_of("multilabel", [False, False]), ROUND)
    for c, expected in enumerate((0.608548, 0.813262)):
        one = Distillation(**CONSTANT).begin(site_of("multilabel", [c == 1, c == 0]), ROUND)
        known = torch.tensor([[c == 1, c == 0]])
        alone = one(step_of(z, received, torch.zeros(1, 2), known))
        assert alone.item() == pytest.approx(expected, abs=1e-6)
    step = step_of(z, received, torch.zeros(1, 2), torch.zeros(1, 2).bool())
    assert value(step).item() == pytest.approx(0.710905, abs=1e-6)
    squares = Distillation(temperature=1, distance="mse", **CONSTANT)
    value = squares.begin(site_of("multilabel", [False, False]), ROUND)
    assert value(step).item() == pytest.approx(0.083714, abs=1e-6)


def test_condist_of_one_label_by_hand() -> None:
    """z = (2, 1, 0, -1), I = {0}, T = 2: given U it is (.506471, .307190, .186320).

    An image that the site has labelled, or that the received model takes for class 0, does not count.
    """
    z, known = torch.tensor([[2.0, 1, 0, -1]] * 3), torch.tensor([[True, False, False, False]] * 3)
    received = torch.tensor([[0.0, 9, 0, 0], [0, 1, 0, -1], [5, 1, 0, -1]])  # the last: class 0, it seems
    y = torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    value = Distillation(**CONSTANT).begin(site_of("multiclass", [True, False, False, False]), ROUND)
    q = (0.506471, 0.307190, 0.186320)
    unknown = torch.tensor([False, True, True, True])
    p = log_probabilities(z[:1] / 2, unknown, "multiclass").exp()
    assert p[0].tolist() == pytest.approx(q, abs=1e-6)
    expected = -sum(p * math.log(p) for p in q)  # z' is z there, but for class 0
    assert value(step_of(z, received, y, known)).item() == pytest.approx(expected, abs=1e-5)


def test_dice_by_hand() -> None:
    """p = .5, p' = .5: 1 - .5 / 1.00001 = .500005. Where both are all but 0, it is 1 and not 0."""
    value = Distillation(distance="dice", **CONSTANT).begin(site_of("multilabel", [False]), ROUND)
    zero = torch.zeros(1, 1)
    assert value(step_of(zero, zero, zero, zero.bool())).item() == pytest.approx(0.500005, abs=1e-7)
    none = zero - 80
    assert value(step_of(none, none, zero, zero.bool())).item() == pytest.approx(1.0, abs=1e-6)


def test_the_weight_rises_along_a_straight_line() -> None:
    """Five rounds: .01, .2575, .505, .7525, 1; a phase of one round has the first."""
    weights = [Distillation().weight(r, 5) for r in range(1, 6)]
    assert weights == pytest.approx([0.01, 0.2575, 0.505, 0.7525, 1])
    assert Distillation().weight(1, 1) == 0.01
    value = Distillation().begin(
        site_of("multilabel", [False]), replace(ROUND, phase_round=2, phase_rounds=5)
    )
    zero = torch.zeros(1, 1)
    assert value(step_of(zero, zero, zero, zero.bool())).item() == pytest.approx(0.2575 * math.log(2))


def slow_condist(
    z: Tensor, received: Tensor, y: Tensor, own: list[bool], label_type: LabelType, how: Distillation
) -> float:
    """The equations of the module, image by image and class by class."""
    others = [c for c, mine in enumerate(own) if not mine]
    p, q = [], []
    for i in range(len(z)):
        if label_type == "multiclass":
            likeliest = max(range(len(own)), key=lambda c: float(received[i, c]))
            if any(y[i, c] == 1 and own[c] for c in range(len(own))) or own[likeliest]:
                continue
        for logits, into in ((z[i], p), (received[i], q)):
            e = [math.exp(float(x) / how.temperature) for x in logits]
            if label_type == "multilabel":
                into.append([e[c] / (1 + e[c]) for c in others])
            else:
                s = [x / sum(e) for x in e]
                into.append([s[c] / (sum(s[o] for o in others) + 1e-5) for c in others])
    images, classes = range(len(p)), range(len(others))
    if not p or not others:
        return 0.0
    if how.distance == "dice":
        each = []
        for c in classes:
            both = sum(p[i][c] * q[i][c] for i in images)
            sizes = sum(p[i][c] + q[i][c] for i in images)
            each.append(1 - 2 * both / (sizes + 1e-5))
        return sum(each) / len(others)
    total = 0.0
    for i in images:
        for c in classes:
            if how.distance == "mse":
                total += (p[i][c] - q[i][c]) ** 2
            else:
                total -= q[i][c] * math.log(p[i][c])
                if label_type == "multilabel":
                    total -= (1 - q[i][c]) * math.log(1 - p[i][c])
    by_class = label_type == "multilabel" or how.distance == "mse"
    return total / len(p) / (len(others) if by_class else 1)


@given(
    seed=st.integers(0, 10**6),
    label_type=st.sampled_from(["multilabel", "multiclass"]),
    kind=st.sampled_from(["cross_entropy", "mse", "dice"]),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    own=st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_condist_is_the_slow_transcription(
    seed: int, label_type: LabelType, kind: Any, temperature: float, own: list[bool]
) -> None:
    g = torch.Generator().manual_seed(seed)
    z, received = (2 * torch.randn(6, 4, generator=g).double() for _ in range(2))
    known = torch.tensor(own).expand(6, 4)
    y = torch.eye(4).double()[torch.randint(0, 4, (6,), generator=g)] * known
    how = Distillation(temperature=temperature, first=0.3, last=0.3, distance=kind)
    value = how.begin(site_of(label_type, own), ROUND)(step_of(z, received, y, known))
    assert value.item() == pytest.approx(0.3 * slow_condist(z, received, y, own, label_type, how), abs=1e-10)


# FedRS


def restricted_loss(how: Restricted, counts: list[int], own: list[bool], z: Tensor, y: list[float]) -> Tensor:
    """At a site that annotates some of three classes, with so many training images of each."""
    labels = torch.eye(3).repeat_interleave(torch.tensor(counts), dim=0)
    site = site_of(
        "multiclass" if any(y) else "multilabel", own, torch.where(torch.tensor(own), labels, torch.nan)
    )
    loss = Restricting(how, CrossEntropy()).of(site, NO_RECEIVED, ROUND)
    return loss(z, torch.tensor([y], dtype=torch.float64), torch.ones(1, 3, dtype=torch.bool))


@pytest.mark.parametrize(
    ("restricted", "expected"),
    [
        (Restricted(0.5), 0.680270),  # logits (2, 1, 1.5)
        (Restricted(0.5, graded=True), 0.616875),  # logits (2, .6, 1.5)
    ],
)
@pytest.mark.parametrize("annotated", [False, True])
def test_the_softmax_by_hand(restricted: Restricted, expected: float, annotated: bool) -> None:
    """Class C has no image, whether the site annotates it or not; z = (2, 1, 3), y = A."""
    z = torch.tensor([[2.0, 1.0, 3.0]], dtype=torch.float64)
    assert restricted_loss(
        restricted, [10, 2, 0], [True, True, annotated], z, [1, 0, 0]
    ).item() == pytest.approx(expected, abs=1e-6)


def test_several_labels_by_hand() -> None:
    """z = 3, y = 0, not annotated: ln(1 + e^1.5) and .5 sigma(1.5), in place of 3.048587 and .952574.

    An annotated class without a positive is not restricted: that it is absent is known.
    """
    at: Any = Restricted(0.5), [10, 0, 0], [True, True, False]
    z = torch.tensor([[0.0, 3.0, 3.0]], dtype=torch.float64, requires_grad=True)
    restricted_loss(*at, z, [0, 0, 0]).backward()  # type: ignore[no-untyped-call]
    assert z.grad is not None
    assert (3 * z.grad[0]).tolist() == pytest.approx([0.5, 0.952574, 0.408787], abs=1e-6)
    apart = torch.tensor([[-1e9, -1e9, 3.0]], dtype=torch.float64)
    loss = 3 * restricted_loss(*at, apart, [0, 0, 0]).item()
    assert loss == pytest.approx(1.701413, abs=1e-6)


def graded_share(site: SiteContext, c: int) -> float:
    counts = [float(torch.nan_to_num(column).sum()) for column in site.samples["train"].y.T]
    return counts[c] / max(counts)


@pytest.mark.parametrize("graded", [False, True])
@pytest.mark.parametrize("label_type", ["multilabel", "multiclass"])
def test_the_loss_is_that_of_equation_8(label_type: LabelType, graded: bool) -> None:
    """Image by image and class by class; with several labels, with the class weights that the server sent."""
    method = FedRS(local=LOCAL, restricted=Restricted(0.3, graded=graded))
    site, task = at_site(method, label_type)
    objective = objective_of(method, site, task)
    moved(site.model)
    site.model.eval()
    batch = random_batch(9, len(task.labels), label_type)
    z = site.model(batch.inputs).tolist()
    assert site.identified is not None
    a = []
    for c in range(len(task.labels)):
        has = graded_share(site, c) > 0 if label_type == "multiclass" else bool(site.identified[c])
        a.append(0.3 + 0.7 * graded_share(site, c) if graded else (1.0 if has else 0.3))
    assert min(a) < 1 == max(a)
    total, counted = 0.0, 0
    for row, labels in zip(z, batch.y.tolist(), strict=True):
        if label_type == "multiclass":
            if sum(labels):
                exponentials = [math.exp(factor * score) for factor, score in zip(a, row, strict=True)]
                total -= math.log(exponentials[labels.index(1)] / sum(exponentials))
                counted += 1
            continue
        for c, label in enumerate(labels):
            p = 1 / (1 + math.exp(-a[c] * row[c]))
            w = task.channels["positive_weight"][c].item()
            total -= w * label * math.log(p) + (1 - label) * math.log(1 - p)
            counted += 1
    assert objective(batch).item() == pytest.approx(total / counted, abs=1e-10)


@pytest.mark.parametrize("label_type", ["multilabel", "multiclass"])
def test_the_restriction_is_of_training_alone(label_type: LabelType) -> None:
    answers = []
    for method in (FedRS(local=LOCAL, restricted=Restricted(0.1)), FedAvg(local=LOCAL)):
        with Trial(method, SMALL, label_type) as trial:
            answers.append(trial.update("alpha"))
    restricted, plain = answers
    assert restricted.metrics is not None
    assert restricted.metrics == plain.metrics
    assert restricted.train_loss != plain.train_loss


# FedVLS

EVERY = [True] * 4


def suppressed_loss(weight: float, counts: Tensor, z: Tensor, y: Tensor) -> float:
    """The supervised loss at a site whose training images have these counts."""
    site = site_of("multiclass", EVERY, torch.eye(4).repeat_interleave(counts, dim=0))
    loss = LogitSuppression(weight).of(site, NO_RECEIVED, ROUND)
    return loss(z, y, torch.ones_like(y).bool()).item()


def test_fedvls_by_hand() -> None:
    """pi = (.75, .25, 0, 0): CE .115671, KL .2732085, and of two images S = -.001520."""
    counts, z = torch.tensor([3, 1, 0, 0]), torch.tensor([[1.0, 0, 2, -1], [0, 1, 0, 0]])
    y = torch.eye(4)[:2]
    assert suppressed_loss(0, counts, z[:1], y[:1]) == pytest.approx(0.115671, abs=1e-6)
    assert 0.005 * suppress(z, y, counts / 4).item() == pytest.approx(-0.001520, abs=1e-6)
    with_it, without = (suppressed_loss(weight, counts, z, y) for weight in (0.005, 0))
    assert with_it - without == pytest.approx(-0.001520, abs=1e-6)
    site = site_of("multiclass", EVERY, torch.eye(4)[[0, 0, 0, 1]])
    step = step_of(z[:1], torch.tensor([[0.0, 0, 1, 0]]), y[:1], torch.ones(1, 4).bool())
    divergence = VacantDistillation().begin(site, ROUND)(step)
    assert divergence.item() == pytest.approx(0.2732085, abs=1e-6)


def test_the_image_of_a_class_enters_its_sum_as_one() -> None:
    """One image of each class: ln((1 + e^a) / 2), a = 2 - ln .5 + ln .5 for class 0, and -1 for class 1."""
    y, prior = torch.eye(2), torch.tensor([0.5, 0.5])
    z = torch.tensor([[5.0, -1], [2, 7]])
    expected = 0.5 * math.log((1 + math.exp(2)) / 2) + 0.5 * math.log((1 + math.exp(-1)) / 2)
    assert suppress(z, y, prior).item() == pytest.approx(expected, abs=1e-6)


def slow_fedvls(z: Tensor, received: Tensor, y: Tensor, counts: Tensor, s: float, weight: float) -> float:
    """The equations of the module, image by image and class by class."""
    n, m = z.shape
    prior = [float(c) / max(int(counts.sum()), 1) for c in counts]
    labelled = [i for i in range(n) if any(y[i] == 1)]
    loss = 0.0
    for i in labelled:
        adjusted = [float(z[i, c]) + math.log(prior[c] + 1e-9) for c in range(m)]
        loss += math.log(sum(map(math.exp, adjusted))) - adjusted[int(y[i].argmax())]
    loss /= max(len(labelled), 1)
    for c in range(m):
        total = 0.0
        for i in labelled:
            a = 0.0 if y[i, c] == 1 else float(z[i, c]) - math.log(prior[c] + 1e-9) + math.log(1 / m + 1e-9)
            total += math.exp(a)
        if labelled:
            loss += s * prior[c] * (math.log(total) - math.log(len(labelled)))
    vacant = [c for c in range(m) if counts[c] == 0]
    for i in range(n):
        q, p = ({c: math.exp(float(x[i, c])) for c in vacant} for x in (received, z))
        for c in vacant:
            share = q[c] / sum(q.values())
            loss += weight * share * math.log(share / (p[c] / sum(p.values()))) / n
    return loss


@given(
    seed=st.integers(0, 10**6),
    counts=st.lists(st.sampled_from([0, 0, 1, 5, 40]), min_size=4, max_size=4),
    s=st.sampled_from([0.0, 0.005, 1.0]),
)
def test_fedvls_is_the_slow_transcription(seed: int, counts: list[int], s: float) -> None:
    g = torch.Generator().manual_seed(seed)
    z, received = (2 * torch.randn(6, 4, generator=g).double() for _ in range(2))
    has = torch.tensor(counts)
    # An image of a class that the site has no image of in training is one without a label here.
    y = torch.eye(4).double()[torch.randint(0, 4, (6,), generator=g)] * (has > 0)
    train = torch.cat([torch.eye(4).double().repeat_interleave(has, dim=0), y[y.sum(dim=1) == 0]])
    site, known = site_of("multiclass", EVERY, train), torch.ones(6, 4).bool()
    supervised = LogitSuppression(s).of(site, NO_RECEIVED, ROUND)(z, y, known)
    distilled = VacantDistillation(0.7).begin(site, ROUND)(step_of(z, received, y, known))
    expected = slow_fedvls(z, received, y, has, s, 0.7)
    assert (supervised + distilled).item() == pytest.approx(expected, abs=1e-10)


def test_a_batch_without_labels_has_no_supervised_loss() -> None:
    z = torch.randn(3, 4, requires_grad=True)
    site = site_of("multiclass", EVERY, torch.zeros(5, 4))
    loss = LogitSuppression().of(site, NO_RECEIVED, ROUND)(z, torch.zeros(3, 4), torch.ones(3, 4).bool())
    (gradient,) = torch.autograd.grad(loss, z)
    assert (loss.item(), gradient.abs().sum().item()) == (0, 0)


# FedPU

P = torch.tensor([[0.7, 0.2, 0.1], [0.3, 0.6, 0.1], [0.2, 0.3, 0.5], [0.1, 0.1, 0.8]], dtype=torch.float64)
"""Two labelled images, of classes 0 and 1, and two unlabelled ones; the site annotates classes 0 and 1."""
Y = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 0], [0, 0, 0]], dtype=torch.float64)
OWN = [True, True, False]


def pu_step(z: Tensor, received: Tensor, y: Tensor, known: Tensor) -> Step:
    """A step whose batch has the numbers of the images that the term asks for."""
    step = step_of(z, received, y, known)
    inputs = {**step.batch.inputs, **PositiveUnlabelled().rows(step.batch)}
    return replace(step, batch=replace(step.batch, inputs=inputs))


def risk(pi: Tensor, rho: float) -> float:
    """That of `P` and `Y`."""
    images = PositiveUnlabelled().rows(Batch({}, Y, torch.ones(4, 3).bool()))
    return unlabelled_risk(P, Y, images, torch.tensor([0, 1]), torch.tensor([2]), pi, rho).item()


def pu_loss(method: FedPU, step: Step, own: list[bool], y: Tensor) -> float:
    """CE(P) + lambda [...] of one step, at a site whose training labels are y."""
    site = site_of("multiclass", own, y)
    supervised = method.supervised.of(site, NO_RECEIVED, ROUND)
    value = sum(term.begin(site, ROUND)(step) for term in method.terms if term.active)
    return float(supervised(step.logits, step.batch.y, step.batch.known) + value)


def test_fedpu_by_hand() -> None:
    """CE (.356675 + .510826) / 2 = .433750.

    Unlabelled: of class 0 (.223144 + .105361) / 2, of class 1 (.356675 + .105361) / 2, in the mean .197635.
    """
    step = pu_step(P.log(), P, Y, torch.ones(4, 3).bool())
    assert pu_loss(FedPU(positive_unlabelled=PositiveUnlabelled(weight=0)), step, OWN, Y) == pytest.approx(
        0.433750, abs=1e-6
    )
    assert risk(torch.zeros(3), 0.0) == pytest.approx(0.197635, abs=5e-6)
    assert pu_loss(FedPU(), step, OWN, Y) == pytest.approx(0.631385, abs=5e-6)


def test_priors_by_hand() -> None:
    """pi = (.5, .25), rho = .375: .631385 + .375 * .105361 - (.5 * 1.203973 + .25 * .916291) / 2."""
    pi = torch.tensor([0.5, 0.25, 0])
    assert 0.433750 + risk(pi, 0.375) == pytest.approx(0.255366, abs=5e-6)


def test_one_prior_is_that_of_each_class_and_of_rho() -> None:
    """prior = .25: .631385 + .25 * .105361 - .25 (1.203973 + .916291) / 2 = .392692."""
    step = pu_step(P.log(), P, Y, torch.ones(4, 3).bool())
    method = FedPU(positive_unlabelled=PositiveUnlabelled(prior=0.25))
    assert pu_loss(method, step, OWN, Y) == pytest.approx(0.392692, abs=5e-6)


def slow_fedpu(z: Tensor, y: Tensor, own: list[bool], weight: float, prior: float) -> float:
    """The equation of the module, image by image and class by class."""
    labelled, unlabelled, ce = [], [], 0.0
    for i in range(len(z)):
        e = [math.exp(float(x)) for x in z[i]]
        p = [x / sum(e) for x in e]
        truth = [c for c in range(len(p)) if y[i, c] == 1]
        if truth:
            ce -= math.log(p[truth[0]])
            labelled.append((p, truth[0]))
        else:
            unlabelled.append(p)
    if not unlabelled:
        return ce / len(labelled)

    def wrong(p: list[float], c: int) -> float:
        return -math.log(1 - p[c] + 1e-6)

    mine = [c for c, annotated in enumerate(own) if annotated]
    others = [c for c, annotated in enumerate(own) if not annotated]
    total = sum(wrong(p, c) for p in unlabelled for c in mine) / len(unlabelled) / len(mine)
    if labelled and others:
        total += prior * sum(wrong(p, c) for p, _ in labelled for c in others) / len(labelled) / len(others)
    if labelled:
        total -= sum(prior * wrong(p, c) for p, c in labelled) / len(labelled)
    return ce / max(len(labelled), 1) + weight * total


@given(
    seed=st.integers(0, 10**6),
    own=st.lists(st.booleans(), min_size=4, max_size=4).filter(any),
    weight=st.sampled_from([0.5, 1.0, 2.0]),
    prior=st.sampled_from([0.0, 0.2]),
    labels=st.lists(st.integers(0, 4), min_size=6, max_size=6),
)
def test_fedpu_is_the_slow_transcription(
    seed: int, own: list[bool], weight: float, prior: float, labels: list[int]
) -> None:
    """Also of batches without a labelled image, or without another one."""
    z = 2 * torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)).double()
    known = torch.tensor(own).expand(6, 4)
    y = torch.eye(5).double()[labels][:, :4] * known
    method = FedPU(positive_unlabelled=PositiveUnlabelled(weight=weight, prior=prior))
    step = pu_step(z, z, y, torch.ones(6, 4).bool())
    expected = slow_fedpu(z, y, own, weight, prior)
    assert pu_loss(method, step, own, y) == pytest.approx(expected, abs=1e-10)


def test_an_unlabelled_image_moves_away_from_the_sites_classes() -> None:
    """Along the gradient its own classes become less likely, and no label of another class is needed."""
    z = torch.zeros(1, 3, requires_grad=True)
    site = site_of("multiclass", OWN, torch.zeros(1, 3))
    value = PositiveUnlabelled().begin(site, ROUND)
    value(pu_step(z, z, torch.zeros(1, 3), torch.ones(1, 3).bool())).backward()  # type: ignore[no-untyped-call]
    assert z.grad is not None
    assert [g > 0 for g in z.grad[0].tolist()] == OWN


def test_an_unknown_label_counts_as_none() -> None:
    """Whatever stands at a label that the site does not know of its own classes."""
    known = torch.tensor([[True, True, True], [False, False, True]])
    losses = [
        pu_loss(
            FedPU(positive_unlabelled=PositiveUnlabelled(prior=0.3)),
            pu_step(P[:2].log(), P[:2], torch.tensor([[1.0, 0, 0], [hidden, 0, 0]]), known),
            OWN,
            torch.tensor([[1.0, 0, 0], [math.nan, math.nan, 0]]),
        )
        for hidden in (0.0, 1.0)
    ]
    assert losses[0] == losses[1]
    assert losses[0] > 0


def test_more_priors_than_images_are_refused() -> None:
    site = site_of("multiclass", OWN, Y)
    site.name = "alpha"
    with pytest.raises(ConfigError, match=r"alpha annotates 2 classes, .* lower it to 0.500 or less"):
        PositiveUnlabelled(prior=0.6).begin(site, ROUND)
