"""What a hospital's folder or table seems to be: a guess at its [data], with the reason for each key."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from suture.core.errors import ConfigError, DataError, SutureError
from suture.core.files import contained
from suture.core.plain import open_regular
from suture.core.printable import number_of
from suture.data.cells import Cells
from suture.data.config import parse_data
from suture.data.decoding import SUFFIXES
from suture.data.gathering import (
    THE_ONE_TO_USE,
    Named,
    in_two_columns,
    of_class_folders,
    of_patients,
    read_forms,
    spread,
    together,
    with_column,
    with_patients,
    with_splits,
    without_unfilled,
)
from suture.data.image_names import image_name, loosely, stem
from suture.data.images import ARCHIVES, ImageSource
from suture.data.inspection import true_depth
from suture.data.label_discovery import discover_labels
from suture.data.layouts import HOSPITAL, Layout
from suture.data.patient_columns import names_patients, patient_columns
from suture.data.readers import DATASETS, DataSet, read_table
from suture.data.readers.image_list import SPLIT_WORDS
from suture.data.reading import Sheet, rows_text
from suture.data.table_form import JSON, TABLES, Form, is_hidden, tables

_SPLIT = re.compile(r"^(split|set|subset|partition|fold)$", re.IGNORECASE)
_SPLIT_FLAG = re.compile(
    r"(?i)(is|in)[ _-]?(train|val|test)\w*|train(ing)?|(train|val|test)\w*[ _-](set|flag|split)"
)
"""Columns of 1 and 0 that say which rows are of a split."""
_INDEX = re.compile(r"^(unnamed.*|index|row|#)$", re.IGNORECASE)
_CHOICE = re.compile(r"\(choice=(.+)\)$")
_CODED = re.compile(r"(.+?)\s*\(([^()]+)\)", re.DOTALL)
"""A name of a column with the words of its cells, such as "Mass (0/1)"."""
_OTHER_TABLES = (".xls", ".xlsb", ".ods", ".numbers", ".sav", ".dta", ".feather", ".mdb", ".sas7bdat")
_MANY_WORDS = 5
"""Words of a cell, on average, from which on it is a document."""
_RATER = re.compile(
    r"(?i)rad(iologist)?s?\b|rad_|rater|reader|annotator|observer|grader|expert|befunder|untersucher"
)


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
        rows: of the table.
        sheet: the table, where it was put together and is to be written; None where `table` is the file.
        made: how it was put together.
        title: of the public data set whose table it is.
        is_draft: whether a person has to say what the labels are before it can be read.
    """

    data: dict[str, Any]
    reasons: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    doubtful: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    rows: int = 0
    sheet: Sheet | None = None
    made: tuple[str, ...] = ()
    title: str = ""
    is_draft: bool = False

    @property
    def has_splits(self) -> bool:
        """Whether the table, or the reader of a public data set, says which rows are for training."""
        return "split_column" in self.data or self.data["dataset"] != "hospital"

    @property
    def has_patients(self) -> bool:
        """Whether a column names the patients, or the reader of a public data set knows them."""
        return bool(self.data.get("patient_column") != self.data.get("image_column", ""))


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
    if path.is_file() and path.suffix.lower() in (".zip", *_OTHER_TABLES):
        remedy = "unpack it and give its folder" if path.suffix == ".zip" else "save it as .xlsx or .csv"
        raise DataError(f"{path} cannot be read; {remedy}")
    folder = path if path.is_dir() else path.parent
    levels = _Levels(tables(folder) if path.is_dir() else [[path]])
    elsewhere = _named_elsewhere(levels.forms(0))
    try:
        images = _images(elsewhere or folder)
    except DataError:
        if (texts := _documents(levels, folder, answers)) is None:
            raise
        return texts
    found = _published(levels, folder, images) or _own(levels, folder, images, answers)
    found = _with_depth(found, images)
    return replace(found, warnings=(*found.warnings, *(f"skipped: {fault}" for fault in levels.faults)))


