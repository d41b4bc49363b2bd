"""Fed-MAS by hand, and a site's round against its equations written out."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import suture_papers.fedmas.fedmas as fedmas
from one_step import equal
from rounds import begun, context_of, first_task, precise, train_round
from small_hospitals import EVERY
from suture.core.errors import ConfigError
from suture.core.labels import LabelSet, LabelType
from suture.core.runtime import generator_for
from suture.data.batch import MILD, Augmentation, Preprocessing
from suture.federation.plan import Plan
from suture.learning.steps import balanced_ce
from suture.learning.training import LocalTraining, SiteContext
from suture.methods.base import GlobalModel, Phase, RoundContext
from suture.methods.fedavg import FedAvg
from suture.models import ModelSpec
from suture.models.priors import PriorSpec, freeze
from suture.protocol.messages import TaskData, Update
from suture.protocol.packing import pack
from suture_papers.fedmas.fedmas import Divergence, FedMAS, by_class, distance, rescue_factor
from world import refused

CTX = RoundContext(1, Phase("main", 1), 0)
CNN = ModelSpec("cnn", size=16)


def test_the_distance_is_between_directions() -> None:
    y = torch.tensor([[3.0, 4.0], [1.0, 0.0], [2.0, 0.0], [5.0, 5.0]])
    target = torch.tensor([[4.0, 3.0], [0.0, 7.0], [-9.0, 0.0], [1.0, 1.0]])
    assert distance(y, target).tolist() == pytest.approx([0.08, 2, 4, 0], abs=1e-6)


def test_class_means_run_over_batches() -> None:
    one = by_class(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.eye(2)[[0, 0, 1, 0]])
    two = by_class(torch.tensor([5.0, 1.0]), torch.eye(2)[[0, 1]])
    assert ((one + two) / torch.tensor([4, 2])).tolist() == [3, 2]


def test_rescue_factor_of_paper_and_program() -> None:
    w, v = torch.tensor([3.0, 2.0]), torch.tensor([6.0, 2.0])
    assert rescue_factor(w, v, "paper") == 22
    assert rescue_factor(w, v, "normalised") == pytest.approx(0.55)


def test_balanced_softmax_by_hand() -> None:
    """Logits all alike, counts 3 and 1: the probabilities are 3/4 and 1/4."""
    logits, known = torch.zeros(2, 2), torch.ones(2, 2, dtype=torch.bool)
    loss = balanced_ce(logits, torch.eye(2), known, torch.tensor([3.0, 1.0]))
    assert float(loss) == pytest.approx((math.log(4 / 3) + math.log(4)) / 2)
    absent = balanced_ce(logits[:1], torch.eye(2)[:1], known[:1], torch.tensor([3.0, 0.0]))
    assert float(absent) == pytest.approx(0, abs=1e-6)


def test_every_tensor_is_weighted_by_the_rescue_factor() -> None:
    """RF = 22 and 66: (22 * 1 + 66 * 5) / 88 = 4, of the second head, too."""
    heads = ("head.bias", "second_head.bias")
    before = GlobalModel(("A",), {"w": torch.zeros(1)}, dict.fromkeys(heads, torch.zeros(1)))
    updates = []
    for value, factor in ((1.0, 22.0), (5.0, 66.0)):
        sent, of_class = torch.tensor([value]), torch.tensor([factor]).double()
        updates.append(Update(1, ("A",), {"w": sent}, dict.fromkeys(heads, sent), of_class, factor))
    after = FedMAS().aggregate(before, updates, CTX)
    for tensor in (after.shared["w"], *after.head.values()):
        assert tensor.item() == pytest.approx(4)


class Mean(nn.Module):
    """Features of a prior that can be followed by hand: means of quarters of the image, and one."""

    def forward(self, image: Tensor) -> Tensor:
        means = torch.nn.functional.adaptive_avg_pool2d(image, 2).flatten(1)
        return torch.cat([means, torch.ones(len(image), 1)], dim=1)


METHOD = FedMAS(
    prior=PriorSpec("checkpoint"), local=LocalTraining(lr=1e-2, epochs=2, batch_size=8), distillation=3.0
)
PROGRAM = replace(METHOD, supervision="program")


def bench_of(tiny: Any, method: FedMAS = METHOD) -> tuple[SiteContext, TaskData]:
    """A site whose model projects to the five features of `Mean`."""
    spec = replace(CNN, projection=5, second_head=method.supervision == "program")
    site = tiny(method, model=spec).sites()["alpha"]
    prepare = Preprocessing(16, False, 1, (0.5,), (0.25,))
    site.trainer.__dict__["prior"] = freeze("mean", Mean(), 5, prepare, "means")
    task = first_task(site)
    return context_of(site, task), task


def of_one_class(context: SiteContext) -> SiteContext:
    """The same site where an image has one label: nine images, four, two, and none of the last class."""
    context.model.labels = LabelSet(EVERY, "multiclass")
    y = torch.eye(4)[torch.tensor([0] * 9 + [1] * 4 + [2] * 2)]
    return replace(context, samples={**context.samples, "train": replace(context.samples["train"], y=y)})


def literal_supervised(logits: Tensor, y: Tensor, counts: Tensor | None) -> Tensor:
    """L_sup of one image: binary cross-entropies, or with class counts the balanced softmax; `[c]` each."""
    if counts is None:
        p = torch.sigmoid(logits)
        return -torch.cat([torch.log(p[y == 1]), torch.log(1 - p[y == 0])]).sum() / len(y)
    weighted = (counts / counts.sum() + 1e-12) * torch.exp(logits)  # n_k e^z_k, of the absent class nearly 0
    return -torch.log(weighted[y == 1] / weighted.sum()).sum()


def literal_round(
    site: SiteContext, seed: int, clip: float = math.inf, distillation: float = 3.0
) -> tuple[Any, float]:
    """Two epochs as the paper has them, image by image, with the same order of batches.

    A second head is trained on the projection, and a gradient longer than `clip` is shortened to it.
    """
    train, model = site.samples["train"], copy.deepcopy(site.model)
    assert site.prior is not None
    images, target = site.prepare(train.inputs["image"]), site.prior.features(train.inputs["image"])
    known = [k for k in range(4) if not math.isnan(float(train.y[0, k]))]
    counts = train.y[:, known].sum(dim=0) if model.labels.label_type == "multiclass" else None

    def class_means(values: dict[int, float]) -> list[float]:
        of = [[v for i, v in values.items() if float(train.y[i, k]) == 1] for k in known]
        return [sum(v) / len(v) if v else 0.0 for v in of]

    model.eval()
    with torch.no_grad():
        z = model.features({"image": images})
        y = model.projector(z)
        w = class_means({i: float(distance(y[i : i + 1], target[i : i + 1])) for i in range(len(train))})
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    shuffle = generator_for(seed, site.name, 1, "shuffle")
    v = [0.0] * len(known)
    for _ in range(2):
        model.train()
        order = torch.randperm(len(train), generator=shuffle)
        seen: dict[int, float] = {}
        for rows in (order[:8], order[8:]):
            z = model.features({"image": images[rows]})
            y = model.projector(z)
            heads = [model.head(z)] + ([model.second_head(y)] if model.second_head else [])
            loss = torch.zeros(())
            for place, row in enumerate(rows.tolist()):
                towards = (target[row] / target[row].norm()).double()
                each = 2 - 2 * (y[place] / y[place].norm()) @ towards
                seen[row] = float(each.detach())
                loss = loss + distillation * each / len(rows)
                for logits in heads:
                    own = literal_supervised(logits[place, known], train.y[row, known], counts)
                    loss = loss + own / len(rows)
            adam.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            length = math.sqrt(sum(float((g**2).sum()) for g in gradients))
            for g in gradients:
                g *= min(1.0, clip / length)
            adam.step()
        v = [a + b for a, b in zip(v, class_means(seen), strict=True)]
    return model, sum(a * b for a, b in zip(w, v, strict=True))


SHORT = 13.0
"""A gradient is clipped to this in some steps of the test's two epochs, and not in others."""


