"""Weights that somebody else made: read as tensors, or refused in words that give no bad advice."""

from __future__ import annotations

import io
import os
import pickle
import re
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from suture.core.errors import ConfigError
from suture.models.weights import read_checkpoint, read_weights
from suture_papers.fedmas.priors import _read_part


class Command:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("echo unpickled",)


def torch_file(value: object, **how: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **how)
    return file.getvalue()


def deflated() -> bytes:
    file = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(torch_file({"w": torch.zeros(100_000)}))) as old,
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return file.getvalue()


def scripted() -> bytes:
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.zeros(1, 2)), file)
    return file.getvalue()


REFUSED: dict[str, tuple[Callable[[], bytes], str]] = {
    "command.pt": (
        lambda: torch_file({"w": Command()}),
        r"it contains \w+\.system, which could run any program",
    ),
    "legacy.pt": (
        lambda: torch_file({"w": Command()}, _use_new_zipfile_serialization=False),
        r"it contains \w+\.system, which could run any program",
    ),
    "module.pth": (
        lambda: torch_file(torch.nn.Linear(2, 2)),
        r"it contains torch\.nn\.modules\.linear\.Linear, which could run any program",
    ),
    "plain.pkl": (lambda: pickle.dumps({"w": [1.0]}), "it is damaged, or not a checkpoint"),
    "path.pth": (lambda: torch_file({"w": Path("a")}), r"it contains pathlib\.\w+"),
    "scripted.pt": (scripted, "TorchScript"),
    "deflated.pt": (deflated, "TorchScript"),
    "text.pt": (lambda: b"not weights", "it is damaged"),
    "empty.pt": (lambda: b"", "it is damaged"),
    "cut.pt": (lambda: torch_file({"w": torch.zeros(9)})[:300], "it is damaged"),
    "list.pt": (lambda: torch_file([torch.zeros(2)]), "contains a list"),
    "cut.safetensors": (
        lambda: safetensors.torch.save({"w": torch.zeros(9)})[:-4],
        "cannot be read as safetensors.*fetch it again",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_file_is_told_in_our_own_words(name: str, tmp_path: Path) -> None:
    make, said = REFUSED[name]
    path = tmp_path / name
    path.write_bytes(make())
    for read in (lambda: read_weights(str(path), None), lambda: _read_part(path, "", "weights")):
        with warnings.catch_warnings(action="error"), pytest.raises(ConfigError, match=said) as caught:
            read()
        text = str(caught.value)
        assert name in text
        assert not re.search("weights_only|add_safe_globals|arbitrary|re-running|safe_globals", text)
        assert len(text.splitlines()) == 1
        assert "save" in text or "fetch" in text
        assert caught.value.__context__ is None or caught.value.__suppress_context__


@pytest.mark.complete
def test_no_command_runs(tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(torch_file({"w": Command()}))
    code = "import sys; from suture.models.weights import read_weights; read_weights(sys.argv[1], None)"
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "a.pt"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "unpickled" not in done.stdout
    assert "weights_only" not in done.stderr.rpartition("ConfigError")[2]


@pytest.mark.parametrize("form", ["zip", "legacy", "safetensors"])
def test_tensors_are_read_by_content(form: str, tmp_path: Path) -> None:
    state = {"a": torch.arange(3.0), "b": torch.ones(2, 2)}
    data = (
        safetensors.torch.save(state)
        if form == "safetensors"
        else torch_file(state, _use_new_zipfile_serialization=form == "zip")
    )
    for name in ("w.pth", "w.safetensors", "w"):
        (tmp_path / name).write_bytes(data)
        found = read_weights(str(tmp_path / name), None)
        assert {key: value.tolist() for key, value in found.items()} == {
            "a": [0, 1, 2],
            "b": [[1, 1], [1, 1]],
        }


def test_a_pipe_of_weights_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "w.pt")
    with pytest.raises(ConfigError, match=r"w\.pt cannot be read: not a regular file"):
        read_checkpoint(tmp_path / "w.pt")


@pytest.mark.parametrize(
    "content", [b"", b"cut off", b"<html>not found</html>", b"version https://git-lfs\n"]
)
def test_a_file_that_is_named_safetensors_is_not_called_a_pytorch_checkpoint(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(
        ConfigError, match=r"model\.safetensors is damaged, or not a safetensors file; fetch"
    ) as e:
        read_checkpoint(path)
    assert "PyTorch" not in str(e.value)
