"""The counts that a site has sent: once in an experiment, whatever becomes of its data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, field, replace
from pathlib import Path
from typing import Any

from pydantic.dataclasses import dataclass as validated

from suture.core.files import read_json, write_json
from suture.core.labels import LabelSet
from suture.core.validation import OPEN, parse
from suture.data.table import Split
from suture.learning.evaluation import NOTHING, counts_of
from suture.protocol.decisions import DecidedClass, DecidedGroup
from suture.protocol.messages import Counts, Label, Metrics

FIRST_COUNTS = "counts.json"
"""File of the label counts that the site has sent in an experiment."""

_SentCounts = dict[Label, Counts | None]


@validated(frozen=True, config=OPEN)
class _Sent:
    """The content of `FIRST_COUNTS`.

    Attributes:
        counts: of the training images.
        groups: of the test images with each value of the site's attribute, by class.
        patients: number of training patients, with noise; None where none was sent.
        multiplier: noise of the steps of DP-SGD; None before it is known.
    """

    counts: _SentCounts
    validation: _SentCounts = field(default_factory=dict)
    test: _SentCounts = field(default_factory=dict)
    groups: dict[Label, _SentCounts] = field(default_factory=dict)
    patients: int | None = None
    multiplier: float | None = None


class FirstCounts:
    """What a site has sent of its label counts in one experiment.

    The file is read again when it is another one than before.

    Args:
        folder: of the experiment at the site.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: tuple[tuple[int, int] | None, _Sent] = None, _Sent({})

    def of(
        self, labels: LabelSet | Iterable[str], counts: Mapping[str, Counts | None], split: Split = "train"
    ) -> dict[str, Counts | None]:
        """Return the counts of a split as the site has first sent them in this experiment.

        Two counts of data that changed by one patient in between would reveal the labels of that patient. So
        a class whose count was sent, or withheld, keeps this answer, and only a new class is counted.

        Raises:
            DataError: the file of the counts that were sent cannot be read.
            ConfigError: it holds something else.
        """
        sent, field_ = self._read(), "counts" if split == "train" else split
        before: _SentCounts = getattr(sent, field_)
        answer = {name: before.get(name, counts[name]) for name in labels}
        if answer.keys() - before.keys():
            changed: dict[str, Any] = {field_: before | answer}
            self._write(replace(sent, **changed))
        return answer

    @property
    def patients(self) -> int | None:
        """The number of training patients as it was first sent, with noise; None where none was."""
        return self._read().patients

    @property
    def multiplier(self) -> float | None:
        """The noise of the steps of DP-SGD as it was first planned; None where none was."""
        return self._read().multiplier

    def keep(self, patients: int, multiplier: float | None = None) -> None:
        """Keep the number of patients and, once it is known, the noise of the steps."""
        self._write(replace(self._read(), patients=patients, multiplier=multiplier))

    def within(self, metrics: Metrics) -> Metrics:
        """Return the metrics with the counts that the site has first sent of this split; see `of`.

        A class that was withheld then stays withheld.
        """
        counts = {name: counts_of(score) for name, score in metrics.classes.items()}
        first = self.of(counts, counts, metrics.split)
        classes = {
            name: replace(score, positives=pair[0], negatives=pair[1])
            if score != NOTHING and (pair := first[name])
            else NOTHING
            for name, score in metrics.classes.items()
        }
        return replace(metrics, classes=classes, decided=self._within_groups(metrics.decided))

    def _within_groups(self, decided: Mapping[str, DecidedClass]) -> dict[str, DecidedClass]:
        """Return figures with the counts of each group as first sent; one withheld then stays so."""
        sent = self._read()
        first: dict[str, _SentCounts] = {
            name: {value: (group.positives, group.negatives) for value, group in one.groups.items()}
            for name, one in decided.items()
            if name not in sent.groups
        }
        known = sent.groups | first
        if first:
            self._write(replace(sent, groups=known))
        return {
            name: replace(one, groups=_as_first(one.groups, known[name])) for name, one in decided.items()
        }

    def _read(self) -> _Sent:
        """Return what was sent, read again where the file is another one: each is a new one, renamed."""
        path = self._folder / FIRST_COUNTS
        with suppress(FileNotFoundError):
            found = path.stat()
            now = found.st_ino, found.st_mtime_ns
            if now != self._known[0]:
                self._known = now, parse(_Sent, read_json(path), str(path))
            return self._known[1]
        return _Sent({})

    def _write(self, sent: _Sent) -> None:
        write_json(self._folder / FIRST_COUNTS, asdict(sent), private=True)


def _as_first(groups: Mapping[str, DecidedGroup], first: _SentCounts) -> dict[str, DecidedGroup]:
    pairs = {value: pair for value in groups if (pair := first.get(value))}
    return {value: replace(groups[value], positives=p, negatives=n) for value, (p, n) in pairs.items()}
