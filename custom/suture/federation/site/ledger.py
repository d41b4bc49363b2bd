"""The ledger of a site: everything that it has released, in all experiments, and its budgets.

A line of ``ledger.jsonl`` is one release. It is on the disk before the answer leaves, and no line is ever
changed: what was released stays released, whatever becomes of the experiment. The lines are chained, and a
site whose ledger is not whole releases nothing; see `suture.federation.site.chain`.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from shlex import quote
from typing import IO, Any, Literal

from blake3 import blake3
from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass as validated
from torch import Tensor

from suture.core.environment import now
from suture.core.errors import ConfigError
from suture.core.files import hold, replacing
from suture.core.privacy import PrivacyConfig
from suture.core.validation import STRICT
from suture.federation.accounting import Mechanism, composed, epsilon, rounded_up
from suture.federation.site.abstention import BudgetSpent, LedgerBroken
from suture.federation.site.chain import ANCHOR, Anchor, Chain, Mark, breaks, read_anchor, write_anchor
from suture.federation.store import EXPERIMENTS
from suture.protocol.egress import Channel, Layout
from suture.protocol.messages import (
    Evaluation,
    Metrics,
    Reply,
    Scores,
    Spent,
    TaskData,
    TaskName,
    Trait,
    Update,
    fields_with,
)
from suture.protocol.packing import Packed, digest

FILE = "ledger.jsonl"

_ONCE = ("train", "calibrate", "evaluate")
"""Tasks that a site answers once, but for those that come again."""

_Key = tuple[str, str, int, str]

_WAIT = 60.0
"""Seconds to wait for another job of the site that writes into the ledger."""


@validated(frozen=True, config=STRICT)
class Release:
    """One answer that a site has released.

    Attributes:
        task: that it answers; ``unknown`` stands for all that an experiment released whose ledger is lost.
        round, split: of the task.
        update: whether tensors of an update left.
        clip, noise, delta: the settings of the site at that time; see `PrivacyConfig`.
        multiplier, rate, steps: of DP-SGD per patient, or of the noisy number of patients; see `Mechanism`.
        figures: number of times that figures of each class left, and channels of classes.
        numbers: number of other numbers that no noise protects: losses, counts, weights, scalars.
        answer: BLAKE3 of the answer; see `digest`. Empty where ε was spent before one: on the number of
            patients, or on a round that was computed again for a lost state.
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
    multiplier: float = 0.0
    rate: float = 1.0
    steps: int = 0
    figures: dict[str, int] = Field(default_factory=dict)
    numbers: int = 0
    answer: str = ""

    @property
    def key(self) -> _Key:
        """What a site answers once: experiment, task, round and split; it counts its scores once in all."""
        return self.experiment, self.task, self.round if self.task != "calibrate" else 0, self.split

    @property
    def settings(self) -> tuple[float | None, float]:
        """Clip and noise; others begin a new line of the budget."""
        return self.clip, self.noise

    @property
    def mechanism(self) -> Mechanism | None:
        """What ε of it follows from; None where it has no tensors of an update."""
        if self.steps:
            return Mechanism(self.multiplier, self.rate, self.steps)
        return Mechanism(self.noise / 2) if self.update else None

    @property
    def unprotected(self) -> bool:
        """Whether an update left without noise."""
        return self.update and not (self.steps or self.noise)


RELEASE = TypeAdapter(Release)


def release_of(
    reply: Reply,
    packed: Packed,
    task: TaskData,
    experiment: str,
    privacy: PrivacyConfig,
    channels: Sequence[Channel] = (),
    mechanism: Mechanism | None = None,
) -> Release:
    """Describe an answer, which is also given as it is packed, as a release.

    Args:
        mechanism: that protects the patients in it.
        channels: what an update may have besides the model.
    """
    return Release(
        now(),
        experiment,
        task.task,
        task.round,
        task.split if task.task == "evaluate" else "",
        isinstance(reply, Update) and bool(reply.shared or reply.head or reply.channels),
        privacy.clip,
        privacy.noise,
        privacy.delta,
        *(mechanism or Mechanism(0.0, steps=0)),
        dict(_figures(reply, channels)),
        _numbers(reply, channels),
        digest(packed),
    )


def spent_on(
    experiment: str, task: TaskName, round_: int, privacy: PrivacyConfig, mechanism: Mechanism
) -> Release:
    """Describe what an experiment learns of a site's patients before, or without, an answer to a task."""
    own = privacy.clip, privacy.noise, privacy.delta
    return Release(now(), experiment, task, round_, "", False, *own, *mechanism)


def _metrics(reply: Reply) -> list[Metrics]:
    if isinstance(reply, Evaluation):
        return [metrics for metrics in (reply.metrics, reply.local) if metrics]
    return [reply.metrics] if isinstance(reply, Update) and reply.metrics else []


