"""Files that are written completely or not at all, and read as plain values within bounds.

Plain values are those of JSON and TOML: bounded before anything converts, prints or stores them. Whoever
writes such a file or message may have made a mistake, or worse: Python's own parsers end in a
`RecursionError` where values are nested deeply, and take integers that cannot be printed and text that has
no encoding.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import logging
import math
import os
import re
import secrets
import shutil
import stat
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from itertools import count
from pathlib import Path
from typing import IO, Any, NoReturn

import psutil

from suture.core.errors import ConfigError, DataError, DiskError, InUse, SutureError

log = logging.getLogger(__name__)

LARGEST_FILE = 64 * 2**20
"""Largest number of bytes of a file of JSON."""

LARGEST_WHOLE = 2**30
"""Largest number of bytes of any other file that is read whole or by lines: a sparse one may state any."""

LARGEST_TOML = 2**20
"""Largest number of bytes of a file of TOML, which a person writes and the standard library reads slowly."""

MOST_VALUES = 2_000_000
"""Largest number of values of a text of JSON: an empty list takes two of its bytes and 64 of memory."""

_MOST_PARTS = 50_000
"""Largest number of parts of keys of TOML in all, of each key those after the second."""

DEEPEST = 32
"""Largest depth to which plain values are nested."""


def check_plain(value: object) -> None:
    """Check the depth of a value, and that its integers have 64 bits and its texts an encoding.

    Raises:
        ValueError: says what is wrong.
    """
    level = [value]
    for _ in range(DEEPEST + 1):
        inner: list[object] = []
        for one in level:
            if isinstance(one, str):
                one.encode()  # a lone surrogate has no encoding, and UnicodeEncodeError is a ValueError
            elif isinstance(one, int) and not -(2**63) <= one < 2**63:
                raise ValueError("it has an integer of more than 64 bits")
            elif isinstance(one, (list, tuple)):
                inner += one
            elif isinstance(one, Mapping):
                inner += (*one.keys(), *one.values())
        if not inner:
            return
        level = inner
    raise ValueError(f"it is nested more than {DEEPEST} levels deep")


_MARKS: dict[type, tuple[Any, ...]] = {str: ("[", "{", ","), bytes: (b"[", b"{", b",")}
"""What comes before each value but the first."""


def parse_json(text: str | bytes) -> Any:
    """Parse strict JSON (RFC 8259) within the bounds of `check_plain`.

    Raises:
        ValueError: it is none, or too large.
    """
    check_count(text)
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError(f"it is nested more than {DEEPEST} levels deep") from None
    check_plain(value)
    return value


def check_count(text: str | bytes) -> None:
    """Refuse a text of JSON with more than `MOST_VALUES` values, before it is parsed.

    Raises:
        ValueError: it has.
    """
    if sum(map(text.count, _MARKS[type(text)])) > MOST_VALUES:
        raise ValueError(f"it has more than {MOST_VALUES:,} values")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")


def read_toml(path: Path) -> dict[str, Any]:
    """Read a file of TOML.

    Raises:
        OSError: the file cannot be read.
        ConfigError: it is too large, no UTF-8 or no TOML.
    """
    try:
        text = read_bounded(path, LARGEST_TOML).decode("utf-8-sig")
        _check_toml(text)
        raw = tomllib.loads(text)
        check_plain(raw)
    except RecursionError:
        raise ConfigError(f"{path} is nested more than {DEEPEST} levels deep; write it flat") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8; save it as UTF-8") from None
    except ValueError as error:
        if path.suffix.lower() != ".toml":
            raise ConfigError(f"{path} is not a TOML file; give a .toml file") from error
        raise ConfigError(f"{path} is not valid TOML: {_why(error)}") from error
    return raw


_SIGN = re.compile(r"\"{3}|'{3}|[\"'#\n=,.{}\[\]]")

_ENDS = {
    '"': re.compile(r'\\.|["\n]'),
    '"""': re.compile(r'\\.|"{3,5}', re.DOTALL),
    "'": re.compile(r"['\n]"),
    "'''": re.compile("'{3,5}"),
    "#": re.compile(r"\n"),
}
"""What ends a text or a comment of TOML, or is passed over in it, by the sign that begins it."""


