"""Confident pseudo-labels, of FixMatch and FSSL: by hand, written out, and what second views do."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from federated import LOCAL, ROUND, moved
from one_step import equal, site_of, step_of
from suture.core.labels import LabelType
from suture.data.batch import STRONG, WEAK, Augmentation, Batch
from suture.learning.training import SiteContext, training_batches
from suture.methods.composed import SECOND, SECOND_OF, Composed, _Training
from suture_papers.combined import Combined
from suture_papers.missing_labels.confident import Thresholds
from suture_papers.missing_labels.fixmatch import FixMatch, PseudoLabels, whole_image_loss
from suture_papers.missing_labels.fssl import FSSL, ReceivedLabels
from suture_synthetic.method_checks import SMALL
from suture_synthetic.trial import Trial

EASY = Thresholds(positive=0.501, negative=0.499, best=0.26)
"""Thresholds that a model of random weights passes, too."""
BOTH = pytest.mark.parametrize("label_type", ["multilabel", "multiclass"])
TERMS = pytest.mark.parametrize("term", [PseudoLabels(), ReceivedLabels()], ids=["fixmatch", "fssl"])


def fixmatch(**settings: Any) -> FixMatch:
    return FixMatch(local=LOCAL, pseudo_labels=PseudoLabels(thresholds=EASY, **settings))


def fssl(**settings: Any) -> FSSL:
    return FSSL(local=LOCAL, received_labels=ReceivedLabels(thresholds=EASY, **settings))


def begun(
    method: Composed, label_type: LabelType, augmentation: Augmentation = WEAK
) -> tuple[_Training, SiteContext]:
    """A round at alpha that has begun."""
    with Trial(method, SMALL, label_type) as federation:
        payload = federation.payload("alpha")
        site = replace(federation.context("alpha", payload), augmentation=augmentation)
    terms = tuple(term for term in method.terms if term.active)
    return _Training(method.supervised, terms, site, payload, ROUND), site


def batches_of(training: _Training) -> list[Batch]:
    return list(training.batches(LOCAL, *(torch.Generator().manual_seed(seed) for seed in (1, 2))))


def models_of(term: Any, weak: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of the model in training and of the received one, where the one that labels answers `weak`."""
    return (weak, other) if isinstance(term, PseudoLabels) else (other, weak)


# By hand


@TERMS
def test_the_multilabel_example(term: Any) -> None:
    """p = (.9, .5, .002), z = (1, 0, -2): (.313262 + .126928) / 3, whatever the other model thinks."""
    weak = torch.logit(torch.tensor([[0.5, 0.5, 0.5], [0.9, 0.5, 0.002]]))
    known = torch.tensor([[True] * 3, [False] * 3])
    value = term.begin(site_of("multilabel", [True, False, False]), ROUND)
    for other in (torch.zeros(2, 3), torch.full((2, 3), 9.0)):
        models = models_of(term, weak, other)
        step = step_of(*models, torch.zeros(2, 3), known, torch.tensor([1]), torch.tensor([[1.0, 0, -2]]))
        assert value(step).item() == pytest.approx(0.146730, abs=1e-6)


@TERMS
def test_the_single_label_example(term: Any) -> None:
    """Two unlabelled images, one of them surely of class 2, z = (0, 1, 2): .407606 / 2."""
    weak = torch.tensor([[0.5, 0.3, 0.2], [0.01, 0.02, 0.97], [0.9, 0.05, 0.05]]).log()
    y, known = torch.tensor([[1.0, 0, 0], [0, 0, 0], [0, 0, 0]]), torch.tensor([[True, True, False]] * 3)
    rows = term.seen_again(Batch({}, y, known), "multiclass")
    assert rows.tolist() == [1, 2]
    models = models_of(term, weak, torch.zeros(3, 3))
    step = step_of(*models, y, known, rows, torch.tensor([[0.0, 1, 2]] * 2))
    loss = term.begin(site_of("multiclass", [True, True, False]), ROUND)(step)
    assert loss.item() == pytest.approx(0.203803, abs=1e-6)


def test_among_the_classes_that_a_site_does_not_annotate() -> None:
    """Class 0 is annotated and the likeliest, .6; of the others class 2 is: kept from .3 on."""
    weak = torch.tensor([[0.6, 0.1, 0.3]]).log()
    y, known = torch.zeros(1, 3), torch.tensor([[True, False, False]])
    step = step_of(weak, weak, y, known, torch.tensor([0]), torch.tensor([[0.0, 1, 2]]))
    losses = []
    for among in ("all", "unknown"):
        term: Any = PseudoLabels(thresholds=Thresholds(best=0.29), among=among)  # type: ignore[arg-type]
        losses.append(term.begin(site_of("multiclass", [True, False, False]), ROUND)(step).item())
    assert losses == pytest.approx([2.407606, 0.407606], abs=1e-6)


