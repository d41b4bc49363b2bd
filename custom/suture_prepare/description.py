"""What the table of a hospital seems to say: the keys of its [data], with the reason for each."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import not_
from typing import Any

from suture.core.errors import DataError
from suture.core.escaping import number_of
from suture.core.labels import canonical_or_none, without_signs
from suture.data.images import Images, stem
from suture.data.patient_columns import patient_columns, plain_words
from suture.data.published import PublishedTable
from suture.data.readers.image_list import SPLIT_WORDS
from suture.data.reading import Form, Sheet, fault, rows_text
from suture.data.table import Cells
from suture_prepare.gathering import with_column, with_patients, with_splits
from suture_prepare.image_columns import ImageColumn, expect_column, other_images
from suture_prepare.label_discovery import Labels, discover_labels

_SPLIT = re.compile(r"^(split|set|subset|partition|fold)$", re.IGNORECASE)
_SPLIT_FLAG = re.compile(
    r"(?i)(is|in)[ _-]?(train|val|test)\w*|train(ing)?|(train|val|test)\w*[ _-](set|flag|split)"
)
"""Columns of 1 and 0 that say which rows are of a split."""
_SITES = re.compile(
    r"(hospital|cent(er|re)|institut(e|ion)|clinic|klinik|krankenhaus|zentrum|site|hopital)( ?(id|name))?"
)
MOST_SITES = 50
"""Of a table with a column of them."""


HOSPITAL = (
    PublishedTable("BRAX", ("DicomPath", "PngPath", "PatientID", "Cardiomegaly")),
    PublishedTable(
        "PadChest",
        ("ImageID", "ImageDir", "PatientID", "Labels", "Localizations"),
        {
            "finding_column": "Labels",
            "values": dict.fromkeys(("exclude", "unchanged", "suboptimal study"), "unknown"),
        },
    ),
    PublishedTable(
        "VinDr-CXR, labels by radiologist", ("image_id", "rad_id", "Aortic enlargement", "Cardiomegaly")
    ),
    PublishedTable(
        "VinDr-CXR, boxes", ("image_id", "class_name", "rad_id", "x_min"), {"finding_column": "class_name"}
    ),
    PublishedTable(
        "RSNA Pneumonia Detection Challenge",
        ("patientId", "x", "y", "width", "height", "Target"),
        {"patient_column": "patientId", "labels": ["Target"], "synonyms": {"Target": "Pneumonia"}},
    ),
    PublishedTable(
        "ISIC 2020",
        ("image_name", "patient_id", "diagnosis", "benign_malignant", "target"),
        {"labels": ["target"], "synonyms": {"target": "Melanoma"}},
    ),
    PublishedTable(
        "ISIC archive",
        ("isic_id", "lesion_id", "diagnosis_1", "diagnosis_3"),
        {"finding_column": "diagnosis_3", "synonyms": {"Melanoma, NOS": "Melanoma"}},
    ),
    PublishedTable(
        "Shenzhen and Montgomery chest X-rays",
        ("label",),
        {"labels": ["label"], "synonyms": {"label": "Tuberculosis"}},
        names=r"(CHN|MCU)CXR_\d+_[01]\.\w+$",
    ),
)
"""Those that the hospital's reader reads; each other reader declares its own (`readers.DataSet`)."""
_CHOICE = re.compile(r"\(choice=(.+)\)$")
_CODED = re.compile(r"(.+?)\s*[(\[]([^()\[\]]+)[)\]]", re.DOTALL)
"""A name of a column with the words of its cells, such as "Mass (0/1)"."""
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
        keys: of [data], for a column of classes or of grades.
        rows: a column, and its cell in the rows that are of this site; None for all rows.
    """

    patient: str | None = None
    no_labels: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, Any] = field(default_factory=dict)
    rows: tuple[str, str] | None = None


@dataclass(frozen=True)
class Discovery(Labels):
    """A guess at the [data] of one site: the labels of its table, and the other keys.

    Attributes:
        table: that was read.
        made: how it was put together.
        title: of the public data set whose table it is.
        colour, side: as of `suture_results.inspection.Sample`.
    """

    table: Sheet | None = None
    made: tuple[str, ...] = ()
    title: str = ""
    colour: bool = False
    side: int = 0

    @property
    def sheet(self) -> Sheet | None:
        """The table, where it was put together and is to be written; None where it is the file."""
        return self.table if self.made else None

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns of the table."""
        return tuple(filter(None, self.table.header)) if self.table else ()

    @property
    def rows(self) -> int:
        """The number of rows of the table."""
        return len(self.table.rows) if self.table else 0

    @property
    def has_splits(self) -> bool:
        """Whether the table, or the reader of a public data set, says which rows are for training."""
        return "split_column" in self.data or self.data["dataset"] != "hospital"

    @property
    def has_patients(self) -> bool:
        """Whether a column names the patients, or the reader of a public data set knows them."""
        return bool(self.data.get("patient_column") != self.data.get("image_column", ""))


