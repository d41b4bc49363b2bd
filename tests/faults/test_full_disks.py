"""A disk that fails at the n-th step of a command: one line that names the path, and nothing half written."""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import SafetensorError

import suture.protocol.packing as packing
from example_run import history_records, metrics_record, run_record, write_run
from small_job import SMALL
from suture.core.errors import SutureError
from suture.core.labels import LabelSet
from suture.data.table import Table
from suture.execution import run as running
from suture.federation.state_files import Rounds
from suture.flare.recipe import export_job
from suture.learning.samples import decode
from suture.models import ModelSpec, build
from suture.models.saved import save_model
from suture.protocol.packing import Packed
from suture_results.report import write_report
from suture_synthetic.phantom_hospitals import PhantomSites

pytestmark = pytest.mark.complete


JOB = SMALL
MOST = 30
"""Steps of a command that are tried; the images of a simulation are more."""


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
    running.run_job(JOB, out=folder / "run", overwrite=True)


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
    PhantomSites(images=20, held_out=30).prepare(folder / "sites", folder, 1, JOB.method)


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
    export_job(JOB, folder / "exported", "x", ("harbor",), bundle=False)


def cache(folder: Path) -> None:
    root = folder.with_name("images")
    root.mkdir(exist_ok=True)
    Image.new("L", (4, 4)).save(root / "0.png")
    table = Table(LabelSet(("Mass",)), ("0.png",), ("p",), np.ones((1, 1), np.float32), ("train",), root)
    decode(table, 4, False, folder / "cache")


COMMANDS = [prepare_a_run, report, state, model, hospitals, results, export, cache]
NUMBERS = [errno.ENOSPC, errno.EDQUOT, errno.EROFS]


def left(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.name.endswith(".tmp")]


@pytest.mark.parametrize("number", NUMBERS, ids=errno.errorcode.get)
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.__name__)
def test_a_full_disk_at_any_step_is_one_line_that_names_the_path(
    command: Callable[[Path], None], number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # for speed: no power fails here
    monkeypatch.setattr(running, "_rounds", lambda *_: None)
    monkeypatch.setattr(running, "_finish", lambda *_: None)
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
        assert left(folder) == []
    command_ok = step > 1 and (raised is None or step > MOST)
    assert command_ok, f"{command.__name__} failed on a whole disk: {raised}"
