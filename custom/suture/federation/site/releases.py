"""What leaves a site: within its budgets, kept as it left, and a line of its ledger.

A repeated task gets its kept answer again. Beside the answer stands its release, with the settings under
which it was made, so that a site that is killed before the ledger has the line writes it afterwards as it
would have been.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import to_jsonable_python

from suture.core.atlas import read_atlas
from suture.core.errors import SutureError
from suture.core.noise import gaussian
from suture.core.relations import Relations
from suture.core.validation import in_words
from suture.data.config import SiteConfig
from suture.federation.accounting import Mechanism
from suture.federation.differential_privacy import protected
from suture.federation.plan import Plan
from suture.federation.site.first_counts import FirstCounts
from suture.federation.site.ledger import FILE, RELEASE, Ledger, Release, release_of, spent_on
from suture.federation.site.patient_privacy import count_mechanism, mechanism_of_round, planned_multiplier
from suture.federation.store import Rounds, read_state
from suture.learning.patient_privacy import PatientPrivacy
from suture.protocol.check import AllowedReply
from suture.protocol.messages import Labels, Reply, TaskData, Update
from suture.protocol.packing import Packed, digest, pack, unpack
from suture.protocol.precision import sent

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answer:
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
    """

    def __init__(self, plan: Plan, config: SiteConfig, rounds: int, folder: Path) -> None:
        self._plan, self._config, self._rounds, self._folder = plan, config, rounds, folder
        self._privacy = config.privacy
        self.first_counts = FirstCounts(folder)
        self._patients: PatientPrivacy | None = None  # once it is planned
        self._accepted = False  # whether the ledger has the names and parents of the classes as they are

    @cached_property
    def ledger(self) -> Ledger:
        """The ledger of the site, which outlives its experiments."""
        folder = self._config.storage.ledger or self._folder.parents[1]
        ledger = Ledger(folder / FILE, self._privacy, self._folder)
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

    def private(self, patients: Sequence[str]) -> PatientPrivacy | None:
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
        known = first.patients or 1
        if first.multiplier is None:
            found = planned_multiplier(self._plan, self._config, self._rounds, known)
            planned = [self._mechanism(r, known, found) for r in range(1, self._rounds + 1)]
            self.ledger.check_epsilon(experiment, planned)
            first.keep(known, found)
        self._patients = PatientPrivacy(self._privacy.clip or 1.0, first.multiplier or 0.0, known)
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

    def mark(self) -> dict[str, int]:
        """Return what the state of a round says for `cover`: the length of the ledger when it was trained."""
        return {"releases": len(self.ledger.releases())} if self._patients else {}

    def cover(self, state: Mapping[str, Any]) -> None:
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

    def kept(self, task: TaskData, request: str, allowed: AllowedReply) -> tuple[Packed, Release] | None:
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

    def limited(self, update: Update, task: TaskData, allowed: AllowedReply, images: int) -> Update:
        """Return an update as it may leave: clipped, with noise, figures rounded, in the job's precision.

        Args:
            images: that the steps of the round were of, and so its losses; see `Egress.loss_parts`.
        """
        egress = allowed.egress
        samples = allowed.images // egress.loss_parts if egress.loss_parts else images
        update = protected(update, task, self._privacy, egress.losses, samples)
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

    def leave(self, packed: Packed, release: Release, allowed: AllowedReply) -> Answer:
        """Write the release into the ledger; return the answer with what the site says of its ledger now.

        That is no part of what is kept: other experiments may have released more meanwhile.

        Raises:
            BudgetSpent, LedgerBroken, OSError: as `Ledger.record`; nothing may leave.
        """
        stated = self.ledger.record(release)
        header = {**packed.header, "ledger": stated}
        if self._privacy.clip is not None and "spent" in header:
            header["spent"] = to_jsonable_python(self.ledger.spent())
        return Answer(Packed(packed.tensors, header), replace(allowed, ledger=stated))

    def request(self, task: TaskData, allowed: AllowedReply, *, afresh: bool = False) -> str:
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
