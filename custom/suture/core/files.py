"""Writing files completely or not at all."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO

from suture.core.errors import ConfigError, SutureError


@contextmanager
def replacing(path: Path, durable: bool = True) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` when the block succeeds, and is deleted otherwise.

    Args:
        durable: whether the bytes are synchronised to the disk before the file gets its name.

    Raises:
        OSError: the folder does not exist, is not writable or is full; `path` is then unchanged.
    """
    # Not `tempfile`: its files are readable only by their owner, and so would be the new file.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        if durable:
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
        os.replace(temporary, path)
        if durable:
            _sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Synchronise a folder to the disk, and so the name of a new file."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def contained(folder: Path) -> Callable[[Path], bool]:
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


def named_file(name: str, folder: Path, key: str) -> Path:
    """Return the file or folder that another party names, which lies directly in a folder of one's own.

    Args:
        name: a bare name, never a path.
        key: what gives the name, for the message.

    Raises:
        ConfigError: it is no bare name, is not in the folder, or is a link out of it.
    """
    rule = f"{key}={name[:80]!r}: a job names a file of {folder} ([storage] files) by its bare name"
    if name in ("", ".", "..") or not name.isprintable() or "/" in name or "\\" in name:
        raise ConfigError(rule)
    path = folder / name
    if not path.exists() or not contained(folder)(path):
        raise ConfigError(f"{rule}; copy it there: the folder has none of this name, or a link out of it")
    return path


def atomic_write(path: Path, data: bytes) -> None:
    """Replace `path` by `data`. A reader, also after a crash, finds either the old bytes or the new ones.

    Raises:
        OSError: the folder does not exist, is not writable or is full; `path` is then unchanged.
    """
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def append_line(path: Path, value: object, durable: bool = False) -> None:
    """Append a value as a line of JSON, completely or not at all.

    An incomplete line, of a process that was killed, is deleted first.

    Args:
        durable: whether the line is synchronised to the disk before this returns.

    Raises:
        OSError: the disk is full or the file cannot be written; its lines are unchanged.
    """
    left = memoryview(f"{json.dumps(value, allow_nan=False)}\n".encode())
    with path.open("a+b", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
            size = path.read_bytes().rfind(b"\n") + 1
            file.truncate(size)
        try:
            while left:
                left = left[file.write(left) :]
            if durable:
                os.fsync(file.fileno())
        except OSError:
            file.truncate(size)
            raise


def whole_lines(path: Path) -> list[str]:
    """Read the complete lines of a file that `append_line` writes; none without the file."""
    return path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []


def hold(path: Path, seconds: float) -> IO[str]:
    """Hold a lock for as long as the returned file is open, or the process lives.

    Args:
        path: of the lock file.
        seconds: time to wait for another holder.

    Raises:
        SutureError: another process still holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file, end = path.open("w"), time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except OSError:
            if time.monotonic() > end:
                file.close()
                raise SutureError(f"another process is using {path.parent}; end it, then try again") from None
            time.sleep(0.1)


def write_json(path: Path, value: object) -> None:
    """Write strict JSON (RFC 8259: no NaN, no Infinity) with `atomic_write`.

    Raises:
        SutureError: a number is not finite.
    """
    try:
        text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise SutureError(f"{path}: {error}; write an undefined number as null") from error
    atomic_write(path, f"{text}\n".encode())
