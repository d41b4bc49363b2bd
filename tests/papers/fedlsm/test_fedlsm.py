"""FedLSM by hand: aggregation, pseudo-labels, losses, subsets, and ablations."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rounds import begun, train_round
from small_hospitals import EVERY
from suture.core.errors import ConfigError
from suture.core.labels import LabelSet
from suture.data.batch import Batch
from suture.learning.training import LocalRound, LocalTraining, SiteContext
from suture.methods.base import GlobalModel, Phase, RoundContext
from suture.models.classifier import Classifier, Layout
from suture.protocol.messages import TaskData, Update
from suture.protocol.packing import Packed, digest, pack
from suture_papers.chest_xrays.nih import LABELS as NIH
from suture_papers.fedlsm.fedlsm import FedLSM
from suture_papers.fedlsm.mean_teacher import (
    KINDS,
    MeanTeacher,
    Targets,
    Teaching,
    Thresholds,
    follower,
    mix,
    subsets,
)
from suture_papers.partition import class_lists
from suture_papers.skin_lesions.isic import LABELS as ISIC
from world import refused

LABELS = ("A", "B", "C")
CTX = RoundContext(1, Phase("main", 1), 0)


def update(psi: list[list[float]], q: list[float], theta: float, n: float) -> Update:
    rows = {"head.weight": torch.tensor(psi), "head.bias": torch.tensor([p[0] for p in psi])}
    return Update(1, LABELS, {"theta": torch.tensor([theta])}, rows, torch.tensor(q).double(), weight=n)


def start(rows: list[list[float]]) -> GlobalModel:
    head = {"head.weight": torch.tensor(rows), "head.bias": torch.tensor([r[0] for r in rows])}
    return GlobalModel(LABELS, {"theta": torch.zeros(1)}, head)


def test_rows_are_weighted_by_what_was_counted() -> None:
    """Eq. 7, with the extractor weighted by numbers of images: (100 x 1 + 300 x 5) / 400 = 4."""
    before = start([[0.0, 0.0]] * 3)
    one = update([[1, 0], [2, 2], [9, 9]], [30, 10, 0], 1.0, 100)
    two = update([[5, 4], [6, 6], [3, 1]], [10, 30, 40], 5.0, 300)
    after = FedLSM().aggregate(before, [one, two], CTX)
    torch.testing.assert_close(after.head["head.weight"], torch.tensor([[2.0, 1.0], [5.0, 5.0], [3.0, 1.0]]))
    torch.testing.assert_close(after.head["head.bias"], torch.tensor([2.0, 5.0, 3.0]))
    assert after.shared["theta"].item() == pytest.approx(4)
    silent = update([[1, 0], [2, 2], [9, 9]], [1, 0, 0], 1.0, 1)
    after = FedLSM().aggregate(start([[7.0, 7.0]] * 3), [silent], CTX)
    assert after.head["head.weight"].tolist() == [[1, 0], [7, 7], [7, 7]]  # what nobody counted stays


def test_the_teacher_follows() -> None:
    def network(value: float) -> Classifier:
        model = Classifier(torch.nn.BatchNorm1d(2), 2, LabelSet(("A",)))
        for tensor in model.state_dict().values():
            tensor.fill_(value)
        return model

    teacher = network(1)
    follower(teacher, network(2), 0.999)()
    assert teacher.head.weight.tolist() == [[pytest.approx(1.001)] * 2]
    assert teacher.state_dict()["backbone.running_mean"].tolist() == [2, 2]


def bench_of(tiny: Any, method: FedLSM) -> tuple[SiteContext, TaskData]:
    """Alpha, with the global model of all four classes and its class weights."""
    return begun(tiny, method, positive_weight=torch.ones(len(EVERY)))


METHOD = FedLSM(
    local=LocalTraining(lr=1e-2, iterations=3, batch_size=8, betas=(0.9, 0.99), weight_decay=5e-4),
    teaching=Teaching(
        start_round=1, mixed=2, positive=0.505, negative=0.495, mixed_positive=0.5, mixed_negative=0.5
    ),
)
ROUND = LocalRound(METHOD.local, "average", 0, 1)


def test_before_pseudo_labels_a_site_learns_what_it_knows(tiny: Any) -> None:
    method = replace(METHOD, teaching=replace(METHOD.teaching, start_round=2))
    context, task = bench_of(tiny, method)
    done, _ = train_round(method, context, task, CTX)
    known = torch.tensor([name in ("Mass", "Nodule") for name in EVERY])
    assert bool((done.class_weights[~known] == 0).all())
    assert bool((done.class_weights[known] > 0).all())
    assert done.scalars == {"pseudo_positive": 0.0, "pseudo_negative": 0.0}
    unknown_rows = done.head["head.weight"][~known]
    decay_only = task.head["head.weight"][~known]
    assert float((unknown_rows - decay_only).abs().max()) < 0.04  # weight decay alone moves them


def test_the_ablations(tiny: Any) -> None:
    context, task = bench_of(tiny, METHOD)
    owners, _ = train_round(replace(METHOD, proxies="owners"), context, task, CTX)
    n = len(context.samples["train"])
    assert owners.class_weights.tolist() == [0, 0, n, n]
    rare = replace(task, channels={"positive_weight": torch.full((len(EVERY),), 9.0)})  # one in ten
    bounded, _ = train_round(replace(METHOD, proxies="bounded"), context, rare, CTX)
    assert bounded.class_weights[:2].tolist() == [1.8] * 2  # of 3 x (8 - 2) images
    assert min(bounded.class_weights[2:]) > 1.8  # its own
    plain = MeanTeacher(replace(METHOD.teaching, enhancing="none"), context, ROUND, None)
    g = torch.Generator()
    batches = list(plain.batches(g, g))
    assert [len(b) for b in batches] == [8, 8, 8]
    whole = MeanTeacher(METHOD.teaching, context, ROUND, None)
    images = next(iter(whole.batches(g, g))).inputs["image"]
    assert len(images) == 8


def test_subsets_are_disjoint_and_ranked(tiny: Any) -> None:
    context, _ = bench_of(tiny, METHOD)
    for estimation in ("entropy", "random"):
        how = replace(METHOD.teaching, estimation=estimation, confident=4, uncertain=0.2)  # of 15
        low, middle, high = subsets(how, context, True, 0, 1)
        assert (len(low), len(high)) == (4, 3)
        assert sorted(torch.cat([low, middle, high]).tolist()) == list(range(len(context.samples["train"])))
    low, middle, high = subsets(METHOD.teaching, context, False, 0, 1)
    assert (len(low), len(high)) == (0, 0)
    assert len(middle) == len(context.samples["train"])


def test_larger_subsets_than_the_site_has_and_batches_of_mixtures_alone_are_refused(tiny: Any) -> None:
    context, _ = bench_of(tiny, METHOD)
    with refused("alpha", 15, 8, by=ConfigError):
        subsets(replace(METHOD.teaching, confident=8, uncertain=8), context, True, 0, 1)
    with refused("alpha", "2 mixtures", by=ConfigError):
        MeanTeacher(METHOD.teaching, context, replace(ROUND, local=replace(METHOD.local, batch_size=2)), None)


WEIGHT = torch.tensor([2.0, 1.0, 0.5, 3.0])


def lesson(context: SiteContext, **how: Any) -> tuple[Tensor, Batch, float]:
    """Logits, the first batch without mixtures, and their loss under class weights."""
    sure = replace(METHOD.teaching, enhancing="none", positive=0.9, negative=0.0, **how)
    lessons = MeanTeacher(sure, context, ROUND, WEIGHT)
    g, s = torch.Generator().manual_seed(0), torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    batch = next(iter(lessons.batches(g, g)))
    assert 0 < batch.known.sum() < 32
    return s, batch, float(lessons.loss(s, batch))


def test_the_loss_of_the_program_is_a_product_of_means(tiny: Any) -> None:
    """Mean of all entries, the teacher's probability where it is unsure, times the mean masked weight."""
    s, batch, found = lesson(bench_of(tiny, METHOD)[0], loss="program")
    bce = torch.nn.functional.binary_cross_entropy_with_logits(s, batch.y)
    assert found == pytest.approx(float(bce * (batch.known * WEIGHT).mean()), rel=1e-5)


