"""DP-SGD of a site: its draws, and a step that one patient moves by little."""

from __future__ import annotations

import copy
import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_site import TINY as SPEC
from small_site import small_site
from torch import Tensor, nn

from hypothesis_profiles import examples
from suture.core.errors import ConfigError
from suture.core.labels import LabelSet
from suture.data.batch import MILD, Augmentation, Batch, Samples
from suture.learning.dp_sgd import PatientPrivacy, gaussian, uniform
from suture.learning.steps import NonFiniteLoss, masked_bce
from suture.learning.training import LocalRound, LocalTraining, SiteContext, fit, on_known
from suture.models import ModelSpec, build
from suture.models.classifier import train_mode
from world import refused

LOCAL = LocalTraining(lr=0.5, batch_size=4, optimiser="sgd", momentum=0)


def injected(seed: str = "") -> Callable[[int], bytes]:
    """A source of the same numbers each time."""
    calls = [0]

    def draw(count: int) -> bytes:
        calls[0] += 1
        return hashlib.shake_256(f"{seed}/{calls[0]}".encode()).digest(count)

    return draw


def context(patients: str = "aabbcdefg", augmentation: Augmentation | None = None) -> SiteContext:
    """Without reading ahead: the order of the draws would depend on the thread that reads."""
    site = small_site(len(patients), view=augmentation, prefetch=0)
    site.samples["train"].y[0, 1] = torch.nan
    return replace(site, samples={"train": replace(site.samples["train"], patients=tuple(patients))})


def private(site: SiteContext, multiplier: float = 0.0, clip: float = 0.1, seed: str = "") -> SiteContext:
    patients = len(set(site.samples["train"].patients))
    return replace(site, private=PatientPrivacy(clip, multiplier, patients, injected(seed)))


def train(site: SiteContext, local: LocalTraining = LOCAL) -> dict[str, Tensor]:
    """Train a round with frozen batch norm; returns the trained parameters."""
    fitted = fit(site, on_known(masked_bce), LocalRound(local, "frozen", seed=1, round=1))
    assert fitted.loss is None or not site.private
    return {n: p.detach().clone() for n, p in site.model.named_parameters()}


@pytest.mark.complete
def test_each_patient_is_drawn_with_the_rate_and_each_of_its_images_alike() -> None:
    """Of patients with 1, 2 and 3 images a batch of 1.5 draws each in half of the steps."""
    chosen = PatientPrivacy(1.0, 1.0, 3, injected())
    local = LocalTraining(batch_size=2, iterations=6_000)
    assert local.draws_of(3)[0] == pytest.approx(2 / 3)
    seen: Counter[int] = Counter()
    sizes: Counter[int] = Counter()
    for rows in chosen.draws(("x", "y", "y", "z", "z", "z"), *local.draws_of(3)):
        patients = ["xyyzzz"[row] for row in rows.tolist()]
        assert len(set(patients)) == len(patients)
        seen.update(rows.tolist())
        sizes[len(rows)] += 1
    assert seen[0] / 6_000 == pytest.approx(2 / 3, abs=0.03)
    assert [seen[i] / 6_000 for i in (1, 2)] == pytest.approx([1 / 3] * 2, abs=0.03)
    assert [seen[i] / 6_000 for i in (3, 4, 5)] == pytest.approx([2 / 9] * 3, abs=0.03)
    assert sizes[0] / 6_000 == pytest.approx(1 / 27, abs=0.01)  # nobody was drawn: a step of noise


@examples(20)
@given(st.integers(0, 2**64 - 1))
def test_uniform_numbers_are_below_one(bits: int) -> None:
    assert 0 <= uniform(1, lambda _: bits.to_bytes(8, "little")).item() < 1


def test_the_steps_of_an_epoch() -> None:
    assert LocalTraining(batch_size=4).draws_of(9) == (4 / 9, 3)  # 9 / 4, rounded up
    assert LocalTraining(batch_size=4, iterations=5).draws_of(9) == (4 / 9, 5)
    assert LocalTraining(batch_size=4).draws_of(2) == (1.0, 1)


def test_a_round_is_that_of_opacus_with_the_same_draws() -> None:
    """Opacus' hooks, clipping and division, on the batches that we draw, and with our noise."""
    import opacus

    site = private(context(), 0.7)
    assert site.private
    model = build(SPEC, site.model.labels, 1, pretrained=False)
    ours = train(site, replace(LOCAL, epochs=3))

    draw = injected()
    for _ in ("shuffle", "augmentation", "dropout"):
        draw(8)  # secret seeds
    schedule = replace(site.private, draw=draw)
    train_mode(model, "frozen")
    model.backbone._forward_pre_hooks.clear()  # opacus 1.6 has wrong gradients of channels-last images
    module = opacus.GradSampleModule(model, loss_reduction="sum")
    trained = [p for p in module.parameters() if p.requires_grad]
    base = torch.optim.SGD(trained, LOCAL.lr)
    optimiser = opacus.optimizers.DPOptimizer(
        base, noise_multiplier=0.7, max_grad_norm=0.1, expected_batch_size=4
    )
    optimiser.add_noise = lambda: [
        setattr(p, "grad", p.summed_grad + 0.07 * gaussian(tuple(p.shape), draw).float()) for p in trained
    ]
    samples = site.samples["train"]
    for _ in range(3):
        for rows in schedule.draws(samples.patients, *LOCAL.draws_of(schedule.patients)):
            optimiser.zero_grad()
            if not len(rows):
                for p in trained:
                    p.grad_sample = torch.zeros(0, *p.shape)
            else:
                batch = samples.batch(rows)
                logits = module({"image": SPEC.preprocessing(batch.inputs["image"])})
                each = nn.functional.binary_cross_entropy_with_logits(logits, batch.y, reduction="none")
                known = batch.known.float()
                ((each * known).sum(1) / known.sum(1)).sum().backward()
            optimiser.step()
    for name, parameter in model.named_parameters():
        assert torch.allclose(ours[name], parameter, atol=1e-6), name


