"""The ledger of a site: everything that it has released, in all experiments, and its budgets.

A line of ``ledger.jsonl`` is one release. It is on the disk before the answer leaves, and no line is ever
changed: what was released stays released, whatever becomes of the experiment. The lines are chained, and a
site whose ledger is not whole releases nothing: each line carries a digest of all lines before it, and a
salt.

A line that was changed, removed or put in from another site does not fit the digests after it. A ledger
that was rolled back, emptied or deleted is whole in itself, but lacks a digest that others have noted: the
site in the folder of each experiment (`Anchor`), and the server, which receives the newest digest with each
answer. The salt, 128 random bits that no message carries, keeps a server from guessing lines by their
digests.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import secrets
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from shlex import quote
from typing import IO, Any, Generic, Literal, TypeVar

from blake3 import blake3
from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as validated
from pydantic_core import from_json, to_jsonable_python

from suture.core.errors import ConfigError
from suture.core.files import append_line, hold, open_regular, read_regular, replacing
from suture.core.privacy import PrivacyConfig
from suture.core.runtime import now
from suture.core.validation import OPEN, STRICT
from suture.federation.site.abstention import BudgetSpent, LedgerBroken
from suture.federation.state_files import EXPERIMENTS
from suture.privacy.differential_privacy import Mechanism, compose, epsilon, rounded_up
from suture.protocol.messages import (
    Count,
    Digest,
    Spent,
    TaskData,
    TaskName,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

ANCHOR = "ledger.json"
"""File of the `Anchor` in the folder of an experiment."""


@validated(frozen=True, config=STRICT)
class Mark:
    """A line of the ledger that is no release.

    Attributes:
        mark: ``accepted``: the administrator has accepted that lines before it are missing or changed;
            ``labels``: what the site's classes are called and contain from here on.
        missing: number of these, as far as it is known.
        why: what the administrator accepted, in sentences.
        known: digests that others hold of lines that the ledger has lost.
        names: of ``labels``: the site's own table of spellings, with the class that each one means.
        parents: of ``labels``: the direct parents of the site's classes, and of these, by its atlas.
        digest: BLAKE3 of `names` and `parents`.
    """

    time: str
    mark: Literal["accepted", "labels"]
    missing: Count = 0
    why: list[str] = field(default_factory=list)
    known: list[Digest] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    parents: dict[str, list[str]] = field(default_factory=dict)
    digest: Digest | None = None


@validated(frozen=True, config=OPEN)
class Anchor:
    """What an experiment's folder notes of the ledger.

    Attributes:
        digest, lines: of the ledger after the experiment's newest answer.
        held: the digest that the experiment's server sent and the ledger lacked, if there was one.
        name: of the experiment in the ledger, where that is not the folder's.
    """

    digest: Digest | None = None
    lines: Count = 0
    held: Digest | None = None
    name: str = ""


def read_anchor(folder: Path) -> Anchor:
    """Read the anchor of an experiment; an empty one where there is none that can be read.

    It is not synchronised to the disk, so a power failure may damage it: that is not a break.
    """
    try:
        return _ANCHOR.validate_json(read_regular(folder / ANCHOR))
    except FileNotFoundError:
        return Anchor()
    except (OSError, ValidationError):
        log.warning("%s cannot be read, so the ledger is not compared with it", folder / ANCHOR)
        return Anchor()


def write_anchor(folder: Path, anchor: Anchor) -> None:
    """Write the anchor of an experiment.

    Raises:
        DiskError: it cannot be written; the one before stays.
    """
    with replacing(folder / ANCHOR, durable=False, private=True) as temporary:
        temporary.write_text(json.dumps(asdict(anchor)))


_ANCHOR = TypeAdapter(Anchor)

_MARK = TypeAdapter(Mark)


class Chain(Generic[T]):
    """The lines of a ledger, as far as they were read.

    Attributes:
        lines: number of lines.
        broken: why the lines do not follow from one another; empty where they do, or a later mark accepts it.
        missing: number of releases that the marks say are missing or changed.
        accepted: what the marks accept, in sentences.
        labels: the last mark of that sort.

    Args:
        path: of the ledger.
        parse: validates a line that is no mark.
    """

    def __init__(self, path: Path, parse: TypeAdapter[T]) -> None:
        self._path, self._parse = path, parse
        self._hash, self._digests = blake3(), set[str]()
        self._read = 0
        self._file: int | None = None  # its inode, once it was read
        self.lines, self.missing = 0, 0
        self.broken = ""
        self.accepted: list[str] = []
        self.labels: Mark | None = None

    @property
    def digest(self) -> str:
        """The digest of all lines."""
        return self._hash.hexdigest()

    def holds(self, digest: str | None) -> bool:
        """Whether a digest, if there is one, is of a line that the ledger has, or whose loss was accepted."""
        return digest is None or digest in self._digests

    def was_replaced(self) -> bool:
        """Whether the file is another one than was read, or a shorter one."""
        now = self._path.stat() if self._path.exists() else None
        # An editor, or a restored backup, puts another file in its place; lines that were read may be gone.
        inode, size = (now.st_ino, now.st_size) if now else (None, 0)
        return inode != self._file or size < self._read

    def read(self) -> Iterator[T]:
        """Yield what was added since; an incomplete last line, of a process that was killed, is none.

        Raises:
            ConfigError: it is no file.
        """
        if not self._path.exists():
            return
        if not self._path.is_file():
            raise ConfigError(f"{self._path} is not a file; move it away, because the ledger is stored there")
        if self._file is not None and self._path.stat().st_size == self._read:
            return
        with open_regular(self._path) as file:
            if self._file is None:
                self._file = os.fstat(file.fileno()).st_ino
            file.seek(self._read)
            whole = file.read().rpartition(b"\n")[0]
        for line in whole.split(b"\n") if whole else ():
            item = self._take(line)
            self._read += len(line) + 1
            # Over a damaged line too: what follows it is compared with the lines as they are.
            self._hash.update(line + b"\n")
            self._digests.add(self.digest)
            if item is not None:
                yield item

    def _take(self, line: bytes) -> T | None:
        """Return the release of a line; of a mark, and of a line that is damaged, there is none."""
        self.lines += 1
        try:
            values = from_json(line)
            after = values.pop("after", None)
            values.pop("salt", None)
            mark = _MARK.validate_python(values) if "mark" in values else None
            item = None if mark else self._parse.validate_python(values)
        except (ValueError, AttributeError, TypeError):  # a ValidationError is a ValueError
            self.broken = self.broken or f"line {self.lines} is damaged"
            return None
        if after == self.digest:
            self._mark(mark)
        else:
            self.broken = self.broken or (
                f"line {self.lines} does not match the lines before it: some were removed or changed, "
                "or belong to another site"
            )
        return item

    def _mark(self, mark: Mark | None) -> None:
        if mark and mark.mark == "labels":
            self.labels = mark
        elif mark:
            self._digests.update(mark.known)
            self.broken = ""
            self.missing += mark.missing
            self.accepted += [f"{why} (accepted {mark.time[:10]})" for why in mark.why]

    def append(self, line: object) -> None:
        """Append a release or a mark to the ledger, whose lines were all read.

        Raises:
            DiskError: the disk is full or the file cannot be written; its lines are unchanged.
        """
        values: dict[str, Any] = to_jsonable_python(line)
        chained = {**values, "after": self.digest, "salt": secrets.token_hex(16)}
        append_line(self._path, chained, durable=True)


def breaks(chain: Chain[Any], anchors: Iterable[tuple[str, Anchor]]) -> tuple[list[str], int, list[str]]:
    """Return in which ways a ledger is not whole.

    Args:
        anchors: of the experiments, by name.

    Returns:
        a sentence for each break, how many releases are missing or changed at least, and the digests that the
        ledger lacks.
    """
    why, missing, unknown = [chain.broken] if chain.broken else [], bool(chain.broken) * 1, []
    for name, anchor in anchors:
        if anchor.digest is not None and not chain.holds(anchor.digest):
            unknown.append(anchor.digest)
            missing = max(missing, 1, anchor.lines - chain.lines)
            why.append(
                f"experiment {name} noted line {anchor.lines} with its last answer, but the ledger has "
                f"{chain.lines} lines"
            )
        if anchor.held is not None and not chain.holds(anchor.held):
            unknown.append(anchor.held)
            missing = max(missing, 1)
            why.append(f"the server of {name} has the digest of a line that is missing here")
    return why, missing, unknown


LEDGER_FILE = "ledger.jsonl"


@dataclass(frozen=True)
class Requester:
    """For whom a site works: FLARE's id of the job, and its submitter; empty where there is no such thing."""

    job: str = ""
    submitter: str = ""


