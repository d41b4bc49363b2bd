"""The one training loop, its batches and their memory, and what predicts."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_site import LABELS, samples_of, small_site
from torch import Tensor, nn

from suture.core.errors import ConfigError, DataError
from suture.core.runtime import generator_for
from suture.data.batch import MILD, Batch, Samples
from suture.learning import steps as optimisers
from suture.learning.steps import READ_EVERY, GradientOverflow, NonFiniteLoss, masked_bce
from suture.learning.training import (
    LocalRound,
    LocalTraining,
    Objective,
    SiteContext,
    activation_bytes,
    check_memory,
    evaluation_batch,
    fit,
    on_known,
    predict,
    training_batches,
)
from suture.models import ModelSpec, build
from suture.models.classifier import Classifier
from suture.models.saved import save_model
from suture_results.prediction import open_model
from world import refused, write_image

SPEC = ModelSpec("cnn", size=16, hidden=6, dropout=0.5)
LOCAL = LocalTraining(lr=1e-2, batch_size=4)
MANY = LocalRound(LocalTraining(lr=1e-2, batch_size=4, iterations=3 * READ_EVERY), "average", 1, 7)


def context(n: int = 9) -> SiteContext:
    return small_site(n, SPEC, MILD)


def train(site: SiteContext, round_: int = 1, optimiser_state: Any = None, **options: Any) -> Any:
    chosen = {"norm": "average", "local": LOCAL, "optimiser_state": optimiser_state or {}, **options}
    return fit(site, on_known(masked_bce), LocalRound(seed=1, round=round_, **chosen))


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
    # With a row more they begin afresh.
    train(one, 3, kept | {"head.weight/exp_avg": torch.zeros(5, 6)})


def test_rounds_and_sites_draw_their_own_numbers() -> None:
    results = []
    for round_ in (1, 1, 2):
        site = context()
        train(site, round_)
        results.append(state(site)["head.weight"])
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


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


@pytest.mark.parametrize("first", [1, READ_EVERY, READ_EVERY + 1])
def test_the_first_broken_step_is_named_and_the_next_look_is_the_last(first: int) -> None:
    seen, objective = breaks_at(first)
    with refused("a: ", "round 7", f"step {first} ", "nan", by=NonFiniteLoss):
        fit(context(), objective, MANY)
    assert len(seen) == math.ceil(first / READ_EVERY) * READ_EVERY


def test_what_follows_from_a_broken_step_is_told_as_that_step() -> None:
    seen, objective = breaks_at(5, ValueError("input contains NaN"))
    with refused("step 5 ", by=NonFiniteLoss):
        fit(context(), objective, MANY)
    assert len(seen) == 6
    _, objective = breaks_at(5, ValueError("a bug"))
    with pytest.raises(ValueError, match="a bug"):
        fit(context(), lambda model, batch: objective(model, batch).nan_to_num(), MANY)
    # An epoch with a broken step is not measured.
    _, objective = breaks_at(2)
    ends: list[int] = []
    with refused("step 2 ", by=NonFiniteLoss):
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


def mixed() -> SiteContext:
    """A site in fp16, whose features are what the backbone gives."""
    site = context()
    site.model.hidden, site.model.head = torch.nn.Identity(), torch.nn.Linear(128, 2)
    site.model.compute_in(torch.float16)
    return site


def overflowing(model: Classifier, batch: Batch) -> torch.Tensor:
    """The gradient of 64 times the scale of 65536 is beyond 65504 until that was halved seven times."""
    return 64 * model.features(batch.inputs).sum()


def steps_of(n: int, **more: Any) -> LocalRound:
    return replace(MANY, local=replace(MANY.local, iterations=n), **more)


def test_a_step_that_overflows_in_fp16_is_skipped_and_the_next_round_begins_with_the_last_scale() -> None:
    """Otherwise each round would lose its first steps."""
    site, moved = mixed(), list[bool]()
    first = next(site.model.backbone.parameters())
    last = [first.detach().clone()]

    def note() -> None:
        moved.append(not torch.equal(last[0], first))
        last[0] = first.detach().clone()

    fitted = fit(site, overflowing, steps_of(16), after_step=note)
    assert moved.index(True) >= 7
    assert moved[-1]
    assert 2.0 <= fitted.optimiser_state["loss scale/scale"].item() <= 2.0**9
    fit(site, overflowing, steps_of(1, optimiser_state=fitted.optimiser_state), after_step=note)
    assert moved[-1]
    with refused(by=GradientOverflow):
        fit(site, overflowing, steps_of(1))
    assert not [name for name in train(context()).optimiser_state if "scale" in name]


@pytest.mark.parametrize("steps", [1, 3, 18, 40])
def test_a_round_without_a_step_in_fp16_is_refused(steps: int) -> None:
    """Every step is skipped: otherwise the site would send the model that it received, at full weight."""

    def objective(model: Classifier, batch: Batch) -> torch.Tensor:
        return (model(batch.inputs) * 0).sum().sqrt()  # 0, and its gradient is 0 / 0

    with refused("a: ", "round 7", by=GradientOverflow):
        fit(mixed(), objective, steps_of(steps))


def test_a_last_batch_of_one_image_joins_the_one_before_and_alone_is_told() -> None:
    site = context(9)
    assert [len(b) for b in site.samples["train"].batches(4)] == [4, 5]
    train(site)
    assert predict(site, site.samples["train"]).shape == (9, 2)
    alone = context(1)
    alone.model.hidden = torch.nn.Sequential(alone.model.hidden, torch.nn.BatchNorm1d(6))
    with refused("a: ", "batch_size", by=ConfigError):
        train(alone)


@pytest.mark.parametrize(("epochs", "iterations"), [(1, 5), (0, 1)])
def test_iterations_are_the_number_of_steps_whatever_the_epochs(epochs: int, iterations: int) -> None:
    """Nine images in batches of four: a pass would be two steps, of four and five images."""
    site, sizes, steps, ends = context(9), [], [], []

    def objective(model: Classifier, batch: Batch) -> torch.Tensor:
        sizes.append(len(batch))
        return masked_bce(model(batch.inputs), batch.y, batch.known)

    local = LocalTraining(lr=1e-2, batch_size=4, epochs=epochs, iterations=iterations)
    noted = {"after_step": lambda: steps.append(len(sizes)), "after_epoch": lambda: ends.append(len(sizes))}
    fitted = fit(site, objective, LocalRound(local, "average", 1, 1), **noted)  # type: ignore[arg-type]
    assert sizes == [4] * iterations
    assert steps == list(range(1, iterations + 1))
    assert ends == [iterations]
    assert float(fitted.optimiser_state["head.weight/step"]) == iterations
    with refused("a has no training images"):
        train(context(0), local=local)


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


SETTINGS: dict[str, dict[str, Any]] = {
    "Adam": {"lr": 0.01, "betas": (0.8, 0.99), "weight_decay": 0.1},
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
    "SGD": {"lr": 0.01, "momentum": 0.9, "nesterov": True},
}


def trained(kind: type[torch.optim.Optimizer], settings: dict[str, Any]) -> list[torch.Tensor]:
    """The parameters after ten steps, each with a hook that changes the gradient, and the moments."""
    draw = torch.Generator().manual_seed(1)
    parameters = [torch.randn(3, 2, generator=draw).requires_grad_() for _ in range(2)]
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.05}]
    optimiser = kind(groups, **settings)
    optimiser.register_step_pre_hook(lambda *_: torch.nn.utils.clip_grad_norm_(parameters, 0.5) and None)
    for _ in range(10):
        optimiser.zero_grad()
        sum((p * torch.randn(3, 2, generator=draw)).square().sum() for p in parameters).backward()  # type: ignore[union-attr]
        optimiser.step()
    return [*parameters, *(t for p in parameters for t in optimiser.state[p].values() if t is not None)]


@pytest.mark.parametrize("name", SETTINGS)
def test_steps_are_those_of_torch(name: str) -> None:
    ours = trained(getattr(optimisers, name), SETTINGS[name])
    theirs = trained(getattr(torch.optim, name), SETTINGS[name])
    assert len(ours) == len(theirs) > 2
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert all(not tensor.grad_fn for tensor in ours), "a step was recorded for the gradient"


# Batches that fit the memory


def test_a_batch_on_the_cpu_has_a_mebipixel_at_most() -> None:
    for shape, device, size in (
        ((3, 64, 64), "cpu", 256),  # 2^20 pixels
        ((3, 96, 96), "cpu", 113),  # 2^20 / 9,216
        ((3, 4096, 4096), "cpu", 1),
        ((3, 224, 224), "cuda:1", 256),
        ((900,), "cpu", 256),  # documents have no pixels
    ):
        inputs = {"image" if len(shape) > 1 else "tokens": torch.empty(0, *shape)}
        assert evaluation_batch(inputs, device) == size
        assert evaluation_batch(inputs, device, most=64) == min(size, 64)


def full_above(fits: int, seen: list[int]) -> Callable[..., None]:
    """A hook that notes the sizes of batches, and finds the memory full above one."""

    def hook(_: torch.nn.Module, given: tuple[dict[str, torch.Tensor]]) -> None:
        seen.append(len(given[0]["image"]))
        if seen[-1] > fits:
            raise torch.OutOfMemoryError("CUDA out of memory")

    return hook


def test_a_batch_that_does_not_fit_is_halved_until_it_does() -> None:
    site, samples, seen = small_site(batch_size=8), samples_of(11), list[int]()
    expected = predict(site, samples)
    site.model.register_forward_pre_hook(full_above(3, seen))
    torch.testing.assert_close(predict(site, samples), expected, atol=1e-5, rtol=0)
    assert seen[:4] == [8, 4, 2, 2]  # a last batch of one row joins the batch before it
    site.model.register_forward_pre_hook(full_above(0, seen))
    with pytest.raises(torch.OutOfMemoryError):
        predict(site, samples)


@pytest.mark.complete
@pytest.mark.parametrize("name", ["cnn", "resnet18"])
def test_predictions_do_not_depend_on_the_batch(name: str) -> None:
    samples, spec = samples_of(11, 64), ModelSpec(name, size=64)
    whole = predict(small_site(spec=spec), samples)
    for size in (1, 3, 8):
        found = predict(small_site(spec=spec, batch_size=size), samples)
        torch.testing.assert_close(found, whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("side", "images", "sizes"), [(16, 70, [64, 6]), (224, 41, [20, 20, 1])])
def test_files_are_predicted_in_batches_by_the_same_rule(
    side: int, images: int, sizes: list[int], tmp_path: Path
) -> None:
    spec = ModelSpec("cnn", size=side)
    save_model(build(spec, LABELS, 1, pretrained=False), spec, tmp_path / "model", {})
    for number in range(images):
        write_image(tmp_path / "in" / f"{number}.png", number, (8, 8))
    model, seen = open_model(tmp_path / "model"), list[int]()
    plain = model.network.register_forward_pre_hook(full_above(64, seen))
    expected = model.predict(tmp_path / "in")
    assert seen == sizes
    plain.remove()
    model.network.register_forward_pre_hook(full_above(30, seen))
    halved = model.predict(tmp_path / "in", batch=40)  # twice 20 in place of 40
    assert seen[len(sizes) :][:3] == [40, 20, 20]
    np.testing.assert_allclose(halved, expected, atol=1e-5)


# The memory of a step

EACH = 16 * 16 * 4 + 8 * 4
"""Of an image: itself, which the first layer keeps, and 8 features, which ReLU and the head both keep."""

WEIGHTS = 4 * (256 * 8 + 8 + 8 * 2 + 2)


def flat() -> SiteContext:
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(256, 8), nn.ReLU())
    return replace(small_site(3), model=Classifier(backbone, 8, LABELS))


def total(model: Classifier, batch: Batch) -> Tensor:
    return model(batch.inputs).sum()  # type: ignore[no-any-return]


def test_what_a_layer_keeps_is_counted_once_and_leaves_the_model_as_it_was() -> None:
    assert activation_bytes(flat(), total) == EACH
    site = flat()
    site.model.backbone.append(nn.BatchNorm1d(8))
    before, random = state(site), torch.get_rng_state()
    assert activation_bytes(site, total) > EACH
    assert all(torch.equal(t, before[name]) for name, t in state(site).items())
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize(("optimiser", "copies"), [("adam", 4), ("sgd", 3)])
def test_a_batch_fits_to_the_byte(optimiser: str, copies: int) -> None:
    needed = copies * WEIGHTS + 10 * EACH
    check_memory(flat(), total, optimiser, 10, needed)
    with refused("a: ", "10 images", "batch_size below 10 ", by=ConfigError):
        check_memory(flat(), total, optimiser, 10, needed - 1)
    with refused("smaller model", by=ConfigError):
        check_memory(flat(), total, optimiser, 10, copies * WEIGHTS - 1)
    # A CPU is not checked, nor a site without images.
    check_memory(flat(), total, optimiser, 10**12)
    check_memory(replace(flat(), samples={"train": samples_of(0)}), total, optimiser, 10, 0)
