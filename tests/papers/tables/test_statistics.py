"""The statistics of studies and claims, and the draws of test patients: by hand and beside other programs."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from suture.core.errors import DataError
from suture.learning.metrics import auroc, bootstrap_mean
from suture_papers.tables.claims import average, decision, verdict
from suture_papers.tables.resampling import DRAWS, TestScores, draw, weighted_ap
from suture_papers.tables.statistics import (
    clustered_delong,
    corrected_resampled,
    detectable,
    holm,
    over_studies,
    two_level,
)
from world import refused

FIVE = [0.02, 0.03, 0.01, 0.025, 0.02]


# Differences of runs


def test_the_corrected_test_by_hand() -> None:
    """Mean .021, s = .0074162; sqrt(1/5 + 1/4) s = .004975; t(.975, 4) = 2.77645: .021 ± .01381."""
    found = corrected_resampled(FIVE, test=1, train=4)
    assert found.mean == pytest.approx(0.021)
    assert (found.low, found.high) == pytest.approx((0.00719, 0.03481), abs=5e-6)
    assert found.p == pytest.approx(2 * stats.t.sf(0.021 / 0.0049749, 4), rel=1e-4)


def test_one_run_or_equal_runs_are_not_tested() -> None:
    assert math.isnan(corrected_resampled([], 1, 4).mean)
    one = corrected_resampled([0.1], 1, 4)
    assert one.mean == 0.1
    assert math.isnan(one.low)
    assert corrected_resampled([0.0, 0.0], 1, 4).p == 1
    assert math.isnan(corrected_resampled([0.1, 0.1], 1, 4).p)


def test_what_can_be_detected() -> None:
    """z(.975) + z(.8) = 2.8016 standard errors for many runs; 3.150 for ten (Cohen's d .996 for n = 10)."""
    assert detectable(1.0, 100_000) == pytest.approx(2.8016, abs=1e-3)
    assert detectable(1.0, 9) / math.sqrt(10) == pytest.approx(0.996, abs=1e-3)
    assert detectable(0.5, 9) == pytest.approx(detectable(1.0, 9) / 2)


def test_holm_by_hand() -> None:
    """.005 x 4, .01 x 3, .03 x 2; .04 x 1 is raised to .06."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    kept = holm([math.nan, 0.02])
    assert math.isnan(kept[0])
    assert kept[1] == 0.02


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_keeps_the_order_and_lowers_nothing(p: list[float]) -> None:
    adjusted = holm(p)
    assert all(a >= b for a, b in zip(adjusted, p, strict=True))
    assert all(adjusted[i] <= adjusted[j] for i, j in product(range(len(p)), repeat=2) if p[i] < p[j])


def test_the_bootstrap_has_both_levels() -> None:
    """Seeds that differ and patients that do not, the reverse, and both: 1.96 sd / sqrt(seeds) of the sum."""
    rng = np.random.default_rng(2)
    seeds = np.linspace(-1, 1, 40)[:, None] / np.std(np.linspace(-1, 1, 40))
    patients = rng.normal(size=(40, 200))
    reach = {}
    for name, draws in {
        "seeds": seeds + 0 * patients,
        "patients": patients,
        "both": seeds + patients,
    }.items():
        low, high = two_level(draws)
        reach[name] = (high - low) / 2
    unit = 1.96 / math.sqrt(40)
    assert reach["seeds"] == pytest.approx(unit, rel=0.1)
    assert reach["patients"] == pytest.approx(unit, rel=0.1)
    assert reach["both"] == pytest.approx(unit * math.sqrt(2), rel=0.1)
    for few in (np.empty((0, 5)), patients[:2], patients[:9]):
        assert all(math.isnan(bound) for bound in two_level(few))


def test_what_no_seed_or_no_draw_defines_is_left_out() -> None:
    assert two_level([[0.0, 1.0, math.nan]] * 10) == (-0.0, 1.0)
    assert all(math.isnan(bound) for bound in two_level([[0.0, 1.0]] * 9 + [[math.nan, math.nan]]))


def signed_rank_p(d: list[float]) -> float:
    """Wilcoxon's two-sided p over all signs; zeros are dropped."""
    ranks = stats.rankdata(np.abs([x for x in d if x]))
    positive = [x > 0 for x in d if x]
    sums = np.array([ranks @ signs for signs in product((0, 1), repeat=len(ranks))])
    seen = ranks @ positive
    return min(1.0, 2 * min(np.mean(sums <= seen), np.mean(sums >= seen)))


@pytest.mark.complete
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=8).filter(any))
def test_p_over_blocks_is_exact_also_with_ties_and_zeros(d: list[int]) -> None:
    effects = {"row": {str(i): [x / 100] for i, x in enumerate(d)}}
    assert over_studies(effects)["row"].p == pytest.approx(signed_rank_p(d))


