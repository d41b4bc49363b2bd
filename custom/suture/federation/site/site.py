"""One site: its data, its kept state, and its answers to the server's tasks.

The same object answers in the loop of one process and inside FLARE's executor. An expected failure comes back
as a typed `Abstain`; the text of the error stays in the site's own log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from suture.core.labels import LabelSet
from suture.data.batch import columns
from suture.data.config import SiteConfig
from suture.federation.differential_privacy import protected
from suture.federation.plan import Plan, round_context
from suture.federation.site.abstain import abstention, kind, note, out_of_memory
from suture.federation.site.diagnostics import Diagnostics, Watch
from suture.federation.site.info import introduce, refuse
from suture.federation.site.state import fixed, local, own_beginning, restored, under
from suture.federation.store import Rounds
from suture.learning.evaluation import Measurement, measure
from suture.learning.samples import SiteSamples, load_samples, single_target
from suture.learning.training import SiteContext
from suture.methods.base import RoundContext, local_round
from suture.methods.parameters import kept, parts, shared_parameters
from suture.methods.share import put
from suture.models import build
from suture.models.classifier import Classifier, Layout, load_tensors, split_state
from suture.models.priors import Prior, check_width, load_prior
from suture.models.saved import save_model
from suture.protocol.check import Expectation
from suture.protocol.messages import Evaluation, Labels, Metrics, Payload, Reply, SiteInfo, Update
from suture.protocol.packing import Packed

log = logging.getLogger(__name__)

_BOOTSTRAP = 1000


class Site:
    """A site of a federation.

    Args:
        name: as the federation knows it.
        config: its suture.toml.
        plan: what the federation is about to do.
        rounds: how many rounds the plan's phases stretch over.
        state: folder of its kept states and its error log, outside any job's run directory.
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
        self._load = load or (lambda: load_samples(config, plan.model, name))
        self._samples: SiteSamples | None = None
        self._diagnostics: Diagnostics | None = None
        self._cache: dict[str, Tensor] = {}
        self._models: dict[Labels, Classifier] = {}
        self._halved: int | None = None  # batch size, once the memory has been full

    def answer(self, task: Payload) -> Reply:
        """Does what the server asks; an expected failure becomes an `Abstain`.

        Raises:
            Exception: whatever is not expected of a site, after it has been noted in the site's log.
        """
        torch.set_num_threads(self.config.training.threads)
        steps: dict[str, Callable[[Payload], Reply]] = {
            "handshake": self._handshake,
            "train": self._train,
            "evaluate": self._evaluate,
        }
        try:
            refuse(self.name, self.plan, self.config)
            self._keep(task.best)
            return steps[task.task](task)
        except Exception as error:
            note(self.folder, self.name, task, error)
            if abstained := abstention(error):
                return abstained
            raise

    def expectation(self, task: Payload) -> Expectation:
        """What this site may answer to a task; the site's filter holds the answer against it."""
        labels = task.labels or self._data()[0].names
        model, method = self._model(labels), self.plan.method
        state, head = split_state(model.state_dict())
        layout = Layout.of(
            *parts(method, {name: state[name] for name in shared_parameters(model, method)}, head)
        )
        return Expectation(
            task.task,
            task.round,
            task.committed,
            task.split,
            labels,
            self._data()[0].names,
            method.egress(layout),
            len(self._data()[1]["train"]),
            self.plan.method.keep_local,
        )

    # The three tasks

    def _handshake(self, _: Payload) -> SiteInfo:
        prior = self._prior
        if prior:
            check_width(prior, self._model(self._data()[0].names), self.name)
        return introduce(self.plan, self.config, self._data(), prior.digest if prior else None, self.folder)

    def _train(self, task: Payload) -> Reply:
        state = self._state(task)
        context = self._context(task, state)
        metrics = self._measure(context, "validation", task.committed, bootstrap=0)
        ctx = round_context(self.plan, self.rounds, task.round)
        context, update, keep = self._trained(context, task, state, ctx)
        header = {
            "threads": self.config.training.threads,
            "labels": list(task.labels),
            "phase": ctx.phase.name,
            "round": task.round,
        }
        own = kept(context.model, self.plan.method) | {f"kept/{k}": t for k, t in keep.items()}
        self.states.save(task.round, Packed(own, header), task.committed)
        method, images = self.plan.method, len(self._data()[1]["train"])
        losses, samples = (
            self.expectation(task).egress.losses,
            method.behind_losses(images, context.own(method.local)),
        )
        told = protected(update, task, self.config.privacy, losses, samples, self.folder)
        return replace(told, metrics=metrics)

    def _trained(
        self, context: SiteContext, task: Payload, state: Packed, ctx: RoundContext
    ) -> tuple[SiteContext, Update, dict[str, Tensor]]:
        """The method's round, with half the batch from then on if the memory is full the first time."""
        try:
            return self._attempt(context, task, state, ctx)
        except (RuntimeError, MemoryError) as error:
            batch = self.config.training.batch_size or self.plan.method.local.batch_size
            if not out_of_memory(error) or self._halved or batch < 4 or self.plan.method.fixed_steps:
                raise
            self._halved = batch // 2
            log.warning("%s: %s; trying again with batches of %d", self.name, kind(error), self._halved)
        # Not within the handler: its traceback holds what filled the memory.
        return self._attempt(self._context(task, state), task, state, ctx)

    def _attempt(
        self, context: SiteContext, task: Payload, state: Packed, ctx: RoundContext
    ) -> tuple[SiteContext, Update, dict[str, Tensor]]:
        watch = self._watching(context)
        observed = watch.over(context) if watch else context
        last = Packed(under("kept/", state), state.header)
        method = self.plan.method
        update, keep = method.train(observed, task, local_round(method, observed, last, ctx))
        if watch:
            watch.write(task.round)
        return context, update, keep

    def _evaluate(self, task: Payload) -> Evaluation:
        state = self._state(task)
        context = self._context(task, state)
        if task.split == "validation":
            return Evaluation(self._measure(context, "validation", task.round, bootstrap=0))
        measured, own = self._measure(context, "test", task.round, _BOOTSTRAP), None
        if trained := local(task, state, self.plan.method, self.plan.seed):
            load_tensors(context.model, trained)
            own = self._measure(context, "test", task.round, bootstrap=0)
        if trained or self.plan.method.part_at_site:
            facts = {"site": self.name, "round": task.round, "experiment": self.plan.experiment}
            save_model(context.model, self.plan.model, self.folder / "model", facts)
        return Evaluation(measured, own)

    # What they share

    def _data(self) -> SiteSamples:
        """The site's own classes and its samples, read once."""
        if self._samples is None:
            data, method = self._load(), self.plan.method
            self._samples = (
                single_target(data, self.config.data.target, self.name) if method.single_target else data
            )
        return self._samples

    def _watching(self, context: SiteContext) -> Watch | None:
        """In a simulation: what writes down how the round went, beside the state."""
        guesses = self.config.data.truth is not None and self.plan.method.guesses
        if not guesses and not self.config.storage.diagnostics:
            return None
        if self._diagnostics is None:
            train = self._data()[1]["train"] if guesses else None
            self._diagnostics = Diagnostics(self.name, self.config, train, self.folder)
        return self._diagnostics.watching(context.model.labels)

    def _keep(self, best: int) -> None:
        """Keeps what of the site's own belongs to the best round so far: it may be wanted again."""
        if self.plan.method.part_at_site or self.plan.method.keep_local:
            earlier = self.states.latest(best)
            if earlier is not None:
                self.states.keep(earlier)

    def _state(self, task: Payload) -> Packed:
        labels = LabelSet(task.labels, self._data()[0].label_type)
        begun = own_beginning(task, self.plan, self.name, labels)
        return restored(self.states, begun, self.config.training.threads, self.name)

    def _context(self, task: Payload, state: Packed) -> SiteContext:
        """The model with everything that was received, and the data cut to its classes."""
        model = self._model(task.labels)
        own_part = fixed(task, state, model, self.plan.method, self.plan.seed)
        load_tensors(model, put(self.plan.method.share, own_part, {**task.shared, **task.head}))
        own, samples = self._data()
        wanted = LabelSet(task.labels, own.label_type)
        absent = self.plan.method.missing_is_negative
        training = self.config.training
        return SiteContext(
            self.name,
            model,
            {split: columns(part, own, wanted, absent=absent) for split, part in samples.items()},
            self.plan.model.preprocessing,
            self.plan.augmentation,
            torch.device(training.device),
            training.amp,
            training.learning_rate,
            self._halved or training.batch_size,
            self._prior,
            self._cache,
            torch.tensor([name in own for name in wanted]),
            cache_dir=self.config.storage.cache,
        )

    @cached_property
    def _prior(self) -> Prior | None:
        """The frozen network that the method compares models with, read once."""
        spec, own = self.plan.method.prior, self.config.training.prior
        if spec is None:
            return None
        return load_prior(replace(spec, path=str(own)) if own else spec).to(self.config.training.device)

    def _model(self, labels: Labels) -> Classifier:
        if labels not in self._models:
            names = LabelSet(labels, self._data()[0].label_type)
            model = build(self.plan.model, names, self.plan.seed, pretrained=False)
            self._models = {labels: model.to(self.config.training.device)}
        return self._models[labels]

    def _measure(
        self, context: SiteContext, split: Literal["validation", "test"], of_round: int, bootstrap: int
    ) -> Metrics:
        """The model on one split of this site's data."""
        plan = self.plan
        how = Measurement(plan.method.loss, self._data()[0], self.config.privacy, plan.seed)
        return measure(context, how, split, of_round, bootstrap)