def _check_toml(text: str) -> None:
    """Refuse deep nests and keys of many parts, which take the standard library quadratic time and memory.

    Raises:
        ValueError: there is one.
    """
    place = depth = dots = parts = 0
    while sign := _SIGN.search(text, place):
        place, mark = sign.end(), sign[0]
        if mark in _ENDS:
            ends = (end for end in _ENDS[mark].finditer(text, place) if end[0][0] != "\\")
            place = end.end() if (end := next(ends, None)) else len(text)
        depth += (mark in "[{") - (mark in "]}")
        if mark == ".":
            dots += 1
            parts += dots > 1  # a number has one
        elif mark not in ('"', "'"):  # a part of a key, as a word without quotes is
            dots = 0
        if depth > DEEPEST:
            raise ValueError(f"it is nested more than {DEEPEST} levels deep; write it flat")
        if dots >= DEEPEST:
            line = text.count("\n", 0, place) + 1
            raise ValueError(f"line {line} has a key of more than {DEEPEST} parts; write it flat")
        if parts > _MOST_PARTS:
            raise ValueError(f"its keys have more than {_MOST_PARTS:,} parts; write it flat")


def read_bounded(path: Path, most: int | None = None) -> bytes:
    """Return the bytes of a regular file.

    Args:
        most: number of bytes, `LARGEST_FILE` by default.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is too large.
    """
    most = LARGEST_FILE if most is None else most
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"it is larger than {most >> 20} MiB")
    return data


def open_regular(path: str | os.PathLike[str], *, own: bool = False) -> io.BufferedReader:
    """Open a file that somebody else may have put there; a pipe or a device may have no end.

    Args:
        own: refuse another user's file, and a link, where this user keeps what nobody else may change.

    Raises:
        OSError: it cannot be read, or is not a regular file.
        DataError: it is another user's.
    """
    # Without O_NONBLOCK, opening a pipe waits for its writer. The open file is asked, not the path: it could
    # have become another one in between.
    wrong = OSError(errno.EINVAL, "not a regular file, but a pipe, a socket or a device", str(path))
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (os.O_NOFOLLOW if own else 0)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        raise wrong if error.errno == errno.ENXIO else error from None  # a socket cannot be opened
    found = os.fstat(descriptor)
    mode, foreign = found.st_mode, own and found.st_uid != os.geteuid()
    if stat.S_ISREG(mode) and not foreign:
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if foreign:
        raise DataError(
            f"{path} belongs to another user, who may have written anything; set [storage] cache (or "
            "SUTURE_CACHE) to a folder that is yours alone"
        )
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise wrong


@contextmanager
def named_regular(path: str | os.PathLike[str], *, own: bool = False) -> Iterator[str]:
    """Give a library that opens by name a name of what `open_regular` has opened; errors as of that."""
    with open_regular(path, own=own) as file:
        yield f"/dev/fd/{file.fileno()}"


def read_regular(path: str | os.PathLike[str], *, own: bool = False) -> bytes:
    """Return the bytes of a regular file of at most `LARGEST_WHOLE`; errors as of `open_regular`."""
    with open_regular(path, own=own) as file:
        if os.fstat(file.fileno()).st_size > LARGEST_WHOLE:
            raise OSError(errno.EFBIG, f"it is larger than {LARGEST_WHOLE >> 20:,} MiB", str(path))
        return file.read()


def sha256_of(path: str | os.PathLike[str], *, own: bool = False) -> str:
    """The SHA-256 of a regular file, in hexadecimal digits; errors as of `open_regular`."""
    with open_regular(path, own=own) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_lines(path: str | os.PathLike[str]) -> Iterator[bytes]:
    """Yield the lines of a regular file, each with its end; the last one may have none.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is longer than `LARGEST_FILE`, or all are longer than `LARGEST_WHOLE`.
    """
    total = 0
    with open_regular(path) as file:
        for number in count(1):
            line = file.readline(LARGEST_FILE + 1)
            total += len(line)
            if len(line) > LARGEST_FILE:
                raise ValueError(f"line {number} is longer than {LARGEST_FILE >> 20} MiB")
            if total > LARGEST_WHOLE:
                raise ValueError(f"it is larger than {LARGEST_WHOLE >> 20:,} MiB")
            if not line:
                return
            yield line


