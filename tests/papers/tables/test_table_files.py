"""Tables as data: which runs they need, what is stored of them, and how they are rendered."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from stored_by_hand import SPEC, change, delete, result, store, table_spec
from suture.core.errors import ConfigError, DataError, FederationError
from suture.execution.job import Job, load_job, with_settings
from suture.execution.run import begin_here
from suture.models import encoder_of
from suture_papers.tables.cells import class_means, lines
from suture_papers.tables.conduct import Session, _tidy, conduct, do_runs
from suture_papers.tables.loading import known_tables, load_spec
from suture_papers.tables.outcome import choose, collect
from suture_papers.tables.render import write_tables
from suture_papers.tables.results import read_result, result_of
from suture_papers.tables.runs import Run, final_runs, tuning_runs
from suture_papers.tables.spec import OWN_COLUMNS


@functools.cache
def made(job: str, *settings: str) -> Job:
    """The job with settings, of which many runs share the first ones."""
    return with_settings(made(job, *settings[:-1]), settings[-1:]) if settings else load_job(job)


@pytest.mark.complete
def test_every_table_of_the_repository_can_be_run() -> None:
    """Each row of each preset is a job whose settings exist; nothing is trained. One seed stands for all."""
    assert known_tables()
    tried: set[str] = set()
    for name in known_tables():
        spec = load_spec(name)
        for table in map(spec.preset, spec.presets):
            tune, cells = table.preset.tune, [(row, str(x)) for row, x in table.cells]
            found = dict.fromkeys(cells, tune.values[0]) if tune else {}
            runs = [*final_runs(table, found), *tuning_runs(table)]
            for run in runs:
                options = run.arguments(Path("/data"))
                others = f"{run.job}: {[option for option in options if 'seed=' not in option]}"
                if others in tried:
                    continue
                tried.add(others)
                job = made(run.job, *options[1::2])
                assert job.method.about.name == run.settings.get("method", job.method.about.name)
                assert "{data}" not in str(options)
                # A simulation puts the words of its documents here before it plans, and reads the folder.
                words = ["model.vocabulary=clinical", "model.embedding=tfidf"]
                with_settings(job, words if encoder_of(job.model).reads == "text" else []).plan("x")
                job.schedule()  # which refuses what its settings contradict


def test_a_run_is_named_by_its_settings_alone() -> None:
    spec = table_spec()
    runs = list(final_runs(spec.preset(None), {}))
    assert [(run.row, run.settings["seed"]) for run in runs] == [
        (row, seed) for seed in (1, 2, 3) for row in ("theirs", "ours")
    ]
    assert len({run.name for run in runs}) == 6
    again = table_spec(title="another title", source="elsewhere")
    assert [run.name for run in final_runs(again.preset(None), {})] == [run.name for run in runs]
    longer = table_spec(set={"augmentation.flip": 0.5})
    assert not {run.name for run in final_runs(longer.preset(None), {})} & {r.name for r in runs}


def test_what_a_row_sets_holds_over_what_all_rows_and_the_preset_set() -> None:
    rows = {**SPEC["rows"], "ours": {"name": "AFL", "set": {"method": "afl", "rounds": 1, "model.hidden": 0}}}
    tiny = {"tiny": {"note": "", "seeds": [1], "set": {"rounds": 5}}}
    spec = table_spec(rows=rows, set={"model.hidden": 256}, presets=tiny)
    found = {run.row: run.settings for run in final_runs(spec.preset(None), {})}
    assert (found["ours"]["rounds"], found["ours"]["model.hidden"]) == (1, 0)
    assert (found["theirs"]["rounds"], found["theirs"]["model.hidden"]) == (5, 256)
    assert next(iter(found["ours"])) == "method"


def test_the_data_root_is_no_part_of_a_runs_name() -> None:
    run = Run("a", None, "surgical_nih", {"simulation.root": "{data}/nih", "seed": 1, "rounds": 2})
    assert run.arguments(Path("/mnt")) == [
        "--set", "simulation.root=/mnt/nih", "--set", "seed=1", "--set", "rounds=2",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"reference": "our"}, r"unknown row in reference.*did you mean 'ours'"),
        ({"presets": {"t": {"note": "", "seeds": [1], "skip": ["thiers"]}}}, "did you mean 'theirs'"),
        ({"titel": "x"}, "unknown key 'titel'; did you mean 'title'"),
        ({"presets": {"t": {"note": "", "seeds": []}}}, r"presets\.t\.seeds"),
    ],
)
def test_a_file_with_a_mistake_says_where(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    import tomli_w

    path = tmp_path / "e.toml"
    path.write_text(tomli_w.dumps({**SPEC, **changes}))
    with pytest.raises(ConfigError, match=says):
        load_spec(str(path))
    with pytest.raises(ConfigError, match="unknown table"):
        load_spec("nih_overlapp")
    with pytest.raises(ConfigError, match="unknown preset 'tin'; did you mean 'tiny'"):
        table_spec().preset("tin")


@pytest.mark.parametrize("key", ["x/../../outside/README", "..", "a b", "é", "a\n", "", "a" * 81, "/etc/x"])
@pytest.mark.parametrize("table", ["rows", "presets", "tests", "drawings"])
def test_a_key_becomes_no_path(table: str, key: str) -> None:
    test, plot = {"data": {}}, {"of": "frequencies", "sources": ["ours"]}
    one = {"tests": test, "drawings": plot}.get(table) or next(iter(SPEC[table].values()))
    assert table_spec(**{table: {**SPEC.get(table, {}), "a-B_1": one}})
    with pytest.raises(ConfigError, match=rf"{table}\..*use letters \(a-z\), digits, - and _ only"):
        table_spec(**{table: {**SPEC.get(table, {}), key: one}})


@pytest.mark.parametrize("series", [False, True])
def test_a_name_is_text_and_no_formula(series: bool, tmp_path: Path) -> None:
    name = r"$\frac{1$"
    rows = {key: {**row, "name": name} for key, row in SPEC["rows"].items()}
    more = {"series": {"key": "rounds", "values": [1, 2], "label": name}} if series else {}
    spec = table_spec(rows=rows, columns=[{"name": name}], title=name, **more)
    table = spec.preset(None)
    for run in final_runs(table, {}):
        result(run, tmp_path / "runs", {"A": 0.8, "B": 0.5})
    paths = write_tables(collect(table, store(tmp_path / "runs")), tmp_path, "two")
    assert all(path.is_file() for path in paths)


def test_tuning_chooses_by_validation_and_reuses_its_runs(tmp_path: Path) -> None:
    tune = {"key": "method.local.lr", "values": [1e-3, 1e-2], "seed": 1}
    spec = table_spec(presets={"tiny": {"note": "", "seeds": [1, 2], "tune": tune}})
    table = spec.preset("tiny")
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


RUN = Run("ours", None, "demo", {"seed": 1})
FACTS = {
    "status": "finished",
    "method": {"personal": "nothing"},
    "selected_round": 1,
    "sites": {},
    "versions": {},
    "finished": "now",
}


@pytest.fixture
def done(tmp_path: Path) -> Path:
    """The folder of a finished run, without run.json and history.jsonl."""
    folder = tmp_path / "done"
    folder.mkdir()
    (folder / "metrics.json").write_text("{}")
    job = load_job("demo")
    content = {"plan": job.plan("done").to_dict(), "schedule": job.schedule().to_dict()}
    (folder / "job.json").write_text(json.dumps(content))
    return folder


def test_a_run_selected_by_balanced_accuracy_is_tuned_by_it(done: Path, tmp_path: Path) -> None:
    measured = {"loss": None, "auroc": 0.9, "server_auroc": 0.8, "server_balanced_accuracy": 0.3}
    (done / "history.jsonl").write_text(json.dumps({"round": 1, "seconds": 1.0, "validation": measured}))
    for selection, tunes in {"server_metric": 0.8, "server_balanced_accuracy": 0.3}.items():
        (done / "run.json").write_text(json.dumps({**FACTS, "selection": selection}))
        assert result_of(RUN, done).validation == tunes


def test_models_of_the_sites_own_are_tuned_by_the_rounds_that_they_are_of(done: Path, tmp_path: Path) -> None:
    """a keeps round 1 (.5; .7), b round 2 (.1; .8), whatever the mean of a round says; c measured nothing."""

    def line(number: int, a: tuple[float, float], b: tuple[float, float]) -> dict[str, Any]:
        sites = {s: {"validation_loss": x, "validation_auroc": y} for s, (x, y) in {"a": a, "b": b}.items()}
        validation = {"loss": (a[0] + b[0]) / 2, "auroc": (a[1] + b[1]) / 2}
        return {"round": number, "seconds": 1.0, "validation": validation, "sites": {**sites, "c": {}}}

    history = [line(1, (0.5, 0.7), (0.3, 0.6)), line(2, (0.6, 0.9), (0.1, 0.8))]
    (done / "history.jsonl").write_text("\n".join(json.dumps(x) for x in history))
    (done / "run.json").write_text(json.dumps({**FACTS, "method": {"personal": "model"}}))
    found = result_of(RUN, done)
    assert found.validation == pytest.approx((0.7 + 0.8) / 2)
    assert found.validation_loss == pytest.approx((0.5 + 0.1) / 2)
    (done / "run.json").write_text(json.dumps({**FACTS, "method": {"personal": "head"}}))
    assert result_of(RUN, done).validation == pytest.approx((0.7 + 0.6) / 2)


def test_a_row_that_cannot_be_tuned_is_named_with_its_run(tmp_path: Path) -> None:
    tune = {"key": "method.local.lr", "values": [1e-3, 1e-2], "seed": 1}
    spec = table_spec(presets={"tiny": {"note": "", "seeds": [1], "tune": tune}})
    runs = list(tuning_runs(spec.preset(None)))
    for run in runs:
        result(run, tmp_path, {"A": 0.5, "B": 0.5}, auroc=None if run is runs[1] else 0.6)
    with pytest.raises(ConfigError, match=f"row 'theirs': its run {runs[1].name} has no validation figure"):
        conduct(spec.preset(None), Session(store(tmp_path), tmp_path / "work", None, lambda _: None), 1)


def test_the_table_by_hand(tmp_path: Path) -> None:
    """Ours - theirs on the classes of one site: .1, .2, .3: t = 2 sqrt(3), p = .0742."""
    spec = table_spec()
    sized = spec.preset(None)
    for run in final_runs(sized, {}):
        seed = int(str(run.settings["seed"]))
        b = 0.5 + (0.1 * seed if run.row == "ours" else 0.0)
        result(run, tmp_path / "runs", {"A": 0.8, "B": b})
    outcome = collect(sized, store(tmp_path / "runs"))
    theirs, ours = lines(outcome)
    against = theirs.estimates["AUROC, classes of one site"].against
    assert against is not None
    assert against.p == pytest.approx(0.0742, abs=1e-4)
    assert against.difference == pytest.approx(0.2)
    assert theirs.estimates["AUROC, classes of one site"].text == "0.500 ± 0.000 ns"
    assert ours.estimates["AUROC, classes of one site"].text == "0.700 ± 0.100"
    assert ours.estimates["AUROC, classes of one site"].against is None
    assert theirs.estimates["AUROC, classes of several sites"].against is not None
    assert theirs.estimates["AUROC, classes of several sites"].against.p == 1
    assert class_means(spec, "ours", outcome.results["ours", "None"], OWN_COLUMNS[0]) == pytest.approx(
        {"A": 0.8, "B": 0.7}
    )
    assert class_means(spec, "ours", outcome.results["ours", "None"], OWN_COLUMNS[1]) == pytest.approx(
        {"A": 0.8}
    )
    paths = write_tables(outcome, tmp_path, "two")
    page = paths[0].read_text()
    assert "| Vanilla FL | 0.650 ± 0.000 ns | .074 |" in page
    assert "0.79 |" in page
    assert "6 runs in the table, 0.1 hours" in page
    ElementTree.fromstring(paths[2].read_text())
    before = [path.read_bytes() for path in paths]
    assert [path.read_bytes() for path in write_tables(outcome, tmp_path, "two")] == before


def test_over_classes_a_class_that_one_of_them_does_not_know_is_no_pair(tmp_path: Path) -> None:
    spec = table_spec(pairs="classes")
    table = spec.preset(None)
    for run in final_runs(table, {}):
        result(run, tmp_path, {"A": 0.8, "B": None if run.row == "theirs" else 0.6})
    theirs, ours = lines(collect(table, store(tmp_path)))
    assert theirs.estimates["AUROC, all classes"].against is not None
    assert theirs.estimates["AUROC, all classes"].against.n == 1
    assert ours.estimates["AUROC, all classes"].text == "0.700 ± 0.100"  # population SD over classes


@pytest.mark.complete
def test_runs_are_done_once(tmp_path: Path) -> None:
    small = {"simulation.images": 20, "simulation.held_out": 30, "model.size": 32, "rounds": 1}
    spec = table_spec(presets={"tiny": {"note": "", "seeds": [1], "set": small}})
    reported: list[str] = []
    kept, work = tmp_path / "runs", tmp_path / "work"
    outcome = conduct(spec.preset(None), Session(store(kept), work, None, reported.append), 2)
    assert {len(cell) for cell in outcome.results.values()} == {1}
    path = kept / "test.jsonl"
    before = path.stat()
    assert len(path.read_text().splitlines()) == 2
    assert before.st_size < 16_000
    left = {path.name for path in work.glob("*/sites/**/*")}
    assert left == {"server", "labels.csv", "suture.toml", "phantom.json"}  # no images, no states
    conduct(spec.preset(None), Session(store(kept), work, None, reported.append), 2)
    assert path.stat() == before
    assert reported[-1].startswith("2 runs, 2 of them ")
    run = next(iter(final_runs(spec.preset(None), {})))
    record = store(kept).find(run.name)
    assert record is not None
    assert record["made_with"]["method.local.lr"] == load_job("demo").method.local.lr
    assert record["made_with"]["simulation.images"] == 20
    change(kept, run, made_with={**record["made_with"], "method.local.lr": 0.123})
    with pytest.raises(
        ConfigError, match=rf"{run.name} was run with method\.local\.lr=0\.123, and .*line in {path}"
    ):
        conduct(spec.preset(None), Session(store(kept), work, None, reported.append), 2)


@pytest.mark.parametrize("name", ["sites", "sites/server", "sites/a", "state", "copy"])
def test_nothing_of_a_user_is_deleted_after_a_run(name: str, tmp_path: Path) -> None:
    """Neither through a link of a finished run's folder, nor in a copy, nor what lies beside its files."""
    out, mine = tmp_path / "run", tmp_path / "mine"
    files = (
        "state/a.txt",
        "state/spool/x",
        "sites/a/x.png",
        "sites/server/suture.toml",
        "sites/server/i/x.png",
    )
    for folder in (out, mine):
        for file in (*files, "a/x.png", "i/x.png", "spool/x"):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text("mine")
    begin_here(out)
    reported: list[str] = []
    session = Session(store(tmp_path), tmp_path, None, reported.append)
    if name == "copy":
        out = Path(shutil.copytree(out, tmp_path / "copy"))
    else:
        shutil.rmtree(out / name)
        (out / name).symlink_to(mine)
    before = {path: path.is_file() and path.read_text() for path in (*out.rglob("*"), *mine.rglob("*"))}
    _tidy(out, session)
    assert {
        path: path.is_file() and path.read_text() for path in (*out.rglob("*"), *mine.rglob("*"))
    } == before
    assert f"the decoded images and states of {out} stay" in reported[0]
    if name == "copy":
        _tidy(out := tmp_path / "run", session)
        left = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
        others = {"state/a.txt", "a/x.png", "i/x.png", "spool/x"}
        assert left == {*others, "sites/server/suture.toml", ".folder.json", ".preparing"}


