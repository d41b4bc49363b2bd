"""The controller records how a run ended, whatever ended it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from nvflare.apis.fl_context import FLContext
from nvflare.apis.signal import Signal

from suture.core.errors import Aborted, FederationError
from suture.federation.server.record import Record
from suture.flare import controller
from suture.flare.controller import FederationController


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (KeyError("noise"), "failed", "KeyError: 'noise'"),
        (OverflowError("too large"), "failed", "OverflowError: too large"),
        (FederationError("too few sites"), "failed", "too few sites"),
        (Aborted("the job was aborted"), "interrupted", "the job was aborted"),
    ],
    ids=["a bug", "a sum", "a failure", "an abort"],
)
def test_a_run_that_has_ended_is_never_running(
    error: Exception, status: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise error

    record, panics = Record(tmp_path), []
    record.update(status="running")
    made = FederationController({}, {})
    server = SimpleNamespace(record=record, schedule=SimpleNamespace(round_timeout=1), collector=MagicMock())
    monkeypatch.setattr(controller, "federate", fail)
    monkeypatch.setattr(controller, "on_heartbeat", lambda *_: None)
    monkeypatch.setattr(controller, "JobGuard", lambda *_: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(controller, "if_installed", lambda _: lambda *_: None)
    monkeypatch.setattr(made, "_open", lambda _: server)
    monkeypatch.setattr(made, "_publish", lambda *_: None)
    monkeypatch.setattr(made, "system_panic", lambda reason, _: panics.append(reason))
    made.control_flow(Signal(), FLContext())
    run = json.loads((tmp_path / "run.json").read_text())
    assert (run["status"], run["error"]) == (status, says)
    assert panics == [says]


@pytest.mark.parametrize(
    ("error", "says"), [(KeyError("noise"), "KeyError: 'noise'"), (FederationError("no plan"), "no plan")]
)
def test_what_fails_before_the_folder_is_open_is_a_panic_with_its_text(
    error: Exception, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Any) -> None:
        raise error

    made, panics = FederationController({}, {}), []
    monkeypatch.setattr(made, "_open", fail)
    monkeypatch.setattr(made, "system_panic", lambda reason, _: panics.append(reason))
    made.control_flow(Signal(), FLContext())
    assert panics == [says]