@dataclass(frozen=True)
class _Guess:
    """The keys of a [data] in the making, and what is said of them."""

    data: dict[str, Any]
    reasons: dict[str, str]
    warnings: list[str]

    def note(self, key: str, value: Any, why: str) -> None:
        self.data[key], self.reasons[key] = value, why


def describe(
    form: Form, images: ImageColumn, files: Images, answers: Answers, others: Sequence[Form]
) -> Discovery:
    """Return the [data] of a table.

    Args:
        images: the column that names its images, or documents.
        files: where these are.
        others: further tables of the site, which may say what codes of classes mean.

    Raises:
        DataError: a person has to correct the table first.
        LabelError: two columns are one label.
    """
    if answers.rows:
        form = _only(form, *answers.rows)
    table = next((one for one in HOSPITAL if one.recognises(form.sheet, files.paths)), None)
    known = {**(table.keys(form.sheet.path.parent) if table else {}), **answers.keys}
    there = form.sheet.column(images.text or images.name, "")
    paths = [
        images.find(cell) if cell and has else None
        for cell, has in zip(form.sheet.column(images.name, ""), there, strict=True)
    ]
    images = replace(images, found=len(paths) - paths.count(None))
    if files.masks and any(
        path != cell for path, cell in zip(paths, form.sheet.column(images.name, ""), strict=True)
    ):
        made = "images are named by their paths, apart from their masks"
        form = with_column(form, "image", [path or "" for path in paths], made)
        images = expect_column(form, files)
    columns = form.sheet.columns()
    split = next((name for name in columns if name != images.name and _is_split(columns[name])), None)
    if split is None and not images.text:
        form, split = with_splits(form, paths)
    told = answers.patient if answers.patient is not None else known.get("patient_column")
    asked: list[str] = []
    if told is None and not patient_columns(form.sheet, images.name):
        form, asked = with_patients(form, images.name, form.sheet.column(split, "") if split else ())
    sheet = form.sheet.only([path is not None for path in paths])  # rows without an image do not count
    data = {"dataset": "hospital", "root": str(images.root), "table": str(sheet.path)}
    guess = _Guess(
        data | ({} if form.made else form.data), {"root": "holds the images", **form.reasons}, asked
    )
    _say_images(guess, form, paths, images, files)
    patient, why, remarks = _patient(sheet, images.name, told, images.text)
    why = f"that of {table.title}" if table and told else why
    guess.note("patient_column", patient or images.name, why)
    guess.warnings.extend(remarks)
    taken = {images.name, guess.data["patient_column"], images.text, *(answers.rows or ())[:1]}
    free = [c for c in sheet.header if c and c not in taken]
    for name, number in other_images(sheet, free, images, {*paths}):
        guess.warnings.append(
            f"column {name!r} names {number_of(number, 'other image')}, not used; give each image its own row"
        )
    for name in (name for name in free if not answers.rows and _SITES.fullmatch(plain_words(name))):
        values, column = {*sheet.first(name)} - {""}, json.dumps(name, ensure_ascii=False)
        if 1 < len(values) <= MOST_SITES and 2 * len(values) <= len(sheet.rows):
            guess.warnings.append(
                f"column {name!r} has {len(values)} values; to make a site of each: suture init STUDY "
                f"--site NAME={sheet.path} --site-column {column}"
            )
    if split:
        guess.note("split_column", split, "its cells are train, validation or test")
        if "test" not in {SPLIT_WORDS[cell.casefold()] for cell in sheet.column(split, "")}:
            guess.warnings.append(
                "no row is for test, so there will be no test figures; to divide the patients anew, write "
                'this line in place of split_column:\nsplit = "patients"'
            )
        taken |= {split, *filter(_SPLIT_FLAG.fullmatch, free)}
    else:
        _refuse_strange_splits(sheet, free)
    if len({*sheet.column(images.name, "")}) < len(sheet.rows):
        taken |= _say_repeated(guess, sheet, free, images.name, known)
    synonyms = {**_choices(free), **known.get("synonyms", {}), **answers.names}
    renamed = _rename(free, synonyms)
    labels = discover_labels(sheet, taken, answers.no_labels, images.name, renamed | synonyms, known, others)
    renamed = {name: of for name, of in renamed.items() if name in labels.data["labels"]}
    if used := {**renamed, **synonyms, **labels.data.pop("synonyms", {})}:
        guess.note("synonyms", used, "as you answered" if answers.names else "the names of the classes")
    if table:
        guess.reasons["table"] = f"recognised as {table.title}"
    both = replace(
        labels,
        data=guess.data | labels.data,
        reasons=guess.reasons | labels.reasons,
        warnings=(*guess.warnings, *labels.warnings),
    )
    title = table.title if table else ""
    return Discovery(**vars(both), table=form.sheet, made=form.made, title=title)


def _only(form: Form, column: str, value: str) -> Form:
    """The rows of a table that belong to one site.

    Raises:
        DataError: there is no such column.
    """
    rows = [cell == value for cell in form.sheet.column(column, "--site-column")]
    return replace(
        form, sheet=form.sheet.only(rows), made=(*form.made, f"rows whose {column!r} is {value!r}")
    )