NOBODY = Requester()

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
        job, submitter: FLARE's id of the job that requested it, and the user, as the server states them.
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
    job: str = ""
    submitter: str = ""

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


class Ledger:
    """The ledger of one site, which several jobs may write at the same time.

    Args:
        path: of the file, in the site's state folder, beside the folder of the experiments.
        limits: the site's budgets.
        own: folder of the experiment that writes; None to read alone. That of a run on one machine lies in
            the run.
        requester: that each new line names.
    """

    def __init__(
        self,
        path: Path,
        limits: PrivacyConfig,
        own: Path | None = None,
        requester: Requester = NOBODY,
    ) -> None:
        self._path, self._limits, self._own, self._requester = path, limits, own, requester
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
        with self._lock():
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

    def _lock(self) -> IO[str]:
        return hold(self._path.with_name(f".{self._path.name}.lock"), _WAIT, f".{LEDGER_FILE}.*.tmp")

    def releases(self) -> Sequence[Release]:
        """Return all releases so far; an incomplete last line, of a process that was killed, is none."""
        if self._chain.was_replaced():
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
        with self._lock():
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
        with self._lock():
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
        release = Release("", experiment, task.task, task.round, split, trains, noise=self._limits.noise)
        if mechanism:
            multiplier, rate, steps = mechanism
            release = replace(release, multiplier=multiplier, rate=rate, steps=steps)
        self.releases()
        self._check(replace(release, figures=dict.fromkeys(classes, 1)))

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
            total = compose([*before, *more], self._limits.delta)
            if total is None or total > limit:
                where = f"in {experiment}" if setting == "epsilon" else "in all experiments"
                sum_ = "∞" if total is None else f"{rounded_up(total):g}"
                what = f"{len(before)} protected answers {where}; with what is asked for ε would be {sum_}"
                raise _spend(what, setting, limit)

    def _check(self, new: Release) -> None:
        tally, limits = self._tally, self._limits
        if new.experiment not in tally.answers and len(tally.answers) >= limits.max_experiments:
            what = f"answers in {len(tally.answers)} experiments, not counting {new.experiment}"
            raise _spend(what, "max_experiments", limits.max_experiments)
        if (answers := tally.answers[new.experiment]) >= limits.max_answers:
            raise _spend(f"{answers} answers in {new.experiment}", "max_answers", limits.max_answers)
        again = tally.anew[new.experiment]
        if again >= limits.reanswers and new.task != "handshake" and new.key in tally.keys:
            what = (
                f"{again} repeated answers in {new.experiment}, and {new.task} of round {new.round} is a "
                "further repetition"
            )
            raise _spend(what, "reanswers", limits.reanswers)
        for name, times in new.figures.items():
            if tally.figures[name] + times > limits.max_figures:
                raise _spend(f"{tally.figures[name]} figures of {name!r}", "max_figures", limits.max_figures)
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
        with self._lock():
            self.releases()
            self._check_whole()
            # Without an answer it is the cost of steps alone, and those are never the same ones.
            if not new.answer or (new.key, new.answer) not in self._tally.seen:
                self._check(new)
                self._chain.append(replace(new, **vars(self._requester)))
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


def _spend(what: str, setting: str, limit: float) -> BudgetSpent:
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
