"""FixMatch: the numbers by hand, where it is FedAvg, a slow transcription, and what second views do."""

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

from federated import LOCAL, ROUND, federated, same
from one_step import site_of, step_of
from suture.core.errors import ConfigError
from suture.core.labels import LabelType
from suture.data.batch import STRONG, WEAK, Augmentation, Batch
from suture.learning.training import SiteContext, training_batches
from suture.methods.composed import SECOND, SECOND_OF, Composed, _Training, check_needs
from suture.methods.fedavg import FedAvg
from suture.models import ModelSpec
from suture.protocol.messages import TaskData
from suture_papers.combined import Combined
from suture_papers.missing_labels.confident import Thresholds
from suture_papers.missing_labels.fixmatch import FixMatch, PseudoLabels, whole_image_loss
from suture_papers.missing_labels.fssl import FSSL, ReceivedLabels
from suture_synthetic import trial
from suture_synthetic.method_checks import SMALL

EASY = Thresholds(positive=0.501, negative=0.499, best=0.26)
"""Thresholds that a model of random weights passes, too."""
BOTH = pytest.mark.parametrize("label_type", ["multilabel", "multiclass"])


def method_of(**settings: Any) -> FixMatch:
    return FixMatch(local=LOCAL, pseudo_labels=PseudoLabels(thresholds=EASY, **settings))


def begun(
    method: Composed, label_type: LabelType, name: str = "alpha", augmentation: Augmentation = WEAK
) -> tuple[_Training, SiteContext]:
    """A round at a site that has begun."""
    with trial.Trial(method, SMALL, label_type) as federation:
        payload: TaskData = federation.payload(name)
        site = replace(federation.context(name, payload), augmentation=augmentation)
    terms = tuple(term for term in method.terms if term.active)
    return _Training(method.supervised, terms, site, payload, ROUND), site


def batches_of(training: _Training) -> list[Batch]:
    return list(training.batches(LOCAL, *(torch.Generator().manual_seed(seed) for seed in (1, 2))))


# By hand


def test_the_multilabel_example() -> None:
    """p = (.9, .5, .002), z = (1, 0, -2): (.313262 + .126928) / 3; the model labels by its own weak view."""
    weak = torch.logit(torch.tensor([[0.5, 0.5, 0.5], [0.9, 0.5, 0.002]]))
    known = torch.tensor([[True] * 3, [False] * 3])
    value = PseudoLabels().begin(site_of("multilabel", [True, False, False]), ROUND)
    rows, strong = torch.tensor([1]), torch.tensor([[1.0, 0, -2]])
    for received in (torch.zeros(2, 3), torch.full((2, 3), 9.0)):
        loss = value(step_of(weak, received, torch.zeros(2, 3), known, rows, strong))
        assert loss.item() == pytest.approx(0.146730, abs=1e-6)


def test_the_single_label_example() -> None:
    """Two unlabelled images, one of them surely of class 2, z = (0, 1, 2): .407606 / 2."""
    weak = torch.tensor([[0.5, 0.3, 0.2], [0.01, 0.02, 0.97], [0.9, 0.05, 0.05]]).log()
    y, known = torch.tensor([[1.0, 0, 0], [0, 0, 0], [0, 0, 0]]), torch.tensor([[True, True, False]] * 3)
    term = PseudoLabels()
    rows = term.seen_again(Batch({}, y, known), "multiclass")
    assert rows.tolist() == [1, 2]
    step = step_of(weak, weak, y, known, rows, torch.tensor([[0.0, 1, 2]] * 2))
    loss = term.begin(site_of("multiclass", [True, True, False]), ROUND)(step)
    assert loss.item() == pytest.approx(0.203803, abs=1e-6)


def test_among_the_classes_that_a_site_does_not_annotate() -> None:
    """Class 0 is annotated and the likeliest, .6; of the others class 2 is: kept from .3 on."""
    weak = torch.tensor([[0.6, 0.1, 0.3]]).log()
    y, known = torch.zeros(1, 3), torch.tensor([[True, False, False]])
    strong = torch.tensor([[0.0, 1, 2]])
    losses = []
    for among in ("all", "unknown"):
        term: Any = PseudoLabels(thresholds=Thresholds(best=0.29), among=among)  # type: ignore[arg-type]
        value = term.begin(site_of("multiclass", [True, False, False]), ROUND)
        losses.append(value(step_of(weak, weak, y, known, torch.tensor([0]), strong)).item())
    assert losses == pytest.approx([2.407606, 0.407606], abs=1e-6)