def _say_images(
    guess: _Guess, form: Form, paths: Sequence[str | None], images: ImageColumn, files: Images
) -> None:
    """Say which column names the images, and what of them is not here."""
    n, name = len(form.sheet.rows), form.sheet.path.name
    if images.text:
        del guess.data["root"]
        guess.note("text_column", images.text, "its cells are documents")
    named = f"{images.found:,} of {number_of(n, 'row')} name{'s' * (n == 1)} an existing image"
    guess.note("image_column", images.name, "names the documents" if images.text else named)
    if images.match != "path":
        how = "are the files' names, without suffix or in other folders"
        how = how if images.match == "stem" else "are spelled otherwise than the files"
        guess.note("image_match", images.match, f"its cells {how}")
    if images.found < n:
        what = "a document" if images.text else "an image"
        guess.note("partial", True, f"rows without {what} are left out and counted")
        cells = zip(form.sheet.column(images.name, ""), form.sheet.numbers, paths, strict=True)
        lost = [(cell, number) for cell, number, path in cells if path is None]
        such = f", such as {lost[0][0]!a} in {rows_text([number for _, number in lost])}" if lost else ""
        guess.warnings.append(f"{name}: {n - images.found:,} of {number_of(n, 'row')} without {what}{such}")
        several = Counter(map(stem, files.paths))
        if twins := [cell for cell, _ in lost if several[stem(cell)] > 1]:
            alike = " and ".join(sorted(path for path in files.paths if stem(path) == stem(twins[0]))[:2])
            guess.warnings.append(
                f"{name}: {len(twins):,} of these have several images, such as {alike}; write the path of "
                "one into the cell, or move the others away"
            )
    if files.masks:
        many = number_of(len(files.masks), "file")
        guess.warnings.append(f"{many} such as {min(files.masks)!r} are masks of images and are left out")
    if files.linked:
        guess.note("follow_links", False, "true, if you trust the links")
        guess.warnings.append(
            f"{files.linked:,} of {number_of(len(files.paths), 'image')} are links that lead out of "
            f"{files.root}; they are not followed unless you trust them and write:\nfollow_links = true"
        )


def _say_repeated(
    guess: _Guess, sheet: Sheet, free: Sequence[str], image: str, known: Mapping[str, Any]
) -> set[str]:
    """Say how several rows of an image become one; return the column of the readers, if there is one."""
    guess.note("repeated", known.get("repeated", "merge"), "some images have several rows")
    rater = _rater(sheet, free, image)
    if rater and "finding_column" not in known:
        guess.note("repeated", "majority", f"{rater!r} are readers of the same images")
    if guess.data["repeated"] == "majority":
        guess.warnings.append(
            'several readers judge an image, and the majority counts; instead, repeated = "merge" takes '
            "a finding of any of them, and a share such as repeated = 0.3 a finding of that share"
        )
    return {rater} if rater else set()


def _choices(columns: Sequence[str]) -> dict[str, str]:
    """The findings of columns such as REDCap's "Findings (choice=Mass)", and "Mass (1=yes, 0=no)"."""
    found = {name: match[1].strip() for name in columns if (match := _CHOICE.search(name))}
    for name, match in ((name, _CODED.fullmatch(name)) for name in columns if name not in found):
        if match and all(Cells({}).number(word) is not None for word in re.findall(r"[\w.]+", match[2])):
            found[name] = match[1]
    return {name: of for name, of in found.items() if list(found.values()).count(of) == 1}


def _rename(columns: Sequence[str], synonyms: Mapping[str, str]) -> dict[str, str]:
    """Names of classes for the columns whose own have other characters, such as "Pleural effusion?"."""
    names = {column: canonical_or_none(column, synonyms) for column in columns}
    found = {column: without_signs(column) for column, name in names.items() if name is None}
    classes = Counter([*names.values(), *map(canonical_or_none, found.values())])
    return {column: of for column, of in found.items() if classes[canonical_or_none(of)] == 1}


def _rater(sheet: Sheet, columns: Sequence[str], image: str) -> str | None:
    """The column that says who has judged an image, of which several have."""
    images = sheet.column(image, "")
    for name in columns:
        cells = sheet.first(name)
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


def _patient(sheet: Sheet, image: str, told: str | None, text: str) -> tuple[str | None, str, list[str]]:
    """The column of patients, why, and what to look at; None where there is none.

    Raises:
        DataError: a cell of it is blank.
    """
    if told is not None:
        return (_whole(sheet, told) if told else None), "as you answered", []
    found = patient_columns(sheet, image)
    if not found:
        what = "documents" if text else "images"
        remark = f"no column names the patients, so {what} of one patient may be divided over two splits"
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
    blank = map(not_, sheet.column(name, "the patients"))
    for text in fault(sheet, blank, f"column {name!r} (patient) is blank; fill it in"):
        raise DataError(text)
    return name


def _is_split(cells: Sequence[str]) -> bool:
    words = {cell.casefold() for cell in cells}
    return len(words - {""}) > 0 and words <= SPLIT_WORDS.keys()
