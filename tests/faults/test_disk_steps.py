"""A command at each of its steps on the disk: a disk that fails there, and kill -9 before and after it."""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

import suture.protocol.packing as packing
from example_run import history_records, metrics_record, run_record, write_run
from killing import killing
from small_job import SMALL
from suture.core.errors import ConfigError, SutureError
from suture.core.files import atomic_write, make_folder
from suture.core.labels import LabelSet
from suture.data.table import Table
from suture.execution import run as running
from suture.execution.job import with_settings
from suture.execution.run import MADE, begin_here
from suture.federation.state_files import Rounds
from suture.flare.recipe import export_job
from suture.learning.samples import decode
from suture.models import ModelSpec, build
from suture.models.saved import save_model
from suture.protocol.packing import Packed
from suture_results.report import write_report
from suture_synthetic.phantom_hospitals import PhantomSites
from world import refused, write_image

MOST = 30
"""Steps of a command that are tried; the images of a simulation are more."""


@pytest.fixture(autouse=True)
def prepared_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run ends when it is prepared."""
    monkeypatch.setattr(running, "_rounds", lambda *_: None)
    monkeypatch.setattr(running, "_finish", lambda *_: None)


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


# A full or read-only disk: one line that names the path, and nothing half written


@contextmanager
def failing(folder: Path, step: int, number: int) -> Iterator[list[str]]:
    """A disk that fails at the n-th step in a folder: to open for writing, make a folder, link or rename."""
    steps: list[str] = []

    def tried(path: object) -> None:
        if isinstance(path, (str, os.PathLike)) and Path(path).is_relative_to(folder):
            steps.append(str(path))
            if len(steps) == step:
                raise OSError(number, os.strerror(number), str(path))

    def making(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            if not os.path.exists(path):
                tried(path)
            return function(path, *args, **kwargs)

        return call

    def before(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tried(args[0])
            return function(*args, **kwargs)

        return call

    def opening(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if set(mode) & set("wax+"):
                tried(path)
            return function(path, mode, *args, **kwargs)

        return call

    def save_file(tensors: Any, path: Any, *rest: Any) -> None:
        try:
            tried(path)
        except OSError as error:
            raise SafetensorError(f"I/O error: {error.strerror} (os error {number})") from None
        whole_save(tensors, path, *rest)

    whole_save = packing.save_file  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "save_file", save_file)
        patch.setattr(os, "mkdir", making(os.mkdir))
        for name in ("replace", "link", "rename"):
            patch.setattr(os, name, before(getattr(os, name)))
        patch.setattr(io, "open", opening(io.open))
        patch.setattr(builtins, "open", opening(builtins.open))
        yield steps


def prepare_a_run(folder: Path) -> None:
    running.run_job(SMALL, out=folder / "run", overwrite=True)


def report(folder: Path) -> None:
    if not any(folder.iterdir()):
        write_run(folder, run_record(), history_records(), metrics_record())
    write_report(folder)


def state(folder: Path) -> None:
    rounds = Rounds(folder / "state")
    rounds.save(1, Packed({"x": torch.zeros(3)}, {}), committed=0)
    rounds.keep(1)


def model(folder: Path) -> None:
    spec = ModelSpec("cnn", size=16)
    save_model(build(spec, LabelSet(("Mass",)), 1, pretrained=False), spec, folder / "model", {})


def hospitals(folder: Path) -> None:
    PhantomSites(images=20, held_out=30).prepare(folder / "sites", folder, 1, SMALL.method)


def results(folder: Path) -> None:
    from suture.flare.controller import copy_results

    server = folder.with_name("server")
    if not server.exists():
        server.mkdir()
        write_run(server, run_record(), history_records(), metrics_record())
        (server / "model").mkdir()
        (server / "model" / "model.json").write_text("{}")
    copy_results(server, folder)


def export(folder: Path) -> None:
    export_job(SMALL, folder / "exported", "x", ("harbor",), bundle=False)


def cache(folder: Path) -> None:
    root = write_image(folder.with_name("images") / "0.png").parent
    table = Table(LabelSet(("Mass",)), ("0.png",), ("p",), np.ones((1, 1), np.float32), ("train",), root)
    decode(table, 4, False, folder / "cache")


COMMANDS = [prepare_a_run, report, state, model, hospitals, results, export, cache]


@pytest.mark.complete
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS], ids=errno.errorcode.get)
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.__name__)
def test_a_full_disk_at_any_step_is_one_line_that_names_the_path(
    command: Callable[[Path], None], number: int, tmp_path: Path
) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    if command is report:
        report(folder)
    for step in count(1):
        raised: Exception | None = None
        with failing(folder, step, number) as steps:
            try:
                command(folder)
            except Exception as error:
                raised = error
        if len(steps) < step or step > MOST:
            break
        assert isinstance(raised, SutureError), f"{steps[step - 1]}: {raised!r}"
        assert str(folder) in str(raised)
        assert "\n" not in str(raised) or command is prepare_a_run
        assert "is full" in str(raised) or os.strerror(number) in str(raised)
        assert not [path for path in tree(folder) if path.endswith(".tmp")]
    assert step > 1
    assert raised is None or step > MOST, f"{command.__name__} failed on a whole disk: {raised}"


# A process that is killed while it prepares a run

JOB = replace(SMALL, simulation=PhantomSites())
STEPS = ("replace", "mkdir", "unlink", "rmdir", "fsync", "ftruncate")
WAYS: dict[str, dict[str, bool]] = {"plain": {}, "resume": {"resume": True}, "overwrite": {"overwrite": True}}


@pytest.fixture
def of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of two sites that are a file each."""

    def prepare(_: PhantomSites, folder: Path, *__: object) -> list[str]:
        for name in ("alpha", "beta"):
            make_folder(folder / name)
            atomic_write(folder / name / "suture.toml", b"[data]")
        return ["alpha", "beta"]

    monkeypatch.setattr(PhantomSites, "prepare", prepare)


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


@pytest.mark.complete
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("of_files")
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
                with refused("--resume", by=ConfigError):
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
        with refused(tmp_path / "r", by=ConfigError):
            running.run_job(JOB, out=tmp_path / "r")
    assert "ended during its preparation" not in caplog.text


@pytest.mark.usefixtures("of_files")
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
        with refused(copied, by=ConfigError):
            running.run_job(JOB, out=copied, **how)
    before = tree(copied)
    running.run_job(JOB, out=copied, resume=True)
    assert before - tree(copied) == {".preparing"}, "of a copy nothing is deleted"
    assert json.loads((copied / "run.json").read_text())["rounds"] == JOB.rounds