def _figures(reply: Reply, channels: Sequence[Channel]) -> Counter[str]:
    """Count how often each class is told of, by its scores, or by channels such as an F1 or a prototype."""
    found = Counter(reply.labels if isinstance(reply, Scores) else ())
    if isinstance(reply, Update):
        told = [channel.name for channel in channels if channel.of_classes]
        tensors = [tensor for name, tensor in reply.channels.items() if name in told]  # one may be missing
        found.update({n for t in tensors for n, row in zip(reply.labels, t, strict=True) if row.any()})
    for metrics in _metrics(reply):
        for name, score in metrics.classes.items():
            # A site withholds the score of a class with few images: such a one says nothing.
            said = (score.auroc, score.recall, score.positives, score.negatives)
            found[name] += any(value is not None for value in said)
    return +found


def _numbers(reply: Reply, channels: Sequence[Channel]) -> int:
    """Count the numbers of an answer that are neither tensors of the model's form nor figures of a class."""
    count: int = sum(_numbers_in(getattr(reply, name)) for name in fields_with(type(reply), Trait.COUNTED))
    for metrics in _metrics(reply):
        by_attribute = sum(2 + len(part.overall) for part in metrics.attributes.values())
        by_group = sum(4 * len(one.groups) for one in metrics.decided.values())
        count += 2 + len(metrics.overall) + by_attribute + by_group
    if isinstance(reply, Update):
        whole = [c.name for c in channels if not (c.of_classes or isinstance(c.shape, Layout))]
        return count + sum(tensor.numel() for name, tensor in reply.channels.items() if name in whole)
    if isinstance(reply, Scores):
        return sum(int((counts >= 0).sum()) for counts in reply.class_tensors.values())
    return count


def _numbers_in(value: Any) -> int:
    """Count the numbers of a value; None has none."""
    if isinstance(value, Tensor):
        return value.numel()
    inner = value.values() if isinstance(value, Mapping) else value
    return sum(map(_numbers_in, inner)) if isinstance(value, Mapping | tuple) else int(value is not None)


