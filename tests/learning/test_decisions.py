"""From counts of scores to decisions: calibration, thresholds, curves, and what of decisions may leave."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import expit, logit

from hypothesis_profiles import examples
from suture.core.labels import LabelSet
from suture.core.privacy import PrivacyConfig
from suture.data.batch import Samples
from suture.learning.calibration import (
    at_prevalence,
    brier,
    calibrate,
    expected_calibration_error,
    fit,
    log_odds,
)
from suture.learning.decisions import decide, decided_classes, operating, score_counts
from suture.learning.diagrams import diagrams
from suture.learning.metrics import Curves, auroc, histogram
from suture.learning.operating_points import thresholds
from suture.protocol.decisions import (
    CELLS,
    GRID,
    JOINED,
    Calibration,
    Decided,
    Decision,
    DecisionSettings,
    Operating,
    Rule,
)
from suture.protocol.egress import may_be
from suture_results.actions import exact_thresholds
from suture_results.decision_section import predictive_values


def counts_of(scores: Any, least: int = 0) -> np.ndarray:
    found = histogram(np.asarray(scores, dtype=float), np.arange(len(scores)), least)
    assert found is not None
    return found


def curves(positives: Any, negatives: Any, least: int = 0) -> Curves:
    return Curves.of([(counts_of(positives, least), counts_of(negatives, least))])


# Calibration


def drawn(n: int, slope: float, intercept: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Scores whose true probability is expit(slope * score + intercept)."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(-1, 2, n)
    return scores, (rng.random(n) < expit(slope * scores + intercept)).astype(float)


def fitted(scores: np.ndarray, y: np.ndarray, kind: Any = "platt") -> Calibration:
    found = fit(curves(scores[y == 1], scores[y == 0]), kind)
    assert found is not None
    return found


def test_platts_line_is_found_again() -> None:
    found = fitted(*drawn(200_000, 0.6, -0.8))
    assert (found.slope, found.intercept) == pytest.approx((0.6, -0.8), abs=0.02)
    cooled = fitted(*drawn(200_000, 0.5, 0.0), "temperature")
    assert cooled.intercept == 0
    assert cooled.slope == pytest.approx(0.5, abs=0.02)


def test_the_line_is_that_of_the_largest_likelihood() -> None:
    """Moving it in any direction makes the counts less likely."""
    scores, y = drawn(3_000, 1.4, 0.5)
    centres = (np.floor(scores * 4) + 0.5) / 4
    found = fitted(scores, y)
    ones, zeros = (y == 1).sum(), (y == 0).sum()
    target = np.where(y == 1, (ones + 1) / (ones + 2), 1 / (zeros + 2))

    def loss(slope: float, intercept: float) -> float:
        p = expit(slope * centres + intercept)
        return float(-(target * np.log(p) + (1 - target) * np.log1p(-p)).mean())

    best = loss(found.slope, found.intercept)
    for step in ((1e-2, 0), (-1e-2, 0), (0, 1e-2), (0, -1e-2)):
        assert best < loss(found.slope + step[0], found.intercept + step[1])


def test_what_is_apart_stays_finite_and_what_is_no_better_than_chance_has_none() -> None:
    scores = np.repeat([-3.0, 3.0], 20)
    assert 0 < fitted(scores, np.repeat([0.0, 1.0], 20)).slope < 10
    assert fit(curves(scores[:20], scores[20:]), "platt") is None
    assert fit(curves([0.0] * 20, [0.0] * 20), "platt") is None
    with pytest.raises(ValueError, match="slope"):
        Calibration(slope=0.0)


@pytest.mark.complete
@given(st.integers(0, 2**32 - 1), st.sampled_from(["platt", "temperature"]))
def test_a_line_changes_no_auroc(seed: int, kind: Any) -> None:
    scores, y = drawn(400, 0.7, -0.5, seed)
    if found := fit(curves(scores[y == 1], scores[y == 0]), kind):
        p = expit(scores)
        assert auroc(y, calibrate(p, found)) == pytest.approx(auroc(y, p), abs=1e-12)


def test_errors_by_hand() -> None:
    """Bins [.0, .1) with .05 and no positive, [.9, 1] with .9 and 1.0 and one positive of two."""
    from sklearn.metrics import brier_score_loss

    y, p = np.array([0.0, 0.0, 1.0]), np.array([0.05, 0.9, 1.0])
    assert expected_calibration_error(y, p) == pytest.approx((0.05 + abs(1 - 1.9)) / 3)
    assert brier(y, p) == pytest.approx((0.05**2 + 0.9**2) / 3) == pytest.approx(brier_score_loss(y, p))
    assert expected_calibration_error(y[:0], p[:0]) is None
    assert brier(y[:0], p[:0]) is None


def test_another_prevalence_by_hand() -> None:
    """Odds of 1 at a prevalence of 1/2 are odds of 1/9 where one of ten is positive."""
    assert at_prevalence(np.array([0.5]), 0.5, 0.1)[0] == pytest.approx(0.1)
    assert at_prevalence(np.array([0.2, 0.9]), 0.3, 0.3) == pytest.approx([0.2, 0.9])
    assert np.isfinite(log_odds(np.array([0.0, 1.0]))).all()
    assert log_odds(np.array([0.3]))[0] == pytest.approx(logit(0.3))


# Thresholds


def test_each_rule_by_hand() -> None:
    """Positives at 0.1, 1.1, ..., 9.1; negatives at -4.9, ..., 4.1, each in the first half of its cell.

    Below x.0 lie exactly the images of the whole numbers before it: a sensitivity of .8 is had at 2, a
    specificity of .7 at 2. Sensitivity + specificity is 1.5 from 0 to 5. A missed positive costs four false
    alarms: at 0 the cost is 5 alarms, at 1 one missed positive and 4 alarms.
    """
    positives, negatives = np.arange(10) + 0.1, np.arange(10) - 4.9
    found = thresholds(curves(positives, negatives), sensitivity=0.8, specificity=0.7, cost=4.0)
    odds = {rule: float(log_odds(np.array(p))) for rule, p in found.items()}
    assert odds["sensitivity"] == pytest.approx(1.125, abs=1e-6)  # nobody lies between 1.125 and 2
    assert odds["specificity"] == pytest.approx(1.125, abs=1e-6)
    assert odds["youden"] == pytest.approx(-0.875, abs=1e-9)  # five negatives lie below it
    assert odds["cost"] == pytest.approx(-0.875, abs=1e-9)


@pytest.mark.parametrize(("cost", "counted", "exact"), [(2.0, 0.125, 0.65), (4.0, -4.875, 0.2)])
def test_the_least_cost_by_hand_where_positives_are_rare(cost: float, counted: float, exact: float) -> None:
    """Two positives among ten: one beyond the three negatives between them, one below these, five far below.

    Above the three one positive is missed, at the price of `cost` false alarms; below them there are three.
    """
    positives, negatives = np.array([2.1, -2.9]), np.array([0.1] * 3 + [-4.9] * 5)
    odds = log_odds(np.array(thresholds(curves(positives, negatives), 0.9, 0.9, cost)["cost"]))
    assert float(odds) == pytest.approx(counted, abs=1e-6)
    y, p = np.array([1.0] * 2 + [0.0] * 8), np.array([0.8, 0.3] + [0.5] * 3 + [0.1] * 5)
    assert exact_thresholds(y, p, 0.9, 0.9, cost)["cost"] == pytest.approx(exact)


@given(st.integers(0, 2**32 - 1), st.floats(0.6, 0.95), st.sampled_from([0, 5]))
def test_a_target_is_met_within_a_cell(seed: int, target: float, least: int) -> None:
    """The share at the threshold differs from the target by no more than the images of one joined cell."""
    rng = np.random.default_rng(seed)
    positives, negatives = rng.normal(0, 1.5, 300), rng.normal(-2, 1.5, 900)
    found = thresholds(curves(positives, negatives, least), target, target, 1.0)
    for rule, scores, right in (
        ("sensitivity", positives, lambda p, t: p >= t),
        ("specificity", negatives, lambda p, t: p < t),
    ):
        share = right(expit(scores), found[rule]).mean()  # type: ignore[index]
        assert abs(share - target) < 0.06, (rule, share)


def test_what_the_counts_do_not_show_has_no_threshold() -> None:
    """Of 40 positives, four lie below a sensitivity of .9; with five patients a cell, nobody knows where."""
    rng = np.random.default_rng(0)
    positives, negatives = rng.normal(0, 1, 40), rng.normal(-2, 1, 400)
    assert "sensitivity" not in thresholds(curves(positives, negatives, 5), 0.9, 0.9, 1.0)
    assert "sensitivity" in thresholds(curves(positives, negatives, 5), 0.8, 0.9, 1.0)
    assert "sensitivity" in thresholds(curves(positives, negatives, 0), 0.9, 0.9, 1.0)
    # Nor where those of seven lie: one cell, of which no rule knows more than its number of images.
    assert thresholds(curves(positives[:7], negatives, 5), 0.9, 0.9, 1.0).keys() == {"specificity"}


@given(st.integers(0, 2**32 - 1), st.integers(5, 60), st.floats(0.1, 100))
def test_no_threshold_lies_beyond_the_edges_of_the_counts(seed: int, n: int, cost: float) -> None:
    rng = np.random.default_rng(seed)
    found = curves(rng.normal(0, 2, n), rng.normal(-2, 2, 2 * n), 5)
    known = [found.positives.known, found.negatives.known]
    low, high = min(k[0] for k in known), max(k[1] for k in known)
    for rule, p in thresholds(found, 0.9, 0.9, cost).items():
        assert low - 1e-6 <= log_odds(np.array(p)) <= high + 1e-6, rule


def test_predictive_values_by_hand() -> None:
    """Of 1,000 patients 100 are ill: 90 found, 10 missed, 180 false alarms, 720 cleared."""
    assert predictive_values(0.9, 0.8, 0.1) == pytest.approx((90 / 270, 720 / 730))
    assert math.isnan(predictive_values(0.0, 1.0, 0.1)[0])


# The curves of a class


def decided(thresholds: dict[Rule, float], own: dict[Rule, float] | None = None) -> Decision:
    """By thresholds of all sites, and of one, uncalibrated."""
    return Decision(own and Operating(own, None, 0.5), Operating(thresholds, None, 0.5))


def test_four_images_by_hand() -> None:
    found = diagrams(curves([-1.03, 1.03], [-2.03, 0.53]), decided({"youden": 0.5}), "youden")
    # Growing thresholds pass -2.03 (a negative), -1.03 (a positive), 0.53 (a negative), 1.03 (a positive).
    assert found
    assert found.rates == ((1, 0), (1, 0.5), (0.5, 0.5), (0.5, 1), (0, 1), (0, 1))
    assert found.prevalence == 0.5
    # At a probability of .5 one of each lies above.
    assert found.chosen == (0.5, 0.5)
    assert [(share, n) for _, share, n in found.reliability] == [(0, 1), (1, 1), (0, 1), (1, 1)]
    # 1 / (1 + exp(2.03)) = .116, and so on; a cell is 1/16 of log-odds wide.
    assert [p for p, _, _ in found.reliability] == pytest.approx([0.116, 0.263, 0.629, 0.737], abs=0.005)


def test_reliability_is_of_calibrated_probabilities() -> None:
    shifted = Decision(None, Operating({}, Calibration(1.0, -3.0), 0.5))
    found = diagrams(curves([0.0, 0.01], [0.02, 0.03]), shifted, "youden")
    assert found
    assert found.reliability == ((pytest.approx(1 / (1 + np.exp(3)), abs=0.003), 0.5, 4),)
    assert found.chosen is None


@pytest.mark.complete
@given(*[st.lists(st.floats(-8, 8), min_size=1, max_size=30)] * 2)
def test_curves_fall_and_bins_hold_every_image(positives: list[float], negatives: list[float]) -> None:
    found = diagrams(curves(positives, negatives), decided({"youden": 0.3}), "youden")
    assert found
    sensitivity, specificity = np.array(found.rates).T
    assert (np.diff(sensitivity) <= 0).all()
    assert (np.diff(specificity) >= 0).all()
    assert sum(n for *_, n in found.reliability) == len(positives) + len(negatives)


def test_a_site_has_its_own_point_and_that_of_all_sites() -> None:
    found = diagrams(
        curves([-1.03, 1.03], [-2.03, 0.53, -3.0]), decided({"youden": 0.5}, {"youden": 0.1}), "youden"
    )
    assert found
    # log(.1 / .9) = -2.2: all but one negative lie above.
    assert (found.chosen, found.own, found.images) == ((0.5, 0.6667), (1, 0.3333), (2, 3))


def test_counts_of_a_single_cell_show_no_curve() -> None:
    """Seven positives and a `min_count` of 5 are one cell: nothing is known of where they lie."""
    few, many = np.linspace(-1, 1, 7).tolist(), np.linspace(-3, 1, 40).tolist()
    assert diagrams(curves(few, many, 5), decided({"youden": 0.5}), "youden") is None
    assert diagrams(curves(many, few, 5), decided({"youden": 0.5}), "youden") is None
    assert diagrams(curves(many, many, 5), decided({"youden": 0.5}), "youden")


def shares_above(counts: np.ndarray) -> list[float]:
    """The share of the images above each edge, one edge after the other: within a cell they lie evenly."""
    ends = [k for k, n in enumerate(counts) if n != JOINED]
    at = [float(GRID[k]) for k in ends[:-1]]
    before = at[0] - (at[1] - at[0] if len(at) > 1 else 1 / 16)
    after = at[-1] + (at[-1] - at[-2] if len(at) > 1 else 1 / 16)
    places, total, found = [before, *at, after], int(counts[ends].sum()), []
    for edge in GRID:
        below = 0.0
        for low, high, k in zip(places[:-1], places[1:], ends, strict=True):
            below += counts[k] * min(max((edge - low) / (high - low), 0.0), 1.0)
        found.append(1 - below / total)
    return found


@pytest.mark.complete
@examples(30)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0, 3, 5]), st.integers(12, 60), st.integers(20, 90))
def test_a_drawn_point_lies_on_the_curve_of_the_counts(seed: int, least: int, ones: int, zeros: int) -> None:
    rng = np.random.default_rng(seed)
    counts = [counts_of(rng.normal(mean, 2, n), least) for mean, n in ((1, ones), (-1, zeros))]
    found = diagrams(Curves.of([(counts[0], counts[1])]), decided({"youden": 0.4}), "youden")
    assert found
    sensitivity, alarms = (np.array(shares_above(row)) for row in counts)
    for sens, spec in found.rates[1:-1]:
        assert np.maximum(np.abs(sensitivity - sens), np.abs(1 - alarms - spec)).min() <= 1e-4
    assert (found.rates[0], found.rates[-1]) == ((1, 0), (0, 1))
    assert found.chosen == pytest.approx(
        [np.interp(np.log(0.4 / 0.6), GRID, rate) for rate in (sensitivity, 1 - alarms)], abs=1e-4
    )


SITES = st.tuples(st.integers(0, 2**32 - 1), st.integers(5, 60), st.integers(5, 90))


@pytest.mark.complete
@given(st.lists(SITES, min_size=1, max_size=4), st.sampled_from([0, 5]))
def test_the_sites_add_up_to_the_curve_of_all(sites: list[tuple[int, int, int]], least: int) -> None:
    """At each edge the images called positive at the sites are those of the whole."""
    pairs = []
    for seed, ones, zeros in sites:
        rng = np.random.default_rng(seed)
        pairs.append((counts_of(rng.normal(1, 2, ones), least), counts_of(rng.normal(-1, 2, zeros), least)))
    whole, parts = Curves.of(pairs), [Curves.of([pair]) for pair in pairs]
    for kind in ("positives", "negatives"):
        below = np.sum([getattr(one, kind).below for one in parts], axis=0)
        np.testing.assert_allclose(below, getattr(whole, kind).below, atol=1e-9)


# Decisions of a site's images


OPEN = PrivacyConfig.of_public_data("own")


def point(threshold: float, **other: object) -> Operating:
    values = {"calibration": None, "prevalence": 0.5} | other
    return Operating(thresholds={"sensitivity": threshold}, **values)  # type: ignore[arg-type]


def test_figures_by_hand() -> None:
    """Positives .2, .6, .9, negatives .1, .4 and .7; one unknown."""
    y = np.array([1, 1, 1, 0, 0, 0, np.nan])
    p = np.array([0.2, 0.6, 0.9, 0.1, 0.4, 0.7, 0.99])
    found = decide(y, p, Decision(point(0.15), point(0.65)), "sensitivity")
    assert found.own == Decided(1.0, 1 / 3)
    assert found.pooled == Decided(1 / 3, 2 / 3)
    assert found.half == Decided(2 / 3, 2 / 3)
    assert found.ece[1] is None
    assert found.brier[0] == pytest.approx((0.64 + 0.16 + 0.01 + 0.01 + 0.16 + 0.49) / 6)


def test_the_sites_own_map_comes_before_that_of_all_sites() -> None:
    y, p = np.array([1.0, 0.0]), np.array([0.5, 0.5])
    own, pooled = Calibration(1.0, 1.0), Calibration(1.0, -1.0)
    both = Decision(point(0.5, calibration=own), point(0.5, calibration=pooled))
    alone = Decision(None, point(0.5, calibration=pooled))
    assert decide(y, p, both, "sensitivity").brier[1] == pytest.approx(
        decide(y[::-1], p, alone, "sensitivity").brier[1]
    )
    assert decide(y, p, alone, "sensitivity").own is None
    assert decide(y, p, alone, "youden").pooled is None  # no such threshold


def samples(n: int, seed: int = 0) -> tuple[Samples, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, 2, generator=g)
    y = (torch.rand(n, 2, generator=g) < torch.sigmoid(logits)).float()
    y[:5, 0] = torch.nan
    return Samples({}, y, tuple(f"p{i // 2}" for i in range(n))), logits


LABELS = LabelSet(("Edema", "Mass"))


def test_counts_are_of_known_labels_of_the_classes_asked_for() -> None:
    part, logits = samples(100)
    names, counts = score_counts(part, logits, LABELS, ["Mass", "Edema"], OPEN)
    assert names == ("Mass", "Edema")
    assert {k: tuple(t.shape) for k, t in counts.items()} == dict.fromkeys(
        ("positives", "negatives"), (2, CELLS)
    )
    assert counts["positives"].sum(dim=1).tolist() == (part.y == 1).sum(dim=0).flip(0).tolist()
    assert (counts["positives"] + counts["negatives"]).sum(dim=1).tolist() == [100, 95]
    # A site with few patients says nothing.
    names, counts = score_counts(*samples(12), LABELS, ["Mass"], PrivacyConfig())
    assert (names, tuple(counts["positives"].shape)) == ((), (0, CELLS))


def test_a_multiclass_score_is_that_of_its_probability() -> None:
    part, logits = samples(200)
    y = torch.nn.functional.one_hot(logits.argmax(dim=1), 2).float()
    labels = LabelSet(("a", "b"), "multiclass")
    part = Samples({}, y, part.patients)
    _, counts = score_counts(part, logits, labels, ["a"], OPEN)
    curves = Curves.of([(counts["positives"][0].numpy(), counts["negatives"][0].numpy())])
    assert curves.positives.quantile(0.0) is not None
    assert curves.sensitivity()[192] == 1.0
    assert curves.specificity()[192] == 1.0


def test_figures_that_leave_lie_on_grids() -> None:
    part, logits = samples(400)
    limits = PrivacyConfig()
    decision = Decision(point(0.37, calibration=Calibration(0.9, 0.1)), point(0.41))
    found = decided_classes(part, logits, LABELS, {"Mass": decision}, "sensitivity", limits)["Mass"]
    exact = decided_classes(part, logits, LABELS, {"Mass": decision}, "sensitivity", OPEN)["Mass"]
    assert found.own is not None
    assert exact.own is not None
    for one, other in (
        (found.own.sensitivity, exact.own.sensitivity),
        (found.half.specificity, exact.half.specificity),
        (found.brier[1], exact.brier[1]),
        (found.ece[0], exact.ece[0]),
    ):
        assert one is not None
        assert other is not None
        assert may_be(one, 1 / 400)
        assert abs(one - other) <= 0.025


def test_settings_fit_an_operating_point() -> None:
    part, logits = samples(2_000)
    _, counts = score_counts(part, logits, LABELS, ["Mass"], OPEN)
    curves = Curves.of([(counts["positives"][0].numpy(), counts["negatives"][0].numpy())])
    found = operating(curves, DecisionSettings(sensitivity=0.8))
    assert found is not None
    assert found.calibration is not None
    p, y = torch.sigmoid(logits[:, 1]).numpy(), part.y[:, 1].numpy()
    assert (p[y == 1] >= found.thresholds["sensitivity"]).mean() == pytest.approx(0.8, abs=0.01)
    assert (p[y == 0] < found.thresholds["specificity"]).mean() == pytest.approx(0.9, abs=0.01)
    assert found.calibration.slope == pytest.approx(1.0, abs=0.15)
    assert set(found.thresholds) == {"sensitivity", "specificity", "youden", "cost"}
