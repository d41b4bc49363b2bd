"""The data, the model and the states of a site in one experiment: what trains and measures.

A state has the site's local parameters under ``fixed/``, the rest of the model that the site trained under
``local/`` (where the method keeps local models), the optimiser state under ``optimiser/``, and what else
the method keeps under ``kept/``. A frozen encoder, which no round changes, is a file of its own.

A site also notes for itself what no message has a field for: what it left out, and diagnostics of
pseudo-labels, whose correct labels are counted from a table that training does not read, with a method's own
figures of each class. A simulation shows them, because it runs on the machine of the data.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic.dataclasses import dataclass as validated
from torch import Tensor, nn

from suture.core.errors import ConfigError, SutureError
from suture.core.files import atomic_write, read_records, write_json
from suture.core.labels import LabelSet
from suture.core.runtime import out_of_memory, repeatable, seed_for, seed_torch
from suture.core.validation import OPEN, parse
from suture.data.batch import Batch, Samples, columns
from suture.data.config import SiteConfig, TrainingConfig
from suture.data.readers import load_table
from suture.federation.plan import Plan
from suture.federation.site.abstention import ComputationChanged, MissingState, kind
from suture.federation.state_files import Rounds
from suture.learning.evaluation import expect_context
from suture.learning.features import FeatureStore
from suture.learning.samples import SiteSamples, annotate, load_samples, single_target
from suture.learning.steps import LOSS_SCALE, GradientOverflow
from suture.learning.training import (
    LocalRound,
    LocalTraining,
    Objective,
    Observer,
    SiteContext,
    check_memory,
    on_known,
    ready_inputs,
)
from suture.methods.base import RoundContext, learns_one_sided, local_round, loss_of
from suture.models import build
from suture.models.classifier import AMP_DTYPES, HEADS, Classifier, check_tensors, load_tensors, relabel
from suture.models.priors import Prior, load_prior
from suture.protocol.egress import Egress, Layout, Shapes, shape_mismatch, shape_mismatches, strip_prefix
from suture.protocol.messages import Count, Labels, TaskData, Update
from suture.protocol.packing import Packed, load, save

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

    def save(
        self, task: TaskData, model: Classifier, keep: Mapping[str, Tensor], channels: Shapes, **facts: Any
    ) -> None:
        """Store the state of a trained round.

        Args:
            keep: what the method keeps.
            channels: the form of each tensor that it declares to keep.
            facts: for the header: the name of the phase, `Releases.anchor_mark` and `SiteMasks.mark`.

        Raises:
            ConfigError: the method keeps what it does not declare.
            OSError: the disk is full or cannot be written.
        """
        title, tensors, moments = self._method.about.title, {}, {*model.names, LOSS_SCALE}
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

    def retain(self, best: int) -> None:
        """Retain the state of the best round so far, where it holds a part of the selected model."""
        sharing = self._method.sharing
        if sharing.part_at_site or sharing.keep_local:
            earlier = self.files.latest(best)
            if earlier is not None:
                self.files.keep(earlier)


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
        self._layouts: dict[Labels, Layout] = {}
        self._egress: dict[Labels, Egress] = {}
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

    def layout(self, labels: Labels) -> Layout:
        """Return the layout of what is exchanged each round, by the site's own model for some classes."""
        if labels not in self._layouts:
            self._layouts = {labels: self._plan.method.sharing.layout(self.model(labels))}
        return self._layouts[labels]

    def egress(self, labels: Labels) -> Egress:
        """Return everything that may leave, likewise."""
        if labels not in self._egress:
            self._egress = {labels: self._plan.egress(self.layout(labels))}
        return self._egress[labels]

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
        egress = self.egress(task.labels)
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


# Before the first step

_Compile = Literal["no", "kernels", "cuda_graphs"]


OPTIONS: Mapping[_Compile, Mapping[str, Any]] = {"kernels": {}, "cuda_graphs": {"mode": "reduce-overhead"}}
"""The arguments of `torch.compile`."""


_TOLERANCE, _MIXED = 1e-3, 5e-2
"""The largest relative difference of the loss, and of the gradient over all parameters, between a compiled
backbone and itself: in single and in mixed precision, where fused operations round less often."""


def compile_backbone(site: SiteContext, objective: Objective, how: _Compile) -> None:
    """Compile the backbone of the site's model in place, if loss and gradient of one batch stay the same.

    The names of its tensors stay as they are, and copies of the model are not compiled.

    Args:
        objective: the loss to compare, of the site's first training images.

    Raises:
        ConfigError: it cannot be compiled here, or what it computes differs by more than the tolerance.
    """
    if how == "cuda_graphs" and site.device.type != "cuda":
        raise ConfigError(
            f'{site.name}: compile = "cuda_graphs" needs a GPU, and device is {str(site.device)!r}; write '
            'compile = "kernels" or "no" under [training]'
        )
    train = site.samples["train"]
    batch = ready_inputs(site, train.batch(torch.arange(min(len(train), site.batch_size or 64))))
    trial = copy.deepcopy(site.model)
    eager = _measure(site, trial, objective, batch)
    try:
        trial.backbone.compile(**OPTIONS[how])
        difference = max(map(_relative, eager, _measure(site, trial, objective, batch)))
    except Exception as error:  # of the compiler, which has many kinds
        if out_of_memory(error):
            raise
        why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}".removesuffix(": ")
        # Some versions of torch compute with graphs in a process's first thread only (pytorch issue 123177).
        kernels = 'compile = "kernels" or ' if how == "cuda_graphs" else ""
        raise ConfigError(
            f"{site.name}: the backbone cannot be compiled here ({why}); "
            f'write {kernels}compile = "no" under [training]'
        ) from error
    limit = _MIXED if site.model.amp_dtype else _TOLERANCE
    if not difference <= limit:
        raise ConfigError(
            f"{site.name}: when compiled, the loss or gradient of a batch changes by {difference:.2g} "
            f'of its value, more than {limit:g}; write compile = "no" under [training]'
        )
    site.model.backbone.compile(**OPTIONS[how])


