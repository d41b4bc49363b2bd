"""The progress display: what it says of an event, and that nothing of a site commands the terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from example_run import metrics_record, run_record
from suture.execution import progress
from suture.execution.progress import Progress, follow, following
from suture.protocol.records import Metrics, Run, parse
from suture_results.tables import class_table

FORGED = "x\x1b[1A\x1b[2K\nround 99/99  0.1 s"
BEGIN = {"event": "begin", "round": 0, "rounds": 2, "sites": ["a", "b"], "labels": ["Mass"], "refused": {}}


def test_a_forged_line_stays_part_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = (
        BEGIN | {"refused": {"b": FORGED}},
        {"event": "answer", "site": "a", "status": "rejected", "reason": FORGED},
        {"event": "unchanged", "round": 1, "why": FORGED},
    )
    with following(tmp_path, "job", "local"), (tmp_path / "events.jsonl").open("w") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)
    run = run_record()
    run["title"], run["labels"] = FORGED, [FORGED, *run["labels"]]
    Console(width=140).print(class_table(parse(Run, run, "run"), parse(Metrics, metrics_record(), "metrics")))
    printed = capsys.readouterr().out
    assert printed.count("99/99") >= 4
    assert "\x1b" not in printed
    assert not any(line.startswith("round 99") for line in printed.splitlines())


def test_notes_of_the_program_and_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    take = Progress("job", "").take
    assert take({"event": "note", "text": "one\ntwo\x1b"}) == "one\ntwo\\x1b"
    excluded = {"event": "note", "code": "excluded"}
    assert "a\nb\\x1b" in str(take(excluded | {"values": {"site": "alpha", "why": "a\nb\x1b"}}))
    assert "cannot be read" in str(take(excluded | {"values": {}}))
    monkeypatch.setattr(progress, "if_installed", lambda _: lambda *_: None)
    assert take(excluded | {"values": {"site": "alpha"}}) == "excluded: {'site': 'alpha'}"


def test_a_site_that_is_waited_for_gone_and_back_has_a_line_each() -> None:
    take = Progress("demo", "poc").take
    waiting = {"event": "waiting", "sites": ["northfield", "westbank"], "seconds": 125}
    line = take({**waiting, "lost": []})
    assert line == "waiting for northfield, westbank for 2 min"
    assert take({**waiting, "lost": ["northfield"]}) == f"{line}; not heard from: northfield"
    assert "harbor is gone" in str(take({"event": "gone", "site": "harbor"}))
    assert take({"event": "back", "site": "harbor"}) == "harbor is back"


def test_figures_stand_with_the_round_whose_model_they_measure() -> None:
    take = Progress("demo", "local").take
    nothing = {"event": "validated", "round": 2, "loss": None, "auroc": None, "sites": []}
    events = [
        BEGIN,
        {"event": "round", "round": 1},
        {"event": "committed", "round": 1, "seconds": 4.0},
        {"event": "round", "round": 2},
        {"event": "validated", "round": 1, "loss": 0.5, "auroc": 0.75, "sites": ["a"]},
        {"event": "committed", "round": 2, "seconds": 4.0},
        {"event": "validated", "round": 2, "loss": 0.25, "auroc": None, "sites": ["a", "b"]},
        nothing,
        nothing | {"server_auroc": 0.5},
        {"event": "finished", "selected": 2},
    ]
    lines = [line for event in events if (line := take(event))]
    assert lines[1:] == [
        "round 1/2  4.0 s  0:00 left",
        "round 1: validation loss 0.5000, AUROC 0.750  (1 of 2 sites)",
        "round 2/2  4.0 s",
        "round 2: validation loss 0.2500",
        "round 2: AUROC at the server 0.500  (0 of 2 sites)",
    ]


def test_lines_of_a_file_come_once_each_and_only_when_they_are_whole(tmp_path: Path) -> None:
    path, lines = tmp_path / "events.jsonl", list[str]()
    path.write_text("before\n")
    for text in ("one\ntw", "three\n"):
        with follow(path, lines.append), path.open("a") as file:
            file.write(text)
    assert lines == ["one\n", "three\n"]
    with follow(path, lines.append):
        path.unlink()
        path.write_text("new\n")  # shorter, so from its beginning
    assert lines == ["one\n", "three\n", "new\n"]
