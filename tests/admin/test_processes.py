"""The processes of a POC: those that were started are stopped, and no others."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from startup_kits import MakeKit

from suture.core.errors import FederationError
from suture.core.files import write_json
from suture.flare.kit import Kit, read_kit
from suture_admin.poc_commands import _start
from suture_admin.processes import check_alive, last_error, parties_of, running, start, stop

SCRIPT = 'test "$1" = --once || exit 9\necho "$SUTURE_SITES|$(which python3)"\nsleep 300 &\nsleep 300\n'


def kit_of(make_kit: MakeKit, name: str, script: str = SCRIPT) -> Kit:
    folder = make_kit("site", name)
    (folder / "startup" / "sub_start.sh").write_text(script)
    return read_kit(folder)


@pytest.mark.complete
def test_what_was_started_is_stopped_with_its_children(
    make_kit: MakeKit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUTURE_SITES", "/elsewhere")
    kits = [kit_of(make_kit, name) for name in ("a", "b")]
    bystander = subprocess.Popen(["sleep", "300"])
    try:
        begun = start(tmp_path, kits)
        assert running(tmp_path) == ["a", "b"]
        check_alive(begun, {kit.name: kit for kit in kits})
        while len(children := psutil.Process(begun[0].pid).children()) < 2:
            time.sleep(0.02)
        assert stop(tmp_path) == ["a", "b"]
        assert not any(child.is_running() for child in children)
        assert running(tmp_path) == parties_of(tmp_path) == []
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
    printed = (kits[0].folder / "poc_console.log").read_text()
    assert printed.startswith("|")
    assert "elsewhere" not in printed


@pytest.mark.complete
def test_only_what_does_not_live_is_started(make_kit: MakeKit, tmp_path: Path) -> None:
    kits = [kit_of(make_kit, name) for name in ("a", "b", "c")]
    a, b, c = start(tmp_path, kits)
    try:
        assert start(tmp_path, kits) == []
        (process,) = (p for p in [b.process()] if p)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
        assert running(tmp_path) == ["a", "c"]
        (again,) = start(tmp_path, kits)
        assert (again.name, again.pid != b.pid) == ("b", True)
        assert parties_of(tmp_path) == [a, c, again]
    finally:
        assert sorted(stop(tmp_path)) == ["a", "b", "c"]


@pytest.mark.complete
def test_a_process_id_that_went_to_another_is_let_alone(make_kit: MakeKit, tmp_path: Path) -> None:
    (party,) = start(tmp_path, [kit_of(make_kit, "a")])
    other = dataclasses.replace(party, started=party.started - 60)
    write_json(tmp_path / "suture-poc.json", [vars(other)])
    assert stop(tmp_path) == []
    assert party.process() is not None
    write_json(tmp_path / "suture-poc.json", [vars(party)])
    assert stop(tmp_path) == ["a"]


@pytest.mark.complete
def test_a_process_that_ends_at_once_is_told_with_its_words(make_kit: MakeKit, tmp_path: Path) -> None:
    kit = kit_of(make_kit, "a", "echo port taken; exit 1\n")
    begun = start(tmp_path, [kit])
    while begun[0].process():
        time.sleep(0.02)
    with pytest.raises(FederationError, match=r"(?s)process of a has ended.*port taken"):
        check_alive(begun, {"a": kit})
    assert stop(tmp_path) == []


LOG = """2026-11-22 09:00:00,100 - Cell - ERROR - of yesterday
2026-11-22 23:00:01,100 - Cell - INFO - ERROR - is a word here
2026-11-22 23:00:02,100 - Cell - ERROR - cannot listen
2026-11-22 23:00:03,100 - FederatedServer - CRITICAL - port 8002: address already in use
2026-11-22 23:00:04,100 - Cell - INFO - bye
"""


def test_the_last_error_of_a_party_is_that_of_this_start(make_kit: MakeKit) -> None:
    kit = kit_of(make_kit, "a")
    assert last_error(kit, "") is None
    (kit.folder / "log.txt").write_text(LOG)
    assert last_error(kit, "2026-11-22 23:00:00") == "port 8002: address already in use"
    assert last_error(kit, "2026-11-22 23:00:04") is None


def test_sites_that_do_not_register_are_told_with_their_last_errors(
    make_kit: MakeKit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kits = {name: kit_of(make_kit, name) for name in ("harbor", "lakeside")}
    kits["server"] = read_kit(make_kit("server", "server"))
    later = LOG.replace("2026-", "2999-")
    (kits["server"].folder / "log.txt").write_text(later)
    (kits["harbor"].folder / "log.txt").write_text(later.replace("port 8002: address", "no such host"))
    monkeypatch.setattr("suture_admin.processes.start", lambda _, kits: list(kits))
    monkeypatch.setattr("suture.flare.kit.project_admin", lambda _: None)
    monkeypatch.setattr("suture_admin.session.wait_for_sites", lambda *_: {"harbor"})
    with pytest.raises(FederationError, match="harbor did not register within 120 s") as caught:
        _start(tmp_path, kits)
    assert str(caught.value).splitlines()[1:] == [
        "- server: port 8002: address already in use",
        "- harbor: no such host already in use",
    ]
