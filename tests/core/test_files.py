import errno
import json
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from suture.core.errors import ConfigError, DiskError, SutureError
from suture.core.files import (
    append_line,
    atomic_write,
    hold,
    make_folder,
    named_file,
    remove_leftovers,
    whole_lines,
    within_folder,
    write_json,
    writing,
)
from suture.core.processes import wait_for_end


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


@pytest.mark.parametrize("write", [atomic_write, append_line], ids=lambda write: write.__name__)
def test_permissions_are_those_of_any_new_file_unless_it_is_private(
    write: Callable[..., None], tmp_path: Path
) -> None:
    (tmp_path / "plain").write_bytes(b"")
    content = b"" if write is atomic_write else ""
    write(tmp_path / "shared", content)
    write(tmp_path / "private", content, private=True)
    make_folder(tmp_path / "folder", private=True)
    names = ("plain", "shared", "private", "folder")
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in names]
    assert modes == [modes[0], modes[0], 0o600, 0o700]


def test_a_lock_on_a_full_disk_is_held_and_closed_without_an_error(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    with full_after(tmp_path / "lock", room=0), hold(tmp_path / "lock", 0):
        assert (tmp_path / "lock").read_bytes() == b""


def test_a_full_disk_under_many_files_is_one_error(tmp_path: Path) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name in "ab":
        atomic_write(tmp_path / "from" / name, b"")
    with pytest.raises(DiskError, match=r"^to: No space left on device; make room"), writing(Path("to")):
        shutil.copytree(tmp_path / "from", tmp_path / "to", copy_function=full)


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


@pytest.mark.complete
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


def test_a_named_file_lies_directly_in_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    (folder / "inner").mkdir(parents=True)
    (tmp_path / "secret").write_text("a\n")
    (folder / "words.txt").write_text("a\n")
    (folder / "inner" / "deep").write_text("a\n")
    (folder / "out").symlink_to(tmp_path / "secret")
    (folder / "within").symlink_to("words.txt")
    (folder / "up").symlink_to(tmp_path)
    for name in ("words.txt", "within", "inner"):
        assert named_file(name, folder, "key") == folder / name
    paths = ["", ".", "..", "../secret", "inner/deep", "inner\\deep", str(tmp_path / "secret")]
    for name in [*paths, "a\0b", "a\nb", "out", "up", "none", "~"]:
        with pytest.raises(ConfigError, match=r"^key=.*by its bare name"):
            named_file(name, folder, "key")


def test_a_folder_contains_what_lies_in_it_after_all_links(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data2").mkdir()
    (tmp_path / "root").symlink_to("data")
    for name in ("data/a", "data2/b"):
        (tmp_path / name).touch()
    (tmp_path / "data/out").symlink_to("../data2/b")
    (tmp_path / "data/in").symlink_to("a")
    (tmp_path / "data/ward").symlink_to("../data2")
    inside = within_folder(tmp_path / "root")
    assert [inside(tmp_path / "root" / name) for name in ("a", "in", "none")] == [True] * 3
    assert [inside(tmp_path / "root" / name) for name in ("out", "ward/b", "..", "../data2/b")] == [False] * 4
    assert inside(tmp_path / "data" / "a")


@pytest.mark.complete
def test_what_a_killed_process_was_writing_goes_even_before_anybody_has_asked_how_it_ended(
    tmp_path: Path,
) -> None:
    program = (
        "import sys; from pathlib import Path; from suture.core.files import temporary_beside;"
        "temporary_beside(Path(sys.argv[1])).write_text('half'); print(flush=True); sys.stdin.read()"
    )
    words = [sys.executable, "-c", program, str(tmp_path / "state")]
    child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with child:
        assert child.stdout
        child.stdout.readline()
        remove_leftovers(tmp_path)
        assert len(list(tmp_path.iterdir())) == 1, "of a process that works"
        child.kill()
        wait_for_end([psutil.Process(child.pid)])
        remove_leftovers(tmp_path)
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["link", "loose link", "pipe", "device"])
def test_a_line_and_a_lock_are_written_to_a_regular_file_of_that_name_alone(
    kind: str, tmp_path: Path
) -> None:
    (tmp_path / "diary.txt").write_text("a line without an end")
    path = tmp_path / "own" / "name"
    path.parent.mkdir()
    if kind == "pipe":
        os.mkfifo(path)
    else:
        targets = {"link": "diary.txt", "loose link": "new.txt", "device": "/dev/null"}
        path.symlink_to(tmp_path / targets[kind])
    for write in (lambda: append_line(path, {"a": 1}), lambda: hold(path, 0).close()):
        with pytest.raises(OSError, match=r"it is a link|is not a regular file"):
            write()
    assert (tmp_path / "diary.txt").read_text() == "a line without an end"
    assert not (tmp_path / "new.txt").exists()


@pytest.mark.parametrize("target", ["folder", "diary.txt", "nothing"])
def test_a_leftover_that_is_a_link_is_deleted_and_not_its_target(target: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine.txt").touch()
    (tmp_path / "diary.txt").touch()
    used = tmp_path / "used"
    used.mkdir()
    (used / ".x.999999.deadbeef.tmp").symlink_to(tmp_path / target)
    remove_leftovers(used)
    assert not os.listdir(used)
    assert (tmp_path / "folder" / "mine.txt").exists()
    assert (tmp_path / "diary.txt").exists()
