"""Which columns of a hospital's table are labels, and why the others are not."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from suture.core.errors import DataError, LabelError
from suture.core.labels import canonical, canonical_or_none
from suture.core.printable import number_of
from suture.core.vocabulary import CANONICAL
from suture.data.cells import Cells
from suture.data.readers.hospital import HospitalConfig
from suture.data.readers.hospital_labels import FEW, NO_FINDING, blank_findings, find_labels, values_line
from suture.data.reading import Sheet

_LIST_SEPARATORS = ("|", ";", ",")
_NO_LABEL = re.compile(
    r"^(unnamed.*|index|row|.*\bid|sex|gender|male|female|age|view|ap|pa|frontal|lateral|inpatient|quality)$",
    re.IGNORECASE,
)
"""Columns of two values that are no finding. A label of such a name is added to `labels` by hand."""
_CLASS = re.compile(
    r"^(class|label|diagnosis|diagnose|dx|disease|pathology|condition|target|finding|befund|klasse)s?$",
    re.IGNORECASE,
)
"""Columns of one word for each image, which is its class whatever the vocabulary knows."""

_MEASURED = re.compile(r"[-+]?\d+[^\d]\d")
"""Cells such as 1,80 and 2024-03-01, which are neither words nor grades."""

_MOST_CLASSES = 200
_MOST_WORDS = 50
"""Classes of a column that only its name says to be one."""


@dataclass(frozen=True)
class Labels:
    """What the labels of a table seem to be.

    Attributes:
        data: the keys of [data].
        reasons: why, by key.
        warnings: what a person should look at.
        left_out: why a column is no label, by column.
        doubtful: columns that are labels by their cells, and not by their names.
    """

    data: dict[str, Any]
    reasons: dict[str, str]
    warnings: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    doubtful: tuple[str, ...] = ()


def discover_labels(sheet: Sheet, taken: Collection[str], refused: Collection[str], images: str) -> Labels:
    """Look for the label columns of a table, or for its column of findings.

    Args:
        taken: columns that have another meaning.
        refused: columns of which a person says that they are no finding.
        images: the column of images.

    Raises:
        DataError: there are no labels.
        LabelError: two of them are one label.
    """
    free = [name for name in sheet.header if name and name not in taken]
    columns, left_out, asked = _label_columns(sheet, [name for name in free if name not in refused])
    left_out |= {name: "you said that it is no finding" for name in free if name in refused}
    listed = _finding_column(sheet, [name for name in free if name not in (*columns, *refused)])
    if listed and not any(map(_known, columns)):
        name, data = listed
        left_out |= dict.fromkeys(columns, f"{name!r} lists the findings")
        asked.pop(name, None)
        reasons = {"finding_column": "its cells list the findings that are present"}
        warnings = (*asked.values(), *blank_findings(sheet, sheet.column(name, ""), name))
        doubtful: list[str] = []
        left_out.pop(name, None)
    else:
        data, reasons, warnings = (
            {"labels": columns},
            {"labels": "their cells are 1, 0, yes, no or blank"},
            (),
        )
        doubtful = [column for column in columns if not _known(column)]
        warnings = (*asked.values(), *_doubt(doubtful))
    if not data["labels"]:
        raise _no_labels(sheet, warnings)
    if _exclusive(sheet, data, images):
        data["label_type"] = "multiclass"
        reasons["label_type"] = 'every image has exactly one class; "multilabel" if one may have several'
    return Labels(data, reasons, warnings, left_out, tuple(doubtful))


def _doubt(columns: list[str]) -> list[str]:
    if not columns:
        return []
    names = ", ".join(map(repr, columns))
    return [f"is {names} a finding? If not, remove it from labels"]


def _no_labels(sheet: Sheet, warnings: Collection[str]) -> DataError:
    asked = "".join(f"\n{warning}" for warning in warnings)
    if warnings:
        asked += "\nNo suture.toml is written yet: write 1 and 0 into the table, or it by hand (docs/data.md)"
    return DataError(
        f"{sheet.path} has no column of labels: none has only 1, 0, yes, no or blank cells, and none "
        f"lists findings; its columns are {', '.join(filter(None, sheet.header))}{asked}"
    )


def _label_columns(sheet: Sheet, names: list[str]) -> tuple[list[str], dict[str, str], dict[str, str]]:
    """The label columns, why the other columns are none, and what to ask about some of those."""
    meaning = Cells({})
    labels: list[str] = []
    left_out: dict[str, str] = {}
    asked: dict[str, str] = {}
    for name in names:
        cells = sheet.cells(sheet.header.index(name))
        numbers = Counter(meaning.number(cell) for cell in cells)
        strange = {cell for cell in cells if meaning.number(cell) is None}
        if strange and _may_be_grades(strange, len(cells)) and not _NO_LABEL.match(name):
            values = ", ".join(sorted({cell for cell in cells if cell}))
            left_out[name] = f"its values are {values}"
            asked[name] = (
                f"column {name!r} is left out: its values are {values}. If it is a finding, add it to "
                f'labels, and this line with 1, 0 or "unknown" for each:\n{values_line(strange)}'
            )
        elif strange:
            left_out[name] = f"{number_of(len(strange), 'value')} other than 1, 0, yes, no or blank"
        elif not (numbers[1.0] or numbers[0.0]):
            left_out[name] = "it is blank, or unknown, in every row"
        elif _NO_LABEL.match(name):
            left_out[name] = "its name is that of no finding; if it is one, add it to labels"
        elif canonical_or_none(name) == NO_FINDING:
            left_out[name] = "it says that nothing was found, which is no class"
        else:
            try:
                canonical(name)
                labels.append(name)
            except LabelError as error:
                left_out[name], asked[name] = "its name cannot be that of a class", f"left out: {error}"
    return labels, left_out, asked


def _may_be_grades(words: Collection[str], n: int) -> bool:
    """Whether a column of n cells with these words may be a finding: few words or whole numbers, repeated."""
    return len(words) <= FEW and len(words) < n / 2 and not any(map(_MEASURED.match, words))


def _finding_column(sheet: Sheet, names: list[str]) -> tuple[str, dict[str, Any]] | None:
    """The column that lists findings of the vocabulary, or else one of classes by its name, and its keys."""
    best: tuple[float, str, str, list[str]] | None = None
    for name in names:
        cells = [cell for cell in sheet.cells(sheet.header.index(name)) if cell]
        for separator in _LIST_SEPARATORS:
            parts = Counter(part.strip() for cell in cells for part in cell.split(separator) if part.strip())
            if not parts or len(parts) > _MOST_CLASSES:
                continue
            share = sum(n for part, n in parts.items() if _known(part)) / parts.total()
            if share >= 0.5 or (_CLASS.match(name) and _is_class_list(parts)):
                classes = sorted({c for part in parts if (c := canonical_or_none(part)) and c != NO_FINDING})
                if classes and (best is None or share > best[0]):
                    best = (share, name, separator, classes)
    if best is None:
        return None
    _, name, separator, classes = best
    return name, {"finding_column": name, "finding_separator": separator, "labels": classes}


def _is_class_list(parts: Counter[str]) -> bool:
    """Whether these words are the classes of a column: several, each mostly repeated, and no numbers."""
    few = 2 <= len(parts) <= _MOST_WORDS and parts.total() >= 2 * len(parts)
    return few and not any(part[0].isdigit() or part[0] in "+-" for part in parts)


def _exclusive(sheet: Sheet, data: Mapping[str, Any], images: str) -> bool:
    """Whether every image has exactly one of several classes."""
    config = HospitalConfig.model_validate({"root": sheet.path, "table": sheet.path, **data})
    y = find_labels(sheet, config, ()).y
    names = sheet.column(images, "")
    rows, classes = np.nonzero(y == 1)
    positives = {(names[row], int(label)) for row, label in zip(rows, classes, strict=True)}
    every = len(set(names))
    return bool(
        y.shape[1] > 1
        and not np.isnan(y).any()
        and len(positives) == every == len({name for name, _ in positives})
        and len({label for _, label in positives}) > 1
    )


def _known(name: str) -> bool:
    return canonical_or_none(name) in CANONICAL
