"""Only regular files are opened: a pipe or a device in the place of a file is an error, and nobody waits."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from suture.cli.app import app
from suture.core.errors import SutureError
from suture.core.files import (
    named_regular,
    open_regular,
    read_bounded,
    read_json,
    read_records,
    read_regular,
    read_toml,
    whole_lines,
)
from suture.core.labels import LabelSet
from suture.data.archives import reports
from suture.data.images import ImageSource
from suture.data.limits import file_bytes
from suture.data.reading import read_form, read_lines, read_sheet, read_text, stream_columns
from suture.models import ModelSpec, build
from suture.models.classifier import name_vectors
from suture.models.saved import load_model, save_model
from suture.models.weights import read_weights
from suture.protocol import packing

KINDS = ("pipe", "device", "socket", "link to a pipe")


@pytest.fixture(autouse=True)
def _soon() -> Iterator[None]:
    """Nothing waits."""

    def late(*_: object) -> None:
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 30)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def saved_model(tmp_path: Path) -> Path:
    spec = ModelSpec("resnet_small", size=16)
    save_model(build(spec, LabelSet(("Mass",)), 1, pretrained=False), spec, tmp_path / "model", {})
    return tmp_path / "model"


def place(path: Path, kind: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "device":
        path.symlink_to("/dev/zero")
    elif kind in ("pipe", "socket"):
        os.mknod(path, (stat.S_IFIFO if kind == "pipe" else stat.S_IFSOCK) | 0o600)
    else:
        os.mkfifo(path.with_name(f"{path.name}.pipe"))
        path.symlink_to(f"{path.name}.pipe")
    return path


READERS: dict[str, Callable[[Path], Any]] = {
    "a": lambda path: open_regular(path).read(),
    "b": read_regular,
    "c": read_bounded,
    "d": lambda path: named_regular(path).__enter__(),
    "a.json": read_json,
    "a.toml": read_toml,
    "a.jsonl": read_records,
    "b.jsonl": whole_lines,
    "a.csv": read_sheet,
    "a.csv.gz": read_sheet,
    "a.xlsx": read_sheet,
    "a.parquet": read_sheet,
    "b.csv": read_form,
    "c.csv": lambda path: list(stream_columns(path, ["a"], "key")),
    "a.txt": read_text,
    "a.ndjson": lambda path: list(read_lines(path)),
    "a.png": file_bytes,
    "a.tar": lambda path: ImageSource(path).files(),
    "a.tar.gz": lambda path: list(reports(path, lambda _: True)),
    "a.zip": lambda path: list(reports(path, lambda _: True)),
    "a.pt": lambda path: read_weights(str(path), None),
    "a.safetensors": packing.load,
    "names.safetensors": lambda path: name_vectors(("a",), 4, str(path)),
}


LOW = ("a", "b", "c", "d", "a.toml", "a.png", "a.tar.gz", "a.zip", "a.safetensors")
"""The readers whose callers turn an error of the system into one for users."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", READERS)
def test_nothing_else_is_read(name: str, kind: str, tmp_path: Path) -> None:
    path = place(tmp_path / "in" / name, kind)
    with pytest.raises(OSError if name in LOW else SutureError, match="not a regular file") as caught:
        READERS[name](path)
    assert name in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["model.json", "model.safetensors"])
def test_a_model_folder_holds_files(name: str, kind: str, tmp_path: Path, saved_model: Path) -> None:
    (saved_model / name).unlink()
    place(saved_model / name, kind)
    with pytest.raises(SutureError, match=r"not a regular file|model\.json"):
        load_model(saved_model)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pipe_does_not_end_the_prediction_of_a_folder(kind: str, tmp_path: Path, saved_model: Path) -> None:
    from PIL import Image

    for name in ("0.tar", "0.tar.gz", "0.png", "0"):
        place(tmp_path / "in" / name, kind)
    Image.new("L", (16, 16)).save(tmp_path / "in" / "a.png")
    out = tmp_path / "p.csv"
    done = CliRunner().invoke(app, ["predict", str(saved_model), str(tmp_path / "in"), "-o", str(out)])
    assert done.exit_code == 1
    assert [line.partition(",")[0] for line in out.read_text().splitlines()[1:]] == [
        str(tmp_path / "in" / "a.png")
    ]
    left = (tmp_path / "p.left_out.csv").read_text()
    assert left.count("leads out of" if kind == "device" else "not a regular file") >= 3
