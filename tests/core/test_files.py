"""Files: written whole or not at all, and read within bounds, whatever they are and hold."""

from __future__ import annotations

import errno
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
from typing import Any

import psutil
import pytest

from suture.core import files
from suture.core.errors import ConfigError, DataError, DiskError, SutureError, as_word, show_value
from suture.core.files import (
    DEEPEST,
    LARGEST_FILE,
    LARGEST_TOML,
    MOST_VALUES,
    append_line,
    atomic_write,
    check_plain,
    hold,
    make_folder,
    named_regular,
    open_regular,
    parse_json,
    read_bounded,
    read_json,
    read_records,
    read_regular,
    read_toml,
    remove_leftovers,
    whole_lines,
    within_folder,
    write_json,
    writing,
)
from suture.core.labels import LabelSet
from suture.core.processes import wait_for_end
from suture.core.validation import parse
from suture.data.archives import reports
from suture.data.images import ImageSource
from suture.data.limits import file_bytes
from suture.data.reading import read_form, read_lines, read_sheet, read_text, stream_columns
from suture.federation.plan import Schedule, named_file
from suture.models import ModelSpec, build
from suture.models.classifier import name_vectors
from suture.models.saved import load_model, save_model
from suture.models.weights import read_weights
from suture.protocol import packing
from suture.protocol.records import read_history
from world import refused, suture, write_image, write_table


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


def test_a_file_is_replaced_and_a_failed_write_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError("No space left on device")

    path = tmp_path / "state.bin"
    atomic_write(path, b"old")
    atomic_write(path, b"new")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        atomic_write(path, b"newer")
    assert path.read_bytes() == b"new"
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
    with refused("to", by=DiskError), writing(Path("to")):
        shutil.copytree(tmp_path / "from", tmp_path / "to", copy_function=full)


def test_json_comes_back_as_it_went_and_is_strict(tmp_path: Path) -> None:
    value = {"auroc": {"Edema": 0.5, "Hernia": None}, "note": "Müller"}
    write_json(tmp_path / "a.json", value)
    assert read_json(tmp_path / "a.json") == value
    assert "Müller" in (tmp_path / "a.json").read_text(encoding="utf-8")
    for number in (float("nan"), -float("inf")):
        with refused("b.json"):
            write_json(tmp_path / "b.json", {"loss": number})
    assert os.listdir(tmp_path) == ["a.json"]


@pytest.mark.complete
def test_a_lock_is_waited_for_and_leftovers_go_with_their_process(tmp_path: Path) -> None:
    """What a killed process was writing goes even before anybody has asked how it ended."""
    program = (
        "import sys; from pathlib import Path; from suture.core.files import hold, temporary_beside;"
        "folder = Path(sys.argv[1]); lock = hold(folder / '.lock', 0);"
        "temporary_beside(folder / 'state').write_text('half'); print(flush=True); sys.stdin.read()"
    )
    words = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout
        child.stdout.readline()
        with refused(tmp_path):
            hold(tmp_path / ".lock", 0.2)
        remove_leftovers(tmp_path)
        assert len(list(tmp_path.iterdir())) == 2, "of a process that works"
        child.kill()
        wait_for_end([psutil.Process(child.pid)])
        remove_leftovers(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]
        hold(tmp_path / ".lock", 5).close()


def test_a_named_file_lies_directly_in_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    (folder / "inner").mkdir(parents=True)
    for path in (tmp_path / "secret", folder / "words.txt", folder / "inner" / "deep"):
        path.write_text("a\n")
    for name, target in (("out", tmp_path / "secret"), ("within", "words.txt"), ("up", tmp_path)):
        (folder / name).symlink_to(target)
    for name in ("words.txt", "within", "inner"):
        assert named_file(name, folder, "key") == folder / name
    paths = ["", ".", "..", "../secret", "inner/deep", "inner\\deep", str(tmp_path / "secret")]
    for name in [*paths, "a\0b", "a\nb", "out", "up", "none", "~"]:
        with refused("key=", by=ConfigError):
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


# Plain values of strangers


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


