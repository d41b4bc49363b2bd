"""Test sets of a table: which model each row is measured with, and what is undefined."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path
from typing import Any

import pytest

from official import write_mimic, write_nih
from stored_by_hand import change, store
from suture.core.errors import DataError, FederationError
from suture.core.validation import parse
from suture_papers.chest_xrays.chest_sites import nih_config
from suture_papers.tables.cells import areas_of, mean_of, why_undefined
from suture_papers.tables.conduct import Session, do_runs
from suture_papers.tables.external_tests import absent_tests, check_tests, site_config
from suture_papers.tables.results import Result
from suture_papers.tables.runs import Run, final_runs
from suture_papers.tables.spec import Column, ExternalTest, TableSpec
from suture_results.saved_models import GLOBAL, models_of

TESTS = {
    "home": {
        "home": "x",
        "data": {"dataset": "hospital", "root": "{data}/a", "table": "{data}/a/labels.csv"},
    },
    "away": {"data": {"dataset": "hospital", "root": "{data}/b", "table": "{data}/b/labels.csv"}},
}


def table_spec(**changes: Any) -> TableSpec:
    rows = {
        "ours": {"name": "Surgical", "set": {"method": "surgical"}},
        "baseline": {"name": "Y alone", "set": {"method": "individual"}, "site": "y"},
        "pfl": {"name": "PFL", "set": {"method": "pfl"}},
    }
    spec = {
        "title": "t",
        "source": "s",
        "job": "demo",
        "reference": "ours",
        "rows": rows,
        "tests": TESTS,
        "columns": [{"name": "home", "test": "home"}, {"name": "away", "test": "away"}],
        "presets": {"tiny": {"note": "", "seeds": [1]}},
    }
    return parse(TableSpec, {**spec, **changes}, "test")


def measured(**models: dict[str, Any]) -> Result:
    """Class A is known to sites x and y, B to y alone; the away test set also has C."""
    tests = {"home": dict(models), "away": dict(models)}
    sites = {"x": ["A"], "y": ["A", "B"]}
    return Result({"sites": sites, "settings": {}}, {"auroc": {}}, None, None, 1.0, tests)


def model(unlearned: list[str] | None = None, **auroc: float | None) -> dict[str, Any]:
    return {"auroc": auroc, "unlearned": unlearned or []}


def test_a_global_model_is_measured_on_every_test_set() -> None:
    result = measured(**{GLOBAL: model(A=0.8, B=0.6)})
    spec = table_spec()
    assert mean_of(spec, "ours", result, spec.columns[0]) == pytest.approx(0.7)
    assert mean_of(spec, "ours", result, Column("u", "home", "unique")) == 0.6
    assert mean_of(spec, "ours", result, Column("s", "home", "shared")) == 0.8
    assert mean_of(spec, "ours", result, Column("c", "away", classes=("A",))) == 0.8


def test_a_class_not_learned_leaves_a_mean_undefined_but_one_without_positives_does_not() -> None:
    spec = table_spec()
    lacking = measured(**{GLOBAL: model(["C"], A=0.8, B=0.6)})
    assert mean_of(spec, "ours", lacking, spec.columns[1]) is None
    assert "trained on every class" in why_undefined(spec, "ours", [lacking], spec.columns[1])
    assert mean_of(spec, "ours", lacking, Column("c", "away", classes=("A", "B"))) == pytest.approx(0.7)
    empty = measured(**{GLOBAL: model(A=0.8, B=None)})
    assert mean_of(spec, "ours", empty, spec.columns[0]) == 0.8


def test_personal_models_are_measured_at_home_by_name_or_all_together() -> None:
    spec = table_spec()
    result = measured(x=model(["B"], A=0.8), y=model(A=0.6, B=0.9))
    home, away = spec.columns
    assert mean_of(spec, "pfl", result, home) is None  # that of site x, which does not know B
    assert areas_of(spec, "pfl", result, away) == {"A": 0.6, "B": 0.9}  # of y, which alone knows both
    assert areas_of(spec, "pfl", result, Column("a", "away", classes=("A",))) == {"A": pytest.approx(0.7)}
    assert areas_of(spec, "baseline", result, home) == {"A": 0.6, "B": 0.9}
    assert mean_of(spec, "pfl", None, home) is None


@pytest.mark.complete
def test_models_are_found_and_tested_after_their_run(tmp_path: Path) -> None:
    from suture.execution.job import load_job, with_settings

    small = {"simulation.images": 30, "simulation.held_out": 30, "model.size": 32, "rounds": 1}
    data = tmp_path / "data"
    settings = [f"{k}={v}" for k, v in small.items()]
    job = with_settings(load_job("demo"), settings)
    assert job.simulation is not None
    job.simulation.prepare(data, data, 7, job.method)
    test = {"dataset": "hospital", "root": "{data}/server/images", "table": "{data}/server/labels.csv"}
    tests = {"away": {"data": test}}
    spec = table_spec(
        tests=tests,
        columns=[{"name": "away", "test": "away"}],
        presets={"tiny": {"note": "", "seeds": [1], "set": small}},
        rows={
            "ours": {"name": "Surgical", "set": {"method": "surgical"}},
            "pfl": {"name": "PFL", "set": {"method": "pfl"}},
        },
    )
    runs = list(final_runs(spec.preset(None), {}))
    reported: list[str] = []
    session = Session(store(tmp_path / "results"), tmp_path / "work", data, reported.append)
    table = data / "server" / "labels.csv"
    table.rename(data / "later.csv")
    without = do_runs(runs[:1], session, 1)[runs[0].name]
    assert any("test 'away' is left out: there is no {data}/server/labels.csv" in line for line in reported)
    assert (without.tests, without.untested) == ({}, {"away": "{data}/server/labels.csv"})
    assert mean_of(spec, "ours", without, spec.columns[0]) is None
    why = why_undefined(spec, "ours", [without], spec.columns[0])
    assert why == "the data of the test were missing: {data}/server/labels.csv"
    (data / "later.csv").rename(table)
    results = do_runs(runs, session, 1)
    ours, pfl = (results[run.name].tests["away"] for run in runs)
    assert not results[runs[0].name].untested
    assert sum(line.startswith("begins") for line in reported) == 2
    assert set(ours) == {GLOBAL}
    assert len(ours[GLOBAL]["auroc"]) == 10
    assert ours[GLOBAL]["n"] == table.read_text().count(",test") == 21
    low, high = ours[GLOBAL]["mean_interval"]
    assert low <= mean_of(spec, "ours", results[runs[0].name], spec.columns[0]) <= high
    assert ours[GLOBAL]["intervals"].keys() == ours[GLOBAL]["auroc"].keys()
    shared, unique = (ours[GLOBAL]["groups"][group] for group in ("shared", "unique"))
    assert min(shared["loss"], unique["loss"]) < ours[GLOBAL]["loss"] < max(shared["loss"], unique["loss"])
    assert shared["mean_interval"] != unique["mean_interval"]
    assert set(pfl) == {"harbor", "lakeside", "northfield"}
    assert len(pfl["northfield"]["unlearned"]) == 5
    shutil.rmtree(tmp_path / "work" / runs[0].name / "model")
    with pytest.raises(FederationError, match="delete the folder, and the run is done again"):
        models_of(tmp_path / "work" / runs[0].name)
    change(tmp_path / "results", runs[0], untested={"away": "x"})
    do_runs(runs[:1], session, 1)
    path = tmp_path / "results" / "test.jsonl"
    assert f"delete the run's line in {path} and {tmp_path / 'work' / runs[0].name}" in reported[-1]


def nih_and_mimic(root: Path) -> dict[str, ExternalTest]:
    """Small releases as they are given out, with the names that they have there, and tests on them."""
    table = write_nih(root / "nih") / "Data_Entry_2017.csv"
    table.rename(table.with_name("Data_Entry_2017_v2020.csv"))
    (root / "nih" / "images").rename(root / "nih" / "images_001")
    for path in list(write_mimic(root / "mimic").glob("*.csv")):
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    studies = "{data}/mimic/mimic-cxr-2.0.0-chexpert.csv"
    data = {
        "nih": {"dataset": "nih", "root": "{data}/nih", "split": "patients", "partial": True},
        "mimic": {"dataset": "mimic", "root": "{data}/mimic", "table": studies, "lists": "{data}/mimic"},
    }
    return {name: ExternalTest(described) for name, described in data.items()}


def test_releases_are_found_as_they_are_given_out(tmp_path: Path) -> None:
    tests = nih_and_mimic(tmp_path)
    assert absent_tests(tests, tmp_path) == {}
    check_tests(tests, tmp_path)
    config = site_config("nih", tests["nih"], Path(), tmp_path)
    assert config.data == nih_config(tmp_path / "nih", config.data.seed)
    (tmp_path / "nih" / "Data_Entry_2017_v2020.csv").unlink()
    assert absent_tests(tests, tmp_path) == {"nih": "{data}/nih/Data_Entry_2017*.csv*"}
    assert absent_tests(tests, tmp_path / "other") == {
        "nih": "{data}/nih/Data_Entry_2017*.csv*",
        "mimic": "{data}/mimic/mimic-cxr-2.0.0-chexpert.csv",
    }


@pytest.mark.parametrize(
    ("name", "file", "says"),
    [
        ("nih", "nih/Data_Entry_2017_v2020.csv", "is empty"),
        ("mimic", "mimic/mimic-cxr-2.0.0-metadata.csv.gz", "metadata"),
    ],
)
def test_a_test_that_cannot_be_read_is_told_before_anything_is_run(
    name: str, file: str, says: str, tmp_path: Path
) -> None:
    tests = nih_and_mimic(tmp_path)
    path = tmp_path / file
    path.unlink() if name == "mimic" else path.write_text("")
    run = Run("ours", None, "demo", {"seed": 1}, tests)
    reported: list[str] = []
    with pytest.raises(DataError, match=f"test '{name}': .*{says}"):
        do_runs([run], Session(store(tmp_path / "kept"), tmp_path / "work", tmp_path, reported.append), 1)
    assert not reported
    assert not (tmp_path / "work").exists()


def test_a_test_set_is_part_of_a_runs_name() -> None:
    with_tests, without = table_spec(), table_spec(tests={}, columns=[{"name": "all"}])
    names = [{run.name for run in final_runs(e.preset(None), {})} for e in (with_tests, without)]
    assert not names[0] & names[1]
    config = site_config("home", parse(ExternalTest, TESTS["home"], "t"), Path("/work"), Path("/mnt"))
    assert config.data.root == Path("/mnt/a")
    assert Run("a", None, "demo", {"seed": 1}).name == Run("b", None, "demo", {"seed": 1}).name
