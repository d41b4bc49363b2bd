"""One site: its consent, its site info, its data and state, and its answers to the server's tasks.

The same object answers in the loop of one process and inside FLARE's executor. An expected failure becomes a
typed `Abstain`; the text of the error stays in the site's own log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from suture.core.devices import check_device, device_name, out_of_memory, repeatable
from suture.core.errors import ConfigError
from suture.core.files import FolderLock
from suture.core.labels import LabelSet
from suture.data.batch import columns
from suture.data.config import SiteConfig
from suture.federation.differential_privacy import protected
from suture.federation.expectation import expected_answer
from suture.federation.plan import Plan, code_hash, round_context
from suture.federation.site.abstention import LabelViewRefused, abstention, kind, record_error
from suture.federation.site.answers import Answer, Answers
from suture.federation.site.diagnostics import Diagnostics, Watch
from suture.federation.site.first_counts import FirstCounts
from suture.federation.site.ledger import FILE as LEDGER
from suture.federation.site.ledger import Ledger, release_of
from suture.federation.site.left_out import write_left_out
from suture.federation.site.state import (
    as_kept,
    check_channels,
    fixed_tensors,
    kept_by_method,
    local_model,
    predicting,
    restored,
    with_own_initialisation,
)
from suture.federation.store import Rounds
from suture.learning.compiling import compile_backbone
from suture.learning.evaluation import Measurement, class_counts, count_scores, loss_leaves, measure
from suture.learning.loss_scale import GradientOverflow
from suture.learning.memory import check_memory
from suture.learning.samples import SiteSamples, load_samples, single_target
from suture.learning.training import SiteContext, on_known
from suture.methods.base import RoundContext, local_round, settled
from suture.methods.parameters import exchanged, stored_parameters
from suture.methods.share import put
from suture.models import build
from suture.models.classifier import AMP_DTYPES, Classifier, Layout, load_tensors
from suture.models.priors import Prior, check_width, load_prior
from suture.models.saved import save_model
from suture.protocol.check import AllowedReply
from suture.protocol.half import received, sent
from suture.protocol.messages import (
    Evaluation,
    Labels,
    Metrics,
    Reply,
    Scores,
    SiteInfo,
    TaskData,
    Update,
)
from suture.protocol.packing import Packed, digest, pack

log = logging.getLogger(__name__)

_BOOTSTRAP = 1000


LOCK = ".site.lock"
"""The lock of the site's folder of an experiment: one process at a time answers from its states."""

TAKEOVER = 60.0
"""Seconds to wait for the lock: the process of an earlier job may still be ending."""