def test_json_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in (
        *("[" * 100_000 + "]" * 100_000, "[" * (DEEPEST + 2) + "]" * (DEEPEST + 2)),
        *("NaN", str(2**64), "9" * 5_000, "{", '"\\ud800"', '{"a\\ud800": 1}', b"\xff"),
    ):
        with pytest.raises(ValueError):  # noqa: PT011 - whatever it says
            parse_json(text)
    monkeypatch.setattr("json.loads", None)  # too many values, before they are parsed
    for text in ("[" + "0," * MOST_VALUES + "0]", b"[" + b"{}," * MOST_VALUES + b"0]"):
        with pytest.raises(ValueError, match="2,000,000"):
            parse_json(text)


def test_what_is_within_the_bounds_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_MOST_PARTS", 2)  # after the second of each key
    check_plain(nested(DEEPEST))
    check_plain({"x": [2**63 - 1, -(2**63), 1.5, None, True, "ü", (1, 2)]})
    with pytest.raises(ValueError, match="deep"):
        check_plain(nested(DEEPEST + 1))
    (tmp_path / "x.toml").write_bytes("\ufeffa = [1, 'ü']\nb.c.d = 2\nb.e.f = 3".encode())
    assert read_toml(tmp_path / "x.toml") == {"a": [1, "ü"], "b": {"c": {"d": 2}, "e": {"f": 3}}}
    (tmp_path / "x.toml").write_text("b.c.d = 2\nb.e.f.g = 3")
    with refused("x.toml", " 2 parts", by=ConfigError):
        read_toml(tmp_path / "x.toml")


def test_a_file_of_json_that_holds_no_object_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for content in (b"[]", b"3", b"\xff{}", b"", b"[" * 100_000):
        path.write_bytes(content)
        with refused("x.json", by=DataError):
            read_json(path)
    with refused("y.json", by=DataError):
        read_json(tmp_path / "y.json")
    os.truncate(path, LARGEST_FILE + 1)
    with refused("64 MiB", by=DataError):
        read_json(path)


LONG_KEY = ".".join(["a"] * 40_000)
DEEP_KEY = ".".join("a" * 28)


def test_toml_that_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str | bytes] = [
        *("a = 0x" + "f" * 5_000, "a = " + "9" * 5_000, "a = 1\na = 2", "a = 2024-99-99"),
        *('name = "Köln"'.encode(encoding) for encoding in ("utf-16", "latin-1")),
        "#" * (LARGEST_TOML + 1),
    ]
    long_or_deep: list[str | bytes] = [
        *(f"{LONG_KEY} = 1", f"[{LONG_KEY}]", f"[[ {LONG_KEY} ]]", f"x = {{{LONG_KEY} = 1}}"),
        *(mark.join(["'a'"] * 40_000) + " = 1" for mark in (".", " . ")),
        *(f"x = [{{a = {text}, {LONG_KEY} = 1}}]" for text in ('"""x""""', "'''x'''", r'"\""', r"'\'")),
        f'# "\n{LONG_KEY} = 1',
        *("x = " + a * n + b * n for a, n, b in (("[", 40, "]"), ("[{a = ", 20, "}]"))),
        *(
            "\n".join(form.format(i) for i in range(14_000))
            for form in (f"[{DEEP_KEY}.b{{}}]", f"{DEEP_KEY}.b{{}} = 1")
        ),
        "x = [" + f"{{{DEEP_KEY} = 1}}," * 14_000 + "]",
    ]
    path = tmp_path / "x.toml"
    for number, text in enumerate(texts + long_or_deep):
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        if number == len(texts):
            monkeypatch.setattr("tomllib.loads", lambda _: pytest.fail("it was parsed"))
        with refused("x.toml", by=ConfigError):
            read_toml(path)
    monkeypatch.undo()
    write_table(tmp_path / "a.csv", [("image", "Mass"), ("a.png", 1)])
    with refused("a.csv", ".toml", by=ConfigError):
        read_toml(tmp_path / "a.csv")


