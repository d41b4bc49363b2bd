"""metrics.json by hand, and the end of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from noted import noted
from suture.core.errors import LabelError
from suture.federation.server.results import AT_SERVER, Results
from suture.learning.training import LocalTraining
from suture.methods.partial import PartialLoss
from suture.protocol.messages import ClassScore, Metrics
from suture_papers.fedlsm.fedlsm import FedLSM
from suture_results.sentences import sentence

LOCAL = LocalTraining(lr=1e-2, batch_size=8, iterations=2)

LABELS = ("Edema", "Hernia", "Mass", "Nodule")
OWNERS = {"Edema": ("a", "b"), "Hernia": ("a",), "Mass": ("b",), "Nodule": ("a", "b")}
SCORES = {
    "Edema": ClassScore(0.9, 0.8, 0.95, 10, 90),
    "Hernia": ClassScore(None, None, None, 0, 100),
    "Mass": ClassScore(0.6, 0.5, 0.7, 5, 95),
    "Nodule": ClassScore(0.7, None, None, 50, 50),
}


def measured(scores: Mapping[str, ClassScore], n: int = 1, round_: int = 1, **figures: Any) -> Metrics:
    return Metrics(round_, "test", n, figures.pop("loss", None), dict(scores), **figures)


def test_the_content_by_hand() -> None:
    at_a = {"Edema": ClassScore(0.8, None, None, 1, 9), "Hernia": ClassScore(None, None, None, 0, 10)}
    results = Results(LABELS, OWNERS, measured(SCORES, 100, 5, loss=0.25), AT_SERVER, {"a": at_a}, (0.6, 0.8))
    assert results.to_dict() == {
        "mean_auroc": pytest.approx((0.9 + 0.6 + 0.7) / 3),
        "mean_interval": [0.6, 0.8],
        "loss": 0.25,
        "auroc": {"Edema": 0.9, "Hernia": None, "Mass": 0.6, "Nodule": 0.7},
        "intervals": {"Edema": [0.8, 0.95], "Hernia": None, "Mass": [0.5, 0.7], "Nodule": None},
        "counts": {"Edema": [10, 90], "Hernia": [0, 100], "Mass": [5, 95], "Nodule": [50, 50]},
        "recall": {},
        "groups": {"shared": pytest.approx(0.8), "unique": pytest.approx(0.6)},
        "sites": {"a": {"Edema": 0.8, "Hernia": None}},
        "site_counts": {"a": {"Edema": (1, 9), "Hernia": (0, 10)}},
        "n": 100,
        "source": "server test set",
        "selected_round": 5,
        "undefined": {"Hernia": {"code": "unmeasured", "values": {"counts": {"": [0, 100]}}}},
        "overall": {},
        "long_tail": {},
        "attributes": {},
        "local_models": {},
        "weighting": {},
        "decisions": {},
    }


def test_the_overall_figures_are_written() -> None:
    found = measured(SCORES, overall={"accuracy": 0.5, "f1": None})
    assert Results(LABELS, OWNERS, found, AT_SERVER).to_dict()["overall"] == {"accuracy": 0.5, "f1": None}


def test_recalls_are_grouped_as_the_server_says() -> None:
    scores = {
        "Mass": ClassScore(0.6, None, None, 5, 95, 0.2),
        "Edema": ClassScore(0.9, None, None, 1, 9, 0.8),
    }
    groups = {"head": ("Edema", "Hernia"), "tail": ("Mass",)}
    summary = Results(LABELS, OWNERS, measured(scores), AT_SERVER, frequency=groups).to_dict()
    assert summary["recall"] == {"Edema": 0.8, "Mass": 0.2}  # in the order of the classes
    assert summary["long_tail"]["accuracy"] == {"head": 0.8, "tail": 0.2, "all": 0.5}


@pytest.mark.parametrize(
    ("score", "reason"),
    [
        (None, "not evaluated"),
        (ClassScore(None, None, None, 0, 0), "no labelled case"),
        (ClassScore(None, None, None, 1, 0), "no negative among 1 labelled case"),
    ],
)
def test_an_undefined_class_has_a_reason(score: ClassScore | None, reason: str) -> None:
    scores = {} if score is None else {"Edema": score}
    summary = Results(("Edema",), {"Edema": ("a",)}, measured(scores, 4), AT_SERVER).to_dict()
    assert sentence(**summary["undefined"]["Edema"]) == reason
    assert summary["mean_auroc"] is None
    assert summary["groups"] == {"shared": None, "unique": None}


def test_foreign_classes_are_refused() -> None:
    score = {"Edemma": ClassScore(0.5, None, None, 1, 1)}
    with pytest.raises(LabelError, match="the scores: class 'Edemma'"):
        Results(("Edema",), {}, measured(score), AT_SERVER)
    with pytest.raises(LabelError, match="site 'a': class 'Edemma'"):
        Results(("Edema",), {}, measured({}), AT_SERVER, {"a": score})


@pytest.mark.complete
@pytest.mark.parametrize(("method", "notes"), [(FedLSM(local=LOCAL), ["a note"]), (PartialLoss(), [])])
def test_rows_that_pseudo_labels_took_over_are_noted_of_methods_that_make_some(
    method: Any, notes: list[str], tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def run_away(history: Any, owners: Any) -> list[str]:
        calls.append((len(history), owners["Hernia"]))
        return ["a note"]

    monkeypatch.setattr("suture_results.notes.run_away", run_away)
    server = tiny(method, rounds=1).run()
    assert noted(server) == notes
    assert {*calls} == {(1, ("beta",)) for _ in notes}
