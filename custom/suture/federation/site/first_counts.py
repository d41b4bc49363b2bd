"""The counts of labels that a site has sent: once in an experiment, whatever becomes of its data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, field, replace
from pathlib import Path

from pydantic.dataclasses import dataclass

from suture.core.files import make_folder, read_json, write_json
from suture.core.labels import LabelSet
from suture.core.validation import OPEN, parse
from suture.data.table import Split
from suture.learning.evaluation import NOTHING, counts_of
from suture.protocol.messages import Counts, Label, Metrics

FIRST_COUNTS = "counts.json"
"""File of the label counts that the site has sent in an experiment."""

_FORMER_COUNTS = "said.json"
"""Its name in earlier versions: what a site has sent stays sent when its software changes."""

SentCounts = dict[Label, Counts | None]


@dataclass(frozen=True, config=OPEN)
class _Sent:
    """The content of `FIRST_COUNTS`."""

    counts: SentCounts
    validation: SentCounts = field(default_factory=dict)
    test: SentCounts = field(default_factory=dict)

    def of(self, split: Split) -> SentCounts:
        """Return the counts of a split."""
        found: SentCounts = getattr(self, "counts" if split == "train" else split)
        return found

    def with_split(self, split: Split, counts: SentCounts) -> dict[str, SentCounts]:
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
    path = folder / FIRST_COUNTS
    found = next((p for p in (path, folder / _FORMER_COUNTS) if p.exists()), None)
    every = parse(_Sent, read_json(found), str(found)) if found else _Sent({})
    before = every.of(split)
    answer = {name: before.get(name, counts[name]) for name in labels}
    if before.keys() < {*before, *answer}:
        make_folder(folder)
        write_json(path, every.with_split(split, before | answer))
    return answer


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
    return replace(metrics, classes=classes)
