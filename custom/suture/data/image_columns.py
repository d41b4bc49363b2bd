"""Where the images of a hospital are, and which column of a table names them."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from suture.core.errors import DataError
from suture.core.files import contained
from suture.core.plain import open_regular
from suture.data.cells import Cells
from suture.data.decoding import SUFFIXES
from suture.data.image_names import image_name, loosely, stem, unique
from suture.data.images import ARCHIVES, ImageSource
from suture.data.patient_columns import names_patients, plain_words
from suture.data.reading import Sheet
from suture.data.table_form import Form, is_hidden

_INDEX = re.compile(r"^(unnamed.*|index|row|#)$", re.IGNORECASE)
_MASKS = r"masks?|seg|segmentations?|gt|ground[ _-]?truth|annotations?|roi|contours?|overlay"
_MASK_FOLDER = re.compile(rf"(.*[ _-])?({_MASKS})([ _-].*)?")
_MASK_FILE = re.compile(rf"(.+?)[ ._-]+({_MASKS})([ ._-]?\d+)?")
_LOOKED_AT = 1_000
"""Files of the folders beside that of a site."""
_OTHER_THAN_IMAGES = re.compile(rf"\b({_MASKS}|crop(ped)?|patch|thumb(nail)?|preview|heat ?map)\b")
"""In the name of a column: its files are made of images."""


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
    """The images of a folder.

    Raises:
        DataError: it has none.
    """
    archives = sorted(p for p in folder.iterdir() if p.name.endswith(ARCHIVES) and not is_hidden(p.name))
    unread: list[OSError] = []
    found = _images_below(folder, unread)
    if len(archives) == 1 and not found:
        with ImageSource(archives[0]) as source:
            return Images(archives[0], frozenset(source.paths()), archives[0])
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
    masks = _masks(found)
    found -= masks
    root, top = folder, {name.partition("/")[0] for name in found}
    if len(top) == 1 and all("/" in name for name in found):
        root = folder / top.pop()
        found = {name.partition("/")[2] for name in found}
    inside = contained(root)
    out = sum((root / name).is_symlink() and not inside(root / name) for name in found)
    return Images(root, frozenset(found), folder, out, frozenset(masks))


def _masks(paths: Collection[str]) -> set[str]:
    """The paths that are masks: NAME_mask beside NAME, and in a folder of masks those that name an image."""

    def parts(path: str) -> tuple[str, str, str]:
        folder, name = path.casefold().rpartition("/")[0], stem(path).casefold()
        match = _MASK_FILE.fullmatch(name)
        return folder, name, match[1] if match else name

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


def named_elsewhere(forms: Sequence[Form]) -> Path | None:
    """The folder of the images that a table names by absolute paths; None where it names none so."""
    for column in (column for form in forms for column in form.sheet.columns().values()):
        cells = [*filter(None, column)]
        if cells and all(cell.startswith("/") for cell in cells) and any(map(os.path.isfile, cells)):
            return Path(os.path.commonpath([os.path.dirname(cell) for cell in cells]))
    return None


def _is_image(path: Path) -> bool:
    """Whether a file is an image by its suffix, or a DICOM whose name has none, such as 1.2.840.7."""
    if path.name.lower().endswith(SUFFIXES):
        return True
    if path.suffix.strip(".").isalpha() or path.name == "DICOMDIR" or not path.is_file():
        return False
    with open_regular(path) as file:
        return file.read(132)[128:] == b"DICM"


@dataclass(frozen=True)
class ImageColumn:
    """The column that names the images, or the documents.

    Attributes:
        match: as [data] image_match.
        found: rows that name an image.
        root: where their paths start.
        find: returns the path of the image that a cell names; None where it names none.
        text: the column of the documents.
    """

    name: str
    match: str
    found: int
    root: Path
    find: Callable[[str], str | None]
    text: str = ""


def best_column(form: Form, images: Images) -> ImageColumn | None:
    """The column with the most cells that name an image, in the strictest way; None where none names any."""
    here = unique(images.paths, lambda path: path.rpartition("/")[2]) | {path: path for path in images.paths}
    stems = unique(images.paths, stem)

    def from_above(cell: str) -> str | None:
        name = cell.removeprefix("./").removeprefix(f"{images.root.name}/")
        return name if name != cell and name in images.paths else None

    ways: list[tuple[str, Path, Callable[[str], str | None]]] = [
        ("path", images.root, lambda cell: here.get(image_name(cell, images.root, here))),
        *([("path", images.above, from_above)] if images.above != images.root else []),
        ("stem", images.root, lambda cell: stems.get(stem(cell))),
        ("loose", images.root, loosely(images.paths)),
    ]
    best, most = None, (False, 0, 0)
    for match, root, find in ways:
        for name, column in form.sheet.columns().items():
            cells = Counter(filter(None, column))
            index = match == "loose" and (_INDEX.match(name) or names_patients(name))
            if index or (match != "path" and _is_label(cells)):
                continue  # whose numbers may be those of images by chance
            rows = Counter({cell: n for cell, n in cells.items() if find(cell) is not None})
            whole = rows.total() > 0 and not _OTHER_THAN_IMAGES.search(plain_words(name))
            found = whole, len(set(map(find, rows))), rows.total()
            if found > most and (match != "loose" or 2 * rows.total() > cells.total()):
                best, most = ImageColumn(name, match, rows.total(), root, find), found
    return best


def expect_column(form: Form, images: Images) -> ImageColumn:
    """The column of images of a table that was put together."""
    column = best_column(form, images)
    assert column is not None
    return column


def by_chance(form: Form, column: ImageColumn, best: ImageColumn) -> bool:
    """Whether a table has numbers that are those of a few images, such as a legend of classes."""
    numbers = all(cell.isdigit() for cell in form.sheet.column(column.name, ""))
    return column.match == "loose" and numbers and (best.match != "loose" or 4 * column.found < best.found)


def other_images(
    sheet: Sheet, columns: Sequence[str], images: ImageColumn, used: Collection[str | None]
) -> Iterator[tuple[str, int]]:
    """The columns that name other images than the one of images, and how many."""
    for name in (name for name in columns if not _OTHER_THAN_IMAGES.search(plain_words(name))):
        cells = {*sheet.first(name)} - {""}
        words = [cell for cell in cells if not (images.text or cell.replace(".", "").isdigit())]
        others = {*map(images.find, words)} - {None, *used}
        if 2 * len(others) > len(cells):
            yield name, len(others)


def _is_label(cells: Counter[str]) -> bool:
    """Whether cells are 1 and 0, in more rows than images have."""
    return all(Cells({}).number(cell) is not None for cell in cells) and cells.total() > 2 * len(cells)


def like_images(cells: Sequence[str]) -> int:
    """How many cells look like the name of an image."""
    return sum(cell.lower().endswith(SUFFIXES) for cell in cells)
