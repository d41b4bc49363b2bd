"""FedLSM: aggregation by hand, subsets, ablations and what a federation records."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from noted import noted
from rounds import context_of, reply_of, train_round
from suture.core.errors import ConfigError
from suture.core.labels import LabelSet
from suture.core.validation import parse
from suture.federation.server.global_model import initial
from suture.federation.site.abstention import LabelViewRefused
from suture.learning.training import LocalRound, LocalTraining, SiteContext, validation_loss
from suture.methods.base import GlobalModel, Phase, RoundContext, loss_of
from suture.models.classifier import Classifier
from suture.protocol.messages import TaskData, Update
from suture.protocol.packing import Packed, digest, pack
from suture_papers.fedlsm.fedlsm import FedLSM
from suture_papers.fedlsm.mean_teacher import MeanTeacher, Teaching, follower, subsets

LABELS = ("A", "B", "C")
CTX = RoundContext(1, Phase("main", 1), 0)
EVERY = ("Fibrosis", "Hernia", "Mass", "Nodule")


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


def test_a_class_that_nobody_counted_keeps_its_row() -> None:
    before = start([[7.0, 7.0]] * 3)
    after = FedLSM().aggregate(before, [update([[1, 0], [2, 2], [9, 9]], [1, 0, 0], 1.0, 1)], CTX)
    assert after.head["head.weight"].tolist() == [[1, 0], [7, 7], [7, 7]]


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


def bench_of(tiny: Any, method: FedLSM, **options: Any) -> tuple[SiteContext, TaskData]:
    """A site of a tiny federation that holds the global model of all four classes."""
    site = tiny(method, **options).sites()["alpha"]
    model = initial(site.plan, EVERY)
    task = TaskData(
        "train",
        1,
        0,
        labels=EVERY,
        shared=dict(model.shared),
        head=dict(model.head),
        channels={"positive_weight": torch.ones(len(EVERY))},
    )
    return context_of(site, task), task


METHOD = FedLSM(
    local=LocalTraining(lr=1e-2, iterations=3, batch_size=8, betas=(0.9, 0.99), weight_decay=5e-4),
    teaching=Teaching(
        start_round=1,
        positive=0.505,
        negative=0.495,
        mixed_positive=0.5,
        mixed_negative=0.5,
        mixed=2,
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
        how = replace(METHOD.teaching, estimation=estimation, confident=4, uncertain=3)
        low, middle, high = subsets(how, context, True, 0, 1)
        assert (len(low), len(high)) == (4, 3)
        assert sorted(torch.cat([low, middle, high]).tolist()) == list(range(len(context.samples["train"])))
    low, middle, high = subsets(METHOD.teaching, context, False, 0, 1)
    assert (len(low), len(high)) == (0, 0)
    assert len(middle) == len(context.samples["train"])


def test_larger_subsets_than_the_site_has_are_refused(tiny: Any) -> None:
    context, _ = bench_of(tiny, METHOD)
    with pytest.raises(ConfigError, match=r"alpha has 15 training images, .*2000 confident and 500"):
        subsets(replace(METHOD.teaching, confident=2000, uncertain=500), context, True, 0, 1)


def test_the_loss_of_the_program_is_a_product_of_means(tiny: Any) -> None:
    """Mean of all entries, the teacher's probability where it is unsure, times the mean masked weight."""
    method = replace(
        METHOD,
        teaching=replace(METHOD.teaching, loss="program", enhancing="none", positive=0.9, negative=0.0),
    )
    context, _ = bench_of(tiny, method)
    weight = torch.tensor([2.0, 1.0, 0.5, 3.0])
    lessons = MeanTeacher(method.teaching, context, replace(ROUND, local=method.local), weight)
    g = torch.Generator().manual_seed(0)
    batch = next(iter(lessons.batches(g, g)))
    s = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    bce = torch.nn.functional.binary_cross_entropy_with_logits(s, batch.y)
    expected = bce * (batch.known * weight).mean()
    assert 0 < batch.known.sum() < 32
    assert float(lessons.loss(s, batch)) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("start", [1, 2])
