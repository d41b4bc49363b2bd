"""One site: its consent, and its answers to the server's tasks.

The same object answers in the loop of one process and inside FLARE's executor. An expected failure becomes a
typed `Abstain`; the text of the error stays in the site's own log. `Trainer` has its data and its
model: it trains and measures.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, ClassVar, Literal
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from suture.core.errors import Aborted, ConfigError
from suture.core.files import hold, is_at
from suture.core.runtime import check_device, device_name
from suture.data.config import SiteConfig
from suture.federation.plan import Plan, code_hash, round_context
from suture.federation.site.abstention import LabelViewRefused, abstention, record_error
from suture.federation.site.ledger import NOBODY, Requester
from suture.federation.site.masks import SiteMasks
from suture.federation.site.releases import Releases, SiteAnswer
from suture.federation.site.trainer import States, Trainer, own_part_of
from suture.learning.dp_sgd import refuse_batch_norm
from suture.learning.evaluation import (
    Measurement,
    count_scores,
    label_counts,
    loss_leaves,
    measure,
)
from suture.learning.samples import SiteSamples
from suture.learning.training import SiteContext
from suture.models.classifier import Classifier, Layout, load_tensors, train_mode
from suture.models.priors import check_width
from suture.models.saved import save_model
from suture.privacy.masking import Identity, MaskingRefused
from suture.protocol.check import AllowedReply
from suture.protocol.egress import OWNED_CLASSES, Egress
from suture.protocol.messages import Evaluation, Labels, Metrics, Reply, Scores, SiteInfo, TaskData, Update
from suture.protocol.packing import Packed, pack, restore_task, without_tensors

log = logging.getLogger(__name__)


SITE_LOCK = ".site.lock"
"""The lock of the site's folder of an experiment: one process at a time answers from its states."""

SITE_TAKEOVER = 60.0
"""Seconds to wait for the lock: the process of an earlier job may still be ending."""


class FolderLock:
    """The lock of a folder for this process: all its objects that use the folder share it.

    It is free again when the last of them has dropped it, or the process has ended.
    """

    _taken: ClassVar[WeakValueDictionary[tuple[int, Path], FolderLock]] = WeakValueDictionary()
    _one = threading.Lock()

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    @classmethod
    def take(cls, path: Path, seconds: float) -> FolderLock:
        """Return the lock that this process holds, or wait for it; see `hold`."""
        key = os.getpid(), path.resolve()  # a forked process must take its own
        with cls._one:
            lock = cls._taken.get(key)
            if lock is None or not is_at(lock._file, path):
                lock = cls._taken[key] = cls(hold(path, seconds))
            return lock

    def __del__(self) -> None:
        self._file.close()


_BOOTSTRAP = 1000


