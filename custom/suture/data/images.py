"""The images of a hospital: where they are, and their pixels as arrays.

They lie in a folder, a tar archive or a folder of archives, in the formats of radiology.
"""

from __future__ import annotations

import os
import re
import tarfile
import threading
import unicodedata
import zlib
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote

import numpy as np

from suture.core.errors import DataError
from suture.core.files import open_regular, within_folder
from suture.core.processes import usable_cores
from suture.data.archives import Unpacked, inner_path, tar_members, unpacking
from suture.data.decoding import SUFFIXES, Pixels, decode_image
from suture.data.limits import FOLLOW, MOST_ENCODED, file_bytes
from suture.data.reading import is_hidden
from suture.data.table import Table

_ABSOLUTE = re.compile(r"/|[A-Za-z]:/")

_SUFFIX = re.compile(
    r"\.(png|jpe?g|jfif|dcm|dicom|ima|tiff?|bmp|npy|nii(\.gz)?|gif|webp|jp2|j2k|mh[ad]|nrrd)$", re.IGNORECASE
)
"""Those of images, also of formats that a table names and the folder has in another."""

_MOST_PARTS = 64
"""Folders of an absolute path that are looked at."""


def is_foreign(cell: str) -> bool:
    """Whether a cell is an absolute path, or one with the backslashes of Windows."""
    return "\\" in cell or _ABSOLUTE.match(cell) is not None


def image_name(cell: str, root: Path, images: Container[str]) -> str:
    r"""Return the name of an image within a root, from a cell that may be an absolute path, or of Windows.

    An absolute path of another machine is found by its end: the longest that is an image of the root.

    Args:
        images: the images of the root.

    >>> image_name(r"C:\study\ward 7\a.png", Path("/data"), {"ward 7/a.png"})
    'ward 7/a.png'
    """
    name = cell.removeprefix(f"{root}/").removeprefix("./")
    if name in images or not is_foreign(name):
        return name
    name = name.replace("\\", "/").removeprefix("./")
    if not _ABSOLUTE.match(name):
        return name
    parts = [part for part in name.split("/") if part][-_MOST_PARTS:]
    ends = ("/".join(parts[start:]) for start in range(len(parts)))
    return next((end for end in ends if end in images), parts[-1] if parts else cell)


def unique(paths: Iterable[str], part: Callable[[str], str]) -> dict[str, str]:
    """The paths by a part of each, where no other path has the same."""
    found: dict[str, list[str]] = {}
    for path in paths:
        found.setdefault(part(path), []).append(path)
    return {name: only[0] for name, only in found.items() if len(only) == 1}


def stem(cell: str) -> str:
    """Return the file name of a cell without the suffix of an image format.

    Only known suffixes are cut: the last number of a UID without one names the image, and what is before it
    the series.

    >>> stem("a/1.2.840.113.7.png"), stem("1.2.840.113.7"), stem("scan.v2.NII.GZ")
    ('1.2.840.113.7', '1.2.840.113.7', 'scan.v2')
    """
    name = cell.replace("\\", "/").rpartition("/")[2]
    return _SUFFIX.sub("", name, count=1)


_GROUPED = re.compile(r"\d{1,3}(?:[,.' \u00a0\u202f]\d{3})+")

_WHOLE = re.compile(r"0*(\d+?)(?:[.,]0)?")


def loosely(paths: Iterable[str]) -> Callable[[str], str | None]:
    """Return what finds an image by a cell that spells its path otherwise; None where none or several fit.

    The same are: upper and lower case, composed and decomposed accents, any suffix of an image, zeros before
    a number, separators of thousands (1,017 for 00001017), outer blanks, and characters as in an address
    (%20). Of a path the first folders may be absent
    from `paths`; a name without a folder is found in any folder.
    """
    found: dict[str, set[str]] = {}
    for path in paths:
        folded = _fold(path)
        for spelling in {folded, folded.rpartition("/")[2]}:
            found.setdefault(spelling if spelling == folded else f"*/{spelling}", set()).add(path)

    def find(cell: str) -> str | None:
        parts = _fold(cell).split("/")[-_MOST_PARTS:]
        ends = ["/".join(parts[start:]) for start in range(len(parts))]
        ends += [f"*/{parts[0]}"] if len(parts) == 1 else []
        fitting = next((found[end] for end in ends if end in found), set[str]())
        return next(iter(fitting)) if len(fitting) == 1 else None

    return find


def _fold(cell: str) -> str:
    """A path as `loosely` compares it."""
    path = unicodedata.normalize("NFC", unicodedata.normalize("NFC", unquote(cell).strip()).casefold())
    folder, _, _ = path.replace("\\", "/").rpartition("/")
    name = stem(path).strip()
    if _GROUPED.fullmatch(name):
        name = re.sub(r"\D", "", name)
    name = number[1] if (number := _WHOLE.fullmatch(name)) else name
    return f"{folder.strip('/')}/{name}" if folder else name


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
        inside = within_folder(root)
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
        found = self._find(name)
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
        locations = (self._find(name) for name in names)
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
        inside = within_folder(self.root)
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

    def _find(self, name: str) -> list[_Location]:
        paths, bases = self._index
        return paths.get(name.removeprefix("./")) or bases.get(name) or []

    def _location(self, name: str) -> _Location:
        error = self.missing(name)
        if error:
            raise error
        return self._find(name)[0]


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