class _Levels:
    """The tables of a folder, and of its folders, each read once and when it is asked for.

    Attributes:
        number: of all, readable or not.
        faults: why some could not be read.
    """

    def __init__(self, paths: Sequence[Sequence[Path]]) -> None:
        self._paths = paths
        self._forms: dict[int, list[Form]] = {}
        self.number = sum(map(len, paths))
        self.faults: list[str] = []

    def __len__(self) -> int:
        return len(self._paths)

    def forms(self, level: int) -> list[Form]:
        """The tables of a level.

        Raises:
            DataError: the only table cannot be read.
        """
        if level not in self._forms:
            self._forms[level] = []
            for path in self._paths[level]:
                try:
                    self._forms[level] += read_forms(path)
                except DataError as error:
                    if self.number == 1:
                        raise
                    self.faults += [] if path.suffix == ".txt" else [str(error)]  # such as a README.txt
        return self._forms[level]

    def every(self) -> list[Form]:
        """The tables of all levels."""
        return [form for level in range(len(self)) for form in self.forms(level)]


@dataclass(frozen=True)
class _Images:
    """The images of a site.

    Attributes:
        root: the folder or archive that holds them.
        paths: of the images within it.
        above: the folder above, where cells of a table may begin; the same as `root` where there is none.
        linked: images, or folders, that are links out of it.
    """

    root: Path
    paths: frozenset[str]
    above: Path
    linked: int = 0


def _with_depth(found: Discovery, images: _Images) -> Discovery:
    """Add the true depth of images that store 16 bits and use fewer."""
    depth = true_depth(images.root, images.paths)
    if depth is None:
        return found
    bits, why = depth
    return replace(found, data=found.data | {"bits": bits}, reasons=found.reasons | {"bits": why})


def _published(levels: _Levels, folder: Path, images: _Images) -> Discovery | None:
    """The [data] of a public data set that has a reader of its own, which finds images of the table.

    Each reader's layouts are asked, also those of other packages. None where none fits.
    """
    readers: dict[str, DataSet] = {}
    refused = ""
    for word in sorted(DATASETS.names() - {"hospital"}):
        with suppress(ConfigError):  # a package that cannot be imported; `suture list` names it
            readers[word] = DATASETS.find(word)
    roots = tuple(dict.fromkeys((images.root, images.above, folder)))
    for form in levels.every():
        # What was put together is not the file that a reader gets; a list in JSON is.
        if form.made and not form.sheet.path.name.lower().endswith(JSON):
            continue
        for word, layout in ((word, one) for word, reader in readers.items() for one in reader.layouts):
            if layout.recognises(form.sheet, images.paths):
                found = _by_reader(word, layout, form.sheet, roots)
                if isinstance(found, Discovery):
                    return found
                refused = (
                    f"{form.sheet.path.name} looks like {layout.title}, but its reader refuses it: {found}"
                )
    levels.faults += [refused] if refused else []
    return None


def _by_reader(word: str, layout: Layout, sheet: Sheet, roots: Sequence[Path]) -> Discovery | SutureError:
    """The [data] of a recognised table by the first root that its reader accepts, or its last refusal."""
    refusal = SutureError("it has no folder of images")
    for root in roots:
        data: dict[str, Any] = {
            "dataset": word,
            "root": str(root),
            "table": str(sheet.path),
            **layout.keys(sheet.path.parent),
        }
        try:
            reading = read_table(parse_data(data | {"partial": True}, str(sheet.path)))
        except SutureError as error:
            refusal = error
            continue
        said = [*reading.faults[:3], *reading.notes]
        if reading.absent:
            data["partial"] = True
            said.append(f"{reading.absent:,} rows of {sheet.path.name} without an image are left out")
        return Discovery(
            data,
            {"dataset": f"the table is that of {layout.title}", "root": "holds the images"},
            tuple(said),
            columns=tuple(filter(None, sheet.header)),
            rows=len(sheet.rows),
            title=layout.title,
        )
    return refusal


@dataclass(frozen=True)
class _ImageColumn:
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