def _measure(
    site: SiteContext, model: Classifier, objective: Objective, batch: Batch
) -> tuple[Tensor, Tensor]:
    """Loss and gradient in training, but without dropout, for which a compiler may draw other numbers."""
    model.train()
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.eval()
    model.zero_grad(set_to_none=True)
    with seed_torch(0, site.device):
        loss = objective(model, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = [p.grad.flatten().float() for p in model.parameters() if p.grad is not None]
    return loss.detach(), torch.cat(gradients)


def _relative(expected: Tensor, found: Tensor) -> float:
    """The length of the difference, over that of what is expected; NaN where either is no number."""
    return float((found - expected).norm() / expected.norm().clamp(min=1e-12))


# What a site notes for itself

LEFT_OUT_FILE = "left_out.json"


def write_left_out(folder: Path, sentences: list[str]) -> None:
    """Write what a site left out of its data beside its states.

    Args:
        folder: of the experiment at the site.

    Raises:
        DiskError: the folder cannot be written.
    """
    write_json(folder / LEFT_OUT_FILE, {"left_out": sentences}, private=True)


DIAGNOSTICS_FILE = "diagnostics.jsonl"


class Diagnostics:
    """The diagnostics of one site.

    Args:
        site: its name.
        config: names the table of the correct labels.
        train: the training images, by their names in that table; None where no pseudo-labels are made.
        folder: of the experiment at the site.
    """

    def __init__(self, site: str, config: SiteConfig, train: Samples | None, folder: Path) -> None:
        self._site, self._path = site, folder / DIAGNOSTICS_FILE
        self._truth: tuple[LabelSet, Tensor] | None = None
        if train is not None:
            table = load_table(config.data.model_copy(update={"table": config.data.truth, "labels": None}))
            row = {name: i for i, name in enumerate(table.images)}
            self._truth = table.labels, torch.from_numpy(table.y)[[row[name] for name in train.names]]

    def watching(self, labels: LabelSet) -> _Watch:
        """Return what observes one round.

        Args:
            labels: the classes of the model's columns.
        """
        truth = None
        if self._truth is not None:
            own, y = self._truth
            truth = y[:, own.align(labels)] == 1
        return _Watch(labels, truth, self._append)

    def _append(self, round_: int, facts: Mapping[str, Any]) -> None:
        """Append a round; a repeated one replaces its line and all later ones."""
        line = {"site": self._site, "round": round_, **facts}
        earlier = [other for other in read_records(self._path) if other["round"] < round_]
        lines = "".join(f"{json.dumps(one)}\n" for one in [*earlier, line])
        atomic_write(self._path, lines.encode(), private=True)


class _Watch:
    """Observes one round of a site: receives figures and pseudo-labels from the method, returns nothing.

    Args:
        labels: the classes of the columns.
        truth: correct labels of the training images, ``[n, c]``; None where pseudo-labels are not counted.
        append: writes the line of a round.
    """

    def __init__(
        self, labels: LabelSet, truth: Tensor | None, append: Callable[[int, Mapping[str, Any]], None]
    ) -> None:
        self._labels, self._truth, self._append = labels, truth, append
        self._made, self._right = (torch.zeros(len(labels), dtype=torch.long) for _ in range(2))
        self._figures: dict[str, dict[str, float]] = {}

    @property
    def observe(self) -> Observer | None:
        """The function that counts pseudo-labels, and the correct ones among them; None without labels."""
        return None if self._truth is None else partial(self._count, self._truth)

    def record(self, figures: Mapping[str, Tensor]) -> None:
        """Take figures of each class, ``[c]`` for each name."""
        for name, values in figures.items():
            self._figures[name] = dict(zip(self._labels.names, values.tolist(), strict=True))

    def _count(self, truth: Tensor, rows: Tensor, guessed: Tensor) -> None:
        self._made += guessed.sum(dim=0)
        self._right += (guessed & truth[rows]).sum(dim=0)

    def write(self, round_: int) -> None:
        """Write the diagnostics of the round, if there can be any."""
        classes = {
            name: {"made": int(made), "right": int(right)}
            for name, made, right in zip(self._labels.names, self._made, self._right, strict=True)
            if made
        }
        figures = {"figures": self._figures} if self._figures else {}
        if figures or self._truth is not None:
            self._append(round_, {"classes": classes, **figures})
