"""What tests build: tables, images, hospitals, a study with its trained run, commands, and refusals.

hospital  `write_hospital`: small images, a table, a suture.toml        (small_hospitals)
study     `small_study`: three hospitals and a job.toml                 (small_hospitals)
tiny      a federation of them in this process, round by round          (conftest)
trained   a study and its finished run, trained once for all tests      (conftest)
run       `write_run`: a run folder from records, without training      (example_run)
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from suture.cli.app import app
from suture.cli.common import guard
from suture.core.errors import SutureError
from suture.data.config import SiteConfig, load_site_config

_RUNNER = CliRunner()

DAMAGE = (
    b"",
    b'{"job": "demo",\n "ti',
    b'{"job": "\xff\xfe"}',
    b"[]",
    b"5",
    b"{}",
    b"[" * 100_000,
    b'{"rounds": ' + b"9" * 5000 + b"}",
)
"""What may stand in a damaged record of a run, in place of its JSON."""


@dataclass(frozen=True)
class Trained:
    """A study of three hospitals and the finished run of its job. Read only: copy what a test changes."""

    study: Path
    run: Path


def write_table(
    path: Path, rows: Sequence[Sequence[object]], delimiter: str = ",", encoding: str = "utf-8"
) -> Path:
    """Write a table, with its folder; the first row is the header."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    csv.writer(text, delimiter=delimiter).writerows(rows)
    path.write_bytes(text.getvalue().encode(encoding))
    return path


def write_image(path: Path, seed: int = 0, size: tuple[int, ...] = (16, 16), dtype: str = "uint8") -> Path:
    """Write an image of noise that no other seed gives; `size` is height, width and, of colour, channels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, np.iinfo(dtype).max, size).astype(dtype)
    Image.fromarray(pixels).save(path)
    return path


def site_config(folder: Path, **sections: Mapping[str, object]) -> SiteConfig:
    """The site's settings from a suture.toml that is written here, for instance `data={"dataset": "nih"}`."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for section, keys in sections.items():
        lines += [f"[{section}]", *(f"{key} = {_toml(value)}" for key, value in keys.items())]
    path = folder / "suture.toml"
    path.write_text("\n".join(lines) + "\n")
    return load_site_config(path)


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | Path):
        return f"'{value}'"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"'{key}' = {_toml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return repr(value)


def suture(*words: object) -> str:
    """What a command prints; its refusal is raised, and any other failure is one of the test."""
    result = _RUNNER.invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def exit_of(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    """The exit code of a command as a shell calls it; what it prints is in `capsys`."""
    monkeypatch.setattr("sys.argv", ["suture", *map(str, words)])
    try:
        guard(app)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@contextmanager
def refused(*named: object, by: type[Exception] = SutureError) -> Iterator[None]:
    """The block is refused by that class of error, which names these: a site, a file, a row, a class, a key.

    Not the sentence: all sentences stand in refusals.txt, to be read where they change.
    """
    with pytest.raises(by) as caught:
        yield
    missing = [str(name) for name in named if str(name) not in str(caught.value)]
    assert not missing, f"{missing} not named by: {caught.value}"