MASKS = (
    r"masks?|masken?|masques?|m[aá]scaras?|maschera|seg|segmentations?|segmentierung(?:en)?|gt|"
    r"ground[ _-]?truth|annotations?|roi|contours?|overlay|label[ _-]?maps?|labels"
)

_MASK_FOLDER = re.compile(rf"(.*[ _-])?({MASKS})([ _-].*)?")

_MASK_FILE = re.compile(rf"(.+?)[ ._-]+(?:{MASKS}|label)(?:[ ._-]?\d+)?|(?:{MASKS}|label)[ ._-]+(.+)")

_LOOKED_AT = 1_000
"""Files of the folders beside that of a site."""


@dataclass(frozen=True)
class Images:
    """The images of a site.

    Attributes:
        root: the folder or archive that holds them.
        paths: of the images within it.
        above: the folder above, where cells of a table may begin; the same as `root` where there is none.
        linked: images, or folders, that are links out of it.
        masks: files below `above` that are left out, since they are masks of images.
    """

    root: Path
    paths: frozenset[str]
    above: Path
    linked: int = 0
    masks: frozenset[str] = frozenset()


def images_of(folder: Path) -> Images:
    """The images of a folder, or of an archive.

    Raises:
        DataError: it has none.
    """
    if folder.is_file():
        with ImageSource(folder) as source:
            found = {*source.paths()}
        masks = masks_of(found)
        return Images(folder, frozenset(found - masks), folder, masks=frozenset(masks))
    archives = sorted(p for p in folder.iterdir() if p.name.endswith(ARCHIVES) and not is_hidden(p.name))
    unread: list[OSError] = []
    found = _images_below(folder, unread)
    if len(archives) == 1 and not found:
        return images_of(archives[0])
    linked = [path for path in folder.iterdir() if path.is_symlink() and path.is_dir()]
    if not found and len(linked) == 1:
        folder = linked[0]  # a `root` may be a link
        found = _images_below(folder, unread)
    if not found:
        closed = "".join(f"; {error.filename} cannot be read: {error.strerror}" for error in unread)
        zips = sorted(path.name for path in folder.glob("*.zip"))
        closed += f"; unpack {', '.join(zips)} there" if zips else ""
        arrays = sorted(path.name for path in folder.glob("*.np[z]"))
        closed += (
            f"; save each image in {', '.join(arrays)} as a PNG in a folder of its class" if arrays else ""
        )
        beside = islice(folder.parent.glob("*/*"), _LOOKED_AT)
        if above := next((path for path in beside if path.name.lower().endswith(SUFFIXES)), None):
            closed += f"; {above.parent} has some: give {folder.parent}, or move the table beside them"
        raise DataError(f"{folder} contains no image ({', '.join(SUFFIXES)}){closed}")
    masks = masks_of(found)
    found -= masks
    root, top = folder, {name.partition("/")[0] for name in found}
    if len(top) == 1 and all("/" in name for name in found):
        root = folder / top.pop()
        found = {name.partition("/")[2] for name in found}
    inside = within_folder(root)
    out = sum((root / name).is_symlink() and not inside(root / name) for name in found)
    return Images(root, frozenset(found), folder, out, frozenset(masks))


def masks_of(paths: Collection[str]) -> set[str]:
    """The paths that are masks: NAME_mask or mask_NAME beside NAME, and those in a folder of masks that name
    an image.
    """

    def parts(path: str) -> tuple[str, str, str]:
        folder, name = path.casefold().rpartition("/")[0], stem(path).casefold()
        match = _MASK_FILE.fullmatch(name)
        return folder, name, (match[1] or match[2]) if match else name

    split = {path: parts(path) for path in paths}
    apart = {
        path for path, (folder, *_) in split.items() if any(map(_MASK_FOLDER.fullmatch, folder.split("/")))
    }
    beside = {(folder, name) for folder, name, _ in split.values()}
    images = {name for path, (_, name, _) in split.items() if path not in apart}
    return {
        path
        for path, (folder, name, of) in split.items()
        if (of != name and (folder, of) in beside) or (path in apart and of in images)
    }


def _images_below(folder: Path, unread: list[OSError]) -> set[str]:
    """The paths of the images below a folder; folders that cannot be read are added to `unread`."""
    found = set()
    for at, folders, names in os.walk(folder, onerror=unread.append):
        folders[:] = [name for name in folders if not is_hidden(name)]
        paths = (Path(at, name) for name in names if not is_hidden(name))
        found |= {path.relative_to(folder).as_posix() for path in paths if _is_image(path)}
    return found


def _is_image(path: Path) -> bool:
    """Whether a file is an image by its suffix, or a DICOM whose name has none, such as 1.2.840.7."""
    if path.name.lower().endswith(SUFFIXES):
        return True
    if path.suffix.strip(".").isalpha() or path.name == "DICOMDIR" or not path.is_file():
        return False
    with open_regular(path) as file:
        return file.read(132)[128:] == b"DICM"
