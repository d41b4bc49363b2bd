"""One site: its consent, and its answers to the server's tasks.

The same object answers in the loop of one process and inside FLARE's executor. An expected failure becomes a
typed `Abstain`; the text of the error stays in the site's own log. `Trainer` has its data and its
model: it trains and measures.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from suture.core.errors import Aborted, ConfigError
from suture.core.files import FolderLock
from suture.core.labels import LabelSet
from suture.core.runtime import check_device, device_name, out_of_memory, repeatable
from suture.data.batch import columns
from suture.data.config import SiteConfig
from suture.federation.plan import Plan, code_hash, round_context
from suture.federation.site.abstention import LabelViewRefused, abstention, kind, record_error
from suture.federation.site.diagnostics import Diagnostics, compile_backbone, write_left_out
from suture.federation.site.masks import SiteMasks
from suture.federation.site.patient_privacy import check_batch_norm, check_protected
from suture.federation.site.store import Releases, SiteAnswer, States, own_part_of
from suture.learning.evaluation import (
    Measurement,
    count_scores,
    expect_context,
    label_counts,
    loss_leaves,
    measure,
)
from suture.learning.features import FeatureStore
from suture.learning.samples import SiteSamples, annotate, load_samples, single_target
from suture.learning.training import (
    GradientOverflow,
    LocalRound,
    LocalTraining,
    SiteContext,
    check_memory,
    on_known,
)
from suture.methods.base import RoundContext, learns_one_sided, local_round, loss_of
from suture.models import build
from suture.models.classifier import AMP_DTYPES, Classifier, Layout, load_tensors
from suture.models.priors import Prior, check_width, load_prior
from suture.models.saved import save_model
from suture.privacy.masking import Identity, MaskingRefused
from suture.protocol.check import AllowedReply
from suture.protocol.egress import OWNED_CLASSES, shape_mismatches
from suture.protocol.messages import Evaluation, Labels, Metrics, Reply, Scores, SiteInfo, TaskData, Update
from suture.protocol.packing import Packed, pack, restore_task, without_tensors

log = logging.getLogger(__name__)


class Trainer:
    """The data and the model of a site in one experiment.

    Args:
        site: its name.
        states: hold the part of the model that is the site's own.
        folder: of the experiment at the site.
        load: reads the site's data; by default as its suture.toml says.
    """

    def __init__(
        self,
        site: str,
        config: SiteConfig,
        plan: Plan,
        states: States,
        folder: Path,
        load: Callable[[], SiteSamples] | None = None,
    ) -> None:
        self._site, self._config, self._plan, self._states = site, config, plan, states
        self._folder = folder
        noted = partial(write_left_out, folder)
        read = partial(load_samples, config, plan.model, site, left_out=noted, one_sided=True)
        self.load = load or read
        self._cache: dict[str, Tensor] = {}
        self._models: dict[Labels, Classifier] = {}
        self._features: FeatureStore | None = None
        self._checked: Classifier | None = None  # the model whose first step was prepared
        self._halved: int | None = None  # batch size after memory was full

    @cached_property
    def data(self) -> SiteSamples:
        """The site's own classes and its samples, which are read once.

        A method that cannot learn one-sided classes gets none, nor does DP-SGD: their targets mix patients.
        """
        data, method = self.load(), self._plan.method
        private = self._config.privacy.epsilon is not None
        if data[0].one_sided and (private or not learns_one_sided(method)):
            left_out = ", ".join(data[0].one_sided)
            title = "DP-SGD" if private else method.about.title
            log.info("%s: %s needs positives and negatives; left out: %s", self._site, title, left_out)
            data = annotate(data)
        if method.labels.view != "target":
            return data
        return single_target(data, self._config.data.target, self._site)

    @cached_property
    def prior(self) -> Prior | None:
        """The frozen network that the method compares models with; it is read once."""
        spec, own = self._plan.method.sharing.prior, self._config.training.prior
        if spec is None:
            return None
        return load_prior(replace(spec, path=str(own)) if own else spec)

    def model(self, labels: Labels) -> Classifier:
        """Return the model with a row for each of some classes, which is made once."""
        if labels not in self._models:
            names = LabelSet(labels, self.data[0].label_type)
            model = build(self._plan.model, names, self._plan.seed, pretrained=False)
            model.compute_in(AMP_DTYPES.get(self._config.training.precision))
            self._models = {labels: model}
        return self._models[labels]

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Compute on the site's device, whose memory is for the next site of the process then.

        A compiled model stays there: its kernels know where its tensors are.
        """
        device = self._config.training.device
        try:
            with repeatable(device):
                yield
        finally:
            if device != "cpu" and self._config.training.compile == "no":
                for model in self._models.values():
                    model.cpu()
                if prior := self.__dict__.get("prior"):  # only one that was read
                    prior.to("cpu")

    def context(self, task: TaskData, state: Packed) -> SiteContext:
        """Return the model with all received and own tensors, and the data with the columns of its classes.

        Raises:
            ConfigError: the server did not send a channel that the method declares, sent another, or one of
                another form.
        """
        config, method = self._config, self._plan.method
        training, privacy = config.training, config.privacy
        model = self.model(task.labels).to(training.device)
        egress = method.egress(method.sharing.layout(model))
        told = {name: form for name, form in egress.forms("facts").items() if name in task.channels}
        for name, wrong in shape_mismatches(
            egress.forms("down") | told, task.channels, len(task.labels)
        ).items():
            raise ConfigError(
                f"the server's {name} of round {task.round} is {wrong}; run the same version of suture "
                "on both sides"
            )
        own_part = self._states.own_part(task, state, model)
        load_tensors(model, method.sharing.put(own_part, {**task.shared, **task.head}))
        (annotated, samples), labels = self.data, model.labels
        if self._plan.model.reads_features:
            if self._features is None or task.fixed:
                folder = config.storage.feature_folder
                self._features = FeatureStore(model, self._plan.model, samples, folder, self._site)
            samples = self._features.samples
        absent = method.labels.unknown == "negative"
        return SiteContext(
            self._site,
            model,
            {split: columns(part, annotated, labels, absent=absent) for split, part in samples.items()},
            self._plan.model.preprocessing,
            self._plan.augmentation,
            torch.device(training.device),
            training.lr,
            self._halved or training.batch_size,
            self.prior.to(training.device) if self.prior else None,
            self._cache,
            torch.tensor([name in annotated for name in labels]),
            cache_dir=config.storage.feature_folder,
            min_count=privacy.min_count,
            round_counts=privacy.round_counts,
            prefetch=training.prefetch,
            features=self._features,
        )

    def train(
        self, context: SiteContext, task: TaskData, state: Packed, where: RoundContext
    ) -> tuple[Update, dict[str, Tensor], LocalTraining]:
        """Train one round, again with half the batch size where memory is full for the first time.

        In fp16 also again with a smaller scale of the loss as long as every step of the round overflows: a
        round may have few steps.

        Returns:
            the update, what the method keeps at the site, and how the site has trained.
        """
        scale: float | None = None
        while True:
            try:
                return self._attempt(replace(context, scale=scale), task, state, where)
            except GradientOverflow as error:
                if error.scale < 1:
                    raise
                scale = error.scale
            except (RuntimeError, MemoryError, OSError) as error:
                method = self._plan.method
                batch = self._config.training.batch_size or method.local.batch_size
                fixed = method.about.fixed_batches or context.private  # whose noise is for these batches
                if not out_of_memory(error) or self._halved or batch < 4 or fixed:
                    raise
                self._halved = batch // 2
                log.warning("%s: %s; trying again with batches of %d", self._site, kind(error), self._halved)
            # Outside the handlers, because a traceback holds the tensors that filled the memory.
            context = replace(self.context(task, state), private=context.private)

    def _attempt(
        self, context: SiteContext, task: TaskData, state: Packed, where: RoundContext
    ) -> tuple[Update, dict[str, Tensor], LocalTraining]:
        method = self._plan.method
        last = Packed(self._states.kept_by_method(state), state.header)
        round_ = local_round(method, context, last, where)
        if context.model is not self._checked and not context.private:
            self._prepare(context, round_)
        context = expect_context(context, self.data[0], round_)
        watch = self._diagnostics.watching(context.model.labels) if self._diagnostics else None
        if watch:
            context = replace(context, record=watch.record, observe=watch.observe)
        update, keep = method.train(context, task, round_)
        if watch:
            watch.write(task.round)
        return update, keep, round_.local

    def _prepare(self, context: SiteContext, round_: LocalRound) -> None:
        """Before the first step of a model: check that a batch fits the GPU; compile, where that is set.

        Raises:
            ConfigError: see `check_memory` and `compile_backbone`.
        """
        method, local = self._plan.method, round_.local
        objective = on_known(loss_of(method.loss, context.model.labels.label_type))
        halves = not (self._halved or method.about.fixed_batches)
        smallest = local.batch_size // 2 if halves else local.batch_size
        check_memory(context, objective, local.optimiser, smallest)
        if self._config.training.compile != "no":
            compile_backbone(context, objective, self._config.training.compile)
        self._checked = context.model

    @cached_property
    def _diagnostics(self) -> Diagnostics | None:
        """What records the diagnostics of rounds, where the configuration requests them."""
        guesses = self._config.data.truth is not None and self._plan.method.labels.pseudo
        if not guesses and not self._config.storage.diagnostics:
            return None
        train = self.data[1]["train"] if guesses else None
        return Diagnostics(self._site, self._config, train, self._folder)


