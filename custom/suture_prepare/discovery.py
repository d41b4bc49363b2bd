"""What a hospital's folder or table seems to be: a guess at its [data], with the reason for each key."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from typing import Any

from suture.core.errors import ConfigError, DataError, SutureError
from suture.data.config import parse_data
from suture.data.images import ARCHIVES, Images, images_of, stem
from suture.data.patient_columns import patient_columns
from suture.data.published import PublishedTable
from suture.data.readers import DATASETS, DataSet, read_table
from suture.data.reading import JSON, TABLES, Form, Sheet, doubtful_encoding, tables
from suture.data.text import tokenise
from suture_prepare import gathering, image_columns
from suture_prepare.description import Answers, Discovery, describe
from suture_prepare.image_columns import ImageColumn, like_images, named_elsewhere
from suture_prepare.label_discovery import NoLabelsError
from suture_results.inspection import sample

_OTHER_TABLES = (".xls", ".xlsb", ".ods", ".numbers", ".sav", ".dta", ".feather", ".mdb", ".sas7bdat")
_COMPARED = 50
"""Cells that are compared with the names of all files."""
_MANY_WORDS, _LOOKED_AT = 5, 500
"""Words of a cell, on average over that many rows, from which on it is a document."""
_MEASURE = re.compile(r"(?i)(age|alter|weight|height|(.*[ _])?date|dob|birth.*)$")
"""Columns whose cells may differ and name nothing."""


def discover(path: Path, answers: Answers | None = None) -> Discovery:
    """Look at a hospital's folder, or at its table, and return what its [data] should be.

    Raises:
        DataError: there is no table, no image, no label, or more than one table fits; says what was seen.
        LabelError: two columns are one label.
    """
    path, answers = path.expanduser().resolve(), answers or Answers()
    if not path.exists():
        raise DataError(
            f"{path} does not exist; give a folder with a table and images, or the path of the table"
        )
    if path.is_file() and path.suffix.lower() in (".zip", *_OTHER_TABLES):
        remedy = "unpack it and give its folder" if path.suffix == ".zip" else "save it as .xlsx or .csv"
        raise DataError(f"{path} cannot be read; {remedy}")
    folder = path if path.is_dir() else path.parent
    given = _read(tables(folder) if path.is_dir() else [[path]])
    elsewhere = named_elsewhere(given.levels[0])
    try:
        images = images_of(elsewhere or folder)
    except DataError:
        if (texts := _documents(given, folder, answers)) is None:
            raise
        return texts
    published = None if answers.rows else _find_published(given, folder, images)
    found = published or _own(given, folder, images, answers)
    seen = sample(images.root, images.paths)
    found = replace(found, colour=seen.colour, side=seen.side)
    if seen.depth:
        bits, why = seen.depth
        found = replace(found, data=found.data | {"bits": bits}, reasons=found.reasons | {"bits": why})
    paths = dict.fromkeys(form.sheet.path for form in given.every())
    doubts = dict.fromkeys(filter(None, map(doubtful_encoding, paths)))
    faults = (f"skipped: {fault}" for fault in given.faults)
    return replace(found, warnings=(*doubts, *found.warnings, *faults))


@dataclass(frozen=True)
class _Tables:
    """The tables of a folder.

    Attributes:
        levels: those of the folder, its lists in JSON, and those of the folders in it.
        number: of all, readable or not.
        faults: why some could not be read.
    """

    levels: list[list[Form]]
    number: int
    faults: list[str]

    def every(self) -> list[Form]:
        """The tables of all levels."""
        return [form for forms in self.levels for form in forms]


def _read(paths: Sequence[Sequence[Path]]) -> _Tables:
    """Read the tables of all levels.

    Raises:
        DataError: the only table cannot be read.
    """
    found = _Tables([[] for _ in paths], sum(map(len, paths)), [])
    for forms, level in zip(found.levels, paths, strict=True):
        for path in level:
            try:
                forms += gathering.read_forms(path)
            except DataError as error:
                if found.number == 1:
                    raise
                found.faults.extend([] if path.suffix == ".txt" else [str(error)])  # such as a README.txt
    return found


def _find_published(given: _Tables, folder: Path, images: Images) -> Discovery | None:
    """The [data] of a public data set that has a reader of its own, which finds images of the table.

    Each reader's published tables are asked, also those of other packages. None where none fits.
    """
    readers: dict[str, DataSet] = {}
    refused = ""
    for word in sorted(DATASETS.names() - {"hospital"}):
        with suppress(ConfigError):  # a package that cannot be imported; `suture list` names it
            readers[word] = DATASETS.find(word)
    roots = tuple(dict.fromkeys((images.root, images.above, folder)))
    for form in given.every():
        # What was put together is not the file that a reader gets; a list in JSON is.
        if form.made and not form.sheet.path.name.lower().endswith(JSON):
            continue
        published = [(word, table) for word, reader in readers.items() for table in reader.published]
        fitting = [(word, table) for word, table in published if table.recognises(form.sheet, images.paths)]
        for (word, table), root in product(fitting, roots):
            try:
                return _by_reader(word, table, form.sheet, root)
            except SutureError as error:
                name = form.sheet.path.name
                refused = f"{name} looks like {table.title}, but its reader refuses it: {error}"
    given.faults.extend([refused] if refused else [])
    return None


def _by_reader(word: str, table: PublishedTable, sheet: Sheet, root: Path) -> Discovery:
    """The [data] of a recognised table.

    Raises:
        SutureError: its reader refuses it.
    """
    keys = table.keys(sheet.path.parent)
    data: dict[str, Any] = {"dataset": word, "root": str(root), "table": str(sheet.path), **keys}
    reading = read_table(parse_data(data | {"partial": True}, str(sheet.path)))
    said = [*reading.faults[:3], *reading.notes]
    if reading.absent:
        data["partial"] = True
        said.append(f"{reading.absent:,} rows of {sheet.path.name} without an image are left out")
    return Discovery(
        data,
        {"dataset": f"the table is that of {table.title}", "root": "holds the images"},
        tuple(said),
        table=sheet,
        title=table.title,
    )


def _naming(
    given: _Tables, folder: Path, images: Images
) -> tuple[Form, image_columns.ImageColumn, list[Form]] | None:
    """The table that names the images, maybe put together, its column that does, and the others beside it.

    None where no table names any.

    Raises:
        DataError: several name the images that do not belong together, or the table has no header.
    """
    for forms in given.levels:
        columns = {
            i: column for i, form in enumerate(forms) if (column := image_columns.best_column(form, images))
        }
        for i, form in enumerate(forms):
            enough = columns[i].found if i in columns else 0
            if enough == len(form.sheet.rows):
                continue
            made = gathering.in_two_columns(form, images.paths, enough)
            if not enough:
                made = (
                    made
                    or gathering.of_patients(form, images.paths)
                    or gathering.composed(form, images.paths)
                )
                made = made or gathering.of_headers(form, images.root, images.paths)
            if made:
                forms[i], columns[i] = made, image_columns.expect_column(made, images)
        if not columns:
            continue
        best = max(columns.values(), key=lambda column: (column.match != "loose", column.found))
        columns = {i: c for i, c in columns.items() if not image_columns.by_chance(forms[i], c, best)}
        fitting = [(forms[i], column) for i, column in columns.items()]
        form, column = fitting[0]
        if len(fitting) > 1:
            both = gathering.together(
                [gathering.Named(form, column.name, column.find) for form, column in fitting]
            )
            if both is None:
                names = " and ".join(form.name for form, _ in fitting)
                raise DataError(f"{names} of {folder} both name its images; {gathering.THE_ONE_TO_USE}")
            form, column = both, image_columns.expect_column(both, images)
        others = [other for i, other in enumerate(forms) if i not in columns] + [form]
        if column.find(column.name) is not None:
            raise DataError(
                f"{form.sheet.path} has no header: its first row names the image {column.name!r}; write the "
                "names of the columns above it"
            )
        return form, column, others
    return None


def _own(given: _Tables, folder: Path, images: Images, answers: Answers) -> Discovery:
    """The [data] of a hospital's own table.

    Raises:
        DataError: as `_naming`, or no table names the images.
    """
    if named := _naming(given, folder, images):
        form, column, others = named
        form = gathering.spread(gathering.without_unfilled(form), form.legend)
        try:
            return describe(form, column, images, answers, others)
        except NoLabelsError:
            rest = [other for other in given.every() if other.sheet.path != form.sheet.path]
            if (joined := gathering.by_key(form, rest)) is None:
                raise
            return describe(joined, column, images, answers, others)
    forms = given.every()
    listed = any(like_images(cells) for form in forms for cells in form.sheet.columns().values())
    if not listed and (classes := gathering.of_class_folders(images.root, images.paths)) is not None:
        answers = replace(answers, keys=classes.data | {**answers.keys})
        found = describe(classes, image_columns.expect_column(classes, images), images, answers, [])
        unread = [f"{form.name} names no image and is not read" for form in forms]
        return replace(found, warnings=(*found.warnings, *unread))
    if not given.number:
        unread = [path.name for path in sorted(folder.iterdir()) if path.suffix.lower() in _OTHER_TABLES]
        remedy = f"save {' and '.join(unread)} as .xlsx or .csv" if unread else "give the table's path"
        raise DataError(f"{folder} contains no table ({', '.join(TABLES)}); {remedy}")
    raise _nothing_matches(given, images)


def _documents(given: _Tables, folder: Path, answers: Answers) -> Discovery | None:
    """The [data] of a table of documents; None where the first has none, or names images that are lacking."""
    forms = given.every()
    text = _text_column(forms[0].sheet) if forms else ""
    packed = any(path.name.endswith((".zip", *ARCHIVES)) for path in folder.iterdir())
    if packed or not text or any(map(like_images, forms[0].sheet.columns().values())):
        return None
    form = gathering.spread(gathering.without_unfilled(forms[0]), forms[0].legend)
    n = sum(map(bool, form.sheet.column(text, "")))
    name, _ = _names_of(form.sheet, text)
    if not name:
        made = "a document is named by the number of its row"
        form = gathering.with_column(form, "document", [*map(str, form.sheet.numbers)], made)
        name = form.sheet.header[0]
    path = form.sheet.path
    column = ImageColumn(name, "path", n, path, str, text)
    return describe(form, column, Images(path, frozenset(), path), answers, forms)


def _text_column(sheet: Sheet) -> str:
    """The column whose cells are documents: of the most words, where these are many; empty without one."""
    words: dict[str, float] = {}
    for name, column in sheet.columns().items():
        # Of Chinese, which has no spaces, a word has about two letters.
        counts = [max(len(cell.split()), len(tokenise(cell)) / 2) for cell in column[:_LOOKED_AT]]
        words[name] = sum(counts) / len(counts)
    text = max(words, key=words.__getitem__, default="")
    return text if words.get(text, 0) >= _MANY_WORDS else ""


def _names_of(sheet: Sheet, text: str) -> tuple[str, str]:
    """The column that names the documents, each otherwise, and the one of patients; empty without one."""
    cells, patients = sheet.columns(), [name for _, name in patient_columns(sheet, text)]
    free = [name for name in cells if name not in {text, *patients} and not _MEASURE.match(name)]
    names = (name for name in free if len({*cells[name]} - {""}) == len(sheet.rows))
    return min(names, key=lambda name: name != "document", default=""), next(iter(patients), "")


@dataclass(frozen=True)
class Documents:
    """The documents of a table, as `discover` finds them.

    Attributes:
        column: that they are in.
        names, texts, patients: of each; a patient is empty where no column names any.
    """

    column: str
    names: list[str]
    texts: list[str]
    patients: list[str]


def documents_of(path: Path, column: str | None = None) -> Documents:
    """Read the documents of a table, of whatever form.

    Args:
        column: that they are in; by default ``text``, else the one with the most words.

    Raises:
        DataError: it cannot be read, or no column has documents.
    """
    sheet = gathering.read_forms(path)[0].sheet
    text = column or ("text" if "text" in sheet.header else _text_column(sheet))
    if not text:
        raise DataError(
            f"no column of {path} has documents; name it with --column (columns: "
            f"{', '.join(filter(None, sheet.header))})"
        )
    texts = sheet.column(text, "--column")
    name, patient = _names_of(sheet, text)
    name = name or ("document" if "document" in sheet.header and text != "document" else "")
    names = sheet.first(name) if name else [f"row {number}" for number in sheet.numbers]
    return Documents(text, names, texts, sheet.first(patient) if patient else [""] * len(texts))


@dataclass(frozen=True)
class TableImages:
    """The images that a table names, as `discover` finds them.

    Attributes:
        root: the folder or archive of the images.
        column: that names them.
        rows: the number of each row, the path within `root` or else the cell, and the patient or nothing.
        made: how the table was put together.
    """

    root: Path
    column: str
    rows: list[tuple[int, str, str]]
    made: tuple[str, ...]


def images_named(path: Path, column: str | None = None, root: Path | None = None) -> TableImages:
    """Find the images that a table names, of whatever form.

    Args:
        column: that names them; by default the one that does best.
        root: the folder or archive that holds them; by default the folder of the table.

    Raises:
        DataError: it cannot be read, has no such column, or names no image.
    """
    given = _read([[path]])
    forms = given.levels[0]
    folder = root or named_elsewhere(forms) or path.parent
    try:
        images = images_of(folder)
    except DataError:  # the cells may lead out of it
        images = Images(folder, frozenset(), folder)
    named = _naming(given, folder, images) if images.paths and column is None else None
    if named:
        form, chosen, _ = named
    elif column := column or next(("image" for form in forms if "image" in form.sheet.header), None):
        form = next((form for form in forms if column in form.sheet.header), forms[0])
        chosen = image_columns.best_column(form, images, column) or ImageColumn(
            column, "path", 0, images.root, lambda _: None
        )
    else:
        names = dict.fromkeys(name for form in forms for name in form.sheet.header if name)
        raise DataError(
            f"no column of {path} names images of {folder}; name it with --column, or their folder with "
            f"--root (columns: {', '.join(names)})"
        )
    cells = form.sheet.column(chosen.name, "--column")
    within = "" if images.root == images.above else f"{images.root.name}/"
    found = [f"{within}{name}" if cell and (name := chosen.find(cell)) else cell for cell in cells]
    patient = next((name for _, name in patient_columns(form.sheet, chosen.name)), "")
    patients = form.sheet.first(patient) if patient else [""] * len(cells)
    rows = [*zip(form.sheet.numbers, found, patients, strict=True)]
    return TableImages(images.above, chosen.name, rows, form.made)


def _nothing_matches(given: _Tables, images: Images) -> DataError:
    """That no table names the images, with names of both, so that the eye sees the difference."""
    forms = given.every()
    names = ", ".join(dict.fromkeys(form.sheet.path.name for form in forms))
    what = f"no column of {names} names" if names else "no table could be read that names"
    seen = "".join(f"\n{fault}" for fault in given.faults)
    some = ", ".join(map(ascii, sorted(images.paths)[:3]))
    files: dict[str, list[str]] = {}
    for path in sorted(images.paths):
        files.setdefault(stem(path), []).append(path)
    for form in forms[:3]:
        sheet, cells = form.sheet, form.sheet.columns()
        name = max(cells, key=lambda name: (like_images(cells[name]), len({*cells[name]})), default="")
        if name:
            shown = sorted({*cells[name]} - {""})[:_COMPARED]
            has = ", ".join(map(ascii, shown[:3]))
            seen += f"\n{sheet.path.name} has {has} in column {name!r}, and the folder {some}"
            near = [(cell, *get_close_matches(stem(cell), files, 1)) for cell in shown]
            if pair := next((pair for pair in near if len(pair) > 1), None):
                alike = " and ".join(map(ascii, files[pair[1]][:2]))
                seen += f"; {pair[0]!a} is most like {alike}"
                seen += "; write the path into the cells" if len(files[pair[1]]) > 1 else ""
    return DataError(f"{what} the images of {images.root}, such as {min(images.paths)!r}{seen}")
