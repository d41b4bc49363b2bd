"""Images as arrays: from a folder, a tar archive or a folder of archives, in the formats of radiology."""

from __future__ import annotations

import os
import tarfile
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import TypeVar

import numpy as np

from suture.core.cores import usable_cores
from suture.core.errors import DataError
from suture.core.files import contained
from suture.data.archives import Unpacked, inner_path, tar_members, unpacking
from suture.data.decoding import SUFFIXES, Pixels, decode_image
from suture.data.image_names import stem, unique
from suture.data.limits import FOLLOW, MOST_ENCODED, file_bytes
from suture.data.table import Table

_T = TypeVar("_T")

ARCHIVES = (".tar", ".tar.gz", ".tgz")

_CHUNK = 256
"""Most encoded images held in memory at a time by `read_all`."""


@dataclass(frozen=True, slots=True)
class _Location:
    """Where the bytes of an image are: a stretch of an archive's content, or (size -1) a whole file.

    `member` is its path within the archive.
    """

    file: Path
    offset: int = 0
    size: int = -1
    member: str = ""


class ImageSource:
    """The images of a `root`, by path within it or by base name where that is unique.

    Of a folder that holds archives (`images_001.tar.gz`, ... as the NIH distributes them) those are read, and
    the images beside them: a path that both have is ambiguous. Gzipped archives are read fastest in the order
    of `position`; a plain tar is as fast as a folder. Links that lead out of `root` are not followed unless
    the site says so; `root` itself may be a link.

    Attributes:
        left_out: why a member of an archive is not read, by archive and name.
    """

    def __init__(self, root: Path, follow_links: bool = False) -> None:
        """Opens a root; archives are indexed when the first image is requested.

        Args:
            follow_links: also read what links within `root` place outside of it.

        Raises:
            DataError: `root` is neither a folder nor an archive, or an archive in it is a link out of it.
        """
        self.root = root
        self.follow_links = follow_links
        self.left_out: dict[tuple[Path, str], str] = {}
        self._links: list[Path] = []  # that were not followed
        self._open: dict[Path, Unpacked] = {}
        self._lock = threading.Lock()
        if root.is_dir():
            self.archives = tuple(sorted(p for p in root.iterdir() if p.name.endswith(ARCHIVES)))
        elif root.exists() and root.name.endswith(ARCHIVES):
            self.archives = (root,)
        else:
            raise DataError(
                f"{root} is neither a folder nor a {', '.join(ARCHIVES)} archive; correct [data] root"
            )
        inside = contained(root)
        for path in self.archives if root.is_dir() and not follow_links else ():
            if not inside(path):
                raise DataError(f"{path} leads out of {root}; {FOLLOW}")

    def __enter__(self) -> ImageSource:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.missing(name) is None

    def files(self) -> list[str]:
        """The paths of all files."""
        return sorted(self._index[0])

    def paths(self) -> list[str]:
        """The paths of all images."""
        return [path for path in self.files() if path.lower().endswith(SUFFIXES)]

    def path(self, name: str) -> str:
        """The file of an image, or its archive and its path within that.

        Raises:
            DataError: there is no such image, or more than one.
        """
        location = self._location(name)
        return str(location.file / location.member)

    def stems(self) -> dict[str, str]:
        """The path of each image by its file name without the suffix, where that is unique."""
        return unique(self.paths(), stem)

    def position(self, name: str) -> tuple[str, int]:
        """The archive (or file) and the offset of an image: reading in this order reads forwards.

        Raises:
            DataError: there is no such image, or more than one.
        """
        location = self._location(name)
        return str(location.file), location.offset

    def missing(self, name: str) -> DataError | None:
        """Return the error for an image that does not exist or is ambiguous; None for one that exists."""
        found = self._found(name)
        if not found:
            for archive in self.archives:
                if why := self.left_out.get((archive, name)):
                    return DataError(f"image {name!r} of {archive} is left out: {why}")
            out = len(self._links)
            remedy = f"{out} links lead out of it: {FOLLOW}" if out else "correct the table or [data] root"
            return DataError(f"image {name!r} is not in {self.root}; {remedy}")
        if len(found) > 1:
            return DataError(f"{self.root} has {len(found):,} images {name!r}; write the path within it")
        return None

    def raw(self, name: str) -> bytes:
        """The encoded bytes of an image.

        Raises:
            DataError: there is no such image, or it cannot be read.
        """
        location = self._location(name)
        try:
            if location.size < 0:
                return file_bytes(location.file)
            with self._lock:
                if location.file not in self._open:
                    self._open[location.file] = Unpacked(location.file)
                self._open[location.file].seek(location.offset)
                return self._open[location.file].read(location.size)
        except (OSError, EOFError, ValueError, MemoryError, zlib.error) as error:
            why = getattr(error, "strerror", None) or error
            raise DataError(f"image {name!r} of {self.root} cannot be read: {why}") from error

    def read(self, name: str, color: bool) -> Pixels:
        """An image as uint8, [h, w] or (color) [h, w, 3].

        Raises:
            DataError: there is no such image, or it cannot be decoded.
        """
        return decode_image(self.raw(name), name, color)

    def stamp(self, names: tuple[str, ...]) -> list[tuple[str, int, int]]:
        """Name, size and modification time [ns] of the files that hold these images; changes if they do.

        A missing image has the size -1.
        """
        if self.archives:  # and not what they hold, for which one that is gzipped would be unpacked
            return [_stat(path) for path in (*self.archives, *(one.file for _, one in self._beside))]
        locations = (self._found(name) for name in names)
        return [_stat(found[0].file) if len(found) == 1 else ("", -1, 0) for found in locations]

    @cached_property
    def _index(self) -> tuple[dict[str, list[_Location]], dict[str, list[_Location]]]:
        """The locations of the images by path and by base name."""
        paths: dict[str, list[_Location]] = {}
        bases: dict[str, list[_Location]] = {}
        members = (self._members(archive) for archive in self.archives)
        beside = self._beside if self.archives else self._files()
        for path, location in chain(chain.from_iterable(members), beside):
            paths.setdefault(path, []).append(location)
            bases.setdefault(path.rpartition("/")[2], []).append(location)
        return paths, bases

    @cached_property
    def _beside(self) -> list[tuple[str, _Location]]:
        """The images in the same folder as archives, or below it."""
        files = self._files() if self.root.is_dir() else ()
        return [(path, location) for path, location in files if path.lower().endswith(SUFFIXES)]

    def _members(self, archive: Path) -> Iterator[tuple[str, _Location]]:
        """The files of an archive; the last one counts of a member that was added twice, as in `tar -x`.

        Where two members of other names come to lie at one path, both are yielded.
        """
        found: dict[str, tuple[str, _Location]] = {}
        with unpacking(archive, "fetch it again"):
            for _, member in tar_members(archive):
                path = inner_path(member.name)
                if why := _unread(member, path):
                    self.left_out[archive, member.name] = why
                elif not member.isdir():
                    at = _Location(archive, member.offset_data, member.size, path)
                    found[member.name.removeprefix("./")] = path, at
        return iter(found.values())

    def _files(self) -> Iterator[tuple[str, _Location]]:
        """The files of the folder; of links, those that may be followed."""
        inside = contained(self.root)
        for folder, folders, names in os.walk(self.root, followlinks=self.follow_links):
            here = Path(folder)
            with os.scandir(folder) as entries:
                links = {entry.name for entry in entries if entry.is_symlink()}
            for link in links.intersection(folders):
                if not self.follow_links and not inside(here / link):
                    self._links.append(here / link)
                elif self.follow_links and here.resolve().is_relative_to((here / link).resolve()):
                    folders.remove(link)  # it leads back up, so that the walk would not end
            within = here.relative_to(self.root)
            for name in names:
                if name not in links or self.follow_links or inside(here / name):
                    yield (within / name).as_posix(), _Location(here / name)
                else:
                    self._links.append(here / name)

    def _found(self, name: str) -> list[_Location]:
        paths, bases = self._index
        return paths.get(name.removeprefix("./")) or bases.get(name) or []

    def _location(self, name: str) -> _Location:
        error = self.missing(name)
        if error:
            raise error
        return self._found(name)[0]


