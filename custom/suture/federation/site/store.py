"""What a site stores: its state between rounds, the counts it has sent, and each answer that has left it.

An answer leaves within the budgets, is kept as it left, and is a line of the ledger. A repeated task gets
its kept answer again. Beside the answer stands its release, with the settings under which it was made, so
that a site that is killed before the ledger has the line writes it afterwards as it would have been.

A state has the site's local parameters under ``fixed/``, the rest of the model that the site trained under
``local/`` (where the method keeps local models), the optimiser state under ``optimiser/``, and what else
the method keeps under ``kept/``. A frozen encoder, which no round changes, is a file of its own.

Counts are sent once in an experiment, whatever becomes of its data.
"""

from __future__ import annotations

import logging
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
from suture.core.runtime import seed_for
from suture.core.validation import OPEN, in_words, parse
from suture.data.config import SiteConfig, TrainingConfig
from suture.data.table import Split
from suture.federation.plan import Plan
from suture.federation.site.abstention import ComputationChanged, MissingState
from suture.federation.site.ledger import LEDGER_FILE, RELEASE, Ledger, Release, release_of, spent_on
from suture.federation.site.patient_privacy import count_mechanism, mechanism_of_round, planned_multiplier
from suture.federation.state_files import Rounds, read_state
from suture.learning.dp_sgd import PatientPrivacy, gaussian
from suture.learning.evaluation import NOTHING, counts_of
from suture.learning.training import LOSS_SCALE
from suture.models import build
from suture.models.classifier import HEADS, Classifier, check_tensors, load_tensors, relabel
from suture.privacy.differential_privacy import Mechanism, protect
from suture.protocol.check import AllowedReply
from suture.protocol.decisions import DecidedClass, DecidedGroup
from suture.protocol.egress import Shapes, shape_mismatch, strip_prefix
from suture.protocol.messages import Count, Counts, Label, Labels, Metrics, Reply, TaskData, Update
from suture.protocol.packing import Packed, digest, load, pack, save, sent, unpack

log = logging.getLogger(__name__)


@validated(frozen=True, config=OPEN)
class _Header:
    """The facts of a site's state; a site that has none yet has an empty one."""

    threads: int | None = None
    device: str | None = None
    precision: str | None = None
    compile: str | None = None
    labels: Labels = ()
    phase: str = ""
    round: Count = 0


def own_part_of(state: Packed) -> Packed:
    """Return a state without the optimiser's, and what else the method keeps."""
    own = {name: tensor for name, tensor in state.tensors.items() if name.startswith("fixed/")}
    return Packed(own, state.header)


