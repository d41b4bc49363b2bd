"""Writing files that are whole or not there."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from suture.core.errors import SutureError


@contextmanager
def replacing(path: Path, durable: bool = True) -> Iterator[Path]:
    """A temporary file beside `path` that takes its place when the block ends well, and vanishes otherwise.

    Args:
        durable: whether the bytes are on the disk, not only in its cache, before the name is.

    Raises:
        OSError: the folder does not exist, is not writable or is full; `path` is then what it was.
    """
    # Not `tempfile`: its files are readable by their owner alone, and the replaced file would be too.
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
    """Brings a new name to the disk, not only the bytes that it names."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def atomic_write(path: Path, data: bytes) -> None:
    """Replaces `path` by `data`: a reader, or a crash at any moment, finds the old bytes or the new ones.

    Raises:
        OSError: the folder does not exist, is not writable or is full; `path` is then what it was.
    """
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def append_line(path: Path, value: object) -> None:
    """Appends a value as a line of JSON, whole or not at all.

    What a process that was killed had begun to write is cut off first.

    Raises:
        OSError: the disk is full or the file cannot be written; it has the lines that it had.
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
        except OSError:
            file.truncate(size)
            raise


def whole_lines(path: Path) -> list[str]:
    """The lines of a file that `append_line` makes, without one that has no end; none without the file."""
    return path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []


def hold(path: Path, seconds: float) -> IO[str]:
    """Takes a lock for as long as the returned file is open, or the process lives.

    Args:
        seconds: that another holder is waited for.

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
    """Writes strict JSON (RFC 8259: no NaN, no Infinity) with `atomic_write`.

    Raises:
        SutureError: a number is not finite.
    """
    try:
        text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise SutureError(f"{path}: {error}; write an undefined number as null") from error
    atomic_write(path, f"{text}\n".encode())