class Site:
    """A site of a federation. From the first task on, no other process can answer from its folder.

    Args:
        name: of the site in the federation.
        config: its suture.toml.
        plan: of the federation.
        rounds: number of rounds of the run.
        state: folder of its states and its error log in this experiment, outside any job's run directory:
            `experiment_folder`. The site's ledger lies two folders above.
        load: reads its data; by default as its suture.toml says.
    """

    def __init__(
        self,
        name: str,
        config: SiteConfig,
        plan: Plan,
        rounds: int,
        state: Path,
        load: Callable[[], SiteSamples] | None = None,
    ) -> None:
        self.name = name
        self.config = config
        self.plan = plan
        self.rounds = rounds
        self.folder = state
        self.states = Rounds(state)
        noted = partial(write_left_out, state)
        self._load = load or (lambda: load_samples(config, plan.model, name, left_out=noted))
        self._samples: SiteSamples | None = None
        self._diagnostics: Diagnostics | None = None
        self._cache: dict[str, Tensor] = {}
        self._models: dict[Labels, Classifier] = {}
        self._checked: Classifier | None = None  # the model whose first step was prepared
        self._halved: int | None = None  # batch size after memory was full
        self._lock: FolderLock | None = None  # from the first task on
        self._first_counts = FirstCounts(state)
        self._stated: str | None = None  # the digest of the ledger in the newest answer

    def answer(self, task: TaskData) -> Reply:
        """Perform a task of the server; an expected failure becomes an `Abstain`.

        Raises:
            Exception: any unexpected failure, after it was recorded in the site's log.
        """
        torch.set_num_threads(self.config.training.threads)
        try:
            self._lock = self._lock or FolderLock.take(self.folder / LOCK, TAKEOVER)
            check_consent(self.name, self.plan, self.config)
            self.ledger.confirm(task.ledger)
            self._keep(task.best)
            task = received(task) if self.plan.half else task
            with self._on_device():
                return self._introduced(task) if task.task == "handshake" else self._answered(task)
        except Exception as error:
            record_error(self.folder, self.name, task, error)
            if abstained := abstention(error):
                return abstained
            raise

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Compute on the site's device, whose memory is for the next site of the process then.

        A compiled model stays there: its kernels know where its tensors are.
        """
        device = self.config.training.device
        try:
            with repeatable(device):
                yield
        finally:
            if device != "cpu" and self.config.training.compile == "no":
                for model in self._models.values():
                    model.cpu()
                if prior := self.__dict__.get("_prior"):  # only one that was read
                    prior.to("cpu")

    def close(self) -> None:
        """Leave the folder to other processes."""
        self._lock = None

    def expectation(self, task: TaskData) -> AllowedReply:
        """Return what this site may answer to a task; the site's filter checks the answer against it."""
        own, samples = self._data()
        labels, method = task.labels or own.names, self.plan.method
        return expected_answer(
            method,
            replace(task, labels=labels),
            method.egress(exchanged(self._model(labels), method)),
            own.names,
            len(samples["train"]),
            self.config.privacy,
            half=self.plan.half,
            ledger=self._stated,
        )

    # What is released

    @cached_property
    def ledger(self) -> Ledger:
        """The ledger of the site, which outlives its experiments."""
        ledger = Ledger(self.folder.parents[1] / LEDGER, self.config.privacy, self.folder)
        ledger.begin()
        return ledger

    def _introduced(self, task: TaskData) -> SiteInfo:
        """Return the site info; one that differs from those before is another release."""
        ledger, info = self.ledger, self._handshake()  # the ledger first: it looks for older experiments
        release = release_of(info, pack(info), task, self._experiment, self.config.privacy)
        self._stated = ledger.record(release)
        return replace(info, ledger=self._stated)

    def _answered(self, task: TaskData) -> Reply:
        """Return the answer to a task: for a repeated task the kept one, otherwise a new one.

        A new answer is kept, and stands in the ledger, before it leaves. Where the state is lost from which
        the site trains on, the round is computed again for it, and still the kept answer leaves: noise, or a
        GPU, may have given another one. What the site says of its ledger is no part of what is kept: other
        experiments may have released more meanwhile.
        """
        ledger, privacy, request = self.ledger, self.config.privacy, self._request(task)
        answers = Answers(self.folder / "answers")
        kept = answers.find(task, request)
        if kept is not None and task.task == "train" and not self.states.is_whole(task.round):
            self._train(task)
        if kept is None:
            ledger.check(task, self._experiment, self._data()[0].names)
            reply = self._new_answer(task)
            packed, channels = pack(reply), self.expectation(task).egress.going("up")
            kept = reply, release_of(reply, packed, task, self._experiment, privacy, channels)
            answers.keep(task, request, packed, kept[1])
        reply, release = kept
        self._stated = ledger.record(release)
        return replace(reply, ledger=self._stated, spent=ledger.spent() if privacy.clip is not None else None)

    def _new_answer(self, task: TaskData) -> Answer:
        if task.task == "train":
            return self._train(task)
        return self._calibrate(task) if task.task == "calibrate" else self._evaluate(task)

    def _request(self, task: TaskData) -> str:
        """Return the digest of all that an answer depends on but the site's own state and data."""
        trains, limits = task.task == "train", self.config.privacy
        committed = task.committed if trains else 0
        own, samples = self._data()
        context = {
            "own": own.names,
            "images": len(samples["train"]),
            "rounds": self.rounds if trains else 0,
            "computation": self.config.training.computation,
            "limits": [limits.min_count, limits.min_loss, limits.round_counts],
        }
        asked = pack(replace(task, committed=committed, best=0, ledger=None))
        return digest(Packed(asked.tensors, {"task": asked.header, **context}))

    @property
    def _experiment(self) -> str:
        return self.folder.name

    # The tasks

    def _handshake(self) -> SiteInfo:
        prior = self._prior
        if prior:
            check_width(prior, self._model(self._data()[0].names), self.name)
        held = prior.digest if prior else None
        return site_info(self.plan, self.config, self._data(), held, self._first_counts)

    def _train(self, task: TaskData) -> Update:
        state = self._state(task)
        context = self._context(task, state)
        with predicting(context.model, self.plan.method, task):
            metrics = self._measure(context, "validation", task.committed, bootstrap=0)
        ctx = round_context(self.plan, self.rounds, task.round)
        context, update, keep = self._trained(context, task, state, ctx)
        header = {
            **self.config.training.computation,
            "labels": list(task.labels),
            "phase": ctx.phase.name,
            "round": task.round,
        }
        method, images = self.plan.method, len(self._data()[1]["train"])
        own = stored_parameters(context.model, method) | as_kept(keep, method, context.model)
        self.states.save(task.round, Packed(own, header), task.committed)
        losses = self.expectation(task).egress.losses
        samples = method.behind_losses(images, settled(method.local, ctx, context.lr, context.batch_size))
        allowed = protected(update, task, self.config.privacy, losses, samples)
        answer = replace(allowed, metrics=metrics, state=state.header.get("round", 0))
        return sent(answer, task) if self.plan.half else answer

    def _trained(
        self, context: SiteContext, task: TaskData, state: Packed, ctx: RoundContext
    ) -> tuple[SiteContext, Update, dict[str, Tensor]]:
        """Train one round, again with half the batch size where memory is full for the first time.

        In fp16 also again with a smaller scale of the loss as long as every step of the round overflows: a
        round may have few steps.
        """
        scale: float | None = None
        while True:
            try:
                return self._attempt(replace(context, scale=scale), task, state, ctx)
            except GradientOverflow as error:
                if error.scale < 1:
                    raise
                scale = error.scale
            except (RuntimeError, MemoryError, OSError) as error:
                fixed = self.plan.method.limits.fixed_batches
                batch = self.config.training.batch_size or self.plan.method.local.batch_size
                if not out_of_memory(error) or self._halved or batch < 4 or fixed:
                    raise
                self._halved = batch // 2
                log.warning("%s: %s; trying again with batches of %d", self.name, kind(error), self._halved)
            # Outside the handlers, because a traceback holds the tensors that filled the memory.
            context = self._context(task, state)

    def _attempt(
        self, context: SiteContext, task: TaskData, state: Packed, ctx: RoundContext
    ) -> tuple[SiteContext, Update, dict[str, Tensor]]:
        self._ready(context, ctx)
        watch = self._watching(context)
        observed = watch.over(context) if watch else context
        method = self.plan.method
        last = Packed(kept_by_method(state, method, context.model), state.header)
        update, keep = method.train(observed, task, local_round(method, observed, last, ctx))
        if watch:
            watch.write(task.round)
        return context, update, keep

    def _ready(self, context: SiteContext, ctx: RoundContext) -> None:
        """Before the first step of a model: check that a batch fits the GPU; compile, where that is set.

        Raises:
            ConfigError: see `check_memory` and `compile_backbone`.
        """
        if context.model is self._checked:
            return
        method, kind = self.plan.method, context.model.labels.label_type
        objective = on_known(lambda logits, y, known: method.loss(logits, y, known, kind))
        local = settled(method.local, ctx, context.lr, context.batch_size)
        halves = not (self._halved or method.limits.fixed_batches)
        check_memory(
            context, objective, local.optimiser, local.batch_size // 2 if halves else local.batch_size
        )
        if self.config.training.compile != "no":
            compile_backbone(context, objective, self.config.training.compile)
        self._checked = context.model

    def _calibrate(self, task: TaskData) -> Scores:
        context = self._context(task, self._state(task))
        as_first = self._first_counts.within
        return count_scores(context, self._data()[0], self.config.privacy, task.round, as_first)

    def _evaluate(self, task: TaskData) -> Evaluation:
        state = self._state(task)
        context = self._context(task, state)
        if task.split == "validation":
            return Evaluation(self._measure(context, "validation", task.round, bootstrap=0))
        measured, own = self._measure(context, "test", task.round, _BOOTSTRAP, task), None
        plan = self.plan
        if trained := local_model(task, state, context.model, plan.method, plan.seed, plan.model.rows):
            load_tensors(context.model, trained)
            own = self._measure(context, "test", task.round, bootstrap=0)
        if trained or self.plan.method.part_at_site:
            facts = {"site": self.name, "round": task.round, "experiment": self.plan.experiment}
            save_model(context.model, self.plan.model, self.folder / "model", facts)
        return Evaluation(measured, own)

    # Used by several tasks

    def _data(self) -> SiteSamples:
        """Return the site's own classes and its samples, which are read once."""
        if self._samples is None:
            data, method = self._load(), self.plan.method
            self._samples = (
                single_target(data, self.config.data.target, self.name)
                if method.label_use.single_target
                else data
            )
        return self._samples

    def _watching(self, context: SiteContext) -> Watch | None:
        """Return what records the diagnostics of a round, where the configuration requests them."""
        guesses = self.config.data.truth is not None and self.plan.method.label_use.pseudo
        if not guesses and not self.config.storage.diagnostics:
            return None
        if self._diagnostics is None:
            train = self._data()[1]["train"] if guesses else None
            self._diagnostics = Diagnostics(self.name, self.config, train, self.folder)
        return self._diagnostics.watching(context.model.labels)

    def _keep(self, best: int) -> None:
        """Retain the state of the best round so far, where it holds a part of the selected model."""
        if self.plan.method.part_at_site or self.plan.method.keep_local:
            earlier = self.states.latest(best)
            if earlier is not None:
                self.states.keep(earlier)

    def _state(self, task: TaskData) -> Packed:
        labels = LabelSet(task.labels, self._data()[0].label_type)
        own = with_own_initialisation(task, self.plan, self.name, labels)
        return restored(self.states, own, self.config.training, self.name)

    def _context(self, task: TaskData, state: Packed) -> SiteContext:
        """Return the model with all received tensors, and the data with the columns of its classes."""
        training = self.config.training
        model = self._model(task.labels).to(training.device)
        check_channels(task, model, self.plan.method)
        own_part = fixed_tensors(task, state, model, self.plan.method, self.plan.seed, self.plan.model.rows)
        load_tensors(model, put(self.plan.method.share, own_part, {**task.shared, **task.head}))
        own, samples = self._data()
        wanted = LabelSet(task.labels, own.label_type)
        absent = self.plan.method.label_use.unknown == "negative"
        prior = self._prior
        return SiteContext(
            self.name,
            model,
            {split: columns(part, own, wanted, absent=absent) for split, part in samples.items()},
            self.plan.model.preprocessing,
            self.plan.augmentation,
            torch.device(training.device),
            training.lr,
            self._halved or training.batch_size,
            prior.to(training.device) if prior else None,
            self._cache,
            torch.tensor([name in own for name in wanted]),
            cache_dir=self.config.storage.cache,
            min_count=self.config.privacy.min_count,
            round_counts=self.config.privacy.round_counts,
            prefetch=training.prefetch,
        )

    @cached_property
    def _prior(self) -> Prior | None:
        """The frozen network that the method compares models with; it is read once."""
        spec, own = self.plan.method.prior, self.config.training.prior
        if spec is None:
            return None
        return load_prior(replace(spec, path=str(own)) if own else spec)

    def _model(self, labels: Labels) -> Classifier:
        if labels not in self._models:
            names = LabelSet(labels, self._data()[0].label_type)
            model = build(self.plan.model, names, self.plan.seed, pretrained=False)
            model.compute_in(AMP_DTYPES.get(self.config.training.precision))
            self._models = {labels: model}
        return self._models[labels]

    def _measure(
        self,
        context: SiteContext,
        split: Literal["validation", "test"],
        of_round: int,
        bootstrap: int,
        task: TaskData | None = None,
    ) -> Metrics:
        """Evaluate the model on one split of the site's data; the decisions of a task, too."""
        plan = self.plan
        how = Measurement(plan.method.loss, self._data()[0], self.config.privacy, plan.seed)
        how = replace(how, decisions=task.decisions, rule=task.rule) if task else how
        return self._first_counts.within(measure(context, how, split, of_round, bootstrap))