def test_equal_up_to_rounding_is_a_tie() -> None:
    """.3 - .2 is not quite .1."""
    d = [0.1, 0.3 - 0.2, 0.2, 0.2, -0.1, 0.3, 1e-17]
    assert over_studies({"a": {str(i): [x] for i, x in enumerate(d)}})["a"].p == pytest.approx(0.125)


def test_six_blocks_that_agree_are_needed() -> None:
    """Six of one sign: p = 2 / 2^6; two studies of one block count once."""
    six = {f"block {i}": [0.1 * i, 0.1 * i] for i in range(1, 7)}
    found = over_studies({"a": six, "b": {"block 1": [0.0]}, "c": {}})
    assert found["a"].blocks == 6
    assert found["a"].p == pytest.approx(2 / 64)
    assert found["a"].holm == found["a"].p
    assert found["a"].median == pytest.approx(0.35)
    assert math.isnan(found["b"].p)
    assert math.isnan(found["c"].median)


def of_two(y: np.ndarray, a: np.ndarray, b: np.ndarray, patient: np.ndarray) -> tuple[float, float]:
    """The difference and its variance from all pairs of images, as Obuchowski writes them."""
    positive, negative = np.flatnonzero(y == 1), np.flatnonzero(y == 0)

    def psi(s: np.ndarray, i: int, j: int) -> float:
        return 1.0 if s[i] > s[j] else 0.5 if s[i] == s[j] else 0.0

    areas, v10, v01 = [], [], []
    for s in (a, b):
        pairs = np.array([[psi(s, i, j) for j in negative] for i in positive])
        areas.append(pairs.mean())
        v10.append(dict(zip(positive.tolist(), pairs.mean(axis=1), strict=True)))
        v01.append(dict(zip(negative.tolist(), pairs.mean(axis=0), strict=True)))
    m, n, people = len(positive), len(negative), sorted({*patient.tolist()})

    def summed(of: list[dict[int, float]], k: int, who: int) -> float:
        mine = [v - areas[k] for i, v in of[k].items() if patient[i] == who]
        return sum(mine)

    def covariance(r: int, s: int) -> float:
        i10, i01 = len({*patient[positive].tolist()}), len({*patient[negative].tolist()})
        s10 = i10 / ((i10 - 1) * m) * sum(summed(v10, r, w) * summed(v10, s, w) for w in people)
        s01 = i01 / ((i01 - 1) * n) * sum(summed(v01, r, w) * summed(v01, s, w) for w in people)
        s11 = [sum(summed(v10, p, w) * summed(v01, q, w) for w in people) for p, q in ((r, s), (s, r))]
        return s10 / m + s01 / n + sum(s11) * len(people) / (len(people) - 1) / (m * n)

    return areas[0] - areas[1], covariance(0, 0) + covariance(1, 1) - 2 * covariance(0, 1)


@pytest.mark.parametrize("images", [1, 3])
def test_delong_is_the_sum_over_all_pairs(images: int) -> None:
    rng = np.random.default_rng(images)
    patient = np.repeat(np.arange(12), images)
    y = (rng.random(len(patient)) < 0.4).astype(float)
    a, b = (np.round(rng.normal(size=len(y)) + k * y, 1) for k in (1.0, 0.4))
    found = clustered_delong(y, a, b, [str(p) for p in patient])
    difference, variance = of_two(y, a, b, patient)
    assert found.mean == pytest.approx(difference)
    assert found.mean == pytest.approx(auroc(y, a) - auroc(y, b))
    assert (found.high - found.low) / 2 == pytest.approx(1.959964 * math.sqrt(variance))
    assert found.p == pytest.approx(2 * stats.norm.sf(abs(difference) / math.sqrt(variance)))
    assert found.n == 12


def test_delong_by_hand() -> None:
    """Positives .9, .4, negatives .5, .1: V10 1 and 1/2, V01 1/2 and 1, so A = 3/4; S10 = S01 = 1/8, and the
    variance 1/8. The other model ranks all right, without variance."""
    found = clustered_delong([1, 1, 0, 0], [0.9, 0.4, 0.5, 0.1], [0.9, 0.8, 0.2, 0.1])
    assert found.mean == -0.25
    assert (found.high - found.low) / 2 == pytest.approx(1.959964 * math.sqrt(1 / 8))


