"""What a method is: one value with two halves, what a site does and what the server does.

A method is a frozen dataclass; its fields are its hyperparameters. The same value runs in the loop of one
process and under NVIDIA FLARE, and knows neither. To add one, see docs/adding_a_method.md.

`SharingSpec` says what of a model travels in each round, what is sent once, and what stays at a site.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, cast, dataclass_transform

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass as validated
from torch import Tensor

from suture.core.errors import ConfigError
from suture.core.labels import LabelType
from suture.core.validation import STRICT
from suture.learning.steps import LabelLoss, masked_loss
from suture.learning.training import LocalRound, LocalTraining, Loss, SiteContext
from suture.models import ModelSpec
from suture.models.classifier import HEADS, Classifier, Layout, NormPolicy, split_state
from suture.protocol.egress import (
    VARIABLE,
    Channel,
    Egress,
    reorder_axis,
    shape_mismatch,
    shape_mismatches,
    zeros,
)
from suture.protocol.messages import Counts, Labels, TaskData, Update
from suture.protocol.packing import Packed

if TYPE_CHECKING:
    from suture.models.priors import PriorSpec

Personal = Literal["nothing", "head", "model"]

_GATES = re.compile(r"(weight|bias)_(ih|hh)_l\d+(_reverse)?$")
"""Tensors of an LSTM, whose rows are those of its input, forget, cell and output gates in turn."""


@validated(frozen=True, config=STRICT)
class Share:
    """The part of each tensor that is shared.

    The head is shared only as a whole: its rows are classes, and half of a class has no meaning.

    Attributes:
        fraction: of the rows of each tensor, rounded down.
        of: the first ``rows`` of each tensor, as in the published program (of an LSTM the input and forget
            gates of all units); or whole hidden ``units`` of an LSTM, all four gates of the first of them.
        init: where a site's own part begins: at the ``server``'s values, or each at random by itself
            (``own``: Zhang et al. 2021, Algorithm 2, line 1).
    """

    fraction: Annotated[float, Field(gt=0, le=1)] = 0.5
    of: Literal["rows", "units"] = "rows"
    init: Literal["server", "own"] = "server"

    def rows(self, name: str, length: int) -> Tensor:
        """The indices of the shared rows of a tensor with `length` rows."""
        if self.of == "units" and _GATES.search(name):
            units = length // 4
            first = torch.arange(int(self.fraction * units))
            return torch.cat([first + gate * units for gate in range(4)])
        return torch.arange(int(self.fraction * length))


@dataclass(frozen=True)
class SharingSpec:
    """Which tensors of the model travel in each round, and what a site stores and holds of its own.

    What does not travel in each round is sent once, before the first, and then is the site's own.

    Attributes:
        batch_norm: ``average`` (FedAvg); ``frozen`` (FedBN+), sent once; ``local`` (FedBN), the site's own.
        personal: what stays at the site: ``nothing``, its ``head``, or its whole ``model``. A personal method
            leaves a model at each site instead of a global one.
        share: the part of each tensor that travels; None for all of it. The rest is the site's own.
        keep_local: whether a site also stores the model that it trained in the best round, before
            aggregation, and in the end evaluates both on its test data; of methods with a global model.
        prior: the frozen network that sites compare their models with. Every party has the same file, and
            no message carries more of it than its digest.
    """

    batch_norm: NormPolicy = "average"
    personal: Personal = "nothing"
    share: Share | None = None
    keep_local: bool = False
    prior: PriorSpec | None = None

    @property
    def part_at_site(self) -> bool:
        """Whether a part of the model stays at each site, which stores that of the best round."""
        return self.personal != "nothing" or self.share is not None

    @property
    def head_at_site(self) -> bool:
        """Whether the head stays at each site, which exchanges what is before it."""
        return self.personal == "head" or (self.share is not None and self.share.fraction < 1)

    def shared(self, model: Classifier) -> tuple[str, ...]:
        """Names of the tensors outside the head that are exchanged each round, sorted."""
        if self.personal == "model":
            return ()
        local = model.counters | model.frozen_names
        local |= model.norm_names if self.batch_norm != "average" else frozenset()
        return tuple(sorted(n for n in model.names if not n.startswith(HEADS) and n not in local))

    def local(self, model: Classifier) -> tuple[str, ...]:
        """Names of the tensors that a site receives once and that then stay there, sorted.

        These are batch norm where it is not averaged, and what is personal. Where a part of each tensor is
        shared: the model, of which the shared rows replace those of the site.
        """
        names = set(model.names) - model.counters
        if self.share is None:
            names -= set(self.shared(model))
            names -= {n for n in names if n.startswith(HEADS)} if self.personal == "nothing" else set()
        return tuple(sorted(names))

    def layout(self, model: Classifier) -> Layout:
        """The layout of what a site exchanges each round, by its own model."""
        state, head = split_state(model.state_dict())
        shared = {name: state[name] for name in self.shared(model)}
        return Layout.of(*self.parts(shared, head), model.buffer_names)

    def parts(
        self, shared: Mapping[str, Tensor], head: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The parts of the shared tensors and of the head's rows that are exchanged each round.

        Raises:
            ConfigError: so small a part of the model is shared that no row is in it.
        """
        if self.share is None:
            return dict(shared), dict(head) if self.personal == "nothing" else {}
        rows = {name: tensor[self.share.rows(name, len(tensor))] for name, tensor in shared.items()}
        rows = {name: part for name, part in rows.items() if len(part)}
        if shared and not rows:
            raise ConfigError(
                f"method.share.fraction={self.share.fraction:g} is less than one row of every tensor of "
                "the model, so nothing would be shared. Set it higher (0.5 is half)"
            )
        return rows, dict(head) if self.personal == "nothing" and self.share.fraction == 1 else {}

    def put(self, whole: Mapping[str, Tensor], parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The whole tensors with the exchanged parts in their places."""
        if self.share is None:
            return {**whole, **parts}
        done = dict(whole)
        for name, part in parts.items():
            done[name] = whole[name].index_copy(0, self.share.rows(name, len(whole[name])), part)
        return done

    def stored(self, model: Classifier) -> dict[str, Tensor]:
        """What a site stores of its trained model, which is the model before aggregation.

        Local parameters are under ``fixed/``; the rest is under ``local/``, where local models are kept. What
        no round trains is stored once, not here.
        """
        state = {name: t for name, t in model.state_dict().items() if name not in model.frozen_names}
        fixed = [name for name in self.local(model) if name in state]
        rest = [name for name in state if name not in fixed] if self.keep_local else []
        stored = {f"fixed/{name}": name for name in fixed} | {f"local/{name}": name for name in rest}
        return {key: state[name].detach().cpu() for key, name in stored.items()}


def layout_of(model: GlobalModel, method: Method) -> Layout:
    """The layout of what is exchanged each round, by the server's model."""
    return Layout.of(*method.sharing.parts(model.shared, model.head), model.buffers)


def with_channels(model: GlobalModel, method: Method) -> GlobalModel:
    """The model with the channels of the method as they begin."""
    forms = method.egress(layout_of(model, method)).forms("down", "server")
    return replace(model, channels={name: zeros(form, len(model.labels)) for name, form in forms.items()})


def check_channels(model: GlobalModel, method: Method) -> None:
    """Refuse a model of the server that lacks a channel, or has another than the method declares.

    Raises:
        ConfigError: names the first one.
    """
    forms = method.egress(layout_of(model, method)).forms("down", "server")
    for name, wrong in shape_mismatches(forms, model.channels, len(model.labels)).items():
        raise ConfigError(
            f"{method.about.title} aggregates to a model whose channel {name!r} is {wrong}; return every "
            "channel that its egress declares as down or server, and no other"
        )


def check_facts(facts: ClassFacts, model: GlobalModel, method: Method) -> None:
    """Refuse facts of classes that the method does not declare, or of another form.

    Raises:
        ConfigError: names the first one.
    """
    forms = method.egress(layout_of(model, method)).forms("facts")
    told = {name: form for name, form in forms.items() if name in facts.tensors}
    for name, wrong in shape_mismatches(told, facts.tensors, len(model.labels)).items():
        raise ConfigError(
            f"{method.about.title} has a fact of classes, {name!r}, that is {wrong}; add Channel({name!r}, "
            "'facts', (CLASSES,)) with its shape to the channels of its egress"
        )


Question = Literal["labels missing", "classes rare", "sites differ", "few labels", "references"]
"""labels missing: sites annotate different classes. classes rare: few classes have most images. sites differ:
in scanners or patients. few labels: a new class with few examples. references: no federation at all."""

LabelView = Literal["own", "all", "target"]

SEVERAL: tuple[LabelType, ...] = ("multilabel", "multiclass")


@dataclass(frozen=True)
class Phase:
    """A stretch of rounds in which the same things are trained.

    Attributes:
        trainable: ``all`` of the model but a frozen encoder; or its ``head``, with the hidden block, while
            the backbone rests.
        lr: learning rate of the phase, at every site; None takes the method's, or the site's own.
        annealed: whether that rate falls along half a cosine, which would reach 0 after the last round.
        epochs: passes over the local data a round; None takes the method's.
        keep_best: a site returns the epoch of the lowest validation loss rather than the last.
        local: how a site trains in it; None for the method's local training.
        reinit_head: whether the head is reinitialised before its first round, at every site alike.
        selectable: whether a model of it may be the result of the run.
    """

    name: str
    rounds: int
    trainable: Literal["all", "head"] = "all"
    lr: float | None = None
    epochs: int | None = None
    keep_best: bool = False
    local: LocalTraining | None = None
    reinit_head: bool = False
    annealed: bool = False
    selectable: bool = True


def in_two(phases: tuple[Phase, ...], share: float, first: str, then: str) -> tuple[Phase, ...]:
    """The phases with the main one in two; a share of its rounds, 0 or one round at least, is the first."""
    *before, main = phases
    if main.name != "main":
        return phases
    rounds = min(main.rounds, max(1, round(share * main.rounds))) if share else 0
    both = ((first, rounds), (then, main.rounds - rounds))
    return (*before, *(replace(main, name=name, rounds=length) for name, length in both if length))


@dataclass(frozen=True)
class RoundContext:
    """Where a federation stands; the same for every site of a round.

    Attributes:
        round, phase_round: from 1, of the run and within the phase.
        sites: number of the sites that take part, with an update in this round or not; 0 at a site, which
            does not know it.
    """

    round: int
    phase: Phase
    seed: int
    phase_round: int = 1
    sites: int = 0


@dataclass(frozen=True)
class GlobalModel:
    """The server's half of the state, one serialisable value.

    Attributes:
        labels: the union C of the sites' classes; names the rows of `head`.
        shared: tensors that every site trains or holds in common.
        head: rows ``[len(labels), ...]``.
        fixed: tensors that no round changes, sent to a site once.
        channels: the tensors that the method sends down, or keeps at the server; see `Channel`.
        label_type: of the federation.
        buffers: names of those shared tensors that no gradient trains, such as the statistics of batch norm.
    """

    labels: Labels
    shared: Mapping[str, Tensor]
    head: Mapping[str, Tensor]
    fixed: Mapping[str, Tensor] = field(default_factory=dict)
    channels: Mapping[str, Tensor] = field(default_factory=dict)
    label_type: LabelType = "multilabel"
    buffers: frozenset[str] = frozenset()

    @property
    def trained(self) -> dict[str, Tensor]:
        """The parameters: shared tensors but the buffers, and the head."""
        return {n: t for n, t in self.shared.items() if n not in self.buffers} | dict(self.head)

    def moved_to(self, tensors: Mapping[str, Tensor]) -> GlobalModel:
        """The model with some of its shared tensors and of its head's replaced."""
        shared, head = ({n: tensors.get(n, t) for n, t in part.items()} for part in (self.shared, self.head))
        return replace(self, shared=shared, head=head)

    def rows(self, labels: Labels) -> dict[str, Tensor]:
        """The head's rows of `labels`, in that order."""
        where = self.where(labels)
        return {name: tensor[where] for name, tensor in self.head.items()}

    def where(self, labels: Labels) -> Tensor:
        """The positions of `labels` among this model's."""
        index = {name: i for i, name in enumerate(self.labels)}
        return torch.tensor([index[name] for name in labels], dtype=torch.long)


@dataclass(frozen=True)
class LabelStatistics:
    """What the sites reported before round 1, under the federation's class names.

    Attributes:
        labels: every class of the federation.
        images: training images of each site.
        counts: for each site its own classes with their positive and negative images; None where withheld
            or not requested.
        label_type: of the federation.
    """

    labels: Labels
    images: Mapping[str, int]
    counts: Mapping[str, Mapping[str, Counts | None]]
    label_type: LabelType = "multilabel"


@dataclass(frozen=True)
class ClassFacts:
    """What the server sends to all sites about each class.

    Attributes:
        tensors: by name, ``[len(labels), ...]`` each, as the channels whose way is ``facts`` declare them.
        notes: sentences for the report.
    """

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field, Field))
def hyperparameters(kind: type[T]) -> type[T]:
    """Make a method's class a frozen dataclass whose fields, its hyperparameters, are validated.

    A value of the wrong type or range raises, and so does a field that does not exist.
    """
    made: Any = validated(frozen=True, config=STRICT)(kind)
    return cast(type[T], made)