SITE_LOCK = ".site.lock"
"""The lock of the site's folder of an experiment: one process at a time answers from its states."""

SITE_TAKEOVER = 60.0
"""Seconds to wait for the lock: the process of an earlier job may still be ending."""

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
    ) -> None:
        self.name, self.config, self.plan, self.rounds, self.folder = name, config, plan, rounds, folder
        self.states = States(name, plan, config.training, folder)
        self.trainer = Trainer(name, config, plan, self.states, folder, load)
        self.releases = Releases(plan, config, rounds, folder)
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
        try:
            self._lock = self._lock or FolderLock.take(self.folder / SITE_LOCK, SITE_TAKEOVER)
            if not self._consents:
                check_consent(self.name, self.plan, self.config)
                self._consents = True
            # Before anything is read or trained: a server that asks what it must not learns nothing but that.
            self.masks.check_kept()
            self.masks.check_fixed(task)
            self.releases.ledger.confirm(task.ledger)
            self.states.retain(task.best)
            if task.task == "mask":
                return self._mask(task)
            if secure := task.task == "train" and self.plan.secure_aggregation is not None:
                self.masks.begin(task, self._mask_labels(task.labels), self.trainer.data[0])
            with self.trainer.on_device():
                # From here on the task is what the site trains on; its layout is of the site's own model.
                task = restore_task(task, self._layout(task), self.plan.transport)
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
        self._lock = None

    def _allow(self, task: TaskData) -> AllowedReply:
        """Return what the site may answer; its own model and plan say so, and no tensor of a message."""
        own, egress = self.trainer.data[0].names, self.plan.egress(self._layout(task))
        # Without its tensors, since the filter would hold them while the answer is packed once more.
        task = replace(without_tensors(task), labels=task.labels or own)
        return AllowedReply(task, egress, own, self._images, self.config.privacy)

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

    def _layout(self, task: TaskData) -> Layout:
        """Return the layout of what is exchanged; a task without tensors needs no model."""
        if task.task in ("handshake", "mask"):
            return Layout({}, {})
        return self.plan.method.sharing.layout(self.trainer.model(task.labels))

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
        marks = self.releases.anchor_mark() | self.masks.mark()
        self.states.save(task, context.model, keep, phase=where.phase.name, **marks)
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
