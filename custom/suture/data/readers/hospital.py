"""A hospital's own table: image, patient, split, and one column per label.

    image,patient,split,Cardiomegaly,Pleural Effusion
    a/0001.png,P17,train,1,0
    a/0002.png,P23,test,0,

Where the site names a `text_column`, its cells are the documents, and the image column names them. Where it
names a `finding_column`, each cell of it lists the classes that are present.

A label cell is 1 (present), 0 (absent) or blank (unknown; never taken for absent); `suture.data.table` has
other words, and `values` those of the site. A multiclass table has at most one 1 in a row; a row of zeros is
an image of none of its classes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, compress
from operator import not_
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import tomli_w
from numpy.typing import NDArray
from pydantic import Field

from suture.core.errors import ConfigError, DataError, LabelError, check_known, unknown
from suture.core.escaping import number_of
from suture.core.labels import LabelSet, LabelType, canonical, canonical_or_none, check_value
from suture.core.validation import MOST_ATTRIBUTES
from suture.data.dataset import DatasetConfig
from suture.data.images import ImageSource
from suture.data.patient_columns import torn_patients
from suture.data.readers.image_list import ImageListConfig, find_split, within_root
from suture.data.reading import UTF8, Reading, Sheet, fault, indicators, read_sheet, row_faults, rows_text
from suture.data.table import Cells, Meaning, Table

NO_FINDING = "No Finding"
"""In a list of findings: none of the classes is present. It is no class of its own there."""

_QUOTED = re.compile(r"""'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)"|([^\s,;'"][^,;'"]*)""")

_DASHES = " -\u2013\u2014"
"""What people write into a cell of findings that has none, besides blanks."""

FEW = 6
"""A column of so few different words may be a label."""


class LabelConfig(DatasetConfig):
    """The keys of ``[data]`` that say how a hospital's table gives its labels.

    Attributes:
        finding_column: column that lists the classes that are present, instead of one column for each label.
            Classes that are not listed are absent; a blank cell is unknown. A cell may also be a list of
            Python or JSON, of which [] is No Finding.
        finding_separator: separator between classes in a cell of `finding_column`.
        finding_path: separator between a class and its child in `finding_column`: with "/", Pneumonia/Viral
            is both. Children of a class that is listed alone are unknown.
        value_column: column that says whether the findings of the row are present, in a table with a row for
            each image and finding. Classes in no row of an image are unknown.
        values: the meaning of cells of a label column, or of `value_column`: 1, 0 or "unknown". Plain words
            such as yes and no need no entry. In a list of findings, "unknown" is a word that is not a class,
            beside which classes that are not listed are unknown.
        label_type: ``multilabel``: an image can have any number of the classes; ``multiclass``: exactly one,
            which may be a class of another site.
    """

    finding_column: str | None = None
    finding_separator: str = Field(default="|", min_length=1)
    finding_path: str | None = Field(default=None, min_length=1)
    value_column: str | None = None
    values: dict[str, Meaning] = Field(default_factory=dict)
    label_type: LabelType = "multilabel"

    def idle(self) -> dict[str, str]:
        """As in the base, and what is for the other way to give labels."""
        idle = super().idle()
        if self.finding_column is None:
            remedy = "without finding_column; remove it, or name that column"
            return idle | dict.fromkeys(("finding_separator", "finding_path", "value_column"), remedy)
        if self.value_column is None and any(meaning != "unknown" for meaning in self.values.values()):
            idle["values"] = (
                'with finding_column, whose cells list classes, but for "unknown"; remove it, or name a '
                "value_column"
            )
        return idle


class _FoundLabels(NamedTuple):
    """The labels of a table.

    Attributes:
        labels: the classes of the columns of y.
        y: ``[n, c]``; 1, 0 or NaN.
        faults, notes: as in `Reading`.
    """

    labels: LabelSet
    y: NDArray[np.float32]
    faults: list[str]
    notes: tuple[str, ...]


def listed_names(cell: str, separator: str) -> list[str]:
    """Return the names in a cell that lists findings: between separators, or a list of Python or JSON.

    >>> listed_names("Mass| Edema ", "|"), listed_names("['Mass', \\"Crohn's disease\\"]", "|")
    (['Mass', 'Edema'], ['Mass', "Crohn's disease"])
    >>> listed_names("[]", "|"), listed_names("", "|")
    (['No Finding'], [])
    >>> listed_names("--", "|")
    []
    """
    if cell[:1] == "[" and cell[-1:] == "]":
        inner = cell[1:-1].strip()
        try:
            loaded = json.loads(cell)
        except (ValueError, RecursionError):
            loaded = [a or b or c for a, b, c in _QUOTED.findall(inner)]  # NumPy writes no commas
        names = [name.strip() for name in loaded if isinstance(name, str) and name.strip()]
        numbers = [str(number) for number in loaded if not isinstance(number, str) and number is not None]
        return names + numbers if inner else [NO_FINDING]
    return [name.strip() for name in cell.split(separator) if name.strip(_DASHES)]


def find_labels(sheet: Sheet, config: LabelConfig, others: Collection[str]) -> _FoundLabels:
    """Return the labels of a table.

    Args:
        others: the columns that have another meaning.

    Raises:
        DataError: there is no such column of findings.
        LabelError: no label column, or two that are one label.
        ConfigError: `labels` names a class that the table lacks.
    """
    if config.finding_column:
        return _read_listed(sheet, config)
    labels, positions = _label_columns(sheet, config, others)
    return _FoundLabels(labels, *_values(sheet, positions, config))


def _read_listed(sheet: Sheet, config: LabelConfig) -> _FoundLabels:
    """The labels of a table with one column of findings."""
    column, separator = config.finding_column or "", config.finding_separator
    cells = sheet.column(column, "[data] finding_column")
    meaning = Cells(config.values)
    named: list[set[str]] = []
    below: dict[str, set[str]] = {}
    unjudged = np.zeros(len(cells), dtype=np.bool_)
    for row, (cell, number) in enumerate(zip(cells, sheet.numbers, strict=True)):
        names = listed_names(cell, separator)
        judged = [name for name in names if not meaning.leaves_open(name)]
        unjudged[row] = len(judged) < len(names)
        try:
            paths = [_path(name, config) for name in judged]
            named.append({*chain(*paths)})
            for path in paths:
                for at, name in enumerate(path):
                    below.setdefault(name, set()).update(path[at + 1 :])
        except LabelError as error:
            where = f"{sheet.path} row {number}, column {column!r}"
            raise LabelError(f"{where}: {error}, or set finding_separator") from error
    labels, y = indicators([names - {NO_FINDING} if names else None for names in named], sheet.path)
    for row, given in enumerate(named):  # of a class that is listed alone, nobody says which child it is
        for name in given if config.finding_path else ():
            if not below[name] & given:
                y[row, [labels.index(child) for child in below[name]]] = np.nan
    y[unjudged] = np.where(y[unjudged] == 1, np.float32(1), np.float32(np.nan))
    faults: list[str] = []
    notes = blank_findings(sheet, cells, column)
    if unjudged.any():
        many = number_of(int(unjudged.sum()), "cell")
        notes += (
            f"{sheet.path}, column {column!r}: {many} with words for unknown, as are other classes there",
        )
    if config.value_column is not None:  # a row says of the classes that it names whether they are present
        position = sheet.position(config.value_column, "[data] value_column")
        values, faults, said = _values(sheet, [position], config)
        notes += said
        y = np.where(y == 1, values, np.float32(np.nan))
        # One that says so of `NO_FINDING` says of all classes that they are absent.
        y[np.array([names == {NO_FINDING} for names in named]) & (values[:, 0] == 1)] = 0
    if config.labels is not None:
        wanted = LabelSet.of(config.labels, config.synonyms, config.label_type)
        for name in wanted:
            check_known(f"[data] labels entry (in no row of {sheet.path})", name, labels)
        y = y[:, [labels.index(name) for name in wanted]]
        return _FoundLabels(wanted, y, faults, notes)
    return _FoundLabels(LabelSet(labels.names, config.label_type), y, faults, notes)


def _path(name: str, config: LabelConfig) -> list[str]:
    """The classes of a name in a list of findings: with `finding_path`, its ancestors first."""
    parts = name.split(config.finding_path) if config.finding_path else [name]
    return [canonical(part, config.synonyms) for part in parts]


def blank_findings(sheet: Sheet, cells: list[str], column: str) -> tuple[str, ...]:
    """A note of the blank cells of a column of findings, where there are any."""
    blank = sum(not cell.strip(_DASHES) for cell in cells)
    text = (
        f"{sheet.path}, column {column!r}: {number_of(blank, 'blank cell')}, read as unknown; where "
        f"nothing was found, write {NO_FINDING}"
    )
    return (text,) if blank else ()


def _label_columns(sheet: Sheet, config: LabelConfig, others: Collection[str]) -> tuple[LabelSet, list[int]]:
    """The label set and the position of each label's column."""
    columns = [(name, i) for i, name in enumerate(sheet.header) if name and name not in others]
    try:
        if config.labels is not None:
            columns = _choose(sheet, columns, config)
        labels = LabelSet.of([name for name, _ in columns], config.synonyms, config.label_type)
    except LabelError as error:
        bad = next((name for name, _ in columns if canonical_or_none(name, config.synonyms) is None), None)
        raise LabelError(f"{sheet.path}{':' if bad is None else ', column'} {error}") from error
    return labels, [i for _, i in columns]


def _choose(sheet: Sheet, columns: list[tuple[str, int]], config: LabelConfig) -> list[tuple[str, int]]:
    """The columns of the labels that the site names, in the order in which it names them."""
    wanted = LabelSet.of(config.labels or (), config.synonyms)
    found: dict[str | None, list[tuple[str, int]]] = {}
    for name, i in columns:
        found.setdefault(canonical_or_none(name, config.synonyms), []).append((name, i))
    for name in wanted:
        if name not in found:
            raise unknown(
                f"[data] labels entry (no such column in {sheet.path})", name, (n for n, _ in columns)
            )
    return [column for name in wanted for column in found[name]]


def _values(
    sheet: Sheet, positions: list[int], config: LabelConfig
) -> tuple[NDArray[np.float32], list[str], tuple[str, ...]]:
    """Labels [n, c], one fault per column with cells that have no meaning, and notes on words that do."""
    meaning = Cells(config.values)
    y = np.full((len(sheet.rows), len(positions)), np.nan, dtype=np.float32)
    strange: dict[int, dict[str, list[int]]] = {}
    for column, position in enumerate(positions):
        cells = sheet.cells(position)
        values = [meaning.number(cell) for cell in cells]
        y[:, column] = [np.nan if value is None else value for value in values]
        for cell, value, number in zip(cells, values, sheet.numbers, strict=True):
            if value is None:
                strange.setdefault(position, {}).setdefault(cell, []).append(number)
    words = {word for of in strange.values() if len(of) <= FEW for word in of}
    faults = [
        f"{sheet.path} {rows_text(sorted(chain(*of.values())))}, column {sheet.header[position]!r}: "
        f"{next(iter(of))!r} is not 1, 0 or blank (unknown); {_remedy(len(of), words)}"
        for position, of in strange.items()
    ]
    said = meaning.describe(chain.from_iterable(map(sheet.cells, positions)))
    return y, faults, tuple(f"{sheet.path}: {text}" for text in said)


def _remedy(different: int, words: set[str]) -> str:
    """What to do about a column with so many different cells that have no meaning."""
    others = "name the label columns as [data] labels"
    if different > FEW:
        return f"if the column is not a label, {others}"
    return f'add this line to [data], with 1, 0 or "unknown" for each ?, or {others}:\n{values_line(words)}'


def values_line(words: Iterable[str]) -> str:
    """The line of a suture.toml in which a person writes what cells mean; with a ? it is refused.

    >>> values_line(["nein", ""])
    'values = { "" = "unknown", "nein" = "?" }'
    """
    return inline("values", {word: "?" if word else "unknown" for word in sorted(words)})


def inline(key: str, table: Mapping[str, Meaning | str]) -> str:
    """Return the line of a TOML file that sets a key to a table of texts and numbers.

    >>> inline("synonyms", {"label": "Tuberculosis"})
    'synonyms = { "label" = "Tuberculosis" }'
    """
    texts = ((tomli_w.dumps({"text": text})[7:-1] for text in pair) for pair in table.items())
    return f"{key} = {{ {', '.join(' = '.join(pair) for pair in texts)} }}"


class HospitalConfig(LabelConfig, ImageListConfig):
    """A hospital's own table; `table` (CSV, .xlsx or .parquet) has a row for each image or document.

    Attributes:
        text_column: column of the documents, for data that are text; `image_column` then identifies the
            documents.
        attribute_column: column by which figures are reported separately, such as skin tone. It is not a
            label and not used in training.
        delimiter: separator between the cells of a text file.
        encoding: encoding of a text file, by its Python name.
        image_match: ``path`` matches an image by its path or file name, ``stem`` by its file name without the
            suffix, ``loose`` by either, whatever its case, the form of its accents, the zeros before a number
            and the first folders of its path.
        repeated: several rows with the same image: ``refuse`` reports an error, ``merge`` combines their
            labels (present before absent, absent before unknown), ``majority`` goes by more than half of the
            rows that say either (a tie is unknown), and a share such as 0.3 by at least that share of them.
    """

    dataset: Literal["hospital"] = "hospital"
    text_column: str | None = None
    attribute_column: str | None = None
    delimiter: str = Field(default=",", min_length=1, max_length=1)
    encoding: str = UTF8
    image_match: Literal["path", "stem", "loose"] = "path"
    repeated: Literal["refuse", "merge", "majority"] | Annotated[float, Field(gt=0, le=1)] = "refuse"

    def idle(self) -> dict[str, str]:
        """As in the bases, and what is for images."""
        idle = super().idle()
        if self.text_column is not None:
            idle["image_match"] = "for texts; remove it"
            idle.pop("partial")  # which leaves blank documents out
        if self.labels is None and self.finding_column is None:
            idle.pop("split_column", None)  # it says that this column is no label
        return idle

    @classmethod
    def text_in_table(cls, values: dict[str, Any]) -> bool:
        """Whether the site names a column of documents."""
        return bool(values.get("text_column"))


def read_hospital(config: HospitalConfig) -> Reading:
    """Reads the table of a hospital.

    Raises:
        DataError: the file cannot be read, a column is missing, or the attribute has too many values.
        LabelError: no label column, or two that are one label.
        ConfigError: `labels` names a class that the table lacks.
    """
    sheet = _sheet(config)
    images: Sequence[str] = sheet.column(config.image_column, "[data] image_column")
    absent = 0
    there: list[bool] = []
    if config.text_column is not None:
        written = sheet.column(config.text_column, "[data] text_column")
        there = list(map(bool, written)) if config.partial else []
    else:
        images = within_root(images, config, config.image_match)
        if config.partial:
            with ImageSource(config.root, config.follow_links) as source:
                there = [image in source for image in images]
    if any(there):  # what is wrong in a row that is left out does not matter
        absent = there.count(False)
        sheet, images = sheet.only(there), list(compress(images, there))
    patients = sheet.column(config.patient_column, "[data] patient_column")
    others = _other_columns(sheet, config)
    labels, y, faults, notes = find_labels(sheet, config, others)
    if labels.label_type == "multiclass":
        several = (y == 1).sum(axis=1) > 1
        y[several] = np.nan
        what = "several classes in a multiclass table; keep one 1 in a row, or write [data] label_type = "
        faults += fault(sheet, several, f'{what}"multilabel"')
    split, more = find_split(sheet, config, patients, y)
    texts, blank = _texts(sheet, config)
    attributes = _attributes(sheet, config)
    table = Table(labels, tuple(images), tuple(patients), y, split, config.root, texts, attributes)
    notes += _healthy_with_findings(sheet, config)
    if config.repeated != "refuse":
        faults += _contradictions(sheet, table)
        one_each = config.finding_column is not None and config.value_column is None  # a row has one finding
        notes += () if one_each and config.repeated == "merge" else _disagreements(sheet, table, config)
        sheet, table = _merge(sheet, table, config)
    kind: Literal["image", "document"] = "image" if texts is None else "document"
    faults += more + blank + row_faults(sheet, table.images, table.patients, table.split, kind)
    used = others | {config.finding_column or ""}
    if config.finding_column is None:
        used |= {name for name in sheet.header if canonical_or_none(name, config.synonyms) in labels}
    torn, said = torn_patients(sheet, config.patient_column, config.image_column, table.split, used)
    faults, notes = faults + torn, notes + said
    return Reading(table, tuple(faults), absent, notes, sheet.numbers)


def _sheet(config: HospitalConfig) -> Sheet:
    try:
        "".encode(config.encoding)
    except LookupError:
        raise ConfigError(
            f"unknown [data] encoding {config.encoding!r}; write utf-8, latin-1 or cp1252"
        ) from None
    return read_sheet(config.table, config.delimiter, config.encoding)


def _other_columns(sheet: Sheet, config: HospitalConfig) -> set[str]:
    """The columns that are no label."""
    others = {config.image_column, config.patient_column, config.split_column}
    for key in ("attribute_column", "text_column", "value_column"):
        if (name := getattr(config, key)) is not None:
            sheet.position(name, f"[data] {key}")
            others.add(name)
    return others


def _texts(sheet: Sheet, config: HospitalConfig) -> tuple[tuple[str, ...] | None, list[str]]:
    """The documents, where the site has such a column, and a fault for the blank ones."""
    if config.text_column is None:
        return None, []
    texts = sheet.column(config.text_column, "[data] text_column")
    return tuple(texts), fault(
        sheet,
        map(not_, texts),
        f"column {config.text_column!r} is blank; remove the row, or set [data] partial",
    )


def _attributes(sheet: Sheet, config: HospitalConfig) -> tuple[str, ...] | None:
    """The attribute of each row, empty where its cell is blank; None where the site names no column."""
    column = config.attribute_column
    if column is None:
        return None
    values = sheet.column(column, "[data] attribute_column")
    for value, number in zip(values, sheet.numbers, strict=True):
        try:
            check_value(value) if value else None
        except LabelError as error:
            raise DataError(f"{sheet.path} row {number}, column {column!r}: {error}") from error
    if len(found := {*values} - {""}) > MOST_ATTRIBUTES:
        raise DataError(
            f"{sheet.path}: column {column!r} has {len(found)} values; figures by attribute allow at "
            f"most {MOST_ATTRIBUTES}; name another [data] attribute_column, or group its values"
        )
    return tuple(values)


def _contradictions(sheet: Sheet, table: Table) -> list[str]:
    """A fault if rows of one image name several patients or splits."""
    first: dict[str, tuple[str, str]] = {}
    whose = zip(table.patients, table.split, strict=True)
    bad = [first.setdefault(image, of) != of for image, of in zip(table.images, whose, strict=True)]
    return fault(sheet, bad, "its patient or split differs from an earlier row of the same image")


def _disagreements(sheet: Sheet, table: Table, config: HospitalConfig) -> tuple[str, ...]:
    """A note on the images of which one row says present, and another absent."""
    present, absent = (
        {(table.images[row], column) for row, column in np.argwhere(table.y == value).tolist()}
        for value in (1, 0)
    )
    images = {image for image, _ in present & absent}
    counts = {"merge": "which counts as present", "majority": "of which the majority counts"}
    how = counts.get(str(config.repeated), f"present where a share of {config.repeated} says so")
    what = f"with rows that contradict each other about a class, {how}"
    return (f"{sheet.path}: {number_of(len(images), 'image')} {what}",) if images else ()


def _healthy_with_findings(sheet: Sheet, config: HospitalConfig) -> tuple[str, ...]:
    """A note on the images that list `NO_FINDING` and a finding, without a value for each."""
    if config.finding_column is None or config.value_column is not None:
        return ()
    healthy: dict[str, set[bool]] = {}
    images = sheet.column(config.image_column, "")
    for image, cell in zip(images, sheet.column(config.finding_column, ""), strict=True):
        names = listed_names(cell, config.finding_separator)
        of = (canonical_or_none(name, config.synonyms) == NO_FINDING for name in names)
        healthy.setdefault(image, set()).update(of)
    both = sum(len(of) > 1 for of in healthy.values())
    what = f"with {NO_FINDING} and a finding, which counts as present"
    return (f"{sheet.path}: {number_of(both, 'image')} {what}",) if both else ()


def _merge(sheet: Sheet, table: Table, config: HospitalConfig) -> tuple[Sheet, Table]:
    """One row for each image, with the labels of all of its rows; the first row has the rest."""
    first = {image: row for row, image in reversed(list(enumerate(table.images)))}
    keep = np.array([first[image] == row for row, image in enumerate(table.images)])
    at = np.array([first[image] for image in table.images], dtype=np.intp)
    votes = np.zeros((2, *table.y.shape), dtype=np.int64)
    for value in (0, 1):
        np.add.at(votes[value], at, table.y == value)
    absent, present = votes
    if config.repeated == "merge":
        y = np.where(present, 1.0, 0.0)
    elif config.repeated == "majority":
        y = np.where(present == absent, np.nan, present > absent)
    else:
        y = (present >= float(config.repeated) * (present + absent) - 1e-9).astype(np.float64)
    y[present + absent == 0] = np.nan
    return sheet.only(keep.tolist()), replace(table, y=y.astype(np.float32)).rows(keep)
