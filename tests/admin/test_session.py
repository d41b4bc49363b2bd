"""Startup kits, logging in with one, and what `suture status` says to a person and to cron."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import typer
from flare_server import FlareServer, Serve
from nvflare.apis.fl_exception import FLCommunicationError
from nvflare.fuel.flare_api.api_spec import AuthenticationError
from startup_kits import MakeKit

from own_clock import own_clock
from suture.core.errors import ConfigError
from suture.flare.kit import Kit, kits_in, project_admin, read_kit
from suture_admin import monitor, session
from suture_admin.job_commands import results, status
from suture_admin.kits import admin_kit, options_of
from suture_admin.session import NoAnswer, connect, wait_for_sites
from world import refused


@pytest.mark.parametrize("role", ["server", "site", "admin"])
def test_a_kit_says_whose_it_is(role: str, make_kit: MakeKit) -> None:
    kit = read_kit(make_kit(role, "someone", port=8123))
    assert (kit.role, kit.name, kit.project) == (role, "someone", "trial")
    assert (kit.server, kit.scheme) == ("localhost:8123", "http")


def test_no_kit_and_a_broken_kit_are_named(make_kit: MakeKit, tmp_path: Path) -> None:
    with refused(tmp_path, by=ConfigError):
        read_kit(tmp_path)
    folder = make_kit()
    for text in ("{", '{"servers": []}'):
        (folder / "startup" / "fed_client.json").write_text(text)
        with refused(folder, by=ConfigError):
            read_kit(folder)


def test_a_poc_is_used_by_its_lead_else_by_its_administrator(
    make_kit: MakeKit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVFLARE_POC_WORKSPACE", str(tmp_path))
    with refused("suture poc up", by=ConfigError):
        admin_kit(None)
    site = make_kit("site")
    with refused("project_admin", by=ConfigError):
        admin_kit(None)
    make_kit("admin", "admin@a.org")
    assert admin_kit(None).name == "admin@a.org"
    make_kit("admin", "boss@a.org", right="lead")
    assert admin_kit(None).name == "boss@a.org"
    assert admin_kit(tmp_path / "trial" / "prod_00" / "admin@a.org").name == "admin@a.org"
    assert project_admin(tmp_path).name == "admin@a.org"
    with refused("site", by=ConfigError):
        admin_kit(site)
    for production in (admin_kit, lambda _, env: status(None, env=env), lambda _, env: results("j", env=env)):
        with refused("--startup-kit", by=ConfigError):
            production(None, env="prod")  # type: ignore[operator]
    relay = site.parent / "gate" / "startup"
    relay.mkdir(parents=True)
    with refused("gate", by=ConfigError):
        kits_in(tmp_path)
    (relay / "fed_relay.json").write_text("{}")
    assert set(kits_in(tmp_path)) == {"harbor", "admin@a.org", "boss@a.org"}, "a relay runs no jobs"


@pytest.mark.parametrize("dates", [{"begins": -20, "ends": -1}, {"begins": 1}])
def test_an_expired_kit_is_one_line_with_the_date(dates: dict[str, int], make_kit: MakeKit) -> None:
    kit = read_kit(make_kit("admin", "lead@trial.org", **dates))
    with refused("client.crt", "20", by=ConfigError), connect(kit):
        pass


@pytest.fixture
def starting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Kit:
    """The kit of an administrator whose server answers, and takes no login yet."""
    refusal = FLCommunicationError("failed to challenge server: process_exception: no callback")
    monkeypatch.setattr(session, "check_valid_now", lambda _: None)
    monkeypatch.setattr(session, "Session", Mock(side_effect=refusal))
    return Kit(tmp_path, "admin", "admin@a.org", "project", "server", 8002)


def test_a_server_without_a_callback_for_a_login_does_not_answer_yet(starting: Kit) -> None:
    with refused("server:8002", by=NoAnswer), connect(starting):
        pass
    tries: list[int] = []
    assert wait_for_sites(starting, {"alpha"}, 0.05, lambda: tries.append(1)) == {"alpha"}
    assert len(tries) > 1


def test_a_user_acts_in_the_study_of_their_kit(starting: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    studies: list[str] = []

    def note(*_: Any, study: str, **__: Any) -> Any:
        studies.append(study)
        return SimpleNamespace(try_connect=lambda _: None, close=lambda: None)

    monkeypatch.setattr(session, "Session", note)
    for kit in (starting, replace(starting, study="lung")):
        with connect(kit):
            pass
    assert studies == ["default", "lung"]
    assert options_of(starting) == ["--startup-kit", str(starting.folder)]
    assert options_of(replace(starting, study="lung"))[2:] == ["--study", "lung"]
    for error in (AuthenticationError("unknown study 'lung'"), ValueError("study name 'L ung' contains")):
        monkeypatch.setattr(session, "Session", Mock(side_effect=error))
        with refused("study", by=ConfigError), connect(starting):
            pass


def test_an_interrupted_login_leaves_no_thread_of_flare(
    starting: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Mock()
    made.try_connect.side_effect = KeyboardInterrupt
    monkeypatch.setattr(session, "Session", lambda *_, **__: made)
    with pytest.raises(KeyboardInterrupt), connect(starting):
        pass
    made.api.close.assert_called_once_with()
    made.api.cell.core_cell.communicator.stop.assert_called_once_with()


NOW = 1_000_000.0
BEGIN = {"event": "begin", "round": 0, "rounds": 100, "sites": ["a", "b"], "labels": ["Mass"], "refused": {}}
JOB = {"job_id": "j", "name": "demo", "deploy_map": {"app": ["a", "b"], "app_server": ["server"]}}


def federation(silent: float, status: str, *events: dict[str, Any]) -> FlareServer:
    """A server with a job and two sites, of which one is not connected, or was heard of so long ago."""
    contacts = {"a": NOW, "b": NOW - silent} if silent < 600 else {"a": NOW}
    recent = {"first": 900, "events": events, "begin": BEGIN}
    return FlareServer(JOB | {"status": status}, contacts=contacts, recent=recent)


Ask = Any


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, serve: Serve, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Runs `suture status`; returns its exit code and what it prints."""
    own_clock(monkeypatch, "suture_admin.monitor", time=lambda: NOW)

    def ask(server: FlareServer, *job: str, **options: Any) -> tuple[int, str]:
        serve(server)
        try:
            status(*job, **options)
        except typer.Exit as end:
            return end.exit_code, capsys.readouterr().out
        return 0, capsys.readouterr().out

    return ask