def check_consent(site: str, plan: Plan, config: SiteConfig) -> None:
    """Refuse a job that the site does not take part in.

    Every task needs this check: a server could leave out the handshake.

    Raises:
        CodeMismatch: another version of the package created the job.
        LabelViewRefused: its method shows the site more class names than the site permits.
        ConfigError: the site sets something that the method would ignore, or a device that cannot be used.
    """
    plan.check_code(site)
    if plan.method.label_use.view == "all" and config.privacy.label_view != "all":
        raise LabelViewRefused(
            f"{site}: {plan.method.about.title} shows every class name of the federation to each site; "
            'if this is acceptable, set label_view = "all" under [privacy] in suture.toml'
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
    settings = (
        ("batch_size", training.batch_size is not None),
        ("amp", training.amp),
        ("compile", training.compile != "no"),
    )
    for key, own in settings:
        if own and plan.method.limits.fixed_batches:
            raise ConfigError(
                f"{site}: {plan.method.about.title} takes batch size and precision from the job; remove "
                f"{key} under [training] in suture.toml"
            )


def site_info(
    plan: Plan, config: SiteConfig, data: SiteSamples, prior: str | None, first: FirstCounts
) -> SiteInfo:
    """Return the site's classes, its numbers of images and, where the method requests it, its label counts.

    Args:
        prior: digest of the frozen network that the site holds.
        first: the counts that the site has sent in this experiment.
    """
    labels, samples = data
    requested = labels.label_type in plan.method.egress(Layout({}, {})).counts
    counts = {}
    if requested:
        counts = first.of(labels, class_counts(labels, samples["train"], config.privacy))
    return SiteInfo(
        labels.names,
        {split: len(part) for split, part in samples.items()},
        config.training.threads,
        code_hash(type(plan.method)),
        labels.label_type,
        counts,
        prior,
        config.privacy.protection,
        {name: codes for name, codes in config.data.stated_codes().items() if name in labels},
        f"{device_name(config.training.device)}, {config.training.precision}",
        measures=loss_leaves(
            samples.get("validation"),
            labels,
            Measurement(plan.method.loss, labels, config.privacy, plan.seed),
        ),
    )
