"""One table of a site's images out of what hospitals have: sheets, JSON, several files, class folders."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, permutations, product, zip_longest
from pathlib import Path
from typing import Any

from suture.core.errors import DataError
from suture.core.escaping import from_cell, number_of
from suture.data.images import ImageSource, loosely, stem
from suture.data.patient_columns import patient_columns
from suture.data.readers.hospital import listed_names
from suture.data.readers.image_list import SPLIT_WORDS
from suture.data.reading import (
    DELIMITERS,
    JSON,
    Form,
    Sheet,
    encoding_of,
    read_form,
    read_text,
    readable_table,
    rows_text,
)
from suture.data.table import Cells
from suture.data.workbooks import is_workbook, workbook_sheets

_IMAGE, _SPLIT, _CLASS, _PATIENT_COLUMN = "image", "split", "class", "patient"
"""Columns of a table that is put together."""

THE_ONE_TO_USE = "give the path of the table to use, or hide the other sheets"
"""What to do about tables of which one may be out of date."""
_KEPT_APART = re.compile(r"hold.?out|extern|eval|unseen|hidden|submi|predict", re.IGNORECASE)
"""In the name of a table of which nothing says that it is for training too."""
_COMPLETE = re.compile(r".*_complete|complete\?", re.IGNORECASE)
_PATIENT = re.compile(r"(patient|pat|pid|subject|subj?|person|mrn|p)[ _-]?\d\w*", re.IGNORECASE)
_IN_FILE = re.compile(r"(?!(?:19|20)\d\d[-_]?[01]\d)(\D*\d+)[-_].+")
"""A name of a file that begins with what may be the patient, and not with a date."""
_MOST_IMAGES = 20
"""Of a patient whom the names of files tell, on average."""
_HAS_NUMBER = re.compile(r"\d").search
_UNFILLED = {"0", "incomplete"}
"""How REDCap writes that a form is not complete; 1 is unverified, and 2 complete."""
_NOT_COMPLETE = _UNFILLED | {"1", "unverified"}
_FORM_STATES = _NOT_COMPLETE | {"2", "complete", ""}
_LOOKED_AT = 50
_MOST_NUMBERED = 10
"""Folders with a number in their names, from which on they are patients and not classes."""
_MOST_NAMES = 200
"""Classes of a legend."""


@dataclass(frozen=True)
class Named:
    """A table whose rows name images.

    Attributes:
        column: the column of their names.
        find: returns the path of the image that a cell names; None where it names none.
    """

    form: Form
    column: str
    find: Callable[[str], str | None]

    @property
    def images(self) -> list[str | None]:
        """The image of each row."""
        return [self.find(cell) if cell else None for cell in self.form.sheet.column(self.column, "")]


def read_forms(path: Path) -> list[Form]:
    """Read the tables of a file: of a workbook one for each sheet, and of each the header wherever it is.

    Raises:
        DataError: it cannot be read.
    """
    if path.name.lower().endswith(JSON):
        return [_of_json(path)]
    if is_workbook(path):
        with readable_table(path):
            sheets = workbook_sheets(path)
        several = len(sheets) > 1
        read = [_below_titles(path, rows, title if several else "") for title, rows in sheets.items()]
        found = [form for form in read if form]
        return found or [read_form(path)]  # which says what is wrong
    refused: DataError | None = None
    try:
        form = read_form(path)
        header = form.sheet.header
        if len(header) > 1 and all(name or not any(form.sheet.cells(i)) for i, name in enumerate(header)):
            return [form]
    except DataError as error:
        refused = error
    text = read_text(path, encoding_of(path))
    made: list[Form] = []
    for delimiter in DELIMITERS:
        rows = list(map(tuple, csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)))
        below = _below_titles(path, rows, "")
        made += [below] if below and below.made and len(below.sheet.header) > 1 else []
    if made:  # commas of the sentences in a table with tabs make a narrower one
        return [max(made, key=lambda below: len(below.sheet.header))]
    if refused:
        raise refused
    return [form]


def _below_titles(path: Path, rows: list[tuple[str, ...]], title: str) -> Form | None:
    """The table below lines of titles, whose header may have two rows; None where there is none.

    The header is the first row with half as many cells as most rows have. A second row of it has words where
    the first is blank (below a merged cell), and no cell in a column that the first alone names.
    """
    filled = [sum(map(bool, map(str.strip, row))) for row in rows]
    usual = Counter(n for n in filled if n > 1).most_common(1)
    start = next((i for i, n in enumerate(filled) if usual and 2 * n >= max(usual[0][0], 3)), None)
    if start is None or start + 1 >= len(rows):
        return None
    width = max(max((i + 1 for i, cell in enumerate(row) if cell.strip()), default=0) for row in rows[start:])
    full = [
        tuple(from_cell(cell.strip()) for cell in row[:width]) + ("",) * (width - len(row)) for row in rows
    ]
    header, below = full[start], full[start + 1]
    gaps = [i for i in range(width) if not header[i] and any(row[i] for row in full[start + 1 :])]
    words = [cell for cell in below if cell]
    double = (
        bool(gaps)
        and all(below[i] for i in gaps)
        and len(words) < sum(any(row[i] for row in full[start:]) for i in range(width))
        and not any(any(c.isdigit() for c in word) or Cells({}).number(word) is not None for word in words)
    )
    if not double and any(full[i][-1] for i in range(start + 1, len(full))) and not header[-1]:
        return None  # cells beyond the header, which `read_sheet` refuses
    if double:
        header = tuple(low or high for high, low in zip(header, below, strict=True))
    first = start + 1 + double
    used = [i for i in range(first, len(full)) if any(full[i])]
    sheet = Sheet(path, header, tuple(full[i] for i in used), tuple(i + 1 for i in used))
    if not used:
        return None
    form = Form(sheet, title=title)
    lines = f"rows {start + 1} and {start + 2}" if double else f"row {start + 1}"
    plain = not title and not any(filled[:start]) and not double
    return form if plain else replace(form, made=(f"{form.name}: the header is {lines}",))


def _of_json(path: Path) -> Form:
    """The table of a list of objects, of lists of them by split (MONAI's datalist), or of JSON Lines.

    Raises:
        DataError: it is none of them.
    """
    text = read_text(path)
    lines = f"[{','.join(filter(str.strip, text.splitlines()))}]"
    try:
        loaded: Any = json.loads(text if path.suffix.lower() == ".json" else lines)
    except (ValueError, RecursionError) as error:
        try:
            loaded = json.loads(lines)  # JSON Lines, under another name
        except (ValueError, RecursionError):
            raise DataError(f"{path} is not JSON: {error}") from None
    parts = {"": loaded} if isinstance(loaded, list) else loaded if isinstance(loaded, dict) else {}
    parts = {key: part for key, part in parts.items() if isinstance(part, list) and part}
    rows = [(key, row) for key, part in parts.items() for row in part if isinstance(row, dict)]
    strange = sorted({key for key, _ in rows if key.casefold() not in SPLIT_WORDS})
    if not rows or strange:
        raise DataError(
            f"{path} is not a list of objects, one for each image, or such lists under training, validation "
            f"and test{': it has ' + ', '.join(map(repr, strange)) if strange else ''}; save it as CSV"
        )
    names = list(dict.fromkeys(name for _, row in rows for name in row))
    cells = [
        (*(_json_cell(row.get(name)) for name in names), *([SPLIT_WORDS[key.casefold()]] if key else []))
        for key, row in rows
    ]
    header = (*names, *([_SPLIT] if rows[0][0] else []))
    sheet = Sheet(path, header, tuple(cells), tuple(range(1, len(cells) + 1)))
    names_of = loaded.get("labels") if isinstance(loaded, dict) else None
    legend = {str(k): str(v) for k, v in names_of.items()} if isinstance(names_of, dict) else {}
    made = (f"{path.name}: {number_of(len(rows), 'object')} of its lists",)
    return Form(sheet, made=made, legend=legend)


def _json_cell(value: Any) -> str:
    if value is None:
        return ""
    return value.strip() if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def of_class_folders(root: Path, images: Collection[str]) -> Form | None:
    """The table of folders that are named after classes, and maybe splits and patients, at any depth.

    A class may have folders of its own classes, which are below it. None where no folder is named so.

    Raises:
        DataError: there are several levels of folders, and it is not clear which are the classes.
    """
    paths = sorted(images)
    every = [*zip_longest(*(path.split("/")[:-1] for path in paths), fillvalue="")]
    every = [level for level in every if len({*level}) > 1]
    levels = [level for level in every if all(level)]
    found: dict[str, tuple[str, ...]] = {}
    data: dict[str, Any] = {}
    for name, is_one in ((_SPLIT, _are_splits), (_PATIENT_COLUMN, _are_patients), (_CLASS, _are_classes)):
        if at := next((level for level in levels if is_one(level)), None):
            found[name] = at
            levels.remove(at)
    if _CLASS not in found and len(levels) == 1 and 2 * len({*levels[0]}) <= len(paths):
        found[_CLASS] = levels.pop()
    if _CLASS not in found:
        if len(levels) < 2:
            return None
        raise DataError(
            f"{root} has no table, and {len(levels)} levels of folders, such as {paths[0]!r}. Name one level "
            "after the classes (and one after train, validation and test), or write a table"
        )
    below = every[every.index(found[_CLASS]) + 1 :]
    unread = [level for level in every if level not in found.values()]
    for level in (level for level in below if level in unread):
        if paired := _with_children(found[_CLASS], level):
            found[_CLASS] = paired
            unread.remove(level)
            data = {"finding_path": "/"}
    if _SPLIT in found:
        found[_SPLIT] = tuple(SPLIT_WORDS[cell.casefold()] for cell in found[_SPLIT])
    header = (_IMAGE, *(name for name in (_CLASS, _SPLIT, _PATIENT_COLUMN) if name in found))
    rows = tuple(zip(paths, *(found[name] for name in header[1:]), strict=True))
    said = {_CLASS: "classes", _SPLIT: "splits", _PATIENT_COLUMN: "patients"}
    such = {name: max(cells, key=lambda cell: cell.count("/")) for name, cells in found.items()}
    what = " and the ".join(f"{said[name]} ({such[name]})" for name in header[1:])
    rest = ", ".join(next(filter(None, level)) for level in unread)
    rest = f"; other folders, such as {rest}, are not read" if rest else ""
    made = (f"{root.name}: the folders are the {what}{rest}",)
    return Form(Sheet(root, header, rows, tuple(range(1, len(rows) + 1))), data, made=made)


def _with_children(classes: Sequence[str], level: Sequence[str]) -> tuple[str, ...]:
    """The classes with those of the folders in them, as Pneumonia/Viral; empty where these are none.

    Folders of one name in several classes are views, sides or the like.
    """
    pairs = {(of, name) for of, name in zip(classes, level, strict=True) if name}
    own = 1 < len(pairs) == len({name for _, name in pairs})
    if not own or not _are_classes([*filter(None, level)]):
        return ()
    return tuple(f"{of}/{name}" if name else of for of, name in zip(classes, level, strict=True))


def _are_splits(level: Collection[str]) -> bool:
    return {name.casefold() for name in level} <= SPLIT_WORDS.keys()


def _are_patients(level: Collection[str]) -> bool:
    """Whether folders are named after patients: in so many words, or many with a number in each."""
    numbered = len({*level}) > _MOST_NUMBERED and all(map(_HAS_NUMBER, level)) and len({*level}) < len(level)
    return all(map(_PATIENT.fullmatch, level)) or numbered


def _are_classes(level: Collection[str]) -> bool:
    """Whether folders are named after classes: few words without numbers, each of several images."""
    return 2 * len({*level}) <= len(level) and not any(map(_HAS_NUMBER, level))


def together(named: Sequence[Named]) -> Form | None:
    """One table out of several that name images: one for each split, tables of the same columns about other
    images, or tables about the same images.

    None where they are none of these.
    """
    parts = [_split_of(one.form) for one in named]
    if all(parts) and len({*parts}) == len(parts):
        return _one_below_another(named, parts)
    images = [{*one.images} - {None} for one in named]
    if sum(map(len, images)) == len(set().union(*images)):
        alike = len({frozenset({*one.form.sheet.header} - {""}) for one in named}) == 1
        kept = any(parts) or any(_KEPT_APART.search(one.form.name) for one in named)
        return _one_below_another(named, []) if alike and not kept else None
    mains = sorted(named, key=lambda one: -len(one.form.sheet.rows))
    joined = (_side_by_side(main, [one for one in named if one is not main]) for main in mains)
    return next(filter(None, joined), None)


def _split_of(form: Form) -> str | None:
    """The split that the name of a sheet, a table or its folder says."""
    path = form.sheet.path
    for name in (form.title, path.name.partition(".")[0], path.parent.name):
        words = re.split(r"[\W_\d]+", name.casefold())
        found = {SPLIT_WORDS[word] for word in words if word and word in SPLIT_WORDS}
        if len(found) == 1:
            return found.pop()
    return None


def _one_below_another(named: Sequence[Named], parts: Sequence[str | None]) -> Form | None:
    """The rows of all tables, with the split of each where it is one; None where two splits have an image."""
    header = list(dict.fromkeys(c for one in named for c in one.form.sheet.header if c and c != one.column))
    header = [name for name in header if not parts or name.casefold() != _SPLIT]
    rows: list[tuple[str, ...]] = []
    for one, part in zip(named, parts or [None] * len(named), strict=True):
        sheet, of_table = one.form.sheet, [part] if part else []
        at = [sheet.header.index(name) if name in sheet.header else None for name in header]
        for image, cell, row in zip(one.images, sheet.column(one.column, ""), sheet.rows, strict=True):
            rows.append((image or cell, *of_table, *("" if i is None else row[i].strip() for i in at)))
    splits: dict[str, str] = {}
    if parts and any(splits.setdefault(image, part) != part for image, part, *_ in rows):
        return None
    names = [one.form.name for one in named]
    made = [f"{name} is the split {part}" for name, part in zip(names, parts, strict=False)]
    header = [_IMAGE, *([_SPLIT] if parts else []), *header]
    path = named[0].form.sheet.path
    sheet = Sheet(path, tuple(header), tuple(rows), tuple(range(2, len(rows) + 2)))
    made = made or [f"one table of {', '.join(names)}, which have other images"]
    return Form(sheet, made=tuple(made))


def _side_by_side(main: Named, others: Sequence[Named], by: str = "the image") -> Form | None:
    """The columns of other tables beside those of the main one, joined by the image, or another column.

    Raises:
        DataError: two tables have a column of one name with other cells.
    """
    sheet, images = main.form.sheet, main.images
    header, rows = list(sheet.header), [list(row) for row in sheet.rows]
    made: list[str] = []
    for other in others:
        of: dict[str, tuple[str, ...]] = {}
        for image, cells_of in zip(other.images, other.form.sheet.rows, strict=True):
            if image is not None and of.setdefault(image, cells_of) != cells_of:
                return None
        before = len(header)
        for position, name in enumerate(other.form.sheet.header):
            if not name or name == other.column:
                continue
            cells = [of[image][position].strip() if image in of else "" for image in map(str, images)]
            if name in header:
                at = header.index(name)
                clash = [
                    n
                    for n, row, cell in zip(sheet.numbers, rows, cells, strict=True)
                    if cell and row[at].strip() != cell
                ]
                if clash:
                    raise DataError(
                        f"{sheet.path.parent / main.form.name} {rows_text(clash)}: column {name!r} differs "
                        f"from that of {other.form.name}; {THE_ONE_TO_USE}, or remove one of the columns"
                    )
                continue
            header.append(name)
            for row, cell in zip(rows, cells, strict=True):
                row.append(cell)
        if len(header) == before:
            return None  # a second table of the same, of which one may be out of date
        lost = sum(image not in of for image in map(str, images))
        without = f"; {number_of(lost, 'row')} without" if lost else ""
        made.append(f"{other.form.name} is joined by {by}{without}")
    both = Sheet(sheet.path, tuple(header), tuple(map(tuple, rows)), sheet.numbers)
    return Form(both, made=(*main.form.made, *made), legend=main.form.legend)


def by_key(form: Form, others: Sequence[Form]) -> Form | None:
    """A table with the columns of another one, joined by the number of a patient, study or the like.

    None where no other table has such a column, of which it has each value once.
    """
    for other, key in product(others, [name for name in form.sheet.header if name]):
        if key not in other.sheet.header or {*other.sheet.header} <= {*form.sheet.header}:
            continue
        own, its = {*form.sheet.first(key)}, other.sheet.first(key)
        if len({*its}) == len(its) and 2 * len(own.intersection(its)) > len(own) > 2:
            return _side_by_side(Named(form, key, str), [Named(other, key, str)], repr(key))
    return None


def of_patients(form: Form, images: Collection[str]) -> Form | None:
    """A table with a row for each image, made of one for each patient or case that names their folder.

    None where no column of patients or cases names folders of images.
    """
    paths = sorted(images)
    levels = map(list, zip(*(path.split("/")[:-1] for path in paths), strict=False))
    columns = [name for _, name in patient_columns(form.sheet, "")]
    tried = (_row_for_each(form, name, paths, level, "folder") for level, name in product(levels, columns))
    return next(filter(None, tried), None)


def of_headers(form: Form, root: Path, images: Collection[str]) -> Form | None:
    """A table with a row for each DICOM image, made of one that names what their headers state.

    None where no column does.
    """
    from suture.data.decoding import IDENTIFIERS, identifiers  # whose library only these tables need

    paths = sorted(images)
    with ImageSource(root) as source:
        if not identifiers(source.raw(paths[0])):
            return None
        stated = [identifiers(source.raw(path)) for path in paths]
    for name, tag in product(form.sheet.columns(), IDENTIFIERS):
        values = [of.get(tag, "") for of in stated]
        if found := _row_for_each(form, name, paths, values, f"DICOM {tag}"):
            of = dict(zip(paths, stated, strict=True))
            patients = [of.get(path, {}).get(IDENTIFIERS[-1], "") for path in found.sheet.column(_IMAGE, "")]
            whose = "the patient is the DICOM PatientID"
            return with_column(found, "patient", patients, whose) if all(patients) else found
    return None


def composed(form: Form, images: Collection[str]) -> Form | None:
    """A table with a column for each finding, of one with the image and the finding in one cell, as a_mass.

    None where no column has both, or it is not clear which other one says whether the finding is present.
    """
    sheet, find, meaning = form.sheet, loosely(images), Cells({})
    columns = sheet.columns()
    for (name, cells), sign in product(columns.items(), "_-:|# "):
        pairs = [cell.rpartition(sign) for cell in cells]
        kinds = Counter(kind for *_, kind in pairs)
        found = {image: find(image) for image, *_ in pairs[:_LOOKED_AT] if image}
        if (
            not (1 < len(kinds) <= _MOST_NAMES and 2 * len(kinds) <= len(cells) and found)
            or None in found.values()
        ):
            continue
        values = [cell for other, cell in columns.items() if other != name]
        values = [cell for cell in values if {0.0, 1.0} <= {*map(meaning.number, cell)}]
        if len(values) != 1 or any(map(str.isdigit, kinds)):
            continue
        of: dict[str, dict[str, set[str]]] = {}
        for (image, _, kind), value in zip(pairs, values[0], strict=True):
            of.setdefault(image, {}).setdefault(kind, set()).add(value)
        rows = [(image, *(_only_one(own.get(kind, {""})) for kind in kinds)) for image, own in of.items()]
        made = f"{name!r} has the image and the finding, with {sign!r} between them"
        made_of = Sheet(sheet.path, (_IMAGE, *kinds), tuple(rows), tuple(range(2, len(rows) + 2)))
        return replace(form, sheet=made_of, made=(*form.made, made))
    return None


def _only_one(values: Collection[str]) -> str:
    """The value of a finding; blank where rows contradict each other."""
    return next(iter(values)) if len(values) == 1 else ""


def _row_for_each(
    form: Form, name: str, paths: Sequence[str], values: Sequence[str], what: str
) -> Form | None:
    """A table with a row for each image whose value a column names; None where it names few."""
    of: dict[str, list[str]] = {}
    for path, value in zip(paths, values, strict=True):
        of.setdefault(value.casefold(), []).append(path)
    cells = [cell.casefold() for cell in form.sheet.column(name, "")]
    if 2 * len((of.keys() - {""}) & {*cells}) <= len({*cells}):
        return None
    rows = [(row, path) for row, cell in enumerate(cells) for path in of.get(cell, [""])]
    several = replace(
        form.sheet,
        rows=tuple(form.sheet.rows[row] for row, _ in rows),
        numbers=tuple(form.sheet.numbers[row] for row, _ in rows),
    )
    made = f"{name!r} is the {what} of the images of a row"
    return with_column(replace(form, sheet=several), _IMAGE, [path for _, path in rows], made)


def with_column(form: Form, name: str, cells: Sequence[str], made: str) -> Form:
    """A table with another first column, and how that was made; of a name that no other column has."""
    sheet = form.sheet
    header = (name if name not in sheet.header else f"{name} key", *sheet.header)
    rows = tuple((cell, *row) for cell, row in zip(cells, sheet.rows, strict=True))
    return replace(form, sheet=replace(sheet, header=header, rows=rows), made=(*form.made, made))


def in_two_columns(form: Form, images: Collection[str], enough: int) -> Form | None:
    """A table with a column of the image, made of a column of folders and one of files; None where none fits.

    Args:
        enough: rows that more than this many must name an image of.
    """
    sheet, find = form.sheet, loosely(images)
    folders = [name for name in sheet.header if name and sheet.header.count(name) == 1][:_LOOKED_AT]
    for folder, file in permutations(folders, 2):
        pairs = [
            f"{a}/{b}" if a and b else ""
            for a, b in zip(sheet.column(folder, ""), sheet.column(file, ""), strict=True)
        ]
        some = pairs[:_LOOKED_AT]
        if 2 * sum(pair != "" and "/" in (find(pair) or "") for pair in some) <= len(some):
            continue  # an image without a folder is found by the file alone
        found = [find(pair) if pair else None for pair in pairs]
        if len({*found} - {None}) > enough:
            cells = [image or pair for image, pair in zip(found, pairs, strict=True)]
            made = f"{folder!r} is the folder and {file!r} the file of each image"
            return with_column(form, _IMAGE, cells, made)
    return None


def with_splits(form: Form, paths: Sequence[str | None]) -> tuple[Form, str | None]:
    """A table with a column of splits, where a folder of each image is named after one, and its name.

    Args:
        paths: of the image of each row; None where there is none.
    """
    levels = [path.casefold().split("/")[:-1] if path else None for path in paths]
    for at in range(min((len(level) for level in levels if level is not None), default=0)):
        names = [level[at] if level else "" for level in levels]
        if {*names} <= SPLIT_WORDS.keys() and len({SPLIT_WORDS[name] for name in names} - {""}) > 1:
            made = "the split is the folder of the image"
            form = with_column(form, _SPLIT, [SPLIT_WORDS[name] for name in names], made)
            return form, form.sheet.header[0]
    return form, None


def with_patients(form: Form, image: str, split: Sequence[str]) -> tuple[Form, list[str]]:
    """A table with a column of patients, where a folder or the file of each image is named after one.

    Also returns what to ask about it: the names of files are but a guess.

    Args:
        image: the column of images.
        split: of each row; empty where nothing says it.
    """
    cells = form.sheet.column(image, "")
    levels = [cell.replace("\\", "/").split("/")[:-1] for cell in cells]
    for at in range(min(map(len, levels))):
        names = [level[at] for level in levels]
        if all(map(_PATIENT.fullmatch, names)) and len({*names}) > 1:
            made = f"the patient is the folder of {image!r}, such as {names[0]}"
            return with_column(form, "patient", names, made), []
    begins = [match[1] if (match := _IN_FILE.fullmatch(stem(cell))) else "" for cell in cells]
    n, several = len({*begins}), len({*cells})
    if not (all(begins) and 1 < n < several <= _MOST_IMAGES * n):
        return form, []
    such = f"the names of several files begin with the same number, such as {begins[0]!r} of {cells[0]!r}"
    if split and len({*zip(begins, split, strict=True)}) > n:
        return form, [f"{such}; if these are patients, they lie in two splits: add a column of patients"]
    keys, lines = "patient_column", f"patient_column = {json.dumps(image)}"
    if not split:
        keys, lines = f"{keys}, split and split_file", f'{lines}\nsplit = "patients"'
    made = f"the patient is how the name of the file begins, such as {begins[0]}"
    remark = f"{such}, which counts as the patient; if that is wrong, write in place of {keys}:\n{lines}"
    return with_column(form, "patient", begins, made), [remark]


def without_unfilled(form: Form) -> Form:
    """A table of REDCap in which what a form does not say is unknown, where it was never completed.

    Its columns are those before the column of its state, back to the state of another form.
    """
    sheet, meaning = form.sheet, Cells({})
    rows, first, blanked = [list(row) for row in sheet.rows], 0, 0
    for position, name in enumerate(sheet.header):
        states = [cell.casefold() for cell in sheet.cells(position)]
        if not _COMPLETE.fullmatch(name) or not {*states} <= _FORM_STATES or not {*states} & _NOT_COMPLETE:
            continue
        boxes = [
            at
            for at in range(first, position)
            if all(meaning.number(cell) is not None for cell in sheet.cells(at))
            and not sheet.header[at].startswith("redcap_")
        ]
        for row, state in zip(rows, states, strict=True):
            for at in boxes if state in _UNFILLED | {""} else ():
                if meaning.number(row[at].strip()) == 0:
                    row[at], blanked = "", blanked + 1
        first = position + 1
    if not blanked:
        return form
    made = f"{number_of(blanked, 'cell')} of forms that are not complete: unknown, and not absent"
    return replace(form, sheet=replace(sheet, rows=tuple(map(tuple, rows))), made=(*form.made, made))


def spread(form: Form, legend: Mapping[str, str]) -> Form:
    """A table in which lists of 1 and 0, one for each class, have a column for each class."""
    sheet = form.sheet
    for name, column in sheet.columns().items():
        cells = [listed_names(cell, "\0") if cell else [] for cell in column]
        lengths = {len(cell) for cell in cells if cell}
        if len(lengths) != 1 or min(lengths) < 2 or not {*chain(*cells)} <= {"0", "1"}:
            continue
        n, at = lengths.pop(), sheet.header.index(name)
        names = tuple(legend.get(str(i), f"{name} {i}") for i in range(n))
        rows = tuple(
            (*row[:at], *(cell or [""] * n), *row[at + 1 :])
            for row, cell in zip(sheet.rows, cells, strict=True)
        )
        header = (*sheet.header[:at], *names, *sheet.header[at + 1 :])
        made = (*form.made, f"{name!r} has a 1 or 0 for each class")
        return replace(form, sheet=replace(sheet, header=header, rows=rows), made=made)
    return form


def legend_of(codes: Collection[str], forms: Sequence[Form]) -> dict[str, str]:
    """The names of numbers of classes by a table that has both, each once; empty where none has."""
    for form in forms:
        if form.legend.keys() >= {*codes}:
            return dict(form.legend)
        rows = [form.sheet.header, *form.sheet.rows]  # a legend may have no header
        for of, to in permutations(range(len(form.sheet.header)), 2) if len(rows) <= _MOST_NAMES else ():
            pairs = [(row[of].strip(), row[to].strip()) for row in rows if row[of].strip() in codes]
            names = {name for _, name in pairs if name and not name.replace(".", "").isdigit()}
            if len(pairs) == len(names) == len({*codes}) == len({code for code, _ in pairs}):
                return dict(pairs)
    return {}
