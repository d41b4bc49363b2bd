"""AFL: by hand, equal to the pooled ridge regression, and what a site does not send."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from one_step import context_with
from rounds import context_of, train_round
from suture.core.errors import ConfigError, RejectedUpdate
from suture.core.labels import LabelType
from suture.data.batch import Samples
from suture.learning.training import SiteContext, ready_inputs
from suture.methods.base import GlobalModel, Phase, RoundContext
from suture.protocol.check import check_reply
from suture.protocol.messages import Update
from suture.protocol.packing import unpack
from suture_papers.closed_form.afl import AFL, GRAM, MOMENTS, SETS, ridge_rows, sums_of, told_classes
from suture_synthetic.method_checks import SMALL
from suture_synthetic.trial import SITES, Trial
from world import refused

FIRST = RoundContext(1, Phase("main", 1), 1)


class Model:
    """A model whose features are its inputs."""

    def __init__(self, labels: Sequence[str], width: int) -> None:
        self.labels = type("Labels", (), {"names": tuple(labels)})()
        self.head = torch.nn.Linear(width, len(labels))

    def features(self, inputs: dict[str, Tensor]) -> Tensor:
        return inputs["x"]

    def eval(self) -> None: ...


def at_site(x: Tensor, y: Tensor, labels: Sequence[str], **more: Any) -> SiteContext:
    """A site with features ``[n, d]`` and labels ``[n, c]``, NaN where unknown."""
    samples = Samples({"x": x}, y, tuple(map(str, range(len(x)))))
    return context_with(Model(labels, x.shape[1]), samples, batch_size=4, **more)


def sent(x: Tensor, y: Tensor, labels: Sequence[str], **more: Any) -> Update:
    site = at_site(x, y, labels, **more)
    told = told_classes(site)
    return Update(1, tuple(labels), {}, {}, told.double(), channels=sums_of(site, told))


def model_of(labels: Sequence[str], width: int) -> GlobalModel:
    rows = torch.full((len(labels), width + 1), 9.0)
    head = {"head.weight": rows[:, 1:].contiguous(), "head.bias": rows[:, 0].contiguous()}
    return GlobalModel(tuple(labels), {}, head)


def pooled(x: Tensor, y: Tensor, ridge: float) -> Tensor:
    """The ridge regression of one class with an intercept, by least squares on an augmented matrix."""
    known = ~torch.isnan(y)
    a = F.pad(x[known].double(), (0, 1), value=1.0)
    penalty = (ridge * len(a)) ** 0.5 * torch.eye(a.shape[1], dtype=torch.float64)[:-1]
    full, target = torch.cat([a, penalty]), torch.cat([y[known].double(), torch.zeros(a.shape[1] - 1)])
    return torch.linalg.lstsq(full, target.double(), driver="gelsd").solution


def test_two_images_by_hand() -> None:
    """x = 0 and 2, y = 0 and 1, ridge 1 an image: centred, w = (1/2 + 1/2) / (2 + 2) = 1/4, b = 1/4."""
    update = sent(torch.tensor([[0.0], [2.0]]), torch.tensor([[0.0], [1.0]]), ["Mass"])
    assert update.channels[GRAM].tolist() == [[4.0, 2.0, 2.0]]
    assert update.channels[SETS].tolist() == [[1]]
    assert update.channels[MOMENTS].tolist() == [[2.0, 1.0]]
    rows = ridge_rows(update.channels[GRAM][0], update.channels[MOMENTS], 1.0)
    assert rows.tolist() == [pytest.approx([0.25, 0.25])]
    model = AFL(ridge=1.0).aggregate(model_of(["Mass"], 1), [update], FIRST)
    assert model.head["head.weight"].tolist() == [pytest.approx([1.0])]
    assert model.head["head.bias"].tolist() == pytest.approx([-1.0])  # 4 / 4 - 2


@given(seed=st.integers(0, 2**31), sites=st.integers(1, 4), ridge=st.sampled_from([1e-3, 0.1, 10.0]))
def test_it_is_the_ridge_regression_of_all_images_in_one_place(seed: int, sites: int, ridge: float) -> None:
    g = torch.Generator().manual_seed(seed)
    labels, width, n = ["A", "B", "C", "D"], 6, 40
    x = torch.randn(n, width, generator=g) * 3 + 1
    y = torch.randint(0, 2, (n, 4), generator=g).float()
    y[torch.rand(n, 4, generator=g) < 0.3] = float("nan")
    y[: n // 2, :2] = torch.nan_to_num(y[: n // 2, :2])  # two classes with the same images at some sites
    updates = []
    for part in torch.randperm(n, generator=g).tensor_split(sites):
        own = sorted(torch.randperm(4, generator=g)[:3].tolist())
        hidden = [c for c in range(4) if c not in own]
        y[part[:, None], hidden] = float("nan")
        updates.append(sent(x[part], y[part][:, own], [labels[c] for c in own]))
    one = AFL(ridge=ridge).aggregate(model_of(labels, width), updates, FIRST)
    other = AFL(ridge=ridge).aggregate(model_of(labels, width), updates[::-1], FIRST)
    for c in range(4):
        if torch.isnan(y[:, c]).all():
            assert one.head["head.weight"][c].tolist() == [9.0] * width
            continue
        row = 4 * pooled(x, y[:, c], ridge)
        assert torch.allclose(one.head["head.weight"][c].double(), row[:-1], 1e-6, 1e-6)
        assert torch.allclose(one.head["head.bias"][c].double(), row[-1] - 2, 1e-6, 1e-6)
        assert torch.allclose(one.head["head.weight"][c], other.head["head.weight"][c], 1e-6, 1e-7)


def test_the_solution_is_exact_to_1e_8() -> None:
    g = torch.Generator().manual_seed(3)
    x, y = torch.randn(200, 20, generator=g), torch.randint(0, 2, (200, 1), generator=g).float()
    parts = [sent(x[rows], y[rows], ["A"]).channels for rows in torch.arange(200).tensor_split(5)]
    gram, moments = (sum(part[name] for part in parts) for name in (GRAM, MOMENTS))
    assert isinstance(gram, Tensor)
    assert isinstance(moments, Tensor)
    assert (ridge_rows(gram[0], moments, 1.0)[0] - pooled(x, y[:, 0], 1.0)).abs().max() < 1e-8


def test_classes_that_are_known_of_the_same_images_share_a_matrix() -> None:
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(12, 3, generator=g), torch.randint(0, 2, (12, 3), generator=g).float()
    assert sent(x, y, ["A", "B", "C"]).channels[GRAM].shape == (1, 10)
    y[0, 1] = float("nan")
    channels = sent(x, y, ["A", "B", "C"]).channels
    assert channels[GRAM].shape == (2, 10)
    assert sorted(channels[SETS].tolist()) == [[0, 1, 0], [1, 0, 1]]


def cases(*columns: tuple[int, int, int]) -> Tensor:
    """Labels of classes, each with so many images without it, with it, and unknown."""
    made = [torch.cat([torch.zeros(a), torch.ones(b), torch.full((c,), float("nan"))]) for a, b, c in columns]
    return torch.stack(made, dim=1)


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        (((10, 10, 0), (15, 5, 0), (16, 4, 0), (3, 17, 0)), [1, 1, 0, 0]),  # too few with it, or without it
        (((10, 10, 0), (10, 9, 1), (10, 6, 4), (10, 5, 5)), [1, 0, 0, 1]),  # too near to the first
        (((5, 15, 0), (5, 10, 5), (5, 9, 6), (5, 5, 10)), [1, 1, 0, 1]),
        (((2, 4, 14), (0, 6, 14), (10, 10, 0), (10, 10, 0)), [0, 0, 1, 1]),  # no more images than features
    ],
)
def test_what_a_site_with_a_smallest_count_sends(columns: Any, told: list[int]) -> None:
    y, g = cases(*columns), torch.Generator().manual_seed(1)
    x, labels = torch.randn(20, 6, generator=g), ["A", "B", "C", "D"]
    update = sent(x, y, labels, min_count=5)
    assert update.class_weights.tolist() == told
    assert update.channels[SETS].sum(dim=0).tolist() == told
    assert update.channels[MOMENTS].any(dim=1).tolist() == list(map(bool, told))
    everything = sent(x, y, labels)
    assert everything.class_weights.tolist() == [1, 1, 1, 1]


def test_the_order_of_classes_does_not_matter_for_what_is_kept_apart() -> None:
    y, labels = cases((10, 9, 1), (10, 10, 0), (9, 10, 1)), ["A", "B", "C"]
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(1))
    one, other = sent(x, y, labels, min_count=5), sent(x, y.flip(1), labels[::-1], min_count=5)
    assert one.class_weights.tolist() == other.class_weights.flip(0).tolist() == [0, 1, 0]
    assert torch.equal(one.channels[GRAM], other.channels[GRAM])


def test_a_site_says_why_it_sends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    sent(torch.randn(20, 30), cases((10, 10, 0)), ["Mass"], min_count=5)
    assert "'alpha'" in caplog.text
    assert "Mass" in caplog.text


def test_a_site_of_which_nothing_may_leave_sends_zeros() -> None:
    update = sent(torch.randn(4, 2), cases((2, 2, 0)), ["Mass"], min_count=5)
    assert {n: (tuple(t.shape), bool(t.any())) for n, t in update.channels.items()} == {
        GRAM: ((1, 6), False),
        SETS: ((1, 1), False),
        MOMENTS: ((1, 3), False),
    }
    model = AFL().aggregate(model_of(["Mass"], 2), [update], FIRST)
    assert model.head["head.bias"].tolist() == [9.0]


def test_rounded_counts_are_refused() -> None:
    with Trial(AFL(), SMALL, "multilabel") as trial:
        payload = trial.payload("alpha")
        site = replace(context_of(trial.sites["alpha"], payload), round_counts=5)
        with refused("alpha", "round_counts", by=ConfigError):
            train_round(AFL(), site, payload, FIRST)


def test_sums_of_no_features_end_the_round() -> None:
    update = sent(torch.ones(2, 1), cases((1, 1, 0)), ["Mass"])
    update.channels[GRAM][0, 0] = -500.0
    with refused("Gram", by=ArithmeticError):
        AFL().aggregate(model_of(["Mass"], 1), [update], FIRST)


@given(
    seed=st.integers(0, 2**31), size=st.sampled_from([1e-3, 1.0, 1e3]), ridge=st.sampled_from([1e-3, 30.0])
)
def test_sums_of_images_are_never_refused(seed: int, size: float, ridge: float) -> None:
    """Whatever their features, also with fewer images than features."""
    g = torch.Generator().manual_seed(seed)
    n = int(torch.randint(1, 20, (), generator=g))
    y = torch.randint(0, 2, (n, 3), generator=g).float()
    y[torch.rand(n, 3, generator=g) < 0.2] = float("nan")
    x = size * torch.randn(n, 8, generator=g).round(decimals=1)
    AFL(ridge=ridge).check(sent(x, y, ["A", "B", "C"]))


LIES: dict[str, tuple[str, Callable[[Any, Any, Any, Tensor], Any]]] = {
    "negative squares": ("Hernia, Nodule", lambda gram, _s, _m, _w: gram[0, 0].fill_(-1e9)),
    "of no image": ("Gram", lambda gram, _s, _m, _w: gram[0, -1].fill_(0)),
    "products beyond what squares permit": ("Gram", lambda gram, _s, _m, _w: gram[0, 1].fill_(1e8)),
    "a class in two sets": ("two sets", lambda _g, sets, _m, _w: sets.fill_(1)),
    "a class in no set": ("in none", lambda _g, sets, _m, w: (sets[:, 0].fill_(0), w[0].fill_(0))),
    "a class that does not count": ("class", lambda _g, _s, _m, w: w[0].fill_(0)),
    "a class that counts by half": ("class", lambda _g, _s, _m, w: w[0].fill_(0.5)),
    "moments beyond squares": ("Hernia, Nodule", lambda _g, _s, moments, _w: moments[1, 0].fill_(1e9)),
    "more positives than images": ("Gram", lambda _g, _s, moments, _w: moments[1].mul_(-1)),
}
"""What the refusal names, and what is changed of Gram matrices, sets of classes, moments and weights."""


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_costs_the_liar_alone(lie: str) -> None:
    """Unchecked, it would end the run of all sites, or change rows beyond what any images can."""
    named, tell = LIES[lie]
    with Trial(AFL(), SMALL, "multilabel") as trial:
        answer = trial.answer("beta")
        update = unpack(answer.packed)
        assert isinstance(update, Update)
        assert answer.allowed
        check_reply(update, answer.allowed)
        channels, weights = {n: t.clone() for n, t in update.channels.items()}, update.class_weights.clone()
        if lie == "a class in two sets":
            channels |= {name: torch.cat([channels[name]] * 2) for name in (GRAM, SETS)}
        tell(channels[GRAM], channels[SETS], channels[MOMENTS], weights)
        with refused(named, by=RejectedUpdate):
            check_reply(replace(update, channels=channels, class_weights=weights), answer.allowed)


@pytest.mark.parametrize("label_type", ["multilabel", "multiclass"])
def test_a_federation_has_the_head_of_its_pooled_images(label_type: LabelType) -> None:
    with Trial(AFL(), SMALL, label_type) as trial, Trial(AFL(), SMALL, label_type) as begun:
        trial.run()
        model, rows = trial.server.model, dict[str, list[tuple[Tensor, Tensor]]]()
        for site in SITES:
            context = context_of(begun.sites[site], begun.payload(site))
            x = torch.cat(list(read(context)))
            for name, column in zip(context.model.labels.names, context.samples["train"].y.T, strict=True):
                rows.setdefault(name, []).append((x, column))
        for c, name in enumerate(model.labels):
            x, y = (torch.cat(of) for of in zip(*rows[name], strict=True))
            expected = 4 * pooled(x, y, 30.0)
            assert torch.allclose(model.head["head.weight"][c].double(), expected[:-1], 1e-5, 1e-5)
            assert model.head["head.bias"][c].item() == pytest.approx(expected[-1].item() - 2, abs=1e-4)
        assert all(line["bytes_up"] > 0 for line in trial.history())


@torch.no_grad()
def read(context: SiteContext) -> Iterator[Tensor]:
    context.model.eval()
    for batch in context.samples["train"].batches(5):
        yield context.model.features(ready_inputs(context, batch).inputs)
