"""Figures of scores: by hand, against scikit-learn, scipy and loops; and the counts of scores of a site."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from hypothesis_profiles import examples
from suture.core.errors import DataError
from suture.learning.metrics import (
    Curve,
    Curves,
    Estimate,
    auroc,
    bootstrap_auroc,
    bootstrap_mean,
    class_recalls,
    difference,
    histogram,
    mean_defined,
    multiclass_metrics,
    score_classes,
    wilson,
    youden,
)
from suture.protocol.decisions import CELLS, GRID, JOINED
from suture.protocol.egress import near
from suture.protocol.messages import ClassScore
from suture_results.decision_section import predictive, predictive_values
from world import refused

Y = [0, 0, 1, 1, 0, 1]
S = [0.1, 0.4, 0.35, 0.8, 0.2, 0.7]
NAN = math.nan


# A few distinct scores, so that ties are the rule.
PAIRS = st.lists(st.tuples(st.sampled_from([0, 1]), st.integers(0, 5)), min_size=2, max_size=40)
BOTH = PAIRS.filter(lambda pairs: len({y for y, _ in pairs}) == 2)


def test_auroc_by_hand() -> None:
    assert auroc(Y, S) == pytest.approx(8 / 9)  # of 9 pairs 8 are in order; 0.35 lies below 0.4
    assert auroc([0, 1], [0.5, 0.5]) == 0.5  # a tie is half a pair
    assert auroc([0, 0, 1], [0.1, 0.5, 0.5]) == 0.75
    assert auroc([NAN, *Y, NAN], [0.99, *S, 0.0]) == auroc(Y, S)
    assert auroc([0, 1, NAN], [0.1, 0.2, NAN]) == 1.0  # nor is the score of an unknown label looked at
    assert mean_defined([0.5, None, 1.0, NAN]) == 0.75
    assert mean_defined([None, NAN]) is None


@pytest.mark.complete
@given(BOTH)
def test_auroc_is_scikit_learns(pairs: list[tuple[int, int]]) -> None:
    from sklearn.metrics import roc_auc_score

    y, s = zip(*pairs, strict=True)
    assert auroc(y, s) == pytest.approx(roc_auc_score(y, s), abs=1e-12)
    assert auroc(y, [-x for x in s]) == pytest.approx(1 - auroc(y, s), abs=1e-12)


@pytest.mark.parametrize("y", [[1, 1], [0, 0], [NAN, NAN], [1, NAN]])
def test_one_kind_of_label_defines_nothing(y: list[float]) -> None:
    assert math.isnan(auroc(y, [0.1, 0.2]))
    assert all(math.isnan(v) for v in bootstrap_auroc(y, [0.1, 0.2]))
    point = youden(y, [0.1, 0.2])
    assert all(math.isnan(v) for v in (point.threshold, point.precision, point.recall, point.f1))


def test_bad_input_is_named() -> None:
    one, two = np.zeros((2, 2)), np.array([[0.1, 0.2], [0.3, NAN]])
    faulty: list[tuple[Callable[[], object], str]] = [
        (lambda: auroc([0, 2], [0.1, 0.2]), "label 2"),
        (lambda: auroc([NAN, 0, 1], [0.1, 0.2, math.inf]), "row 2"),
        (lambda: auroc([0, 1], [0.1, 0.2, 0.3]), "(3,)"),
        (lambda: bootstrap_auroc([0, 1], [0.1, 0.2], ["p"]), "1 patients"),
        (lambda: score_classes(("Edema", "Hernia"), one, two), "'Hernia'"),
        (lambda: score_classes(("Edema",), one, two), "[n, 1]"),
    ]
    for figures in (multiclass_metrics, class_recalls):
        faulty += [
            (lambda f=figures: f([[1, 0]], [[1, 0, 0]]), "(1, 3)"),  # type: ignore[misc]
            (lambda f=figures: f([1, 0], [1, 0]), "(2,)"),  # type: ignore[misc]
            (lambda f=figures: f([[0, 1], [1, 1]], [[1, 0], [1, 0]]), "row 1"),  # type: ignore[misc]
            (lambda f=figures: f([[1, 0]], [[NAN, 0]]), "row 0"),  # type: ignore[misc]
            (lambda f=figures: f([[2, 0]], [[1, 0]]), "label 2"),  # type: ignore[misc]
        ]
    for work, named in faulty:
        with refused(named, by=DataError):
            work()


def test_the_interval_of_a_mean_is_that_of_a_loop() -> None:
    patients = ["a", "a", "b", "c", "d", "d"]
    one = bootstrap_auroc(Y, S, patients, n=200, seed=3)
    for times in (1, 3):  # of one class it is that of the AUROC, and so it is of equal ones
        y, s = (np.array([x] * times).T for x in (Y, S))
        assert bootstrap_mean(y, s, patients, 200, 3) == pytest.approx(one, abs=1e-12)
    y = np.array([[0, 1, 1, 0, 1, 0, 0, 1], [1, NAN, 0, 0, 1, 1, 0, NAN]]).T
    s = np.array([[0.1, 0.6, 0.3, 0.3, 0.9, 0.5, 0.2, 0.4], [0.5, 0.1, 0.4, 0.6, 0.7, 0.2, 0.1, 0.3]]).T
    patients, means = ["b", "b", "a", "c", "c", "d", "e", "e"], []
    for drawn in np.random.default_rng(7).integers(5, size=(100, 5)):  # whole patients, by name
        rows = [i for p in drawn for i, name in enumerate(patients) if name == "abcde"[p]]
        areas = [auroc(y[rows, c], s[rows, c]) for c in (0, 1)]
        if not all(map(math.isnan, areas)):
            means.append(np.nanmean(areas))
    expected = np.quantile(means, [0.025, 0.975])
    assert bootstrap_mean(y, s, patients, 100, 7) == pytest.approx(expected, abs=1e-12)
    # Of nothing, of one patient and without draws there is none.
    assert bootstrap_mean(np.zeros((6, 1)), y[:6, :1]) is None
    assert bootstrap_mean(y, s, ["p"] * 8) is None
    assert bootstrap_mean(y, s, n=0) is None
    assert all(math.isnan(v) for v in bootstrap_auroc(Y, S, ["p"] * 6))


def test_every_class_has_its_score_and_an_undefined_one_its_counts() -> None:
    y = np.column_stack([Y, [0, 0, 0, NAN, 0, 0], [NAN] * 6])
    result = score_classes(("Edema", "Hernia", "Mass"), y, np.column_stack([S, S, S]), bootstrap=50)
    low, high = bootstrap_auroc(Y, S, n=50)
    assert result["Edema"] == ClassScore(pytest.approx(8 / 9), low, high, 3, 3)
    assert result["Hernia"] == ClassScore(None, None, None, 0, 5)
    assert result["Mass"] == ClassScore(None, None, None, 0, 0)
    plain = score_classes(("Edema",), np.array([Y]).T, np.array([S]).T)["Edema"]
    assert (plain.low, plain.high) == (None, None)


@pytest.mark.parametrize(
    ("positives", "per_patient", "patients"), [(1, 1, 1), (4, 1, 4), (8, 4, 2), (9, 1, 9), (60, 1, 40)]
)
@pytest.mark.parametrize("turned", [1, -1])
def test_a_perfect_rank_of_few_is_no_certainty(
    positives: int, per_patient: int, patients: int, turned: int
) -> None:
    """The bootstrap alone says 1 to 1; images of one patient count once, and the rarer kind decides."""
    y = np.array([1.0] * positives + [0.0] * 40)
    whose = [f"p{i // per_patient}" if i < positives else f"n{i}" for i in range(len(y))]
    assert bootstrap_auroc(y, y, whose) == (1, 1)
    y, s = (y, turned * y) if positives < 40 else (1 - y, turned * (1 - y))
    score = score_classes(("A",), y[:, None], s[:, None], whose, bootstrap=100)["A"]
    assert (score.auroc, score.low, score.high) == pytest.approx(wilson((1 + turned) / 2, patients))


def test_the_interval_of_few_is_the_wider_of_both_and_of_many_the_bootstraps() -> None:
    rng = np.random.default_rng(1)
    for positives in (2, 5, 9, 10, 30):
        y = np.array([1.0] * positives + [0.0] * 100)
        s = rng.normal(size=len(y)) + 2 * y
        one = score_classes(("A",), y[:, None], s[:, None], bootstrap=200)["A"]
        low, high = bootstrap_auroc(y, s, n=200)
        bound = wilson(auroc(y, s), positives)
        wider = (min(low, bound.low), max(high, bound.high)) if positives < 10 else (low, high)
        assert (one.low, one.high) == pytest.approx(wider)


def test_youden_by_hand() -> None:
    # At 0.35 and at 0.7 J is 2/3; the lower threshold misses nothing.
    point = youden(Y, S)
    assert point.threshold == 0.35
    assert (point.precision, point.recall) == (0.75, 1.0)
    assert point.f1 == pytest.approx(0.857143, abs=1e-6)


@given(BOTH)
def test_no_threshold_has_a_larger_j(pairs: list[tuple[int, int]]) -> None:
    y, s = (np.array(v) for v in zip(*pairs, strict=True))

    def j(threshold: float) -> float:
        return float(np.mean(s[y == 1] >= threshold) - np.mean(s[y == 0] >= threshold))

    point = youden(y, s)
    assert j(point.threshold) == pytest.approx(max(j(t) for t in s))
    assert point.recall == np.mean(s[y == 1] >= point.threshold)
    assert point.precision == np.mean(y[s >= point.threshold])


# Of one label an image


def test_multiclass_figures_by_hand() -> None:
    y = [[1, 0, 0], [1, 0, 0], [0, 1, 0], [0, 1, 0]]
    scores = [[3, 1, 2], [1, 3, 2], [1, 3, 2], [1, 2, 3]]  # called 0, 1, 1 and 2
    found = multiclass_metrics(y, scores)
    assert found == {  # class 2 does not occur: no mean is over it
        "accuracy": 0.5,
        "balanced_accuracy": pytest.approx((1 / 2 + 1 / 2) / 2),
        "precision": pytest.approx((1 + 1 / 2) / 2),
        "recall": pytest.approx((1 / 2 + 1 / 2) / 2),
        "f1": pytest.approx((2 / 3 + 1 / 2) / 2),
    }
    assert class_recalls(y, scores) == [1 / 2, 1 / 2, None]
    # A class never predicted counts as 0.
    assert multiclass_metrics([[1, 0], [0, 1]], [[1, 0], [1, 0]])["precision"] == pytest.approx(0.25)
    # The first of equal scores is predicted, and rows without a label are left out.
    assert multiclass_metrics([[1, 0]], [[0.5, 0.5]])["accuracy"] == 1.0
    assert multiclass_metrics([[0, 1]], [[0.5, 0.5]])["accuracy"] == 0.0
    known = multiclass_metrics([[1, NAN], [0, 0], [NAN, NAN], [0, NAN]], [[1, 0], [1, 0], [0, 1], [0, 1]])
    assert set(known.values()) == {1.0}
    for shape in ((0, 3), (2, 3), (2, 0)):
        assert set(multiclass_metrics(np.zeros(shape), np.zeros(shape)).values()) == {None}
        assert class_recalls(np.zeros(shape), np.zeros(shape)) == [None] * shape[1]


@pytest.mark.complete
@pytest.mark.filterwarnings("ignore::UserWarning")
@given(st.integers(1, 6), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_it_agrees_with_scikit_learn(classes: int, n: int, seed: int) -> None:
    from sklearn.metrics import (
        accuracy_score,
        balanced_accuracy_score,
        f1_score,
        precision_score,
        recall_score,
    )

    rng = np.random.default_rng(seed)
    truth, scores = rng.integers(classes, size=n), rng.normal(size=(n, classes))
    y = np.eye(classes)[truth]
    y[(y == 0) & (rng.random(y.shape) < 0.3)] = NAN
    guess = scores.argmax(axis=1)
    macro = {"labels": np.unique(truth), "average": "macro", "zero_division": 0}
    expected = {
        "accuracy": accuracy_score(truth, guess),
        "balanced_accuracy": balanced_accuracy_score(truth, guess),
        "precision": precision_score(truth, guess, **macro),
        "recall": recall_score(truth, guess, **macro),
        "f1": f1_score(truth, guess, **macro),
    }
    assert multiclass_metrics(y, scores) == pytest.approx(expected)
    # A monotone map of the scores leaves the predictions as they are.
    assert multiclass_metrics(y, 1 / (1 + np.exp(-scores))) == pytest.approx(expected)
    defined = [recall for recall in class_recalls(y, scores) if recall is not None]
    assert np.mean(defined) == pytest.approx(expected["balanced_accuracy"])


# Shares


@given(st.integers(1, 10_000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilsons_interval_is_that_of_scipy(case: tuple[int, int]) -> None:
    k, n = case
    other = binomtest(k, n).proportion_ci(method="wilson")
    found = wilson(k / n, n)
    assert found == pytest.approx((k / n, other.low, other.high), abs=1e-9)
    assert 0 <= found.low <= found.value <= found.high <= 1


def test_newcombes_interval_of_his_own_examples() -> None:
    """Table II of the paper, method 10: (a) 56/70 - 48/80, (c) 6/7 - 2/7, (e) 0/10 - 0/20."""
    for one, other, bounds in (
        ((56, 70), (48, 80), (0.0524, 0.3339)),
        ((6, 7), (2, 7), (0.0582, 0.8062)),
        ((0, 10), (0, 20), (-0.1611, 0.2775)),
    ):
        first, second = (wilson(k / n, n) for k, n in (one, other))
        assert difference(first, second)[1:] == pytest.approx(bounds, abs=5e-5)
    assert wilson(0.7, 0) == (0.7, 0, 1)  # of no image nothing is known


def test_predictive_values_by_hand() -> None:
    """Se .9, Sp .9 at 2 %: PPV .018 / (.018 + .098) and NPV .882 / (.882 + .002)."""
    ppv, npv = predictive(Estimate(0.9, 0.8, 0.95), Estimate(0.9, 0.85, 0.95), 0.02)
    assert ppv == pytest.approx((0.018 / 0.116, 0.016 / (0.016 + 0.147), 0.019 / (0.019 + 0.049)))
    assert npv == pytest.approx((0.882 / 0.884, 0.833 / 0.837, 0.931 / 0.932))
    assert all(math.isnan(bound) for bound in predictive(Estimate(0, 0, 0), Estimate(1, 1, 1), 0.1)[0])


Shares = st.tuples(st.integers(0, 60), st.integers(0, 60)).map(sorted)


@given(Shares, Shares, st.floats(0.01, 0.99), st.floats(0, 1), st.floats(0, 1))
def test_predictive_values_of_rates_within_their_bounds_lie_within_theirs(
    se: list[int], sp: list[int], prevalence: float, a: float, b: float
) -> None:
    """So the interval is never narrower than one of both rates together would have to be."""
    bounds = [(low / 60, high / 60) for low, high in (se, sp)]
    found = predictive(*(Estimate(low, low, high) for low, high in bounds), prevalence)
    inside = [low + (high - low) * share for (low, high), share in zip(bounds, (a, b), strict=True)]
    for one, value in zip(found, predictive_values(*inside, prevalence), strict=True):
        if not any(map(math.isnan, (*one, value))):
            assert one.low - 1e-9 <= value <= one.high + 1e-9


# Counts of scores


def everyone(n: int) -> np.ndarray:
    return np.arange(n)


def cells_of(scores: Sequence[float], patients: Any = None, least: int = 0, step: int = 1) -> np.ndarray:
    """The counts of a site that says something."""
    found = histogram(np.array(scores), everyone(len(scores)) if patients is None else patients, least, step)
    assert found is not None
    return found


def test_every_image_is_counted_in_its_cell_and_cells_are_joined_until_each_has_enough_patients() -> None:
    """The edges are -12, -11.9375, ..., 12; an image on an edge belongs to the cell above it."""
    counts = cells_of([-30.0, -12.0, -11.95, 0.0, 0.05, 40.0])
    assert {k: n for k, n in enumerate(counts.tolist()) if n} == {0: 1, 1: 2, 193: 2, 385: 1}
    # Three images below -.5, two of them of one patient; two in [-.5, .125), and three above.
    scores, patients = [-1.0, -0.9, -0.6, 0.0, 0.1, 0.3, 0.4, 2.0], np.array([0, 0, 1, 2, 3, 4, 5, 6])
    joined = cells_of(scores, patients, least=2)
    ends = {k: n for k, n in enumerate(joined.tolist()) if n != JOINED}
    assert [GRID[cell] for cell in list(ends)[:-1]] == [-0.5625, 0.125]
    assert list(ends.values()) == [3, 2, 3]
    # Each of 8 cells of 5 images, rounded by itself to tens, would show 80 or 0 images of 40.
    rounded = cells_of(np.repeat(np.arange(8) - 3.5, 5).tolist(), least=5, step=10)
    assert rounded[rounded != JOINED].tolist() == [10, 10, 10, 10]


def test_a_class_of_few_patients_is_withheld() -> None:
    scores = np.linspace(-1, 1, 40)
    assert histogram(scores, everyone(40) % 4, min_count=5) is None
    assert histogram(scores, everyone(40) % 5, min_count=5) is not None
    assert histogram(np.empty(0), everyone(0), min_count=0) is None
    assert histogram(np.empty(0), everyone(0), min_count=5) is None


@st.composite
def limits(draw: st.DrawFn) -> tuple[int, int]:
    """Any `min_count` and `round_counts` that a site may have together, but for none."""
    least = draw(st.integers(0, 9))
    return least, draw(st.integers(1 if least else 2, max(2, 2 * least)))


@pytest.mark.complete
@examples(200)
@given(st.integers(0, 2**32 - 1), st.integers(1, 80), st.integers(1, 30), limits())
def test_no_count_is_of_fewer_patients_than_the_limit(
    seed: int, n: int, people: int, limits: tuple[int, int]
) -> None:
    """And none is 0: a cell that shows no image holds none."""
    rng = np.random.default_rng(seed)
    scores, patients = rng.normal(0, 4, n), rng.integers(people, size=n)
    least, step = limits
    counts = histogram(scores, patients, least, step)
    if counts is None:
        assert len(set(patients)) < least
        return
    ends = np.flatnonzero(counts != JOINED)
    assert ends[-1] == CELLS - 1
    assert (counts[ends] >= step).all()
    assert (counts[ends] % step == 0).all()
    assert counts[ends].sum() == near(n, step)
    bounds = [-math.inf, *GRID[ends[:-1]], math.inf]
    for low, high, so_far in zip(bounds[:-1], bounds[1:], np.cumsum(counts[ends]), strict=True):
        inside = (scores >= low) & (scores < high)
        assert len(set(patients[inside])) >= least
        assert inside.sum() >= step or len(ends) == 1
        assert abs((scores < high).sum() - so_far) <= step / 2


def test_one_image_changes_no_more_than_the_cells_beside_it() -> None:
    """A canary: its own score is in no release; any score of the same cell gives the same counts."""
    others = np.random.default_rng(0).normal(0, 1, 200)
    releases = {
        histogram(np.append(others, score), everyone(201), min_count=5).tobytes()  # type: ignore[union-attr]
        for score in np.linspace(2.9375, 3.0, 20, endpoint=False)
    }
    assert len(releases) == 1


def test_images_lie_evenly_within_a_cell() -> None:
    """Four images below the second edge, eight up to the fourth, of which half lie below the third."""
    row = np.full(CELLS, JOINED)
    row[1], row[3], row[-1] = 4, 8, 12
    curve = Curve.of([row])
    assert (curve.total, curve.known) == (24, (GRID[1], GRID[3]))
    assert curve.below[[1, 2, 3]].tolist() == [4.0, 8.0, 12.0]
    assert curve.quantile(8 / 24) == pytest.approx(GRID[2], abs=1e-6)
    assert curve.quantile(1 / 24) is None
    assert curve.quantile(20 / 24) is None


def test_rates_are_those_of_the_images() -> None:
    curves = Curves.of([(cells_of([-1.0, 1.0, 1.0, 1.0]), cells_of([-1.0, -1.0, 1.0]))])
    at = GRID.tolist().index(0.0)
    assert curves.sensitivity()[at] == 3 / 4
    assert curves.specificity()[at] == 2 / 3
    assert curves.prevalence == 4 / 7
    assert curves.defined
