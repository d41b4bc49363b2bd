"""metrics.json by hand, what its figures do not say, and the digests that a server holds of ledgers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from noted import noted
from suture.core.errors import LabelError
from suture.federation.server.record import LEDGERS, SiteLedgers
from suture.federation.server.results import AT_SERVER, Results
from suture.learning.training import LocalTraining
from suture.methods.partial import PartialLoss
from suture.protocol.messages import ClassScore, Metrics
from suture.protocol.records import Round, SiteRound, Validation
from suture_papers.fedlsm.fedlsm import FedLSM
from suture_results.notes import cautions, dominant
from suture_results.sentences import sentence, why_unmeasured
from world import refused

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


def test_overall_figures_and_recalls_of_groups_are_written() -> None:
    scores = {
        "Mass": ClassScore(0.6, None, None, 5, 95, 0.2),
        "Edema": ClassScore(0.9, None, None, 1, 9, 0.8),
    }
    groups = {"head": ("Edema", "Hernia"), "tail": ("Mass",)}
    found = measured(scores, overall={"accuracy": 0.5, "f1": None})
    summary = Results(LABELS, OWNERS, found, AT_SERVER, frequency=groups).to_dict()
    assert summary["overall"] == {"accuracy": 0.5, "f1": None}
    assert list(summary["recall"].items()) == [("Edema", 0.8), ("Mass", 0.2)], "in the order of the classes"
    assert summary["long_tail"]["accuracy"] == {"head": 0.8, "tail": 0.2, "all": 0.5}


@pytest.mark.parametrize(
    ("score", "counts"),
    [
        (None, None),
        (ClassScore(None, None, None, 0, 0), [0, 0]),
        (ClassScore(None, None, None, 1, 0), [1, 0]),
    ],
)
def test_an_undefined_class_has_a_reason(score: ClassScore | None, counts: Any) -> None:
    scores = {} if score is None else {"Edema": score}
    summary = Results(("Edema",), {"Edema": ("a",)}, measured(scores, 4), AT_SERVER).to_dict()
    assert summary["undefined"]["Edema"]["values"] == ({"counts": {"": counts}} if counts else {})
    assert sentence(**summary["undefined"]["Edema"])
    assert summary["mean_auroc"] is None
    assert summary["groups"] == {"shared": None, "unique": None}


def test_foreign_classes_are_refused() -> None:
    score = {"Edemma": ClassScore(0.5, None, None, 1, 1)}
    with refused("'Edemma'", by=LabelError):
        Results(("Edema",), {}, measured(score), AT_SERVER)
    with refused("'Edemma'", "'a'", by=LabelError):
        Results(("Edema",), {}, measured({}), AT_SERVER, {"a": score})


LOCAL = LocalTraining(lr=1e-2, batch_size=8, iterations=2)


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


# Cautions


def line(number: int, loss: float, step: float | None = None) -> Round:
    return Round(number, "main", "committed", 1.0, 0, 0, {}, Validation(loss, 0.7, loss_step=step))


def test_ties_and_coarse_steps_are_told() -> None:
    history = [line(1, 0.8), line(2, 0.6), line(3, 0.6)]
    [caution] = cautions(history, "site_loss", 3)
    assert "2, 3" in caution
    assert cautions(history, "site_loss", 1) == cautions(history, "last", 3) == []
    for step, found in ((0.05, 0), (0.1, 1)):  # a twentieth, and above
        assert len(cautions([line(1, 0.8, step), line(2, 0.6)], "site_loss", 2)) == found


def test_each_cause_has_its_sites() -> None:
    withheld, none = (None, None), (0, 20)
    said = why_unmeasured({"alpha": withheld, "beta": none, "gamma": withheld})
    assert said.startswith("withheld, because fewer than min_count")
    assert "at alpha and gamma; no positive among 20 labelled cases at beta" in said


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


# Digests


@pytest.mark.complete
def test_jobs_at_the_same_time_lose_no_digest_of_a_site(tmp_path: Path) -> None:
    children = []
    for job in range(4):
        child = os.fork()
        if not child:
            for number in range(20):
                SiteLedgers(tmp_path / LEDGERS).note({f"site-{job}": f"{number:064x}"})
            os._exit(0)
        children.append(child)
    assert {os.waitpid(child, 0)[1] for child in children} == {0}
    assert SiteLedgers(tmp_path / LEDGERS).read() == {f"site-{job}": f"{19:064x}" for job in range(4)}


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"a": 1}', b'{"a": "0"}', b"\xff"])
def test_a_damaged_file_is_warned_of_and_written_anew(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    held = SiteLedgers(tmp_path / LEDGERS)
    assert held.read() == {}
    assert not caplog.messages
    held.path.write_bytes(content)
    held.note({"b": "0" * 64})
    assert "is damaged" in caplog.messages[0]
    assert held.read() == {"b": "0" * 64}
