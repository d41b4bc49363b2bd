"""Columns of fine-tuned models: what is stored, paired, written and plotted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import tomli_w

from stored_by_hand import store
from suture.core.errors import ConfigError
from suture.core.validation import parse
from suture.execution.job import load_job, with_settings
from suture_papers.metafl.single_target import SingleTargetSites
from suture_papers.tables.cells import lines
from suture_papers.tables.conduct import _is_finished
from suture_papers.tables.loading import known_tables, load_spec
from suture_papers.tables.outcome import collect
from suture_papers.tables.render import write_tables
from suture_papers.tables.results import read_result, result_of, store_result
from suture_papers.tables.runs import Run, final_runs
from suture_papers.tables.spec import TableSpec

SPEC: dict[str, Any] = {
    "title": "two methods",
    "source": "nowhere",
    "job": "pmfl_openi",
    "reference": "ours",
    "pairs": "tuned",
    "goal": "theirs",
    "columns": [
        {"name": "A", "task": "A"},
        {"name": "A, epochs", "task": "A", "metric": "epochs"},
        {"name": "B, F1", "task": "B", "metric": "f1"},
    ],
    "rows": {"theirs": {"name": "FL", "set": {"method": "fl"}}, "ours": {"name": "PMFL"}},
    "presets": {"tiny": {"note": "for tests", "seeds": [1]}},
}


def table_spec(**changes: Any) -> TableSpec:
    return parse(TableSpec, {**SPEC, **changes}, "test")


def task(*ends: float) -> dict[str, Any]:
    """A run of two epochs for each end; it is within .01 of its best in the second."""
    rest = {"precision": 0.5, "recall": 0.5, "train": 90, "test": 10, "positives": 5}
    return {"runs": [{"auroc": [0.5, end], "f1": end / 2, **rest} for end in ends]}


def result(run: Run, folder: Path, tuned: dict[str, Any]) -> None:
    content = {
        "run": {"job": run.job, "settings": run.settings, "sites": {}},
        "metrics": {"mean_auroc": None, "auroc": {"Target": None}, "groups": {}},
        "validation_auroc": None,
        "validation_loss": None,
        "seconds": 36.0,
        "tuned": tuned,
    }
    store(folder).put(run.name, content)


def results(spec: TableSpec, folder: Path) -> None:
    """Ours is better by .1, .2 and .3 on task A, and by 0 on B."""
    for run in final_runs(spec.preset(None), {}):
        more = 1 if run.row == "ours" else 0
        a = task(0.6 + 0.1 * more, 0.6 + 0.2 * more, 0.6 + 0.3 * more)
        result(run, folder, {"A": a, "B": task(0.8, 0.9, 1.0)})


def test_the_table_by_hand(tmp_path: Path) -> None:
    """Differences .1, .2, .3: t = 2 sqrt(3), p = .0742."""
    spec = table_spec()
    table = spec.preset(None)
    results(spec, tmp_path / "runs")
    outcome = collect(table, store(tmp_path / "runs"))
    theirs, ours = lines(outcome)
    against = theirs.estimates["A"].against
    assert against is not None
    assert (against.n, against.p) == (3, pytest.approx(0.0742, abs=1e-4))
    assert theirs.estimates["A"].text == "0.600 ± 0.000 ns"
    assert ours.estimates["A"].text == "0.800 ± 0.100"
    assert ours.estimates["A, epochs"].text == "2.0 ± 0.0"
    assert theirs.estimates["A, epochs"].against is not None
    assert ours.estimates["B, F1"].text == "0.450 ± 0.050"
    assert (theirs.runs, ours.runs) == (3, 3)
    paths = write_tables(outcome, tmp_path, "two")
    assert [path.name for path in paths] == ["two.md", "two.html", "two.svg", "two-curves.svg"]
    text = paths[0].read_text()
    assert "| FL | 0.600 ± 0.000 ns | .074 | 2.0 ± 0.0 ns | 1.000 [1] |" in text
    assert "\n[1] the difference is the same for all pairs\n" in text
    assert (
        "| A | PMFL | 0.800 ± 0.100 | 0.500 ± 0.000 | 0.500 ± 0.000 | 0.400 ± 0.050 | 2.0 ± 0.0 | 90 / 10 |"
        in text
    )
    # B ends at .8, .9 and 1, .9 on average: one run of three does not reach that.
    assert (
        "| B | PMFL | 0.900 ± 0.100 | 0.500 ± 0.000 | 0.500 ± 0.000 | 0.450 ± 0.050 | 2.0 ± 0.0 (2 of 3) |"
        in text
    )
    assert "until the AUROC reaches the mean of FL after its last epoch, over the runs that reach it" in text
    assert (
        "over fine-tuning runs; p of paired two-tailed t-tests of PMFL over fine-tuning runs on the same"
        in text
    )
    assert "in a band of their SD.</figcaption>" in paths[1].read_text()
    assert "AUROC of each class" not in text
    for path in paths[2:]:
        ElementTree.fromstring(path.read_text())
    assert paths[1].read_text().count("<svg") == 2
    before = [path.read_bytes() for path in paths]
    assert [path.read_bytes() for path in write_tables(outcome, tmp_path, "two")] == before


def test_epochs_count_to_one_goal_for_all(tmp_path: Path) -> None:
    """A run that is best at once and then decays is not the fastest, if it never was good."""
    spec = table_spec(columns=[{"name": "epochs", "task": "A", "metric": "epochs"}])
    rest = {"precision": 0.5, "recall": 0.5, "f1": 0.5, "train": 90, "test": 10, "positives": 5}
    curves = {"theirs": [[0.5, 0.7, 0.8], [0.5, 0.8, 0.9]], "ours": [[0.84, 0.7, 0.6], [0.6, 0.5, 0.4]]}
    for run in final_runs(spec.preset(None), {}):
        result(run, tmp_path, {"A": {"runs": [{"auroc": curve, **rest} for curve in curves[run.row]]}})
    theirs, ours = lines(collect(spec.preset(None), store(tmp_path)))
    # The goal is .85, the mean of .8 and .9.
    assert theirs.estimates["epochs"].text == "3.0 (1 of 2)"
    assert ours.estimates["epochs"].text == "not reached"
    against = theirs.estimates["epochs"].against  # a test of those that arrive would leave out the others
    assert against is not None
    assert (against.mark, against.why) == ("–", "not every run reaches the goal")
    assert (theirs.runs, ours.runs) == (2, 2)


def test_runs_of_other_seeds_are_further_pairs(tmp_path: Path) -> None:
    spec = table_spec(presets={"tiny": {"note": "", "seeds": [1, 2]}})
    results(spec, tmp_path)
    outcome = collect(spec.preset(None), store(tmp_path))
    against = lines(outcome)[0].estimates["A"].against
    assert against is not None
    assert against.n == 6


def test_nothing_done_yet_is_an_empty_table(tmp_path: Path) -> None:
    spec = table_spec()
    paths = write_tables(collect(spec.preset(None), store(tmp_path)), tmp_path, "e")
    assert "| PMFL | – [1] | – |" in paths[0].read_text()
    ElementTree.fromstring(paths[3].read_text())


def test_a_task_that_was_not_fine_tuned_is_named(tmp_path: Path) -> None:
    spec = table_spec(columns=[{"name": "x", "task": "Bb"}])
    for run in final_runs(spec.preset(None), {}):
        result(run, tmp_path, {"B": task(0.5)})
    with pytest.raises(ConfigError, match=r"unknown task of a column 'Bb'; .*B"):
        lines(collect(spec.preset(None), store(tmp_path)))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"pairs": "runs"},
            "column 'A' has a task; pairs = \"tuned\" and a task in every column go together",
        ),
        ({"columns": [{"name": "all"}]}, "column 'all' has no task"),
        ({"columns": [{"name": "A", "task": "A", "metric": "accuracy"}]}, "column 'A' has no accuracy"),
        ({"columns": [{"name": "A", "metric": "epochs"}], "pairs": "runs"}, "column 'A' has no epochs"),
        ({"goal": None}, 'a column of epochs needs a goal to count to; .*: goal = "theirs"'),
        ({"goal": "their"}, r"unknown row in goal of .* 'their'; did you mean 'theirs'\?"),
        (
            {"presets": {"tiny": {"note": "", "seeds": [1], "skip": ["theirs"]}}},
            "preset 'tiny' skips the goal 'theirs'; let it run",
        ),
        (
            {"series": {"key": "seed", "values": [1], "label": "x"}},
            "has no series; write a file for each value",
        ),
    ],
)
def test_columns_that_contradict_the_pairs_are_refused(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    path = tmp_path / "e.toml"
    reported = {key: value for key, value in {**SPEC, **changes}.items() if value is not None}
    path.write_text(tomli_w.dumps(reported))
    with pytest.raises(ConfigError, match=says):
        load_spec(str(path))


def test_figures_of_fine_tuned_models_are_stored_to_six_digits(tmp_path: Path) -> None:
    facts = {"status": "finished", "selected_round": 1, "sites": {}, "versions": {}, "finished": None}
    facts["method"] = {"personal": "nothing"}
    line = {"round": 1, "seconds": 1.0, "validation": {"auroc": None, "loss": None}}
    job = with_settings(load_job("pmfl_openi"), ["model.vocabulary=clinical"])
    begun = {"plan": job.plan("x").to_dict(), "schedule": job.schedule().to_dict()}
    for name, content in {"run": facts, "metrics": {"auroc": {}}, "job": begun}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    (tmp_path / "history.jsonl").write_text(json.dumps(line))
    run = Run("ours", None, "pmfl_openi", {"seed": 1})
    assert result_of(run, tmp_path).tuned == {}
    assert _is_finished(tmp_path)
    (tmp_path / "sites" / "targets").mkdir(parents=True)
    assert not _is_finished(tmp_path)  # it was cut off before its fine-tuning ended
    (tmp_path / "tuned.json").write_text(json.dumps({"how": {}, "targets": {"A": task(0.12345678)}}))
    assert _is_finished(tmp_path)
    store_result(store(tmp_path / "kept"), run, result_of(run, tmp_path))
    stored = read_result(store(tmp_path / "kept"), run)
    assert stored is not None
    assert stored.tuned["A"]["runs"][0]["auroc"] == [0.5, 0.123457]


@pytest.mark.parametrize("name", [name for name in known_tables() if name.startswith("pmfl_")])
def test_columns_are_about_the_targets_of_their_runs(name: str) -> None:
    spec = load_spec(name)
    for preset in spec.presets:
        for run in final_runs(spec.preset(preset), {}):
            job = with_settings(load_job(run.job), run.arguments(Path("/data"))[1::2])
            assert isinstance(job.simulation, SingleTargetSites)
            assert job.finetuning is not None
            few = f", {job.finetuning.few} examples" if "_low" in name else ""
            assert {column.task for column in spec.columns} == {t + few for t in job.simulation.targets}
            assert not set(job.simulation.targets) & set(job.simulation.training)
            fresh = job.finetuning.start == "fresh"
            assert (job.rounds == 1) == fresh == (run.row == "fresh")
