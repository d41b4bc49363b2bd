"""Clipping and noise of what a site sends, and the ε of it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from parties import METHOD, limited, record

from hypothesis_profiles import examples
from noted import noted
from suture.core.errors import ConfigError
from suture.learning.dp_sgd import gaussian
from suture.learning.steps import NonFiniteLoss
from suture.privacy.differential_privacy import (
    MULTIPLIERS,
    Mechanism,
    Noise,
    compose,
    multiplier_for,
    rounded_up,
)
from suture.privacy.differential_privacy import epsilon as epsilon_of
from suture.protocol.messages import Spent, TaskData, Update, ones
from suture_results.notes import describe_spent
from world import refused


def epsilon(multipliers: list[float], delta: float) -> float | None:
    """The ε of updates with noise of so many times their clip."""
    return epsilon_of((Mechanism(z / 2) for z in multipliers), delta)


def update(w: list[float], row: list[float], kind: Any = "weights") -> Update:
    return Update(1, ("A",), {"w": torch.tensor(w)}, {"head": torch.tensor([row])}, ones(("A",)), kind=kind)


SENT = TaskData("train", 1, 0, shared={"w": torch.tensor([1.0, 1.0])}, head={"head": torch.tensor([[0.0]])})


def test_a_change_or_gradient_is_clipped_as_one_vector() -> None:
    """Changes (3, 0) and 4 have norm 5; to a norm of 1 they become (.6, 0) and .8."""
    clipped = Noise(1.0).apply(update([4.0, 1.0], [4.0]), SENT)
    assert clipped.shared["w"].tolist() == pytest.approx([1.6, 1.0])
    assert clipped.head["head"].item() == pytest.approx(0.8)
    gradient = Noise(1.0).apply(update([3.0, 0.0], [4.0], "gradient"), SENT)
    assert gradient.shared["w"].tolist() == pytest.approx([0.6, 0.0])
    small = update([1.1, 1.0], [0.1])
    assert torch.equal(Noise(1.0).apply(small, SENT).shared["w"], small.shared["w"])


def test_what_cannot_be_clipped_or_is_not_covered_does_not_leave() -> None:
    for value in (math.nan, math.inf):
        with refused(by=NonFiniteLoss):
            Noise(1.0, 1.0).apply(update([value, 1.0], [4.0]), SENT)
    counted = Update(1, (), {"n": torch.tensor(7)}, {}, ones(()))
    with refused("n", by=ConfigError):
        Noise(1.0, 1.0).apply(counted, TaskData("train", shared={"n": torch.tensor(3)}))
    with refused("seen", by=ConfigError):
        Noise(1.0).apply(replace(update([1.0, 1.0], [0.0]), channels={"seen": torch.ones(1)}), SENT)


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


@given(st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=2), st.floats(0.1, 10))
def test_no_change_is_longer_than_the_clip(w: list[float], clip: float) -> None:
    done = Noise(clip).apply(update(w, [5.0]), SENT)
    change = torch.cat([done.shared["w"] - SENT.shared["w"], done.head["head"][0]])
    assert change.norm().item() <= clip * (1 + 1e-4) + 1e-4


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


@pytest.mark.parametrize("seed", [1, 2])
def test_a_history_has_the_epsilon_of_opacus_and_the_looser_bound(seed: int) -> None:
    from opacus.accountants import PRVAccountant, RDPAccountant

    draw = random.Random(seed)
    history = [(draw.uniform(1, 3), draw.uniform(0.01, 0.1), draw.randint(1, 40)) for _ in range(2)]
    tight, loose = PRVAccountant(), RDPAccountant()
    tight.history, loose.history = list(history), list(history)
    found = compose([Mechanism(*one) for one in history], 1e-5)
    assert found == pytest.approx(tight.get_epsilon(1e-5), abs=1e-6)
    assert found is not None
    assert found <= loose.get_epsilon(1e-5)


def test_whole_mechanisms_compose_as_one() -> None:
    """Four of noise 2 are one of noise 1; ε of N(0, 1) and N(1, 1) at δ = 1e-5 is 4.38 (Balle & Wang)."""
    assert compose([Mechanism(2.0, steps=4)], 1e-5) == pytest.approx(compose([Mechanism(1.0)], 1e-5))
    assert epsilon_of([Mechanism(1.0)], 1e-5) == 4.38
    assert epsilon_of([Mechanism(1e-300)], 1e-5) is None
    assert epsilon_of([Mechanism(0.0), Mechanism(1.0, 0.1, 5)], 1e-5) is None
    assert epsilon_of([Mechanism(0.0, steps=0)], 1e-5) == 0


def test_sampling_protects_and_every_step_and_answer_counts() -> None:
    few = compose([Mechanism(1.0, 0.05, 10)], 1e-5)
    more = compose([Mechanism(1.0, 0.05, 10), Mechanism(1.0, 0.05, 20)], 1e-5)
    with_answer = compose([Mechanism(1.0, 0.05, 10), Mechanism(4.0)], 1e-5)
    whole = compose([Mechanism(1.0, 1.0, 10)], 1e-5)
    assert few is not None
    assert more is not None
    assert with_answer is not None
    assert whole is not None
    assert few < with_answer < whole
    assert few < more < whole


def test_what_would_fill_the_memory_has_a_looser_bound() -> None:
    found = compose([Mechanism(0.3, 0.5, 2_000)], 1e-5)
    assert found is not None
    assert 1_000 < found < math.inf


@pytest.mark.complete
def test_the_noise_for_an_epsilon_is_the_least() -> None:
    steps, count = [Mechanism(0.0, 0.05, 20)], Mechanism(10.0)
    found = multiplier_for(4.0, 1e-5, steps, count)
    total = compose([Mechanism(found, 0.05, 20), count], 1e-5)
    assert total is not None
    assert 3.9 <= total <= 4.0
    assert multiplier_for(1e-3, 1e-5, [Mechanism(0.0, 1.0, 10**6)], count) == math.inf
    assert multiplier_for(60.0, 1e-5, [Mechanism(0.0, 0.01, 1)], count) == MULTIPLIERS[0]


# What a run says


def test_the_report_says_what_the_sites_state() -> None:
    protection = {
        site: {"clip": 3.0, "noise": noise, "delta": 1e-5}
        for site, noise in (("a", 2.0), ("b", 0.0), ("c", 1.0))
    }
    noisy, clipped, silent = describe_spent(
        protection, {"a": Spent(23.4, 15, 0, 2, 40, 77), "b": Spent(None, 15, 4, 1, 0, 30)}
    )
    for fact in ("ε ≤ 23.4 at δ = 1e-05", "15 updates in 2 experiments", "40 figures", "77 other"):
        assert fact in noisy
    assert "ε = ∞" in clipped
    assert "4 of its 15 updates" in clipped
    assert "ε ≤" not in silent


@pytest.mark.complete
def test_a_federation_whose_site_protects_itself(tiny: Any) -> None:
    server = limited(tiny(METHOD), "alpha", clip=1e-6).run()
    protection = {"alpha": {"clip": 1e-6, "noise": 0.0, "delta": 1e-5}}
    assert record(server, "run.json")["protection"] == protection
    note, other = noted(server)
    assert "alpha: less than a hundredth as long in 2 of 2 rounds" in other
    assert "ε = ∞" in note
