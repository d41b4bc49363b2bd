"""Archives of images and reports, of which no header can make a reader take more memory than the limits."""

from __future__ import annotations

import gzip
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, cast

from suture.core.errors import DataError
from suture.data.limits import MOST_DOCUMENT, MOST_ENCODED, MOST_TEXT

_GZIP = b"\x1f\x8b"


class Unpacked:
    """The content of a tar archive, gzipped or not, of which no read takes more than `MOST_ENCODED` bytes.

    The header of a member may announce any size, its extended headers too, which tarfile reads at once.
    """

    def __init__(self, path: Path) -> None:
        """Opens an archive.

        Raises:
            OSError: it cannot be opened.
        """
        with path.open("rb") as file:
            opened = gzip.open if file.read(2) == _GZIP else open
        self._file = cast(IO[bytes], opened(path, "rb"))
        self.seek, self.tell, self.close = self._file.seek, self._file.tell, self._file.close

    def read(self, size: int) -> bytes:
        """Read `size` bytes.

        Raises:
            OSError: they are more than `MOST_ENCODED`, or cannot be read.
        """
        if size > MOST_ENCODED:
            raise OSError(f"{size:,} bytes in one piece, and at most {MOST_ENCODED:,} are read")
        return self._file.read(size)


@contextmanager
def tar_of(path: Path) -> Iterator[tarfile.TarFile]:
    """Open a tar archive, gzipped or not.

    Raises:
        tarfile.TarError, OSError: it cannot be opened.
    """
    file = Unpacked(path)
    try:
        with tarfile.open(fileobj=cast(IO[bytes], file), mode="r:") as tar:
            yield tar
    finally:
        file.close()


def reports(archive: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of the wanted members of a tar or zip archive.

    Raises:
        DataError: one has more than `MOST_DOCUMENT` bytes, or all together more than `MOST_TEXT`.
        tarfile.TarError, zipfile.BadZipFile, OSError, EOFError, zlib.error: the archive is damaged.
    """
    total = 0
    for name, size, read in _members(archive):
        if not wanted(name):
            continue
        total += size
        if size > MOST_DOCUMENT or total > MOST_TEXT:
            raise DataError(
                f"{archive}: {name!r} has {size:,} bytes, of {total:,} in all; at most {MOST_DOCUMENT:,} are "
                f"read of a report and {MOST_TEXT:,} in all"
            )
        yield name, read()


def _members(archive: Path) -> Iterator[tuple[str, int, Callable[[], bytes]]]:
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as packed:
            for info in packed.infolist():
                yield info.filename, info.file_size, partial(packed.read, info)
        return
    with tar_of(archive) as tar:
        for member in tar:
            file = tar.extractfile(member) if member.isfile() else None
            if file is not None:
                yield member.name, member.size, file.read
