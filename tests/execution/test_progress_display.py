"""The progress display shows what sites have sent as text, never as commands of the terminal."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from example_run import metrics_record, run_record
from suture.execution import progress
from suture.execution.progress import Progress, following
from suture.protocol.records import Metrics, Run, parse
from suture_results.tables import class_table

FORGED = "x\x1b[1A\x1b[2K\nround 99/99  0.1 s"
EVENTS = (
    {"event": "begin", "round": 0, "rounds": 2, "sites": ["a"], "labels": ["Mass"], "refused": {"b": FORGED}},
    {"event": "answer", "site": "a", "status": "rejected", "reason": FORGED},
    {"event": "unchanged", "round": 1, "why": FORGED},
)


def test_a_forged_line_stays_part_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with following(tmp_path, "job", "local"), (tmp_path / "events.jsonl").open("w") as file:
        file.writelines(json.dumps(event) + "\n" for event in EVENTS)
    printed = capsys.readouterr().out
    assert printed.count("99/99") == 3
    assert "\x1b" not in printed
    assert not any(line.startswith("round 99") for line in printed.splitlines())


def test_a_note_of_the_program_has_its_lines() -> None:
    assert Progress("job", "").take({"event": "note", "text": "one\ntwo\x1b"}) == "one\ntwo\\x1b"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"site": "alpha", "why": "a\nb\x1b"}, "alpha left this experiment: a\nb\\x1b."),
        ({}, "cannot be read"),
    ],
)
def test_a_note_of_the_server_is_a_sentence(values: dict[str, str], words: str) -> None:
    said = Progress("job", "").take({"event": "note", "code": "excluded", "values": values})
    assert said is not None
    assert words in said


def test_a_note_without_the_package_of_sentences_is_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "if_installed", lambda _: lambda *_: None)
    said = Progress("job", "").take({"event": "note", "code": "ledger", "values": {"site": "alpha"}})
    assert said == "ledger: {'site': 'alpha'}"


def test_the_table_of_a_run_folder_has_no_control_characters() -> None:
    run = run_record()
    run["title"], run["labels"] = FORGED, [FORGED, *run["labels"]]
    console = Console(file=(out := io.StringIO()), width=140)
    console.print(class_table(parse(Run, run, "run"), parse(Metrics, metrics_record(), "metrics")))
    assert "\x1b" not in out.getvalue()
    assert not any(line.startswith("round 99") for line in out.getvalue().splitlines())