def test_whole_images_by_hand() -> None:
    """.8 and .2: image 0 counts, (.313262 + .126928) / 2; image 1 does not, for one class of .5."""
    p = torch.tensor([[0.9, 0.1, 0.5], [0.9, 0.5, 0.5]])
    z, unknown = torch.tensor([[1.0, -2, 9], [1, 1, 9]]), torch.tensor([[True, True, False]] * 2)
    loss = whole_image_loss(p, z, unknown, Thresholds(positive=0.8, negative=0.2))
    assert loss.item() == pytest.approx((0.313262 + 0.126928) / 2, abs=1e-6)
    assert whole_image_loss(p[1:], z[1:], unknown[1:], Thresholds(positive=0.8, negative=0.2)).item() == 0


# Where it is FedAvg


@pytest.mark.complete
@BOTH
def test_without_weight_it_is_fedavg_of_known_labels(label_type: LabelType) -> None:
    """With one label an image, what FedAvg teaches as absent is true: a labelled image has no other class."""
    unknown: Any = "masked" if label_type == "multilabel" else "negative"
    fedavg = federated(FedAvg(local=LOCAL, rows="owners", unknown=unknown), label_type)
    assert same(federated(method_of(weight=0), label_type), fedavg)
    assert not same(federated(method_of(), label_type), fedavg)


@pytest.mark.complete
@BOTH
def test_where_all_is_known_it_is_fedavg(label_type: LabelType, monkeypatch: Any) -> None:
    """Under the job's augmentation, here none. No second view is drawn: it would move batch norm."""
    monkeypatch.setattr(trial, "SITES", dict.fromkeys(("alpha", "beta"), trial.CLASSES))
    one = federated(method_of(weak=Augmentation()), label_type)
    assert same(one, federated(FedAvg(local=LOCAL), label_type))
    training, _ = begun(method_of(), label_type)
    assert [set(batch.inputs) for batch in batches_of(training)] == [{"image"}] * 3


# The equations written out


def slow(weak: Tensor, strong: Tensor, unknown: Tensor, label_type: LabelType, how: PseudoLabels) -> float:
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
        if how.keep == "images" and sure != mine:
            continue
        count += len(mine)
        total -= sum(math.log(q[c] if p[c] >= 0.5 else 1 - q[c]) for c in sure)
    return how.weight * total / max(count, 1)


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
def test_a_step_learns_the_strong_view_and_not_its_own_labels(label_type: LabelType) -> None:
    """In double precision of a whole step; the weak view has the gradient of its known labels alone."""
    method = replace(method_of(weight=0.7), class_weights="none")
    training, site = begun(method, label_type)
    model = site.model.double().train()
    for one in batches_of(training):
        batch = Batch(
            {k: v.double() if k != SECOND_OF else v for k, v in one.inputs.items()}, one.y.double(), one.known
        )
        rows, seen = batch.inputs[SECOND_OF], []
        hook = model.head.register_forward_hook(lambda *a: seen.append(a[2]))  # noqa: B023
        loss = training.objective(model, batch)
        hook.remove()
        logits: Tensor = seen[0]
        weak, strong = logits[: len(batch)], logits[len(batch) :]
        supervised = method.supervised.of(site, Any, ROUND)(weak, batch.y, batch.known)  # type: ignore[arg-type]
        unknown = ~batch.known if label_type == "multilabel" else torch.ones_like(batch.known)
        pseudo = slow(weak[rows].detach(), strong.detach(), unknown[rows], label_type, method.pseudo_labels)
        assert pseudo > 0
        assert loss.item() == pytest.approx(supervised.item() + pseudo, abs=1e-10)
        (whole,) = torch.autograd.grad(loss, logits, retain_graph=True)
        (labels,) = torch.autograd.grad(supervised, logits)
        assert torch.equal(whole[: len(batch)], labels[: len(batch)])
        assert whole[len(batch) :].abs().sum() > 0


# Second views


def test_second_views_are_of_the_right_images_under_the_strong_augmentation() -> None:
    """A mirror in place of the strong one: each second view is the mirrored image of its row."""
    method = method_of(weak=Augmentation(), strong=Augmentation(flip=1.0))
    training, _ = begun(method, "multiclass")
    batches = batches_of(training)
    assert 0 < sum(len(batch.inputs[SECOND]) for batch in batches) < sum(map(len, batches))
    for batch in batches:
        rows = batch.inputs[SECOND_OF]
        unlabelled = [i for i in range(len(batch)) if not any(batch.y[i] == 1)]
        assert rows.tolist() == unlabelled
        assert torch.equal(batch.inputs[SECOND], batch.inputs["image"][rows].flip(-1))


