"""One site: its data, its kept state, and its answers to the server's tasks.

The same object answers in the loop of one process and inside FLARE's executor. An expected failure comes back
as a typed `Abstain`; the text of the error stays in the site's own log.
"""

from __future__ import annotations

import errno
import json
import logging
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import torch

from suture.check import Expectation
from suture.config import SiteConfig
from suture.data.batch import Samples, columns
from suture.data.site import load_samples
from suture.data.table import Split
from suture.errors import ConfigError, DataError, LabelError, SutureError
from suture.evaluation.metrics import ClassScore, score_classes
from suture.labels import LabelSet
from suture.messages import Abstain, Evaluation, Hello, Labels, Metrics, Payload, Reason, Reply
from suture.models import build
from suture.models.classifier import Classifier, layout_of
from suture.models.norm import norm_names, shared_names
from suture.packing import Packed
from suture.plan import Plan, code_hash, context
from suture.store import Rounds
from suture.training import NonFiniteLoss, Workbench, predict

log = logging.getLogger(__name__)

_BOOTSTRAP = 1000


class LabelViewRefused(SutureError):
    """The method would show this site every class name, which its configuration does not permit."""


class MissingState(SutureError):
    """What the site kept is gone; the server has to send it again."""


class ThreadsChanged(SutureError):
    """Another number of torch threads than the run began with gives other sums."""


_REASONS: tuple[tuple[type[BaseException], Reason], ...] = (
    (LabelViewRefused, "label_view"),
    (MissingState, "missing_state"),
    (ThreadsChanged, "threads"),
    (NonFiniteLoss, "non_finite_loss"),
    (DataError, "data_fault"),
    (LabelError, "labels"),
    (ConfigError, "configuration"),
    (torch.OutOfMemoryError, "out_of_memory"),
    (MemoryError, "out_of_memory"),
)


