"""The best round, scores over sites and groups by hand, and what metrics.json and notes say of them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from suture.core.errors import LabelError
from suture.federation.server.record import LEDGERS, SiteLedgers
from suture.federation.server.results import AT_SERVER, Results
from suture.federation.server.selection import (
    Best,
    ModelSelection,
    across_sites,
    better,
    by_attribute,
    by_aurocs,
    by_frequency,
    classes_of,
    interval_of_mean,
    interval_over_sites,
    local_and_global,
    mean_of,
    over_sites,
)
from suture.learning.evaluation import NOTHING
from suture.learning.metrics import score_classes
from suture.protocol.messages import ClassScore, Metrics
from suture.protocol.records import Round, SiteRound, Validation, read_run
from suture_results.notes import cautions, dominant, kept_round
from suture_results.sentences import sentence
from world import refused


def test_rounds_of_equal_loss_are_told_apart_by_auroc_and_else_the_later_is_kept() -> None:
    """Losses on a grid: a model that still improves stands at 0.45 for three rounds."""
    best = None
    chosen = []
    for round_, (loss, auroc) in enumerate(
        [(0.5, 0.7), (0.45, 0.8), (0.15 * 3, 0.85), (0.45, 0.85), (0.45, 0.82), (0.5, 0.9)], 1
    ):
        best = better(best, Best(round_, -loss, auroc))
        chosen.append(best.round)
    assert chosen == [1, 2, 3, 4, 4, 4]
    standings = ModelSelection(by="site_loss").after_sites(Best(1, -0.5, 0.7), "site_loss")
    standings = standings.after_own({"a": Best(1, -0.5), "b": Best(1, -0.5, 0.9)})
    standings = standings.after_own({"a": Best(2, -0.5), "b": Best(2, -0.5, 0.8)})
    assert (standings.of("a"), standings.of("b")) == (2, 1)


def test_a_run_in_which_nothing_improves_is_stopped_by_patience() -> None:
    """Rounds of equal loss: the later one is kept, and is no improvement."""
    standings = ModelSelection(by="site_loss")
    for round_, (loss, auroc) in enumerate([(0.5, 0.7), (0.4, 0.8), (0.4, 0.8), (0.4, 0.8)], 1):
        standings = standings.after_sites(Best(round_, -loss, auroc), "site_loss")
        assert standings.over(round_, 2) is (round_ == 4)
    assert standings.best == Best(4, -0.4, 0.8)
    standings = standings.after_sites(Best(5, -0.4, 0.9), "site_loss")
    assert not standings.over(5, 2)


def best(round_: int, **losses: float) -> Best:
    """A round by the losses of some sites."""
    parts = {classes_of(site, ["Mass"]): -loss for site, loss in losses.items()}
    return Best(round_, fmean(parts.values()), parts=parts)


def test_a_round_is_compared_by_the_sites_that_measured_both() -> None:
    """A site with a high loss joins: the mean rises, and the model is better at the site that was there."""
    joined = best(2, old=0.5, new=1.3)
    standings = ModelSelection(best(1, old=0.6), improved=1, by="site_loss").after_sites(joined, "site_loss")
    assert (standings.best, standings.improved) == (joined, 2)
    standings = standings.after_sites(best(3, old=0.55), "site_loss")
    assert standings.best == joined, "the site with the high loss is missing, and the other one lost"
    assert standings.after_sites(best(4, other=0.1), "site_loss").best == joined, "nobody measured both"


def test_a_site_that_annotates_another_class_measures_another_loss() -> None:
    """The losses of beta are over one class, then over two; alpha alone can compare the rounds."""
    first = Best(1, -0.5, parts={classes_of("alpha", ["Mass"]): -0.6, classes_of("beta", ["Mass"]): -0.4})
    two = classes_of("beta", ["Nodule", "Mass"])
    assert two == classes_of("beta", ["Mass", "Nodule"])
    second = Best(2, -0.7, parts={classes_of("alpha", ["Mass"]): -0.5, two: -0.9})
    standings = ModelSelection(first, improved=1, by="site_loss").after_sites(second, "site_loss")
    assert standings == ModelSelection(second, improved=2, by="site_loss")
    third = Best(3, -0.3, parts={classes_of("alpha", ["Mass"]): -0.55, classes_of("beta", ["Mass"]): -0.05})
    assert ModelSelection(second, by="site_loss").after_sites(third, "site_loss").best == second


def test_a_model_of_a_site_that_annotates_another_class_is_selected_anew() -> None:
    one, two = ({classes_of("a", names): -1.0} for names in (["Mass"], ["Mass", "Nodule"]))
    standings = ModelSelection().after_own({"a": Best(1, -0.2, parts=one)})
    assert standings.after_own({"a": Best(2, -0.3, parts=one)}).of("a") == 1
    assert standings.after_own({"a": Best(2, -0.9, parts=two)}).of("a") == 2


def test_rounds_are_compared_by_the_classes_that_both_have() -> None:
    """A hard class joins: the mean over all falls from .80 to .70, the mean over the two before rises."""
    first = Best(1, 0.8, parts={"Mass": 0.7, "Nodule": 0.9})
    second = Best(2, 0.7, parts={"Mass": 0.72, "Nodule": 0.9, "Hernia": 0.48})
    standings = ModelSelection(first, improved=1).after(second)
    assert (standings.best, standings.improved) == (second, 2)
    third = Best(3, 0.69, parts={"Mass": 0.72, "Nodule": 0.9, "Hernia": 0.45})
    standings = standings.after(third)
    assert (standings.best, standings.over(3, 1)) == (second, True), "of the same classes the means compare"
    easy = Best(2, 0.85, parts={"Mass": 0.65, "Nodule": 0.9, "Cardiomegaly": 1.0})
    assert ModelSelection(first).after(easy).best == first, "an easy class does not make a model better"


def test_an_auroc_of_few_images_has_no_say() -> None:
    """The mean of .7, .9 and .8: not of nine positives, of nine negatives, or of what is withheld."""
    scores = {
        "a": {"Mass": ClassScore(0.7, None, None, 10, 90), "Edema": ClassScore(0.1, None, None, 9, 90)},
        "b": {"Mass": ClassScore(0.9, None, None, 10, 10), "Nodule": ClassScore(0.8, None, None, 90, 10)},
        "c": {"Nodule": ClassScore(0.1, None, None, 90, 9), "Mass": NOTHING},
    }
    own = by_aurocs(3, {"a": 0.5}, scores)
    assert own["a"] == Best(3, 0.7, -0.5, {classes_of("a", ["Mass"]): 0.7})
    assert (own["b"].value, own["b"].tie, own.keys()) == (pytest.approx(0.85), 0, {"a", "b"})
    every = over_sites(own, -0.5)
    assert every is not None
    assert (every.round, every.value, every.tie, len(every.parts)) == (3, pytest.approx(0.8), -0.5, 3)
    assert over_sites(by_aurocs(3, {}, {"c": scores["c"]}), 0.0) is None


def test_losses_stand_in_for_aurocs_until_there_are_some() -> None:
    standings = ModelSelection(by="site_auroc").after_sites(Best(1, -0.5), "site_loss")
    standings = standings.after_sites(Best(2, -0.4), "site_loss").after_sites(Best(3, -0.45), "site_loss")
    assert (standings.best, standings.by) == (Best(2, -0.4), "site_loss")
    first = standings.after_sites(Best(4, 0.3), "site_auroc")
    assert (first.best, first.by) == (Best(4, 0.3), "site_auroc")
    assert first.after_sites(Best(5, -0.1), "site_loss") == first


# Scores


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
    assert found["sites"]["a"] == {"global": {"n": 10, "accuracy": 0.5}, "local": {"n": 10, "accuracy": 0.9}}
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


def test_what_sites_lack_or_withhold_is_left_out_or_withheld() -> None:
    def merged(**at: ClassScore) -> ClassScore:
        return across_sites({site: {"Edema": score} for site, score in at.items()})["Edema"]

    recalls = {
        s: ClassScore(None, None, None, n, 0, r)
        for s, n, r in (("a", 1, 1.0), ("b", 99, 0.5), ("c", 0, None))
    }
    assert merged(**recalls) == ClassScore(None, None, None, 100, 0, 0.75), "over the sites that have one"
    withheld = ClassScore(None, None, None, None, 12)
    assert merged(a=withheld, b=ClassScore(0.5, None, None, 5, 5)) == ClassScore(0.5, None, None, None, 17)
    nothing = ClassScore(None, None, None, 0, 3)
    assert across_sites({"a": {"Edema": nothing}, "b": {}}) == {"Edema": nothing}
    assert across_sites({}) == {}


# Intervals


def score(auroc: float | None, half: float | None = None) -> ClassScore:
    if auroc is None or half is None:
        return ClassScore(auroc, None, None, 5, 5)
    return ClassScore(auroc, auroc - half, auroc + half, 5, 5)


def test_variances_of_sites_add() -> None:
    """Half-widths .03 and .04 of two sites make .05 of their sum, and .025 of their mean."""
    assert interval_over_sites([score(0.8, 0.03), score(0.9, 0.04)]) == (
        pytest.approx(0.825),
        pytest.approx(0.875),
    )
    assert interval_over_sites([score(0.8, 0.03)]) == (pytest.approx(0.77), pytest.approx(0.83))
    # Four equal sites halve the interval of one.
    assert interval_over_sites([score(0.7, 0.08)] * 4) == (pytest.approx(0.66), pytest.approx(0.74))


def test_without_every_interval_there_is_none() -> None:
    assert interval_over_sites([]) is None
    assert interval_over_sites([score(0.8, 0.03), score(0.9)]) is None
    assert interval_over_sites([score(0.8)]) is None
    assert interval_of_mean({}) is None
    assert interval_of_mean({"a": {"x": score(None)}}) is None
    assert interval_of_mean({"a": {"x": score(0.8, 0.1), "y": score(0.7)}}) is None


def test_the_mean_over_classes_by_hand() -> None:
    """a: x (.8 ± .04) and y (.6 ± .02), b: x (.9 ± .08): x weighs 1/4 at each site, y 1/2 at a.

    The mean is (.85 + .6) / 2 = .725; a adds at most .01 + .01, b .02: the root of .0004 + .0004.
    """
    sites = {
        "a": {"x": score(0.8, 0.04), "y": score(0.6, 0.02)},
        "b": {"x": score(0.9, 0.08), "z": score(None)},
    }
    half = math.sqrt(0.0008)
    assert interval_of_mean(sites) == (pytest.approx(0.725 - half), pytest.approx(0.725 + half))


@given(
    st.lists(st.floats(0.001, 0.05), min_size=2, max_size=5),
    st.lists(st.floats(-1, 1), min_size=30, max_size=30),
)
def test_no_correlation_of_the_classes_makes_the_mean_wider(halves: list[float], loads: list[float]) -> None:
    """One site: the exact half-width under any correlation matrix is at most the one that is given."""
    factors = np.array(loads[: 6 * len(halves)]).reshape(len(halves), -1) + 1e-3
    factors /= np.linalg.norm(factors, axis=1, keepdims=True)
    weighted = np.array(halves) / len(halves)
    exact = math.sqrt(weighted @ (factors @ factors.T) @ weighted)
    found = interval_of_mean({"a": {str(i): score(0.5, half) for i, half in enumerate(halves)}})
    assert found is not None
    assert (found[1] - found[0]) / 2 >= exact - 1e-12


def test_it_holds_the_truth_about_as_often_as_it_says() -> None:
    """Two sites of 60 and 40 normal scores whose true AUROC is .7602 (a shift of 1 SD)."""
    rng, truth, hits = np.random.default_rng(1), 0.7602, 0
    for draw in range(120):
        scores = []
        for n in (30, 20):
            y = np.repeat([0.0, 1.0], n)
            s = rng.normal(size=2 * n) + y
            scores.append(score_classes(("x",), y[:, None], s[:, None], bootstrap=200, seed=draw)["x"])
        low, high = interval_over_sites(scores) or (1.0, 0.0)
        hits += low <= truth <= high
    assert 0.88 <= hits / 120 <= 0.995


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


# Cautions


def line(number: int, loss: float, step: float | None = None) -> Round:
    return Round(number, "main", "committed", 1.0, 0, 0, {}, Validation(loss, 0.7, loss_step=step))


def test_ties_and_coarse_steps_are_told() -> None:
    history = [line(1, 0.8), line(2, 0.6), line(3, 0.6)]
    [caution] = cautions(history, "site_loss", 3)
    assert "2, 3" in caution
    assert cautions(history, "site_loss", 1) == cautions(history, "last", 3) == []
    auroc = [replace(one, validation=Validation(one.round / 10, selecting_auroc=0.6)) for one in history]
    [caution] = cautions(auroc, "site_auroc", 3)
    assert "1, 2, 3" in caution
    for step, found in ((0.05, 0), (0.1, 1)):  # a twentieth, and above
        assert len(cautions([line(1, 0.8, step), line(2, 0.6)], "site_loss", 2)) == found


@pytest.mark.parametrize(
    ("selection", "kept", "said", "helps"),
    [
        ("site_loss", 3, ["Round 3 of 10", "validation losses"], "fewer rounds"),
        ("site_auroc", 5, ["Round 5 of 10", "validation AUROCs"], "fewer rounds"),
        ("server_metric", 6, ["Round 6 of 10", "server's validation data"], None),
        ("site_auroc", 10, ["Round 10 of 10"], "more rounds"),
        ("last", 10, ["Round 10 of 10", "after round 4"], "fewer rounds"),
    ],
)
def test_the_kept_round_is_said_with_its_rule_and_what_its_place_shows(
    selection: str, kept: int, said: list[str], helps: str | None, run_folder: Any
) -> None:
    run = replace(read_run(run_folder), selection=selection, selected_round=kept)
    history = [
        replace(line(r, 0.5), validation=Validation(0.5, 0.8 if r == 4 else 0.7)) for r in range(1, 11)
    ]
    text = kept_round(run, history)
    assert all(part in text for part in said)
    assert [part in text for part in ("fewer rounds", "more rounds")] == [
        part == helps for part in ("fewer rounds", "more rounds")
    ]
    alone = replace(run, method=replace(run.method, personal="model"))
    assert ("Each site" in kept_round(alone, history)) == selection.startswith("site_")


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