@pytest.mark.parametrize("start", [1, 2])
def test_the_class_weight_on_both_terms_scales_the_loss_of_the_class(start: int, tiny: Any) -> None:
    """w_c (-t ln p - (1 - t) ln(1 - p)) over sure entries, / (8 x 4); before pseudo-labels as well."""
    context, _ = bench_of(tiny, METHOD)
    s, batch, found = lesson(context, loss="both", start_round=start)
    p = torch.sigmoid(s)
    each = WEIGHT * (-batch.y * p.log() - (1 - batch.y) * (1 - p).log())
    assert found == pytest.approx(float(each[batch.known].sum() / 32), rel=1e-5)
    assert lesson(context, loss="paper", start_round=start)[2] != pytest.approx(found, rel=1e-3)


def test_views_that_are_made_ahead_change_no_byte(tiny: Any) -> None:
    sent = []
    for prefetch in (0, 1, 5):
        context, task = bench_of(tiny, METHOD)
        update, kept = train_round(METHOD, replace(context, prefetch=prefetch), task, CTX)
        sent.append(digest(Packed({**pack(update).tensors, **kept}, pack(update).header)))
    assert sent[0] == sent[1] == sent[2]


def test_a_teacher_learns_before_it_is_asked_about_the_next_batch(tiny: Any) -> None:
    """However far ahead views are made: one that follows at once says something else of the second batch."""
    context, _ = bench_of(tiny, METHOD)
    taught = []
    for follows in (False, True):
        lessons = MeanTeacher(METHOD.teaching, context, replace(ROUND, local=METHOD.local), None)
        g = torch.Generator().manual_seed(0)
        batches = lessons.batches(g, g)
        next(batches)
        if follows:
            with torch.no_grad():
                for parameter in lessons._teacher.head.parameters():
                    parameter.neg_()
        taught.append(next(batches).y)
    assert not torch.equal(*taught)