@pytest.mark.parametrize("task_of", ["multilabel", "multiclass"])
@pytest.mark.parametrize("method", [METHOD, PROGRAM], ids=["paper", "program"])
def test_a_round_is_that_of_the_equations(
    tiny: Any, method: FedMAS, task_of: LabelType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fedmas, "CLIP", SHORT)
    context, task = bench_of(tiny, method)
    if task_of == "multiclass":
        context = of_one_class(context)
    context = precise(context)
    expected, rescue = literal_round(context, 5, SHORT if method is PROGRAM else math.inf)
    done, _ = train_round(method, context, task, replace(CTX, seed=5))
    assert ("second_head.weight" in done.head) == (method is PROGRAM)
    assert any(name.startswith("projector.") for name in done.shared)
    for name, tensor in {**done.shared, **done.head}.items():
        torch.testing.assert_close(tensor, expected.state_dict()[name], rtol=1e-6, atol=1e-6)
    assert done.weight == pytest.approx(rescue, rel=1e-6)
    assert done.class_weights.tolist() == [done.weight] * 4
    assert not done.scalars


def watched(context: SiteContext, see: Callable[[Tensor], None]) -> SiteContext:
    """The site under augmentation, with a prior that shows its images."""

    class Watching(Mean):
        def forward(self, image: Tensor) -> Tensor:
            see(image)
            return super().forward(image)

    assert context.prior is not None
    return replace(context, prior=replace(context.prior, network=Watching()), augmentation=MILD)


