"""The runs of a table: what is looked for before the first, what is done once, and what is measured after."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path
from typing import Any

import pytest

from official import write_mimic, write_nih
from stored_by_hand import SPEC, change, delete, filled, result, store, table_spec
from suture.core.errors import ConfigError, DataError, FederationError
from suture.execution.job import load_job, with_settings
from suture.execution.run import begin_here
from suture_papers.chest_xrays.chest_sites import nih_config
from suture_papers.tables.cells import mean_of
from suture_papers.tables.conduct import Session, _tidy, conduct, do_runs
from suture_papers.tables.external_tests import check_tests, site_config
from suture_papers.tables.outcome import choose, collect
from suture_papers.tables.runs import Run, final_runs, tuning_runs
from suture_papers.tables.spec import ExternalTest, TableSpec
from suture_results.saved_models import GLOBAL, models_of
from world import refused

PHANTOMS = {"simulation.images": 20, "simulation.held_out": 30, "model.size": 32, "rounds": 1}
TUNE = {"key": "method.local.lr", "values": [1e-3, 1e-2], "seed": 1}


class Place:
    """A folder in which tables are conducted, and what was reported."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.work, self.data = folder, folder / "work", folder / "data"
        self.reported: list[str] = []

    def session(self, root: Path | None = None) -> Session:
        return Session(store(self.folder / "kept"), self.work, root, self.reported.append)

    def conduct(self, spec: TableSpec, root: Path | None = None) -> None:
        conduct(spec.preset(None), self.session(root), 2)

    @property
    def kept(self) -> Path:
        return self.folder / "kept"


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def preset(**keys: Any) -> dict[str, Any]:
    return {"tiny": {"note": "", "seeds": [1], **keys}}


# Before the first run


def test_data_that_are_not_there_are_named_with_their_rows_before_the_first_run(place: Place) -> None:
    theirs = {**SPEC["rows"]["theirs"], "set": {"method": "vanilla", "model.weights": "{data}/weights.pt"}}
    presets = preset(set={"simulation.root": "{data}/nih"}, tune=TUNE)
    spec = table_spec(rows={**SPEC["rows"], "theirs": theirs}, presets=presets)
    nih, weights = f"{place.data}/nih", f"{place.data}/weights.pt"
    for root, named in ((None, "--data-root"), (place.data, "--data-root")):
        with refused(named, by=ConfigError):
            place.conduct(spec, root)
    place.data.mkdir()
    with refused(f"{nih}: theirs, ours", f"{weights}: theirs", by=ConfigError):
        place.conduct(spec, place.data)
    (place.data / "nih").mkdir()
    with pytest.raises(ConfigError) as some:
        place.conduct(spec, place.data)
    assert str(some.value).splitlines()[1:] == [f"{weights}: theirs"]
    assert not place.reported
    assert not place.work.exists()


def test_stored_results_need_no_data(place: Place) -> None:
    presets = preset(set={"simulation.nih": "{data}/nih"})
    spec = table_spec(job="surgical_chest", presets=presets)
    filled(spec.preset(None), place.kept, lambda _: {"A": 0.5, "B": 0.5})
    place.conduct(spec, place.folder)
    gone = next(final_runs(spec.preset(None), {}))
    delete(place.kept, gone.name)
    with refused(f"/nih: {gone.row}", by=ConfigError):
        place.conduct(spec, place.folder)


def test_tuning_chooses_by_validation_and_reuses_its_runs(tmp_path: Path) -> None:
    table = table_spec(presets=preset(seeds=[1, 2], tune=TUNE)).preset("tiny")
    tried = list(tuning_runs(table))
    assert len(tried) == 4
    for run in tried:
        high = (run.settings["method.local.lr"] == 1e-2) == (run.row == "ours")
        result(run, tmp_path, {"A": 0.1, "B": 0.1}, auroc=0.7 if high else 0.6)
    best = choose(table, store(tmp_path))
    assert best == {("theirs", "None"): 1e-3, ("ours", "None"): 1e-2}
    names = {run.name for run in final_runs(table, best)}
    assert len(names) == 4
    assert len(names & {run.name for run in tried}) == 2
    delete(tmp_path, tried[0].name)
    assert ("theirs", "None") not in choose(table, store(tmp_path))
    assert not collect(table, store(tmp_path)).results["theirs", "None"]


