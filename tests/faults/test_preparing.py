"""Kill -9 of a process that prepares a run, before and after each of its steps on the disk."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from killing import killing
from small_job import SMALL
from suture.core.errors import ConfigError
from suture.core.files import atomic_write, make_folder
from suture.execution import run as running
from suture.execution.job import with_settings
from suture.execution.run import MADE, begin_here
from suture_synthetic.phantom_hospitals import PhantomSites

JOB = replace(SMALL, simulation=PhantomSites())
STEPS = ("replace", "mkdir", "unlink", "rmdir", "fsync", "ftruncate")
WAYS: dict[str, dict[str, bool]] = {"plain": {}, "resume": {"resume": True}, "overwrite": {"overwrite": True}}


@pytest.fixture
def prepared_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that ends when it is prepared, of two sites that are a file each."""

    def prepare(_: PhantomSites, folder: Path, *__: object) -> list[str]:
        for name in ("alpha", "beta"):
            make_folder(folder / name)
            atomic_write(folder / name / "suture.toml", b"[data]")
        return ["alpha", "beta"]

    monkeypatch.setattr(PhantomSites, "prepare", prepare)
    monkeypatch.setattr(running, "_rounds", lambda *_: None)
    monkeypatch.setattr(running, "_finish", lambda *_: None)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # for speed: no power fails here


def killed_at(step: int, work: Callable[[], object]) -> bool:
    """Does work in a process that is killed at one of its steps; returns whether it came to that."""
    child = os.fork()
    if not child:
        counted = killing(step)
        for name in STEPS:
            setattr(os, name, counted(getattr(os, name)))
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def copy(folder: Path, to: Path) -> None:
    """Copy a run, and let the copy be the folder in which it was begun."""
    shutil.copytree(folder, to)
    if (to / MADE).exists():
        (to / MADE).write_text(json.dumps({"inode": to.stat().st_ino}))


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.complete
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("prepared_only")
def test_each_way_goes_on_after_a_kill_at_any_step_of_preparing(way: str, tmp_path: Path) -> None:
    clean = running.run_job(JOB, out=tmp_path / "clean")
    longer = with_settings(JOB, ["rounds=3"])
    for step in count(1):
        cut = tmp_path / f"{step}" / "run"
        cut.parent.mkdir()
        if way != "plain":
            copy(clean, cut)
        killed = killed_at(step, lambda: running.run_job(longer, out=cut, **WAYS[way]))  # noqa: B023 - at once
        if not killed:
            break
        for then, how in WAYS.items():
            again = tmp_path / f"{step}" / then / "run"
            if cut.exists():
                copy(cut, again)
            half = not cut.exists() or not (cut / "run.json").exists() or (cut / ".preparing").exists()
            half &= not (cut / ".replaced").exists()  # or else the former run is put back
            empty = not cut.exists() or not any(cut.iterdir())
            if {"plain": not half, "resume": empty, "overwrite": False}[then]:
                with pytest.raises(ConfigError, match="--resume"):
                    running.run_job(longer, out=again, **how)
            else:
                running.run_job(longer, out=again, **how)
                assert tree(again) == tree(clean)
                assert json.loads((again / "run.json").read_text())["rounds"] == 3
    assert step > 20, "there was nothing to kill"


def test_a_run_that_another_process_prepares_is_in_use_and_not_called_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running.lock(tmp_path / "r"):
        (tmp_path / "r" / ".preparing").touch()
        with pytest.raises(ConfigError, match="another run is using"):
            running.run_job(JOB, out=tmp_path / "r")
    assert "ended during its preparation" not in caplog.text


@pytest.mark.usefixtures("prepared_only")
def test_a_half_prepared_run_is_begun_anew_and_says_so_and_a_copy_is_resumed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    half = tmp_path / "r" / "sites" / "old" / "half-written"
    half.parent.mkdir(parents=True)
    begin_here(tmp_path / "r")
    for path in (tmp_path / "r" / ".lock", half, tmp_path / "r" / "notes.txt"):
        path.touch()
    shutil.copytree(tmp_path / "r", copied := tmp_path / "copied")
    running.run_job(JOB, out=tmp_path / "r")
    assert caplog.text.count("ended during its preparation") == 1
    assert "notes.txt" in caplog.text
    assert not half.parent.exists()
    assert (tmp_path / "r" / "notes.txt").exists()
    for how in (WAYS["plain"], WAYS["overwrite"]):
        with pytest.raises(ConfigError, match="its files were copied"):
            running.run_job(JOB, out=copied, **how)
    before = tree(copied)
    running.run_job(JOB, out=copied, resume=True)
    assert before - tree(copied) == {".preparing"}, "of a copy nothing is deleted"
    assert json.loads((copied / "run.json").read_text())["rounds"] == JOB.rounds
