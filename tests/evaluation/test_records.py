import json
from pathlib import Path

import pytest

from suture.errors import DataError
from suture.evaluation.records import read_history, read_metrics, read_run


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
    with pytest.raises(DataError, match=r"has no run\.json; give the folder"):
        read_run(tmp_path)


def test_a_damaged_field_is_named(run_folder: Path) -> None:
    path = run_folder / "run.json"
    record = json.loads(path.read_text())
    del record["sites"]["harbour"]["labels"]
    path.write_text(json.dumps(record))
    with pytest.raises(DataError, match=r"run\.json: sites\.harbour\.labels: Field required"):
        read_run(run_folder)


def test_a_damaged_line_is_named(run_folder: Path) -> None:
    with (run_folder / "history.jsonl").open("a") as file:
        file.write('{"round": 9, "ph')
    with pytest.raises(DataError, match=r"history\.jsonl, line 9: Invalid JSON"):
        read_history(run_folder)


def test_a_number_that_is_none_is_refused(run_folder: Path) -> None:
    path = run_folder / "metrics.json"
    path.write_text(path.read_text().replace('"Edema": 0.862', '"Edema": NaN', 1))
    with pytest.raises(DataError, match=r"auroc\.Edema.*finite"):
        read_metrics(run_folder)
