"""The labels of a hospital's table: a column for each class, or one column that lists the classes."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from typing import NamedTuple

import numpy as np
import tomli_w
from numpy.typing import NDArray
from pydantic import Field

from suture.core.errors import LabelError, check_known, unknown
from suture.core.labels import LabelSet, LabelType, canonical, canonical_or_none
from suture.core.printable import number_of
from suture.data.cells import Cells, Meaning
from suture.data.dataset import DatasetConfig
from suture.data.reading import Sheet, indicators, rows_text

NO_FINDING = "No Finding"
"""In a list of findings: none of the classes is present. It is no class of its own there."""

_QUOTED = re.compile(r"""'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)"|([^\s,;'"][^,;'"]*)""")

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
    return [name.strip() for name in cell.split(separator) if name.strip()]


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
        return _listed(sheet, config)
    labels, positions = _label_columns(sheet, config, others)
    return _FoundLabels(labels, *_values(sheet, positions, config))


def _listed(sheet: Sheet, config: LabelConfig) -> _FoundLabels:
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
    blank = cells.count("")
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
            columns = _chosen(sheet, columns, config)
        labels = LabelSet.of([name for name, _ in columns], config.synonyms, config.label_type)
    except LabelError as error:
        bad = next((name for name, _ in columns if canonical_or_none(name, config.synonyms) is None), None)
        raise LabelError(f"{sheet.path}{':' if bad is None else ', column'} {error}") from error
    return labels, [i for _, i in columns]


def _chosen(sheet: Sheet, columns: list[tuple[str, int]], config: LabelConfig) -> list[tuple[str, int]]:
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
    said = meaning.said(chain.from_iterable(map(sheet.cells, positions)))
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
