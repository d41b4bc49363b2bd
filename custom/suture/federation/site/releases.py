"""What a site has released in an experiment: the counts it has sent, and each answer that has left it.

An answer leaves within the budgets, is kept as it left, and is a line of the ledger. A repeated task gets
its kept answer again. Beside the answer stands its release, with the settings under which it was made, so
that a site that is killed before the ledger has the line writes it afterwards as it would have been.

Counts are sent once in an experiment, whatever becomes of its data.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.dataclasses import dataclass as validated
from pydantic_core import to_jsonable_python
from torch import Tensor

from suture.core.errors import ConfigError, SutureError
from suture.core.files import read_json, write_json
from suture.core.labels import LabelSet
from suture.core.ontology import Relations, read_atlas
from suture.core.privacy import PrivacyConfig
from suture.core.runtime import now
from suture.core.validation import OPEN, in_words, parse
from suture.data.config import SiteConfig
from suture.data.table import Split
from suture.federation.plan import Plan, round_context
from suture.federation.site.ledger import LEDGER_FILE, NOBODY, RELEASE, Ledger, Release, Requester
from suture.federation.state_files import Rounds, read_state
from suture.learning.dp_sgd import PatientPrivacy, gaussian
from suture.learning.evaluation import NOTHING, counts_of
from suture.methods.base import resolve_training
from suture.privacy.differential_privacy import MULTIPLIERS, Mechanism, Noise, multiplier_for
from suture.protocol.check import AllowedReply
from suture.protocol.decisions import DecidedClass, DecidedGroup
from suture.protocol.egress import Channel, Layout, round_figure, training_loss
from suture.protocol.messages import (
    Counts,
    Evaluation,
    Label,
    Labels,
    Metrics,
    Reply,
    Scores,
    TaskData,
    TaskName,
    Trait,
    Update,
    fields_with,
)
from suture.protocol.packing import Packed, digest, pack, sent, unpack

log = logging.getLogger(__name__)


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
            if (now := _identity(path)) != self._known[0]:
                self._known = now, parse(_Sent, read_json(path), str(path))
            return self._known[1]
        return _Sent({})

    def _write(self, sent: _Sent) -> None:
        path = self._folder / FIRST_COUNTS
        write_json(path, asdict(sent), private=True)
        self._known = _identity(path), sent


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_ino, found.st_mtime_ns


def _as_first(groups: Mapping[str, DecidedGroup], first: _SentCounts) -> dict[str, DecidedGroup]:
    pairs = {value: pair for value in groups if (pair := first.get(value))}
    return {value: replace(groups[value], positives=p, negatives=n) for value, (p, n) in pairs.items()}


@dataclass(frozen=True)
class SiteAnswer:
    """A site's answer to a task, packed.

    Attributes:
        allowed: what may be in it; the site's filter checks what leaves against it. None of an abstention.
    """

    packed: Packed
    allowed: AllowedReply | None = None


class Releases:
    """What a site has released in one experiment, and may still release.

    Args:
        rounds: of the run.
        folder: of the experiment at the site. Its ledger lies two folders above, unless `config` says where.
        requester: that the ledger names.
    """

    def __init__(
        self, plan: Plan, config: SiteConfig, rounds: int, folder: Path, requester: Requester = NOBODY
    ) -> None:
        self._plan, self._config, self._rounds, self._folder = plan, config, rounds, folder
        self._requester = requester
        self._privacy = config.privacy
        self.first_counts = FirstCounts(folder)
        self._patients: PatientPrivacy | None = None  # once it is planned
        self._accepted = False  # whether the ledger has the names and parents of the classes as they are

    @cached_property
    def ledger(self) -> Ledger:
        """The ledger of the site, which outlives its experiments."""
        folder = self._config.storage.ledger or self._folder.parents[1]
        ledger = Ledger(folder / LEDGER_FILE, self._privacy, self._folder, self._requester)
        ledger.begin()
        return ledger

    @property
    def _experiment(self) -> str:
        return self.ledger.experiment

    def accept_labels(self, own: Labels) -> None:
        """Write into the ledger the site's names of classes and their parents, where it has others.

        Once, like the data: a server could leave out the handshake.

        Args:
            own: the classes that it annotates.

        Raises:
            ConfigError: the atlas cannot be read.
            LedgerBroken, OSError: as `Ledger.record`.
        """
        if self._accepted:
            return
        data = self._config.data
        relations = read_atlas(data.atlas).relations() if data.atlas else Relations()
        related = [name for name in relations.with_ancestors(own) if name in relations.parents]
        self.ledger.accept_labels(data.synonyms, {name: relations.parents[name] for name in related})
        self._accepted = True

    def plan_privacy(self, patients: Sequence[str]) -> PatientPrivacy | None:
        """Return how the site trains with its ε per patient; None where it has none.

        The first time, noise is added to its number of patients, and the ledger has it before anything
        follows from it; then the noise of the steps is planned for the whole job.

        Args:
            patients: of each training image.

        Raises:
            BudgetSpent: the job would exceed `epsilon` or `max_epsilon`.
            ConfigError: the job cannot have this ε; see `planned_multiplier`.
        """
        target, first, experiment = self._privacy.epsilon, self.first_counts, self._experiment
        if target is None or self._patients:
            return self._patients
        count = count_mechanism(target)
        if first.patients is None:
            noisy = len(set(patients)) + count.multiplier * float(gaussian(()))
            # The ledger before the number: killed between the two, the site draws, and pays for, another one.
            self.ledger.record(spent_on(experiment, "handshake", 0, self._privacy, count))
            first.keep(max(1, round(noisy)))
        number = first.patients or 1
        if first.multiplier is None:
            multiplier = planned_multiplier(self._plan, self._config, self._rounds, number)
            planned = [self._mechanism(r, number, multiplier) for r in range(1, self._rounds + 1)]
            self.ledger.check_epsilon(experiment, planned)
            first.keep(number, multiplier)
        self._patients = PatientPrivacy(self._privacy.clip or 1.0, first.multiplier or 0.0, number)
        return self._patients

    def _mechanism(self, round_: int, patients: int, multiplier: float) -> Mechanism:
        return mechanism_of_round(self._plan, self._config, self._rounds, round_, patients, multiplier)

    def mechanism(self, task: TaskData) -> Mechanism | None:
        """Return what protects the patients in a new answer to a task; None where nothing does."""
        own = self._patients if task.task == "train" else None
        return self._mechanism(task.round, own.patients, own.multiplier) if own else None

    def spend(self, task: TaskData) -> None:
        """Write into the ledger what steps of DP-SGD cost of which no answer to the task can leave: the site
        trains for a lost state, from which the next round goes on, or abstains after them.

        Raises:
            BudgetSpent, LedgerBroken, OSError: as `Ledger.record`.
        """
        if of := self.mechanism(task):
            self.ledger.record(spent_on(self._experiment, "train", task.round, self._privacy, of))

    def anchor_mark(self) -> dict[str, int]:
        """The length of the ledger when a round was trained, which its state has for `settle_unsent`."""
        return {"releases": len(self.ledger.releases())} if self._patients else {}

    def settle_unsent(self, state: Mapping[str, Any]) -> None:
        """Spend on a stored round, which is about to be used, if the site was killed before its answer left.

        Args:
            state: header of the round's state.

        Raises:
            BudgetSpent, LedgerBroken, OSError: as `Ledger.record`.
        """
        since, own = state.get("releases"), (self._experiment, "train", state.get("round", 0), "")
        # The state is there and no release of its round came after it: the answer never left, but its steps
        # are in the state, and leave with the next update.
        if since is not None and all(release.key != own for release in self.ledger.releases()[since:]):
            self.spend(TaskData("train", own[2]))

    def read_kept(self, task: TaskData, request: str, allowed: AllowedReply) -> tuple[Packed, Release] | None:
        """Return the kept answer to a repeated task, and its release; None where a new one may be made.

        The site info is made anew each time, of the counts that were sent first.

        Raises:
            BudgetSpent: a new one would exceed a budget; names it and its setting.
        """
        if task.task == "handshake":
            return None
        path = self._files(task).path(task.round)
        kept = _read(path, request) if path.exists() else None
        if kept is None:
            self.ledger.check(task, self._experiment, allowed.own, self.mechanism(task))
        return kept

    def limit(self, update: Update, task: TaskData, allowed: AllowedReply, images: int) -> Update:
        """Return an update as it may leave: clipped, with noise, figures rounded, in the job's precision.

        Args:
            images: that the steps of the round were of, and so its losses; see `Egress.loss_parts`.
        """
        egress, limits = allowed.egress, self._privacy
        samples = allowed.images // egress.loss_parts if egress.loss_parts else images
        scalars = {
            name: training_loss(value, samples, limits) if name in egress.losses else round_figure(value)
            for name, value in update.scalars.items()
        }
        own = fields_with(Update, Trait.LOSS)
        shown: dict[str, Any] = {name: training_loss(getattr(update, name), samples, limits) for name in own}
        shown["scalars"] = {name: value for name, value in scalars.items() if value is not None}
        update = replace(update, **shown)
        if limits.clip is not None and limits.epsilon is None:  # with ε, each step of training has its noise
            update = Noise(limits.clip, limits.noise).apply(update, task)
        return sent(update, task, self._plan.transport)

    def keep(
        self, task: TaskData, request: str, allowed: AllowedReply, reply: Reply
    ) -> tuple[Packed, Release]:
        """Pack a new answer, describe it as a release, and keep both until no server asks for them any more.

        They are not synchronised: an answer that is lost with the power is made again, as another release.

        Raises:
            OSError: nothing was written.
        """
        packed, channels = pack(reply), allowed.egress.going("up")
        mechanism = self.mechanism(task)
        release = release_of(reply, packed, task, self._experiment, self._privacy, channels, mechanism)
        if task.task != "handshake":
            header = {"request": request, "release": to_jsonable_python(release), "reply": packed.header}
            committed = task.committed if task.task == "train" else -1
            self._files(task).save(task.round, Packed(packed.tensors, header), committed, durable=False)
        return packed, release

    def leave(self, packed: Packed, release: Release, allowed: AllowedReply) -> SiteAnswer:
        """Write the release into the ledger; return the answer with what the site says of its ledger now.

        That is no part of what is kept: other experiments may have released more meanwhile.

        Raises:
            BudgetSpent, LedgerBroken, OSError: as `Ledger.record`; nothing may leave.
        """
        stated = self.ledger.record(release)
        header = {**packed.header, "ledger": stated}
        if self._privacy.clip is not None and "spent" in header:
            header["spent"] = to_jsonable_python(self.ledger.spent())
        return SiteAnswer(Packed(packed.tensors, header), replace(allowed, ledger=stated))

    def digest_request(self, task: TaskData, allowed: AllowedReply, *, afresh: bool = False) -> str:
        """Return the digest of all that an answer depends on but the site's own state and data.

        Args:
            afresh: whether it depends on no round before.
        """
        trains, limits = task.task == "train", self._privacy
        context = {"own": allowed.own, "images": allowed.images, "rounds": self._rounds if trains else 0}
        context |= {"computation": self._config.training.computation}
        context |= {"limits": [limits.min_count, limits.min_loss, limits.round_counts]}
        if trains and self._plan.secure_aggregation:  # else it would be added to updates of another plan
            context |= {"plan": self._plan.digest(self._rounds), "afresh": afresh}
        asked = pack(replace(task, committed=task.committed if trains else 0, best=0, ledger=None, mask=None))
        return digest(Packed(asked.tensors, {"task": asked.header, **context}))

    def _files(self, task: TaskData) -> Rounds:
        """Return the kept answers to one kind of task: of training those of the rounds whose states are kept,
        of evaluations the newest of each split."""
        return Rounds(self._folder / "answers" / (task.split if task.task == "evaluate" else task.task))


def _read(path: Path, request: str) -> tuple[Packed, Release] | None:
    """Return a kept answer, and its release, if it is the one to this request, and whole."""
    try:
        kept = read_state(path)
        if kept.header["request"] != request:
            return None
        packed = Packed(kept.tensors, kept.header["reply"])
        release = RELEASE.validate_python(kept.header["release"])
        if digest(packed) != release.answer:
            raise SutureError(f"{path} is damaged: it differs from the answer that was released")
        unpack(packed)  # one of another version may have fields that this one does not know
    except (SutureError, KeyError, ValidationError) as error:
        why = in_words(error.errors()[0]) if isinstance(error, ValidationError) else error
        log.warning("a stored answer cannot be sent again: %s", why)
        return None
    return packed, release


# An answer as a line of the ledger


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
    figures = Counter(reply.labels if isinstance(reply, Scores) else ())
    if isinstance(reply, Update):
        told = [channel.name for channel in channels if channel.of_classes]
        tensors = [tensor for name, tensor in reply.channels.items() if name in told]  # one may be missing
        figures.update({n for t in tensors for n, row in zip(reply.labels, t, strict=True) if row.any()})
    for metrics in _metrics(reply):
        for name, score in metrics.classes.items():
            # A site withholds the score of a class with few images: such a one says nothing.
            said = (score.auroc, score.recall, score.positives, score.negatives)
            figures[name] += any(value is not None for value in said)
    return +figures


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


# What DP-SGD costs in a job. A site sends its number of training patients once, with noise, and the sampling
# rate, the number of steps and their noise all follow from the number that was sent. So these tell no more,
# and ε covers all of them.

_COUNT = 40.0
"""The noise of the number of patients is this over ε: 10 patients at ε = 4. It takes 1 to 2 % of μ²."""


def count_mechanism(epsilon: float) -> Mechanism:
    """Return the mechanism by which a site sends its number of training patients."""
    return Mechanism(_COUNT / epsilon)


def mechanism_of_round(
    plan: Plan, config: SiteConfig, rounds: int, round_: int, patients: int, multiplier: float = 0.0
) -> Mechanism:
    """Return the mechanism of the steps of a round.

    Args:
        patients: number of the site's training patients, as sent.
    """
    where, own = round_context(plan.method, plan.seed, rounds, round_), config.training
    local = resolve_training(plan.method.local, where, own.lr, own.batch_size)
    if local.sampling != "shuffled":
        raise ConfigError(
            f"[privacy] epsilon: the job samples classes ({local.sampling}), and DP-SGD patients; set "
            'method.local.sampling = "shuffled"'
        )
    if local.batch_size > patients:
        raise ConfigError(
            f"[privacy] epsilon: a batch has {local.batch_size} patients, and the site about {patients}, a "
            "noisy number. Set batch_size under [training] in suture.toml to at most a tenth of its patients"
        )
    rate, steps = local.draws_of(patients)
    return Mechanism(multiplier, rate, steps * (1 if local.iterations else local.epochs))


def planned_multiplier(plan: Plan, config: SiteConfig, rounds: int, patients: int) -> float:
    """Return the noise of the steps of a job with which it has the site's ε.

    Raises:
        ConfigError: no noise within reason has it.
    """
    epsilon, delta = config.privacy.epsilon or 0.0, config.privacy.delta
    steps = [mechanism_of_round(plan, config, rounds, r, patients) for r in range(1, rounds + 1)]
    multiplier = multiplier_for(epsilon, delta, steps, count_mechanism(epsilon))
    if math.isinf(multiplier):
        raise ConfigError(
            f"[privacy] epsilon = {epsilon:g} needs noise of more than {MULTIPLIERS[1]:g} times clip in each "
            f"of the job's {sum(one.steps for one in steps)} steps. Set a larger epsilon, or a smaller "
            "batch_size under [training], or let the job have fewer rounds"
        )
    return multiplier
