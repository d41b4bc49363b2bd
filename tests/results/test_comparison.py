import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from suture.core.errors import DataError
from suture.learning.metrics import bootstrap_auroc
from suture_results.comparison import compare_auroc

NAN = math.nan
Y = [0, 0, 1, 1, 0, 1]
A = [0.1, 0.4, 0.35, 0.8, 0.2, 0.7]  # 8 of 9 pairs in order
B = [0.1, 0.4, 0.35, 0.8, 0.9, 0.7]  # 5 of 9
PATIENTS = ["a", "b", "c", "a", "d", "d"]

IMAGES = st.lists(
    st.tuples(
        st.sampled_from([0.0, 1.0, NAN]), st.integers(0, 5), st.integers(0, 5), st.sampled_from("pqrs")
    ),
    min_size=1,
    max_size=20,
)


def same(a: float, b: float) -> bool:
    return a == pytest.approx(b, abs=1e-12, nan_ok=True)


def test_the_difference_is_that_of_the_aurocs() -> None:
    found = compare_auroc(Y, A, B)
    assert (found.auroc_a, found.auroc_b) == (pytest.approx(8 / 9), pytest.approx(5 / 9))
    assert found.difference == pytest.approx(3 / 9)
    assert found.why == ""


@pytest.mark.complete
def test_both_models_get_the_same_draws_of_patients() -> None:
    from sklearn.metrics import roc_auc_score

    names = sorted(set(PATIENTS))
    draws = []
    for drawn in np.random.default_rng(3).integers(len(names), size=(200, len(names))):
        rows = [i for p in drawn for i, name in enumerate(PATIENTS) if name == names[p]]
        y = [Y[i] for i in rows]
        if len(set(y)) == 2:
            draws.append(roc_auc_score(y, [A[i] for i in rows]) - roc_auc_score(y, [B[i] for i in rows]))
    found = compare_auroc(Y, A, B, PATIENTS, n=200, seed=3)
    assert found.n == len(draws) < 200
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(draws, [0.025, 0.975])), abs=1e-12)
    t = (3 / 9) / np.std(draws, ddof=1)
    assert found.p == pytest.approx(2 * stats.t.sf(t, len(draws) - 1), rel=1e-9)


def test_against_chance_the_interval_is_the_aurocs_own() -> None:
    # A constant score has an AUROC of 1/2 in every draw, so the difference is the AUROC less 1/2.
    found = compare_auroc(Y, A, [0.5] * 6, seed=4)
    low, high = bootstrap_auroc(Y, A, seed=4)
    assert (found.low, found.high) == (pytest.approx(low - 0.5), pytest.approx(high - 0.5))


def test_more_draws_do_not_make_a_difference_significant() -> None:
    rng = np.random.default_rng(0)
    y = (rng.random(400) < 0.3).astype(float)
    a = rng.normal(size=400) + y
    b = a + rng.normal(size=400) * 0.3
    few, many = compare_auroc(y, a, b, n=300), compare_auroc(y, a, b, n=6000)
    assert many.p == pytest.approx(few.p, rel=0.5)
    assert (few.low < 0 < few.high) == (few.p > 0.05)


def test_a_model_does_not_differ_from_itself() -> None:
    found = compare_auroc(Y, A, A)
    assert (found.difference, found.low, found.high, found.p) == (0, 0, 0, 1)
    assert compare_auroc(Y, A, [10 * s - 3 for s in A]).p == 1  # nor from its scores on another scale


def test_unknown_labels_are_left_out() -> None:
    known = compare_auroc(Y, A, B, PATIENTS)
    more = compare_auroc([NAN, *Y], [NAN, *A], [0.3, *B], ["z", *PATIENTS])
    assert more == known


@pytest.mark.parametrize(
    ("y", "patients", "why"),
    [
        ([1, 1, NAN], None, "no negative image"),
        ([0, 0, 0], None, "no positive image"),
        ([NAN, NAN, NAN], None, "no positive image"),
        ([0, 1, 1], ["p", "p", "p"], "a single patient"),
    ],
)
def test_what_is_undefined_has_a_reason(y: list[float], patients: list[str] | None, why: str) -> None:
    found = compare_auroc(y, [0.1, 0.2, 0.3], [0.3, 0.2, 0.1], patients)
    assert found.why.startswith(why)
    assert all(math.isnan(v) for v in (found.low, found.high, found.p))
    assert found.n == 0


def test_too_few_draws_have_no_spread() -> None:
    assert compare_auroc(Y, A, B, n=0).why.startswith("fewer than two resamples")


def test_draws_that_all_differ_alike_prove_nothing() -> None:
    found = compare_auroc([0, 1], [0, 1], [1, 0])
    assert (found.difference, found.low, found.high) == (1, 1, 1)
    assert math.isnan(found.p)
    assert "no spread" in found.why


def test_bad_input_is_named() -> None:
    with pytest.raises(DataError, match="label 2 is not 1, 0 or NaN"):
        compare_auroc([0, 2], [0.1, 0.2], [0.1, 0.2])
    with pytest.raises(DataError, match=r"\(2,\) and scores \(3,\)"):
        compare_auroc([0, 1], [0.1, 0.2], [0.1, 0.2, 0.3])
    with pytest.raises(DataError, match="score of row 1 is not finite"):
        compare_auroc([0, 1], [0.1, 0.2], [0.1, math.inf])
    with pytest.raises(DataError, match="1 patients for 2 images"):
        compare_auroc([0, 1], [0.1, 0.2], [0.2, 0.1], ["p"])


@given(IMAGES)
def test_swapping_the_models_turns_the_sign(images: list[tuple[float, int, int, str]]) -> None:
    y, a, b, patients = (list(column) for column in zip(*images, strict=True))
    one, other = compare_auroc(y, a, b, patients, n=50), compare_auroc(y, b, a, patients, n=50)
    assert (one.n, one.why) == (other.n, other.why)
    assert same(one.difference, -other.difference)
    assert same(one.low, -other.high)
    assert same(one.p, other.p)