def test_sites_take_no_larger_batches_than_the_job(tiny: Any) -> None:
    """q counts draws: a site with larger ones would have more say."""
    context, task = bench_of(tiny, METHOD)
    large, _ = train_round(METHOD, replace(context, batch_size=64), task, CTX)
    most = METHOD.local.iterations * METHOD.local.batch_size  # type: ignore[operator]
    assert float(large.class_weights.max()) <= most
    assert METHOD.egress(Layout({}, {})).class_weight == (0.0, most)


def test_without_iterations_a_round_is_whole_passes(tiny: Any) -> None:
    local = LocalTraining(lr=1e-2, epochs=3, batch_size=8)
    method = replace(METHOD, local=local, teaching=replace(METHOD.teaching, start_round=2))
    context, task = bench_of(tiny, method)
    _, optimiser_state = train_round(method, context, task, CTX)
    assert float(optimiser_state["head.bias/step"]) == 6  # three passes over 15 images in batches of 8


@pytest.mark.complete
def test_a_warm_up_may_draw_more_than_a_round(tiny: Any) -> None:
    local = replace(METHOD.local, iterations=1, warmup_epochs=3)
    server = tiny(replace(METHOD, local=local), rounds=2).run()
    assert server.round == 2


# Entropy, pseudo-labels and losses by hand

MULTI, SINGLE = KINDS["multilabel"], KINDS["multiclass"]
LIMITS = Thresholds(positive=0.85, negative=0.005, best=0.95)
T, F = True, False


def test_entropy_by_hand() -> None:
    """Of several labels that of the unknown ones, or of all where none is; the program's lacks a term."""
    p, known = torch.tensor([[0.9, 0.5, 0.25], [0.5, 0.1, 0.0]]), torch.tensor([[T, F, F]] * 2)
    bits = [-(v * math.log2(v) + (1 - v) * math.log2(1 - v)) for v in (0.25, 0.1)]
    paper = MULTI.entropy(p, known, "paper").tolist()
    assert paper == pytest.approx([(1 + bits[0]) / 2, bits[1] / 2])
    assert MULTI.entropy(p[:1, 1:2], torch.tensor([[T]]), "paper").item() == pytest.approx(1)
    program = MULTI.entropy(p, known, "program")[0].item()
    assert program == pytest.approx(-(0.5 * math.log(0.5) + 0.25 * math.log(0.25)) / 3)
    p = torch.tensor([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]])
    assert SINGLE.entropy(p, known, "paper").tolist() == pytest.approx([1.5 * math.log(2), 0])


def test_pseudo_labels_of_several_labels() -> None:
    p = torch.tensor([[0.99, 0.85, 0.005, 0.5]])
    targets = MULTI.targets(p, torch.zeros(1, 4), torch.tensor([[T, F, F, F]]), LIMITS, "paper")
    assert targets.sure.tolist() == [[T, T, T, F]]
    assert targets.made.tolist() == [[F, T, T, F]]
    assert targets.y[0, :3].tolist() == [0, 1, 0]  # the label goes before what the teacher thinks
    assert targets.positives().tolist() == [[F, T, F, F]]


def test_pseudo_labels_of_a_single_label() -> None:
    """Labelled; unlabelled and sure; unlabelled and unsure; sure of a class that it is known not to be."""
    p = torch.tensor([[0.0, 0.97, 0.03], [0.01, 0.96, 0.03], [0.1, 0.5, 0.4], [0.96, 0.02, 0.02]])
    y = torch.tensor([[1.0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]])
    known = torch.tensor([[T, F, F]] * 4)
    targets = SINGLE.targets(p, y, known, LIMITS, "paper")
    assert targets.sure[:, 0].tolist() == [T, T, F, F]
    assert targets.made[:, 0].tolist() == [F, T, F, F]
    assert targets.y[:2].tolist() == [[1, 0, 0], [0, 1, 0]]
    program = SINGLE.targets(p, y, known, LIMITS, "program")
    assert program.made[:, 0].tolist() == [F, T, F, T]
    assert program.y[3].tolist() == [1, 0, 0]