def test_whole_images_by_hand() -> None:
    """.8 and .2: image 0 counts, (.313262 + .126928) / 2; image 1 does not, for one class of .5."""
    p = torch.tensor([[0.9, 0.1, 0.5], [0.9, 0.5, 0.5]])
    z, unknown = torch.tensor([[1.0, -2, 9], [1, 1, 9]]), torch.tensor([[True, True, False]] * 2)
    limits = Thresholds(positive=0.8, negative=0.2)
    loss = whole_image_loss(p, z, unknown, limits)
    assert loss.item() == pytest.approx((0.313262 + 0.126928) / 2, abs=1e-6)
    assert whole_image_loss(p[1:], z[1:], unknown[1:], limits).item() == 0


@pytest.mark.parametrize("method", [fixmatch(), fssl()])
def test_the_softmax_of_labels_is_over_all_classes(method: Any) -> None:
    """z = (1, 0, 0), class 0 of the annotated 0 and 1: ln(1 + 2/e), not ln(1 + 1/e)."""
    z, y, known = (torch.tensor([row]) for row in ([1.0, 0, 0], [1.0, 0, 0], [True, True, False]))
    supervised = method.supervised.of(site_of("multiclass", known[0]), Any, ROUND)
    for found in (method.loss(z, y, known, "multiclass"), supervised(z, y, known)):
        assert found.item() == pytest.approx(math.log(1 + 2 / math.e))


# The equations written out


def slow(weak: Tensor, strong: Tensor, unknown: Tensor, label_type: LabelType, how: Any) -> float:
    """L_u, image by image and class by class; of one label an image `unknown` has the candidates."""
    limits, total, count = how.thresholds, 0.0, 0
    for i in range(len(weak)):
        e, f = ([math.exp(float(x)) for x in z[i]] for z in (weak, strong))
        mine = [c for c in range(len(e)) if unknown[i, c]]
        if label_type == "multiclass":
            count += bool(mine)
            best = max(mine, key=lambda c: e[c], default=None)
            if best is not None and e[best] / sum(e) >= limits.best:
                total -= math.log(f[best] / sum(f))
            continue
        p, q = ([x / (1 + x) for x in odds] for odds in (e, f))
        sure = [c for c in mine if p[c] >= limits.positive or p[c] <= limits.negative]
        if getattr(how, "keep", "entries") == "images" and sure != mine:
            continue
        count += len(mine)
        total -= sum(math.log(q[c] if p[c] >= 0.5 else 1 - q[c]) for c in sure)
    return float(how.weight * total / max(count, 1))