@dataclass(frozen=True)
class About:
    """What a method is called, and what it does not take.

    Attributes:
        name: word of the command line and of a job's configuration.
        title: for people; of a method whose sources do not suffice it ends with "(reconstruction)".
        paper: for people: authors, year, and the section or algorithm.
        question: what it is an answer to; see `Question`.
        images_only: it needs pixels, for views of them or a prior: no text will do.
        pixels: why features of the images, which a frozen encoder computes once, will not do for it: the end
            of a sentence that begins with the method; empty where they do.
        mixes_patients: why its training is not of each image alone, or tells of images otherwise, so that a
            site with ε per patient refuses it: the end of a sentence that begins with the method; empty where
            all that it does with training data is `fit`, by an objective that is a mean over images.
        fixed_batches: the job alone sets the batches of a round: a site has no batch size of its own to
            choose, or to halve when its memory is full, and no mixed precision.
        pooled: one party trains on the data of all sites together: a reference, not a federation.
        local_only: why it cannot run in a federation; empty where it can.
        removable: its model is a function of the sites' newest updates alone. The server keeps these, and can
            remove a site exactly.
    """

    name: str
    title: str
    paper: str
    question: Question = "labels missing"
    images_only: bool = False
    pixels: str = ""
    mixes_patients: str = "does not declare that it trains on each image alone (About.mixes_patients)"
    fixed_batches: bool = False
    pooled: bool = False
    local_only: str = ""
    removable: bool = False