def test_delong_leaves_unknown_labels_out_and_needs_two_patients_of_each_kind() -> None:
    known = clustered_delong([1, 1, 0, 0], [0.9, 0.4, 0.5, 0.1], [0.9, 0.8, 0.2, 0.1])
    more = clustered_delong(
        [1, 1, math.nan, 0, 0], [0.9, 0.4, 0.7, 0.5, 0.1], [0.9, 0.8, 0.3, 0.2, 0.1], list("abcde")
    )
    assert more == known
    with refused("two patients", by=DataError):
        clustered_delong([1, 1, 0, 0], [0.9, 0.4, 0.5, 0.1], [0.9, 0.8, 0.2, 0.1], list("aabc"))
    with refused("two patients", by=DataError):
        clustered_delong([1, 1], [0.9, 0.4], [0.9, 0.8])
    with refused("finite", by=DataError):
        clustered_delong([1, 0], [math.nan, 0.4], [0.9, 0.8])


# Claims


@pytest.mark.parametrize(
    ("low", "high", "more", "equal"),
    [
        (0.011, 0.05, "confirmed", "refuted"),
        (0.010, 0.05, "open", "open"),
        (-0.010, 0.010, "equivalent", "confirmed"),
        (-0.008, -0.002, "equivalent", "confirmed"),  # too small to matter
        (-0.030, -0.002, "refuted", "open"),
        (-0.030, -0.011, "refuted", "refuted"),
        (-0.030, 0.0, "open", "open"),
        (-0.030, 0.030, "open", "open"),
    ],
)
def test_each_verdict_by_hand(low: float, high: float, more: str, equal: str) -> None:
    assert verdict(low, high, 0.01, "more") == more
    assert verdict(low, high, 0.01, "equal") == equal


@given(st.floats(-1, 1), st.floats(0, 1), st.floats(0.001, 0.2))
def test_a_wider_interval_never_decides_what_a_narrower_one_leaves_open(
    middle: float, half: float, margin: float
) -> None:
    for expects in ("more", "equal"):
        if verdict(middle - half, middle + half, margin, expects) == "open":
            continue
        narrow = verdict(middle - half / 2, middle + half / 2, margin, expects)
        assert narrow != "open"


def test_three_differences_by_hand() -> None:
    """.02, .03, .04: mean .03, SD .01; t(.975, 2) = 4.302653: half the interval is 4.302653 x .01 / sqrt(3).

    The noncentral t of 2 degrees that exceeds 4.302653 with probability .8 has 5.6535: x .01 / sqrt(3).
    Half a SD is found four times in five with 34 pairs.
    """
    found = decision([0.02, 0.03, 0.04], 0.005, "more")
    assert (found.low, found.high) == pytest.approx((0.005159, 0.054841), abs=1e-6)
    assert found.detectable == pytest.approx(0.032640, abs=1e-6)
    assert (found.pairs, found.needed, found.verdict) == (3, 34, "confirmed")
    assert decision([0.02, 0.03, 0.04], 0.006, "more").verdict == "open"
    assert decision([0.02, 0.03, 0.04], 0.06, "more").verdict == "equivalent"
    assert decision([-0.02, -0.03, -0.04], 0.005, "more").verdict == "refuted"


def test_overlapping_splits_widen_the_interval() -> None:
    """30 tested on over 70 trained on: SD sqrt(1/3 + 3/7) = .0087287, times 4.302653."""
    found = decision([0.02, 0.03, 0.04], 0.005, "more", tested=30 / 70)
    assert found.high - found.difference == pytest.approx(0.0375563, abs=1e-6)
    assert (found.needed, found.verdict) == (None, "open")


@pytest.mark.parametrize("values", [[], [0.5], [0.5, 0.5]])
def test_few_runs_decide_nothing(values: list[float]) -> None:
    found = decision(values, 0.01, "more")
    assert (found.verdict, found.pairs) == ("open", len(values))
    assert math.isnan(found.low)


def test_equal_differences_have_no_power_to_tell_of() -> None:
    found = decision([0.5, 0.5, 0.5], 0.01, "more")
    assert (found.low, found.high, found.verdict) == (0.5, 0.5, "confirmed")
    assert math.isnan(found.detectable)


def test_studies_are_averaged_over_the_pairs_that_all_have() -> None:
    a = {("None", 1, 0): 0.1, ("None", 1, 1): 0.2, ("None", 1, 2): 0.3}
    b = {("None", 1, 0): 0.3, ("None", 1, 2): 0.5}
    assert average([a, b]) == pytest.approx([0.2, 0.4])
    assert average([a, {}]) == []


# Draws