@given(
    seed=st.integers(0, 10**6),
    label_type=st.sampled_from(["multilabel", "multiclass"]),
    keep=st.sampled_from(["entries", "images"]),
    among=st.sampled_from(["all", "unknown"]),
    own=st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_it_is_the_slow_transcription(
    seed: int, label_type: LabelType, keep: Any, among: Any, own: list[bool]
) -> None:
    g = torch.Generator().manual_seed(seed)
    weak = 3 * torch.randn(8, 4, generator=g).double()
    known = torch.tensor(own).expand(8, 4)
    y = torch.eye(5).double()[torch.randint(0, 5, (8,), generator=g)][:, :4] * known
    limits = Thresholds(positive=0.7, negative=0.3, best=0.5)
    how = PseudoLabels(weight=0.7, thresholds=limits, keep=keep, among=among)
    rows = how.seen_again(Batch({}, y, known), label_type)
    strong = 3 * torch.randn(len(rows), 4, generator=g).double()
    value = how.begin(site_of(label_type, own), ROUND)(step_of(weak, weak, y, known, rows, strong))
    unknown = ~known
    if label_type == "multiclass":
        unlabelled = torch.tensor([[not any(y[i] == 1)] * 4 for i in range(8)])
        unknown = unlabelled & unknown if among == "unknown" else unlabelled
    assert [i for i in range(8) if any(unknown[i])] == rows.tolist()
    assert value.item() == pytest.approx(slow(weak[rows], strong, unknown[rows], label_type, how), abs=1e-10)


@BOTH
@pytest.mark.parametrize("make", [fixmatch, fssl])
def test_a_step_learns_the_strong_view_and_not_its_own_labels(make: Any, label_type: LabelType) -> None:
    """In double precision of a whole step; the weak view has the gradient of its known labels alone."""
    method = replace(make(weight=0.7), class_weights="none")
    training, site = begun(method, label_type)
    received, model = training._received, site.model.double().train()
    before = copy.deepcopy(received.state_dict())
    received.double()
    moved(model)
    for one in batches_of(training)[:2]:
        doubled = {k: v.double() if k != SECOND_OF else v for k, v in one.inputs.items()}
        batch, seen = Batch(doubled, one.y.double(), one.known), []
        hook = model.head.register_forward_hook(lambda *a: seen.append(a[2]))  # noqa: B023
        loss = training.objective(model, batch)
        hook.remove()
        logits: Tensor = seen[0]
        weak, strong = logits[: len(batch)], logits[len(batch) :]
        supervised = method.supervised.of(site, Any, ROUND)(weak, batch.y, batch.known)  # type: ignore[arg-type]
        labelling = weak.detach() if make is fixmatch else received({"image": batch.inputs["image"]})
        rows, term = batch.inputs[SECOND_OF], method.terms[-1]
        unknown = ~batch.known if label_type == "multilabel" else torch.ones_like(batch.known)
        pseudo = slow(labelling[rows], strong.detach(), unknown[rows], label_type, term)
        assert pseudo > 0
        assert loss.item() == pytest.approx(supervised.item() + pseudo, abs=1e-10)
        (whole,) = torch.autograd.grad(loss, logits, retain_graph=True)
        (labels,) = torch.autograd.grad(supervised, logits)
        assert torch.equal(whole[: len(batch)], labels[: len(batch)])
        assert whole[len(batch) :].abs().sum() > 0
    assert equal(before, received.float().state_dict())  # it rests, and so does its batch norm


# Second views


def test_second_views_are_of_the_right_images_under_the_strong_augmentation() -> None:
    """A mirror in place of the strong one: each second view is the mirrored image of its row."""
    training, _ = begun(fixmatch(weak=Augmentation(), strong=Augmentation(flip=1.0)), "multiclass")
    batches = batches_of(training)
    assert 0 < sum(len(batch.inputs[SECOND]) for batch in batches) < sum(map(len, batches))
    for batch in batches:
        rows = batch.inputs[SECOND_OF]
        assert rows.tolist() == [i for i in range(len(batch)) if not any(batch.y[i] == 1)]
        assert torch.equal(batch.inputs[SECOND], batch.inputs["image"][rows].flip(-1))


@pytest.mark.parametrize(
    ("method", "spec"),
    [
        (fixmatch(), WEAK),
        (fssl(), WEAK),
        (Combined(local=LOCAL, received_labels=ReceivedLabels()), WEAK),
        (fixmatch(weight=0), STRONG),
    ],
    ids=["fixmatch", "fssl", "combined", "off"],
)
def test_the_first_view_is_weak_whatever_the_jobs_augmentation(method: Any, spec: Augmentation) -> None:
    """FedLSM's jobs have a strong one, for its other comparators; without pseudo-labels it is the job's."""
    training, site = begun(method, "multilabel", augmentation=STRONG)
    shuffle, noise = (torch.Generator().manual_seed(seed) for seed in (1, 2))
    plain = next(training_batches(replace(site, augmentation=spec), LOCAL, shuffle, noise))
    inputs = batches_of(training)[0].inputs
    assert torch.equal(inputs["image"], plain.inputs["image"])
    assert (SECOND in inputs) == (spec is WEAK)
    if SECOND in inputs:
        assert not torch.isclose(inputs[SECOND], inputs["image"][inputs[SECOND_OF]]).all()


@BOTH
def test_both_views_are_one_batch_of_batch_norm(label_type: LabelType) -> None:
    """One forward pass of n + m images, in training mode, whose statistics are those of all of them."""
    training, site = begun(fixmatch(), label_type)
    batch, model = batches_of(training)[0], site.model.train()
    twin, sizes = copy.deepcopy(model), []
    model.backbone.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    training.objective(model, batch)
    twin({"image": torch.cat([batch.inputs["image"], batch.inputs[SECOND]])})
    assert sizes == [len(batch) + len(batch.inputs[SECOND_OF])]
    assert any("running" in name for name in twin.state_dict())
    assert equal(model.state_dict(), twin.state_dict())


def test_a_step_sees_features_and_logits_of_the_first_view_alone() -> None:
    seen: list[Any] = []
    training, site = begun(fixmatch(), "multiclass")
    batch, model = batches_of(training)[0], site.model.eval()
    training._begun = [lambda step: seen.append(step) or step.logits.new_zeros(())]
    training.objective(model, batch)
    (step,) = seen
    first = model.features({"image": batch.inputs["image"]})
    assert torch.allclose(step.features, first, atol=1e-6)
    assert torch.allclose(step.logits, model.head(first), atol=1e-6)
    assert torch.allclose(step.strong, model({"image": batch.inputs[SECOND]}), atol=1e-6)
    assert step.rows.tolist() == batch.inputs[SECOND_OF].tolist()
    assert len(step.received_logits) == len(batch)
