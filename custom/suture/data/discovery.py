"""What a hospital's folder or table seems to be: a guess at its [data], with the reason for each key."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from suture.core.errors import DataError
from suture.core.plain import open_regular
from suture.core.printable import number_of
from suture.data.decoding import SUFFIXES
from suture.data.image_names import image_name, stem
from suture.data.images import ARCHIVES, ImageSource
from suture.data.inspection import true_depth
from suture.data.label_discovery import discover_labels
from suture.data.patient_columns import patient_columns
from suture.data.readers.image_list import SPLIT_WORDS
from suture.data.reading import Sheet, rows_text
from suture.data.table_form import TABLES, Form, is_hidden, read_form, tables

_SPLIT = re.compile(r"^(split|set|subset|partition|fold)$", re.IGNORECASE)


@dataclass(frozen=True)
class Answers:
    """What a person has said about a table.

    Attributes:
        patient: the column of patients; empty where none names them, None where nobody was asked.
        no_labels: columns that are no findings.
        names: of the findings, by columns whose names do not say which they are.
    """

    patient: str | None = None
    no_labels: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Discovery:
    """A guess at the [data] of one site.

    Attributes:
        data: the keys of [data].
        reasons: why, by key.
        warnings: what a person should look at.
        left_out: why a column has no meaning here, by column.
        doubtful: columns that are labels by their cells, and not by their names.
        columns: all columns of the table.
    """

    data: dict[str, Any]
    reasons: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    doubtful: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()

    @property
    def has_splits(self) -> bool:
        """Whether the table says which rows are for training and which for test."""
        return "split_column" in self.data

    @property
    def has_patients(self) -> bool:
        """Whether a column names the patients."""
        return bool(self.data["patient_column"] != self.data["image_column"])


def discover(path: Path, answers: Answers = Answers()) -> Discovery:
    """Look at a hospital's folder, or at its table, and return what its [data] should be.

    Raises:
        DataError: there is no table, no image, no label, or more than one table fits; says what was seen.
        LabelError: two columns are one label.
    """
    path = path.expanduser().resolve()
    if not path.exists():
        raise DataError(
            f"{path} does not exist; give a folder with a table and images, or the path of the table"
        )
    folder = path if path.is_dir() else path.parent
    levels = tables(folder) if path.is_dir() else [[path]]
    if not any(levels):
        raise DataError(f"{folder} contains no table ({', '.join(TABLES)}); give the table's path")
    root, images = _images(_named_elsewhere(levels) or folder)
    form, column, faults = _fitting(levels, folder, root, images)
    found = _with_depth(_describe(form, column, root, answers), root, images)
    return replace(found, warnings=(*found.warnings, *(f"skipped: {fault}" for fault in faults)))


def _with_depth(found: Discovery, root: Path, images: set[str]) -> Discovery:
    """Add the true depth of images that store 16 bits and use fewer."""
    depth = true_depth(root, images)
    if depth is None:
        return found
    bits, why = depth
    return replace(found, data=found.data | {"bits": bits}, reasons=found.reasons | {"bits": why})


@dataclass(frozen=True)
class _ImageColumn:
    name: str
    match: str
    found: int


def _fitting(
    levels: Sequence[Sequence[Path]], folder: Path, root: Path, images: set[str]
) -> tuple[Form, _ImageColumn, list[str]]:
    """The table that names the images, its column, and why other tables could not be read.

    Raises:
        DataError: none does, or more than one.
    """
    names: list[str] = []
    faults: list[str] = []
    for paths in levels:
        fitting = []
        for path in paths:
            try:
                form = read_form(path)
            except DataError as error:
                if sum(map(len, levels)) == 1:
                    raise
                faults += [] if path.suffix == ".txt" else [str(error)]  # such as a README.txt
                continue
            names.append(path.name)
            if found := _image_column(form.sheet, root, images):
                fitting.append((form, found))
        if len(fitting) > 1:
            both = " and ".join(form.sheet.path.name for form, _ in fitting)
            raise DataError(f"{both} of {folder} both name its images; give the path of the table to use")
        if fitting:
            return *fitting[0], faults
    what = f"no column of {', '.join(names)} names" if names else "no table could be read that names"
    seen = "".join(f"\n{fault}" for fault in faults)
    raise DataError(f"{what} the images of {root}, such as {min(images)!r}{seen}")


def _describe(form: Form, images: _ImageColumn, root: Path, answers: Answers) -> Discovery:
    sheet, n = form.sheet, len(form.sheet.rows)
    data: dict[str, Any] = {"dataset": "hospital", "root": str(root), "table": str(sheet.path), **form.data}
    reasons, warnings = {"root": "holds the images", **form.reasons}, []

    def note(key: str, value: Any, why: str) -> None:
        data[key], reasons[key] = value, why

    note("image_column", images.name, f"{images.found:,} of {number_of(n, 'row')} name an existing image")
    if images.match == "stem":
        note("image_match", "stem", "its cells have no suffix")
    if images.found < n:
        note("partial", True, "rows without an image are left out and counted")
        warnings.append(f"{sheet.path.name}: {n - images.found:,} of {number_of(n, 'row')} without an image")
    patient, why, remarks = _patient(sheet, images.name, answers.patient)
    note("patient_column", patient or images.name, why)
    warnings += remarks
    taken = {images.name, data["patient_column"]}
    others = [c for c in sheet.header if c and c not in taken]
    if split := next((c for c in others if _is_split(sheet.cells(sheet.header.index(c)))), None):
        note("split_column", split, "its cells are train, validation or test")
        taken.add(split)
    else:
        _refuse_strange_splits(sheet, others)
    if len(set(sheet.column(images.name, ""))) < n:
        note("repeated", "merge", "some images have several rows")
    if answers.names:
        note("synonyms", dict(answers.names), "as you answered")
    labels = discover_labels(sheet, taken, answers.no_labels, images.name, answers.names)
    return Discovery(
        data | labels.data,
        reasons | labels.reasons,
        (*warnings, *labels.warnings),
        labels.left_out,
        labels.doubtful,
        tuple(filter(None, sheet.header)),
    )


def _refuse_strange_splits(sheet: Sheet, columns: Sequence[str]) -> None:
    """Refuse a column of splits in other words: what it keeps for the test would be trained on.

    Raises:
        DataError: there is one.
    """
    for name in columns:
        if _SPLIT.match(name.strip()):
            cells = sheet.column(name, "the splits")
            strange = sorted({cell for cell in cells if cell.casefold() not in SPLIT_WORDS})
            raise DataError(
                f"{sheet.path}, column {name!r}: {', '.join(map(repr, strange[:4]))} is not a split; "
                "write train, validation, test or blank (unused), or rename the column"
            )


def _images(folder: Path) -> tuple[Path, set[str]]:
    """The folder that holds the images, and their paths within it."""
    archives = sorted(p for p in folder.iterdir() if p.name.endswith(ARCHIVES) and not is_hidden(p.name))
    unread: list[OSError] = []
    found = _images_below(folder, unread)
    if len(archives) == 1 and not found:
        with ImageSource(archives[0]) as source:
            return archives[0], set(source.paths())
    linked = [path for path in folder.iterdir() if path.is_symlink() and path.is_dir()]
    if not found and len(linked) == 1:
        folder = linked[0]  # a `root` may be a link
        found = _images_below(folder, unread)
    if not found:
        closed = "".join(f"; {error.filename} cannot be read: {error.strerror}" for error in unread)
        raise DataError(f"{folder} contains no image ({', '.join(SUFFIXES)}){closed}")
    top = {name.partition("/")[0] for name in found}
    if len(top) == 1 and all("/" in name for name in found):
        inner = folder / top.pop()
        return inner, {name.partition("/")[2] for name in found}
    return folder, found


def _images_below(folder: Path, unread: list[OSError]) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in _files(folder, unread) if _is_image(path)}


def _named_elsewhere(levels: Sequence[Sequence[Path]]) -> Path | None:
    """The folder of the images that a table names by absolute paths; None where it names none so."""
    for path in levels[0]:
        try:
            sheet = read_form(path).sheet
        except DataError:
            continue
        for position in range(len(sheet.header)):
            cells = [cell for cell in sheet.cells(position) if cell]
            if cells and all(cell.startswith("/") for cell in cells) and any(map(os.path.isfile, cells)):
                return Path(os.path.commonpath([os.path.dirname(cell) for cell in cells]))
    return None


def _files(folder: Path, unread: list[OSError]) -> Iterator[Path]:
    for at, folders, names in os.walk(folder, onerror=unread.append):
        folders[:] = [name for name in folders if not is_hidden(name)]
        yield from (Path(at, name) for name in names if not is_hidden(name))


def _is_image(path: Path) -> bool:
    """Whether a file is an image by its suffix, or a DICOM whose name has none, such as 1.2.840.7."""
    if path.name.lower().endswith(SUFFIXES):
        return True
    if path.suffix.strip(".").isalpha() or not path.is_file():
        return False
    with open_regular(path) as file:
        return file.read(132)[128:] == b"DICM"


def find_image_column(sheet: Sheet, root: Path, images: set[str]) -> str | None:
    """Return the name of the column with the most cells that name an image; None where none names any.

    Args:
        root: the folder of the images.
        images: their paths within it.
    """
    found = _image_column(sheet, root, images)
    return found.name if found else None


def _image_column(sheet: Sheet, root: Path, images: set[str]) -> _ImageColumn | None:
    """The column with the most cells that name an image; None where no column names any."""
    bases = Counter(name.rpartition("/")[2] for name in images)
    stems = Counter(map(stem, bases.elements()))
    here = images | {base for base, n in bases.items() if n == 1}
    ways: list[tuple[str, Callable[[str], bool]]] = [
        ("path", lambda cell: image_name(cell, root, here) in here),
        ("stem", lambda cell: stems[stem(cell)] == 1),
    ]
    best: _ImageColumn | None = None
    for name in filter(None, sheet.header):
        cells = [cell for cell in sheet.cells(sheet.header.index(name)) if cell]
        for match, names in ways:
            found = sum(map(names, cells))
            if found > (best.found if best else 0):
                best = _ImageColumn(name, match, found)
    return best


def _patient(sheet: Sheet, image: str, told: str | None) -> tuple[str | None, str, list[str]]:
    """The column of patients, why, and what to look at; None where there is none.

    Raises:
        DataError: a cell of it is blank.
    """
    if told is not None:
        return (_whole(sheet, told) if told else None), "as you answered", []
    found = patient_columns(sheet, image)
    if not found:
        remark = "no column names the patients, so images of one patient may be divided over two splits"
        return None, "no column names patients", [remark]
    (rank, name), others = found[0], [name for _, name in found[1:]]
    why = f"by its name, before {', '.join(map(repr, others))}" if others else "by its name"
    remark = (
        f"column {name!r} is used as the patient; if a patient has several values in it, name another column"
    )
    return _whole(sheet, name), why, [remark] if rank else []


def _whole(sheet: Sheet, name: str) -> str:
    """The name of a column of patients, of which no cell is blank.

    Raises:
        DataError: one is: the images of such a patient could come to lie in two splits.
    """
    cells = sheet.column(name, "the patients")
    if blank := [number for cell, number in zip(cells, sheet.numbers, strict=True) if not cell]:
        raise DataError(f"{sheet.path} {rows_text(blank)}: column {name!r} (patient) is blank; fill it in")
    return name


def _is_split(cells: Sequence[str]) -> bool:
    words = {cell.casefold() for cell in cells}
    return len(words - {""}) > 0 and words <= SPLIT_WORDS.keys()
