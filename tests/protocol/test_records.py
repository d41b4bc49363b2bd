import json
from pathlib import Path

import pytest

from example_run import diagnostic_records, history_records, run_record, with_pseudo_labels, write_run
from suture.core.errors import DataError
from suture.protocol.records import Note, PseudoLabels, read_diagnostics, read_history, read_metrics, read_run


def test_a_run_folder_is_read(run_folder: Path) -> None:
    run = read_run(run_folder)
    assert run.owners("Pleural Effusion") == ("harbour", "hillside", "st-anne")
    assert run.owners("Hernia") == ("harbour",)
    history = read_history(run_folder)
    assert [r.round for r in history] == list(range(1, 9))
    assert history[3].sites["st-anne"].status == "rejected"
    metrics = read_metrics(run_folder)
    assert metrics is not None
    assert metrics.auroc["Hernia"] is None


def test_what_a_failed_run_never_wrote_is_absent(run_folder: Path) -> None:
    (run_folder / "history.jsonl").unlink()
    (run_folder / "metrics.json").unlink()
    assert read_history(run_folder) == []
    assert read_metrics(run_folder) is None


def test_another_folder_is_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"run\.json is missing; give the folder"):
        read_run(tmp_path)


def test_a_damaged_field_is_named(run_folder: Path) -> None:
    path = run_folder / "run.json"
    record = json.loads(path.read_text())
    del record["sites"]["harbour"]["labels"]
    path.write_text(json.dumps(record))
    with pytest.raises(DataError, match=r"run\.json: sites\.harbour\.labels: is missing"):
        read_run(run_folder)


def test_a_damaged_line_is_named(run_folder: Path) -> None:
    with (run_folder / "history.jsonl").open("a") as file:
        file.write('{"round": 9, "ph\n')
    with pytest.raises(DataError, match=r"history\.jsonl, line 9: Invalid JSON"):
        read_history(run_folder)


def test_a_number_that_is_none_is_refused(run_folder: Path) -> None:
    path = run_folder / "metrics.json"
    path.write_text(path.read_text().replace('"Edema": 0.862', '"Edema": NaN', 1))
    with pytest.raises(DataError, match=r"auroc\.Edema.*finite"):
        read_metrics(run_folder)


def test_files_of_before_pseudo_labels_are_read(run_folder: Path) -> None:
    path = run_folder / "metrics.json"
    record = json.loads(path.read_text())
    del record["overall"]
    path.write_text(json.dumps(record))
    metrics, site = read_metrics(run_folder), read_history(run_folder)[0].sites["harbour"]
    assert metrics is not None
    assert (metrics.overall, site.scalars, site.rows) == ({}, {}, None)
    assert (read_run(run_folder).label_type, read_run(run_folder).notes) == ("multilabel", [])
    assert read_diagnostics(run_folder) == []


def test_what_a_method_recorded_is_read(tmp_path: Path) -> None:
    history = with_pseudo_labels(history_records())
    run = run_record() | {"label_type": "multiclass", "notes": [{"code": "method", "values": {"text": "so"}}]}
    write_run(tmp_path, run, history, diagnostics=diagnostic_records(history))
    found = read_run(tmp_path)
    assert (found.label_type, found.notes) == ("multiclass", [Note("method", {"text": "so"})])
    site = read_history(tmp_path)[0].sites["hillside"]
    assert site.rows["Edema"] == 150.0
    assert site.scalars.keys() == {"pseudo_positive", "pseudo_negative"}
    first = read_diagnostics(tmp_path)[0]
    assert (first.site, first.round) == ("harbour", 1)
    assert first.classes["Consolidation"] == PseudoLabels(100, 62)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"site": "a", "ro', "Invalid JSON"),
        ('{"site": "a", "classes": {}}', "round: is missing"),
        ('{"site": "a", "round": 1, "classes": {"Edema": {"made": 1.5, "right": 1}}}', "classes.Edema.made"),
        ('{"site": "a", "round": 1, "classes": {"Edema": {"made": 2, "right": -1}}}', "classes.Edema.right"),
        ('{"site": "a", "round": 1, "classes": {"Edema": {"made": 2, "right": 3}}}', "3 of 2 pseudo-labels"),
    ],
)
def test_a_damaged_diagnostic_is_named(tmp_path: Path, line: str, problem: str) -> None:
    good = '{"site": "a", "round": 1, "classes": {}}'
    (tmp_path / "diagnostics.jsonl").write_text(f"{good}\n\n{line}\n")
    with pytest.raises(DataError, match=rf"diagnostics\.jsonl, line 3: .*{problem}"):
        read_diagnostics(tmp_path)
