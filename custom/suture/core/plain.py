"""Plain values, as JSON and TOML have them: bounded before anything converts, prints or stores them.

Whoever writes such a file or message may have made a mistake, or worse: Python's own parsers end in a
`RecursionError` where values are nested deeply, and take integers that cannot be printed and text that has no
encoding.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
import stat
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

from suture.core.errors import ConfigError, DataError

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