@dataclass(frozen=True)
class LabelUse:
    """Which labels a site sees, and what training makes of them.

    Attributes:
        view: ``own``, a site sees the rows of its own classes only; ``all``, it sees the name of every class
            of the federation, which its configuration must permit; ``target``, every site trains one class of
            its own, which its suture.toml names as `target`, under one shared row,
            `suture.learning.samples.TARGET`, which so has another meaning at each site.
        unknown: a class that a site does not annotate is ``masked``, or taught as ``negative`` (absent);
            metrics never count it.
        types: the types of labels that the method is defined for; a federation of another one is refused.
        complete: the party gets every label of every image (a reference, not a federation).
        pseudo: whether it makes pseudo-labels; a simulation counts how many of them are right.
    """

    view: LabelView = "own"
    unknown: Literal["masked", "negative"] = "masked"
    types: tuple[LabelType, ...] = SEVERAL
    complete: bool = False
    pseudo: bool = False


class Method(ABC):
    """The contract: what a method is called, how it uses labels, what travels, and its two halves.

    Attributes:
        about: what the method is called, its paper, and what it does not take.
        merges_by_mean: whether `aggregate` uses tensors and rows of the updates only in their weighted means,
            so that a robust merge can take the place of these, or a sum of masked updates; see
            `suture.privacy.robust` and `suture.privacy.secure_aggregation`.
        local: how a site trains.
    """

    about: ClassVar[About]
    merges_by_mean: ClassVar[bool] = False
    local: LocalTraining

    @property
    @abstractmethod
    def labels(self) -> LabelUse:
        """Which labels a site sees, and what training makes of unknown ones.

        A method sets it as an attribute of its class; one of which a job chooses the use, as a property.
        """

    @property
    def sharing(self) -> SharingSpec:
        """Which part of the model travels; by default as the method's hyperparameters of these names say."""
        names = {part.name for part in fields(SharingSpec)}
        own = [part.name for part in fields(self) if part.name in names]  # type: ignore[arg-type]
        return SharingSpec(**{name: getattr(self, name) for name in own})

    def phases(self, rounds: int) -> tuple[Phase, ...]:
        """The phases of a run of `rounds` rounds; by default a warm-up of the head, and the main phase.

        The warm-up, if there is one, is one round: each site trains the head while the backbone is frozen,
        and the heads are aggregated as in any other round.

        Raises:
            ConfigError: there are too few rounds.
        """
        local = self.local
        if not local.warmup_epochs:
            return (Phase("main", rounds),)
        warm_up = Phase("warm-up", 1, "head", local.warmup_lr, local.warmup_epochs, keep_best=True)
        return (warm_up, Phase("main", rounds - 1)) if rounds > 1 else (warm_up,)

    def adapted(self, spec: ModelSpec) -> ModelSpec:
        """The model that the method trains, from the one that a job names; by default the same.

        Only what the method cannot do without is set, such as the neck of MOON.

        Raises:
            ConfigError: the method cannot train the model; names the setting and the remedy.
        """
        return spec

    @abstractmethod
    def egress(self, layout: Layout) -> Egress:
        """Declare everything that may leave a site, and all channels.

        Args:
            layout: the shapes of what is shared each round; empty before there is a model.
        """

    # The site's half

    @abstractmethod
    def train(
        self, site: SiteContext, received: TaskData, round_: LocalRound
    ) -> tuple[Update, dict[str, Tensor]]:
        """Train for one round at a site.

        Args:
            site: the site's data, and a model that holds the received parameters.
            received: the server's payload.
            round_: learning rate, epochs, batch size, phase, seed and optimiser state, all settled.

        Returns:
            the update, and what the site keeps for the next round: the state of the optimiser, which a new
            phase drops, and the channels that stay at the site, which the next round finds in
            ``round_.kept``. A round that is not committed leaves neither.

        Raises:
            NonFiniteLoss: the loss is no longer a number.
        """

    def loss(self, logits: Tensor, y: Tensor, known: Tensor, label_type: LabelType) -> Tensor:
        """The supervised loss of a site, also its validation loss: the cross-entropy of what is known.

        Args:
            logits: ``[n, c]``.
            y: labels, ``[n, c]``.
            known: which labels are known, ``[n, c]``.

        Returns:
            a scalar.
        """
        return masked_loss(logits, y, known, label_type)

    # The server's half

    def class_facts(self, statistics: LabelStatistics) -> ClassFacts:
        """What the server sends to the sites about each class, after the handshake; by default nothing."""
        return ClassFacts()

    def predictor(
        self,
        tensors: Mapping[str, Tensor],
        channels: Mapping[str, Tensor],
    ) -> Mapping[str, Tensor]:
        """The tensors of the model that predicts, where they are others than those trained on; else nothing.

        With them the model is measured, selected and exported; training goes on from the merged ones.

        Args:
            tensors: the shared ones and the head's rows of the global model, or as a site has received them.
            channels: likewise, those that the server sends down.
        """
        return {}

    @abstractmethod
    def aggregate(self, previous: GlobalModel, updates: Iterable[Update], ctx: RoundContext) -> GlobalModel:
        """The next global model.

        Args:
            previous: the model that this round started from.
            updates: the accepted ones in the order of the sites' names, under the federation's class names.
                They can be walked through more than once, and are taken from disk one by one where they are
                many, so that memory does not grow with the number of sites. Their tensors are only read: none
                is changed, and none is part of the result.
        """