class Site:
    """A site of a federation. From the first task on, no other process can answer from its folder.

    Args:
        name: of the site in the federation.
        config: its suture.toml.
        plan: of the federation.
        rounds: number of rounds of the run.
        folder: of its states, its kept answers and its error log in this experiment, outside any job's run
            directory: `experiment_folder`.
        load: reads its data; by default as its suture.toml says.
        identity: signs its keys of secure aggregation; by default a key of this process.
        requester: the job that it works for, which its ledger names.
    """

    def __init__(
        self,
        name: str,
        config: SiteConfig,
        plan: Plan,
        rounds: int,
        folder: Path,
        load: Callable[[], SiteSamples] | None = None,
        identity: Identity | None = None,
        requester: Requester = NOBODY,
    ) -> None:
        self.name, self.config, self.plan, self.rounds, self.folder = name, config, plan, rounds, folder
        self.states = States(name, plan, config.training, folder)
        self.trainer = Trainer(name, config, plan, self.states, folder, load)
        self.releases = Releases(plan, config, rounds, folder, requester)
        self.masks = SiteMasks(name, plan, rounds, folder, identity or Identity())
        self._lock: FolderLock | None = None  # from the first task on
        self._consents = False  # to its plan, under its configuration: neither changes

    def answer(self, task: TaskData) -> SiteAnswer:
        """Perform a task of the server; an expected failure becomes an `Abstain`.

        A new answer is kept, and stands in the ledger, before it leaves. Where the state is lost from which
        the site trains on, the round is computed again for it, and still the kept answer leaves: noise, or a
        GPU, may have given another one.

        Raises:
            Aborted: the job was aborted; nothing of the task is kept.
            Exception: any unexpected failure, after it was recorded in the site's log.
        """
        torch.set_num_threads(self.config.training.threads)
        masked = self.plan.secure_aggregation is not None
        try:
            self._lock = self._lock or FolderLock.take(self.folder / SITE_LOCK, SITE_TAKEOVER)
            if not self._consents:
                check_consent(self.name, self.plan, self.config)
                self.masks.check_kept()
                self._consents = True
            # Before anything is read or trained: a server that asks what it must not learns nothing but that.
            if masked:
                self.masks.check_fixed(task)
            self.releases.ledger.confirm(task.ledger)
            self.states.retain(task.best)
            if task.task == "mask":
                return self._mask(task)
            if secure := masked and task.task == "train":
                self.masks.begin(task, self._mask_labels(task.labels), self.trainer.data[0])
            with self.trainer.on_device():
                if task.task != "handshake":
                    # From here on the task is what the site trains on, by the layout of its own model.
                    task = restore_task(task, self.trainer.layout(task.labels), self.plan.transport)
                allowed = self._allow(task)
                self.releases.accept_labels(allowed.own)
                request = self.releases.digest_request(
                    task, allowed, afresh=secure and not self.masks.continues
                )
                self.masks.request = request if secure else ""
                kept = self.releases.read_kept(task, request, allowed)
                if kept is None:
                    kept = self.releases.keep(task, request, allowed, self._perform(task, allowed))
                elif task.task == "train" and not self.states.files.is_whole(task.round):
                    # The next round goes on from this round's state, so it is made again. Its steps have cost
                    # ε once more, though no answer of them leaves.
                    self._train(task, allowed)
                    self.releases.spend(task)
                answer = self.releases.leave(*kept, allowed)
                return self.masks.mask(answer, task, allowed) if secure else answer
        except Aborted:
            raise  # no error of the site, and no answer: the task is performed again where the run goes on
        except Exception as error:
            record_error(self.folder, self.name, task, error)
            if abstained := abstention(error):
                if self.config.privacy.epsilon is not None:  # it covers no exact number
                    abstained = replace(abstained, rows=None)
                return SiteAnswer(pack(abstained))
            raise

    def close(self) -> None:
        """Leave the folder to other processes."""
        self._lock, self._consents = None, False

    def _allow(self, task: TaskData) -> AllowedReply:
        """Return what the site may answer; its own model and plan say so, and no tensor of a message."""
        own = self.trainer.data[0].names
        # Without its tensors, since the filter would hold them while the answer is packed once more.
        task = replace(without_tensors(task), labels=task.labels or own)
        return AllowedReply(task, self._egress(task), own, self._images, self.config.privacy)

    def _mask(self, task: TaskData) -> SiteAnswer:
        """Take a step of secure aggregation."""
        named = tuple(task.mask.numbers) if task.mask else ()

        def state() -> Mapping[str, Any]:
            return self.states.before(replace(task, task="train")).header

        return SiteAnswer(pack(self.masks.step(task, self._mask_labels(named), state)), self._allow(task))

    def _mask_labels(self, named: Labels) -> Labels:
        """Return the classes whose rows the site masks, of some."""
        own, method = self.trainer.data[0].names, self.plan.method
        owned = method.labels.view != "all" or method.egress(Layout({}, {})).class_weight == OWNED_CLASSES
        return tuple(name for name in named if name in own or not owned)

    @property
    def _images(self) -> int:
        """The number of training images that the site announces: with its ε, of patients with noise."""
        train = self.trainer.data[1]["train"]
        private = self.releases.plan_privacy(train.patients)
        return private.patients if private else len(train)

    def _egress(self, task: TaskData) -> Egress:
        """Return everything that may leave; a task without tensors needs no model."""
        if task.task in ("handshake", "mask"):
            return self.plan.egress(Layout({}, {}))
        return self.trainer.egress(task.labels)

    def _perform(self, task: TaskData, allowed: AllowedReply) -> Reply:
        if task.task == "handshake":
            return self._introduce(allowed)
        if task.task == "train":
            return self._train(task, allowed)
        return self._calibrate(task) if task.task == "calibrate" else self._evaluate(task)

    def _introduce(self, allowed: AllowedReply) -> SiteInfo:
        """Return the site's classes, its numbers of images and, where requested, its label counts."""
        (labels, samples), config, method = self.trainer.data, self.config, self.plan.method
        if prior := self.trainer.prior:
            check_width(prior, self.trainer.model(labels.names), self.name)
        if config.privacy.epsilon is not None:
            check_batch_norm(self.name, self.trainer.model(labels.names), self.plan, self.rounds)
        counts = {}
        if labels.label_type in allowed.egress.counts:
            counts = label_counts(labels, samples["train"], config.privacy)
            counts = self.releases.first_counts.of(labels, counts)
        return SiteInfo(
            labels.names,
            {split: len(part) for split, part in samples.items()} | {"train": self._images},
            config.training.threads,
            code_hash(type(method)),
            labels.label_type,
            counts,
            prior.digest if prior else None,
            config.privacy.protection,
            {name: codes for name, codes in config.data.stated_codes().items() if name in labels},
            f"{device_name(config.training.device)}, {config.training.precision}",
            measures=loss_leaves(samples.get("validation"), labels, self._measurement()),
            one_sided=tuple(labels.one_sided),
        )

    def _state(self, task: TaskData) -> Packed:
        """Return the state from which the site answers, once the ledger has what it cost."""
        state = self.states.before(task)
        self.releases.settle_unsent(state.header)
        if task.task == "train" and self.plan.secure_aggregation and not self.masks.goes_on(state.header):
            return own_part_of(state)
        return state

    def _train(self, task: TaskData, allowed: AllowedReply) -> Update:
        """Measure the received model, train it, and store the state of the round."""
        state, method = self._state(task), self.plan.method
        context = self.trainer.context(task, state)
        predictor = method.predictor({**task.shared, **task.head}, task.channels)
        with _predicting(context.model, predictor):
            # Before it is trained: so a model is validated in the exchange of the next round, at no further
            # one.
            metrics = self._measure(context, "validation", task.committed)
        where = round_context(self.plan.method, self.plan.seed, self.rounds, task.round)
        context = replace(context, private=self.releases.plan_privacy(context.samples["train"].patients))
        try:
            update, keep, local = self.trainer.train(context, task, state, where)
        except Exception as error:
            if not isinstance(error, Aborted):  # the site abstains, which tells that the model diverged
                self.releases.spend(task)
            raise
        # The state first, then the answer: a site killed between the two finds in the mark what it still
        # owes to the ledger (`Releases.settle_unsent`). The other way round it could not train on from what
        # it has sent.
        marks: dict[str, Any] = self.releases.anchor_mark()
        if self.plan.secure_aggregation:
            marks |= self.masks.mark()
        channels = allowed.egress.forms("site")
        self.states.save(task, context.model, keep, channels, phase=where.phase.name, **marks)
        update = replace(update, metrics=metrics, state=state.header.get("round", 0))
        return self.releases.limit(update, task, allowed, local.images_of(allowed.images))

    def _calibrate(self, task: TaskData) -> Scores:
        context = self.trainer.context(task, self._state(task))
        within = self.releases.first_counts.within
        return count_scores(context, self._measurement(), task.round, within)

    def _evaluate(self, task: TaskData) -> Evaluation:
        state, plan = self._state(task), self.plan
        context = self.trainer.context(task, state)
        if task.split == "validation":
            return Evaluation(self._measure(context, "validation", task.round))
        measured, local = self._measure(context, "test", task.round, task), None
        if trained := self.states.local_model(task, state, context.model):
            load_tensors(context.model, trained)
            local = self._measure(context, "test", task.round)
        if trained or plan.method.sharing.part_at_site:
            facts = {"site": self.name, "round": task.round, "experiment": plan.experiment}
            save_model(context.model, plan.model, self.folder / "model", facts)
        return Evaluation(measured, local)

    def _measure(
        self,
        context: SiteContext,
        split: Literal["validation", "test"],
        of_round: int,
        task: TaskData | None = None,
    ) -> Metrics:
        """Evaluate the model on one split of the site's data; for a task with intervals and its decisions."""
        how = self._measurement()
        how = replace(how, decisions=task.decisions, rule=task.rule) if task else how
        metrics = measure(context, how, split, of_round, _BOOTSTRAP if task else 0)
        return self.releases.first_counts.within(metrics)

    def _measurement(self) -> Measurement:
        return Measurement(self.plan.method.loss, self.trainer.data[0], self.config.privacy, self.plan.seed)


