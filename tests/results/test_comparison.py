"""Differences of methods and of models, and what occurs together: by hand, and over random tables."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from suture.core.errors import DataError, LabelError
from suture.core.labels import LabelSet
from suture.core.vocabulary import read_word_list
from suture.data.table import Table
from suture.learning.metrics import mean_sd
from suture_results.comparison import Comparison, compare_auroc, compare_means, compare_pairs
from suture_results.comparison_page import Difference, verdict
from suture_results.cooccurrence import (
    RELATED,
    Contingency,
    Frequency,
    contingency,
    cooccurrence,
    frequencies,
    youden_thresholds,
)
from world import refused

NAN = math.nan


def same(a: float, b: float) -> bool:
    return a == pytest.approx(b, abs=1e-12, nan_ok=True)


def test_the_t_test_by_hand() -> None:
    # Differences 1, 2, 3: mean 2, SD 1, t = 2 sqrt(3); with two degrees of freedom p = 1 - t / sqrt(t² + 2).
    found = compare_pairs([2, 4, 6], [1, 2, 3])
    t = 2 * math.sqrt(3)
    assert (found.n, found.difference, found.mark, found.why) == (3, 2, "ns", "")
    assert found.p == pytest.approx(1 - t / math.sqrt(t * t + 2)) == pytest.approx(0.0742, abs=5e-5)
    assert found.normal_p == pytest.approx(1.0)  # three evenly spaced values are as normal as three can be
    # Differences 1 and 3: t = 2 with one degree of freedom, the Cauchy distribution.
    found = compare_pairs([2, 5], [1, 2])
    assert found.p == pytest.approx(1 - 2 * math.atan(2) / math.pi)
    assert math.isnan(found.normal_p)
    # Undefined values are left out with their partners.
    assert compare_pairs([2, None, 4, 6, 9], [1, 5, 2, 3, None]) == compare_pairs([2, 4, 6], [1, 2, 3])
    with refused("3 and 2", by=DataError):
        compare_pairs([1, 2, 3], [1, 2])


@pytest.mark.parametrize(
    ("a", "b", "n", "difference", "p", "mark"),
    [
        ([0.7, 0.8, 0.9], [0.7, 0.8, 0.9], 3, 0, 1, "ns"),
        ([0.8, 0.9], [0.7, 0.8], 2, 0.1, 0, "***†"),  # beyond doubt, and beyond the normality test
        ([0.8], [0.7], 1, 0.1, NAN, "–"),
        ([None, 0.8], [0.7, None], 0, NAN, NAN, "–"),
    ],
)
def test_pairs_without_spread(
    a: list[float | None], b: list[float | None], n: int, difference: float, p: float, mark: str
) -> None:
    found = compare_pairs(a, b)
    assert (found.n, found.mark) == (n, mark)
    assert same(found.difference, difference)
    assert same(found.p, p)
    assert found.why


@pytest.mark.parametrize(
    ("p", "normal_p", "mark"),
    [
        (0.05, 0.5, "ns"),
        (0.0499, 0.5, "*"),
        (0.01, 0.5, "*"),
        (0.0099, 0.5, "**"),
        (0.001, 0.5, "**"),
        (0.0009, 0.05, "***"),
        (0.0009, 0.049, "***†"),
        (0.03, NAN, "*†"),
        (0.2, 0.01, "ns"),  # there is nothing to doubt
        (NAN, NAN, "–"),
    ],
)
def test_marks_are_the_papers(p: float, normal_p: float, mark: str) -> None:
    found = Comparison(7, 0.1, p, normal_p)
    assert found.mark == mark
    assert found.significant == (mark in ("*", "**", "***"))


def test_the_spread_is_of_a_sample_or_of_all_there_is() -> None:
    assert mean_sd([1, None, 3], sample=True) == (2, pytest.approx(math.sqrt(2)))
    assert mean_sd([1, None, 3], sample=False) == (2, 1)
    assert mean_sd([0.8], sample=False) == (0.8, 0)
    mean, spread = mean_sd([0.8], sample=True)
    assert mean == 0.8
    assert math.isnan(spread)
    assert all(math.isnan(v) for v in mean_sd([None], sample=False))


@pytest.mark.complete
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=12))
def test_swapping_the_methods_turns_the_sign(pairs: list[tuple[int, int]]) -> None:
    a, b = zip(*pairs, strict=True)
    one, other = compare_pairs(a, b), compare_pairs(b, a)
    assert one.difference == -other.difference
    assert same(one.p, other.p)


Y = [0, 0, 1, 1, 0, 1]
A = [0.1, 0.4, 0.35, 0.8, 0.2, 0.7]  # 8 of 9 pairs in order
B = [0.1, 0.4, 0.35, 0.8, 0.9, 0.7]  # 5 of 9
PATIENTS = ["a", "b", "c", "a", "d", "d"]


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
    half = np.std(draws, ddof=1) * stats.t.ppf(0.975, len(draws) - 1)
    assert (found.low, found.high) == pytest.approx((3 / 9 - half, 3 / 9 + half), abs=1e-12)
    t = (3 / 9) / np.std(draws, ddof=1)
    assert found.p == pytest.approx(2 * stats.t.sf(t, len(draws) - 1), rel=1e-9)


def test_differences_of_aurocs() -> None:
    found = compare_auroc(Y, A, B)
    assert (found.auroc_a, found.auroc_b) == (pytest.approx(8 / 9), pytest.approx(5 / 9))
    assert found.difference == pytest.approx(3 / 9)
    # The interval holds 0 where p is above .05, and is as wide as p says: half of it is t(.975) deviations.
    t = abs(found.difference) / (found.high - found.difference) * stats.t.ppf(0.975, found.n - 1)
    assert found.p == pytest.approx(2 * stats.t.sf(t, found.n - 1))
    assert (found.low < 0 < found.high) == (found.p > 0.05)
    # A model does not differ from itself, nor from its scores on another scale.
    found = compare_auroc(Y, A, A)
    assert (found.difference, found.low, found.high, found.p) == (0, 0, 0, 1)
    assert compare_auroc(Y, A, [10 * s - 3 for s in A]).p == 1
    more = compare_auroc([NAN, *Y], [NAN, *A], [0.3, *B], ["z", *PATIENTS])
    assert more == compare_auroc(Y, A, B, PATIENTS)  # unknown labels are left out


def test_the_mean_over_classes_is_drawn_by_patient_for_all_classes_alike() -> None:
    rng = np.random.default_rng(3)
    y = (rng.random((40, 2)) < 0.4).astype(float)
    a, b = y + rng.normal(size=y.shape), y + rng.normal(scale=3.0, size=y.shape)
    every = [(y[:, k], a[:, k], b[:, k]) for k in (0, 1)]
    patients = [str(i // 2) for i in range(40)]
    one = compare_auroc(*every[0], patients)
    assert compare_means(every[:1], patients) == one  # a single class without unknown labels
    found = compare_means([*every, (np.ones(40), a[:, 0], b[:, 0])], patients)  # the last has no negative
    areas = [compare_auroc(*of, patients) for of in every]
    assert found.difference == pytest.approx(np.mean([of.difference for of in areas]))
    assert found.high - found.low < max(of.high - of.low for of in areas)
    assert math.isnan(compare_means([(np.ones(40), a[:, 0], b[:, 0])], patients).p)
    assert compare_means(every, ["one"] * 40).why


def test_a_verdict_names_what_differs_after_holm() -> None:
    def line(name: str, value: float, p: float) -> Difference:
        return Difference(name, value, value - 0.1, value + 0.1, p)

    lines = [
        line("Mass", 0.2, 0.01),
        line("Edema", -0.2, 0.04),
        line("Hernia", 0.1, 0.3),
        line("Scar", 0, NAN),
    ]
    assert (
        verdict("X", lines)
        == "X: higher for Mass, lower for Edema, no significant difference in 1 other test."
    )
    assert verdict("X", lines[2:]) == "X: no significant difference in 1 test."
    assert "nothing" in verdict("X", lines[3:])


def test_more_draws_do_not_make_a_difference_significant() -> None:
    rng = np.random.default_rng(0)
    y = (rng.random(400) < 0.3).astype(float)
    a = rng.normal(size=400) + y
    b = a + rng.normal(size=400) * 0.3
    few, many = compare_auroc(y, a, b, n=300), compare_auroc(y, a, b, n=6000)
    assert many.p == pytest.approx(few.p, rel=0.5)
    assert (few.low < 0 < few.high) == (few.p > 0.05)


@pytest.mark.parametrize(
    ("y", "patients", "n", "why"),
    [
        ([1, 1, NAN], None, 99, "negative"),
        ([NAN, NAN, NAN], None, 99, "positive"),
        ([0, 1, 1], ["p", "p", "p"], 99, "patient"),
        ([0, 1, 1], None, 0, "resamples"),
    ],
)
def test_what_is_undefined_has_a_reason(y: list[float], patients: list[str] | None, n: int, why: str) -> None:
    found = compare_auroc(y, [0.1, 0.2, 0.3], [0.3, 0.2, 0.1], patients, n=n)
    assert why in found.why
    assert all(math.isnan(v) for v in (found.low, found.high, found.p))
    assert found.n == 0


def test_draws_that_all_differ_alike_prove_nothing() -> None:
    found = compare_auroc([0, 1], [0, 1], [1, 0])
    assert (found.difference, found.low, found.high) == (1, 1, 1)
    assert math.isnan(found.p)
    assert found.why


@given(
    st.lists(
        st.tuples(
            st.sampled_from([0.0, 1.0, NAN]), st.integers(0, 5), st.integers(0, 5), st.sampled_from("pqrs")
        ),
        min_size=1,
        max_size=20,
    )
)
def test_swapping_the_models_turns_the_sign(images: list[tuple[float, int, int, str]]) -> None:
    y, a, b, patients = (list(column) for column in zip(*images, strict=True))
    one, other = compare_auroc(y, a, b, patients, n=50), compare_auroc(y, b, a, patients, n=50)
    assert (one.n, one.why) == (other.n, other.why)
    assert same(one.difference, -other.difference)
    assert same(one.low, -other.high)
    assert same(one.p, other.p)


NAMES = ("Mass", "Edema", "Lung Lesion")
SCORES = [
    [0.9, 0.1, 0.8],
    [0.5, 0.1, 0.3],  # 0.5 is at the threshold of Mass
    [0.7, 0.1, 0.6],
    [0.2, 0.9, 0.9],
    [0.1, 0.9, 0.2],
    [0.4, 0.9, 0.1],
]
THRESHOLDS = {"Mass": 0.5, "Edema": NAN, "Lung Lesion": 0.55}


def pair(
    scores: Sequence[Sequence[float]] | np.ndarray, second: str = "Lung Lesion", **own: float
) -> Contingency:
    return contingency(NAMES, scores, THRESHOLDS | own, "Mass", second)


@pytest.mark.parametrize(
    ("found", "counts", "second_given_first", "first_given_second", "why"),
    [
        (pair(SCORES), ((2, 1), (1, 2)), 2 / 3, 2 / 3, ""),
        (pair(SCORES, Mass=0.6, **{"Lung Lesion": 0.25}), ((2, 2), (0, 2)), 1.0, 0.5, ""),
        (pair(SCORES, Mass=2.0), ((3, 3), (0, 0)), NAN, 0, "Mass"),  # never predicted
        (pair(SCORES, "Edema"), ((NAN, NAN), (NAN, NAN)), NAN, NAN, "Edema"),  # no threshold
        (pair(np.empty((0, 3))), ((0, 0), (0, 0)), NAN, NAN, "Mass"),
    ],
)
def test_contingencies_by_hand(
    found: Contingency, counts: object, second_given_first: float, first_given_second: float, why: str
) -> None:
    np.testing.assert_array_equal(found.counts, counts)
    assert same(found.second_given_first, second_given_first)
    assert same(found.first_given_second, first_given_second)
    assert why in found.why
    assert bool(why) == bool(found.why)


def test_thresholds_are_youdens_and_the_papers_pairs_are_in_the_vocabulary() -> None:
    y = [[0, NAN, 1], [0, 0, 1], [1, 0, NAN], [1, NAN, 1]]
    scores = [[0.1, 0.1, 0.4], [0.4, 0.2, 0.1], [0.35, 0.3, 0.2], [0.8, 0.4, 0.3]]
    # J is 1/2 at .35 and at .8; the lower one misses nothing.
    assert list(youden_thresholds(NAMES, y, scores).values()) == pytest.approx([0.35, NAN, NAN], nan_ok=True)
    assert all(name in read_word_list("cxr-lt") for pair in RELATED for name in pair)


def test_bad_input_is_named() -> None:
    two = [0.1, 0.2]
    for call, named, kind in (
        (lambda: compare_auroc([0, 2], two, two), "label 2", DataError),
        (lambda: compare_auroc([0, 1], two, [*two, 0.3]), "(3,)", DataError),
        (lambda: compare_auroc([0, 1], two, [0.1, math.inf]), "row 1", DataError),
        (lambda: compare_auroc([0, 1], two, two, ["p"]), "1 patients", DataError),
        (lambda: pair(SCORES, "Hernia"), "'Hernia'", LabelError),
        (lambda: pair([[0.1, 0.2, 0.3], [NAN, 0.2, 0.3]]), "'Mass'", DataError),
        (lambda: youden_thresholds(NAMES[:2], [[0, 3]], [two]), "'Edema'", DataError),
        (lambda: youden_thresholds(NAMES[:1], [0, 1], two), "[n, 1]", DataError),
    ):
        with refused(named, by=kind):
            call()


ROWS = st.lists(st.tuples(*[st.floats(0, 1)] * 3), min_size=1, max_size=30)


@given(ROWS, st.randoms(use_true_random=False))
def test_the_order_of_the_images_changes_nothing_and_that_of_the_classes_turns_the_matrix(
    rows: list[tuple[float, float, float]], shuffler: random.Random
) -> None:
    one, mixed = pair(rows), list(rows)
    shuffler.shuffle(mixed)
    assert pair(mixed) == one
    assert sum(n for row in one.counts for n in row) == len(rows)
    other = contingency(NAMES, rows, THRESHOLDS, "Lung Lesion", "Mass")
    assert other.counts == tuple(zip(*one.counts, strict=True))
    assert same(one.second_given_first, other.first_given_second)


def table(y: object, patients: tuple[str, ...] | None = None) -> Table:
    labels, names = np.asarray(y, dtype=np.float32), LabelSet(("Edema", "Hernia", "Mass"))
    images = tuple(f"{i}.png" for i in range(len(labels)))
    return Table(names, images, patients or images, labels, ("train",) * len(images), Path("."))


KNOWN = [[1, 0, 1], [1, NAN, 0], [0, NAN, 1], [1, 0, NAN], [NAN, 0, 1]]


def test_every_image_is_counted_once_for_each_class() -> None:
    counts = {"Edema": Frequency(3, 1, 1), "Hernia": Frequency(0, 3, 2), "Mass": Frequency(3, 1, 1)}
    assert frequencies(table(KNOWN)) == counts
    assert Frequency(3, 1, 6).share == 0.75
    assert math.isnan(Frequency(0, 0, 4).share)
    empty = table(np.empty((0, 3)))
    assert frequencies(empty)["Edema"] == Frequency(0, 0, 0)
    assert np.isnan(cooccurrence(empty, per="patient")).all()


def test_cooccurrence_by_hand() -> None:
    # Of the three images with Edema two know of Hernia (neither has it), and two of Mass (one has it). Of
    # the three with Mass two know of Edema (one has it), and two of Hernia. None has Hernia.
    expected = [[1, 0, 1 / 2], [NAN, NAN, NAN], [1 / 2, 0, 1]]
    np.testing.assert_allclose(cooccurrence(table(KNOWN)), expected)
    # p: Edema, no Hernia, Mass. q: Edema, Hernia unknown, no Mass.
    found = cooccurrence(table([[1, 0, 0], [0, NAN, 1], [1, NAN, 0]], ("p", "p", "q")), per="patient")
    np.testing.assert_array_equal(found, [[1, 0, 0.5], [NAN, NAN, NAN], [1, 0, 1]])


@given(arrays(np.float32, st.tuples(st.integers(0, 12), st.just(3)), elements=st.sampled_from([0, 1, NAN])))
def test_entries_are_those_of_a_loop(y: np.ndarray) -> None:
    found = cooccurrence(table(y))
    np.testing.assert_array_equal(found, cooccurrence(table(y), per="patient"))  # each has one image
    for i in range(3):
        for j in range(3):
            rows = [row for row in y if row[i] == 1 and not math.isnan(row[j])]
            expected = sum(row[j] == 1 for row in rows) / len(rows) if rows else NAN
            assert found[i, j] == pytest.approx(expected, nan_ok=True)
