"""One process at a time answers from a site's folder of an experiment."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from rounds import reply_of
from suture.core.files import FolderLock, temporary_beside
from suture.federation.site import site as module
from suture.federation.site.site import LOCK
from suture.methods.surgical import SurgicalAggregation
from suture.protocol.messages import Abstain, SiteInfo, TaskData

pytestmark = pytest.mark.complete


def other_process(path: Path) -> int:
    """A process that holds the lock until it is killed; returns its number."""
    ready, held = os.pipe()
    child = os.fork()
    if not child:
        lock = FolderLock.take(path, 0)
        os.write(held, b"x")
        time.sleep(60)
        del lock
        os._exit(0)
    os.read(ready, 1)
    return child


def test_another_process_is_named_and_when_it_has_ended_the_site_answers(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TAKEOVER", 0.2)
    federation = tiny(SurgicalAggregation())
    site = federation.sites()["alpha"]
    left = temporary_beside(site.folder / "round-000001.safetensors")
    left.parent.mkdir(parents=True)
    other = other_process(site.folder / LOCK)
    answer = reply_of(site, TaskData("handshake"))
    assert isinstance(answer, Abstain)
    assert (answer.reason, answer.error) == ("configuration", "InUse")
    assert f"(process {other}); wait for it or end it" in (site.folder / "errors.jsonl").read_text()
    os.kill(other, signal.SIGKILL)
    os.waitpid(other, 0)
    assert isinstance(reply_of(site, TaskData("handshake")), SiteInfo)


def test_a_new_job_waits_for_the_process_of_the_last_one(tiny: Any) -> None:
    site = tiny(SurgicalAggregation()).sites()["alpha"]
    other = other_process(site.folder / LOCK)
    killer = os.fork()
    if not killer:
        time.sleep(0.5)
        os.kill(other, signal.SIGKILL)
        os._exit(0)
    os.waitpid(killer, 0)
    os.waitpid(other, 0)
    assert isinstance(reply_of(site, TaskData("handshake")), SiteInfo)


def test_the_sites_of_one_process_share_it_and_leave_it_when_they_are_closed(tiny: Any) -> None:
    federation = tiny(SurgicalAggregation())
    first, second = federation.sites()["alpha"], federation.sites()["alpha"]
    for site in (first, second):
        assert isinstance(reply_of(site, TaskData("handshake")), SiteInfo)
    first.close()
    assert _taken_elsewhere(second.folder)
    second.close()
    assert not _taken_elsewhere(second.folder)


def _taken_elsewhere(folder: Path) -> bool:
    """Whether another process finds the folder in use."""
    child = os.fork()
    if not child:
        try:
            FolderLock.take(folder / LOCK, 0)
        except BaseException:
            os._exit(1)
        os._exit(0)
    return bool(os.waitpid(child, 0)[1])


def test_what_a_killed_process_left_is_swept_and_a_live_ones_is_not(tiny: Any) -> None:
    site = tiny(SurgicalAggregation()).sites()["alpha"]
    ended = os.fork()
    if not ended:
        os._exit(0)
    os.waitpid(ended, 0)
    site.folder.mkdir(parents=True)
    dead, live = (
        site.folder / f".round-000001.safetensors.{pid}.0123abcd.tmp" for pid in (ended, os.getpid())
    )
    for path in (dead, live):
        path.mkdir()
        (path / ".tmpAbCdEf").touch()  # the name that safetensors chooses
    own = site.folder / ".hidden.tmp"
    own.touch()
    site.answer(TaskData("handshake"))
    assert [path.exists() for path in (dead, live, own)] == [False, True, True]
