"""Results in JSON Lines files, what is taken of a run for them, and the published pages made of them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import tomli_w
from recomputed import final_runs, mean_area, student

from small_hospitals import small_study
from stored_by_hand import SPEC, filled, store, task
from suture.core.errors import ConfigError, DataError, SutureError
from suture.core.files import write_json
from suture.execution.job import Job, load_job, with_settings
from suture_papers.studies.page import write_pages
from suture_papers.tables import loading, results
from suture_papers.tables.claims import load_claims, page_of
from suture_papers.tables.conduct import _is_finished
from suture_papers.tables.loading import known_tables, load_spec, papers
from suture_papers.tables.render import write_page
from suture_papers.tables.results import (
    ResultStore,
    find_change,
    read_result,
    result_of,
    settings_done,
    settings_now,
    store_result,
)
from suture_papers.tables.runs import Run
from world import refused, suture

RUN = Run("r", None, "demo", {"seed": 1})
RECORD = {"run": {}, "metrics": {}, "validation_auroc": 0.5, "validation_loss": None, "seconds": 1.0}

WRITER = """
import sys
from pathlib import Path
from suture_papers.tables.results import ResultStore

folder, first = Path(sys.argv[1]), sys.argv[2]
for number in range(15):
    ResultStore(folder, "both").put(f"{first}{number}", {"number": number})