def _why(error: OSError | ValueError) -> str:
    """Return the reason, and of text without an encoding not the text."""
    if isinstance(error, OSError):
        return str(error.strerror)
    return error.reason if isinstance(error, UnicodeError) and hasattr(error, "reason") else str(error)


_LEFT = re.compile(r"\..+\.(\d+)\.[0-9a-f]{8}\.tmp")
"""What `temporary_beside` names, with the process that did."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise an error of the system as one that names the file or folder that is being written.

    Raises:
        DiskError: in place of any `OSError` of the block.
    """
    try:
        yield
    except DiskError:
        raise
    except shutil.Error as error:  # of `copytree`, with the text of each file's error
        code = re.search(r"\[Errno (\d+)\]", str(error))
        number = int(code[1]) if code else errno.EIO
        raise DiskError(number, os.strerror(number), str(path)) from error
    except OSError as error:
        raise DiskError(error.errno, error.strerror or str(error), str(path)) from error


def make_folder(path: Path, *, private: bool = False) -> None:
    """Make a folder and those above it; one that is there stays.

    Args:
        private: let only its owner look into a new one.

    Raises:
        DiskError: the disk is full or read-only, or a file has the name.
    """
    with writing(path):
        path.mkdir(0o700 if private else 0o777, parents=True, exist_ok=True)


def temporary_beside(path: Path) -> Path:
    """Return a new name beside `path` that tells which process uses it, for `remove_leftovers`."""
    return path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")


def is_temporary(name: str) -> bool:
    """Whether `temporary_beside` has made a name."""
    return _LEFT.fullmatch(name) is not None


def remove_leftovers(folder: Path, names: str = "**/.*.tmp") -> None:
    """Delete what processes that were killed have left of their writing, and nothing of a live process.

    Call it with a lock that keeps the processes of other machines and containers out: their numbers mean
    nothing here.
    """
    for path in list(folder.glob(names)):
        found = _LEFT.fullmatch(path.name)
        if found and not _lives(int(found[1]), path):
            real = path.is_dir() and not path.is_symlink()
            shutil.rmtree(path) if real else path.unlink(missing_ok=True)


def _lives(pid: int, path: Path) -> bool:
    """Whether the process that has written a file still runs; another may have got its number since."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:  # ended, and its parent has not asked how
            return False
        return bool(process.create_time() <= path.stat().st_mtime + 1)
    except (psutil.NoSuchProcess, FileNotFoundError):
        return False
    except psutil.AccessDenied:
        return True


@contextmanager
def replacing(path: Path, durable: bool = True, *, private: bool = False) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` when the block succeeds, and is deleted otherwise.

    The folder of the file is made where there is none.

    Args:
        durable: whether the bytes are synchronised to the disk before the file gets its name.
        private: whether the file tells of patients, or is a key: only its owner may read it.

    Raises:
        DiskError: the folder cannot be made, is not writable or is full; `path` is then unchanged.
    """
    # In a folder of its own, because safetensors writes under a name that it chooses, and renames. And not
    # that of `tempfile`: only their owner may read its files, and so it would be with the new file.
    apart = temporary_beside(path)
    try:
        with writing(path):
            make_folder(path.parent)
            apart.mkdir(mode=0o700 if private else 0o777)
            temporary = apart / path.name
            yield temporary
            if private:
                temporary.chmod(0o600)
            if durable:
                with open_regular(temporary) as file:
                    os.fsync(file.fileno())
            os.replace(temporary, path)
            if durable:  # and with the folder the file's new name
                folder = os.open(path.parent, os.O_RDONLY)
                try:
                    os.fsync(folder)
                finally:
                    os.close(folder)
    finally:
        try:
            apart.rmdir()
        except OSError:  # what failed has left something in it
            shutil.rmtree(apart, ignore_errors=True)