class Site:
    """A site of a federation.

    Args:
        name: as the federation knows it.
        config: its suture.toml.
        plan: what the federation is about to do.
        rounds: how many rounds the plan's phases stretch over.
        state: folder of its kept states and its error log, outside any job's run directory.
    """

    def __init__(self, name: str, config: SiteConfig, plan: Plan, rounds: int, state: Path) -> None:
        self.name = name
        self.config = config
        self.plan = plan
        self.rounds = rounds
        self.folder = state
        self.states = Rounds(state)
        self._samples: tuple[LabelSet, dict[Split, Samples]] | None = None
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
            return steps[task.task](task)
        except Exception as error:
            self._note(task, error)
            reason = _reason(error)
            if reason is None:
                raise
            return Abstain(reason, type(error).__name__, getattr(error, "rows", None))

    def expectation(self, task: Payload) -> Expectation:
        """What this site may answer to a task; the site's filter holds the answer against it."""
        labels = task.labels or self._data()[0].names
        layout = layout_of(
            self._model(labels), shared_names(self._model(labels), self.plan.method.batch_norm)
        )
        return Expectation(
            task.task,
            task.round,
            task.committed,
            task.split,
            labels,
            self._data()[0].names,
            self.plan.method.egress(layout),
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
        )

    def _train(self, task: Payload) -> Reply:
        state = self._state(task)
        bench = self._workbench(task, state)
        metrics = self._measure(bench, "validation", task.committed, bootstrap=0)
        kept = Packed({k[5:]: t for k, t in state.tensors.items() if k.startswith("kept/")}, {})
        ctx = context(self.plan, self.rounds, task.round)
        update, keep = self.plan.method.train(bench, task, kept, ctx)
        model_state = bench.model.state_dict()
        fixed = {f"fixed/{name}": model_state[name].detach().cpu() for name in self._fixed_names(bench.model)}
        header = {"threads": self.config.training.threads, "labels": list(task.labels)}
        self.states.save(
            task.round, Packed({**fixed, **{f"kept/{k}": t for k, t in keep.items()}}, header), task.committed
        )
        return replace(update, metrics=metrics)

    def _evaluate(self, task: Payload) -> Evaluation:
        bench = self._workbench(task, self._state(task))
        draws = _BOOTSTRAP if task.split == "test" else 0
        return Evaluation(self._measure(bench, task.split, task.round, draws))

    # What they share

    def _data(self) -> tuple[LabelSet, dict[Split, Samples]]:
        """The site's own classes and its samples, read once."""
        if self._samples is None:
            self._samples = load_samples(self.config, self.plan.model.size, self.name)
        return self._samples

    def _state(self, task: Payload) -> Packed:
        """The newest kept state that the server has committed, with what was sent for good in this task."""
        found = self.states.newest(not_later_than=task.committed)
        state = found[1] if found else Packed({}, {})
        threads = self.config.training.threads
        if state.header.get("threads", threads) != threads:
            raise ThreadsChanged(
                f"{self.name} ran with {state.header['threads']} threads and now has {threads}; other thread "
                "counts give other sums: set it back, or begin a new experiment"
            )
        if task.fixed:
            return replace(
                state, tensors={**state.tensors, **{f"fixed/{k}": t for k, t in task.fixed.items()}}
            )
        return state

    def _workbench(self, task: Payload, state: Packed) -> Workbench:
        """The model with everything that was received, and the data cut to its classes."""
        model = self._model(task.labels)
        fixed = {name: state.tensors.get(f"fixed/{name}") for name in self._fixed_names(model)}
        if missing := [name for name, tensor in fixed.items() if tensor is None]:
            raise MissingState(
                f"{self.name} no longer holds {missing[0]} and {len(missing) - 1} more tensors"
            )
        tensors = {**task.shared, **task.head, **{k: t for k, t in fixed.items() if t is not None}}
        with torch.no_grad():
            for name, target in model.state_dict().items():
                if name in tensors:
                    target.copy_(tensors[name])
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
        )

    def _model(self, labels: Labels) -> Classifier:
        if labels not in self._models:
            model = build(self.plan.model, LabelSet(labels), self.plan.seed, pretrained=False)
            self._models = {labels: model.to(self.config.training.device)}
        return self._models[labels]

    def _fixed_names(self, model: Classifier) -> list[str]:
        """Tensors that do not cross each round: batch norm, unless it is averaged."""
        return sorted(norm_names(model) - set(shared_names(model, self.plan.method.batch_norm)))

    def _measure(
        self, bench: Workbench, split: Literal["validation", "test"], of_round: int, bootstrap: int
    ) -> Metrics:
        """The model on one split: the method's loss, and AUROC of the site's own classes."""
        own, _ = self._data()
        part = bench.samples.get(split)
        if part is None or not len(part):
            return Metrics(of_round, split, 0, None, {})
        logits = predict(bench, part)
        if not bool(torch.isfinite(logits).all()):
            raise NonFiniteLoss(
                f"{self.name}: the model of round {of_round} diverged; lower the learning rate"
            )
        known = ~torch.isnan(part.y)
        loss = float(self.plan.method.loss(logits, torch.nan_to_num(part.y), known))
        mine = [bench.model.labels.index(name) for name in own.names]
        scores = score_classes(
            own.names,
            part.y[:, mine].numpy(),
            logits[:, mine].numpy(),
            part.patients,
            bootstrap,
            self.plan.seed,
        )
        return Metrics(
            of_round,
            split,
            len(part),
            loss,
            {name: self._withhold(score) for name, score in scores.items()},
        )

    def _withhold(self, score: ClassScore) -> ClassScore:
        """The score, or nothing of it where a count lies below the site's limit."""
        counts = (score.positives or 0, score.negatives or 0)
        return (
            score
            if min(counts) >= self.config.privacy.min_count
            else ClassScore(None, None, None, None, None)
        )

    def _note(self, task: Payload, error: Exception) -> None:
        """Keeps the whole error at the site."""
        log.error("%s: %s", self.name, error, exc_info=_reason(error) is None)
        record = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "site": self.name,
            "task": task.task,
            "round": task.round,
            "error": type(error).__name__,
            "message": str(error),
            "traceback": "".join(traceback.format_exception(error)),
        }
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / "errors.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as full:
            log.error("%s: the error could not be written to %s: %s", self.name, self.folder, full)


def _reason(error: BaseException) -> Reason | None:
    """The typed reason of an expected failure, None for any other."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "disk_full"
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), None)
