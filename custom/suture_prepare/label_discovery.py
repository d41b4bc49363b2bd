"""Which columns of a hospital's table are labels, and why the others are not."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np

from suture.core.errors import DataError, LabelError
from suture.core.escaping import number_of
from suture.core.labels import canonical, canonical_or_none, is_generic, key
from suture.core.vocabulary import CANONICAL
from suture.data.patient_columns import plain_words
from suture.data.readers.hospital import (
    FEW,
    NO_FINDING,
    HospitalConfig,
    blank_findings,
    find_labels,
    inline,
    listed_names,
    values_line,
)
from suture.data.reading import Form, Sheet
from suture.data.table import Cells, Meaning
from suture_prepare.gathering import legend_of

_LIST_SEPARATORS = ("|", ";", ",", "\n", " + ", " & ", " und ", " and ")
_JOINED = re.compile(r"(?i)\s*(?:[|;,+&\n]|/(?!o\b))\s*|\s+(?:und|and|oder|or|et|ou|y|o|e|mit|with|vs)\s+")
_HEDGE = (
    r"no|not|non|without|kein\w*|ohne|nicht|sin|sans|sem|senza|pas|r/o|rule out|(?:negative|suspicious) for"
    r"|exclu\w+|ausschlu\w+|ausgeschlossen|v\. ?a|va|verdacht|verdächtig|susp\w*|sospech\w+|possibl\w+"
    r"|posible|probabl\w+|likely|query|questionable|doubtful|uncertain|fraglich\w*|m(?:ö|oe)glich\w*"
    r"|wahrscheinlich\w*|evtl|eventuell\w*|z\. ?n|zn|zustand nach|status post|history of|previous"
)
_HEDGED = re.compile(
    rf"(?i)^(?:(?:{_HEDGE}|evidence|of|for|auf|von|de)\b[.:]? *)+|(?: +\(?(?:{_HEDGE})\b\.?)+\)?$"
)
"""Words that say of a finding that it is absent, or in doubt."""
_NO_LABEL = re.compile(
    r"(?i)(unnamed.*|index|row|.*\bid|(patient)?[ _-]?(sexe?|gender|geschlecht|sexo|sesso)([ _].*)?|male"
    r"|female|(patient)?[ _-]?(age|alter|edad)([ _-](group|class|in|at|over|under|years?).*)?|view.*"
    r"|projection|ap|pa|ap.pa|frontal|lateral|frontal.lateral|inpatient|quality|complete\?|.*_complete|redcap_.*)$"
)
"""Columns of two values that are no finding. A label of such a name is added to `labels` by hand."""
_CLASS = re.compile(
    r"(?i)(class|label|diagn[oó][sz]\w*|dx|disease|(histo)?patholog\w*|condition|target|finding|befund|klasse"
    r"|histolog\w*|sub[ _-]?type|entity|categor[yi]\w*|kategorie"
    r"|(medical[ _-]?|sub)?(special(i?ty|ties)|fach(gebiet|richtung))"
    r"|(tumou?r|polyp|tissue|cancer|nodule|lesion)s?[ _-]?(type|class|kind))s?[ _-]?\d*$"
)
"""Columns of one word for each image, which is its class whatever the vocabulary knows."""

_NO_CLASS = re.compile(
    r"\b(sexe?|gender|geschlecht|sexo|sesso|view\w*|projection|projektion|ansicht|vista|incidence|orientation"
    r"|device|scanner|camera|manufacturer|model|vendor|hersteller|gerat|equipment|modality|modalitat|sequence"
    r"|protocol|plane|filter|ward|stations?|departments?|abteilung|clinic\w*|hospitals?|klinik(um)?|krankenhaus"
    r"|cent(er|re)s?|zentrum|institut\w*|sites?|country|region|city|place|room|location|lokalisation|localisation"
    r"|anatom\w*|organ|part|area|seite|side|laterality|left|eye|auge|lado|cote|quadrant|segment"
    r"|splits?|folds?|sets?|subset|partition|cohort|phase|source|dataset|batch|series|visit|patients?|case|study"
    r"|readers?|raters?|radiolog\w*|annotators?|observers?|graders?|physician|arzt|operator|technician|user"
    r"|ids?|nr|no|num|number|nummer|key|mrn|age|alter|date|datum|year|jahr|month|day|weekday|time|shift|race|ethnic\w*|language|smok\w*|insurance"
    r"|status|quality|comments?|notes?|report|text|format|file\w*|folder|path|type|art|priority|consent"
    r"|treatment|therapy|medication|contrast|inpatient)\b"
)
"""Words of names of columns that sort images by something else than their classes."""

_SORTED = re.compile(
    r"(?i)[mfwdlr]|male|female|männlich|weiblich|homme|femme|left|right|both|bilateral|links|rechts|o[ds]|pa|ap|ll"
    r"|lat|lateral|frontal|oblique|cc|mlo|axial|sagittal|coronal|cr|dx|ct|mr|mg|us|xa|train(ing)?|val(idation)?"
    r"|test|(in|out)patient|supine|erect|prone"
)
"""Cells that are a sex, side, view, modality or split, whatever the column is called."""

_NUMBERED = re.compile(r"(?i)(?!p?[tnm]\d|g(rade)?\b|stage|stadium|typ|class)[^\W\d_]+[_ -]?\d+")
"""Cells such as w0 and IL_17, which name somebody or something; T1 and grade 2 do not."""

_MISSING = re.compile(r"(?i)-?9{1,4}|-9{1,4}[.,]0|77|88|-[78]|none|missing")
"""What statistics programs and pandas write for a missing 1 or 0; 9 may be a grade in other columns."""

_VALUE = re.compile(
    r"(?i)(is)?[ _-]?(confidence|value|label[ _-]?value|present[ea]?|presence|positive|exists|result|answer"
    r"|score|prob|probability|vorhanden|wert|valeur|valor)"
)
"""Columns that say whether the finding of their row is present, beside a column that names it."""

_NUMBER = re.compile(r"[-+]?\d*[.,]?\d+(e[-+]?\d+)?", re.IGNORECASE)

_MEASURED = re.compile(r"[-+]?\d+[^\d]\d")
"""Cells such as 1,80 and 2024-03-01, which are neither words nor grades."""

_SHARE = re.compile(r"0?[.,]\d+|[01]")
"""Numbers that say how sure somebody is of a finding, by which words are not meant."""

_MARKS = {"x", "✓", "✔", "√", "☑", "✗", "*", "•", "+"}
"""What is written into a column whose other cells are blank."""

CONSTANT = "it has one value in every row"
"""Why many a column is no label."""

_MOST_CLASSES = 200
_MOST_WORDS = 50
"""Classes of a column that only its name says to be one."""
_MOST_OFFERED, _MOST_GRADES = 30, 12
"""Words, and numbers, of a column that a person is asked about."""


@dataclass(frozen=True)
class Labels:
    """What the labels of a table seem to be.

    Attributes:
        data: the keys of [data].
        reasons: why, by key.
        warnings: what a person should look at.
        left_out: why a column is no label, by column.
        doubtful: columns that are labels by their cells, and not by their names.
        offered: words of columns that may be the classes, by column.
        one_class: whether the table can have exactly one class for each image.
        is_draft: whether a person has to say which columns are labels, or what their cells mean.
    """

    data: dict[str, Any]
    reasons: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    doubtful: tuple[str, ...] = ()
    offered: Mapping[str, Sequence[str]] = field(default_factory=dict)
    one_class: bool = True
    is_draft: bool = False


def discover_labels(
    sheet: Sheet,
    taken: Collection[str],
    refused: Collection[str],
    images: str,
    named: Mapping[str, str],
    known: Mapping[str, Any],
    others: Sequence[Form],
) -> Labels:
    """Look for the label columns of a table, or for its column of findings.

    Args:
        taken: columns that have another meaning.
        refused: columns of which a person says that they are no finding.
        images: the column of images.
        named: findings that a person has named, by column.
        known: keys of [data] that a published table has.
        others: tables that may say what the numbers of classes mean.

    Raises:
        DataError: nothing may be a label.
        LabelError: two labels are one.
    """
    free = [name for name in sheet.header if name and name not in taken]
    columns, left_out, asked, values, offered = _label_columns(
        sheet, [name for name in free if name not in refused], named
    )
    left_out |= {name: "you answered that it is not a finding" for name in free if name in refused}
    if "finding_column" in known:
        free = [known["finding_column"]]
    elif "labels" in known:
        columns, left_out, asked, offered, free = list(known["labels"]), {}, {}, {}, []
        values = known.get("values", {})
    listed = _finding_columns(sheet, [c for c in free if c not in refused], columns, known, others)
    if (listed and not any(map(_is_known, columns))) or "finding_column" in known:
        if not listed:
            raise _no_labels(sheet, asked.values())
        rest = [] if "finding_column" in known else [name for name in free if name not in refused]
        found = _list_classes(sheet, listed, rest, images)
        left_out |= dict.fromkeys(columns, f"{found.data['finding_column']!r} lists the findings")
        asked, offered = {}, {}  # `_list_classes` asks what a column says of the findings
    else:
        found = _in_columns(sheet, columns, named, values)
    for column in map(found.data.get, ("finding_column", "value_column")):
        left_out.pop(str(column), None)
    warnings = (*asked.values(), *found.warnings)
    if not found.data["labels"]:
        if not asked:
            raise _no_labels(sheet, ())
        question = {"labels": "answer the question above, and name the columns that are findings"}
        return Labels({"labels": []}, question, warnings, left_out, offered=offered, is_draft=True)
    if (
        found.one_class
        and not found.is_draft
        and _exclusive(sheet, {"synonyms": named, **found.data}, images)
    ):
        found.data["label_type"] = "multiclass"
        found.reasons["label_type"] = (
            'every image has exactly one class; "multilabel" if one may have several'
        )
    return replace(found, warnings=warnings, left_out=left_out, offered=offered)


def _in_columns(
    sheet: Sheet, columns: list[str], named: Mapping[str, str], values: Mapping[str, Meaning]
) -> Labels:
    """Labels with a column each; those that a person has named are beyond doubt.

    Args:
        named: names of classes by column: a person's, and those of columns whose own cannot be one.
        values: what their marks and missing codes mean.
    """
    marks = 1 in values.values()
    own = {column: of for column, of in named.items() if canonical_or_none(column) is None}
    doubtful = [c for c in columns if not _is_known(own.get(c, c)) and (c in own or c not in named)]
    data: dict[str, Any] = {"labels": columns}
    reasons = {"labels": "their cells are 1, 0, yes, no or blank"}
    if values:
        data["values"] = dict(values)
        reasons["values"] = "codes of missing values"
    if marks:
        reasons = {"values": "every cell is marked or blank, so blank is absent", "labels": "marked or blank"}
    questions = _doubt(doubtful, named)
    if values and not marks:
        questions.append(f"{', '.join(map(repr, values))} beside 1 and 0 count as missing, hence unknown")
    cells = {cell for name in columns for cell in sheet.first(name)}
    if columns and not marks and "" in cells and 0.0 not in map(Cells({}).number, cells):
        ask = "no label is 0, and blank is unknown; if a blank cell means absent, add this line:\n"
        questions.append(ask + inline("values", {"": 0}))
    return Labels(data, reasons, tuple(questions), doubtful=tuple(doubtful))


def _list_classes(
    sheet: Sheet, columns: Mapping[str, dict[str, Any]], others: Collection[str], images: str
) -> Labels:
    """Labels that a column lists, and what says of them whether they are present.

    Args:
        columns: the keys of [data] for each column that lists findings, the best first.
        others: columns that may say something of the findings.
    """
    name, *more = columns
    valued = _value_column(sheet, name, [other for other in others if other not in columns], images)
    reasons = {"finding_column": "its cells list the findings that are present"} | valued.reasons
    warnings = [*valued.warnings, *blank_findings(sheet, sheet.column(name, ""), name)]
    if more:
        warnings.append(
            f"column {', '.join(map(repr, more))} is not read, and its findings count as absent; only "
            f"{name!r} is read. Join these columns into one, with a finding_separator between the "
            "findings, or remove those that list no findings of the image"
        )
    data = columns[name] | valued.data
    if values := columns[name].get("values", {}) | valued.data.get("values", {}):
        data["values"] = values
    if unclear := [word for word, meaning in columns[name].get("values", {}).items() if meaning == "?"]:
        warnings.append(_ask_unclear(name, unclear))
        reasons["values"] = "answer the question above"
    return replace(
        valued,
        data=data,
        reasons=reasons,
        warnings=tuple(warnings),
        one_class=valued.one_class and not more,
        is_draft=valued.is_draft or bool(unclear),
    )


def _doubt(columns: list[str], named: Mapping[str, str]) -> list[str]:
    """What to ask about columns of 1 and 0 whose names the vocabulary lacks.

    Args:
        named: findings that are named already, by column: a key may be in suture.toml once.
    """
    unnamed = [repr(column) for column in columns if is_generic(column)]
    others = [repr(column) for column in columns if not is_generic(column)]
    questions = []
    if unnamed:
        what = "s {} do not say which finding each" if unnamed[1:] else " {} does not say which finding it"
        names = {**named, **{c: "NAME OF THE FINDING" for c in columns if is_generic(c)}}
        ask = f"column{what.format(', '.join(unnamed))} is; {'write' if named else 'add'} this line:\n"
        questions.append(ask + inline("synonyms", names))
    if others:
        ask = "are {} findings? If not, remove them" if others[1:] else "is {} a finding? If not, remove it"
        questions.append(f"{ask.format(', '.join(others))} from labels")
    return questions


class NoLabelsError(DataError):
    """No column of a table is a label."""


def _no_labels(sheet: Sheet, warnings: Collection[str]) -> NoLabelsError:
    asked = "".join(f"\n{warning}" for warning in warnings)
    return NoLabelsError(
        f"{sheet.path} has no label columns: no column has only 1, 0, yes, no or blank cells, or lists "
        f"findings. Its columns are {', '.join(filter(None, sheet.header))}.{asked}\nWrite 1 and 0 into the "
        "table, or write suture.toml by hand (docs/data.md)"
    )


def _label_columns(
    sheet: Sheet, names: list[str], named: Mapping[str, str]
) -> tuple[list[str], dict[str, str], dict[str, str], dict[str, Meaning], dict[str, list[str]]]:
    """The label columns, why the other columns are none, what to ask about some of those, what the marks and
    missing codes of label columns mean, and the words of columns that may be classes.
    """
    meaning = Cells({})
    labels: list[str] = []
    marked: dict[str, set[str]] = {}
    left_out: dict[str, str] = {}
    asked: dict[str, str] = {}
    missing: set[str] = set()
    offered: dict[str, list[str]] = {}
    for name in names:
        cells = sheet.first(name)
        words = {*cells} - {""}
        numbers = {*map(meaning.number, cells)}
        strange = {cell for cell in words if meaning.number(cell) is None}
        coded = {0.0, 1.0} <= numbers and all(map(_MISSING.fullmatch, strange))
        if len({*cells}) == 1 and (strange or _NO_LABEL.match(name)):
            left_out[name] = CONSTANT
        elif words and {cell.casefold() for cell in words} <= _MARKS and "" in cells:
            marked[name] = strange
            labels.append(name)
        elif strange and not coded:
            left_out[name] = f"{number_of(len(strange), 'value')} other than 1, 0, yes, no or blank"
            if all(map(_SHARE.fullmatch, strange)) and not _NO_LABEL.match(name):
                left_out[name] = f"its numbers lie between 0 and 1, such as {min(strange)}"
                asked[name] = "If it is a finding, choose a threshold, and write 1 and 0 into the column"
            elif _may_be_classes(name, words, len(cells)):
                digits = all(map(str.isdigit, words))
                offered[name] = sorted(words, key=lambda word: (int(word) if digits else 0, word))
                left_out[name] = f"its values are {', '.join(offered[name])}"
                asked[name] = _ask_classes(name, offered[name])
        elif not numbers & {0.0, 1.0}:
            left_out[name] = "it is blank, or unknown, in every row"
        elif _NO_LABEL.match(name):
            left_out[name] = "its name does not sound like a finding; if it is one, add it to labels"
        elif canonical_or_none(name, named) == NO_FINDING:
            left_out[name] = "it says that nothing was found; that is not a class"
        else:
            try:
                canonical(name, named)
                labels.append(name)
                missing |= strange
            except LabelError as error:
                left_out[name], asked[name] = "its name cannot be a class name", str(error)
    few = {name: words for name, words in offered.items() if len(words) <= FEW}
    line = _meanings({*chain(*few.values())}, alone=not labels)  # a key may be in suture.toml once
    for name in few:
        asked[name] += f"\nIf it is a finding, add it to labels, and this line:\n{line}"
    if marked and any("" in sheet.first(name) for name in labels if name not in marked):
        for name in marked:  # blank is unknown in other columns
            labels.remove(name)
            left_out[name] = "it is marked or blank"
            asked[name] = (
                "Blank is unknown in other columns. If it is a finding, write 1 and 0 into the column"
            )
        marked = {}
    values: dict[str, Meaning] = dict.fromkeys(sorted(missing), "unknown")
    if marked:
        values |= {**dict.fromkeys(sorted(set().union(*marked.values())), 1), "": 0}
    asked = {name: f"column {name!r} is left out: {left_out[name]}. {ask}" for name, ask in asked.items()}
    return labels, left_out, asked, values, offered


def _may_be_classes(name: str, words: Collection[str], n: int) -> bool:
    """Whether a column of n cells with these words may be classes or grades: few words, repeated.

    Not where its name or its words are those of a sex, view, device, place or split.
    """
    few = 2 <= len(words) <= _MOST_OFFERED and 2 * len(words) <= n and not any(map(_MEASURED.match, words))
    grades = all(map(_NUMBER.fullmatch, words))
    sorts = any(all(map(kind.fullmatch, words)) for kind in (_SORTED, _NUMBERED)) or (
        _NO_CLASS.search(plain_words(name)) and not _CLASS.match(name)
    )
    return few and not sorts and not _NO_LABEL.match(name) and (not grades or len(words) <= _MOST_GRADES)


def _ask_classes(name: str, words: Sequence[str]) -> str:
    """The lines that make classes of the words of a column."""
    lines = f"finding_column = {json.dumps(name)}"
    if all(map(_NUMBER.fullmatch, words)):
        lines += f"\n{inline('synonyms', {word: f'{name} {word}' for word in words})}"
    elif unclear := _unclear(words, {}):
        lines += f'\n{values_line(unclear)}  # "unknown" for ?, or remove it and name its class in synonyms'
    return f"If they are the names of the classes, write in place of labels:\n{lines}"


def _ask_unclear(name: str, words: Sequence[str]) -> str:
    """What to write for values of a column of findings that are no class by themselves."""
    ask = (
        f'column {name!r}: what do {", ".join(map(repr, words))} mean? In values, write "unknown" in place '
        "of ?; or remove the word there, and write what it means, a class of labels or No Finding"
    )
    if joint := next((match[0].strip(" ") for word in words if (match := _JOINED.search(word))), None):
        sign = json.dumps(f" {joint} " if joint.isalpha() else joint)
        ask += f", or, if it is several, add them to labels and set finding_separator = {sign}"
    return f"{ask}:\n{inline('synonyms', dict.fromkeys(words, '?'))}"


def _meanings(words: Collection[str], *, alone: bool) -> str:
    """The line that says what words mean: of grades, present from one on; of others, which a person writes.

    Args:
        alone: whether no other column has the meaning of 1 and 0.
    """
    own = [word for word in words if alone or Cells({}).number(word) is None]
    if len(words) < 3 or not all(map(str.isdigit, words)) or not (alone or "0" in words):
        line = values_line(word for word in words if Cells({}).number(word) is None)
        return line if "?" not in line else f'{line}  # 1, 0 or "unknown" in place of each ?'
    first = sorted(words, key=int)[len(words) // 2 if alone else 1]
    grades: dict[str, Meaning] = {word: 1 if int(word) >= int(first) else 0 for word in sorted(own, key=int)}
    return f"{inline('values', grades)}  # present from {first} on"


def _finding_columns(
    sheet: Sheet,
    names: list[str],
    labels: Collection[str],
    known: Mapping[str, Any],
    forms: Sequence[Form],
) -> dict[str, dict[str, Any]]:
    """The keys of each column that lists findings of the vocabulary, or classes by its name, in order.

    Args:
        labels: columns of 1 and 0, which are codes of classes only where a legend names both.
        known: keys of [data] that a published table has.
        forms: tables that may be the legend.
    """
    found: dict[str, tuple[tuple[bool, bool, float], dict[str, Any]]] = {}
    named = known.get("synonyms", {})
    meaning = Cells(known.get("values", {}))
    for name in names:
        cells = [cell for cell in sheet.first(name) if cell]
        for separator in _LIST_SEPARATORS:
            lists = Counter(
                tuple(n for n in listed_names(c, separator) if not meaning.leaves_open(n)) for c in cells
            )
            parts = Counter(part for one, n in lists.items() for part in one * n)
            bracketed = all(cell[0] == "[" for cell in cells)
            if not parts or len(parts) > _MOST_CLASSES or not (bracketed or _separates(lists)):
                continue
            keys: dict[str, Any] = {"finding_column": name, "finding_separator": separator}
            keys |= {"values": known["values"]} if "values" in known else {}
            own = dict(named)
            coded = _CLASS.match(name) and all(part.isdigit() for part in parts)
            if coded and (legend := legend_of({*parts}, forms)):
                own = keys["synonyms"] = legend
            elif name in labels:
                continue
            path = known.get("finding_path") or _path(parts)
            unclear = Counter({part: parts.pop(part) for part in _unclear(parts, own, path)})
            if not parts:
                continue
            if unclear:
                keys["values"] = {**keys.get("values", {}), **dict.fromkeys(unclear, "?")}
            if path:
                keys["finding_path"] = path
                parts = Counter(name.strip() for part in parts.elements() for name in part.split(path))
            known_ones = sum(n for part, n in parts.items() if "synonyms" in keys or _is_known(part))
            share = known_ones / (parts.total() + unclear.total())
            if (
                share >= 0.5
                or name == known.get("finding_column")
                or ((_CLASS.match(name) or (bracketed and len(lists) > 1)) and _is_class_list(parts))
            ):
                classes = sorted(
                    {c for part in parts if (c := canonical_or_none(part, own)) and c != NO_FINDING}
                )
                # A column of one finding in every row comes last; a separator counts where it separates.
                several = [one for one in lists if len(one) > 1]
                divides = several and all(any((part,) in lists for part in one) for one in several)
                rank = len(lists) > 1, bool(divides), share
                if classes and (name not in found or rank > found[name][0]):
                    found[name] = rank, keys | {"labels": classes}
    ordered = sorted(found, key=lambda name: (found[name][0][0], found[name][0][2]), reverse=True)
    varied = [name for name in ordered if found[name][0][0]] or ordered[:1]
    return {name: found[name][1] for name in varied}


def _unclear(names: Collection[str], own: Mapping[str, str], path: str = "") -> list[str]:
    """Those of the values of a column that are no class by themselves: a person has to say what they are.

    A number, a mark, yes or no, what cannot be a name, and what is made of other values or known classes:
    several, joined, or one that is denied or doubted.
    """
    parts_of = {name: [part.strip() for part in name.split(path)] if path else [name] for name in names}
    classes = {canonical_or_none(part, own) for part in chain(*parts_of.values())} - {None} | {*CANONICAL}
    given = {*map(key, own)}

    def is_made_of_others(name: str) -> bool:
        text = name.replace("_", " ")
        others = [_HEDGED.sub("", part).strip(" ?-") for part in _JOINED.split(text)]
        return others != [text] and all(canonical_or_none(other, own) in classes for other in others)

    return sorted(
        name
        for name in names
        if key(name) not in given
        and (
            _NUMBER.fullmatch(name)
            or _MISSING.fullmatch(name)
            or name.casefold() in _MARKS
            or Cells({}).number(name) is not None
            or not re.search(r"\w", name)
            or canonical_or_none(name) is None
            or (not _is_known(name) and any(map(is_made_of_others, parts_of[name])))
        )
    )


def _path(names: Collection[str]) -> str:
    """The sign between parents and children in names such as Pneumonia/Viral; empty where there is none.

    In "Mass/Nodule" it means or: a parent has two children, or one with a child of its own.
    """
    for sign in "/>":
        paths = [[part.strip() for part in name.split(sign)] for name in names if sign in name]
        above = Counter(path[0] for path in paths)
        known = all(all(path) and (above[path[0]] > 1 or path[0] in names) for path in paths)
        known = known and not any(child in names for path in paths for child in path[1:])
        if paths and known and (max(map(len, paths)) > 2 or max(above.values()) > 1):
            return sign
    return ""


def _separates(lists: Collection[tuple[str, ...]]) -> bool:
    """Whether what is between separators are names: one of them is in another cell, or all are known.

    In "Melanoma, NOS" a comma belongs to the name.
    """
    several = [one for one in lists if len(one) > 1]
    times = Counter(part for one in lists for part in {*one})
    return all(all(map(_is_known, one)) or any(times[part] > 1 for part in one) for one in several)


def _value_column(sheet: Sheet, findings: str, others: Collection[str], images: str) -> Labels:
    """The column that says whether the finding of a row is present; without one, a row says that it is.

    Raises:
        DataError: a column of such a name has values that are neither present nor absent.
    """
    meaning = Cells({})
    asked: dict[str, set[str]] = {}
    one_class = True
    several_rows = len({*sheet.column(images, "")}) < len(sheet.rows)
    for name in others:
        cells = sheet.first(name)
        if len({*cells}) == 1:
            continue
        strange = {cell for cell in cells if meaning.number(cell) is None}
        known = {meaning.number(cell) for cell in cells} & {0.0, 1.0}
        few = len(strange) <= FEW
        numbers = several_rows and all(map(_NUMBER.fullmatch, strange))
        if _VALUE.fullmatch(name) and (known or strange) and (known or few or numbers):
            return _read_values(sheet, name, strange, 1.0 in known)
        both = len(known) == 2 and few and not _NO_LABEL.match(name)
        if both or (strange and few and _may_be_classes(name, {*cells} - {""}, len(cells))):
            asked[name] = strange
        one_class = one_class and not both
    if not asked:
        return Labels({}, {}, one_class=one_class)
    words = set().union(*asked.values())
    lines = f"value_column = {json.dumps(min(asked))}" + (f"\n{values_line(words)}" if words else "")
    question = (
        f"column {', '.join(map(repr, asked))} is not read, and every finding in {findings!r} counts as "
        f"present. If one says whether a finding is present, write its name and what its words mean:\n{lines}"
    )
    return Labels({}, {}, (question,), one_class=one_class)


def _read_values(sheet: Sheet, name: str, strange: Collection[str], positive: bool) -> Labels:
    """The keys of a value column, where the words that have no meaning are few.

    They are unknown beside words that mean present (`positive`); else a person has to say which means it.

    Raises:
        DataError: they are many, as of probabilities.
    """
    if len(strange) > FEW:
        raise DataError(
            f"{sheet.path}, column {name!r}: {number_of(len(strange), 'value')} other than 1, 0, yes, "
            f"no or blank, such as {min(strange)!r}, so it is not clear which findings are present. "
            "Write 1 and 0 into the column, by a threshold that you choose, or rename it if it says "
            "something else"
        )
    data: dict[str, Any] = {"value_column": name, "repeated": "merge"}
    reasons = {"value_column": "says whether the finding of the row is present; other classes are unknown"}
    if not strange:
        return Labels(data, reasons)
    data["values"] = dict.fromkeys(sorted(strange), "unknown" if positive else "?")
    reasons["values"] = "write 1 or 0 where the meaning is known"
    ask = f"column {name!r}: what do {', '.join(map(repr, sorted(strange)))} mean?"
    return Labels(data, reasons, (ask + " They are read as unknown" * positive,), is_draft=not positive)


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


def _is_known(name: str) -> bool:
    return canonical_or_none(name) in CANONICAL
