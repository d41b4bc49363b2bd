import json
import os
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from suture.core.errors import SutureError
from suture.core.files import append_line, atomic_write, hold, whole_lines, write_json


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "state.bin"
    atomic_write(path, b"old")
    atomic_write(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["state.bin"]


def test_a_failed_write_leaves_the_old_file_and_no_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.bin"
    path.write_bytes(b"old")

    def full(_: int) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        atomic_write(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["state.bin"]


def test_a_line_is_whole_or_not_there(tmp_path: Path) -> None:
    """A disk that is full in the middle of a line, and then has room again."""
    path = tmp_path / "history.jsonl"
    append_line(path, {"round": 1})
    before = path.read_bytes()
    with pytest.raises(OSError, match="File too large"), full_after(path, 4):
        append_line(path, {"round": 2})
    assert path.read_bytes() == before
    append_line(path, {"round": 2})
    assert whole_lines(path) == ['{"round": 1}', '{"round": 2}']


def test_a_line_that_nobody_ended_gives_way_to_the_next(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    assert whole_lines(path) == []
    for torn in ('{"rou', '{"round": 1}\n{"rou'):
        path.write_text(torn)
        whole = whole_lines(path)
        append_line(path, {"round": 2})
        assert whole_lines(path) == [*whole, '{"round": 2}']


@contextmanager
def full_after(path: Path, room: int) -> Iterator[None]:
    """A disk that takes so many bytes more of a file: the system's own limit on the size of files."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def test_permissions_are_those_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"")
    atomic_write(tmp_path / "atomic", b"")
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "atomic")]
    assert modes[0] == modes[1]


def test_json_comes_back_as_it_went(tmp_path: Path) -> None:
    value = {"auroc": {"Edema": 0.5, "Hernia": None}, "note": "Müller"}
    write_json(tmp_path / "a.json", value)
    text = (tmp_path / "a.json").read_text(encoding="utf-8")
    assert json.loads(text) == value
    assert "Müller" in text


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_json_is_strict(tmp_path: Path, number: float) -> None:
    with pytest.raises(SutureError, match=r"a\.json.*as null"):
        write_json(tmp_path / "a.json", {"loss": number})
    assert os.listdir(tmp_path) == []


def test_a_lock_is_waited_for_and_goes_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "state" / ".lock"
    script = "import time; from pathlib import Path; from suture.core.files import hold; "
    script += f"lock = hold(Path({str(path)!r}), 0); print('held', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as other:
        assert other.stdout
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(SutureError, match="another process is using"):
            hold(path, 0.2)
        other.kill()
    hold(path, 5).close()
