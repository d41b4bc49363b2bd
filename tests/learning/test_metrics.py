import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steps import steps
from suture.core.errors import DataError
from suture.learning.metrics import (
    auroc,
    bootstrap_auroc,
    bootstrap_mean,
    mean_defined,
    score_classes,
    wilson,
    youden,
)
from suture.protocol.messages import ClassScore

Y = [0, 0, 1, 1, 0, 1]
S = [0.1, 0.4, 0.35, 0.8, 0.2, 0.7]
NAN = math.nan

# A few distinct scores, so that ties are the rule.
PAIRS = st.lists(st.tuples(st.sampled_from([0, 1]), st.integers(0, 5)), min_size=2, max_size=40)
BOTH = PAIRS.filter(lambda pairs: len({y for y, _ in pairs}) == 2)


def test_auroc_counts_the_pairs() -> None:
    # 8 of the 9 pairs are in order; 0.35 lies below 0.4.
    assert auroc(Y, S) == pytest.approx(8 / 9)


def test_a_tie_is_half_a_pair() -> None:
    assert auroc([0, 1], [0.5, 0.5]) == 0.5
    assert auroc([0, 0, 1], [0.1, 0.5, 0.5]) == 0.75


@pytest.mark.complete
@given(BOTH)
def test_auroc_is_scikit_learns(pairs: list[tuple[int, int]]) -> None:
    from sklearn.metrics import roc_auc_score

    y, s = zip(*pairs, strict=True)
    assert auroc(y, s) == pytest.approx(roc_auc_score(y, s), abs=1e-12)


@pytest.mark.complete
@given(BOTH)
def test_turning_the_scores_around_turns_the_auroc_around(pairs: list[tuple[int, int]]) -> None:
    y, s = zip(*pairs, strict=True)
    assert auroc(y, [-x for x in s]) == pytest.approx(1 - auroc(y, s), abs=1e-12)


def test_unknown_labels_are_left_out() -> None:
    assert auroc([NAN, *Y, NAN], [0.99, *S, 0.0]) == auroc(Y, S)
    assert auroc([0, 1, NAN], [0.1, 0.2, NAN]) == 1.0  # nor is the score of an unknown label looked at


@pytest.mark.parametrize("y", [[1, 1], [0, 0], [NAN, NAN], [1, NAN]])
def test_one_kind_of_label_defines_nothing(y: list[float]) -> None:
    assert math.isnan(auroc(y, [0.1, 0.2]))
    assert all(math.isnan(v) for v in bootstrap_auroc(y, [0.1, 0.2]))
    point = youden(y, [0.1, 0.2])
    assert all(math.isnan(v) for v in (point.threshold, point.precision, point.recall, point.f1))


def test_bad_input_is_named() -> None:
    with pytest.raises(DataError, match="label 2 is not 1, 0 or NaN"):
        auroc([0, 2], [0.1, 0.2])
    with pytest.raises(DataError, match="score of row 2 is not finite"):
        auroc([NAN, 0, 1], [0.1, 0.2, math.inf])
    with pytest.raises(DataError, match=r"\(2,\) and scores \(3,\)"):
        auroc([0, 1], [0.1, 0.2, 0.3])
    with pytest.raises(DataError, match="1 patients for 2 images"):
        bootstrap_auroc([0, 1], [0.1, 0.2], ["p"])


def slow_bootstrap(
    y: list[int], s: list[float], patients: list[str], n: int, seed: int
) -> tuple[float, float]:
    """Copies the drawn patients' images into a list, draw by draw."""
    from sklearn.metrics import roc_auc_score

    names = sorted(set(patients))
    rng = np.random.default_rng(seed)
    areas = []
    for drawn in rng.integers(len(names), size=(n, len(names))):
        rows = [i for p in drawn for i, name in enumerate(patients) if name == names[p]]
        if len({y[i] for i in rows}) == 2:
            areas.append(roc_auc_score([y[i] for i in rows], [s[i] for i in rows]))
    low, high = np.quantile(areas, [0.025, 0.975])
    return float(low), float(high)


@pytest.mark.complete
def test_the_bootstrap_draws_whole_patients() -> None:
    y = [0, 1, 1, 0, 1, 0, 0, 1]
    s = [0.1, 0.6, 0.3, 0.3, 0.9, 0.5, 0.2, 0.4]
    patients = ["b", "b", "a", "c", "c", "d", "e", "e"]
    fast = bootstrap_auroc(y, s, patients, n=200, seed=3)
    assert fast == pytest.approx(slow_bootstrap(y, s, patients, 200, 3), abs=1e-12)


def test_repeated_images_do_not_make_the_bootstrap_surer() -> None:
    patients = [f"p{i}" for i in range(6)]
    once = bootstrap_auroc(Y, S, patients, seed=1)
    thrice = bootstrap_auroc(Y * 3, S * 3, patients * 3, seed=1)
    assert thrice == pytest.approx(once, abs=1e-12)
    low, high = bootstrap_auroc(Y * 3, S * 3, None, seed=1)
    assert high - low < once[1] - once[0]


