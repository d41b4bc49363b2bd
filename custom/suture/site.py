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

from suture.abstain import LabelViewRefused, MissingState, ThreadsChanged, note, reason_of
from suture.check import Expectation
from suture.config import SiteConfig
from suture.data.batch import columns
from suture.data.site import SiteSamples, load_samples
from suture.diagnostics import Diagnostics, Watch
from suture.errors import ConfigError
from suture.labels import LabelSet
from suture.measuring import class_counts, measure
from suture.messages import Abstain, Evaluation, Hello, Labels, Metrics, Payload, Reply
from suture.methods.crossing import crossing, kept, staying
from suture.models import build
from suture.models.classifier import Classifier, Layout, layout_of, load_tensors, relabelled
from suture.models.saved import save_model
from suture.packing import Packed
from suture.plan import Plan, code_hash, context
from suture.priors import Prior, load_prior
from suture.store import Rounds
from suture.training import Workbench

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
        self._load = load or (lambda: load_samples(config, plan.model.size, name))
        self._samples: SiteSamples | None = None
        self._diagnostics: Diagnostics | None = None
        self._cache: dict[str, Tensor] = {}
        self._models: dict[Labels, Classifier] = {}

    def answer(self, task: Payload) -> Reply:
        """Does what the server asks; an expected failure becomes an `Abstain`.

        Raises:
            Exception: whatever is not expected of a site, after it has been noted in the site's log.
        """
        torch.set_num_threads(self.config.training.threads)
        steps: dict[str, Callable[[Payload], Reply]] = {
            "hello": self._hello,
            "train": self._train,
            "evaluate": self._evaluate,
        }
        try:
            self._keep(task.best)
            return steps[task.task](task)
        except Exception as error:
            note(self.folder, self.name, task, error)
            reason = reason_of(error)
            if reason is None:
                raise
            return Abstain(reason, type(error).__name__, getattr(error, "rows", None))

    def expectation(self, task: Payload) -> Expectation:
        """What this site may answer to a task; the site's filter holds the answer against it."""
        labels = task.labels or self._data()[0].names
        layout = layout_of(self._model(labels), crossing(self._model(labels), self.plan.method))
        return Expectation(
            task.task,
            task.round,
            task.committed,
            task.split,
            labels,
            self._data()[0].names,
            self.plan.method.egress(layout),
            len(self._data()[1]["train"]),
            self.plan.method.keep_local,
        )

    # The three tasks

    def _hello(self, _: Payload) -> Hello:
        if self.plan.code != code_hash():
            raise ConfigError(
                f"{self.name} runs another version of suture ({code_hash()}) than the job was made with "
                f"({self.plan.code}); install the same one"
            )
        if self.plan.method.label_view == "all" and self.config.privacy.label_view != "all":
            raise LabelViewRefused(
                f"{self.name}: {self.plan.method.title} shows every class name of the federation to each "
                'site; permit it with label_view = "all" under [privacy] in suture.toml'
            )
        labels, samples = self._data()
        return Hello(
            labels.names,
            {s: len(part) for s, part in samples.items()},
            self.config.training.threads,
            code_hash(),
            labels.task,
            class_counts(labels, samples["train"], self.config.privacy.min_count)
            if self.plan.method.egress(Layout({}, {})).counts
            else {},
            self._prior.digest if self._prior else None,
        )

    def _train(self, task: Payload) -> Reply:
        state = self._state(task)
        bench = self._workbench(task, state)
        metrics = self._measure(bench, "validation", task.committed, bootstrap=0)
        ctx = context(self.plan, self.rounds, task.round)
        memory = {k.removeprefix("kept/"): t for k, t in state.tensors.items() if k.startswith("kept/")}
        watch = self._watching(bench)
        update, keep = self.plan.method.train(
            watch.over(bench) if watch else bench, task, Packed(memory, state.header), ctx
        )
        if watch:
            watch.write(task.round)
        header = {
            "threads": self.config.training.threads,
            "labels": list(task.labels),
            "phase": ctx.phase.name,
            "round": task.round,
        }
        own = kept(bench.model, self.plan.method) | {f"kept/{k}": t for k, t in keep.items()}
        self.states.save(task.round, Packed(own, header), task.committed)
        return replace(update, metrics=metrics)

    def _evaluate(self, task: Payload) -> Evaluation:
        state = self._state(task)
        bench = self._workbench(task, state)
        if task.split == "validation":
            return Evaluation(self._measure(bench, "validation", task.round, bootstrap=0))
        measured, own = self._measure(bench, "test", task.round, _BOOTSTRAP), None
        if local := self._local(task, state):
            load_tensors(bench.model, local)
            own = self._measure(bench, "test", task.round, bootstrap=0)
        if local or self.plan.method.personal != "nothing":
            facts = {"site": self.name, "round": task.round, "experiment": self.plan.experiment}
            save_model(bench.model, self.plan.model, self.folder / "model", facts)
        return Evaluation(measured, own)

    # What they share

    def _data(self) -> SiteSamples:
        """The site's own classes and its samples, read once."""
        if self._samples is None:
            self._samples = self._load()
        return self._samples

    def _watching(self, bench: Workbench) -> Watch | None:
        """In a simulation: what writes down how the round went, beside the state."""
        guesses = self.config.data.truth is not None and self.plan.method.guesses
        if not guesses and not self.config.storage.diagnostics:
            return None
        if self._diagnostics is None:
            train = self._data()[1]["train"] if guesses else None
            self._diagnostics = Diagnostics(self.name, self.config, train, self.folder)
        return self._diagnostics.watching(bench.model.labels)

    def _keep(self, best: int) -> None:
        """Keeps what of the site's own belongs to the best round so far: it may be wanted again."""
        if self.plan.method.personal != "nothing" or self.plan.method.keep_local:
            earlier = [number for number in self.states.rounds() if number <= best]
            if earlier:
                self.states.keep(earlier[-1])

    def _state(self, task: Payload) -> Packed:
        """The newest state of a committed round, or that of the model to be measured.

        What was sent for good in this task fills up what the site does not hold.
        """
        limit = task.round if task.task == "evaluate" else task.committed
        found = self.states.newest(not_later_than=limit)
        state = found[1] if found else Packed({}, {})
        threads = self.config.training.threads
        if state.header.get("threads", threads) != threads:
            raise ThreadsChanged(
                f"{self.name} ran with {state.header['threads']} threads and now has {threads}; other thread "
                "counts give other sums: set it back, or begin a new experiment"
            )
        sent = {f"fixed/{name}": tensor for name, tensor in task.fixed.items()}
        return replace(state, tensors=sent | dict(state.tensors))

    def _workbench(self, task: Payload, state: Packed) -> Workbench:
        """The model with everything that was received, and the data cut to its classes."""
        model = self._model(task.labels)
        load_tensors(model, {**task.shared, **task.head, **self._fixed(task, state, model)})
        own, samples = self._data()
        wanted = LabelSet(task.labels, own.task)
        training = self.config.training
        return Workbench(
            self.name,
            model,
            {split: columns(part, own, wanted) for split, part in samples.items()},
            self.plan.model.preprocessing,
            self.plan.augmentation,
            torch.device(training.device),
            training.amp,
            training.learning_rate,
            training.batch_size,
            self._prior,
            self._cache,
            torch.tensor([name in own for name in wanted]),
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
            names = LabelSet(labels, self._data()[0].task)
            model = build(self.plan.model, names, self.plan.seed, pretrained=False)
            self._models = {labels: model.to(self.config.training.device)}
        return self._models[labels]

    def _fixed(self, task: Payload, state: Packed, model: Classifier) -> dict[str, Tensor]:
        """What stays at the site: batch norm unless it is averaged, and what is personal."""
        names = staying(model, self.plan.method)
        missing = [name for name in names if f"fixed/{name}" not in state.tensors]
        if missing:
            raise MissingState(
                f"{self.name} no longer holds {missing[0]} and {len(missing) - 1} more tensors"
            )
        fixed = {name: state.tensors[f"fixed/{name}"] for name in names}
        head = {name: rows for name, rows in fixed.items() if name.startswith("head.")}
        before = tuple(state.header.get("labels", task.labels))
        return fixed | relabelled(head, before, task.labels, self.plan.seed) if head else fixed

    def _local(self, task: Payload, state: Packed) -> dict[str, Tensor]:
        """The model as the site had trained it in the measured round; {} if it keeps none, or was absent."""
        local = {k.removeprefix("local/"): t for k, t in state.tensors.items() if k.startswith("local/")}
        if not (self.plan.method.keep_local and local) or state.header.get("round") != task.round:
            return {}
        head = {name: rows for name, rows in local.items() if name.startswith("head.")}
        return local | relabelled(head, tuple(state.header["labels"]), task.labels, self.plan.seed)

    def _measure(
        self, bench: Workbench, split: Literal["validation", "test"], of_round: int, bootstrap: int
    ) -> Metrics:
        """The model on one split of this site's data."""
        return measure(
            bench,
            self.plan.method,
            self._data()[0],
            split,
            of_round,
            bootstrap=bootstrap,
            seed=self.plan.seed,
            min_count=self.config.privacy.min_count,
        )
