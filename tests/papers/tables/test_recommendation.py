"""What `suture recommend` computes: the numbers of a federation, the fit, and its intervals by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from suture.core.errors import DataError
from suture_papers.tables.recommendation import (
    ENOUGH,
    FEATURES,
    Expected,
    SiteFacts,
    Situation,
    fit,
    ranked,
    situation,
    stored_fit,
)

ALPHA = SiteFacts(100, {"Mass": 10, "Edema": 4}, (100.0, 3.0))
BETA = SiteFacts(300, {"Mass": 30}, (106.0, 5.0))


def test_the_numbers_of_a_federation_by_hand() -> None:
    found = situation({"alpha": ALPHA, "beta": BETA})

    assert found.hidden == pytest.approx(300 / 800)  # Edema at beta, of 400 images times two classes
    assert found.single == 0.5
    assert (found.sites, found.positives) == (2, (40 + 4) / 2)
    assert found.shift == pytest.approx(3 / math.sqrt((9 + 25) / 2))  # ±3 around 103
    assert found.vector[2:4] == [1.0, math.log2(23)]


def test_a_site_without_gray_levels_leaves_the_shift_unknown() -> None:
    assert situation({"alpha": ALPHA, "beta": replace(BETA, gray=None)}).shift is None


@pytest.mark.parametrize(
    ("sites", "lacking"),
    [
        ({"alpha": ALPHA}, r"no second site \(sites: alpha\); nothing can be recommended"),
        ({"alpha": SiteFacts(9, {}), "beta": SiteFacts(9, {})}, r"no classes \(sites: alpha, beta\)"),
        ({"alpha": replace(ALPHA, images=0), "beta": replace(BETA, images=0)}, "no training images"),
    ],
)
def test_what_cannot_be_compared_is_an_error_that_says_what_is_lacking(
    sites: dict[str, SiteFacts], lacking: str
) -> None:
    with pytest.raises(DataError, match=lacking):
        situation(sites)


def federations(n: int, seed: int = 1) -> list[Situation]:
    """Made-up ones."""
    rng = np.random.default_rng(seed)
    return [
        Situation(rng.uniform(0.1, 0.8), rng.uniform(), int(rng.integers(2, 9)), rng.uniform(5, 200), 0.1 * i)
        for i in range(n)
    ]


def test_a_linear_gain_is_found_and_predicted() -> None:
    of = federations(2000)
    noise = np.random.default_rng(2).normal(0, 0.01, len(of))
    by = fit(of, {"surgical": [0.1 * one.hidden + e for one, e in zip(of, noise, strict=True)]}, "made up")

    found = by.expected(Situation(0.5, 0.5, 4, 100, 5.0))["surgical"]

    assert found.gain == pytest.approx(0.05, abs=0.002)
    assert found.mean[0] < 0.05 < found.mean[1]
    assert found.told
    assert found.single[1] - found.single[0] == pytest.approx(2 * 1.96 * 0.01, rel=0.1)


def test_the_mean_of_a_constant_fit_is_that_of_a_mean() -> None:
    """With equal federations z is 0: b = (mean, 0, ...), h = 1/n."""
    of = [Situation(0.5, 0.5, 4, 100, 1.0)] * 8 + [Situation(0.4, 0.4, 2, 50, 2.0)] * 8
    gains = [0.01, 0.03] * 8
    by = fit(of, {"m": gains}, "made up")
    s = math.sqrt(16 * 0.01**2 / (16 - 6))

    middle = by.methods["m"].expected(np.array([1.0, 0, 0, 0, 0, 0]))

    assert middle.gain == pytest.approx(0.02)
    assert middle.mean[1] - 0.02 == pytest.approx(2.2281 * s / 4, rel=1e-4)  # t of 10 degrees


@given(st.floats(1.0, 4.0))
def test_intervals_grow_with_the_distance_from_the_fit(factor: float) -> None:
    of = federations(60)
    by = fit(of, {"m": [one.hidden for one in of]}, "made up")
    by = replace(by, methods={"m": replace(by.methods["m"], residual=0.02)})
    x = np.array([1.0, *[1.5] * len(FEATURES)])

    near, far = by.methods["m"].expected(x), by.methods["m"].expected(np.array([1.0, *factor * x[1:]]))

    assert far.mean[1] - far.mean[0] >= near.mean[1] - near.mean[0]
    assert far.single[1] - far.single[0] >= far.mean[1] - far.mean[0]


def test_a_method_that_was_not_run_somewhere_is_fitted_on_the_others() -> None:
    of = federations(40)
    values = [0.02 if i % 2 else math.nan for i in range(40)]

    assert fit(of, {"m": values}, "made up").methods["m"].n == 20


def test_too_few_federations_are_refused() -> None:
    with pytest.raises(DataError, match=f"m was run in 5 federations; a fit needs {ENOUGH}"):
        fit(federations(5), {"m": [0.0] * 5}, "made up")


def test_what_lies_outside_is_named_with_its_distance() -> None:
    of = [
        Situation(hidden, 0.1 + hidden, 2 + i % 4, 20 + i, 0.1 * i)
        for i, hidden in enumerate(np.linspace(0.2, 0.6, 20))
    ]
    by = fit(of, {"m": [0.0] * 20}, "made up")

    assert by.outside(of[3]) == {}
    assert by.outside(replace(of[3], hidden=0.8)) == {"hidden": pytest.approx(0.5)}
    assert by.outside(replace(of[3], shift=None)) == {}


def test_two_are_named_and_a_third_if_its_gain_is_told() -> None:
    def one(gain: float, reach: float) -> Expected:
        return Expected(gain, (gain - reach, gain + reach), (gain - 1, gain + 1))

    expected = {"a": one(0.01, 0.02), "b": one(0.03, 0.01), "c": one(0.005, 0.001), "d": one(-0.02, 0.01)}

    assert ranked(expected, list(expected)) == ["b", "a", "c"]
    assert ranked(expected, ["a", "d"]) == ["a", "d"]


def test_the_fit_of_the_package_can_be_read_and_is_of_measured_federations() -> None:
    by = stored_fit()

    assert len(by.center) == len(by.scale) == len(FEATURES)
    assert "surgical" in by.methods
    assert all(one.n >= ENOUGH and one.residual > 0 for one in by.methods.values())
    assert all(low < high for low, high in zip(by.low, by.high, strict=True))