@pytest.mark.complete
def test_what_two_runs_failed_of_before_they_trained_ends_the_others(tmp_path: Path) -> None:
    (tmp_path / "data" / "nih").mkdir(parents=True)
    set_ = {"simulation.root": "{data}/nih"}
    spec = table_spec(job="surgical_nih", presets={"tiny": {"note": "", "seeds": [1, 2, 3], "set": set_}})
    reported: list[str] = []
    with pytest.raises(FederationError) as raised:
        conduct(
            spec.preset(None),
            Session(store(tmp_path), tmp_path / "work", tmp_path / "data", reported.append),
            1,
        )
    assert str(raised.value).startswith("2 of 6 runs failed, 4 were not started\n")
    assert f"{tmp_path / 'data' / 'nih'} has no Data_Entry_2017*.csv*; put it there" in str(raised.value)
    assert sum(line.startswith("begins") for line in reported) == 2


def test_what_runs_warn_of_is_passed_on_once(tmp_path: Path) -> None:
    reported: list[str] = []
    session = Session(store(tmp_path), tmp_path, None, reported.append)
    session.warn("/nih: 9 rows have no image\n\n")
    session.warn("/nih: 9 rows have no image\nanother\n")
    assert reported == ["warning: /nih: 9 rows have no image", "warning: another"]


