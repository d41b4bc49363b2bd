"""From the cells of a table to the names of images within a root."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from urllib.parse import unquote

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
        folded = _folded(path)
        for spelling in {folded, folded.rpartition("/")[2]}:
            found.setdefault(spelling if spelling == folded else f"*/{spelling}", set()).add(path)

    def find(cell: str) -> str | None:
        parts = _folded(cell).split("/")[-_MOST_PARTS:]
        ends = ["/".join(parts[start:]) for start in range(len(parts))]
        ends += [f"*/{parts[0]}"] if len(parts) == 1 else []
        fitting = next((found[end] for end in ends if end in found), set[str]())
        return next(iter(fitting)) if len(fitting) == 1 else None

    return find


def _folded(cell: str) -> str:
    """A path as `loosely` compares it."""
    path = unicodedata.normalize("NFC", unicodedata.normalize("NFC", unquote(cell).strip()).casefold())
    folder, _, _ = path.replace("\\", "/").rpartition("/")
    name = stem(path).strip()
    if _GROUPED.fullmatch(name):
        name = re.sub(r"\D", "", name)
    name = number[1] if (number := _WHOLE.fullmatch(name)) else name
    return f"{folder.strip('/')}/{name}" if folder else name