@pytest.mark.parametrize(
    ("silent", "job", "fault"),
    [
        (59, "RUNNING", ""),
        (60, "RUNNING", "b is silent"),
        (600, "RUNNING", "b is not connected, and job j runs with it"),
        (600, "FINISHED:COMPLETED", "b is not connected, and job j was the last with it"),
        (0, "FINISHED:EXECUTION_EXCEPTION", "job j failed: FINISHED:EXECUTION_EXCEPTION"),
    ],
)
def test_a_silent_site_one_that_a_job_lacks_and_a_failure_are_found(
    silent: float, job: str, fault: str, ask: Ask
) -> None:
    server = federation(silent, job)
    code, said = ask(server, check=True)
    assert (code, fault in said) == (bool(fault), True)
    assert ask(server)[0] == 0, "only --check has a code of its own"
    code, text = ask(server, as_json=True, check=True)
    found = json.loads(text)
    assert code == bool(found["faults"]) == bool(fault)
    assert found["sites"]["a"] == {"last_contact": "1970-01-12T13:46:40+00:00", "seconds": 0}
    assert [one["status"] for one in found["jobs"]] == [job]
    assert silent == 600 or f"b ({silent:.0f} s ago)" in said
    assert ask(server, check=True, silent=2)[0] == bool(fault and silent != 60)


@pytest.mark.parametrize("job", [(), ("j",)])
def test_cron_hears_of_a_full_disk(job: tuple[str], ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    for free, code in ((2**30, 0), (2**30 - 1, 1)):
        monkeypatch.setattr(monitor.shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        assert ask(federation(0, "RUNNING"), *job, check=True)[0] == code


ROUND = {"event": "round", "round": 84}
DONE = {"event": "answer", "site": "a", "status": "accepted", "reason": None}
WAITING = {"event": "waiting", "sites": ["b"], "seconds": 130, "lost": []}


@pytest.mark.parametrize(
    ("event", "fault"),
    [
        (DONE, None),
        (DONE | {"site": "b", "status": "rejected", "reason": "no"}, "b: rejected"),
        (WAITING | {"lost": ["b"]}, "b: not responding"),
        (WAITING, None),
        ({"event": "gone", "site": "b"}, "b: not responding"),
    ],
)
def test_a_job_has_its_number_of_rounds_and_its_sites_their_last_state(
    event: dict[str, Any], fault: str | None, ask: Ask
) -> None:
    """Although the event that tells the number has long gone by."""
    server = federation(0, "RUNNING", event, ROUND, DONE)
    code, said = ask(server, "j", check=True)
    assert (code, "round 84 of 100" in said, (fault or "") in said) == (bool(fault), True, True)
    assert (ask(server, check=True)[0], json.loads(ask(server, as_json=True)[1])["faults"]) == (
        bool(fault),
        [f"job j: {fault}"] if fault else [],
    )
    found = json.loads(ask(server, "j", as_json=True)[1])
    assert (found["round"], found["rounds"], found["faults"]) == (84, 100, [fault] if fault else [])


def test_a_job_that_failed_is_a_fault(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("suture_admin.remote.why_ended", lambda *_: "too few sites")
    code, said = ask(federation(0, "FINISHED:ABNORMAL"), "j", check=True)
    assert (code, said) == (1, "demo: FINISHED:ABNORMAL\ntoo few sites\n")