def test_a_data_root_is_asked_for_before_anything_is_run(tmp_path: Path) -> None:
    reads = {"small": {"note": "", "seeds": [1], "set": {"simulation.root": "{data}/nih"}}}
    spec = table_spec(job="surgical_nih", presets=reads)
    for root, says in ((None, r"reads \{data\}/nih; give --data-root"), (tmp_path / "x", "is not a folder")):
        with pytest.raises(ConfigError, match=says):
            conduct(spec.preset(None), Session(store(tmp_path), tmp_path, root, lambda _: None), 1)


def test_a_broken_result_says_what_to_do(tmp_path: Path) -> None:
    run = Run("ours", None, "demo", {"seed": 1})
    assert read_result(store(tmp_path), run) is None
    for broken in ("{", "[]", '{"run": {}}'):
        (tmp_path / "test.jsonl").write_text(f'{{"name": "x"}}\n{broken}\n')
        with pytest.raises(DataError, match=r"line 2 cannot .*delete the line, and its run is done again"):
            read_result(store(tmp_path), run)
    (tmp_path / "test.jsonl").write_text(f'{{"name": "{run.name}", "metric": 1}}\n')
    with pytest.raises(DataError, match="delete its line, and the run is done again"):
        read_result(store(tmp_path), run)
    (tmp_path / "run.json").write_text('{"status": "failed", "error": "no data"}')
    with pytest.raises(DataError, match=r"a finished run \(failed: no data\)"):
        result_of(run, tmp_path)