def test_what_the_program_does_with_mixtures() -> None:
    p, known = torch.tensor([[0.5, 0.99, 0.6]]), torch.tensor([[T, F, F]])
    several = MULTI.targets(p, torch.ones(1, 3), known, LIMITS, "program", mixing=True)
    assert several.sure.tolist() == [[F, T, F]]
    assert several.y[0, 0] == 1
    p, y = torch.tensor([[0.0, 1.0, 0.0]] * 2), torch.tensor([[1.0, 0, 0], [0, 0, 0]])
    single = SINGLE.targets(p, y, torch.tensor([[T, F, F]] * 2), LIMITS, "program", mixing=True)
    assert single.sure[:, 0].tolist() == [T, F]


def test_a_mixture_is_taught_what_both_images_are() -> None:
    one = Targets(torch.tensor([[1.0, 0.0]]), torch.tensor([[T, T]]), torch.tensor([[F, F]]))
    other = Targets(torch.tensor([[0.0, 1.0]]), torch.tensor([[T, F]]), torch.tensor([[T, F]]))
    mixed = mix(one, other, 0.75)
    assert mixed.y.tolist() == [[0.75, 0.25]]
    assert mixed.sure.tolist() == [[T, F]]


def test_loss_of_several_labels_by_hand() -> None:
    """Two images, two classes: a positive of weight 3, a negative, a pseudo-positive, an unsure entry."""
    targets = Targets(
        torch.tensor([[1.0, 0.0], [0.3, 1.0]]), torch.tensor([[T, T], [F, T]]), torch.tensor([[F, F], [F, T]])
    )
    losses = MULTI.losses(torch.zeros(2, 2), targets.y, torch.tensor([3.0, 1.0]))
    total = torch.sum(losses * MULTI.weights(targets))
    assert float(total) == pytest.approx((3 + 1 + 1) * math.log(2) / 4)


def test_loss_of_a_single_label_by_hand() -> None:
    """Two labelled, one pseudo-labelled and two unsure images, of three classes all alike to the student."""
    targets = Targets(
        torch.eye(3)[[0, 1, 2, 0, 0]],
        torch.tensor([[x] * 3 for x in (T, T, T, F, F)]),
        torch.tensor([[x] * 3 for x in (F, F, T, F, F)]),
    )
    losses = SINGLE.losses(torch.zeros(5, 3), targets.y, None)
    total = torch.sum(losses * SINGLE.weights(targets))
    assert float(total) == pytest.approx((2 / 2 + 1 / 3) * math.log(3))


@given(st.integers(0, 10**6))
def test_entropy_lies_where_it_should(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    known = torch.rand(5, 6, generator=g).lt(0.5)
    p = torch.rand(5, 6, generator=g)
    several = MULTI.entropy(p, known, "paper")
    assert bool(((several >= 0) & (several <= 1 + 1e-6)).all())
    single = SINGLE.entropy(p / p.sum(dim=1, keepdim=True), known, "paper")
    assert bool(((single >= 0) & (single <= math.log(6) + 1e-6)).all())


PRINTED: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "nih": (
        NIH,
        {
            "Consolidation": "AH",
            "Pneumonia": "B",
            "Pleural Effusion": "D",
            "Emphysema": "E",
            "Edema": "A",
            "Atelectasis": "D",
            "Nodule": "EF",
            "Mass": "C",
            "Pleural Thickening": "CF",
            "Cardiomegaly": "DG",
            "Fibrosis": "BF",
            "Hernia": "BGH",
            "Pneumothorax": "AE",
            "Infiltration": "CGH",
        },
    ),
    "isic": (
        ISIC,
        {
            "Melanoma": "C",
            "Melanocytic Nevus": "AB",
            "Basal Cell Carcinoma": "BCDE",
            "Actinic Keratosis or Intraepithelial Carcinoma": "DE",
            "Benign Keratosis": "AE",
            "Dermatofibroma": "BCD",
            "Vascular Lesion": "A",
        },
    ),
}
"""The clients that identify each class (supplement, Tables 5 and 6)."""


@pytest.mark.parametrize("data", PRINTED)
def test_the_sites_identify_the_classes_that_the_paper_prints_counts_of(data: str) -> None:
    labels, printed = PRINTED[data]
    lists = class_lists("round_robin", labels, len({*"".join(printed.values())}))
    assert printed == {
        c: "".join(k for k, own in zip("ABCDEFGH", lists, strict=False) if c in own) for c in labels
    }
