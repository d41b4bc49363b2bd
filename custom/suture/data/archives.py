"""Archives of images and reports, of which no header can make a reader take more memory than the limits.

A name within an archive never leaves it.
"""

from __future__ import annotations

import gzip
import math
import os
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import IO, Any, cast

from suture.core.errors import DataError
from suture.core.files import open_regular
from suture.data.limits import (
    MOST_DOCUMENT,
    MOST_ENCODED,
    MOST_LISTED,
    MOST_MEMBERS,
    MOST_TEXT,
    MOST_TIMES,
    MOST_UNPACKED,
)

_GZIP = b"\x1f\x8b"

_HEADER, _KEYS = 2**11, 64
"""Bytes of the headers of a member of a .tar, on average (four blocks hold a name of a thousand bytes), and
most entries of global headers: programs write a few."""


class Unpacked:
    """The content of an archive, gzipped or not, of which no read takes more than `most` bytes.

    The header of a member may announce any size, its extended headers too, which tarfile reads at once.

    Attributes:
        headers: bytes that may be read from now on.
    """

    def __init__(self, path: Path, most: int = MOST_ENCODED) -> None:
        """Opens an archive.

        Raises:
            OSError: it cannot be opened, or is not a regular file.
        """
        self._most, self._stored, self.headers = most, open_regular(path), math.inf
        self._file: IO[bytes] = self._stored
        self._end: float = max(MOST_UNPACKED, MOST_TIMES * os.fstat(self._stored.fileno()).st_size)
        if self._stored.read(2) == _GZIP:
            self._file = cast(IO[bytes], gzip.GzipFile(fileobj=self._stored))
        self._stored.seek(0)
        self.tell, self.seekable = self._file.tell, self._file.seekable

    def close(self) -> None:
        """Close the archive."""
        self._file.close()
        self._stored.close()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a byte of the content.

        Raises:
            OSError: the archive unpacks to more than `MOST_UNPACKED` bytes and `MOST_TIMES` its size.
        """
        if offset > self._end:
            raise OSError(f"it unpacks to more than {MOST_TIMES} times its size")
        return self._file.seek(offset, whence)

    def read(self, size: int = -1) -> bytes:
        """Read `size` bytes, or those that are left.

        Raises:
            OSError: they are more than the most, or cannot be read.
        """
        if size > self._most:
            raise OSError(f"{size:,} bytes in one member; the limit is {self._most:,}")
        data = self._file.read(size if size >= 0 else self._most)
        self.headers -= len(data)
        if self.headers < 0:
            raise OSError("the headers of its members are too long")
        return data


@contextmanager
def unpacking(path: Path, remedy: str) -> Iterator[None]:
    """Raise whatever a damaged archive makes a reader raise, which is nearly anything, as a `DataError`."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise DataError(f"{path} cannot be read: {why}; {remedy}") from error


def inner_path(name: str) -> str:
    """Return where a member lies within its archive, as `tar -x` places it; empty where that is outside."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    return "" if ".." in parts else "/".join(parts)


def tar_members(path: Path) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """Yield the members of a tar archive, gzipped or not.

    Raises:
        DataError: they are more than `MOST_MEMBERS`, one has a size below zero, or global headers have more
            than `_KEYS` entries, which tarfile copies into each member.
        Exception: the archive is damaged, see `unpacking`; or its headers have more than `_HEADER` bytes a
            member and `MOST_DOCUMENT` besides.
    """
    file = Unpacked(path, MOST_DOCUMENT)
    file.headers = MOST_DOCUMENT
    with (
        closing(file),
        tarfile.open(fileobj=cast(IO[bytes], file), mode="r:") as tar,
    ):
        place, left = 0, file.headers
        for number in count(1):
            file.headers = left + _HEADER
            member = tar.next()
            left = file.headers
            file.headers = math.inf
            cast(Any, tar).members.clear()  # it would keep them all
            if len(tar.pax_headers) > _KEYS:
                raise DataError(f"archive {path}: its global headers are long; pack it again without")
            if member is None:
                return
            if member.size < 0 or tar.offset <= place:  # then tarfile goes back (CVE-2025-8194)
                raise DataError(f"archive {path}: {member.name!r} does not state its size; pack it again")
            place = tar.offset
            if number > MOST_MEMBERS:
                raise _many(path)
            yield tar, member


def _many(archive: Path) -> DataError:
    return DataError(f"archive {archive} has more than {MOST_MEMBERS:,} members; divide it")


def reports(archive: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """Yield path and content of the wanted members of a tar or zip archive.

    Raises:
        DataError: one has more than `MOST_DOCUMENT` bytes, or all together more than `MOST_TEXT`, or two have
            one path, or they are packed in a way that unpacks without bound.
        Exception: the archive is damaged; see `unpacking`.
    """
    total, seen = 0, set()
    for raw, size, read in _members(archive):
        name = inner_path(raw)
        if not (name and wanted(name)):
            continue
        if name in seen:
            raise DataError(f"{archive}: two members are {name!r}; remove one")
        seen.add(name)
        total += size
        if size > MOST_DOCUMENT or total > MOST_TEXT:
            raise DataError(
                f"{archive}: {name!r} has {size:,} bytes, {total:,} with the others; the limits are "
                f"{MOST_DOCUMENT:,} for a report and {MOST_TEXT:,} in all"
            )
        yield name, read()


def _members(archive: Path) -> Iterator[tuple[str, int, Callable[[], bytes]]]:
    with closing(Unpacked(archive, MOST_LISTED)) as file:
        listed = cast(IO[bytes], file)
        if zipfile.is_zipfile(listed):
            with zipfile.ZipFile(listed) as packed:
                if len(packed.infolist()) > MOST_MEMBERS:
                    raise _many(archive)
                for info in packed.infolist():
                    yield info.filename, info.file_size, partial(_unzip, archive, packed, info)
            return
    for tar, member in tar_members(archive):
        content = tar.extractfile(member) if member.isreg() and not member.issparse() else None
        if content is not None:
            yield member.name, member.size, content.read


def _unzip(archive: Path, packed: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    """Return the content of a member, of which no more is unpacked than it announces.

    Of other methods than these two, Python unpacks all that it has read, whatever is asked for.
    """
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise DataError(f"{archive}: {info.filename!r} uses a compression other than deflate; zip it again")
    with packed.open(info) as content:
        return content.read(info.file_size + 1)