def _own(levels: _Levels, folder: Path, images: _Images, answers: Answers) -> Discovery:
    """The [data] of a hospital's own table.

    Raises:
        DataError: no table names the images, or several do that do not belong together.
    """
    for level in range(len(levels)):
        forms = levels.forms(level)
        columns = {i: column for i, form in enumerate(forms) if (column := _best_column(form, images))}
        for i, form in enumerate(forms):
            n = len(form.sheet.rows)
            if columns[i].found < n if i in columns else True:
                enough = columns[i].found if i in columns else 0
                made = in_two_columns(form, images.paths, enough)
                if made := made or (None if enough else of_patients(form, images.paths)):
                    forms[i], columns[i] = made, _expect_column(made, images)
        if not columns:
            continue
        best = max(columns.values(), key=lambda column: (column.match != "loose", column.found))
        columns = {i: c for i, c in columns.items() if not _by_chance(forms[i], c, best)}
        fitting = [(forms[i], column) for i, column in columns.items()]
        form, column = fitting[0]
        if len(fitting) > 1:
            both = together([Named(form, column.name, column.find) for form, column in fitting])
            if both is None:
                names = " and ".join(form.name for form, _ in fitting)
                raise DataError(f"{names} of {folder} both name its images; {THE_ONE_TO_USE}")
            form, column = both, _expect_column(both, images)
        others = [other for i, other in enumerate(forms) if i not in columns] + [form]
        form = spread(without_unfilled(form), form.legend)
        if column.find(column.name) is not None:
            raise DataError(
                f"{form.sheet.path} has no header: its first row names the image {column.name!r}; write the "
                "names of the columns above it"
            )
        return _described(form, column, images, answers, others)
    forms = levels.every()
    _refuse_ambiguous(forms, images)
    listed = any(_like_images(cells) for form in forms for cells in form.sheet.columns().values())
    if not listed and (classes := of_class_folders(images.root, images.paths)) is not None:
        found = _described(classes, _expect_column(classes, images), images, answers, [])
        unread = [f"{form.name} names no image and is not read" for form in forms]
        return replace(found, warnings=(*found.warnings, *unread))
    if not levels.number:
        unread = [path.name for path in sorted(folder.iterdir()) if path.suffix.lower() in _OTHER_TABLES]
        remedy = f"save {' and '.join(unread)} as .xlsx or .csv" if unread else "give the table's path"
        raise DataError(f"{folder} contains no table ({', '.join(TABLES)}); {remedy}")
    raise _nothing_matches(levels, images)


def _documents(levels: _Levels, folder: Path, answers: Answers) -> Discovery | None:
    """The [data] of a table of documents; None where the first has none, or names images that are lacking."""
    forms = levels.every()
    cells = forms[0].sheet.columns() if forms else {}
    words = {name: sum(len(cell.split()) for cell in column) / len(column) for name, column in cells.items()}
    text = max(words, key=words.__getitem__, default="")
    packed = any(path.name.endswith((".zip", *ARCHIVES)) for path in folder.iterdir())
    if packed or words.get(text, 0) < _MANY_WORDS or any(map(_like_images, cells.values())):
        return None
    form, n = spread(without_unfilled(forms[0]), forms[0].legend), len(cells[text])
    patients = {name for _, name in patient_columns(form.sheet, text)}
    free = [name for name in cells if name not in {text, *patients}]
    name = next((name for name in free if len({*cells[name]} - {""}) == n), "")
    if not name:
        made = "a document is named by the number of its row"
        form = with_column(form, "document", [*map(str, form.sheet.numbers)], made)
        name = form.sheet.header[0]
    path = form.sheet.path
    column = _ImageColumn(name, "path", n, path, str, text)
    return _described(form, column, _Images(path, frozenset(), path), answers, forms)


def _by_chance(form: Form, column: _ImageColumn, best: _ImageColumn) -> bool:
    """Whether a table has numbers that are those of a few images, such as a legend of classes."""
    numbers = all(cell.isdigit() for cell in form.sheet.column(column.name, ""))
    return column.match == "loose" and numbers and (best.match != "loose" or 4 * column.found < best.found)


def _refuse_ambiguous(forms: Sequence[Form], images: _Images) -> None:
    """Refuse a column of names that files of several folders have, such as an image and its mask.

    Raises:
        DataError: there is one.
    """
    named: dict[str, list[str]] = {}
    for path in sorted(images.paths):
        for name in {path.rpartition("/")[2], stem(path)}:
            named.setdefault(name, []).append(path)
    columns = [(form, *column) for form in forms for column in form.sheet.columns().items()]
    for form, name, column in columns:
        cells = sorted({*column} - {""})
        several = [cell for cell in cells if len(named.get(cell, ())) > 1]
        if 2 * len(several) > len(cells):
            a, b, *_ = named[several[0]]
            raise DataError(
                f"{form.name}, column {name!r}: {several[0]!r} may be {a!r} or {b!r}; "
                "write the folder into the cells, or move the other files out of "
                f"{images.root}"
            )


