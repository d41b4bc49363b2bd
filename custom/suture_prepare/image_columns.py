"""Which column of a table names the images, or the documents, of a folder."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from suture.data.decoding import SUFFIXES
from suture.data.images import MASKS, Images, image_name, loosely, stem, unique
from suture.data.patient_columns import names_patients, plain_words
from suture.data.reading import Form, Sheet
from suture.data.table import Cells

_INDEX = re.compile(r"^(unnamed.*|index|row|#)$", re.IGNORECASE)


_OTHER_THAN_IMAGES = re.compile(rf"\b({MASKS}|crop(ped)?|patch|thumb(nail)?|preview|heat ?map)\b")
"""In the name of a column: its files are made of images."""


def named_elsewhere(forms: Sequence[Form]) -> Path | None:
    """The folder of the images that a table names by absolute paths; None where it names none so."""
    for column in (column for form in forms for column in form.sheet.columns().values()):
        cells = [*filter(None, column)]
        if cells and all(cell.startswith("/") for cell in cells) and any(map(os.path.isfile, cells)):
            return Path(os.path.commonpath([os.path.dirname(cell) for cell in cells]))
    return None


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


def best_column(form: Form, images: Images, only: str | None = None) -> ImageColumn | None:
    """The column (or `only` that) with the most cells that name an image, in the strictest way; None where
    none names any.
    """
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
            chance = index or (match != "path" and _is_label(cells))  # its numbers may be those of images
            if chance if only is None else name != only:
                continue
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