def present(table: Table, source: ImageSource) -> tuple[Table, int]:
    """Return the rows whose images `source` has, and the number of other rows (of a partial download)."""
    here = np.array([name in source for name in table.images], dtype=np.bool_)
    return table.rows(here), int((~here).sum())


def read_all(
    source: ImageSource, names: Sequence[str], read: Callable[[bytes, str], _T]
) -> Iterator[tuple[int, _T | DataError]]:
    """Read many images: bytes in the order of the archives, decoded on a few threads.

    Args:
        source: holds the images.
        names: names of the images.
        read: makes something of the bytes and the name of an image, such as `decode_image`.

    Yields:
        for each name, in any order, its position in `names`, and what `read` made of it, or its error.
    """

    def work(row: int, data: bytes | DataError) -> tuple[int, _T | DataError]:
        try:
            return row, data if isinstance(data, DataError) else read(data, names[row])
        except DataError as error:
            return row, DataError(str(error))  # without the frames that one which was raised keeps: 7 kB
        except MemoryError:
            return row, DataError(f"image {names[row]!r} takes more memory than there is")

    missing = {row: error for row, name in enumerate(names) if (error := source.missing(name))}
    yield from missing.items()
    rows = sorted(
        (row for row in range(len(names)) if row not in missing), key=lambda r: source.position(names[r])
    )
    with ThreadPoolExecutor(max_workers=min(4, usable_cores())) as pool:
        encoded = ((row, _attempt(source, names[row])) for row in rows)
        while chunk := list(_together(encoded)):
            yield from pool.map(work, *zip(*chunk, strict=True))


def _attempt(source: ImageSource, name: str) -> bytes | DataError:
    try:
        return source.raw(name)
    except DataError as error:
        return DataError(str(error))


def _together(
    encoded: Iterator[tuple[int, bytes | DataError]],
) -> Iterator[tuple[int, bytes | DataError]]:
    """Take images until they are `_CHUNK`, or have as many bytes as one may have."""
    held = 0
    for row, data in islice(encoded, _CHUNK):
        yield row, data
        held += len(data) if isinstance(data, bytes) else 0
        if held >= MOST_ENCODED:
            return


def _stat(path: Path) -> tuple[str, int, int]:
    stat = path.stat()
    return path.name, stat.st_size, stat.st_mtime_ns


def _unread(member: tarfile.TarInfo, path: str) -> str:
    """Why a member of an archive is not read; empty where it is, or is a folder."""
    if not path and not member.isdir():
        return "its name leads out of the archive"
    if member.issparse():  # fewer bytes are stored than its size says
        return "a sparse file; pack it again without tar's option for sparse files"
    return "" if member.isreg() or member.isdir() else "a link or device within an archive"