@contextmanager
def _predicting(model: Classifier, others: Mapping[str, Tensor]) -> Iterator[None]:
    """Make the received model the one that predicts, while it is measured; see `Method.predictor`."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items() if name in others}
    load_tensors(model, others)
    try:
        yield
    finally:
        load_tensors(model, before)


def check_consent(site: str, plan: Plan, config: SiteConfig) -> None:
    """Refuse a job that the site does not take part in.

    Whatever task comes first needs this check: a server could leave out the handshake.

    Raises:
        CodeMismatch: another version of the package created the job.
        LabelViewRefused: its method shows the site more class names than the site permits.
        MaskingRefused: it has no secure aggregation, and the site demands it.
        ConfigError: the site sets something that the method would ignore, or a device that cannot be used.
    """
    plan.check_code(site)
    if config.privacy.epsilon is not None:
        check_protected(site, plan, config)
    if config.privacy.protection and plan.method.about.pooled:
        raise ConfigError(
            f"{site}: [privacy] clip and noise protect what the site sends, and {plan.method.about.title} "
            "pools the images of all sites; remove them, or use another method"
        )
    if plan.method.labels.view == "all" and config.privacy.label_view != "all":
        raise LabelViewRefused(
            f"{site}: {plan.method.about.title} shows every class name of the federation to each site; "
            'if this is acceptable, set label_view = "all" under [privacy] in suture.toml'
        )
    if config.privacy.secure_aggregation and plan.secure_aggregation is None:
        raise MaskingRefused(
            f"{site}: the job has no [secure_aggregation], so that its server would see the site's update. "
            "Add the section to the job, or remove secure_aggregation under [privacy] in suture.toml"
        )
    if config.data.groups:
        raise ConfigError(
            f"{site}: [data.groups] has no effect at a site; move it to the server's suture.toml"
        )
    if config.privacy.clip is not None and (sent := plan.method.egress(Layout({}, {})).going("up")):
        raise ConfigError(
            f"{site}: [privacy] clip and noise do not cover {min(channel.name for channel in sent)}, which "
            f"{plan.method.about.title} sends besides weights; remove them, or use another method"
        )
    training = config.training
    check_device(training.device, site)
    settings = {"batch_size": training.batch_size is not None, "amp": training.amp}
    settings["compile"] = training.compile != "no"
    for key, own in settings.items():
        if own and plan.method.about.fixed_batches:
            raise ConfigError(
                f"{site}: {plan.method.about.title} takes batch size and precision from the job; remove "
                f"{key} under [training] in suture.toml"
            )


def check_protected(site: str, plan: Plan, config: SiteConfig) -> None:
    """Refuse a job whose training mixes the patients of a site that protects each of them.

    Raises:
        ConfigError: says what mixes them, and the remedy.
    """
    method, training, remedy = plan.method, config.training, "choose a method that docs/protection.md names"
    egress, title = method.egress(Layout({}, {})), method.about.title
    faults = {
        f"{title} {method.about.mixes_patients}; {remedy}": method.about.mixes_patients,
        f"{title} asks for counts of labels, which no noise covers; {remedy}": egress.counts,
        f"{title} sends scalars, which no noise covers; {remedy}": egress.scalars or egress.losses,
        f"{title} weighs sites by their numbers of images; {remedy}": egress.weight != (1.0, 1.0),
        "mixed precision and compiled models have no gradients of single images; remove amp and compile "
        "under [training]": training.amp or training.compile != "no",
        "views for a frozen encoder are drawn for all images together; remove the job's augmentation": (
            plan.model.reads_features and plan.augmentation.active
        ),
    }
    for fault, present in faults.items():
        if present:
            raise ConfigError(f"{site}: [privacy] epsilon protects each patient, but {fault}")


def check_batch_norm(site: str, model: Classifier, plan: Plan, rounds: int) -> None:
    """Refuse a model whose batch norm would mix patients of the site in a round; see `refuse_batch_norm`."""
    head_only = all(phase.trainable == "head" for phase in plan.method.phases(rounds))
    train_mode(model, plan.method.sharing.batch_norm, head_only=head_only)
    try:
        refuse_batch_norm(model)
    except ConfigError as error:
        raise ConfigError(f"{site}: {error}") from error
