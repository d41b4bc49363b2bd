"""The ledger of a site: everything that it has released, in all experiments, and its budgets.

A line of ``ledger.jsonl`` is one release. It is on the disk before the answer leaves, and no line is ever
changed: what was released stays released, whatever becomes of the experiment.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as validated
from pydantic_core import to_jsonable_python

from suture.core.environment import now
from suture.core.errors import ConfigError
from suture.core.files import append_line, atomic_write, hold, make_folder
from suture.core.plain import open_regular
from suture.core.validation import STRICT
from suture.federation.differential_privacy import epsilon
from suture.federation.site.abstention import BudgetSpent
from suture.protocol.messages import (
    ClassScore,
    Evaluation,
    Metrics,
    Payload,
    Reply,
    Scores,
    SiteInfo,
    Spent,
    TaskName,
    Update,
)
from suture.protocol.packing import Packed, digest
from suture.protocol.privacy import PrivacyConfig

FILE = "ledger.jsonl"

_ONCE = ("train", "calibrate", "evaluate")
"""Tasks that a site answers once, but for those that come again."""

Key = tuple[str, str, int, str]

_WAIT = 60.0
"""Seconds to wait for another job of the site that writes into the ledger."""


@validated(frozen=True, config=STRICT)
class Release:
    """One answer that a site has released.

    Attributes:
        task: that it answers; ``unknown`` stands for all that an experiment released before there was a
            ledger.
        round, split: of the task.
        update: whether tensors of an update left.
        clip, noise, delta: the settings of the site at that time; see `PrivacyConfig`.
        figures: number of times that figures of each class left, and tensors of classes.
        numbers: number of other numbers that no noise protects: losses, counts, weights, scalars.
        answer: BLAKE3 of the answer; see `digest`.
    """

    time: str
    experiment: str
    task: TaskName | Literal["unknown"]
    round: int = 0
    split: str = ""
    update: bool = False
    clip: float | None = None
    noise: float = 0.0
    delta: float = 1e-5
    figures: dict[str, int] = Field(default_factory=dict)
    numbers: int = 0
    answer: str = ""

    @property
    def key(self) -> Key:
        """What a site answers once: experiment, task, round and split; it counts its scores once in all."""
        return self.experiment, self.task, self.round if self.task != "calibrate" else 0, self.split

    @property
    def settings(self) -> tuple[float | None, float]:
        """Clip and noise; others begin a new line of the budget."""
        return self.clip, self.noise


_RELEASE = TypeAdapter(Release)


def release_of(
    reply: Reply, packed: Packed, task: Payload, experiment: str, privacy: PrivacyConfig
) -> Release:
    """Describe an answer, which is also given as it is packed, as a release."""
    return Release(
        now(),
        experiment,
        task.task,
        task.round,
        task.split if task.task == "evaluate" else "",
        isinstance(reply, Update) and bool(reply.shared or reply.head or reply.class_tensors),
        privacy.clip,
        privacy.noise,
        privacy.delta,
        dict(sum((_figures(metrics) for metrics in _metrics(reply)), _told(reply))),
        _numbers(reply),
        digest(packed),
    )


def _metrics(reply: Reply) -> list[Metrics]:
    if isinstance(reply, Evaluation):
        return [metrics for metrics in (reply.metrics, reply.local) if metrics]
    return [reply.metrics] if isinstance(reply, Update) and reply.metrics else []


def _figures(metrics: Metrics) -> Counter[str]:
    return Counter(name for name, score in metrics.classes.items() if _said(score))


def _told(reply: Reply) -> Counter[str]:
    """Count the classes of which tensors of classes say something, such as an F1 or a prototype."""
    if isinstance(reply, Scores):
        return Counter(reply.labels)
    if not isinstance(reply, Update):
        return Counter()
    tensors = reply.class_tensors.values()
    return Counter({name for t in tensors for name, row in zip(reply.labels, t, strict=True) if row.any()})


def _said(score: ClassScore) -> bool:
    """Whether a score says anything: a site withholds that of a class with few images."""
    return any(value is not None for value in (score.auroc, score.recall, score.positives, score.negatives))


def _numbers(reply: Reply) -> int:
    """Count the numbers of an answer that are neither tensors nor figures of a class."""
    count = sum(
        2
        + len(metrics.overall)
        + sum(2 + len(part.overall) for part in metrics.attributes.values())
        + sum(4 * len(one.groups) for one in metrics.decided.values())
        for metrics in _metrics(reply)
    )
    if isinstance(reply, Update):
        return count + 1 + len(reply.class_weights) + len(reply.scalars) + (reply.train_loss is not None)
    if isinstance(reply, Scores):
        return sum(int((counts >= 0).sum()) for counts in reply.class_tensors.values())
    if isinstance(reply, SiteInfo):
        return count + len(reply.n) + 2 * sum(pair is not None for pair in reply.counts.values())
    return count


class Ledger:
    """The ledger of one site, which several jobs may write at the same time.

    Args:
        path: of the file, in the folder that holds the experiments' folders.
        limits: the site's budgets.
    """

    def __init__(self, path: Path, limits: PrivacyConfig) -> None:
        self._path, self._limits = path, limits
        self._read, self._releases, self._tally = 0, list[Release](), Tally()

    def begin(self) -> None:
        """Create the file where there is none.

        An experiment that is older than the ledger has released no one knows what: one line says so.
        """
        if self._path.exists():
            return
        make_folder(self._path.parent)
        with hold(self._lock, _WAIT, f".{FILE}.*.tmp"):
            if not self._path.exists():
                former = [p.name for p in sorted(self._path.parent.iterdir()) if _has_answered(p)]
                lines = [json.dumps(asdict(Release(now(), name, "unknown", update=True))) for name in former]
                atomic_write(self._path, "".join(f"{line}\n" for line in lines).encode())

    @property
    def _lock(self) -> Path:
        return self._path.with_name(f".{self._path.name}.lock")

    def releases(self) -> Sequence[Release]:
        """Return all releases so far; an incomplete last line, of a process that was killed, is none.

        Raises:
            ConfigError: a line is damaged.
        """
        size = self._path.stat().st_size if self._path.exists() else 0
        if size < self._read:
            self._read, self._releases, self._tally = 0, [], Tally()
        if size > self._read:
            with open_regular(self._path) as file:
                file.seek(self._read)
                whole = file.read().rpartition(b"\n")[:2]
            lines = whole[0].splitlines()
            new = [self._parsed(n, line) for n, line in enumerate(lines, len(self._releases) + 1)]
            self._releases += new
            for release in new:
                self._tally.add(release)
            self._read += sum(map(len, whole))
        return self._releases

    def _parsed(self, number: int, line: bytes) -> Release:
        try:
            return _RELEASE.validate_json(line)
        except ValidationError:
            raise ConfigError(
                f"{self._path}, line {number} is damaged; restore the file from a backup. "
                "Without one, move it away: the site then counts all that its experiments have released as "
                "unprotected"
            ) from None

    def check(self, task: Payload, experiment: str, classes: Collection[str]) -> None:
        """Check that a task may be answered with something new.

        Args:
            classes: those whose figures the answer may have.

        Raises:
            BudgetSpent: names the budget and its setting.
            ConfigError: a line is damaged.
        """
        split = task.split if task.task == "evaluate" else ""
        figures = dict.fromkeys(classes, 1)
        self._check(Release("", experiment, task.task, task.round, split, figures=figures))

    def _check(self, new: Release) -> None:
        self.releases()
        told, limits = self._tally, self._limits
        if (answers := told.answers[new.experiment]) >= limits.max_answers:
            raise _spent(f"{answers} answers in {new.experiment}", "max_answers", limits.max_answers)
        again = told.anew[new.experiment]
        if again >= limits.reanswers and new.task != "handshake" and new.key in told.keys:
            what = f"{again} answers anew in {new.experiment}, and {new.task} of round {new.round} came again"
            raise _spent(what, "reanswers", limits.reanswers)
        for name, times in new.figures.items():
            if told.figures[name] + times > limits.max_figures:
                raise _spent(f"{told.figures[name]} figures of {name!r}", "max_figures", limits.max_figures)

    def record(self, new: Release) -> None:
        """Write a release to the disk; one that is in the ledger already is not written twice.

        Raises:
            BudgetSpent: another job of the site has spent what was left meanwhile; nothing is written.
            ConfigError: a line is damaged.
            OSError: the disk is full or the file cannot be written.
        """
        self.begin()
        with hold(self._lock, _WAIT, f".{FILE}.*.tmp"):
            self.releases()
            if (new.key, new.answer) not in self._tally.seen:
                self._check(new)
                append_line(self._path, to_jsonable_python(new), durable=True)

    def spent(self) -> Spent:
        """Return what the site tells a server about its releases."""
        releases = self.releases()
        updates = [r for r in releases if r.update]
        return Spent(
            epsilon((r.noise for r in updates), self._limits.delta),
            len(updates),
            sum(not r.noise for r in updates),
            len({r.experiment for r in updates}),
            self._tally.figures.total(),
            sum(r.numbers for r in releases),
        )


def _spent(what: str, setting: str, limit: int) -> BudgetSpent:
    return BudgetSpent(
        f"this site has given {what}: {setting} = {limit} under [privacy] in suture.toml permits no more; "
        "`suture ledger` shows all that it has released"
    )


def _has_answered(folder: Path) -> bool:
    """Whether a folder is of an experiment in which the site has released something."""
    names = ("counts.json", "said.json", "noise.key")
    return any((folder / name).exists() for name in names) or any(folder.glob("round-*.safetensors"))


@dataclass
class Tally:
    """What a ledger counts of its releases; one more takes the same time however many there are.

    Attributes:
        answers: of each experiment.
        anew: tasks of each experiment that came again and were answered anew; each site info may differ from
            the former.
        figures: how often figures of each class have left.
        keys: of all releases.
        seen: key and answer of all releases.
    """

    answers: Counter[str] = field(default_factory=Counter)
    anew: Counter[str] = field(default_factory=Counter)
    figures: Counter[str] = field(default_factory=Counter)
    keys: set[Key] = field(default_factory=set)
    seen: set[tuple[Key, str]] = field(default_factory=set)

    def add(self, release: Release) -> None:
        """Count one more."""
        key = release.key
        self.answers[release.experiment] += 1
        self.anew[release.experiment] += key in self.keys and release.task in _ONCE
        self.figures.update(release.figures)
        self.keys.add(key)
        self.seen.add((key, release.answer))


def tally_of(releases: Iterable[Release]) -> Tally:
    """Count some releases."""
    tally = Tally()
    for release in releases:
        tally.add(release)
    return tally