class Ledger:
    """The ledger of one site, which several jobs may write at the same time.

    Args:
        path: of the file, in the site's state folder, beside the folder of the experiments.
        limits: the site's budgets.
        own: folder of the experiment that writes; None to read alone. That of a run on one machine lies in
            the run.
    """

    def __init__(self, path: Path, limits: PrivacyConfig, own: Path | None = None) -> None:
        self._path, self._limits, self._own = path, limits, own
        self._chain, self._releases, self._tally = Chain(path, RELEASE), list[Release](), _Tally()
        self._compared = False  # with the anchors of all experiments, since the file is the one that it is

    @cached_property
    def experiment(self) -> str:
        """The name of the experiment that writes: of runs in folders of the same name, each has its own."""
        assert self._own
        if self._own.parents[1] == self._path.parent:
            return self._own.name
        anchor, name = read_anchor(self._own), self._own.name
        if not anchor.name:
            taken = {release.experiment for release in self.releases()}
            names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
            anchor = replace(anchor, name=next(one for one in names if one not in taken))
            write_anchor(self._own, anchor)
        return anchor.name

    def begin(self) -> None:
        """Create the file where there is none.

        An experiment that is older than the file has released no one knows what: one line says so.
        """
        self.releases()
        if self._path.exists():
            return
        with self._locked():
            self.releases()
            if not self._path.exists():
                self._create([Release(now(), n, "unknown", update=True) for n in self._before_the_ledger()])

    def _create(self, first: Sequence[Release]) -> None:
        with replacing(self._path, private=True) as temporary:
            temporary.touch()
            chain = Chain(temporary, RELEASE)
            for release in first:
                chain.append(release)
                list(chain.read())

    def _before_the_ledger(self) -> list[str]:
        """Return the names of experiments that have answered, of which the ledger cannot have lost a line."""
        folders = (self._path.parent / EXPERIMENTS).glob("*")
        return sorted(f.name for f in folders if _has_answered(f) and not (f / ANCHOR).exists())

    def _locked(self) -> IO[str]:
        return hold(self._path.with_name(f".{self._path.name}.lock"), _WAIT, f".{FILE}.*.tmp")

    def releases(self) -> Sequence[Release]:
        """Return all releases so far; an incomplete last line, of a process that was killed, is none."""
        if self._chain.replaced():
            self._chain, self._releases, self._tally = Chain(self._path, RELEASE), [], _Tally()
            self._compared = False
        for release in self._chain.read():
            self._releases.append(release)
            self._tally.add(release)
        return self._releases

    # Whether it is whole

    def confirm(self, held: str | None) -> None:
        """Check that the ledger is whole, and has the line whose digest the server holds.

        The digest of a server blocks its own experiment alone, so that no other one can be blocked by a lie.

        Raises:
            LedgerBroken: says what is missing, and what to do.
        """
        self.releases()
        if self._own and held is not None:
            anchor, lacking = read_anchor(self._own), None if self._chain.holds(held) else held
            if anchor.held != lacking:
                write_anchor(self._own, replace(anchor, held=lacking))
                self._compared = False
        self._check_whole()

    def _check_whole(self) -> None:
        if self._compared and not self._chain.broken:
            return
        blocking = [
            (folder.name, anchor if folder == self._own else replace(anchor, held=None))
            for folder, anchor in self._anchors()
        ]
        why, _, _ = breaks(self._chain, blocking)
        if why:
            raise LedgerBroken(
                f"{self._path} is incomplete: {'; '.join(why)}. This site releases nothing until its "
                "administrator restores the newest copy of the file, or accepts the gap: suture ledger "
                f"{quote(str(self._path.parent))} --accept"
            )
        self._compared = True

    def _anchors(self) -> Iterator[tuple[Path, Anchor]]:
        folders = {path.parent for path in (self._path.parent / EXPERIMENTS).glob(f"*/{ANCHOR}")}
        for folder in sorted(folders | ({self._own} if self._own else set())):
            yield folder, read_anchor(folder)

    def breaks(self) -> tuple[list[str], int, list[str]]:
        """Return in which ways the ledger is not whole, as far as this machine knows; see `breaks`."""
        self.releases()
        return breaks(self._chain, [(folder.name, anchor) for folder, anchor in self._anchors()])

    def accept(self) -> None:
        """Accept, in a new line, that releases are missing or changed: the site may release again.

        Raises:
            ConfigError: the ledger is whole.
        """
        with self._locked():
            why, missing, unknown = self.breaks()
            if not why:
                raise ConfigError(f"{self._path} is complete: there is nothing to accept")
            self._chain.append(Mark(now(), "accepted", missing, why, unknown))
            self.releases()

    @property
    def labels(self) -> Mark | None:
        """What the site's classes are called and contain; None where it has stated neither."""
        return self._chain.labels

    def accept_labels(self, names: Mapping[str, str], parents: Mapping[str, Sequence[str]]) -> None:
        """Write a new line if they are others than those of the last one.

        Args:
            names, parents: see `Mark`.

        Raises:
            LedgerBroken, OSError: as `record`.
        """
        own, above = dict(names), {name: list(parents[name]) for name in parents}
        digest = blake3(json.dumps([own, above], sort_keys=True).encode()).hexdigest()
        self.begin()
        with self._locked():
            self.releases()
            last = self.labels.digest if self.labels else None
            if last != digest and (last or own or above):
                self._check_whole()
                self._chain.append(Mark(now(), "labels", names=own, parents=above, digest=digest))
                self.releases()

    @property
    def missing(self) -> int:
        """Number of releases that are missing or changed, as accepted and at least: ε is a lower bound."""
        return self._chain.missing

    @property
    def accepted(self) -> Sequence[str]:
        """What the administrator has accepted, in sentences."""
        return self._chain.accepted

    # New releases

    def check(
        self,
        task: TaskData,
        experiment: str,
        classes: Collection[str],
        mechanism: Mechanism | None = None,
    ) -> None:
        """Check that a task may be answered with something new.

        Args:
            classes: those whose figures the answer may have.
            mechanism: that would protect the patients in it.

        Raises:
            BudgetSpent: names the budget and its setting.
        """
        split = task.split if task.task == "evaluate" else ""
        trains = task.task == "train" and bool(task.shared or task.head or task.channels)
        new = Release("", experiment, task.task, task.round, split, trains, noise=self._limits.noise)
        if mechanism:
            multiplier, rate, steps = mechanism
            new = replace(new, multiplier=multiplier, rate=rate, steps=steps)
        self.releases()
        self._check(replace(new, figures=dict.fromkeys(classes, 1)))

    def check_epsilon(self, experiment: str, more: Iterable[Mechanism]) -> None:
        """Check that ε allows mechanisms of an experiment beyond all that was released.

        Raises:
            BudgetSpent: names ε and its setting.
        """
        own, more = self._tally.mechanisms[experiment], list(more)
        others = sum(self._tally.mechanisms.values(), list[Mechanism]())
        limits = (("epsilon", self._limits.epsilon, own), ("max_epsilon", self._limits.max_epsilon, others))
        for setting, limit, before in limits:
            if limit is None:
                continue
            total = composed([*before, *more], self._limits.delta)
            if total is None or total > limit:
                where = f"in {experiment}" if setting == "epsilon" else "in all experiments"
                sum_ = "∞" if total is None else f"{rounded_up(total):g}"
                what = f"{len(before)} protected answers {where}; with what is asked for ε would be {sum_}"
                raise _spent(what, setting, limit)

    def _check(self, new: Release) -> None:
        told, limits = self._tally, self._limits
        if new.experiment not in told.answers and len(told.answers) >= limits.max_experiments:
            what = f"answers in {len(told.answers)} experiments, not counting {new.experiment}"
            raise _spent(what, "max_experiments", limits.max_experiments)
        if (answers := told.answers[new.experiment]) >= limits.max_answers:
            raise _spent(f"{answers} answers in {new.experiment}", "max_answers", limits.max_answers)
        again = told.anew[new.experiment]
        if again >= limits.reanswers and new.task != "handshake" and new.key in told.keys:
            what = (
                f"{again} repeated answers in {new.experiment}, and {new.task} of round {new.round} is a "
                "further repetition"
            )
            raise _spent(what, "reanswers", limits.reanswers)
        for name, times in new.figures.items():
            if told.figures[name] + times > limits.max_figures:
                raise _spent(f"{told.figures[name]} figures of {name!r}", "max_figures", limits.max_figures)
        if mechanism := new.mechanism:
            self.check_epsilon(new.experiment, [mechanism])

    def record(self, new: Release) -> str:
        """Write a release to the disk; one that is in the ledger already is not written twice.

        Returns:
            the digest of the ledger, which the server holds from now on.

        Raises:
            BudgetSpent: another job of the site has spent what was left meanwhile; nothing is written.
            LedgerBroken: the ledger is not whole; nothing is written.
            OSError: the disk is full or the file cannot be written.
        """
        self.begin()
        with self._locked():
            self.releases()
            self._check_whole()
            # Without an answer it is the cost of steps alone, and those are never the same ones.
            if not new.answer or (new.key, new.answer) not in self._tally.seen:
                self._check(new)
                self._chain.append(new)
                self.releases()
            digest, lines = self._chain.digest, self._chain.lines
        # After the ledger, and not synchronised: an anchor that is behind names a line that the ledger has.
        if self._own and (anchor := read_anchor(self._own)).digest != digest:
            write_anchor(self._own, replace(anchor, digest=digest, lines=lines))
        return digest

    def spent(self) -> Spent:
        """Return what the site tells a server about its releases."""
        releases = self.releases()
        updates = [r for r in releases if r.update]
        return Spent(
            epsilon((r.mechanism for r in releases if r.mechanism), self._limits.delta),
            len(updates),
            sum(r.unprotected for r in updates),
            len({r.experiment for r in updates}),
            self._tally.figures.total(),
            sum(r.numbers for r in releases),
            self.missing,
        )


