from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from test_report import page

from example_run import history_records, metrics_record, run_record, write_run
from suture.core.errors import DataError
from suture.core.files import write_json
from suture.protocol.records import Metrics, parse
from suture_results.finetuning_results import (
    FinetuningResults,
    TaskRow,
    TunedRun,
    finetuning_table,
    learning_charts,
    nothing_measured,
    read_finetuning_results,
    task_rows,
)


def record(**how: Any) -> dict[str, Any]:
    """Two runs on a task: AUROC .8 and .9 at the end, within .01 of the best from epochs 3 and 2."""
    runs = [
        {
            "auroc": [0.5, 0.7, 0.8],
            "precision": 0.6,
            "recall": 1.0,
            "f1": 0.75,
            "train": 290,
            "test": 32,
            "positives": 4,
        },
        {
            "auroc": [0.4, 0.89, 0.9],
            "precision": 0.8,
            "recall": 0.5,
            "f1": 0.65,
            "train": 289,
            "test": 33,
            "positives": 5,
        },
    ]
    chosen = {"runs": 2, "epochs": 3, "test": 0.1, "start": "model", "examples": None, "lr": 1e-3} | how
    return {"how": chosen, "seed": 1, "targets": {"Cardio<megaly": {"mean": {}, "sd": {}, "runs": runs}}}


def write(folder: Path, metrics: dict[str, Any] | None = None, **how: Any) -> Path:
    write_run(folder, run_record(), history_records(), metrics or metrics_record())
    write_json(folder / "tuned.json", record(**how))
    return folder


def unmeasured() -> dict[str, Any]:
    metrics = metrics_record()
    nothing = dict.fromkeys(metrics["auroc"])
    return metrics | {"auroc": nothing, "mean_auroc": None, "n": 0, "groups": {}, "sites": {"harbour": {}}}


@pytest.mark.parametrize(
    ("areas", "epochs"),
    [((0.5,), 1), ((0.5, 0.9, 0.91), 2), ((0.5, 0.899, 0.91), 3), ((0.91, 0.5, 0.92), 1), ((0.7, 0.6), 1)],
)
def test_the_first_epoch_that_is_as_good_as_the_best(areas: tuple[float, ...], epochs: int) -> None:
    run = TunedRun(areas, 0.5, 0.5, 0.5, 10, 2, 1)
    assert run.epochs == run.figure("epochs") == epochs
    assert run.figure("auroc") == areas[-1]


def test_a_line_by_hand() -> None:
    tuned = parse(FinetuningResults, record(), "tuned")
    assert task_rows(tuned.targets) == [
        TaskRow(
            "Cardio<megaly",
            ("0.850 ± 0.071", "0.700 ± 0.141", "0.750 ± 0.354", "0.700 ± 0.071", "2.5 ± 0.7"),
            "289–290",
            "32–33 (4–5)",
        )
    ]
    one = parse(FinetuningResults, record(), "tuned").targets["Cardio<megaly"]
    (row,) = task_rows({"x": type(one)(one.runs[:1])})
    assert (row.figures[0], row.train) == ("0.800", "290")


def test_a_learning_curve_lies_within_its_band() -> None:
    (chart,) = learning_charts(parse(FinetuningResults, record(), "tuned").targets)
    (trace,) = chart.traces
    (line,) = trace.runs
    upper, lower = trace.band[:3], trace.band[:2:-1]
    assert [x for x, _ in line] == [x for x, _ in upper] == [x for x, _ in lower]
    assert all(high <= mean <= low for (_, high), (_, mean), (_, low) in zip(upper, line, lower, strict=True))
    assert upper[0][1] < lower[0][1]  # y grows downwards
    assert all(12 <= y <= 174 for _, y in trace.band)


def test_the_page_has_what_became_of_the_model(tmp_path: Path) -> None:
    found = page(write(tmp_path))
    assert found.row("Cardio<megaly") == [
        "Cardio<megaly",
        *("0.850 ± 0.071", "0.700 ± 0.141", "0.750 ± 0.354", "0.700 ± 0.071", "2.5 ± 0.7"),
        *("289–290", "32–33 (4–5)"),
    ]
    assert "on each task separately for 3 epochs" in found.text
    assert "Results by class" in found.text
    assert "fine-tuned on 1 task that no site has. It was evaluated on 2,901 cases" in found.text


def test_a_page_without_figures_of_its_own_shows_those_alone(tmp_path: Path) -> None:
    found = page(write(tmp_path, unmeasured(), start="fresh", examples=100))
    assert "Results by class" not in found.text
    assert "It was evaluated" not in found.text
    assert "0.850 AUROC, Cardio<megaly" in found.text
    assert (
        "a randomly initialised model was trained on each task separately, with no more than 100 examples"
        in (found.text)
    )


def test_few_examples_are_no_further_task(tmp_path: Path) -> None:
    content = record(few=100)
    (task,) = content["targets"].values()
    content["targets"]["Cardio<megaly, 100 examples"] = task
    write_json(write(tmp_path, unmeasured()) / "tuned.json", content)
    found = page(tmp_path)
    assert "fine-tuned on 1 task that no site has" in found.text
    assert "once with all its examples and once with no more than 100 of them" in found.text
    assert found.text.count("AUROC, Cardio<megaly") == 1
    assert found.row("Cardio<megaly, 100 examples")[1] == "0.850 ± 0.071"


def test_without_fine_tuning_an_empty_table_stays_one(run_folder: Path) -> None:
    assert not nothing_measured(None)
    assert not nothing_measured(parse(Metrics, metrics_record(), "metrics"))
    assert nothing_measured(parse(Metrics, unmeasured(), "metrics"))
    write_json(run_folder / "metrics.json", unmeasured())
    found = page(run_folder)
    assert "Results by class" in found.text
    assert "Fine-tuned" not in found.text


def test_the_terminal(tmp_path: Path) -> None:
    console = Console(width=140, record=True, quiet=False, file=(tmp_path / "out").open("w"))
    console.print(finetuning_table(parse(FinetuningResults, record(), "tuned")))
    text = console.export_text()
    assert "Fine-tuned from the trained model" in text
    assert "0.850 ± 0.071" in text
    assert "runs: 2, of 3 epochs each" in text


@pytest.mark.parametrize(("metrics", "shown"), [(None, True), (unmeasured(), False)])
def test_the_command_shows_only_tables_with_something_in_them(
    metrics: dict[str, Any] | None, shown: bool, tmp_path: Path
) -> None:
    from typer.testing import CliRunner

    from suture.cli import app

    output = CliRunner().invoke(app, ["report", str(write(tmp_path, metrics))], catch_exceptions=False).output
    assert "Fine-tuned from" in output
    assert ("Mean (" in output) == shown


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"tuned\.json is damaged .*run the job again"),
        ('{"how": {}, "targets": {}}', r"tuned\.json: how\.runs: is missing"),
        (
            '{"how": {"runs": 1, "epochs": 1, "test": 0.1, "start": "model"}, "targets": {"x": {"runs": [{'
            '"auroc": [1.5], "precision": 1, "recall": 1, "f1": 1, "train": 1, "test": 1, "positives":1}]}}}',
            r"tuned\.json: targets\.x\.runs\.0\.auroc\.0: must be at most 1",
        ),
    ],
)
def test_a_damaged_file_is_named(text: str, message: str, tmp_path: Path) -> None:
    assert read_finetuning_results(tmp_path) is None
    (tmp_path / "tuned.json").write_text(text)
    with pytest.raises(DataError, match=message):
        read_finetuning_results(tmp_path)