def local_round(method: Method, site: SiteContext, state: Packed, ctx: RoundContext) -> LocalRound:
    """Resolve phase, learning rate, the site's own settings and optimiser state, so that no method has to.

    Args:
        state: what the site stored after its last round; its optimiser state ends with its phase.

    Raises:
        ConfigError: what it kept has another form than the method declares.
    """
    phase, labels = ctx.phase, site.model.labels
    egress = method.egress(method.sharing.layout(site.model))
    before = tuple(state.header.get("labels", labels.names))
    where = f"{site.name}'s state of round {state.header.get('round')}"
    moments = {name: tensor for name, tensor in state.tensors.items() if name not in egress.forms("site")}
    return LocalRound(
        resolve_training(method.local, ctx, site.lr, site.batch_size),
        method.sharing.batch_norm,
        ctx.seed,
        ctx.round,
        moments if state.header.get("phase") == phase.name else {},
        phase.trainable == "head",
        loss_of(method.loss, labels.label_type) if phase.keep_best else None,
        phase.name,
        ctx.phase_round,
        phase.rounds,
        phase.reinit_head and ctx.phase_round == 1,
        _keep(egress.going("site"), state.tensors, before, labels.names, where),
    )


def _keep(
    declared: Sequence[Channel], stored: Mapping[str, Tensor], before: Labels, now: Labels, where: str
) -> dict[str, Tensor]:
    """What a site has kept, with the classes of now; zeros where it has nothing and the shape is known."""
    kept: dict[str, Tensor] = {}
    for channel in declared:
        if not channel.forms.keys() & stored.keys():
            new = {name: form for name, form in channel.forms.items() if VARIABLE not in form[0]}
            kept |= {name: zeros(form, len(now)) for name, form in new.items()}
            continue
        for name, form in channel.forms.items():
            if wrong := shape_mismatch(form, stored.get(name), len(before)):
                raise ConfigError(
                    f"{where}: {name} is {wrong}; restore it from a backup, or begin a new experiment"
                )
            kept[name] = reorder_axis(form, stored[name], before, now)
    return kept