def within_folder(folder: Path) -> Callable[[Path], bool]:
    """Return a test of whether a path lies within a folder after every link on its way was followed.

    The folder itself may be a link. Each parent is resolved once, not once per file.
    """
    root = folder.resolve()

    @cache
    def within(parent: Path) -> bool:
        return parent.resolve().is_relative_to(root)

    def test(path: Path) -> bool:
        whole = path.is_symlink() or path.name in ("", "..")
        return path.resolve().is_relative_to(root) if whole else within(path.parent)

    return test


def atomic_write(path: Path, data: bytes, *, private: bool = False) -> None:
    """Replace `path` by `data`. A reader, also after a crash, finds either the old bytes or the new ones.

    Args:
        private: as of `replacing`.

    Raises:
        DiskError: as `replacing`.
    """
    with replacing(path, private=private) as temporary:
        temporary.write_bytes(data)


def append_line(path: Path, value: object, durable: bool = False, *, private: bool = False) -> None:
    """Append a value as a line of JSON, completely or not at all.

    An incomplete line, of a process that was killed, is deleted first.

    Args:
        durable: whether the line is synchronised to the disk before this returns.
        private: of a new file, as of `replacing`.

    Raises:
        DiskError: the disk is full or the file cannot be written; its lines are unchanged.
        DataError: the file is damaged.
    """
    left = memoryview(f"{json.dumps(value, allow_nan=False)}\n".encode())
    with writing(path), os.fdopen(_own_file(path, 0o600 if private else 0o666), "a+b", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
            size = _ended(path)
            file.truncate(size)
        try:
            while left:
                left = left[file.write(left) :]
            if durable:
                os.fsync(file.fileno())
        except OSError:
            file.truncate(size)
            raise


def _own_file(path: Path, mode: int = 0o666) -> int:
    """Open a file of this program to read and append, or make it; return its descriptor.

    Raises:
        OSError: a link, which would lead to a file of somebody else, a pipe or a device has its name.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(
                errno.ELOOP, "it is a link, and Suture does not follow links here; remove it", str(path)
            ) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file; remove it", str(path))
    return descriptor


def _ended(path: Path) -> int:
    """Return the number of bytes of the complete lines of a file."""
    try:
        return sum(len(line) for line in read_lines(path) if line.endswith(b"\n"))
    except ValueError as error:
        raise _damage(path, str(error)) from None


def whole_lines(path: Path) -> list[str]:
    """Read the complete lines of a file that `append_line` writes; none without the file.

    Raises:
        DataError: the file is no text, or larger than any record; names the line.
    """
    return [line[:-1] for line in _lines(path) if line.endswith("\n")]


def read_records(path: Path) -> list[dict[str, Any]]:
    """Read the lines of JSON that `append_line` has written; none without the file.

    A last line that was never ended, because its process was killed, is left out, with a warning.

    Raises:
        DataError: another line is damaged; names it and the remedy.
    """
    found = []
    for number, text in enumerate(_lines(path), 1):
        if not text.strip():
            continue
        try:
            found.append(_record(text, path, number))
        except DataError:
            if text.endswith("\n"):
                raise
            log.warning("%s: line %d is incomplete and is skipped", path, number)
    return found


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file, each with its end; none without the file, and errors as of `whole_lines`."""
    # One by one: the history of a long run is larger than any other file of JSON.
    lines = read_lines(path) if path.exists() else iter(())
    for number in count(1):
        if not (text := _text(lambda: next(lines, b""), path, number)):
            return
        yield text


def read_json(path: Path, *keys: str) -> dict[str, Any]:
    """Read a file that `write_json` has written.

    Args:
        keys: that it must have.

    Raises:
        DataError: it is absent or damaged; names the line and the remedy.
    """
    value = _record(_text(lambda: read_bounded(path), path), path)
    if missing := [key for key in keys if key not in value]:
        raise _damage(path, f"{missing[0]!r} is missing")
    return value


def note_own(path: Path, **facts: object) -> None:
    """Note in a file of a folder what this program has made in that folder, with the folder's inode."""
    write_json(path, {"inode": path.parent.stat().st_ino, **facts})


def own_note(path: Path) -> dict[str, Any] | None:
    """Return what `note_own` has noted; None where the note is absent, damaged, or of another folder.

    In a copy of the folder, or one of somebody else, the inode is another one.
    """
    with suppress(DataError, OSError):
        note = read_json(path, "inode")
        if not path.is_symlink() and note["inode"] == path.parent.stat().st_ino:
            return note
    return None


def _text(read: Callable[[], bytes], path: Path, first: int = 1) -> str:
    try:
        return read().decode()
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + first
        raise _damage(path, f"line {line}: it is not text") from None
    except ValueError as error:
        raise _damage(path, str(error)) from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None


def _record(text: str, path: Path, line: int = 1) -> dict[str, Any]:
    """Parse a table of JSON that begins at a line of a file."""
    try:
        value = parse_json(text)
    except json.JSONDecodeError as error:
        at = f"line {line + error.lineno - 1}, column {error.colno}"
        raise _damage(path, f"{at}: {error.msg}") from None
    except ValueError as error:
        raise _damage(path, f"line {line}: {error}") from None
    if not isinstance(value, dict):
        raise _damage(path, f"line {line}: a {type(value).__name__} instead of a table")
    return value


def _damage(path: Path, what: str) -> DataError:
    return DataError(
        f"{path} is damaged ({what}); restore it from a backup, or run the job again with another --out"
    )


def hold(path: Path, seconds: float, leftovers: str = "**/.*.tmp") -> IO[str]:
    """Hold a lock for as long as the returned file is open, or the process lives.

    What killed processes have left of their writing in its folder is then deleted.

    Args:
        path: of the lock file.
        seconds: time to wait for another holder.
        leftovers: the temporary files that only holders of this lock write.

    Raises:
        InUse: another process still holds it; names the process.
        DiskError: the file cannot be written, or the file system has no locks.
    """
    make_folder(path.parent)
    file = _lock(path, seconds)
    remove_leftovers(path.parent, leftovers)
    return file


MAKING = ".making"
"""The end of the name of a lock that `only_maker` holds, or waits for without end."""


@contextmanager
def only_maker(path: Path) -> Iterator[None]:
    """Let one process at a time make a file that several share; the others wait until it is done.

    What a killed process has left of its writing of this file is then deleted.

    Raises:
        DiskError: its folder cannot be written, or the file system has no locks.
    """
    lock = path.with_name(f".{path.name}{MAKING}")
    make_folder(path.parent)
    try:
        held = _lock(lock, 0)
    except InUse as other:
        log.warning("waiting for %s: %s", path, other)
        held = _lock(lock, math.inf)
    with held:
        remove_leftovers(path.parent, f".{path.name}.*.tmp")
        try:
            yield
        finally:
            lock.unlink()  # by its holder alone: see `FolderLock`


def _lock(path: Path, seconds: float) -> IO[str]:
    end = time.monotonic() + seconds
    while True:
        with writing(path):
            file = os.fdopen(_own_file(path), "a+", errors="replace")
        if _taken(file, path):
            return file
        with file:  # open while it waits, so that others can tell for what
            file.seek(0)
            holder = file.read(20).strip()
            if time.monotonic() > end:
                raise InUse(path.parent, holder if holder.isdigit() else "")
            time.sleep(0.1)


def _taken(file: IO[str], path: Path) -> bool:
    """Try to lock a file that was just opened, and note this process in it."""
    with writing(path):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    if not is_at(file, path):  # its last holder has deleted it; who comes next would lock another file
        return False
    # The lock holds without the note: a full disk must not prevent it, nor that the file is closed.
    with suppress(OSError):
        note = f"{os.getpid()}\n"
        file.seek(0)
        if file.read(len(note) + 1) != note:
            file.truncate(0)
            os.write(file.fileno(), note.encode())
    return True


def is_at(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.lstat())
    except FileNotFoundError:
        return False


def write_json(path: Path, value: object, *, private: bool = False) -> None:
    """Write strict JSON (RFC 8259: no NaN, no Infinity) with `atomic_write`.

    Args:
        private: as of `replacing`.

    Raises:
        SutureError: a number is not finite.
    """
    try:
        text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise SutureError(f"{path}: {error}; write an undefined number as null") from error
    atomic_write(path, f"{text}\n".encode(), private=private)
