"""The figures in a table's cells: which result they come from, by hand, and when they are undefined."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stored_by_hand import SPEC, change, filled, store, table_spec, task, tuned, tuned_outcome, tuned_spec
from suture.core.errors import ConfigError
from suture.core.validation import parse
from suture_papers.tables.cells import (
    Estimate,
    Line,
    areas_of,
    class_means,
    figure_of,
    lines,
    mean_of,
    over_series,
    p_text,
    why_undefined,
)
from suture_papers.tables.outcome import Outcome, collect
from suture_papers.tables.results import Result
from suture_papers.tables.runs import final_runs
from suture_papers.tables.spec import OWN_COLUMNS, Column
from suture_results.comparison import Comparison
from suture_results.saved_models import GLOBAL
from world import refused

NIH = {"nih": {"data": {"dataset": "nih"}}}
ONE_SITE = "AUROC, classes of one site"


def by_row(outcome: Outcome) -> dict[str, Line]:
    return {line.row: line for line in lines(outcome)}


# By hand


def test_the_table_by_hand(tmp_path: Path) -> None:
    """Ours - theirs on the classes of one site: .1, .2, .3: t = 2 sqrt(3), p = .0742."""
    spec = table_spec()
    outcome = filled(
        spec.preset(None),
        tmp_path,
        lambda run: {"A": 0.8, "B": 0.5 + (0.1 * run.seed if run.row == "ours" else 0.0)},
    )
    theirs, ours = (line.estimates for line in lines(outcome))
    against = theirs[ONE_SITE].against
    assert against is not None
    assert (against.p, against.difference) == pytest.approx((0.0742, 0.2), abs=1e-4)
    assert (theirs[ONE_SITE].text, ours[ONE_SITE].text) == ("0.500 ± 0.000 ns", "0.700 ± 0.100")
    assert ours[ONE_SITE].against is None
    several = theirs["AUROC, classes of several sites"].against
    assert several is not None
    assert several.p == 1
    done = outcome.results["ours", "None"]
    assert class_means(spec, "ours", done, OWN_COLUMNS[0]) == pytest.approx({"A": 0.8, "B": 0.7})
    assert class_means(spec, "ours", done, OWN_COLUMNS[1]) == pytest.approx({"A": 0.8})


def test_over_classes_a_class_that_one_of_them_does_not_know_is_no_pair(tmp_path: Path) -> None:
    table = table_spec(pairs="classes").preset(None)
    outcome = filled(table, tmp_path, lambda run: {"A": 0.8, "B": None if run.row == "theirs" else 0.6})
    theirs, ours = (line.estimates["AUROC, all classes"] for line in lines(outcome))
    assert theirs.against is not None
    assert theirs.against.n == 1
    assert ours.text == "0.700 ± 0.100"  # population SD over classes


@pytest.mark.parametrize(
    ("p", "text"),
    [(0.0496, ".0496"), (0.0504, ".050"), (0.04949, ".049"), (0.0004, "< .001"), (1.0, "1.000")],
)
def test_a_p_below_the_threshold_does_not_read_as_on_it(p: float, text: str) -> None:
    assert p_text(Estimate(0.5, 0.1, (), Comparison(5, 0.1, p, 0.5))) == text
    assert p_text(Estimate(0.5, 0.1, (), None)) == "–"
    assert p_text(Estimate(0.5, 0.1, (), Comparison(1, 0.1, float("nan"), 1))) == "–"


def test_a_series_is_compared_over_all_its_values_and_a_steady_row_has_one_run(tmp_path: Path) -> None:
    series = {"key": "simulation.images", "values": [20, 40], "label": "images"}
    rows = {**SPEC["rows"], "theirs": {"name": "Central", "set": {"method": "vanilla"}, "steady": True}}
    changes = {"series": series, "columns": [{"name": "all"}]}
    spec = table_spec(rows=rows, presets={"tiny": {"note": "", "seeds": [1]}}, **changes)
    runs = list(final_runs(spec.preset(None), {}))
    assert [(run.row, run.x) for run in runs] == [(row, x) for x in (20, 40) for row in ("theirs", "ours")]
    assert len({run.name for run in runs if run.row == "theirs"}) == 1
    assert len({run.name for run in runs}) == 3
    areas = {("theirs", 20): 0.9, ("ours", 20): 0.7, ("theirs", 40): 0.9, ("ours", 40): 0.5}
    outcome = filled(
        spec.preset(None), tmp_path, lambda run: {"A": 0.5, "B": areas[run.row, int(str(run.x))]}
    )
    found = over_series(outcome, spec.columns[0])
    assert found["theirs"].values == pytest.approx((0.7, 0.7))
    assert found["ours"].values == pytest.approx((0.6, 0.5))
    unsteady = table_spec(**changes).preset(None)
    outcome = filled(unsteady, tmp_path / "two", lambda _: {"A": 0.5, "B": 0.5})
    against = over_series(outcome, spec.columns[0])["theirs"].against
    assert against is not None
    assert against.n == 6  # three seeds at two values


# Figures that are not class by class

FEDMAS: dict[str, Any] = {
    "loss": 0.15,
    "overall": {"balanced_accuracy": 0.0, "accuracy": 0.7},
    "long_tail": {"accuracy": {"head": 0.9, "tail": 0.1, "all": 0.5}},
    "attributes": {"values": {"dark": {"balanced_accuracy": 0.4}}, "mean": {"balanced_accuracy": 0.6}},
    "local_models": {"mean": {"local": {"auroc": 0.8, "balanced_accuracy": 0.3}}},
}


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ({"metric": "balanced_accuracy"}, 0.0),  # zero is a value
        ({"metric": "f1"}, None),
        ({"metric": "loss"}, 0.15),
        ({"metric": "accuracy", "frequency": "tail"}, 0.1),
        ({"metric": "accuracy", "frequency": "all"}, 0.5),
        ({"metric": "accuracy", "frequency": "medium"}, None),
        ({"metric": "balanced_accuracy", "attribute": "dark"}, 0.4),
        ({"metric": "balanced_accuracy", "attribute": "mean"}, 0.6),
        ({"metric": "balanced_accuracy", "attribute": "light"}, None),
        ({"metric": "balanced_accuracy", "models": "local"}, 0.3),
        ({"models": "local"}, 0.8),
        ({"models": "global"}, None),
    ],
)
def test_a_column_of_a_figure_that_is_not_class_by_class(column: dict[str, Any], value: float | None) -> None:
    assert figure_of(FEDMAS, parse(Column, {"name": "x", **column}, "column")) == value


def test_a_run_from_before_there_was_a_figure_has_none_of_it(tmp_path: Path) -> None:
    """B has no test image, hence no recall; a loss is of models that know all classes."""
    columns = [
        {"name": "tail", "metric": "accuracy", "frequency": "tail"},
        {"name": "rare", "metric": "recall", "classes": ["A", "C"]},
        {"name": "recall", "metric": "recall"},
        {"name": "loss", "test": "nih", "metric": "loss"},
    ]
    table = table_spec(columns=columns, tests=NIH).preset("tiny")
    filled(table, tmp_path, lambda _: {"A": 0.5, "B": 0.5})
    narrow = {"auroc": {}, "unlearned": ["A"], "loss": 0.9}
    whole = {"auroc": {"A": 0.5}, "unlearned": []}
    for run in final_runs(table, {}):
        if run.row == "ours":
            recall = {"A": 0.25, "B": None, "C": 0.5, "D": 0.75}
            metrics = {"long_tail": {"accuracy": {"tail": run.seed / 10}}, "recall": recall}
            tests = {"nih": {"x": narrow, "y": {**whole, "loss": 0.25}}}
            change(tmp_path, run, metrics=metrics, tests=tests)
        else:
            change(tmp_path, run, tests={"nih": {"global": whole}})
    found = by_row(collect(table, store(tmp_path)))
    ours = {name: estimate.values for name, estimate in found["ours"].estimates.items()}
    assert ours == {"tail": (0.1, 0.2, 0.3), "rare": (0.375,) * 3, "recall": (0.5,) * 3, "loss": (0.25,) * 3}
    assert found["ours"].estimates["tail"].text == "0.200 ± 0.100"
    assert {estimate.values for estimate in found["theirs"].estimates.values()} == {(None, None, None)}


# External tests

TESTED = table_spec(
    rows={
        "ours": {"name": "Surgical", "set": {"method": "surgical"}},
        "baseline": {"name": "Y alone", "set": {"method": "individual"}, "site": "y"},
        "pfl": {"name": "PFL", "set": {"method": "pfl"}},
    },
    tests={"home": {"home": "x", "data": {}}, "away": {"data": {}}},
    columns=[{"name": "home", "test": "home"}, {"name": "away", "test": "away"}],
)


def measured(**models: dict[str, Any]) -> Result:
    """Class A is known to sites x and y, B to y alone; the away test set also has C."""
    tests = {"home": dict(models), "away": dict(models)}
    return Result(
        {"sites": {"x": ["A"], "y": ["A", "B"]}, "settings": {}}, {"auroc": {}}, None, None, 1.0, tests
    )


def model(unlearned: list[str] | None = None, **auroc: float | None) -> dict[str, Any]:
    return {"auroc": auroc, "unlearned": unlearned or []}


def test_a_global_model_is_measured_where_it_has_learned_every_class_of_the_column() -> None:
    home, away = TESTED.columns
    ab = Column("c", "away", classes=("A", "B"))
    for unlearned, areas, column, mean in (
        ([], {"A": 0.8, "B": 0.6}, home, 0.7),
        ([], {"A": 0.8, "B": 0.6}, Column("u", "home", "unique"), 0.6),
        ([], {"A": 0.8, "B": 0.6}, Column("s", "home", "shared"), 0.8),
        ([], {"A": 0.8, "B": 0.6}, Column("c", "away", classes=("A",)), 0.8),
        (["C"], {"A": 0.8, "B": 0.6}, away, None),
        (["C"], {"A": 0.8, "B": 0.6}, ab, 0.7),
        ([], {"A": 0.8, "B": None}, home, 0.8),  # without positives, which leaves no mean undefined
    ):
        found = mean_of(TESTED, "ours", measured(**{GLOBAL: model(unlearned, **areas)}), column)
        assert found == (mean if mean is None else pytest.approx(mean)), (unlearned, areas, column)
    lacking = measured(**{GLOBAL: model(["C"], A=0.8)})
    assert "every class" in why_undefined(TESTED, "ours", [lacking], away)


def test_personal_models_are_measured_at_home_by_name_or_all_together() -> None:
    found = measured(x=model(["B"], A=0.8), y=model(A=0.6, B=0.9))
    home, away = TESTED.columns
    assert mean_of(TESTED, "pfl", found, home) is None  # that of site x, which does not know B
    assert areas_of(TESTED, "pfl", found, away) == {"A": 0.6, "B": 0.9}  # of y, which alone knows both
    assert areas_of(TESTED, "pfl", found, Column("a", "away", classes=("A",))) == {"A": pytest.approx(0.7)}
    assert areas_of(TESTED, "baseline", found, home) == {"A": 0.6, "B": 0.9}
    assert mean_of(TESTED, "pfl", None, home) is None


# Intervals over patients

GROUPS = {"shared": {"loss": 0.3, "mean_interval": [0.6, 0.9]}}
OLD = {"auroc": {"A": 0.8, "B": 0.6}, "unlearned": [], "loss": 0.2}
WHOLE = {**OLD, "mean_interval": [0.65, 0.75], "groups": GROUPS}
NARROW = {"auroc": {"A": 0.9}, "unlearned": ["B"], "groups": GROUPS}


def texts(folder: Path, seeds: list[int], ours: Any, theirs: Any) -> list[dict[str, str]]:
    columns = [
        {"name": "all", "test": "nih", "spread": "interval"},
        {"name": "shared", "test": "nih", "group": "shared", "spread": "interval"},
        {"name": "loss", "test": "nih", "metric": "loss"},
        {"name": "shared loss", "test": "nih", "group": "shared", "metric": "loss"},
        {"name": "own", "spread": "interval"},
    ]
    rows = {key: {**row, "published": {}} for key, row in SPEC["rows"].items()}
    presets = {"p": {"note": "", "seeds": seeds, "pairs": "classes"}}
    table = table_spec(columns=columns, tests=NIH, rows=rows, presets=presets).preset(None)
    filled(table, folder, lambda _: {"A": 0.7, "B": 0.5})
    for run in final_runs(table, {}):
        record = store(folder).find(run.name)
        assert record is not None
        metrics = {**record["metrics"], "mean_interval": [0.55, 0.66] if run.row == "ours" else None}
        change(folder, run, tests={"nih": {"ours": ours, "theirs": theirs}[run.row]}, metrics=metrics)
    found = by_row(collect(table, store(folder)))
    return [{n: f.text for n, f in found[row].estimates.items()} for row in ("ours", "theirs")]


def test_a_mean_of_one_run_and_one_model_shows_its_interval(tmp_path: Path) -> None:
    """A result without one shows the mean alone, and a figure of a run has no spread over classes."""
    ours, theirs = texts(tmp_path / "one", [1], {"global": WHOLE}, {"global": OLD})
    assert ours == {
        "all": "0.700 (0.650, 0.750)",
        "shared": "0.800 (0.600, 0.900)",
        "loss": "0.200",
        "shared loss": "0.300",
        "own": "0.600 (0.550, 0.660)",
    }
    assert theirs["all"].startswith("0.700")
    assert not {"(", "±"} & set(theirs["all"] + theirs["own"])
    assert theirs["shared loss"] == "–"
    ours, _ = texts(tmp_path / "two", [1, 2], {"global": WHOLE}, {"global": WHOLE})
    assert ours["all"] == "0.700 ± 0.100"
    ours, _ = texts(tmp_path / "models", [1], {"x": WHOLE, "y": NARROW}, {"global": WHOLE})
    assert ours["all"] == "0.700 (0.650, 0.750)"  # x alone has learned both
    assert ours["shared"] == "0.850"


# Fine-tuned models


def test_fine_tuning_runs_on_the_same_split_are_pairs(tmp_path: Path) -> None:
    """Differences .1, .2, .3: t = 2 sqrt(3), p = .0742."""
    theirs, ours = lines(tuned_outcome(tuned_spec(), tmp_path / "one"))
    against = theirs.estimates["A"].against
    assert against is not None
    assert (against.n, against.p) == (3, pytest.approx(0.0742, abs=1e-4))
    found = [line.estimates[name].text for name in ("A", "epochs", "B, F1") for line in (theirs, ours)]
    assert found[::2] == ["0.600 ± 0.000 ns", "2.0 ± 0.0 ns", "0.450 ± 0.050 ns"]
    assert found[1::2] == ["0.800 ± 0.100", "2.0 ± 0.0", "0.450 ± 0.050"]
    assert (theirs.runs, ours.runs) == (3, 3)
    seeds = tuned_spec(presets={"tiny": {"note": "", "seeds": [1, 2]}})
    against = lines(tuned_outcome(seeds, tmp_path / "two"))[0].estimates["A"].against
    assert against is not None
    assert against.n == 6


def test_epochs_count_to_one_goal_for_all(tmp_path: Path) -> None:
    """A run that is best at once and then decays is not the fastest, if it never was good."""
    spec = tuned_spec(columns=[{"name": "epochs", "task": "A", "metric": "epochs"}])
    curves = {"theirs": [[0.5, 0.7, 0.8], [0.5, 0.8, 0.9]], "ours": [[0.84, 0.7, 0.6], [0.6, 0.5, 0.4]]}
    for run in final_runs(spec.preset(None), {}):
        [one] = task(0.5)["runs"]
        tuned(run, tmp_path, A={"runs": [{**one, "auroc": curve} for curve in curves[run.row]]})
    theirs, ours = lines(collect(spec.preset(None), store(tmp_path)))
    # The goal is .85, the mean of .8 and .9.
    assert theirs.estimates["epochs"].text == "3.0 (1 of 2)"
    assert ours.estimates["epochs"].text == "not reached"
    against = theirs.estimates["epochs"].against  # a test of those that arrive would leave out the others
    assert against is not None
    assert (against.n, against.mark) == (2, "–")
    assert (theirs.runs, ours.runs) == (2, 2)


def test_a_task_that_was_not_fine_tuned_is_named(tmp_path: Path) -> None:
    spec = tuned_spec(columns=[{"name": "x", "task": "Bb"}])
    with refused("'Bb'", "B", by=ConfigError):
        lines(tuned_outcome(spec, tmp_path))
