"""The weighted mean and FedAvg: the papers' numbers, what must hold for any update, and what counts."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch.testing import assert_close

from hypothesis_profiles import examples
from rounds import context_of, train_round
from suture.core.errors import ConfigError
from suture.core.labels import LabelSet
from suture.data.batch import Samples, columns
from suture.federation.server.global_model import initial
from suture.learning.samples import pool
from suture.learning.steps import balanced_ce, weighted_bce
from suture.learning.training import LocalTraining, SiteContext
from suture.methods import METHODS, averaging
from suture.methods.averaging import WeightedMean
from suture.methods.base import (
    ClassFacts,
    GlobalModel,
    LabelStatistics,
    Phase,
    RoundContext,
)
from suture.methods.class_weights import NAME, class_weights, received_weights
from suture.methods.fedavg import FedAvg
from suture.methods.partial import PartialLoss
from suture.models.classifier import Layout
from suture.protocol.messages import Labels, TaskData, Update, ones
from world import refused

C = ("A", "B", "C")
FIRST = RoundContext(1, Phase("main", 1), 0)


def update(labels: tuple[str, ...], kernel: list[list[float]], bias: list[float], shared: float) -> Update:
    """An update whose head is a paper's kernel (inputs x classes) turned into rows."""
    head = {"weight": torch.tensor(kernel).T.contiguous(), "bias": torch.tensor(bias)}
    return Update(1, labels, {"w": torch.tensor([shared])}, head, ones(labels))


def start() -> WeightedMean:
    head = {"weight": torch.full((3, 3), 7.0), "bias": torch.full((3,), 7.0)}
    return WeightedMean(C, {"w": torch.tensor([0.0])}, head)


ONE = update(("A", "B"), [[1, 2], [3, 4], [0, 1]], [0.1, 0.2], 10)
TWO = update(("B", "C"), [[5, 6], [7, 8], [2, 3]], [0.4, 0.8], 30)


def test_surgical_example_of_two_clients() -> None:
    mean = start()
    mean.add(ONE)
    mean.add(TWO)
    expected = torch.tensor([[1, 3.5, 6], [3, 5.5, 8], [0, 1.5, 3]])
    torch.testing.assert_close(mean.head()["weight"].T, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(mean.head()["bias"], torch.tensor([0.1, 0.3, 0.8]), rtol=0, atol=1e-6)
    assert mean.shared()["w"].item() == 20.0  # 1/K, whatever the sites' sizes


def test_with_partial_loss_the_sites_that_do_not_know_a_class_return_its_row_as_it_was() -> None:
    previous = GlobalModel(
        C, {"w": torch.tensor([0.0])}, {k: torch.full_like(v, 7) for k, v in start().head().items()}
    )
    after = PartialLoss().aggregate(previous, [ONE, TWO, replace(TWO, labels=("A", "C"))], FIRST)
    a, b, c = after.head["bias"].tolist()  # A: .1, .4 and 7; B: .2, .4 and 7; C: .8, .8 and 7
    assert [round(x, 5) for x in (a, b, c)] == [2.5, 2.53333, 2.86667]


def test_class_weights_decide_row_by_row() -> None:
    """FedLSM's proxies: q1=[30,10,0], q2=[10,30,40]."""
    head1 = {"weight": torch.tensor([[1.0, 0], [2, 2], [9, 9]])}
    head2 = {"weight": torch.tensor([[5.0, 4], [6, 6], [3, 1]])}
    mean = WeightedMean(C, {}, {"weight": torch.zeros(3, 2)})
    mean.add(Update(1, C, {}, head1, torch.tensor([30.0, 10, 0], dtype=torch.float64)))
    mean.add(Update(1, C, {}, head2, torch.tensor([10.0, 30, 40], dtype=torch.float64)))
    assert mean.head()["weight"].tolist() == [[2, 1], [5, 5], [3, 1]]
    # A class that nobody sent keeps its row, and where nothing was sent all stays.
    mean = start()
    assert mean.shared()["w"].item() == 0.0
    mean.add(ONE)
    assert mean.head()["weight"][2].tolist() == [7.0, 7.0, 7.0]


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=8))
def test_single_owner_row_is_unchanged_bit_by_bit(values: list[float]) -> None:
    row = torch.tensor([values])
    mean = WeightedMean(("A", "B"), {}, {"weight": torch.zeros(2, len(values))})
    mean.add(Update(1, ("B",), {}, {"weight": row}, ones(("B",))))
    mean.add(Update(1, ("A",), {}, {"weight": row * 2}, ones(("A",))))
    assert torch.equal(mean.head()["weight"][1], row[0])