def _spent(what: str, setting: str, limit: float) -> BudgetSpent:
    return BudgetSpent(
        f"this site has already released {what}; {setting} = {limit} under [privacy] in suture.toml "
        "allows no more. `suture ledger` lists its releases"
    )


def _has_answered(folder: Path) -> bool:
    """Whether a folder is of an experiment in which the site has released something."""
    names = ("counts.json", "noise.key")
    return any((folder / name).exists() for name in names) or any(folder.glob("round-*.safetensors"))


@dataclass
class _Tally:
    """What a ledger counts of its releases; one more takes the same time however many there are.

    Attributes:
        answers: of each experiment.
        anew: tasks of each experiment that came again and were answered anew; each site info may differ from
            the former.
        figures: how often figures of each class have left.
        mechanisms: that protect what each experiment has released; ones without noise, too.
        keys: of all releases.
        seen: key and answer of all releases.
    """

    answers: Counter[str] = field(default_factory=Counter)
    anew: Counter[str] = field(default_factory=Counter)
    figures: Counter[str] = field(default_factory=Counter)
    mechanisms: defaultdict[str, list[Mechanism]] = field(default_factory=lambda: defaultdict(list))
    keys: set[_Key] = field(default_factory=set)
    seen: set[tuple[_Key, str]] = field(default_factory=set)

    def add(self, release: Release) -> None:
        """Count one more."""
        key = release.key
        self.answers[release.experiment] += 1
        self.anew[release.experiment] += key in self.keys and release.task in _ONCE
        self.figures.update(release.figures)
        if release.mechanism:
            self.mechanisms[release.experiment].append(release.mechanism)
        self.keys.add(key)
        self.seen.add((key, release.answer))


def tally_of(releases: Iterable[Release]) -> _Tally:
    """Count some releases."""
    tally = _Tally()
    for release in releases:
        tally.add(release)
    return tally