def _nothing_matches(levels: _Levels, images: _Images) -> DataError:
    """That no table names the images, with names of both, so that the eye sees the difference."""
    forms = levels.every()
    names = ", ".join(dict.fromkeys(form.sheet.path.name for form in forms))
    what = f"no column of {names} names" if names else "no table could be read that names"
    seen = "".join(f"\n{fault}" for fault in levels.faults)
    some = ", ".join(map(ascii, sorted(images.paths)[:3]))
    for form in forms[:3]:
        sheet, cells = form.sheet, form.sheet.columns()
        name = max(cells, key=lambda name: (_like_images(cells[name]), len({*cells[name]})), default="")
        if name:
            shown = ", ".join(map(ascii, sorted({*cells[name]} - {""})[:3]))
            seen += f"\n{sheet.path.name} has {shown} in column {name!r}, and the folder {some}"
    return DataError(f"{what} the images of {images.root}, such as {min(images.paths)!r}{seen}")


def _like_images(cells: Sequence[str]) -> int:
    """How many cells look like the name of an image."""
    return sum(cell.lower().endswith(SUFFIXES) for cell in cells)


def _described(
    form: Form, images: _ImageColumn, files: _Images, answers: Answers, others: Sequence[Form]
) -> Discovery:
    n = len(form.sheet.rows)
    layout = next((one for one in HOSPITAL if one.recognises(form.sheet, files.paths)), None)
    known = layout.keys(form.sheet.path.parent) if layout else {}
    paths = [images.find(cell) if cell else None for cell in form.sheet.column(images.name, "")]
    columns = form.sheet.columns()
    split = next((name for name in columns if name != images.name and _is_split(columns[name])), None)
    if split is None and not images.text:
        form, split = with_splits(form, paths)
    told = answers.patient if answers.patient is not None else known.get("patient_column")
    asked: list[str] = []
    if told is None and not patient_columns(form.sheet, images.name):
        form, asked = with_patients(form, images.name, form.sheet.column(split, "") if split else ())
    sheet = form.sheet.only([path is not None for path in paths])  # rows without an image do not count
    data: dict[str, Any] = {"dataset": "hospital", "root": str(images.root), "table": str(sheet.path)}
    data |= {} if form.made else form.data
    reasons, warnings = {"root": "holds the images", **form.reasons}, asked

    def note(key: str, value: Any, why: str) -> None:
        data[key], reasons[key] = value, why

    if images.text:
        del data["root"]
        note("text_column", images.text, "its cells are documents")
    named = f"{images.found:,} of {number_of(n, 'row')} name an existing image"
    note("image_column", images.name, "names the documents" if images.text else named)
    if images.match != "path":
        how = "have no suffix" if images.match == "stem" else "are spelled otherwise than the files"
        note("image_match", images.match, f"its cells {how}")
    if images.found < n:
        note("partial", True, "rows without an image are left out and counted")
        cells = zip(form.sheet.column(images.name, ""), form.sheet.numbers, paths, strict=True)
        lost = [(cell, number) for cell, number, path in cells if path is None]
        such = f", such as {lost[0][0]!a} in {rows_text([number for _, number in lost])}" if lost else ""
        warnings.append(
            f"{sheet.path.name}: {n - images.found:,} of {number_of(n, 'row')} without an image{such}"
        )
    if files.linked:
        note("follow_links", False, "true, if you trust the links")
        warnings.append(
            f"{files.linked:,} of {number_of(len(files.paths), 'image')} are links that lead out of "
            f"{files.root}; they are not followed unless you trust them and write:\nfollow_links = true"
        )
    patient, why, remarks = _patient(sheet, images.name, told)
    note("patient_column", patient or images.name, f"that of {layout.title}" if layout and told else why)
    warnings += remarks
    taken = {images.name, data["patient_column"], images.text}
    free = [c for c in sheet.header if c and c not in taken]
    for name, number in _other_images(sheet, free, images, {*paths}):
        warnings.append(
            f"column {name!r} names {number_of(number, 'other image')}, not used; give each image its own row"
        )
    if split:
        note("split_column", split, "its cells are train, validation or test")
        taken |= {split, *filter(_SPLIT_FLAG.fullmatch, free)}
        if "test" not in {SPLIT_WORDS[cell.casefold()] for cell in sheet.column(split, "")}:
            warnings.append(
                "no row is for test, so there will be no test figures; to divide the patients anew, write "
                'this line in place of split_column:\nsplit = "patients"'
            )
    else:
        _refuse_strange_splits(sheet, free)
    synonyms = {**_choices(free), **known.get("synonyms", {}), **answers.names}
    if len(set(sheet.column(images.name, ""))) < n:
        note("repeated", known.get("repeated", "merge"), "some images have several rows")
        if rater := _rater(sheet, free, images.name):
            taken.add(rater)
            if "finding_column" not in known:
                note("repeated", "majority", f"{rater!r} are readers of the same images")
        if data["repeated"] == "majority":
            warnings.append(
                'several readers judge an image, and the majority counts; instead, repeated = "merge" takes '
                "a finding of any of them, and a share such as repeated = 0.3 a finding of that share"
            )
    labels = discover_labels(sheet, taken, answers.no_labels, images.name, synonyms, known, others)
    if used := {**synonyms, **labels.data.pop("synonyms", {})}:
        note("synonyms", used, "as you answered" if answers.names else "the names of the classes")
    if layout:
        reasons["table"] = f"recognised as {layout.title}"
    return Discovery(
        data | labels.data,
        reasons | labels.reasons,
        (*warnings, *labels.warnings),
        labels.left_out,
        labels.doubtful,
        tuple(filter(None, sheet.header)),
        n,
        form.sheet if form.made else None,
        form.made,
        layout.title if layout else "",
        labels.is_draft,
    )


