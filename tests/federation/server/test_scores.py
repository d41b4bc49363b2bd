"""Scores over sites and groups by hand, and Fed-MAS's own numbers put together again."""

from __future__ import annotations

import math

import pytest

from suture.federation.server.selection import (
    across_sites,
    by_attribute,
    by_frequency,
    local_and_global,
    mean_of,
)
from suture.protocol.messages import ClassScore
from suture.protocol.records import Round, SiteRound, Validation
from suture_results.notes import dominant


def test_all_is_the_mean_of_the_groups_and_not_of_the_classes() -> None:
    """Fed-MAS, Table 1, IID: 7 classes at 94.3, 9 at 72.9 and 7 at 15.9 make All 61.05 and B-acc 62.08."""
    sizes = {"head": (7, 94.3), "medium": (9, 72.9), "tail": (7, 15.9)}
    groups = {group: tuple(f"{group} {i}" for i in range(n)) for group, (n, _) in sizes.items()}
    recall = {name: sizes[group][1] for group, names in groups.items() for name in names}
    found = by_frequency(groups, recall)
    assert found["classes"]["tail"] == [f"tail {i}" for i in range(7)]
    assert found["accuracy"] == {
        "head": pytest.approx(94.3),
        "medium": pytest.approx(72.9),
        "tail": pytest.approx(15.9),
        "all": pytest.approx(61.05, abs=0.05),
    }
    assert sum(recall.values()) / 23 == pytest.approx(62.08, abs=0.05)


def test_what_was_not_tested_does_not_count() -> None:
    """A class without a test image has no recall, and a group of such classes no accuracy."""
    groups = {"head": ("a", "b"), "medium": ("c",), "tail": ("d", "e")}
    found = by_frequency(groups, {"a": 1.0, "b": 0.5, "d": 0.25})
    assert found["accuracy"] == {"head": 0.75, "medium": None, "tail": 0.25, "all": 0.5}
    assert by_frequency({}, {"a": 1.0}) == by_frequency(groups, {}) == {}


def test_attributes_count_once_each_however_many_images_they_have() -> None:
    """Fed-MAS, Table 3: 73.43 of light and 77.0 of dark skin make 75.21."""
    light = {"n": 900, "auroc": 0.9, "balanced_accuracy": 73.43}
    dark = {"n": 100, "auroc": None, "balanced_accuracy": 77.0}
    found = by_attribute({"dark": dark, "light": light})
    assert found["values"] == {"dark": dark, "light": light}
    assert found["mean"] == {"auroc": 0.9, "balanced_accuracy": pytest.approx(75.21, abs=0.01)}
    assert by_attribute({}) == {}


def test_global_and_local_models_side_by_side() -> None:
    sites = {
        "a": ({"n": 10, "accuracy": 0.5}, {"n": 10, "accuracy": 0.9}),
        "b": ({"n": 90, "accuracy": 0.7}, {"n": 90, "accuracy": 0.8}),
    }
    found = local_and_global(sites)
    assert found["sites"]["a"] == {
        "global": {"n": 10, "accuracy": 0.5},
        "local": {"n": 10, "accuracy": 0.9},
    }
    assert found["mean"]["global"] == {"accuracy": pytest.approx(0.6)}
    assert found["mean"]["local"] == {"accuracy": pytest.approx(0.85)}
    assert local_and_global({}) == {}


def test_a_mean_is_over_the_parts_that_define_it() -> None:
    assert mean_of([{"f1": 0.5, "auroc": None}, {"f1": None}, {"f1": 1.0}]) == {"f1": 0.75, "auroc": None}
    assert mean_of([]) == {}


def test_across_sites_is_an_unweighted_mean() -> None:
    merged = across_sites(
        {
            "a": {"Edema": ClassScore(0.9, 0.8, 1.0, 1, 1), "Hernia": ClassScore(None, None, None, 0, 4)},
            "b": {"Edema": ClassScore(0.5, 0.4, 0.6, 99, 901), "Hernia": ClassScore(0.7, 0.6, 0.8, 2, 3)},
        }
    )
    half = math.hypot(0.1, 0.1) / 2
    bounds = (pytest.approx(0.7 - half), pytest.approx(0.7 + half))
    assert merged["Edema"] == ClassScore(pytest.approx(0.7), *bounds, 100, 902)
    assert merged["Edema"].recall is None
    # One site defines Hernia: its interval stands, and the counts are everybody's.
    assert merged["Hernia"] == ClassScore(0.7, 0.6, 0.8, 2, 7)


def test_recalls_average_over_the_sites_that_have_one() -> None:
    at = {
        site: {"Edema": ClassScore(None, None, None, n, 0, recall)}
        for site, n, recall in (("a", 1, 1.0), ("b", 99, 0.5), ("c", 0, None))
    }
    assert across_sites(at)["Edema"] == ClassScore(None, None, None, 100, 0, 0.75)


def test_a_withheld_count_withholds_the_sum() -> None:
    merged = across_sites(
        {
            "a": {"Edema": ClassScore(None, None, None, None, 12)},
            "b": {"Edema": ClassScore(0.5, None, None, 5, 5)},
        }
    )
    assert merged["Edema"] == ClassScore(0.5, None, None, None, 17)


def test_nothing_anywhere_is_undefined() -> None:
    merged = across_sites({"a": {"Edema": ClassScore(None, None, None, 0, 3)}, "b": {}})
    assert merged == {"Edema": ClassScore(None, None, None, 0, 3)}
    assert not any(isinstance(v, float) and math.isnan(v) for v in vars(merged["Edema"]).values())
    assert across_sites({}) == {}


def committed(number: int, **weights: float) -> Round:
    """A committed round in which the sites had these weights."""
    sites = {site: SiteRound("accepted", weight=weight) for site, weight in weights.items()}
    return Round(number, "main", "committed", 1.0, 0, 0, sites, Validation())


def test_a_site_that_makes_the_model_nearly_alone_is_named() -> None:
    """By the number of images, say, that it announces."""
    (note,) = dominant([committed(1, a=10.0, b=20.0, liar=1e9), committed(2, a=10.0, b=20.0, liar=1e9)])
    assert note.startswith("liar had 100.0% of the ")
    assert dominant([committed(1, a=10.0, b=20.0, c=90.0)]) == []
    assert dominant([committed(1, a=1.0, b=1e9)]) == []  # of two sites, one has most of the mean anyway
    assert dominant([]) == []
