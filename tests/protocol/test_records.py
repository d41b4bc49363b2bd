"""A run folder is read as it was written; what is damaged in it is named."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from example_run import diagnostic_records, history_records, run_record, with_pseudo_labels, write_run
from suture.core.errors import DataError
from suture.protocol.records import Note, PseudoLabels, read_diagnostics, read_history, read_metrics, read_run
from world import refused


def test_a_run_folder_is_read(run_folder: Path) -> None:
    run = read_run(run_folder)
    assert run.owners("Pleural Effusion") == ("harbour", "hillside", "st-anne")
    assert run.owners("Hernia") == ("harbour",)
    assert (run.label_type, run.notes) == ("multilabel", [])
    history = read_history(run_folder)
    assert [r.round for r in history] == list(range(1, 9))
    assert history[3].sites["st-anne"].status == "rejected"
    assert (history[0].sites["harbour"].scalars, history[0].sites["harbour"].rows) == ({}, None)
    metrics = read_metrics(run_folder)
    assert metrics is not None
    assert metrics.auroc["Hernia"] is None


def test_what_a_failed_run_never_wrote_is_absent(run_folder: Path) -> None:
    (run_folder / "history.jsonl").unlink()
    (run_folder / "metrics.json").unlink()
    assert read_history(run_folder) == read_diagnostics(run_folder) == []
    assert read_metrics(run_folder) is None


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


def without_labels(text: str) -> str:
    record = json.loads(text)
    del record["sites"]["harbour"]["labels"]
    return json.dumps(record)


def and_then(*lines: str) -> Callable[[str], str]:
    return lambda text: "\n".join([text.rstrip("\n"), *lines]) + "\n"


@pytest.mark.parametrize(
    ("read", "file", "spoil", "named"),
    [
        (read_run, "run.json", None, ()),
        (read_run, "run.json", without_labels, ("sites.harbour.labels",)),
        (read_history, "history.jsonl", and_then('{"round": 9, "ph'), ("line 9",)),
        (
            read_metrics,
            "metrics.json",
            lambda text: text.replace('"Edema": 0.862', '"Edema": NaN', 1),
            ("auroc.Edema",),
        ),
        *(
            (read_diagnostics, "diagnostics.jsonl", and_then("", f'{{"site": "a", {line}'), ("line 3", named))
            for line, named in (
                ('"ro', ""),
                ('"classes": {}}', "round"),
                ('"round": 1, "classes": {"Edema": {"made": 1.5, "right": 1}}}', "classes.Edema.made"),
                ('"round": 1, "classes": {"Edema": {"made": 2, "right": -1}}}', "classes.Edema.right"),
                ('"round": 1, "classes": {"Edema": {"made": 2, "right": 3}}}', "3 of 2"),
            )
        ),
    ],
)
def test_what_is_damaged_is_named(
    read: Callable[[Path], object],
    file: str,
    spoil: Callable[[str], str] | None,
    named: tuple[str, ...],
    run_folder: Path,
) -> None:
    path = run_folder / file
    if not path.exists():
        path.write_text('{"site": "a", "round": 1, "classes": {}}\n')
    path.write_text(spoil(path.read_text())) if spoil else path.unlink()
    with refused(file, *named, by=DataError):
        read(run_folder)
