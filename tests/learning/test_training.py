"""The one training loop."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from suture.core.errors import ConfigError, DataError, SutureError
from suture.core.labels import LabelSet
from suture.core.runtime import generator_for
from suture.data.batch import MILD, Batch, Samples
from suture.learning.losses import masked_bce
from suture.learning.training import (
    READ_EVERY,
    GradientOverflow,
    LocalRound,
    LocalTraining,
    NonFiniteLoss,
    Objective,
    SiteContext,
    fit,
    on_known,
    predict,
    training_batches,
)
from suture.methods.base import Phase, RoundContext, resolve_training
from suture.models import ModelSpec, build
from suture.models.classifier import Classifier

SPEC = ModelSpec("cnn", size=16, hidden=6, dropout=0.5)
LOCAL = LocalTraining(lr=1e-2, batch_size=4)


def context(n: int = 9) -> SiteContext:
    g = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (n, 1, 16, 16), generator=g, dtype=torch.uint8)
    y = torch.randint(0, 2, (n, 2), generator=g).float()
    samples = Samples({"image": pixels}, y, tuple(str(i) for i in range(n)))
    model = build(SPEC, LabelSet(("Edema", "Mass")), 1, pretrained=False)
    return SiteContext("a", model, {"train": samples}, SPEC.preprocessing, MILD, torch.device("cpu"))


def mixed() -> SiteContext:
    """A site in fp16, whose features are what the backbone gives."""
    site = context()
    site.model.hidden, site.model.head = torch.nn.Identity(), torch.nn.Linear(128, 2)
    site.model.compute_in(torch.float16)
    return site


def train(site: SiteContext, round_: int = 1, optimiser_state: Any = None, **options: Any) -> Any:
    own = {name: options.pop(name) for name in ("batches", "after_step", "after_epoch") if name in options}
    chosen = {"norm": "average", "local": LOCAL, "optimiser_state": optimiser_state or {}, **options}
    return fit(site, on_known(masked_bce), LocalRound(seed=1, round=round_, **chosen), **own)


def state(site: SiteContext) -> dict[str, torch.Tensor]:
    return {k: t.clone() for k, t in site.model.state_dict().items()}


def test_moments_carry_over_and_matter() -> None:
    one, two, three = context(), context(), context()
    first = train(one)
    kept = {k: t.clone() for k, t in first.optimiser_state.items()}
    train(one, 2, first.optimiser_state)
    train(two)
    train(two, 2, kept)
    train(three)
    train(three, 2)
    assert all(torch.equal(t, state(two)[k]) for k, t in state(one).items())
    assert any(not torch.equal(t, state(three)[k]) for k, t in state(one).items())
    assert {k.rsplit("/", 1)[1] for k in kept} == {"step", "exp_avg", "exp_avg_sq"}


def test_a_row_more_starts_its_moments_afresh() -> None:
    site = context()
    optimiser_state = train(site).optimiser_state
    optimiser_state["head.weight/exp_avg"] = torch.zeros(5, 6)
    train(site, 2, optimiser_state)


def test_rounds_and_sites_draw_their_own_numbers() -> None:
    results = []
    for round_ in (1, 1, 2):
        site = context()
        train(site, round_)
        results.append(state(site)["head.weight"])
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_head_only_leaves_the_backbone_alone() -> None:
    site = context()
    before = state(site)
    train(site, head_only=True)
    for name, tensor in state(site).items():
        assert torch.equal(tensor, before[name]) == name.startswith("backbone."), name


def test_a_loss_that_is_no_number_names_site_and_step() -> None:
    site = context()
    with torch.no_grad():
        site.model.head.bias.fill_(float("nan"))
    with pytest.raises(
        NonFiniteLoss, match=r"a: the loss of round 1, step 1 is nan; lower the learning rate"
    ):
        train(site)


def breaks_at(steps: int, error: Exception | None = None) -> tuple[list[int], Objective]:
    """An objective that is no number at one step, and may fail at the next; and the steps it has seen."""
    seen: list[int] = []

    def objective(model: Classifier, batch: Batch) -> torch.Tensor:
        seen.append(len(seen) + 1)
        if error and len(seen) > steps:
            raise error
        factor = math.nan if len(seen) == steps else 1.0
        return masked_bce(model(batch.inputs), batch.y, batch.known) * factor

    return seen, objective


MANY = LocalRound(LocalTraining(lr=1e-2, batch_size=4, iterations=3 * READ_EVERY), "average", 1, 7)


@pytest.mark.parametrize("first", [1, READ_EVERY - 1, READ_EVERY, READ_EVERY + 1, 3 * READ_EVERY])
def test_the_first_broken_step_is_named_and_the_next_look_is_the_last(first: int) -> None:
    seen, objective = breaks_at(first)
    with pytest.raises(NonFiniteLoss, match=f"a: the loss of round 7, step {first} is nan"):
        fit(context(), objective, MANY)
    assert len(seen) == math.ceil(first / READ_EVERY) * READ_EVERY


def test_what_follows_from_a_broken_step_is_told_as_that_step() -> None:
    seen, objective = breaks_at(5, ValueError("input contains NaN"))
    with pytest.raises(NonFiniteLoss, match="a: the loss of round 7, step 5 is nan"):
        fit(context(), objective, MANY)
    assert len(seen) == 6
    _, objective = breaks_at(5, ValueError("a bug"))
    with pytest.raises(ValueError, match="a bug"):
        fit(context(), lambda model, batch: objective(model, batch).nan_to_num(), MANY)


def test_an_epoch_with_a_broken_step_is_not_measured() -> None:
    _, objective = breaks_at(2)
    ends: list[int] = []
    with pytest.raises(NonFiniteLoss, match="step 2 is nan"):
        fit(context(), objective, LocalRound(LOCAL, "average", 1, 1), after_epoch=lambda: ends.append(1))
    assert ends == []


@pytest.mark.complete
def test_the_training_loss_is_the_mean_in_the_order_of_the_steps() -> None:
    losses: list[float] = []

    def objective(model: Classifier, batch: Batch) -> torch.Tensor:
        loss = masked_bce(model(batch.inputs), batch.y, batch.known)
        losses.append(loss.item())
        return loss

    total = 0.0
    found = fit(context(), objective, MANY).loss
    for loss in losses:
        total += loss
    assert found == total / len(losses)
    assert train(context(), local=LocalTraining(epochs=0)).loss is None


@pytest.mark.parametrize("how", [{"epochs": 3}, {"iterations": 9}, {"sampling": "class_aware"}])
def test_reading_ahead_changes_no_byte(how: dict[str, Any]) -> None:
    """The order of 9 images is drawn three times, and each batch is augmented."""
    found = []
    for prefetch in (0, 1, 2, 5):
        site = replace(context(), prefetch=prefetch)
        fitted = train(site, local=replace(LOCAL, **how))
        found.append((fitted.loss, *state(site).values(), *fitted.optimiser_state.values()))
    for other in found[1:]:
        assert other[0] == found[0][0]
        assert all(torch.equal(a, b) for a, b in zip(found[0][1:], other[1:], strict=True))


def test_one_generator_for_order_and_views_is_drawn_from_as_ever() -> None:
    """The second pass over 9 images is drawn after the views of the first: nothing is read ahead then."""
    found = []
    for prefetch in (0, 4):
        site, both = replace(context(), prefetch=prefetch), generator_for("both")
        local = LocalTraining(batch_size=4, iterations=7)
        found.append([b.inputs["image"] for b in training_batches(site, local, both, both)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_numbers_that_labels_decide_join_the_inputs() -> None:
    """They are found in the labels as they are read, of every batch, and change nothing else."""
    plain, found = (
        list(training_batches(context(), LOCAL, generator_for("order"), generator_for("views"), rows=rows))
        for rows in (None, lambda batch: {"positive": (batch.y[:, 0] == 1).nonzero().flatten()})
    )
    assert len(plain) == len(found) > 1
    for one, other in zip(plain, found, strict=True):
        assert other.inputs["positive"].tolist() == [i for i, y in enumerate(one.y.tolist()) if y[0] == 1]
        assert torch.equal(one.inputs["image"], other.inputs["image"])
    assert 0 < sum(len(batch.inputs["positive"]) for batch in found) < 9


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("error", [MemoryError("full"), DataError("images.npy is cut off")])
def test_what_reading_raises_reaches_the_round(prefetch: int, error: Exception) -> None:
    class Broken(Samples):
        def batch(self, rows: torch.Tensor) -> Batch:
            if 8 in rows.tolist():
                raise error
            return super().batch(rows)

    site = replace(context(), prefetch=prefetch)
    broken = Broken(**vars(site.samples["train"]))
    with pytest.raises(type(error)) as raised:
        train(replace(site, samples={"train": broken}))
    assert raised.value is error
    assert not [t for t in threading.enumerate() if t.name.startswith("suture-batches")]


@pytest.mark.parametrize(("half", "near"), [(torch.bfloat16, 0.15), (torch.float16, 0.05)])
def test_mixed_precision_trains_nearly_the_same(half: torch.dtype, near: float) -> None:
    """fp16 has eight times as many steps between numbers as bf16, and its scaled gradients are divided."""
    found = []
    for amp in (None, half):
        site = context()
        site.model.compute_in(amp)
        site.model.hidden = site.model.hidden[:2]  # dropout draws other numbers for other types
        before = state(site)
        train(site, local=LocalTraining(lr=0.1, batch_size=9, epochs=3, optimiser="sgd", clip=1.0))
        found.append(torch.cat([(t - before[k]).flatten() for k, t in state(site).items() if "weight" in k]))
    full, mixed = found
    assert not torch.equal(full, mixed)
    assert float((full - mixed).norm() / full.norm()) < near


def overflowing(model: Classifier, batch: Batch) -> torch.Tensor:
    """The gradient of 64 times the scale of 65536 is beyond 65504 until that was halved seven times."""
    return 64 * model.features(batch.inputs).sum()


def test_a_step_that_overflows_in_fp16_is_skipped() -> None:
    site, moved = mixed(), list[bool]()
    first = next(site.model.backbone.parameters())
    last = [first.detach().clone()]

    def note() -> None:
        moved.append(not torch.equal(last[0], first))
        last[0] = first.detach().clone()

    few = replace(MANY, local=replace(MANY.local, iterations=16))
    fit(site, overflowing, few, after_step=note)
    assert moved.index(True) >= 7
    assert moved[-1]


@pytest.mark.parametrize("steps", [1, 3, 18, 40])
def test_a_round_without_a_step_in_fp16_is_refused(steps: int) -> None:
    """Every step is skipped: otherwise the site would send the model that it received, at full weight."""

    def objective(model: Classifier, batch: Batch) -> torch.Tensor:
        return (model(batch.inputs) * 0).sum().sqrt()  # 0, and its gradient is 0 / 0

    few = replace(MANY, local=replace(MANY.local, iterations=steps))
    with pytest.raises(GradientOverflow, match=r"^a: the gradients of round 7 .* every step was skipped;"):
        fit(mixed(), objective, few)


def test_the_next_round_in_fp16_begins_with_the_last_scale() -> None:
    """Otherwise each round would lose its first steps."""
    site, steps = mixed(), replace(MANY, local=replace(MANY.local, iterations=16))
    first = fit(site, overflowing, steps)
    scale = first.optimiser_state["loss scale/scale"].item()
    assert 2.0 <= scale <= 2.0**9
    moved = next(site.model.backbone.parameters()).detach().clone()
    one = replace(MANY, round=8, local=replace(MANY.local, iterations=1))
    fit(site, overflowing, replace(one, optimiser_state=first.optimiser_state))
    assert not torch.equal(moved, next(site.model.backbone.parameters()))
    with pytest.raises(GradientOverflow):
        fit(site, overflowing, one)


def test_other_precisions_keep_no_scale() -> None:
    assert not [name for name in train(context()).optimiser_state if "scale" in name]


def test_a_batch_of_one_image_whose_maps_are_single_values_is_told() -> None:
    site = context(1)
    site.model.hidden = torch.nn.Sequential(
        site.model.hidden, torch.nn.BatchNorm1d(site.model.head.in_features)
    )
    with pytest.raises(ConfigError, match=r"^a: .*batch_size"):
        train(site)


def test_a_last_batch_of_one_image_trains() -> None:
    """Nine images in batches of four: the lone ninth joins the batch before it."""
    site = context(9)
    assert [len(b) for b in site.samples["train"].batches(4)] == [4, 5]
    train(site)
    assert predict(site, site.samples["train"]).shape == (9, 2)


@pytest.mark.parametrize(("epochs", "iterations"), [(1, 5), (3, 2), (0, 1)])
def test_iterations_are_the_number_of_steps_whatever_the_epochs(epochs: int, iterations: int) -> None:
    """Nine images in batches of four: a pass would be two steps, of four and five images."""
    site, sizes, steps, ends = context(9), [], [], []

    def objective(model: Classifier, batch: Batch) -> torch.Tensor:
        sizes.append(len(batch))
        return masked_bce(model(batch.inputs), batch.y, batch.known)

    local = LocalTraining(lr=1e-2, batch_size=4, epochs=epochs, iterations=iterations)
    fitted = fit(
        site,
        objective,
        LocalRound(local, "average", 1, 1),
        after_step=lambda: steps.append(len(sizes)),
        after_epoch=lambda: ends.append(len(sizes)),
    )
    assert sizes == [4] * iterations
    assert steps == list(range(1, iterations + 1))
    assert ends == [iterations]
    assert float(fitted.optimiser_state["head.weight/step"]) == iterations
    assert fitted.loss is not None


def test_iterations_without_an_image_are_told() -> None:
    with pytest.raises(SutureError, match="a has no training images"):
        train(context(0), local=LocalTraining(batch_size=4, epochs=0, iterations=3))


@pytest.mark.parametrize(("betas", "ratio"), [((0.9, 0.99), 1.0), ((0.5, 0.5), 0.5), (None, 10.0)])
def test_betas_reach_adam(betas: tuple[float, float] | None, ratio: float) -> None:
    """After one step the moments are (1 - b1) g and (1 - b2) g^2: m^2 / v = (1 - b1)^2 / (1 - b2)."""
    one = LocalTraining(lr=1e-2, batch_size=4, iterations=1)
    optimiser_state = train(
        context(), local=one if betas is None else replace(one, betas=betas)
    ).optimiser_state
    found = optimiser_state["head.bias/exp_avg"] ** 2 / optimiser_state["head.bias/exp_avg_sq"]
    torch.testing.assert_close(found, torch.full((2,), ratio))


def test_a_step_is_no_longer_than_its_clipped_gradient() -> None:
    one, two = context(), context()
    plain = LocalTraining(lr=1.0, batch_size=9, iterations=1, optimiser="sgd", momentum=0.0)
    before = {k: p.detach().clone() for k, p in one.model.named_parameters()}
    steps = []
    for site, local in ((one, plain), (two, replace(plain, clip=0.25))):
        train(site, local=local)
        moves = [before[k] - p.detach() for k, p in site.model.named_parameters()]
        steps.append(torch.cat([move.flatten() for move in moves]))
    assert float(steps[0].norm()) > 0.3
    torch.testing.assert_close(steps[1], steps[0] * 0.25 / steps[0].norm(), rtol=1e-3, atol=1e-6)


def test_a_batch_is_made_when_the_step_before_is_done() -> None:
    """A method may bring its own batches; a teacher that follows each step labels the next one."""
    site, events = context(4), []
    batch = Batch(
        {"image": torch.zeros(4, 1, 16, 16)},
        torch.tensor([[1.0, 0.0]] * 4),
        torch.ones(4, 2, dtype=torch.bool),
        torch.full((4, 1), 0.25),
    )

    def batches(shuffle: torch.Generator, noise: torch.Generator) -> Iterator[Batch]:
        assert shuffle.initial_seed() != noise.initial_seed()
        for _ in range(2):
            events.append("batch")
            yield batch

    def objective(model: Classifier, given: Batch) -> torch.Tensor:
        assert given is batch
        events.append("loss")
        return model(given.inputs).sum()

    fit(
        site,
        objective,
        LocalRound(LocalTraining(lr=1e-2, epochs=2), "average", 1, 1),
        batches=batches,
        after_step=lambda: events.append("step"),
        after_epoch=lambda: events.append("epoch"),
    )
    assert events == [*["batch", "loss", "step"] * 2, "epoch"] * 2


def test_a_phase_with_epochs_of_its_own_has_no_iterations() -> None:
    local = LocalTraining(lr=0.1, epochs=3, iterations=200)
    warm = resolve_training(local, RoundContext(1, Phase("warm-up", 1, "head", 0.5, epochs=4), seed=0))
    assert (warm.epochs, warm.iterations, warm.lr) == (4, None, 0.5)
    main = resolve_training(local, RoundContext(2, Phase("main", 1), seed=0))
    assert (main.epochs, main.iterations, main.lr) == (3, 200, 0.1)