@pytest.mark.complete
def test_dots_and_brackets_in_texts_and_numbers_are_no_keys(tmp_path: Path) -> None:
    lines = [
        f'x = "{LONG_KEY}[[[{{"',
        "y = [" + "1.5, " * 60_000 + "]",
        f'z = """\n{LONG_KEY}\n' + "[" * 50 + '"""',
        f"# {LONG_KEY}",
        f"w = '''{LONG_KEY}'''",
        "v = '" + "{" * 50 + "'",
        f"[a.b.'c.d'.\"{LONG_KEY}\"]",
        "u = 1.25",
    ]
    (tmp_path / "a.toml").write_text("\n".join(lines))
    assert read_toml(tmp_path / "a.toml")["x"].startswith(LONG_KEY)


def test_values_of_no_table_are_a_configuration_error() -> None:
    for values in ([1], "rounds", None, {"rounds": nested(5_000)}, {"rounds": 2**70}):
        with pytest.raises(ConfigError, match="schedule: ") as caught:
            parse(Schedule, values, "schedule")  # type: ignore[arg-type]
        assert len(str(caught.value)) < 300


def test_a_message_shows_any_value_shortly() -> None:
    assert show_value("a\x00\ud800") == "'a\\x00\\ud800'"
    assert as_word("a\nb") == "a\\nb"
    for value in (nested(20_000), "x" * 10**6, 10**5_000, list(range(10**5)), {"x" * 10**5: 1}):
        assert len(show_value(value)) < 500


def test_records_have_a_bound_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The history of 1,300 rounds of twenty sites is larger than any other file of JSON."""
    path = tmp_path / "history.jsonl"
    path.write_text('{"round": 1}\n' * 20)
    monkeypatch.setattr("suture.core.files.LARGEST_FILE", 100)
    assert len(read_records(path)) == 20
    with refused("history.jsonl", by=DataError):
        read_json(path)
    monkeypatch.setattr("suture.core.files.LARGEST_WHOLE", 100)
    with refused("history.jsonl", by=DataError):
        read_records(path)


@pytest.mark.complete
def test_records_of_a_sparse_file_are_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    readers: list[Callable[[], object]] = [
        lambda: read_records(path),
        lambda: whole_lines(path),
        lambda: read_history(tmp_path),
        lambda: append_line(path, {"round": 2}),
    ]
    for start, line in ((b"", "line 1"), (b"\n", "line 2")):
        path.write_bytes(start)
        os.truncate(path, 40 << 30)
        for read in readers:
            with refused("history.jsonl", line, by=DataError):
                read()
    with pytest.raises(OSError, match="larger than 1,024 MiB"):
        read_regular(path)
    assert path.stat().st_size == 40 << 30


# A pipe or a device in the place of a file is an error, and nobody waits


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


@pytest.mark.parametrize("name", READERS)
def test_nothing_but_a_regular_file_is_read(name: str, tmp_path: Path) -> None:
    for kind in ("pipe", "device", "socket", "link to a pipe"):
        path = place(tmp_path / kind / name, kind)
        with pytest.raises(OSError if name in LOW else SutureError, match="not a regular file") as caught:
            READERS[name](path)
        assert name in str(caught.value)


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_nor_in_a_model_folder_or_a_folder_to_predict(kind: str, tmp_path: Path) -> None:
    spec = ModelSpec("resnet_small", size=16)
    save_model(build(spec, LabelSet(("Mass",)), 1, pretrained=False), spec, tmp_path / "model", {})
    for name in ("0.tar", "0.tar.gz", "0.png", "0"):
        place(tmp_path / "in" / name, kind)
    image = write_image(tmp_path / "in" / "a.png")
    out = tmp_path / "p.csv"
    with refused("p.left_out.csv", by=DataError):
        suture("predict", tmp_path / "model", tmp_path / "in", "-o", out)
    assert [line.partition(",")[0] for line in out.read_text().splitlines()[1:]] == [str(image)]
    left = (tmp_path / "p.left_out.csv").read_text()
    assert left.count("leads out of" if kind == "device" else "not a regular file") >= 3
    for name in ("model.safetensors", "model.json"):
        (tmp_path / "model" / name).unlink()
        place(tmp_path / "model" / name, kind)
        with refused(name):
            load_model(tmp_path / "model")