@given(
    st.lists(st.floats(0, 100, width=32), min_size=1, max_size=7),
    st.integers(0, 300),
    st.integers(1, 9),
    st.integers(0, 2**31),
)
def test_how_many_updates_wait_to_be_added_together_changes_no_bit(
    weights: list[float], waiting: int, read_after: int, seed: int
) -> None:
    """Nor does a mean that was read before the last of them came, or twice."""
    generator = torch.Generator().manual_seed(seed)
    previous = {"w": torch.randn(3, 5, generator=generator), "none": torch.zeros(0), "one": torch.zeros(())}
    sent = [{k: torch.randn(t.shape, generator=generator) for k, t in previous.items()} for _ in weights]
    sums = {k: torch.zeros(t.shape, dtype=torch.float64) for k, t in previous.items()}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(averaging, "_WAITING", waiting)
        patched.setattr(averaging, "_BLOCK", 8)
        mean = WeightedMean((), previous, {})
        for number, (weight, shared) in enumerate(zip(weights, sent, strict=True), 1):
            mean.add(Update(1, (), shared, {}, ones(()), weight=weight))
            for name, total in sums.items():
                for block, part in zip(total.view(-1).split(8), shared[name].view(-1).split(8), strict=True):
                    block.add_(part.double(), alpha=weight)
            if number == read_after:
                mean.shared()
        found = [mean.shared() for _ in range(2)]
    total_weight = sum(weights)
    for name, total in sums.items():
        expected = (total / total_weight).float() if total_weight > 0 else previous[name]
        assert all(torch.equal(one[name], expected) for one in found)


# Means of groups of sites, with their weights for each class, have the mean of all sites as their mean

CLASSES: Labels = ("Edema", "Hernia", "Mass", "Nodule", "Pneumonia")
WIDTH = 3
WEIGHTS = st.sampled_from([0.0, 0.0, 0.25, 1.0, 3.0, 1e6])


@st.composite
def updates(draw: st.DrawFn) -> Update:
    """A site that sends the rows of some classes, each with a weight of its own, perhaps 0 (no owner)."""
    labels = tuple(draw(st.lists(st.sampled_from(CLASSES), unique=True)))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scale = draw(st.sampled_from([1e-6, 1.0, 1e6]))
    rows = scale * torch.randn(len(labels), WIDTH, generator=g, dtype=torch.float64)
    weights = torch.tensor(draw(st.lists(WEIGHTS, min_size=len(labels), max_size=len(labels)))).double()
    shared = {"w": scale * torch.randn(WIDTH, generator=g, dtype=torch.float64)}
    return Update(1, labels, shared, {"head": rows}, weights, draw(WEIGHTS))


def mean_of(sites: Sequence[Update]) -> WeightedMean:
    head = {"head": torch.full((len(CLASSES), WIDTH), 9.0, dtype=torch.float64)}
    mean = WeightedMean(CLASSES, {"w": torch.full((WIDTH,), 7.0, dtype=torch.float64)}, head)
    for one in sites:
        mean.add(one)
    return mean


def merged(sites: Sequence[Update]) -> Update:
    """The mean of a group, and the sums of its weights; of no class that no site of it has."""
    mean, held = mean_of(sites), {name for one in sites for name in one.labels}
    where = [i for i, name in enumerate(CLASSES) if name in held]
    head = {"head": mean.head()["head"][where]}
    labels = tuple(CLASSES[i] for i in where)
    return Update(1, labels, mean.shared(), head, mean.class_weights[where], mean.weight)


@pytest.mark.complete
@examples(300)
@given(st.lists(st.lists(updates(), min_size=1, max_size=4), min_size=1, max_size=4))
def test_a_merge_of_merges_is_the_merge(groups: list[list[Update]]) -> None:
    sites = [one for group in groups for one in group]
    flat, tree = mean_of(sites), mean_of([merged(group) for group in groups])
    assert tree.weight == flat.weight
    assert torch.equal(tree.class_weights, flat.class_weights)
    size = max(
        float(t.abs().max()) for u in sites for t in (*u.shared.values(), *u.head.values()) if t.numel()
    )
    for one, other in ((flat.shared(), tree.shared()), (flat.head(), tree.head())):
        for name, tensor in one.items():
            assert float((tensor - other[name]).abs().max()) <= 1e-12 * max(size, 1.0)


# FedAvg