def ready(site: SiteContext, rows: list[int], broken: int | None = None) -> Batch:
    """A batch of these images, one of which may be no numbers."""
    batch = site.samples["train"].batch(torch.tensor(rows))
    image = SPEC.preprocessing(batch.inputs["image"])
    if broken in rows:
        image[rows.index(broken)] = torch.nan
    return replace(batch, inputs={"image": image})


def stepped(site: SiteContext, private: PatientPrivacy, batch: Batch, lr: float) -> Tensor:
    """How one step moves the model, which stays as it was."""
    model = copy.deepcopy(site.model).eval()
    private.step(model, on_known(masked_bce), torch.optim.SGD(model.parameters(), lr), batch, 4)
    pairs = zip(model.parameters(), site.model.parameters(), strict=True)
    return torch.cat([(after - before).flatten().double() for after, before in pairs]).detach()


@pytest.mark.parametrize("left_out", ["a", "b", "g"])
def test_a_patient_moves_a_step_by_its_clip_at_most(left_out: str) -> None:
    """The same draws for all others, without noise: the step changes by lr C / B at most."""
    site = private(context(), clip=0.05)
    assert site.private
    patients = site.samples["train"].patients
    drawn = [0, 2, 4, 5, 6, 7, 8]  # one image of each
    others = [i for i in drawn if patients[i] != left_out]
    moved = [stepped(site, site.private, ready(site, rows), 0.5) for rows in (drawn, others)]
    # The gradient of each is longer than C.
    assert float((moved[0] - moved[1]).norm()) == pytest.approx(0.5 * 0.05 / 4, rel=1e-4)


def test_a_broken_image_counts_as_nothing_and_reveals_nothing() -> None:
    site, chosen = context("abc"), PatientPrivacy(1.0, 0.0, 3)
    whole, without = (stepped(site, chosen, ready(site, rows, 1), 1.0) for rows in ([0, 1, 2], [0, 2]))
    torch.testing.assert_close(whole, without, rtol=0, atol=1e-7)
    assert whole.any()


def test_a_step_without_patients_is_one_of_noise() -> None:
    site = context("ab", MILD)
    before = {n: p.detach().clone() for n, p in site.model.named_parameters() if "head" in n}
    never = replace(LOCAL, batch_size=1, iterations=1)
    private_ = PatientPrivacy(1.0, 2.0, 10**9, injected())  # of whom each is drawn once in 10⁹ steps
    after = train(replace(site, private=private_), never)
    moved = torch.cat([(after[n] - t).flatten() for n, t in before.items()])
    assert moved.std().item() == pytest.approx(LOCAL.lr * 2.0, rel=0.2)


def test_a_large_batch_is_computed_in_parts(monkeypatch: Any) -> None:
    whole = train(private(context(), 0.5))
    monkeypatch.setattr("suture.learning.dp_sgd._TOGETHER", 2)
    assert all(torch.allclose(whole[n], t, atol=1e-7) for n, t in train(private(context(), 0.5)).items())


def test_views_and_dropout_do_not_follow_the_jobs_seed() -> None:
    """From it, who was drawn before would decide the views of the others."""
    one, other = (train(private(context(augmentation=MILD), seed=seed)) for seed in ("1", "2"))
    assert any(not torch.equal(one[n], other[n]) for n in one)
    again = train(private(context(augmentation=MILD), seed="1"))
    assert all(torch.equal(one[n], again[n]) for n in one)


def test_batch_norm_over_the_batch_and_a_model_that_diverged_are_refused() -> None:
    with refused("batch norm backbone.", "frozen", by=ConfigError):
        fit(private(context()), on_known(masked_bce), LocalRound(LOCAL, "average", seed=1, round=1))
    with refused("a: ", "round 1", by=NonFiniteLoss):
        train(private(context(), 1e30, clip=1e9), replace(LOCAL, lr=1e30))


@pytest.mark.complete
def test_a_recurrent_model_is_trained_too() -> None:
    spec = ModelSpec("lstm")
    model = build(spec, LabelSet(("Edema", "Mass")), 1, pretrained=False)
    inputs = {"tokens": torch.randint(1, 50, (4, 6), dtype=torch.int32), "length": torch.tensor([6, 3, 2, 6])}
    samples = Samples(inputs, torch.eye(4, 2), ("a", "b", "c", "d"))
    site = SiteContext(
        "a", model, {"train": samples}, SPEC.preprocessing, Augmentation(), torch.device("cpu")
    )
    before = model.head.weight.detach().clone()
    train(private(site))
    assert not torch.equal(before, model.head.weight)