class States:
    """The states of a site in one experiment.

    Args:
        site: its name.
        folder: of the experiment at the site.
    """

    def __init__(self, site: str, plan: Plan, training: TrainingConfig, folder: Path) -> None:
        self._site, self._plan, self._method, self._training = site, plan, plan.method, training
        self.files = Rounds(folder)
        self._encoder = folder / "encoder.safetensors"
        self._encoder_of: Classifier | None = None  # the model that holds it

    def before(self, task: TaskData) -> Packed:
        """Return the newest state of a committed round, or the state of the round whose model is evaluated.

        Raises:
            ComputationChanged: the state was made on another kind of device, in another precision, by a
                compiled backbone or not, or with another number of torch threads.
            ConfigError: another version of Suture wrote the state, or it is not one of a site.
        """
        # A later state is of a round that the server has not committed: it counts as if it were not there.
        found = self.files.newest(not_later_than=task.committed if task.task == "train" else task.round)
        if not found:
            return Packed({}, {})
        number, state = found
        parse(_Header, state.header, f"the state of round {number} in {self.files.folder}")
        for key, now in self._training.computation.items():
            if (before := state.header.get(key, now)) != now:
                raise ComputationChanged(
                    f"{self._site}: {key} was {before} in earlier rounds and is {now} now, which changes the "
                    "results. Set it back under [training] in suture.toml, or begin a new experiment"
                )
        return state

    def own_part(self, task: TaskData, state: Packed, model: Classifier) -> dict[str, Tensor]:
        """Return the site's local parameters, with a row of the head for each class of the task.

        Those that the site does not hold yet are taken from the task, or from the site's own random
        initialisation where `Share` says so.

        Raises:
            MissingState: the site no longer holds some of them.
        """
        self._fill_encoder(task, model)
        first = {name: tensor for name, tensor in task.fixed.items() if name not in model.frozen_names}
        share = self._method.sharing.share
        if first and share is not None and share.init == "own":
            seed = seed_for(self._plan.seed, self._site, "own")
            drawn = build(self._plan.model, model.labels, seed, pretrained=False).state_dict()
            first = {name: drawn[name] for name in first}
        # What the site has goes before what it is sent, which is only for a site that has nothing.
        tensors = {**first, **strip_prefix("fixed", state.tensors)}
        names = [name for name in self._method.sharing.local(model) if name not in model.frozen_names]
        missing = [name for name in names if name not in tensors]
        if missing:
            raise MissingState(f"the site no longer holds {missing[0]} and {len(missing) - 1} more tensors")
        return self._with_rows({name: tensors[name] for name in names}, task, state, model)

    def _fill_encoder(self, task: TaskData, model: Classifier) -> None:
        """Put the frozen encoder, if there is one, into the model: as received now, or once before.

        Raises:
            MissingState: the site no longer holds it.
            ConfigError: it is not of this model.
        """
        names = model.frozen_names - model.counters
        sent = {name: tensor for name, tensor in task.fixed.items() if name in names}
        if not names or (model is self._encoder_of and not sent):
            return
        if sent:
            save(self._encoder, Packed(sent, {}))
        else:
            try:
                sent = dict(load(self._encoder).tensors)
            except (SutureError, OSError) as error:
                raise MissingState(f"the site no longer holds the frozen encoder ({error})") from error
        check_tensors(sent, {n: t for n, t in model.state_dict().items() if n in names}, str(self._encoder))
        load_tensors(model, sent)
        self._encoder_of = model

    def local_model(self, task: TaskData, state: Packed, model: Classifier) -> dict[str, Tensor]:
        """Return the model that the site trained in the evaluated round; {} without one."""
        trained = strip_prefix("local", state.tensors)
        if not (self._method.sharing.keep_local and trained) or state.header.get("round") != task.round:
            return {}
        return self._with_rows(trained, task, state, model)

    def _with_rows(
        self, tensors: Mapping[str, Tensor], task: TaskData, state: Packed, model: Classifier
    ) -> dict[str, Tensor]:
        """Return the tensors with a row of the head, if it is among them, for each class of the task.

        Raises:
            ConfigError: they are not of this model.
        """
        head = {name: rows for name, rows in tensors.items() if name.startswith(HEADS)}
        before = tuple(state.header.get("labels", task.labels))
        expected = {}
        for name, tensor in model.state_dict().items():
            if head and name.startswith(HEADS):
                expected[name] = tensor.new_empty((len(before), *tensor.shape[1:]))
            elif name in tensors:
                expected[name] = tensor
        check_tensors(tensors, expected, f"the site's state of round {state.header.get('round')}")
        if not head:
            return dict(tensors)
        plan = self._plan
        return {**tensors, **relabel(head, before, task.labels, plan.seed, plan.model.row_init)}

    def kept_by_method(self, state: Packed) -> dict[str, Tensor]:
        """Return what the method has kept, as it returned it: the optimiser state and its channels."""
        return strip_prefix("optimiser", state.tensors) | strip_prefix("kept", state.tensors)

    def save(self, task: TaskData, model: Classifier, keep: Mapping[str, Tensor], **facts: Any) -> None:
        """Store the state of a trained round.

        Args:
            keep: what the method keeps.
            facts: for the header: the name of the phase, `Releases.anchor_mark` and `SiteMasks.mark`.

        Raises:
            ConfigError: the method keeps what it does not declare.
            OSError: the disk is full or cannot be written.
        """
        channels, moments = self._channels(model), {*model.names, LOSS_SCALE}
        title, tensors = self._method.about.title, {}
        for name, tensor in keep.items():
            if name not in channels and name.rpartition("/")[0] not in moments:
                raise ConfigError(
                    f"{title} keeps {name!r} at a site and does not declare it; add a "
                    'Channel(..., way="site") to its egress'
                )
            if name in channels and (wrong := shape_mismatch(channels[name], tensor, len(model.labels))):
                raise ConfigError(
                    f"{title} keeps {name!r} at a site, which is {wrong}; change the tensor, or the "
                    "channel that its egress declares"
                )
            tensors[f"{'kept' if name in channels else 'optimiser'}/{name}"] = tensor.detach().cpu()
        header = {**self._training.computation, "labels": list(task.labels), "round": task.round, **facts}
        state = Packed(self._method.sharing.stored(model) | tensors, header)
        self.files.save(task.round, state, task.committed)

    def _channels(self, model: Classifier) -> Shapes:
        """Return the form of each tensor that the method declares to keep at a site."""
        return self._method.egress(self._method.sharing.layout(model)).forms("site")

    def retain(self, best: int) -> None:
        """Retain the state of the best round so far, where it holds a part of the selected model."""
        sharing = self._method.sharing
        if sharing.part_at_site or sharing.keep_local:
            earlier = self.files.latest(best)
            if earlier is not None:
                self.files.keep(earlier)


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
        ledger = Ledger(folder / LEDGER_FILE, self._privacy, self._folder)
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
        egress = allowed.egress
        samples = allowed.images // egress.loss_parts if egress.loss_parts else images
        update = protect(update, task, self._privacy, egress.losses, samples)
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
