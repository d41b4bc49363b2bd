"""Logging in at a server that is only starting, or does not answer."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from nvflare.apis.fl_exception import FLCommunicationError
from nvflare.fuel.flare_api.api_spec import AuthenticationError

from suture.core.errors import ConfigError
from suture.flare.kit import Kit, options_of
from suture_admin import session
from suture_admin.session import NoAnswer, connect, wait_for_sites


@pytest.fixture
def starting(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Kit:
    """The kit of an administrator whose server answers, and takes no login yet."""

    def refuse(*_: Any, **__: Any) -> None:
        raise FLCommunicationError("failed to challenge server: process_exception: no callback")

    monkeypatch.setattr(session, "check_valid_now", lambda _: None)
    monkeypatch.setattr(session, "Session", refuse)
    return Kit(tmp_path, "admin", "admin@a.org", "project", "server", 8002)


def test_a_server_without_a_callback_for_a_login_does_not_answer_yet(starting: Kit) -> None:
    with pytest.raises(NoAnswer, match="does not answer"), connect(starting):
        pass


def test_its_sites_are_waited_for(starting: Kit) -> None:
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


@pytest.mark.parametrize(
    "refusal", [AuthenticationError("unknown study 'lung'"), ValueError("study name 'L ung' contains")]
)
def test_a_study_that_the_server_does_not_know_is_named(
    refusal: Exception, starting: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise refusal

    monkeypatch.setattr(session, "Session", refuse)
    with pytest.raises(ConfigError, match=r"does not accept the kit .*study"), connect(starting):
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