def test_the_class_weight_on_both_terms_scales_the_loss_of_the_class(start: int, tiny: Any) -> None:
    """w_c (-t ln p - (1 - t) ln(1 - p)) over sure entries, / (8 x 4); before pseudo-labels as well."""
    how = replace(
        METHOD.teaching, loss="both", enhancing="none", positive=0.9, negative=0.0, start_round=start
    )
    context, _ = bench_of(tiny, replace(METHOD, teaching=how))
    weight = torch.tensor([2.0, 1.0, 0.5, 3.0])
    lessons = MeanTeacher(how, context, replace(ROUND, local=METHOD.local), weight)
    g = torch.Generator().manual_seed(0)
    batch = next(iter(lessons.batches(g, g)))
    s = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    p = torch.sigmoid(s)
    each = weight * (-batch.y * p.log() - (1 - batch.y) * (1 - p).log())
    expected = each[batch.known].sum() / 32
    assert 0 < batch.known.sum() < 32
    assert float(lessons.loss(s, batch)) == pytest.approx(float(expected), rel=1e-5)
    paper = MeanTeacher(replace(how, loss="paper"), context, replace(ROUND, local=METHOD.local), weight)
    g.manual_seed(0)
    assert float(paper.loss(s, next(iter(paper.batches(g, g))))) != pytest.approx(float(expected), rel=1e-3)


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


def test_a_site_must_agree_to_see_every_class(tiny: Any) -> None:
    site = tiny(METHOD, view="own").sites()["alpha"]
    answer = reply_of(site, TaskData("handshake"))
    assert answer.reason == "label_view"  # type: ignore[union-attr]
    assert answer.error == LabelViewRefused.__name__  # type: ignore[union-attr]


def test_sites_take_no_larger_batches_than_the_job(tiny: Any) -> None:
    """q counts draws: a site with larger ones would have more say."""
    context, task = bench_of(tiny, METHOD)
    large, _ = train_round(METHOD, replace(context, batch_size=64), task, CTX)
    most = METHOD.local.iterations * METHOD.local.batch_size  # type: ignore[operator]
    assert float(large.class_weights.max()) <= most
    assert METHOD.egress(_layout()).class_weight == (0.0, most)


def _layout() -> Any:
    from suture.models.classifier import Layout

    return Layout({}, {})


@pytest.mark.complete
def test_a_federation_counts_and_says_so(tiny: Any) -> None:
    server = tiny(METHOD, rounds=3).run()
    lines = [json.loads(x) for x in (server.record.folder / "history.jsonl").read_text().splitlines()]
    rows = lines[1]["sites"]["alpha"]["rows"]
    assert set(rows) == set(EVERY)
    assert lines[1]["sites"]["alpha"]["scalars"].keys() == {"pseudo_positive", "pseudo_negative"}
    assert noted(server) == []
    page = (server.record.folder / "report.html").read_text()
    assert "Pseudo-labels" in page


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


def test_batches_of_mixtures_alone_are_refused(tiny: Any) -> None:
    context, _ = bench_of(tiny, METHOD)
    tiny_batches = replace(ROUND, local=replace(METHOD.local, batch_size=2))
    with pytest.raises(ConfigError, match="alpha: batches of 2 have no room for 2 mixtures"):
        MeanTeacher(METHOD.teaching, context, tiny_batches, None)


@pytest.mark.complete
def test_a_warm_up_returns_its_best_epoch(tiny: Any) -> None:
    """At this learning rate the loss jumps about, and the last epoch is not the best."""
    warm_up = Phase("warm-up", 1, "head", 5.0, 3, keep_best=True)
    context, task = bench_of(tiny, METHOD)

    def after(phase: Phase) -> float:
        model = copy.deepcopy(context.model)
        site = replace(context, model=model)
        done, _ = train_round(METHOD, site, task, RoundContext(1, phase, 0))
        loss = validation_loss(site, loss_of(METHOD.loss, "multilabel"))
        assert loss is not None
        torch.testing.assert_close(done.head["head.bias"], model.head.bias.detach())  # it is what is sent
        return loss

    losses = [after(replace(warm_up, epochs=n, keep_best=False)) for n in (1, 2, 3)]
    assert min(losses) < losses[-1]
    assert after(warm_up) == pytest.approx(min(losses))


@pytest.mark.parametrize("value", [1.0, 0.0, -3, 0, True, "0.2", 1.5, float("nan")])
def test_a_subset_is_a_share_or_a_number_of_images(value: Any) -> None:
    for name in ("confident", "uncertain"):
        with pytest.raises(ConfigError, match=f"{name}: .*a share below 1"):
            parse(Teaching, {name: value}, "teaching")


def test_a_share_and_a_number_stay_what_they_are() -> None:
    how = parse(Teaching, {"confident": 0.5, "uncertain": 1}, "teaching")
    assert (how.confident, how.uncertain) == (0.5, 1)
    assert type(how.uncertain) is int
