"""Clipping and noise of what a site sends, and the ε of it."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hypothesis_profiles import examples
from noted import noted
from suture.core.errors import ConfigError
from suture.core.privacy import PrivacyConfig
from suture.learning.dp_sgd import gaussian
from suture.learning.training import LocalTraining, NonFiniteLoss
from suture.methods.surgical import SurgicalAggregation
from suture.privacy.differential_privacy import Mechanism, Noise, rounded_up
from suture.privacy.differential_privacy import epsilon as epsilon_of
from suture.protocol.messages import Spent, TaskData, Update, ones
from suture_results.notes import describe_spent


def epsilon(multipliers: list[float], delta: float) -> float | None:
    """The ε of updates with noise of so many times their clip."""
    return epsilon_of((Mechanism(z / 2) for z in multipliers), delta)


def update(w: list[float], row: list[float], kind: Any = "weights") -> Update:
    return Update(1, ("A",), {"w": torch.tensor(w)}, {"head": torch.tensor([row])}, ones(("A",)), kind=kind)


SENT = TaskData("train", 1, 0, shared={"w": torch.tensor([1.0, 1.0])}, head={"head": torch.tensor([[0.0]])})


def test_the_change_is_clipped_as_one_vector() -> None:
    """Changes (3, 0) and 4 have norm 5; to a norm of 1 they become (.6, 0) and .8."""
    clipped = Noise(1.0).apply(update([4.0, 1.0], [4.0]), SENT)
    assert clipped.shared["w"].tolist() == pytest.approx([1.6, 1.0])
    assert clipped.head["head"].item() == pytest.approx(0.8)


def test_a_gradient_is_clipped_itself_and_a_small_update_is_left() -> None:
    clipped = Noise(1.0).apply(update([3.0, 0.0], [4.0], "gradient"), SENT)
    assert clipped.shared["w"].tolist() == pytest.approx([0.6, 0.0])
    small = update([1.1, 1.0], [0.1])
    assert torch.equal(Noise(1.0).apply(small, SENT).shared["w"], small.shared["w"])


def test_what_cannot_be_clipped_does_not_leave() -> None:
    for value in (math.nan, math.inf):
        with pytest.raises(NonFiniteLoss, match="cannot be clipped"):
            Noise(1.0, 1.0).apply(update([value, 1.0], [4.0]), SENT)


def test_equal_updates_have_noise_of_its_deviation_that_is_never_the_same() -> None:
    n = 20_000
    sent = TaskData("train", shared={"w": torch.zeros(n), "v": torch.zeros(n)})
    still = Update(1, (), {"w": torch.zeros(n), "v": torch.zeros(n)}, {}, ones(()))
    one, again = (Noise(2.0, 0.5).apply(still, sent).shared for _ in range(2))
    drawn = [one["w"], one["v"], again["w"], again["v"]]
    for noise in drawn:
        assert noise.std().item() == pytest.approx(1.0, rel=0.05)
    alike = torch.corrcoef(torch.stack(drawn)) - torch.eye(4)
    assert alike.abs().max() < 0.05


def test_two_answers_with_other_noise_do_not_give_the_update_away() -> None:
    """With noise that was a function of the update, 2 s1 - s2 was the update, with an error of 5e-5 of it."""
    g = torch.Generator().manual_seed(1)
    change = torch.randn(10_000, generator=g)
    clipped = change / change.norm()
    sent, trained = TaskData("train", shared={"w": torch.zeros(10_000)}), {"w": change}
    one, two = (
        Noise(1.0, z).apply(Update(1, (), trained, {}, ones(())), sent).shared["w"] for z in (1.0, 2.0)
    )
    assert ((2 * one - two - clipped).norm() / clipped.norm()).item() >= 1


def counter() -> Callable[[int], bytes]:
    return random.Random(1).randbytes


def test_normal_numbers_are_those_of_their_bits() -> None:
    drawn = gaussian((100_000,), counter())
    assert drawn.mean().item() == pytest.approx(0, abs=0.02)
    assert drawn.square().mean().item() == pytest.approx(1, abs=0.02)
    assert (drawn.abs() > 1.959964).double().mean().item() == pytest.approx(0.05, abs=0.005)
    first = int.from_bytes(counter()(800_000)[:8], "little") >> 12
    assert drawn[0].item() == pytest.approx(NormalDist().inv_cdf((first + 0.5) / 2**52), rel=1e-12)
    for extreme in (b"\0", b"\xff"):
        assert torch.isfinite(gaussian((3,), lambda n, b=extreme: b * n)).all()  # type: ignore[misc]
    assert gaussian((), counter()).shape == ()


def test_a_variance_stays_one() -> None:
    """Of 1000 variances the noise would make half negative, and the model no number."""
    name = "backbone.norm.running_var"
    sent = TaskData("train", shared={name: torch.zeros(1_000)})
    noisy = Noise(1.0, 1.0).apply(Update(1, (), {name: torch.zeros(1_000)}, {}, ones(())), sent, counter())
    assert noisy.shared[name].min() == 0
    assert (noisy.shared[name] > 0).double().mean().item() == pytest.approx(0.5, abs=0.06)


def test_what_the_noise_does_not_cover_is_refused() -> None:
    counted = Update(1, (), {"n": torch.tensor(7)}, {}, ones(()))
    with pytest.raises(ConfigError, match="does not cover n"):
        Noise(1.0, 1.0).apply(counted, TaskData("train", shared={"n": torch.tensor(3)}))
    per_class = replace(update([1.0, 1.0], [0.0]), channels={"seen": torch.ones(1)})
    with pytest.raises(ConfigError, match="does not cover seen"):
        Noise(1.0).apply(per_class, SENT)


def test_encryption_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="homomorphic encryption is not supported"):
        PrivacyConfig.model_validate({"encryption": "ckks"})


@given(st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=2), st.floats(0.1, 10))
def test_no_change_is_longer_than_the_clip(w: list[float], clip: float) -> None:
    done = Noise(clip).apply(update(w, [5.0]), SENT)
    change = torch.cat([done.shared["w"] - SENT.shared["w"], done.head["head"][0]])
    assert change.norm().item() <= clip * (1 + 1e-4) + 1e-4


def test_noise_without_a_clip_is_refused() -> None:
    with pytest.raises(ValueError, match="set clip"):
        PrivacyConfig(noise=1.0)


# The accountant


def delta_of(value: float, multipliers: list[float]) -> Any:
    """The exact δ of an ε in 50 digits, from the tails of the privacy loss: it is N(μ²/2, μ²)."""
    with mpmath.workdps(50):
        mu = mpmath.sqrt(sum((2 / mpmath.mpf(z)) ** 2 for z in multipliers))
        e = mpmath.mpf(value)
        return mpmath.ncdf(mu / 2 - e / mu) - mpmath.exp(e) * mpmath.ncdf(-mu / 2 - e / mu)


def test_epsilon_of_fifteen_updates() -> None:
    """μ = 15^½; the bound of the Rényi accountant, which was reported before, is 24.83."""
    assert epsilon([2.0] * 15, 1e-5) == 23.4
    assert epsilon([2.0], 1e-5) < epsilon([2.0] * 15, 1e-5) < epsilon([1.5] * 15, 1e-5)
    assert epsilon([], 1e-5) == 0
    assert epsilon([2.0, 0.0], 1e-5) is None


def test_epsilon_is_the_sum_of_both_mechanisms_tails_in_numbers() -> None:
    """δ of one Gaussian mechanism is the largest difference of two normal distributions, by quadrature."""
    found = epsilon([1.0], 1e-3)  # N(0, 1) and N(2, 1)
    p, q = NormalDist(2), NormalDist()
    step = 1e-4
    area = sum(
        max(p.pdf(x) - math.exp(found) * q.pdf(x), 0) * step for x in (i * step for i in range(150_000))
    )
    assert 0.97e-3 < area <= 1e-3


@given(
    st.lists(st.floats(-7, 6).map(lambda power: 10.0**power), min_size=1, max_size=40),
    st.floats(-200, -1e-3).map(lambda power: 10.0**power),
)
@examples(150)
def test_epsilon_is_never_too_small_and_hardly_too_large(multipliers: list[float], delta: float) -> None:
    found = epsilon(multipliers, delta)
    assert delta_of(found, multipliers) <= delta
    if found > 1e-5:
        assert delta_of(found * 0.985, multipliers) > delta


@pytest.mark.parametrize("z", [1e-300, 5e-324])
def test_hardly_any_noise_is_an_epsilon_without_bound(z: float) -> None:
    assert epsilon([z], 1e-5) is None


@given(st.floats(1e-300, 1e300))
def test_a_number_is_rounded_up(value: float) -> None:
    assert value <= rounded_up(value) <= value * 1.0101
    assert rounded_up(rounded_up(value)) <= rounded_up(value) * 1.0101


# What a run says


def test_the_report_says_what_the_sites_state() -> None:
    protection = {
        "a": {"clip": 1.0, "noise": 2.0, "delta": 1e-5},
        "b": {"clip": 3.0, "noise": 0.0, "delta": 1e-5},
        "c": {"clip": 3.0, "noise": 1.0, "delta": 1e-5},
    }
    noisy, clipped, silent = describe_spent(
        protection, {"a": Spent(23.4, 15, 0, 2, 40, 77), "b": Spent(None, 15, 4, 1, 0, 30)}
    )
    assert "ε ≤ 23.4 at δ = 1e-05 over all its 15 updates in 2 experiments" in noisy
    assert "Not protected by noise: the 40 figures of classes and 77 other numbers" in noisy
    assert "adds no noise: ε = ∞, because 4 of its 15 updates" in clipped
    assert "it did not report" in silent


@pytest.mark.complete
def test_a_federation_whose_site_protects_itself(tiny: Any) -> None:
    federation = tiny(SurgicalAggregation(local=LocalTraining(lr=1e-2, batch_size=8)))
    config = federation.configs["alpha"]
    federation.configs["alpha"] = config.model_copy(
        update={"privacy": PrivacyConfig(clip=1e-6, min_count=0, min_loss=0)}
    )
    server = federation.run()
    run = json.loads((Path(server.record.folder) / "run.json").read_text())
    assert run["protection"] == {"alpha": {"clip": 1e-6, "noise": 0.0, "delta": 1e-5}}
    note, other = noted(server)
    assert "alpha: less than a hundredth as long in 2 of 2 rounds" in other
    assert note.startswith("alpha clips its updates to a norm of 1e-06 and adds no noise: ε = ∞")