def test_a_row_that_cannot_be_tuned_is_named_with_its_run(place: Place) -> None:
    spec = table_spec(presets=preset(tune=TUNE))
    runs = list(tuning_runs(spec.preset(None)))
    for run in runs:
        result(run, place.kept, {"A": 0.5, "B": 0.5}, auroc=None if run is runs[1] else 0.6)
    with refused("'theirs'", runs[1].name, by=ConfigError):
        place.conduct(spec)


# Runs


@pytest.mark.complete
def test_runs_are_done_once(place: Place) -> None:
    spec = table_spec(presets=preset(set=PHANTOMS))
    place.conduct(spec)
    outcome = collect(spec.preset(None), store(place.kept))
    assert {len(cell) for cell in outcome.results.values()} == {1}
    path = place.kept / "test.jsonl"
    before = path.stat()
    assert len(path.read_text().splitlines()) == 2
    assert before.st_size < 16_000
    left = {path.name for path in place.work.glob("*/sites/**/*")}
    assert left == {"server", "labels.csv", "suture.toml", "phantom.json"}  # no images, no states
    place.conduct(spec)
    assert path.stat() == before
    assert place.reported[-1].startswith("2 runs, 2 of them ")
    run = next(iter(final_runs(spec.preset(None), {})))
    record = store(place.kept).find(run.name)
    assert record is not None
    assert record["made_with"]["method.local.lr"] == load_job("demo").method.local.lr
    assert record["made_with"]["simulation.images"] == 20
    change(place.kept, run, made_with={**record["made_with"], "method.local.lr": 0.123})
    with refused(run.name, "method.local.lr=0.123", path, by=ConfigError):
        place.conduct(spec)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands of runs, each of which fails before it trains."""
    seen: list[list[str]] = []

    def record(command: list[str], **_: Any) -> Any:
        seen.append(command)
        return type("Done", (), {"returncode": 1, "stderr": "error: no table\n"})

    monkeypatch.setattr("suture_papers.tables.conduct.subprocess.run", record)
    return seen


def test_what_two_runs_failed_of_before_they_trained_ends_the_others(place: Place, commands: Any) -> None:
    table = table_spec(presets=preset(seeds=[1, 2, 3])).preset(None)
    with refused("2 of 6", "4 ", ": no table", by=FederationError):
        conduct(table, place.session(), 1)
    assert len(commands) == 2
    for run in final_runs(table, {}):
        (place.work / run.name).mkdir(parents=True)
        (place.work / run.name / "history.jsonl").touch()  # it had begun to train
    with refused("6 of 6", by=FederationError):
        conduct(table, place.session(), 1)


def test_what_runs_warn_of_is_passed_on_once(place: Place) -> None:
    session = place.session()
    session.warn("/nih: 9 rows have no image\n\n")
    session.warn("/nih: 9 rows have no image\nanother\n")
    assert place.reported == ["warning: /nih: 9 rows have no image", "warning: another"]


def test_a_run_that_was_cut_off_is_continued(place: Place, commands: Any) -> None:
    run = Run("ours", None, "demo", {"method": "surgical", "seed": 1})
    for again in (False, True):
        with refused("no table", by=FederationError):
            do_runs([run], place.session(), 1)
        assert ("--resume" in commands[-1]) is again
        (place.work / run.name).mkdir(parents=True, exist_ok=True)
        (place.work / run.name / "run.json").write_text('{"status": "interrupted"}')


@pytest.mark.parametrize("name", ["sites", "sites/server", "sites/a", "state", "copy"])
def test_nothing_of_a_user_is_deleted_after_a_run(name: str, place: Place) -> None:
    """Neither through a link of a finished run's folder, nor in a copy, nor what lies beside its files."""
    out, mine = place.folder / "run", place.folder / "mine"
    own = (
        "state/a.txt",
        "state/spool/x",
        "sites/a/x.png",
        "sites/server/suture.toml",
        "sites/server/i/x.png",
    )
    for file in (folder / file for folder in (out, mine) for file in (*own, "a/x.png", "i/x.png", "spool/x")):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("mine")
    begin_here(out)

    def content() -> dict[Path, Any]:
        return {path: path.is_file() and path.read_text() for f in (out, mine) for path in f.rglob("*")}

    if name == "copy":
        out = Path(shutil.copytree(out, place.folder / "copy"))
    else:
        shutil.rmtree(out / name)
        (out / name).symlink_to(mine)
    before = content()
    _tidy(out, place.session())
    assert content() == before
    assert str(out) in place.reported[0]
    if name == "copy":
        _tidy(out := place.folder / "run", place.session())
        left = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
        others = {"state/a.txt", "a/x.png", "i/x.png", "spool/x"}
        assert left == {*others, "sites/server/suture.toml", ".folder.json", ".preparing"}


