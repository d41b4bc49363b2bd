"""`suture status` for a person and for cron: last contact, rounds, faults and the exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer

from own_clock import own_clock
from suture.core.errors import ConfigError
from suture.flare.kit import Kit
from suture_admin.job_commands import results, status
from suture_admin.monitor import SILENT

KIT = Kit(Path("nowhere"), "admin", "admin@trial.org", "trial", "localhost", 8002)
NOW = 1_000_000.0
BEGIN = {"event": "begin", "round": 0, "rounds": 100, "sites": ["a", "b"], "labels": ["Mass"], "refused": {}}
JOB = {"job_id": "j", "name": "demo", "deploy_map": {"app": ["a", "b"], "app_server": ["server"]}}


class Federation:
    """A server with two sites and a job."""

    def __init__(self, silent: float, status: str, *events: dict[str, Any]) -> None:
        self._contacts = {"a": NOW, "b": NOW - silent} if silent < 600 else {"a": NOW}
        self._meta, self._events = {**JOB, "status": status}, events

    def contacts(self) -> dict[str, float]:
        return self._contacts

    def metas(self) -> list[dict[str, Any]]:
        return [self._meta]

    def meta(self, job_id: str) -> dict[str, Any]:
        return self._meta

    def recent(self, job_id: str) -> dict[str, Any]:
        return {"first": 900, "events": self._events, "begin": BEGIN}


Ask = Any


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Runs `suture status`; returns its exit code and what it prints."""
    own_clock(monkeypatch, "suture_admin.monitor", time=lambda: NOW)
    monkeypatch.setattr("suture.flare.kit.admin_kit", lambda *_: KIT)

    def ask(federation: Federation, *job: str, **options: bool) -> tuple[int, str]:
        monkeypatch.setattr("suture_admin.session.connect", lambda _: nullcontext(federation))
        try:
            status(*job, **options)
        except typer.Exit as end:
            return end.exit_code, capsys.readouterr().out
        return 0, capsys.readouterr().out

    return ask


@pytest.mark.parametrize(
    ("silent", "job", "fault"),
    [
        (SILENT - 1, "RUNNING", ""),
        (SILENT, "RUNNING", "b is silent"),
        (600, "RUNNING", "b is not connected, and job j runs with it"),
        (600, "FINISHED:COMPLETED", ""),
    ],
)
def test_a_silent_site_and_one_that_a_job_lacks_are_found(
    silent: float, job: str, fault: str, ask: Ask
) -> None:
    """A site that had fallen silent stood among the others."""
    federation = Federation(silent, job)
    code, said = ask(federation, check=True)
    assert code == bool(fault)
    assert fault in said
    assert ask(federation)[0] == 0, "only --check has a code of its own"
    code, text = ask(federation, as_json=True, check=True)
    found = json.loads(text)
    assert code == bool(found["faults"]) == bool(fault)
    assert found["sites"]["a"] == {"last_contact": "1970-01-12T13:46:40+00:00", "seconds": 0}
    assert [one["status"] for one in found["jobs"]] == [job]
    if silent < 600:
        assert f"b ({silent:.0f} s ago)" in said


ROUND, DONE = (
    {"event": "round", "round": 84},
    {"event": "answer", "site": "a", "status": "accepted", "reason": None},
)


@pytest.mark.parametrize(
    ("event", "fault"),
    [
        (DONE, None),
        (DONE | {"site": "b", "status": "rejected", "reason": "no"}, "b: rejected"),
        ({"event": "waiting", "sites": ["b"], "seconds": 130, "lost": ["b"]}, "b: not responding"),
        ({"event": "waiting", "sites": ["b"], "seconds": 130, "lost": []}, None),
        ({"event": "gone", "site": "b"}, "b: not responding"),
    ],
)
def test_a_job_has_its_number_of_rounds_and_its_sites_their_last_state(
    event: dict[str, Any], fault: str | None, ask: Ask
) -> None:
    """It said "round 84/0": the event that tells has long gone by."""
    federation = Federation(0, "RUNNING", event, ROUND, DONE)
    code, said = ask(federation, "j", check=True)
    assert code == bool(fault)
    assert "round 84 of 100" in said
    assert (fault or "") in said
    found = json.loads(ask(federation, "j", as_json=True)[1])
    assert (found["round"], found["rounds"]) == (84, 100)
    assert found["faults"] == ([fault] if fault else [])


@pytest.mark.parametrize("command", [partial(status, None), partial(results, "j")])
def test_production_is_an_environment_like_a_poc(command: Callable[..., None]) -> None:
    with pytest.raises(ConfigError, match="give --startup-kit DIR"):
        command(env="prod")


def test_a_job_that_failed_is_a_fault(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("suture_admin.remote.why_ended", lambda *_: "too few sites")
    assert ask(Federation(0, "FINISHED:ABNORMAL"), "j", check=True) == (
        1,
        "demo: FINISHED:ABNORMAL\ntoo few sites\n",
    )