def _choices(columns: Sequence[str]) -> dict[str, str]:
    """The findings of columns such as REDCap's "Findings (choice=Mass)", and "Mass (1=yes, 0=no)"."""
    found = {name: match[1].strip() for name in columns if (match := _CHOICE.search(name))}
    for name, match in ((name, _CODED.fullmatch(name)) for name in columns if name not in found):
        if match and all(Cells({}).number(word) is not None for word in re.findall(r"[\w.]+", match[2])):
            found[name] = match[1]
    return {name: of for name, of in found.items() if list(found.values()).count(of) == 1}


def _rater(sheet: Sheet, columns: Sequence[str], image: str) -> str | None:
    """The column that says who has judged an image, of which several have."""
    images = sheet.column(image, "")
    for name in columns:
        cells = sheet.cells(sheet.header.index(name))
        pairs = {*zip(images, cells, strict=True)}
        if _RATER.search(name) and all(cells) and len({*cells}) > 1 and len(pairs) > len({*images}):
            return name
    return None


def _refuse_strange_splits(sheet: Sheet, columns: Sequence[str]) -> None:
    """Refuse a column of splits in other words: what it keeps for the test would be trained on.

    Raises:
        DataError: there is one.
    """
    for name in columns:
        if _SPLIT_FLAG.fullmatch(name) and {*map(Cells({}).number, sheet.column(name, ""))} == {0.0, 1.0}:
            raise DataError(
                f"{sheet.path}, column {name!r} seems to say what is for training or test; write one column "
                "with train, validation, test or blank (unused), or rename it"
            )
        if _SPLIT.match(name.strip()):
            cells = sheet.column(name, "the splits")
            strange = sorted({cell for cell in cells if cell.casefold() not in SPLIT_WORDS})
            raise DataError(
                f"{sheet.path}, column {name!r}: {', '.join(map(repr, strange[:4]))} is not a split; "
                "write train, validation, test or blank (unused), or rename the column"
            )


