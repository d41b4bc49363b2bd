"""The ε of mechanisms together."""

from __future__ import annotations

import math
import random

import pytest

from suture.privacy.differential_privacy import MULTIPLIERS, Mechanism, compose, epsilon, multiplier_for


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
    assert epsilon([Mechanism(1.0)], 1e-5) == 4.38
    assert epsilon([Mechanism(1e-300)], 1e-5) is None
    assert epsilon([Mechanism(0.0), Mechanism(1.0, 0.1, 5)], 1e-5) is None
    assert epsilon([Mechanism(0.0, steps=0)], 1e-5) == 0


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