"""


def names(path: Path) -> list[str]:
    return [json.loads(line)["name"] for line in path.read_text().split("\n")[:-1]]


# The store


def test_records_are_found_replaced_and_sorted(tmp_path: Path) -> None:
    """Under the name that is given, and what was found is a copy."""
    store = ResultStore(tmp_path / "runs", "mine")
    assert store.find("a") is None
    assert not store.folder.exists()
    for name in ("b", "a", "c"):
        store.put(name, {"text": f"{name} ü \u2028 end", "number": 0.1, "name": "z"})
    store.put("a", {"number": {"x": None}})
    path = store.folder / "mine.jsonl"
    assert names(path) == ["a", "b", "c"]
    assert path.read_text().startswith('{"name":"a","number":{"x":null}}\n{"name":"b","text":"b ü')
    found = store.find("a")
    assert found == {"number": {"x": None}}
    found["number"]["x"] = 1
    assert store.find("a") == {"number": {"x": None}}
    assert store.find("b") == {"text": "b ü \u2028 end", "number": 0.1}
    assert store.find("z") is None


def test_tables_share_the_results_of_runs_and_nothing_else(tmp_path: Path) -> None:
    first, second = ResultStore(tmp_path, "first"), ResultStore(tmp_path, "second")
    first.put(RUN.name, RECORD)
    assert second.find(RUN.name) is None
    assert second.holder(RUN.name) == first
    assert second.holder("other") == second
    assert read_result(second, RUN) == read_result(first, RUN) is not None
    second.put(RUN.name, {**RECORD, "seconds": 2.0})
    found = read_result(second, RUN)
    assert found is not None
    assert found.seconds == 2.0


@pytest.mark.complete
def test_processes_and_threads_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), first]) for first in "xy"]
    with ThreadPoolExecutor(4) as pool:
        for number in range(15):
            pool.submit(ResultStore(tmp_path, "both").put, f"z{number}", {"number": number})
    assert [writer.wait(60) for writer in writers] == [0, 0]
    expected = sorted(f"{first}{number}" for first in "xyz" for number in range(15))
    assert names(tmp_path / "both.jsonl") == expected
    assert {path.name for path in tmp_path.iterdir()} == {"both.jsonl", ".lock"}


def test_a_folder_that_another_process_holds_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "_LOCK_SECONDS", 0.2)
    with results.hold(tmp_path / ".lock", 0.1), refused(tmp_path, by=SutureError):
        ResultStore(tmp_path, "mine").put("a", {})
    ResultStore(tmp_path, "mine").put("a", {})


A = b'{"name":"a","number":1}\n'


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (A + b'{"name":"\xe9"}\n', "line 2"),
        (A + b'{"name":"b","n":NaN}\n', "line 2"),
        (A + b'{"name":"b","n":-Infinity}\n', "line 2"),
        (A + b'{"name":null}\n', "line 2"),
        (A + b"[1]\n", "line 2"),
        (A + b'{"n\n', "line 2"),
        (A + b'\n{"name":"a","number":2}\n', "line 3"),
        (None, "cannot be read"),  # a folder in its place
    ],
    ids=["not UTF-8", "not a number", "infinite", "no name", "a list", "torn", "two of a name", "folder"],
)
def test_a_damaged_file_is_named_and_not_rewritten(content: bytes | None, named: str, tmp_path: Path) -> None:
    store, path = ResultStore(tmp_path, "mine"), tmp_path / "mine.jsonl"
    path.mkdir() if content is None else path.write_bytes(content)
    for use in (lambda: store.find("a"), lambda: store.put("c", {}), lambda: store.put("a", {})):
        with refused(path, named, by=DataError):
            use()
    assert path.is_dir() or path.read_bytes() == content


def test_a_damaged_file_of_another_table_is_named(tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_bytes(A + b'{"name":\n')
    with refused(other, "line 2", by=DataError):
        read_result(ResultStore(tmp_path, "mine"), RUN)


def test_a_number_that_is_not_finite_is_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    store = ResultStore(tmp_path, "mine")
    store.put("a", {"number": 1})
    with refused("result b", by=DataError):
        store.put("b", {"number": float("nan")})
    assert names(tmp_path / "mine.jsonl") == ["a"]


@pytest.mark.parametrize(
    ("key", "value"), [("metrics", None), ("made_with", [1]), ("seconds", "long"), ("tests", 3), ("stray", 1)]
)
def test_a_record_of_another_form_is_refused_by_its_key(key: str, value: object, tmp_path: Path) -> None:
    store = ResultStore(tmp_path, "mine")
    assert read_result(store, RUN) is None
    store.put(RUN.name, {**RECORD, key: value})
    with refused(f"{tmp_path}/mine.jsonl, {RUN.name}", key, by=DataError):
        read_result(store, RUN)


# A run


def job_json(folder: Path, job: Job, simulation: Any = None) -> None:
    content = {"plan": job.plan("x").to_dict(), "schedule": job.schedule().to_dict()}
    write_json(folder / "job.json", {**content, **({"simulation": asdict(simulation)} if simulation else {})})


@pytest.fixture
def done(tmp_path: Path) -> Path:
    """The folder of a finished run, whose run.json and history.jsonl a test writes."""
    job_json(tmp_path, load_job("demo"))
    write_json(tmp_path / "metrics.json", {"auroc": {}})
    return tmp_path


def facts(folder: Path, **more: Any) -> None:
    about = {"status": "finished", "method": {"personal": "nothing"}, "selected_round": 1, "sites": {}}
    write_json(folder / "run.json", {**about, "versions": {}, "finished": "now", **more})


def test_a_run_selected_by_balanced_accuracy_is_tuned_by_it(done: Path) -> None:
    measured = {"loss": None, "auroc": 0.9, "server_auroc": 0.8, "server_balanced_accuracy": 0.3}
    (done / "history.jsonl").write_text(json.dumps({"round": 1, "seconds": 1.0, "validation": measured}))
    for selection, tunes in {"server_metric": 0.8, "server_balanced_accuracy": 0.3}.items():
        facts(done, selection=selection)
        assert result_of(RUN, done).validation == tunes
    facts(done, status="failed", error="no data")
    with refused(done, "failed", "no data", by=DataError):
        result_of(RUN, done)


def test_models_of_the_sites_own_are_tuned_by_the_rounds_that_they_are_of(done: Path) -> None:
    """a keeps round 1 (.5; .7), b round 2 (.1; .8), whatever the mean of a round says; c measured nothing."""

    def line(number: int, a: tuple[float, float], b: tuple[float, float]) -> dict[str, Any]:
        sites = {s: {"validation_loss": x, "validation_auroc": y} for s, (x, y) in {"a": a, "b": b}.items()}
        validation = {"loss": (a[0] + b[0]) / 2, "auroc": (a[1] + b[1]) / 2}
        return {"round": number, "seconds": 1.0, "validation": validation, "sites": {**sites, "c": {}}}

    history = [line(1, (0.5, 0.7), (0.3, 0.6)), line(2, (0.6, 0.9), (0.1, 0.8))]
    (done / "history.jsonl").write_text("\n".join(json.dumps(x) for x in history))
    facts(done, method={"personal": "model"})
    found = result_of(RUN, done)
    assert found.validation == pytest.approx((0.7 + 0.8) / 2)
    assert found.validation_loss == pytest.approx((0.5 + 0.1) / 2)
    facts(done, method={"personal": "head"})
    assert result_of(RUN, done).validation == pytest.approx((0.7 + 0.6) / 2)


def test_figures_of_fine_tuned_models_are_stored_to_six_digits(done: Path) -> None:
    """A run with targets is finished when they are."""
    line = {"round": 1, "seconds": 1.0, "validation": {"auroc": None, "loss": None}}
    (done / "history.jsonl").write_text(json.dumps(line))
    facts(done)
    assert result_of(RUN, done).tuned == {}
    assert _is_finished(done)
    (done / "sites" / "targets").mkdir(parents=True)
    assert not _is_finished(done)
    write_json(done / "tuned.json", {"how": {}, "targets": {"A": task(0.12345678)}})
    assert _is_finished(done)
    store_result(store(done / "kept"), RUN, result_of(RUN, done))
    stored = read_result(store(done / "kept"), RUN)
    assert stored is not None
    assert stored.tuned["A"]["runs"][0]["auroc"] == [0.5, 0.123457]


def test_a_run_that_is_done_has_the_settings_of_its_job(tmp_path: Path) -> None:
    options = ["method=vanilla", "rounds=3"]
    job = with_settings(load_job("surgical_nih"), [*options, "simulation.root=/mnt/data/nih"])
    job_json(tmp_path, job, job.simulation)
    planned = settings_now("surgical_nih", [*options, "simulation.root={data}/nih"])
    done = settings_done(tmp_path, planned, Path("/mnt/data"))
    assert done == planned
    assert (done["simulation.root"], done["method"], done["rounds"]) == ("{data}/nih", "vanilla", 3)
    assert "model.vocabulary" not in done
    slower = settings_now("surgical_nih", [*options, "method.local.lr=0.5"])
    assert find_change(done, slower) == "method.local.lr"
    assert json.loads(json.dumps(done)) == done
    for before, now, changed in (
        ({"a": 1}, {"a": 1, "new": 2}, None),
        ({"a": 1, "b": {}}, {"a": 1, "b.nih": 2}, "b"),
        ({"a": None}, {"a.x": 1}, "a"),
    ):
        assert find_change(before, now) == changed


def test_a_study_below_the_data_root_is_no_path_of_the_table(tmp_path: Path) -> None:
    small_study(tmp_path / "study")
    options = ["rounds=1", f"model.weights={tmp_path}/w.safetensors"]
    job = with_settings(load_job(tmp_path / "study"), options)
    job_json(tmp_path, job, job.simulation)
    now = settings_now(str(tmp_path / "study"), options)
    done = settings_done(tmp_path, now, tmp_path)
    assert find_change(done, now) is None
    assert not any("{data}" in str(value) for value in done.values())
    assert "simulation.folder" not in done, "its path tells of a machine"
    planned = settings_now(str(tmp_path / "study"), ["rounds=1", "model.weights={data}/w.safetensors"])
    assert settings_done(tmp_path, planned, tmp_path)["model.weights"] == "{data}/w.safetensors"


# The command


def test_the_command_renders_every_complete_table_or_the_one_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = {"note": "", "seeds": [1]}, {"note": "", "seeds": [1, 2]}
    first = {**SPEC, "presets": {"one": one, "two": two}}
    for name, content in {"first": first, "second": {**SPEC, "job": "surgical_nih"}}.items():
        (tmp_path / f"{name}.toml").write_text(tomli_w.dumps(content))
    both = [loading.Paper(p.stem, p.stem, {p.stem: p}) for p in sorted(tmp_path.glob("*.toml"))]
    monkeypatch.setattr(loading, "papers", lambda: both)
    out = tmp_path / "results"
    filled(load_spec("first").preset("two"), out / "runs", lambda _: {"A": 0.5, "B": 0.6})
    with refused(tmp_path, by=ConfigError):
        suture("table", "--render", "--results", tmp_path)
    with refused(by=ConfigError):
        suture("table", "--results", out)
    suture("table", "--results", out, "--render")
    assert {path.name for path in out.iterdir()} == {"runs", "first.md", "first.svg", "first-two.svg"}
    suture("table", tmp_path / "second.toml", "--render", "--results", tmp_path / "named")
    assert {path.name for path in (tmp_path / "named").iterdir()} == {"second.md", "second.svg"}


# What is published

PUBLISHED = Path(__file__).parents[3] / "docs" / "results"
RUNS = PUBLISHED / "runs"


@pytest.mark.complete
def test_every_complete_table_is_published_as_its_runs_give_it(tmp_path: Path) -> None:
    shutil.copytree(RUNS, tmp_path / "runs")
    written = [path for paper in papers() for path in write_page(paper, tmp_path)]
    written += write_pages(tmp_path)
    others = {"attacks.md", "claims.md", "decisions.md", "hierarchy.md", "README.md", ".meta.yml"}
    published = {path.name for path in PUBLISHED.iterdir() if path.is_file() and path.suffix != ".toml"}
    assert {path.name for path in written} == published - others
    for path in written:
        assert path.read_bytes() == (PUBLISHED / path.name).read_bytes()


FIXED = "e0474addb821595d182cf5ce952a1cdf2775ad4efafe7110700768535d2ee1f8"


@pytest.mark.complete
def test_the_claims_are_those_that_were_fixed_and_their_page_is_of_the_stored_results() -> None:
    """Who changes the list changes the digest, and says why in the commit."""
    claims, digest = load_claims(PUBLISHED / "claims.toml")
    assert digest == FIXED
    assert len(claims.claims) >= 25
    assert (PUBLISHED / "claims.md").read_text() == page_of(PUBLISHED / "claims.toml", RUNS)


# Computed independently


@pytest.mark.parametrize(
    ("paper", "name", "control"),
    [
        ("surgical_aggregation", "nih_overlap", "surgical"),
        ("surgical_aggregation", "nih_disjoint", "surgical"),
        ("fedlsm", "fedlsm_nih", "fedlsm"),
    ],
)
def test_a_published_table(paper: str, name: str, control: str) -> None:
    """Mean, SD and p of the first column, of rows with a global model that knows all classes."""
    found = final_runs(RUNS / f"{name}.jsonl", known_tables()[name])
    page = (PUBLISHED / f"{paper}.md").read_text().partition(f"## {name}\n")[2].split("\n\n")
    grid = next(part for part in page if part.startswith("| method"))
    rows = {cells[0]: cells for cells in (line.strip("| ").split(" | ") for line in grid.splitlines()[2:])}
    shown = {row: described.name for row, described in load_spec(name).rows.items()}
    own = found[control]
    known = {row for row in found if found[row]} - {"individual", "pfl_fedbn", "pfl_fedavg", "pfl"}
    assert len(known) > 2
    for row in known:
        areas = [mean_area(found[row][seed]) for seed in sorted(found[row])]
        assert rows[shown[row]][1].startswith(f"{fmean(areas):.3f} ± {stdev(areas):.3f}"), row
        if row != control:
            d = [mean_area(own[seed]) - mean_area(found[row][seed]) for seed in sorted(found[row])]
            printed = rows[shown[row]][2].replace("< .001", "0.0005")
            assert float(printed) == pytest.approx(student(d), abs=6e-4), row