@pytest.mark.parametrize(
    ("method", "spec"),
    [
        (method_of(), WEAK),
        (FSSL(local=LOCAL), WEAK),
        (Combined(local=LOCAL, received_labels=ReceivedLabels()), WEAK),
        (method_of(weight=0), STRONG),
    ],
    ids=["fixmatch", "fssl", "combined", "off"],
)
def test_the_first_view_is_weak_whatever_the_jobs_augmentation(method: Any, spec: Augmentation) -> None:
    """FedLSM's jobs have a strong one, for its other comparators; without pseudo-labels it is the job's."""
    training, site = begun(method, "multilabel", augmentation=STRONG)
    shuffle, noise = (torch.Generator().manual_seed(seed) for seed in (1, 2))
    plain = next(training_batches(replace(site, augmentation=spec), LOCAL, shuffle, noise))
    assert torch.equal(batches_of(training)[0].inputs["image"], plain.inputs["image"])


def test_the_first_view_is_what_fedavg_draws_and_the_second_one_strong() -> None:
    assert (PseudoLabels().first_view, PseudoLabels().second_view) == (WEAK, STRONG)
    training, site = begun(method_of(), "multilabel")
    batch = batches_of(training)[0]
    shuffle, noise = (torch.Generator().manual_seed(seed) for seed in (1, 2))
    plain = next(training_batches(site, LOCAL, shuffle, noise))
    assert torch.equal(batch.inputs["image"], plain.inputs["image"])
    raw = next(
        training_batches(
            replace(site, augmentation=Augmentation()), LOCAL, torch.Generator().manual_seed(1), noise
        )
    )
    for view in (batch.inputs["image"], raw.inputs["image"]):
        assert not torch.isclose(batch.inputs[SECOND], view[batch.inputs[SECOND_OF]]).all()


@BOTH
def test_both_views_are_one_batch_of_batch_norm(label_type: LabelType) -> None:
    """One forward pass of n + m images, in training mode, whose statistics are those of all of them."""
    training, site = begun(method_of(), label_type)
    batch, model = batches_of(training)[0], site.model.train()
    twin, sizes = copy.deepcopy(model), []
    model.backbone.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    training.objective(model, batch)
    twin({"image": torch.cat([batch.inputs["image"], batch.inputs[SECOND]])})
    assert sizes == [len(batch) + len(batch.inputs[SECOND_OF])]
    found, expected = model.state_dict(), twin.state_dict()
    running = [name for name in found if "running" in name]
    assert running
    for name in running:
        assert torch.equal(found[name], expected[name])


def test_a_step_sees_features_and_logits_of_the_first_view_alone() -> None:
    seen: list[Any] = []

    class Watching(PseudoLabels):
        def begin(self, *_: Any) -> Any:
            return lambda step: seen.append(step) or step.logits.new_zeros(())

    with trial.Trial(method_of(), SMALL, "multiclass") as federation:
        payload = federation.payload("alpha")
        site = federation.context("alpha", payload)
    training = _Training(method_of().supervised, (Watching(),), site, payload, ROUND)
    batch = batches_of(training)[0]
    training.objective(site.model.eval(), batch)
    (step,) = seen
    first = site.model.features({"image": batch.inputs["image"]})
    assert torch.allclose(step.features, first, atol=1e-6)
    assert torch.allclose(step.logits, site.model.head(first), atol=1e-6)
    assert torch.allclose(step.strong, site.model({"image": batch.inputs[SECOND]}), atol=1e-6)
    assert step.rows.tolist() == batch.inputs[SECOND_OF].tolist()
    assert len(step.received_logits) == len(batch)


# What is refused


def test_a_model_of_text_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="PseudoLabels needs two views of an image, but the model 'lstm' reads text"
    ):
        FixMatch().adapted(ModelSpec("lstm"))
    FixMatch().adapted(SMALL)
    assert FixMatch.about.images_only


@pytest.mark.parametrize("other", [{"unknown": "negative"}, {"label_view": "own"}])
def test_labels_that_it_cannot_use_are_refused(other: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="PseudoLabels gives pseudo-labels for what the site does not"):
        FixMatch(**other)


def test_two_second_views_are_refused() -> None:
    with pytest.raises(ConfigError, match="PseudoLabels and ReceivedLabels both need a second view"):
        check_needs((PseudoLabels(), ReceivedLabels()), FixMatch().labels)