def test_the_interval_of_a_mean_draws_the_patients_of_all_classes_alike() -> None:
    """Of one class it is that of the AUROC, and so it is of equal ones; unknown labels are left out."""
    patients = ["a", "a", "b", "c", "d", "d"]
    one = bootstrap_auroc(Y, S, patients, n=200, seed=3)
    for times in (1, 3):
        y, s = (np.array([x] * times).T for x in (Y, S))
        assert bootstrap_mean(y, s, patients, 200, 3) == pytest.approx(one, abs=1e-12)
    unknown = np.column_stack([np.array(Y, float), np.full(6, math.nan)])
    assert bootstrap_mean(unknown, np.array([S, S]).T, patients, 200, 3) == pytest.approx(one, abs=1e-12)


def test_the_interval_of_a_mean_is_that_of_a_loop() -> None:
    y = np.array([[0, 1, 1, 0, 1, 0, 0, 1], [1, NAN, 0, 0, 1, 1, 0, NAN]]).T
    s = np.array([[0.1, 0.6, 0.3, 0.3, 0.9, 0.5, 0.2, 0.4], [0.5, 0.1, 0.4, 0.6, 0.7, 0.2, 0.1, 0.3]]).T
    means = []
    for drawn in np.random.default_rng(7).integers(8, size=(100, 8)):
        areas = [auroc(y[drawn, c], s[drawn, c]) for c in (0, 1)]
        if not all(map(math.isnan, areas)):
            means.append(np.nanmean(areas))
    expected = np.quantile(means, [0.025, 0.975])
    assert bootstrap_mean(y, s, None, 100, 7) == pytest.approx(expected, abs=1e-12)


def test_a_mean_of_nothing_has_no_interval() -> None:
    y, s = np.array([Y]).T, np.array([S]).T
    assert bootstrap_mean(np.zeros((6, 1)), s) is None
    assert bootstrap_mean(y, s, ["p"] * 6) is None
    assert bootstrap_mean(y, s, n=0) is None


def test_an_interval_needs_two_patients() -> None:
    assert all(math.isnan(v) for v in bootstrap_auroc(Y, S, ["p"] * 6))


def test_the_interval_holds_the_auroc_and_follows_the_seed() -> None:
    rng = np.random.default_rng(0)
    y = rng.integers(2, size=300)
    s = rng.normal(size=300) + y
    low, high = bootstrap_auroc(y, s, seed=1)
    assert low < auroc(y, s) < high
    assert (low, high) == bootstrap_auroc(y, s, seed=1)
    assert (low, high) != bootstrap_auroc(y, s, seed=2)


def test_draws_are_no_loop_of_python() -> None:
    """A thousand of fourteen classes take a second."""
    rng = np.random.default_rng(0)
    y, scores = (rng.random((300, 3)) < 0.3).astype(float), rng.normal(size=(300, 3))
    patients = [f"p{i // 3}" for i in range(300)]

    def steps_for(draws: int) -> int:
        return steps(lambda: score_classes(("A", "B", "C"), y, scores, patients, bootstrap=draws))[1]

    steps_for(1)  # imports
    assert steps_for(1000) < 2 * steps_for(100)


def test_every_class_has_its_score_and_an_undefined_one_its_counts() -> None:
    y = np.column_stack([Y, [0, 0, 0, NAN, 0, 0], [NAN] * 6])
    result = score_classes(("Edema", "Hernia", "Mass"), y, np.column_stack([S, S, S]), bootstrap=50)
    edema = result["Edema"]
    assert edema.auroc == pytest.approx(8 / 9)
    assert (edema.low, edema.high) == bootstrap_auroc(Y, S, n=50)
    assert (edema.positives, edema.negatives) == (3, 3)
    assert result["Hernia"] == ClassScore(None, None, None, 0, 5)
    assert result["Mass"] == ClassScore(None, None, None, 0, 0)


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


def test_without_bootstrap_there_is_no_interval() -> None:
    score = score_classes(("Edema",), np.array([Y]).T, np.array([S]).T)["Edema"]
    assert score.auroc == pytest.approx(8 / 9)
    assert (score.low, score.high) == (None, None)


def test_bad_scores_name_their_class() -> None:
    y, s = np.zeros((2, 2)), np.array([[0.1, 0.2], [0.3, NAN]])
    with pytest.raises(DataError, match="class 'Hernia': the score of row 1 is not finite"):
        score_classes(("Edema", "Hernia"), y, s)
    with pytest.raises(DataError, match=r"must both be \[n, 1\]"):
        score_classes(("Edema",), y, s)


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


def test_means_are_over_what_is_defined() -> None:
    assert mean_defined([0.5, None, 1.0, NAN]) == 0.75
    assert mean_defined([None, NAN]) is None
    assert mean_defined([]) is None