def test_average_precision_by_hand() -> None:
    """Positives at ranks 1 and 3 of 4: (1/1 + 2/3) / 2; two draws of the second positive: 1/3 + 2/3 x 3/4."""
    truth, score = np.array([True, False, True, False]), np.array([0.9, 0.8, 0.7, 0.1])
    weights = np.array([[1.0, 1, 1, 1], [1, 1, 2, 1], [0, 1, 0, 1]])
    assert weighted_ap(weights, truth, score)[:2] == pytest.approx([5 / 6, 1 / 3 + 2 / 3 * 3 / 4])
    assert math.isnan(weighted_ap(weights, truth, score)[2])


@pytest.mark.complete
@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 4), st.integers(0, 3)), min_size=2, max_size=20).filter(
        lambda rows: any(y and w for y, _, w in rows)
    )
)
def test_it_is_that_of_scikit_learn(rows: list[tuple[bool, int, int]]) -> None:
    from sklearn.metrics import average_precision_score

    truth, score, weight = (np.array(column) for column in zip(*rows, strict=True))
    known = average_precision_score(truth, score, sample_weight=weight.astype(float))
    assert weighted_ap(weight[None].astype(float), truth, score.astype(float))[0] == pytest.approx(known)


def scores(seed: int = 0, n: int = 60) -> TestScores:
    rng = np.random.default_rng(seed)
    y = (rng.random((n, 3)) < 0.4).astype(float)
    patients = tuple(str(i // 2) for i in range(n))
    return TestScores(y, ("A", "B", "C"), "multilabel", patients, (rng.normal(size=(n, 3)) + y,))


def test_the_spread_of_the_draws_is_that_of_the_bootstrap_over_patients() -> None:
    of = scores()
    found = draw(of, "auroc", draws=2000)
    assert len(draw(of, "auroc")["draws"]) == DRAWS
    interval = bootstrap_mean(of.y, of.scores[0], of.patients, n=2000)
    assert np.quantile(found["draws"], [0.025, 0.975]) == pytest.approx(interval, abs=0.01)


def test_rows_with_one_test_set_have_the_same_draws() -> None:
    """A model that scores as another plus a constant has the same AUROC in every draw, not in others'."""
    of = scores()
    same, others = replace(of, scores=(of.scores[0] + 7,)), tuple(f"other {name}" for name in of.patients)
    assert draw(of, "auroc") == draw(same, "auroc")
    assert draw(of, "auroc")["draws"] != draw(replace(of, patients=others), "auroc")["draws"]


def test_a_patient_is_drawn_as_often_in_the_test_set_of_another_seed() -> None:
    """Whose order and other patients are different: those whom both have give the same draws."""
    of = scores()
    order = np.random.default_rng(1).permutation(len(of.y))
    turned = replace(
        of, y=of.y[order], scores=(of.scores[0][order],), patients=tuple(of.patients[i] for i in order)
    )
    assert draw(of, "auroc") == draw(turned, "auroc")
    unknown = replace(of, y=np.concatenate([of.y, np.full((4, 3), math.nan)]))
    more = replace(
        unknown,
        scores=(np.concatenate([of.scores[0], np.zeros((4, 3))]),),
        patients=(*of.patients, *"wxyz"),
    )
    assert draw(of, "auroc") == draw(more, "auroc")


def test_a_class_has_the_mean_of_the_models_that_know_it() -> None:
    of = scores()
    first, second = of.scores[0].copy(), -of.scores[0]
    first[:, 0] = math.nan  # only the second model knows A
    both = replace(of, scores=(first, second))
    a = 1 - draw(replace(of, labels=("A",), y=of.y[:, :1], scores=(of.scores[0][:, :1],)), "auroc")["value"]
    # Of B and C the two models have areas that add up to 1.
    assert draw(both, "auroc")["value"] == pytest.approx((a + 0.5 + 0.5) / 3, abs=1e-5)
    neither = replace(of, scores=(first,))
    assert draw(neither, "auroc")["value"] is None
    assert set(draw(neither, "auroc")["draws"]) == {None}


def test_balanced_accuracy_is_that_of_scikit_learn_and_for_multiclass_labels_only() -> None:
    from sklearn.metrics import balanced_accuracy_score

    rng = np.random.default_rng(3)
    truth = rng.integers(0, 3, 60)
    of = replace(scores(), y=np.eye(3)[truth], label_type="multiclass")
    known = balanced_accuracy_score(truth, of.scores[0].argmax(axis=1))
    assert draw(of, "balanced_accuracy")["value"] == pytest.approx(known, abs=1e-6)
    with refused("multiclass", by=DataError):
        draw(scores(), "balanced_accuracy")