def resolve_training(
    local: LocalTraining, ctx: RoundContext, lr: float | None = None, batch_size: int | None = None
) -> LocalTraining:
    """How a site trains in one round. The learning rate of every step is settled here.

    A phase's own rate goes before the site's, and that before the method's; `final_lr` and `annealed` lower
    it from round to round.

    Args:
        local: the method's local training.
        lr, batch_size: the site's own, where its suture.toml has them.
    """
    phase = ctx.phase
    local = phase.local or local
    if phase.lr is not None:
        lr = phase.lr
    elif lr is None:
        lr = local.lr
    if phase.lr is None and local.final_lr is not None:
        fall = (1 + math.cos(math.pi * ctx.phase_round / phase.rounds)) / 2
        lr = local.final_lr + (lr - local.final_lr) * fall
    if phase.annealed:
        lr *= (1 + math.cos(math.pi * (ctx.phase_round - 1) / phase.rounds)) / 2
    local = replace(local, lr=lr, batch_size=batch_size or local.batch_size)
    return local if phase.epochs is None else replace(local, epochs=phase.epochs, iterations=None)


def loss_of(loss: LabelLoss, label_type: LabelType) -> Loss:
    """A method's loss for one type of labels."""
    return lambda logits, y, known: loss(logits, y, known, label_type)


def learns_one_sided(method: Method) -> bool:
    """Whether sites train classes of which they know positives alone; see `LabelSet.one_sided`.

    Rows that stay at a site, pooled data, and tasks of one class have no other party's negatives.
    """
    alone = method.sharing.personal != "nothing" or method.about.pooled or method.about.local_only
    return method.labels.view != "target" and not alone
