"""What trains and measures at a site: its data, its model, and how much of both its memory takes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

from suture.core.devices import out_of_memory, repeatable
from suture.core.errors import ConfigError
from suture.core.labels import LabelSet
from suture.data.batch import columns
from suture.data.config import SiteConfig
from suture.federation.plan import Plan
from suture.federation.site.abstention import kind
from suture.federation.site.diagnostics import Diagnostics
from suture.federation.site.left_out import write_left_out
from suture.federation.site.states import States
from suture.learning.compiling import compile_backbone
from suture.learning.features import FeatureStore
from suture.learning.memory import check_memory
from suture.learning.one_sided import expected
from suture.learning.optimisers import GradientOverflow
from suture.learning.samples import SiteSamples, annotated, load_samples, single_target
from suture.learning.training import LocalRound, LocalTraining, SiteContext, on_known
from suture.methods.base import RoundContext, learns_one_sided, local_round, loss_of
from suture.models import build
from suture.models.classifier import AMP_DTYPES, Classifier, load_tensors
from suture.models.priors import Prior, load_prior
from suture.protocol.egress import shape_mismatches
from suture.protocol.messages import Labels, TaskData, Update
from suture.protocol.packing import Packed

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
            data = annotated(data)
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
        (own, samples), wanted = self.data, model.labels
        if self._plan.model.reads_features:
            if self._features is None or task.fixed:
                folder = config.storage.feature_folder
                self._features = FeatureStore(model, self._plan.model, samples, folder, self._site)
            samples = self._features.samples
        absent = method.labels.unknown == "negative"
        return SiteContext(
            self._site,
            model,
            {split: columns(part, own, wanted, absent=absent) for split, part in samples.items()},
            self._plan.model.preprocessing,
            self._plan.augmentation,
            torch.device(training.device),
            training.lr,
            self._halved or training.batch_size,
            self.prior.to(training.device) if self.prior else None,
            self._cache,
            torch.tensor([name in own for name in wanted]),
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
        context = expected(context, self.data[0], round_)
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