# Test sets


@pytest.mark.complete
def test_models_are_found_and_tested_after_their_run(place: Place) -> None:
    small = {**PHANTOMS, "simulation.images": 30}
    job = with_settings(load_job("demo"), [f"{k}={v}" for k, v in small.items()])
    assert job.simulation is not None
    job.simulation.prepare(place.data, place.data, 7, job.method)
    table = place.data / "server" / "labels.csv"
    data = {"root": "{data}/server/images", "table": "{data}/server/labels.csv"}
    rows = {key: {"name": key, "set": {"method": key}} for key in ("surgical", "pfl")}
    spec = table_spec(
        tests={"away": {"data": {"dataset": "hospital", **data}}},
        columns=[{"name": "away", "test": "away"}],
        presets=preset(set=small),
        rows=rows,
    )
    runs, session = list(final_runs(spec.preset(None), {})), place.session(place.data)
    table.rename(place.data / "later.csv")
    with refused("'away'", table, by=DataError):
        do_runs(runs[:1], session, 1)
    assert not place.work.exists()
    (place.data / "later.csv").rename(table)
    results = do_runs(runs, session, 1)
    ours, pfl = (results[run.name].tests["away"] for run in runs)
    assert sum(line.startswith("begins") for line in place.reported) == 2
    assert set(ours) == {GLOBAL}
    whole = ours[GLOBAL]
    assert len(whole["auroc"]) == 10
    assert whole["n"] == table.read_text().count(",test") == 21
    low, high = whole["mean_interval"]
    assert low <= mean_of(spec, "surgical", results[runs[0].name], spec.columns[0]) <= high
    assert whole["intervals"].keys() == whole["auroc"].keys()
    shared, unique = (whole["groups"][group] for group in ("shared", "unique"))
    assert min(shared["loss"], unique["loss"]) < whole["loss"] < max(shared["loss"], unique["loss"])
    assert shared["mean_interval"] != unique["mean_interval"]
    assert set(pfl) == {"harbor", "lakeside", "northfield"}
    assert len(pfl["northfield"]["unlearned"]) == 5
    shutil.rmtree(place.work / runs[0].name / "model")
    with refused(place.work / runs[0].name, by=FederationError):
        models_of(place.work / runs[0].name)


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


def test_releases_are_found_as_they_are_given_out_and_read_before_anything_is_run(place: Place) -> None:
    tests, root = nih_and_mimic(place.folder), place.folder
    table, metadata = root / "nih/Data_Entry_2017_v2020.csv", root / "mimic/mimic-cxr-2.0.0-metadata.csv.gz"
    check_tests(tests, root)
    config = site_config("nih", tests["nih"], Path(), root)
    assert config.data == nih_config(root / "nih", config.data.seed)
    whole = table.read_text()
    for name, harm in (
        ("nih", lambda: table.write_text("")),
        ("nih", table.unlink),
        ("mimic", metadata.unlink),
    ):
        harm()
        with refused(f"'{name}'", by=DataError):
            do_runs([Run("ours", None, "demo", {"seed": 1}, tests)], place.session(root), 1)
        table.write_text(whole)
    assert not place.reported
    assert not place.work.exists()
    for name in tests:
        with refused(f"'{name}'", by=DataError):
            check_tests({name: tests[name]}, root / "other")
