"""The counts of labels that a site has sent: once in an experiment, whatever becomes of its data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, field, replace
from pathlib import Path
from typing import Any

from pydantic.dataclasses import dataclass

from suture.core.files import make_folder, read_json, write_json
from suture.core.labels import LabelSet
from suture.core.validation import OPEN, parse
from suture.data.table import Split
from suture.learning.evaluation import NOTHING, counts_of
from suture.protocol.decisions import DecidedClass, DecidedGroup
from suture.protocol.messages import Counts, Label, Metrics

FIRST_COUNTS = "counts.json"
"""File of the label counts that the site has sent in an experiment."""

_FORMER_COUNTS = "said.json"
"""Its name in earlier versions: what a site has sent stays sent when its software changes."""

SentCounts = dict[Label, Counts | None]


@dataclass(frozen=True, config=OPEN)
class _Sent:
    """The content of `FIRST_COUNTS`.

    Attributes:
        groups: of the test images with each value of the site's attribute, by class.
    """

    counts: SentCounts
    validation: SentCounts = field(default_factory=dict)
    test: SentCounts = field(default_factory=dict)
    groups: dict[Label, SentCounts] = field(default_factory=dict)

    def of(self, split: Split) -> SentCounts:
        """Return the counts of a split."""
        found: SentCounts = getattr(self, "counts" if split == "train" else split)
        return found

    def with_split(self, split: Split, counts: SentCounts) -> dict[str, Any]:
        """Return the content with other counts of a split."""
        return asdict(self) | {"counts" if split == "train" else split: counts}


def first_counts(
    labels: LabelSet | Iterable[str],
    counts: Mapping[str, Counts | None],
    folder: Path,
    split: Split = "train",
) -> dict[str, Counts | None]:
    """Return the counts of a split as the site has first sent them in this experiment.

    Two counts of data that changed by one patient in between would reveal the labels of that patient. So a
    class whose count was sent, or withheld, keeps this answer, and only a new class is counted.

    Raises:
        DataError: the file of the counts that were sent cannot be read.
        ConfigError: it holds something else.
    """
    every = _sent(folder)
    before = every.of(split)
    answer = {name: before.get(name, counts[name]) for name in labels}
    if before.keys() < {*before, *answer}:
        make_folder(folder)
        write_json(folder / FIRST_COUNTS, every.with_split(split, before | answer))
    return answer


def _sent(folder: Path) -> _Sent:
    found = next((p for p in (folder / FIRST_COUNTS, folder / _FORMER_COUNTS) if p.exists()), None)
    return parse(_Sent, read_json(found), str(found)) if found else _Sent({})


def with_first_counts(metrics: Metrics, folder: Path) -> Metrics:
    """Return the metrics with the counts that the site has first sent of this split; see `first_counts`.

    A class that was withheld then stays withheld.
    """
    counts = {name: counts_of(score) for name, score in metrics.classes.items()}
    first = first_counts(counts, counts, folder, metrics.split)
    classes = {
        name: replace(score, positives=pair[0], negatives=pair[1])
        if score != NOTHING and (pair := first[name])
        else NOTHING
        for name, score in metrics.classes.items()
    }
    return replace(metrics, classes=classes, decided=_with_first_groups(metrics.decided, folder))


def _with_first_groups(decided: Mapping[str, DecidedClass], folder: Path) -> dict[str, DecidedClass]:
    """Return the figures with the counts of each group as first sent; one that was withheld then stays so."""
    every = _sent(folder)
    first: dict[str, SentCounts] = {
        name: {value: (group.positives, group.negatives) for value, group in one.groups.items()}
        for name, one in decided.items()
        if name not in every.groups
    }
    if first:
        make_folder(folder)
        write_json(folder / FIRST_COUNTS, asdict(every) | {"groups": every.groups | first})
    known = every.groups | first
    return {name: replace(one, groups=_as_first(one.groups, known[name])) for name, one in decided.items()}


def _as_first(groups: Mapping[str, DecidedGroup], first: SentCounts) -> dict[str, DecidedGroup]:
    pairs = {value: pair for value in groups if (pair := first.get(value))}
    return {value: replace(groups[value], positives=p, negatives=n) for value, (p, n) in pairs.items()}
