"""Checking a site's data before it joins: its counts and all of its faults at once."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.table import Table as Grid

from suture.core.errors import DataError, SutureError
from suture.core.escaping import number_of, rich
from suture.core.labels import LabelType, is_generic, lookalikes
from suture.core.vocabulary import CANONICAL
from suture.data.config import SiteConfig
from suture.data.images import ImageSource, read_all
from suture.data.readers import read_table
from suture.data.reading import Reading
from suture.data.table import SPLITS, Split, Table
from suture.data.text import count_words, coverage, tokenise
from suture.models import CORPUS, ModelSpec, encoder_of
from suture.models.documents import known_words, strange
from suture_results.inspection import (
    ImageFacts,
    counted_modalities,
    depth_warnings,
    inspect,
    stated_modalities,
)


@dataclass(frozen=True)
class Count:
    """Labels of one class in one split."""

    positives: int
    negatives: int
    unknown: int


@dataclass(frozen=True)
class Words:
    """The words of the documents in use.

    Attributes:
        mean, p95, most: mean, 95th percentile and maximum of the number of words of a document.
        known: the share of the words that the model's vocabulary knows; None where it reads pieces of words.
        vocabulary: its name.
    """

    mean: float
    p95: int
    most: int
    known: float | None
    vocabulary: str = "clinical"


@dataclass(frozen=True)
class Picture:
    """An image in use.

    Attributes:
        name: within the root.
        split: that it is in.
        present: the classes that are present.
        facts: what its file holds.
    """

    name: str
    split: str
    present: tuple[str, ...]
    facts: ImageFacts


class TextFacts(NamedTuple):
    """The digest of a document, whatever its spaces, in both places where `ImageFacts` has one."""

    pixels: bytes
    file: bytes


@dataclass(frozen=True)
class Document:
    """A document in use; as `Picture`."""

    name: str
    split: str
    present: tuple[str, ...]
    facts: TextFacts


Case = Picture | Document


@dataclass(frozen=True)
class Findings:
    """The result of `check`. It stays at the site, because it names files and holds exact counts.

    Attributes:
        images: number of images, or documents, of each split.
        patients: number of patients of each split.
        counts: labels of each class of each split.
        unreadable: one message per image that cannot be read.
        empty: classes without any positive label in the training rows.
        problems: faults that must be corrected before the site can join.
        warnings: what a person should know.
        notes: what was taken for granted.
        words: statistics of the documents; None where the data are images.
        pictures: the images that can be read, in the order of the table.
        documents: likewise.
        label_type: of the labels; None where no table can be read.
    """

    images: dict[Split, int] = field(default_factory=dict)
    patients: dict[Split, int] = field(default_factory=dict)
    counts: dict[str, dict[Split, Count]] = field(default_factory=dict)
    unreadable: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    words: Words | None = None
    pictures: tuple[Picture, ...] = field(default=(), repr=False)  # thousands
    documents: tuple[Document, ...] = field(default=(), repr=False)
    label_type: LabelType | None = None

    @property
    def cases(self) -> tuple[Case, ...]:
        """The images, or the documents."""
        return self.pictures or self.documents

    @property
    def twins(self) -> list[list[Case]]:
        """The images with the same pixels, or equal documents, under several names."""
        return _twins(self.cases)

    @property
    def noun(self) -> str:
        """What the data are."""
        return "document" if self.words else "image"


def check(config: SiteConfig, spec: ModelSpec | None = None) -> Findings:
    """Read the table, decode every image (or count the words) in use, and report all faults.

    Args:
        spec: the model that is to read the documents; by default one with the vocabulary of the package.

    No fault of the data raises an error; a table that cannot be read at all is then the only problem.
    """
    try:
        reading = read_table(config.data)
    except SutureError as error:
        return Findings(problems=(str(error),))
    table = reading.table
    used = table.rows(np.array([split != "" for split in table.split], dtype=np.bool_))
    seen = _look(used, config.data.color) if used.texts is None else _read(used, spec)
    parts = {split: used.of(split) for split in SPLITS}
    counts = {
        name: {split: _count(part.y[:, column]) for split, part in parts.items()}
        for column, name in enumerate(used.labels)
    }
    empty = tuple(n for n, of in counts.items() if len(parts["train"]) and not of["train"].positives)
    torn, spelt = _spellings(used)
    lost, most = len(seen.unreadable), config.privacy.max_faults
    lost_text = f"{lost:,} of {len(used):,} images cannot be used ([privacy] max_faults tolerates {most:.0%})"
    too_many = lost > most * len(used)
    return Findings(
        images={split: len(part) for split, part in parts.items()},
        patients={split: len(set(part.patients)) for split, part in parts.items()},
        counts=counts,
        unreadable=seen.unreadable,
        empty=empty,
        problems=(*reading.faults, *seen.problems, *torn, *([lost_text] if too_many else [])),
        warnings=(
            *([lost_text] if lost and not too_many else []),
            *_left_out(reading, used),
            *seen.warnings,
            *spelt,
            *_warnings(used, counts),
        ),
        notes=(*reading.notes, *seen.notes),
        words=seen.words,
        pictures=seen.pictures,
        documents=seen.documents,
        label_type=table.labels.label_type,
    )


def render(findings: Findings, most: int | None = None) -> RenderableType:
    """Render the findings for a terminal: a grid of counts per class, then problems and warnings.

    Args:
        most: remarks that are shown, those that change data first; check.html has the others.
    """
    words = findings.words
    grid = Grid(title="Labels: present / absent / unknown")
    grid.add_column("class")
    for split in SPLITS:
        size = number_of(findings.images.get(split, 0), findings.noun)
        if findings.patients != findings.images:  # where no column names patients, each image counts as one
            size += f", {number_of(findings.patients.get(split, 0), 'patient')}"
        grid.add_column(f"{split}\n{size}", justify="right")
    for name, of in findings.counts.items():
        cells = [
            f"{c.positives:,} / {c.negatives:,} / {c.unknown:,}" for c in (of[split] for split in SPLITS)
        ]
        grid.add_row(rich(name), *cells)
    statistics = []
    if words:
        known = (
            ""
            if words.known is None
            else f"; the vocabulary {words.vocabulary} knows {words.known:.1%} of them"
        )
        statistics.append(
            f"words of a document: {words.mean:.1f} on average, 95 % have at most {words.p95:,}, the longest "
            f"{words.most:,}{rich(known)}"
        )
    remarks = [f"[bold yellow]warning[/] {rich(text)}" for text in findings.warnings]
    remarks += [f"[dim]note[/] {rich(text)}" for text in findings.notes]
    more = f"[dim]and {number_of(len(remarks[most:]), 'more remark')} in check.html[/]"
    lines = [
        *statistics,
        *(f"[bold red]problem[/] {rich(text)}" for text in findings.problems),
        *remarks[:most],
        *([more] if most is not None and len(remarks) > most else []),
        *(f"[dim]unreadable[/] {rich(text)}" for text in _by_kind(findings.unreadable)),
    ]
    return Group(*([grid] if findings.counts else []), *lines)


def _by_kind(messages: Sequence[str]) -> list[str]:
    """Messages of images that cannot be read, one for each cause, the most frequent first."""
    kinds: dict[str, list[str]] = {}
    for text in messages:
        kinds.setdefault(re.sub(r"^image ('(?:[^'\\\\]|\\\\.)*'|\"[^\"]*\")", "image", text), []).append(text)
    ordered = sorted(kinds.values(), key=len, reverse=True)
    return [
        one[0] + (f" ({number_of(len(one), 'image')} like it)" if len(one) > 1 else "") for one in ordered
    ]


def _read(table: Table, spec: ModelSpec | None) -> Findings:
    """Count the words of all documents; return what they show, in the order of the rows."""
    if not table.texts:
        return Findings()
    if spec is None or encoder_of(spec).reads != "text" or spec.vocabulary == CORPUS:
        spec = ModelSpec("lstm")
    n = np.array([len(tokenise(text, spec.tokeniser)) for text in table.texts])
    known = known_words(spec)
    share = None if known is None else coverage(known, count_words(table.texts, spec.tokeniser))
    named = spec.vocabulary if isinstance(spec.vocabulary, str) else "of the job"
    words = Words(float(n.mean()), int(np.ceil(np.quantile(n, 0.95))), int(n.max()), share, Path(named).name)
    documents = []
    for row, text in enumerate(table.texts):
        digest = hashlib.sha256(" ".join(text.split()).encode()).digest()
        facts = TextFacts(digest, digest)
        documents.append(Document(table.images[row], table.split[row], _present(table, row), facts))
    problems, warnings = _say_twins(documents, "document")
    if unread := list(compress(table.images, strange(spec, table.texts))):
        warnings.append(
            f"{number_of(len(unread), 'document')} without a word that the model knows, such as "
            f"{unread[0]!r}: it learns nothing of them, and `suture predict` leaves such documents out"
        )
    return Findings(
        words=words, documents=tuple(documents), problems=tuple(problems), warnings=tuple(warnings)
    )


def _present(table: Table, row: int) -> tuple[str, ...]:
    return tuple(name for name, value in zip(table.labels, table.y[row], strict=True) if value == 1)


def _count(y: NDArray[np.float32]) -> Count:
    return Count(int((y == 1).sum()), int((y == 0).sum()), int(np.isnan(y).sum()))


def _look(table: Table, color: bool) -> Findings:
    """Decode every image of a table; return what they show, in the order of the rows."""
    faults: dict[int, str] = {}
    facts: dict[int, ImageFacts] = {}
    read = partial(inspect, color=color, bits=table.bits)
    try:
        with ImageSource(table.root, table.follow_links) as source:
            for row, result in read_all(source, table.images, read):
                if isinstance(result, DataError):
                    faults[row] = str(result)
                else:
                    facts[row] = result
    except DataError as error:
        return Findings(problems=(str(error),))
    pictures = [
        Picture(table.images[row], table.split[row], _present(table, row), facts[row])
        for row in sorted(facts)
    ]
    problems, warnings = _say_twins(pictures, "image")
    warnings += depth_warnings(facts.values(), table.bits)
    stated = stated_modalities(facts.values())
    if len(stated) > 1:
        warnings.append(
            f"DICOM images of several modalities: {counted_modalities(stated)}; a job whose model.modalities "
            "lacks one leaves its images out"
        )
    if not color and (coloured := sum(one.colour for one in facts.values())):
        warnings.append(
            f"{coloured:,} of {len(facts):,} images are in colour, but are read as gray; to use colour, "
            "write [data] color = true at all sites, and color = true under [model] of the job"
        )
    one = (f"DICOM images are of the modality {counted_modalities(stated)}",) if len(stated) == 1 else ()
    return Findings(
        pictures=tuple(pictures),
        unreadable=tuple(faults[row] for row in sorted(faults)),
        problems=tuple(problems),
        warnings=tuple(warnings),
        notes=one,
    )


def _twins(cases: Sequence[Case]) -> list[list[Case]]:
    """The images with the same pixels, or equal documents, under several names."""
    same: dict[bytes, list[Case]] = {}
    for case in cases:
        same.setdefault(case.facts.pixels, []).append(case)
    return [group for group in same.values() if len(group) > 1]


def _say_twins(cases: Sequence[Case], what: str) -> tuple[list[str], list[str]]:
    """Problems and warnings of those; equal documents may be from one template, and are no problem."""
    groups = _twins(cases)
    torn, whole = (
        [group for group in groups if (len({case.split for case in group}) > 1) == apart]
        for apart in (True, False)
    )
    problems, warnings = [], []
    if torn:
        a = torn[0][0]
        b = next(case for case in torn[0] if case.split != a.split)
        text = f"{len(torn):,} {what}s occur in two splits under two names, such as {a.name!r} and {b.name!r}"
        if what == "image":
            problems.append(f"{text}; remove one")
        else:
            warnings.append(f"{text}; remove one, unless they are of a template")
    if whole:
        a, b, *_ = whole[0]
        warnings.append(f"{len(whole)} {what}s occur under two names, such as {a.name!r} and {b.name!r}")
    if unlike := sum(len({case.present for case in group}) > 1 for group in groups):
        warnings.append(f"{unlike} of the {what}s that occur under two names have other classes under each")
    return problems, warnings


def _spellings(used: Table) -> tuple[list[str], list[str]]:
    """Problems and warnings of patients that are written in several ways, as spreadsheets make 7 of 00007."""
    splits: dict[str, dict[str, set[str]]] = {}
    for patient, split in zip(used.patients, used.split, strict=True):
        splits.setdefault(_plain(patient), {}).setdefault(patient, set()).add(split)
    several = [written for written in splits.values() if len(written) > 1]
    torn = [written for written in several if len(set().union(*written.values())) > 1]
    together = [written for written in several if written not in torn]
    return (
        [f"{_some(torn)} they are in two splits; use one spelling for each"] if torn else [],
        [f"{_some(together)} each counts as two; use one spelling"] if together else [],
    )


def _some(several: Sequence[Mapping[str, object]]) -> str:
    a, b = sorted(several[0])[:2]
    return f"patients with two spellings: {len(several)}, such as {a!r} and {b!r};"


def _plain(patient: str) -> str:
    """A patient's name without what differs between its spellings."""
    number = patient.removesuffix(".0")
    return number.lstrip("0") if number.isdigit() else patient.casefold()


def _left_out(reading: Reading, used: Table) -> list[str]:
    warnings = []
    if reading.absent and used.texts is None:
        warnings.append(f"rows without an image, left out as [data] partial says: {reading.absent:,}")
    elif reading.absent:
        warnings.append(f"rows without text, left out: {reading.absent:,}")
    if len(used) < len(reading.table):
        warnings.append(f"rows without a split, not used: {len(reading.table) - len(used):,}")
    return warnings


def _warnings(used: Table, counts: Mapping[str, Mapping[Split, Count]]) -> list[str]:
    warnings = []
    if not used.split.count("train"):
        warnings.append("no training rows: this site can only evaluate")
    else:
        for name, count in ((name, of["train"]) for name, of in counts.items()):
            if not (count.positives and count.negatives):
                lacking = "negative" if count.positives else "positive"
                warnings.append(f"class {name!r} has no {lacking} label among the training rows")
    own = set(used.labels)
    for a, b in lookalikes([*own, *CANONICAL]):
        if (a in own or b in own) and not (is_generic(a) and is_generic(b)):
            same = "if they are the same class, map one to the other in [data.synonyms]"
            warnings.append(f"labels {a!r} and {b!r} look alike; {same}")
    return warnings