def test_the_command_renders_what_is_there(tmp_path: Path) -> None:
    import tomli_w
    from typer.testing import CliRunner

    from suture.cli import app

    path = tmp_path / "mine.toml"
    path.write_text(tomli_w.dumps(SPEC))
    words = ["table", str(path), "--render", "--results", str(tmp_path / "results")]
    shown = CliRunner().invoke(app, words, catch_exceptions=False)
    assert shown.exit_code == 0
    assert {p.name for p in (tmp_path / "results").iterdir()} == {"mine.md", "mine.html", "mine.svg"}
    assert "href" not in (tmp_path / "results" / "mine.html").read_text().replace("xlink:href", "")


def test_the_tables_of_another_package_are_found_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib.metadata import EntryPoint

    import tomli_w

    from suture_papers.tables import loading

    folder = tmp_path / "a_package_with_tables" / "tables"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "mine.toml").write_text(tomli_w.dumps({**SPEC, "title": "of mine"}))
    monkeypatch.syspath_prepend(tmp_path)
    point = EntryPoint("mine", "a_package_with_tables", "suture.tables")
    monkeypatch.setattr(loading, "find_entry_points", {"suture.tables": {"mine": [point]}}.__getitem__)
    assert known_tables() == {"mine": folder / "mine.toml"}
    assert load_spec("mine").title == "of mine"


