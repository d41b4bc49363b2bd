"""Damaged and hostile run folders: every command that reads one ends with a line that names the file."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from example_run import diagnostic_records, history_records, metrics_record, run_record, write_run
from small_job import SMALL
from suture.cli import app
from suture.cli.common import guard
from suture.core import VERSION
from suture.core.errors import ConfigError, DataError
from suture.execution.run import begin_here, check_folder
from suture.federation.server.record import Record
from suture.protocol.records import read_history
from suture_results.report import write_report

JOB = replace(SMALL, rounds=3, simulation=None)
Suture = Callable[..., tuple[int, str]]

DAMAGE = {
    "empty": b"",
    "cut": b'{"job": "demo",\n "ti',
    "no text": b'{"job": "\xff\xfe"}',
    "a list": b"[]",
    "a number": b"5",
    "another table": b"{}",
    "too deep": b"[" * 100_000,
    "too long a number": b'{"rounds": ' + b"9" * 5000 + b"}",
}


@pytest.fixture
def suture(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Suture:
    """The command line as a shell calls it: exit code and what was printed."""

    def call(*words: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["suture", *map(str, words)])
        code = 0
        try:
            guard(app)
        except SystemExit as end:
            code = int(end.code or 0)
        said = capsys.readouterr()
        return code, said.out + said.err

    return call


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with every record."""
    folder = tmp_path / "r"
    folder.mkdir()
    write_run(
        folder, run_record(), history_records(), metrics_record(), diagnostic_records(history_records())
    )
    return folder


@pytest.mark.parametrize("harm", DAMAGE)
@pytest.mark.parametrize(
    "name", ["run.json", "metrics.json", "history.jsonl", "diagnostics.jsonl", "tuned.json"]
)
def test_a_damaged_file_is_a_line_that_names_it(name: str, harm: str, run: Path, suture: Suture) -> None:
    lines = name.endswith("l")
    (run / name).write_bytes(DAMAGE[harm].replace(b"\n", b"") + b"\n" if lines else DAMAGE[harm])
    code, said = suture("report", run)
    if lines and harm == "empty":
        assert code == 0
        return
    assert code == 1, said
    (line,) = [text for text in said.splitlines() if text.startswith("error: ")]
    assert name in line
    assert "run the job again" in line
    assert not lines or "line 1" in line
    assert "Traceback" not in said


@pytest.mark.parametrize("harm", DAMAGE)
@pytest.mark.parametrize("name", ["run.json", "job.json"])
def test_a_damaged_run_is_not_continued_and_says_why(name: str, harm: str, tmp_path: Path) -> None:
    facts = {"job": JOB.name, "status": "interrupted", "rounds": 2}
    begin_here(tmp_path)
    (tmp_path / ".preparing").rename(tmp_path / "run.json")
    (tmp_path / "run.json").write_text(json.dumps(facts))
    (tmp_path / "job.json").write_text(json.dumps({"plan": JOB.plan("x").to_dict()}))
    check_folder(tmp_path, JOB, resume=True, overwrite=False)
    (tmp_path / name).write_bytes(DAMAGE[harm])
    with pytest.raises(ConfigError, match=rf"({name}|contains a run of) .*another --out"):
        check_folder(tmp_path, JOB, resume=True, overwrite=False)
    check_folder(tmp_path, JOB, resume=False, overwrite=True)


@pytest.mark.parametrize("plan", [5, None, [], {"model": 5}, {"method": {}, "model": []}, "of another"])
@pytest.mark.parametrize(("version", "code"), [("0.0.7", None), (VERSION, "other"), (VERSION, None)])
def test_a_plan_of_other_keys_is_of_another_version_or_damaged(
    plan: Any, version: str, code: str | None, tmp_path: Path
) -> None:
    """Neither is a reason to delete the rounds of a run."""
    own = JOB.plan("x").to_dict()
    if plan == "of another":
        plan = {key: value for key, value in own.items() if key != "transport"}
    facts = {"versions": {"suture": version}, "code": code or own["code"]}
    (tmp_path / "run.json").write_text(json.dumps({"job": JOB.name, "rounds": "many", **facts}))
    (tmp_path / "job.json").write_text(json.dumps({"plan": plan}))
    for resume in (True, False):
        with pytest.raises(ConfigError) as refused:
            check_folder(tmp_path, JOB, resume=resume, overwrite=False)
        assert "another --out" in str(refused.value)
        assert "--overwrite" not in str(refused.value)
        other = version != VERSION or code is not None
        assert not resume or (f"begun by version {version} " in str(refused.value)) is other


def test_a_torn_last_line_of_the_history_is_left_out_with_a_note(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = read_history(run)
    with (run / "history.jsonl").open("a") as file:
        file.write('{"round": 9, "ph')
    assert read_history(run) == whole
    write_report(run)
    assert "history.jsonl: line 9" in caplog.text
    Record(run).rewind(5)
    assert [line.round for line in read_history(run)] == [1, 2, 3, 4]


def test_a_server_does_not_continue_over_a_damaged_history(run: Path) -> None:
    path = run / "history.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:3], lines[3][:50], *lines[4:], ""]))
    before = path.read_bytes()
    with pytest.raises(DataError, match=r"history\.jsonl, line 4"):
        Record(run).rewind(5)
    assert path.read_bytes() == before


HOSTILE = "[/bold]\x1b[2J\x07\u202e[link=file:///etc/passwd]x[/link]"


def test_a_hostile_run_is_shown_and_commands_no_terminal(run: Path, suture: Suture) -> None:
    facts = json.loads((run / "run.json").read_text())
    label = facts["labels"][0]
    text = json.dumps(facts).replace(json.dumps(label), json.dumps(HOSTILE))
    facts = json.loads(text) | {"title": HOSTILE, "job": "../../../x", "error": HOSTILE}
    (run / "run.json").write_text(json.dumps(facts))
    metrics = (run / "metrics.json").read_text().replace(json.dumps(label), json.dumps(HOSTILE))
    (run / "metrics.json").write_text(metrics)
    code, said = suture("report", run)
    assert code == 0
    assert "[/bold]" in said
    assert not set(said) & set("\x1b\x07\u202e")
    page = (run / "report.html").read_text()
    assert "<script" not in page or HOSTILE not in page


def test_a_disk_error_of_any_command_is_one_line(
    run: Path, suture: Suture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "/data/report.html")

    monkeypatch.setattr("suture_results.report.write_report", full)
    code, said = suture("report", run)
    assert (code, said) == (
        1,
        "error: /data/report.html: No space left on device; make room there, then try again\n",
    )
