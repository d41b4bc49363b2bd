import math

import pytest

from suture.core.errors import LabelError
from suture.federation.server.summary import across_sites, summarise
from suture.protocol.messages import ClassScore

LABELS = ("Edema", "Hernia", "Mass", "Nodule")
OWNERS = {"Edema": ("a", "b"), "Hernia": ("a",), "Mass": ("b",), "Nodule": ("a", "b")}
SCORES = {
    "Edema": ClassScore(0.9, 0.8, 0.95, 10, 90),
    "Hernia": ClassScore(None, None, None, 0, 100),
    "Mass": ClassScore(0.6, 0.5, 0.7, 5, 95),
    "Nodule": ClassScore(0.7, None, None, 50, 50),
}


def test_the_summary_by_hand() -> None:
    at_a = {"Edema": ClassScore(0.8, None, None, 1, 9), "Hernia": ClassScore(None, None, None, 0, 10)}
    assert summarise(
        LABELS, OWNERS, SCORES, {"a": at_a}, 100, "server test set", 5, loss=0.25, mean_interval=(0.6, 0.8)
    ) == {
        "mean_auroc": pytest.approx((0.9 + 0.6 + 0.7) / 3),
        "mean_interval": [0.6, 0.8],
        "loss": 0.25,
        "auroc": {"Edema": 0.9, "Hernia": None, "Mass": 0.6, "Nodule": 0.7},
        "intervals": {"Edema": [0.8, 0.95], "Hernia": None, "Mass": [0.5, 0.7], "Nodule": None},
        "counts": {"Edema": [10, 90], "Hernia": [0, 100], "Mass": [5, 95], "Nodule": [50, 50]},
        "recall": {},
        "groups": {"shared": pytest.approx(0.8), "unique": pytest.approx(0.6)},
        "sites": {"a": {"Edema": 0.8, "Hernia": None}},
        "n": 100,
        "source": "server test set",
        "selected_round": 5,
        "undefined": {"Hernia": "no positive among 100 labelled cases"},
        "overall": {},
        "long_tail": {},
        "attributes": {},
        "local_models": {},
        "weighting": {},
    }


def test_the_overall_figures_are_written() -> None:
    summary = summarise(
        LABELS, OWNERS, SCORES, {}, 1, "server test set", 1, overall={"accuracy": 0.5, "f1": None}
    )
    assert summary["overall"] == {"accuracy": 0.5, "f1": None}


def test_recalls_are_grouped_as_the_server_says() -> None:
    scores = {
        "Mass": ClassScore(0.6, None, None, 5, 95, 0.2),
        "Edema": ClassScore(0.9, None, None, 1, 9, 0.8),
    }
    groups = {"head": ("Edema", "Hernia"), "tail": ("Mass",)}
    summary = summarise(LABELS, OWNERS, scores, {}, 1, "server test set", 1, frequency=groups)
    assert summary["recall"] == {"Edema": 0.8, "Mass": 0.2}  # in the order of the classes
    assert summary["long_tail"]["accuracy"] == {"head": 0.8, "tail": 0.2, "all": 0.5}


@pytest.mark.parametrize(
    ("score", "reason"),
    [
        (None, "not evaluated"),
        (ClassScore(None, None, None, 0, 0), "no labelled case"),
        (ClassScore(None, None, None, 1, 0), "no negative among 1 labelled case"),
        (ClassScore(None, None, None, 3, 4), "positives and negatives lie at different sites"),
        (ClassScore(None, None, None, None, None), "too few positives"),
    ],
)
def test_an_undefined_class_has_a_reason(score: ClassScore | None, reason: str) -> None:
    scores = {} if score is None else {"Edema": score}
    summary = summarise(("Edema",), {"Edema": ("a",)}, scores, {}, 4, "server test set", 1)
    assert summary["undefined"]["Edema"].startswith(reason)
    assert summary["mean_auroc"] is None
    assert summary["groups"] == {"shared": None, "unique": None}


def test_foreign_classes_are_refused() -> None:
    score = {"Edemma": ClassScore(0.5, None, None, 1, 1)}
    with pytest.raises(LabelError, match="the scores: class 'Edemma'"):
        summarise(("Edema",), {}, score, {}, 1, "server test set", 1)
    with pytest.raises(LabelError, match="site 'a': class 'Edemma'"):
        summarise(("Edema",), {}, {}, {"a": score}, 1, "server test set", 1)


def test_across_sites_is_an_unweighted_mean() -> None:
    merged = across_sites(
        {
            "a": {"Edema": ClassScore(0.9, 0.8, 1.0, 1, 1), "Hernia": ClassScore(None, None, None, 0, 4)},
            "b": {"Edema": ClassScore(0.5, 0.4, 0.6, 99, 901), "Hernia": ClassScore(0.7, 0.6, 0.8, 2, 3)},
        }
    )
    assert merged["Edema"] == ClassScore(pytest.approx(0.7), None, None, 100, 902)
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