def _images(folder: Path) -> _Images:
    """The images of a folder.

    Raises:
        DataError: it has none.
    """
    archives = sorted(p for p in folder.iterdir() if p.name.endswith(ARCHIVES) and not is_hidden(p.name))
    unread: list[OSError] = []
    found = _images_below(folder, unread)
    if len(archives) == 1 and not found:
        with ImageSource(archives[0]) as source:
            return _Images(archives[0], frozenset(source.paths()), archives[0])
    linked = [path for path in folder.iterdir() if path.is_symlink() and path.is_dir()]
    if not found and len(linked) == 1:
        folder = linked[0]  # a `root` may be a link
        found = _images_below(folder, unread)
    if not found:
        closed = "".join(f"; {error.filename} cannot be read: {error.strerror}" for error in unread)
        zips = sorted(path.name for path in folder.glob("*.zip"))
        closed += f"; unpack {', '.join(zips)} there" if zips else ""
        raise DataError(f"{folder} contains no image ({', '.join(SUFFIXES)}){closed}")
    root, top = folder, {name.partition("/")[0] for name in found}
    if len(top) == 1 and all("/" in name for name in found):
        root = folder / top.pop()
        found = {name.partition("/")[2] for name in found}
    inside = contained(root)
    out = sum((root / name).is_symlink() and not inside(root / name) for name in found)
    return _Images(root, frozenset(found), folder, out)


def _images_below(folder: Path, unread: list[OSError]) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in _files(folder, unread) if _is_image(path)}


def _named_elsewhere(forms: Sequence[Form]) -> Path | None:
    """The folder of the images that a table names by absolute paths; None where it names none so."""
    for column in (column for form in forms for column in form.sheet.columns().values()):
        cells = [*filter(None, column)]
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
    found = _best_column(Form(sheet, {}, {}), _Images(root, frozenset(images), root))
    return found.name if found else None


def _best_column(form: Form, images: _Images) -> _ImageColumn | None:
    """The column with the most cells that name an image, in the strictest way; None where none names any."""
    here = _unique(images.paths, lambda path: path.rpartition("/")[2]) | {path: path for path in images.paths}
    stems = _unique(images.paths, stem)

    def from_above(cell: str) -> str | None:
        name = cell.removeprefix("./").removeprefix(f"{images.root.name}/")
        return name if name != cell and name in images.paths else None

    ways: list[tuple[str, Path, Callable[[str], str | None]]] = [
        ("path", images.root, lambda cell: here.get(image_name(cell, images.root, here))),
        *([("path", images.above, from_above)] if images.above != images.root else []),
        ("stem", images.root, lambda cell: stems.get(stem(cell))),
        ("loose", images.root, loosely(images.paths)),
    ]
    best, most = None, (0, 0)
    for match, root, find in ways:
        for name, column in form.sheet.columns().items():
            cells = Counter(filter(None, column))
            index = match == "loose" and (_INDEX.match(name) or names_patients(name))
            if index or (match != "path" and _is_label(cells)):
                continue  # whose numbers may be those of images by chance
            rows = Counter({cell: n for cell, n in cells.items() if find(cell) is not None})
            found = len(set(map(find, rows))), rows.total()
            if found > most and (match != "loose" or 2 * rows.total() > cells.total()):
                best, most = _ImageColumn(name, match, rows.total(), root, find), found
    return best


def _unique(paths: Iterable[str], of: Callable[[str], str]) -> dict[str, str]:
    """The paths by a part of each, where no other has the same."""
    found: dict[str, list[str]] = {}
    for path in paths:
        found.setdefault(of(path), []).append(path)
    return {part: only[0] for part, only in found.items() if len(only) == 1}


def _expect_column(form: Form, images: _Images) -> _ImageColumn:
    """The column of images of a table that was put together."""
    column = _best_column(form, images)
    assert column is not None
    return column


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


def _is_label(cells: Counter[str]) -> bool:
    """Whether cells are 1 and 0, in more rows than images have."""
    return all(Cells({}).number(cell) is not None for cell in cells) and cells.total() > 2 * len(cells)


def _other_images(
    sheet: Sheet, columns: Sequence[str], images: _ImageColumn, used: Collection[str | None]
) -> Iterator[tuple[str, int]]:
    """The columns that name other images than the one of images, and how many."""
    for name in columns:
        cells = {*sheet.cells(sheet.header.index(name))} - {""}
        words = [cell for cell in cells if not (images.text or cell.replace(".", "").isdigit())]
        others = {*map(images.find, words)} - {None, *used}
        if 2 * len(others) > len(cells):
            yield name, len(others)


def _is_split(cells: Sequence[str]) -> bool:
    words = {cell.casefold() for cell in cells}
    return len(words - {""}) > 0 and words <= SPLIT_WORDS.keys()