EVERY = ("Fibrosis", "Hernia", "Mass", "Nodule")
LOCAL = LocalTraining(lr=1e-2, batch_size=64)


@pytest.fixture
def alpha(tiny: Any) -> tuple[SiteContext, TaskData]:
    """A site of two of four classes, and what it has received."""
    site = tiny(FedAvg(local=LOCAL)).sites()["alpha"]
    model = initial(site.plan, EVERY)
    task = TaskData("train", 1, 0, labels=EVERY, shared=dict(model.shared), head=dict(model.head))
    task = replace(task, channels={"positive_weight": torch.ones(4)})
    return context_of(site, task), task


def test_sites_count_with_their_images() -> None:
    """(1 x 3 + 99 x 5) / 100 = 4.98."""
    before = GlobalModel(("A",), {"w": torch.zeros(1)}, {"head.bias": torch.zeros(1)})
    updates = [
        Update(1, ("A",), {"w": x.clone()}, {"head.bias": x}, torch.tensor([n]).double(), n)
        for x, n in ((torch.tensor([3.0]), 1.0), (torch.tensor([5.0]), 99.0))
    ]
    after = FedAvg().aggregate(before, updates, FIRST)
    assert after.shared["w"].item() == pytest.approx(4.98)
    assert after.head["head.bias"].item() == pytest.approx(4.98)


def test_rows_of_all_or_of_their_owners(alpha: tuple[SiteContext, TaskData]) -> None:
    every, _ = train_round(FedAvg(local=LOCAL), *alpha, FIRST)
    owners, _ = train_round(FedAvg(local=LOCAL, rows="owners"), *alpha, FIRST)
    assert every.weight == owners.weight == 15
    assert every.class_weights.tolist() == [15] * 4
    assert owners.class_weights.tolist() == [0, 0, 15, 15]


def test_class_weights_reach_the_loss(alpha: tuple[SiteContext, TaskData]) -> None:
    """One step on the whole of the data."""
    context, task = alpha
    heavy = replace(task, channels={"positive_weight": torch.full((4,), 50.0)})
    there = replace(context, model=copy.deepcopy(context.model))
    losses = [
        train_round(FedAvg(local=LOCAL), c, t, FIRST)[0].train_loss
        for c, t in ((context, task), (there, heavy))
    ]
    assert (losses[1] or 0) > 5 * (losses[0] or 0) > 0


def test_balanced_softmax_takes_the_sites_own_counts(alpha: tuple[SiteContext, TaskData]) -> None:
    context, task = alpha
    context.model.labels = LabelSet(EVERY, "multiclass")
    train = context.samples["train"]
    y = torch.eye(4)[torch.tensor([0] * 12 + [1] * 3)]
    one = replace(context, samples={"train": replace(train, y=y)}, model=copy.deepcopy(context.model))
    with torch.no_grad():
        logits = context.model.train()({"image": context.prepare(train.inputs["image"])})
    expected = balanced_ce(logits, y, torch.ones(15, 4, dtype=torch.bool), torch.tensor([12.0, 3, 0, 0]))
    done, _ = train_round(FedAvg(local=LOCAL, softmax="balanced"), one, task, FIRST)
    assert done.train_loss == pytest.approx(float(expected), rel=1e-5)


# Class weights


CENSUS = LabelStatistics(
    ("Edema", "Hernia", "Mass"),
    {"a": 100, "b": 60},
    {"a": {"Edema": (20, 80), "Mass": None}, "b": {"Edema": (10, 50), "Hernia": (0, 60)}},
)


def weights_of(counts: dict[str, Any], rule: Any, images: Any = None) -> list[float]:
    images = images or {"a": 100, "b": 60, "c": 30}
    labels = tuple(sorted({name for own in counts.values() for name in own}))
    found = class_weights(LabelStatistics(labels, images, counts), rule).tensors[NAME]
    return [round(value, 4) for value in found.tolist()]


def test_class_weights_by_hand() -> None:
    assert weights_of(CENSUS.counts, "known") == [round(130 / 30, 4), 1, 1]
    # The program takes a site that does not know a class as negative, but not one that withholds the count.
    counts = {"a": {"Edema": (20, 80)}, "b": {"Mass": (6, 54)}}
    assert weights_of(counts, "program", {"a": 100, "b": 60}) == [7, round((54 + 100) / 6, 4)]
    withheld = {"a": {"Mass": (20, 80)}, "b": {"Mass": None}, "c": {"Mass": None}}
    assert weights_of(withheld, "program") == [4]
    hernia, mass = class_weights(CENSUS, "known").notes
    assert hernia.startswith("Hernia ")
    assert mass.startswith("Mass ")
    assert mass.endswith(" a.")  # who withholds it
    assert class_weights(CENSUS, "none").tensors == {}
    # Nobody counts in a task of one label, which is not the same as counts that are withheld.
    assert class_weights(replace(CENSUS, label_type="multiclass"), "known") == ClassFacts()


