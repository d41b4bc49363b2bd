"""A place that cannot be written is one line with the remedy and exit code 1 or 2, whatever the command."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from suture.cli.app import app
from suture.cli.common import guard, literal


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Run a command that fails as `suture` does; return its one line."""
    with pytest.raises(SystemExit) as ended:
        guard(lambda: literal(app)(list(words)))
    printed = capsys.readouterr()
    assert ended.value.code in (1, 2)
    (line,) = printed.err.splitlines()
    assert line.startswith("error: ")
    return line


COMMANDS = [
    ("run demo --env local --rounds 1 --out {}", "/x"),
    ("run demo --env local --rounds 1 --out {}", ""),
    ("export demo --out {}", ""),
    ("export demo --out {}", "/x"),
    ("egress --out {}", "/x.md"),
    ("init {} --site=alpha=data --yes", "/x"),
    ("init {} --site=alpha=data --yes", ""),
    ("vocab --texts words.txt --minimum 1 --patients 1 --out {}", "/x"),
    ("plot labels data/suture.toml --out {}", "/x"),
    ("poc up demo --dir {}", ""),
    ("poc down --dir {}", ""),
    ("report {}", ""),
    ("results job --out {}", "/x"),
]


@pytest.mark.parametrize(("command", "below"), COMMANDS)
def test_a_file_in_the_place_of_a_folder(
    command: str,
    below: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    hospital: Callable[..., Path],
) -> None:
    monkeypatch.chdir(tmp_path)
    hospital(tmp_path / "data", ("Mass", "Nodule"), 20, 1)
    (tmp_path / "words.txt").write_text("a b a\n")
    (tmp_path / "file").write_text("years of work")
    line = said(capsys, *command.format(f"file{below}").split())
    assert ("file" in line) or command.startswith(("results", "poc"))
    assert (tmp_path / "file").read_text() == "years of work"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EISDIR])
def test_an_error_of_the_system_in_any_command(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> None:
        raise OSError(number, os.strerror(number), "/data/out.csv")

    with pytest.raises(SystemExit) as ended:
        guard(fails)
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: /data/out.csv: {os.strerror(number)}; ")


def test_a_folder_whose_name_is_no_utf_8_cannot_be_written_into_a_configuration(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    hospital: Callable[..., Path],
) -> None:
    """Such as that of a disk of a former Windows."""
    monkeypatch.chdir(tmp_path)
    folder = os.fsdecode(b"R\xf6ntgen")
    hospital(tmp_path / folder, ("Mass", "Nodule"), 20, 1)
    line = said(capsys, "init", "study", "--yes", f"--site=alpha={folder}")
    assert "ntgen" in line
    assert "not utf-8; rename that folder or file" in line


def test_a_full_disk_for_a_file_of_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    line = said(capsys, "egress", "--out", str(tmp_path / "page.md"))
    assert line == f"error: {tmp_path / 'page.md'}: No space left on device; make room there, then try again"
    assert not list(tmp_path.iterdir())


def test_an_error_that_is_no_place_keeps_its_traceback() -> None:
    def fails() -> None:
        raise ConnectionResetError(errno.ECONNRESET, "a bug")

    with pytest.raises(ConnectionResetError):
        guard(fails)