def test_the_prior_sees_each_image_once_where_it_sees_it_plain(tiny: Any) -> None:
    context, task = bench_of(tiny)
    seen: list[int] = []
    context, plain = (
        watched(context, lambda image: seen.append(len(image))),
        replace(METHOD, prior_view="plain"),
    )
    for cache in (context.cache, context.cache, {}):  # the last as in another process
        train_round(plain, replace(context, cache=cache), task, CTX)
        assert sum(seen) == 15
    train_round(METHOD, context, task, CTX)
    assert sum(seen) == 15 + 2 * 15  # the augmented images of two epochs


def test_the_prior_computes_in_the_precision_of_the_model(tiny: Any) -> None:
    """In single precision a large prior would take longer than the model that it guides."""
    context, task = bench_of(tiny)
    kernel, types = torch.ones(1, 1, 2, 2), list[torch.dtype]()
    context = watched(context, lambda image: types.append(torch.conv2d(image, kernel).dtype))
    for half in (None, torch.bfloat16):
        types.clear()
        context.model.compute_in(half)
        train_round(METHOD, context, task, CTX)
        assert set(types[-2:]) == {half or torch.float32}


def test_by_images_it_is_distillation_without_mas(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rescue factor is needed, nor one that is no number refused."""
    monkeypatch.setattr(Divergence, "while_training", lambda _: torch.full((4,), math.nan))
    context, task = bench_of(tiny)
    done, _ = train_round(replace(METHOD, aggregation="images"), context, task, CTX)
    assert done.weight == 15


@pytest.mark.parametrize(
    ("method", "model", "named"),
    [
        (PROGRAM, {"projection": 5}, "model.second_head=true"),
        (METHOD, {"projection": 5, "second_head": True}, "model.second_head=false"),
        (FedMAS(), {"projection": 5}, "model.projection=128"),
    ],
)
def test_a_model_of_other_heads_or_width_is_refused_before_anything_begins(
    method: FedMAS, model: dict[str, Any], named: str
) -> None:
    def planned(method: FedMAS, **model: Any) -> Plan:
        return Plan(method, replace(CNN, **model), Augmentation(), 1, "run", "code")

    with refused(named, by=ConfigError):
        planned(method, **model)
    planned(FedMAS(), projection=128)
    planned(FedMAS())  # how wide the backbone is, a site sees when it builds it
    planned(METHOD, projection=5)  # and how wide a checkpoint is, when it reads it


def test_a_prior_of_another_width_is_refused(tiny: Any) -> None:
    context, task = bench_of(tiny)
    assert context.prior is not None
    with refused("alpha", "model.projection=7", by=ConfigError):
        train_round(METHOD, replace(context, prior=replace(context.prior, width=7)), task, CTX)


# Without one of its parts


def test_without_distillation_it_is_balanced_softmax_with_rescue_factors(tiny: Any) -> None:
    benches = [bench_of(tiny) for _ in range(3)]
    (_, task), (one, two, three) = benches[0], (precise(of_one_class(context)) for context, _ in benches)
    alone, _ = train_round(replace(METHOD, distillation=0.0), one, task, CTX)
    balanced = FedAvg(local=METHOD.local, softmax="balanced", class_weights="none")
    plain, _ = train_round(balanced, two, task, CTX)
    for name, tensor in {**plain.shared, **plain.head}.items():
        if not name.startswith("projector."):
            torch.testing.assert_close(alone.shared.get(name, alone.head.get(name)), tensor)
    for name, tensor in one.model.projector.named_parameters():
        assert torch.equal(tensor, task.shared[f"projector.{name}"])
    assert alone.weight == pytest.approx(literal_round(three, CTX.seed, distillation=0.0)[1], rel=1e-6)


# What it tells of each class: for a simulation's report, and in no update


@pytest.mark.parametrize("projected", [True, False])
def test_the_divergence_of_each_class_is_told_before_training(projected: bool, tiny: Any) -> None:
    """Without a projector the backbone's own features are compared."""
    method = METHOD if projected else FedMAS(local=METHOD.local)
    context, task = bench_of(tiny) if projected else begun(tiny, method)
    train, model = context.samples["train"], context.model.eval()
    assert context.prior is not None
    assert isinstance(model.projector, nn.Identity) != projected
    with torch.no_grad():
        y = model.projector(model.features({"image": context.prepare(train.inputs["image"])}))
        each = distance(y, context.prior.features(train.inputs["image"]))
    told: dict[str, Tensor] = {}
    train_round(method, replace(context, record=told.update), task, CTX)
    assert set(told) == {"images", "divergence"}
    for column in range(len(EVERY)):
        own = train.y[:, column] == 1
        assert told["images"][column] == own.sum()
        mean = float(each[own].mean()) if own.any() else 0.0
        assert float(told["divergence"][column]) == pytest.approx(mean, abs=1e-5)


def test_the_update_is_the_same_whether_anybody_listens(tiny: Any) -> None:
    sent = []
    for tell in (None, lambda _: None):
        context, task = bench_of(tiny)
        sent.append(pack(train_round(METHOD, replace(context, record=tell), task, CTX)[0]))
    one, two = sent
    assert one.header == two.header
    assert equal(one.tensors, two.tensors)