def test_weighted_cross_entropy_by_hand() -> None:
    loss = weighted_bce(torch.zeros(1, 2), torch.tensor([[1.0, 0.0]]), torch.tensor([3.0, 5.0]))
    assert loss.tolist() == [pytest.approx([3 * math.log(2), math.log(2)])]


OF_REFERENCES = ("surgical", "partial", "vanilla", "individual", "central", "central_full")


@pytest.mark.parametrize("rule", ["known", "program"])
@pytest.mark.parametrize("name", ["fedavg", "fedlsm", *OF_REFERENCES])
def test_counts_are_asked_for_where_there_are_weights(name: str, rule: str) -> None:
    kind: Any = METHODS[name]
    if rule == "program" and name in OF_REFERENCES:
        with pytest.raises(ValidationError, match="class_weights"):
            kind(class_weights=rule)
        return
    for chosen, tasks in ((rule, ("multilabel",)), ("none", ())):
        egress = kind(class_weights=chosen).egress(Layout({}, {}))
        assert egress.counts == tasks
        assert ("counts" in egress.why) == bool(tasks)


def test_weights_that_were_asked_for_and_not_told_stop_the_site() -> None:
    weight = torch.tensor([2.0, 1.0])
    told, silent = TaskData("train", 3, channels={NAME: weight}), TaskData("train", 3)
    assert received_weights(told, "known", "multilabel") is weight
    with refused("round 3", "class_weights='known'", by=ConfigError):
        received_weights(silent, "known", "multilabel")
    assert received_weights(silent, "none", "multilabel") is None
    assert received_weights(silent, "known", "multiclass") is None


# What a site does not annotate, and what it does not know of its own classes, are two things


NAN = float("nan")
OWN = LabelSet(("A", "B"))
UNION = LabelSet(("A", "B", "C"))
SITE = Samples({"x": torch.zeros(2, 1)}, torch.tensor([[1.0, NAN], [0.0, 1.0]]), ("p", "q"))
"""The site has not read B in its first image, and annotates no C."""


@pytest.mark.parametrize(
    "name", ["vanilla", "fedavg", "central", "surgical", "partial", "pfl", "individual", "central_full"]
)
def test_missing_is_negative_or_unknown_and_unknown_teaches_nothing(name: str) -> None:
    """Gradients sigma(0) - y over five entries that teach, or three; what nobody has read teaches nothing."""
    method = METHODS[name]()
    part = columns(SITE, OWN, UNION, absent=method.labels.unknown == "negative")
    logits = torch.zeros(part.y.shape, requires_grad=True)
    method.loss(logits, *part.targets(), "multilabel").backward()  # type: ignore[no-untyped-call]
    negative = name in {"vanilla", "fedavg", "central"}
    expected = [[-0.1, 0, 0.1], [0.1, -0.1, 0.1]] if negative else [[-1 / 6, 0, 0], [1 / 6, -1 / 6, 0]]
    assert_close(logits.grad, torch.tensor(expected))
    assert torch.isnan(part.y[:, 2]).all()  # no figure counts them as negatives


def test_pooled_data_remember_who_annotates_what() -> None:
    """Also when they are cut to the model's classes afterwards, in another order."""
    splits = dict.fromkeys(("train", "validation", "test"), SITE)
    blank = Samples({"x": torch.zeros(1, 1)}, torch.tensor([[NAN]]), ("r",))
    other = LabelSet(("C",)), dict.fromkeys(splits, blank)
    labels, samples = pool({"one": (OWN, splits), "two": other}, absent=True)
    part = columns(samples["train"], labels, LabelSet(("C", "B", "A")))
    y, known = part.targets(torch.tensor([2, 0]))
    assert y.tolist() == [[0, 0, 0], [0, 0, 1]]
    assert known.tolist() == [[False, True, True], [True, False, True]]
    assert part.rows(torch.tensor([0])).targets()[1].tolist() == [[True, False, True]]
    none = pool({"one": (OWN, splits), "two": other})[1]["train"]
    assert none.taught is None