def test_without_a_name_every_complete_table_is_rendered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tomli_w
    from typer.testing import CliRunner

    from suture.cli import app
    from suture_papers.tables import leaderboard, loading

    one, two = {"note": "", "seeds": [1]}, {"note": "", "seeds": [1, 2]}
    files = {
        "first": {**SPEC, "presets": {"one": one, "two": two}},
        "second": {**SPEC, "job": "surgical_nih"},
    }
    for name, content in files.items():
        (tmp_path / f"{name}.toml").write_text(tomli_w.dumps(content))
    for module in (loading, leaderboard):
        monkeypatch.setattr(module, "known_tables", lambda: {p.stem: p for p in tmp_path.glob("*.toml")})
    spec = load_spec("first")
    for run in final_runs(spec.preset("two"), {}):
        result(run, tmp_path / "results" / "runs", {"A": 0.5, "B": 0.6})
    with pytest.raises(ConfigError, match="has all its results in"):
        CliRunner().invoke(app, ["table", "--render", "--results", str(tmp_path)], catch_exceptions=False)
    words = ["table", "--results", str(tmp_path / "results")]
    assert CliRunner().invoke(app, [*words, "--render"], catch_exceptions=False).exit_code == 0
    found = {path.name for path in (tmp_path / "results").glob("*.md")}
    assert found == {"first.md", "first-two.md"}
    with pytest.raises(ConfigError, match="name the table"):
        CliRunner().invoke(app, words, catch_exceptions=False)


def test_a_run_that_was_cut_off_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def record(command: list[str], **_: Any) -> Any:
        seen.append(command)
        return type("Done", (), {"returncode": 1, "stderr": "stopped"})

    monkeypatch.setattr("suture_papers.tables.conduct.subprocess.run", record)
    run = Run("ours", None, "demo", {"method": "surgical", "seed": 1})
    out = tmp_path / "work" / run.name
    for status, again in ((None, False), ("interrupted", True)):
        if status:
            out.mkdir(parents=True)
            (out / "run.json").write_text(json.dumps({"status": status}))
        with pytest.raises(FederationError, match="stopped"):
            do_runs([run], Session(store(tmp_path / "runs"), tmp_path / "work", None, lambda _: None), 1)
        assert ("--resume" in seen[-1]) is again
