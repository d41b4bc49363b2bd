"""The messages of a federation: everything that server and sites send to each other.

The server sends a `TaskData`. A site answers with a `SiteInfo`, an `Update`, `Scores`, an `Evaluation` or,
when it cannot perform the task, an `Abstain`. Each is a frozen value that validates its fields on
construction, so that a received message is either well-formed or an error. `suture.protocol.packing`
converts messages into tensors and a header.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Annotated, Literal, overload

import torch
from pydantic import AfterValidator, Field, FiniteFloat, StringConstraints
from pydantic.dataclasses import dataclass
from torch import Tensor

from suture.core.codes import SYSTEMS, check_code
from suture.core.errors import LabelError
from suture.core.labels import LabelType, check_spelling
from suture.core.names import LONGEST, check_value
from suture.core.privacy import check_protection
from suture.core.validation import MOST_ATTRIBUTES, STRICT
from suture.protocol.decisions import DecidedClass, Decision, Rule

MOST = 2_000
"""Largest number of tensors of a model, and of a method's scalars: longer lists are rejected."""

MOST_CLASSES = 10_000
"""Largest number of classes of a federation."""

LARGEST = 10**9
"""The largest count: an integer of Python is unlimited, and so could carry anything."""


@lru_cache(maxsize=2 * MOST_CLASSES)  # the same names come with every message
def _label(name: str) -> str:
    try:
        return check_spelling(name)
    except LabelError as error:
        raise ValueError(str(error)) from None


def _value(text: str) -> str:
    try:
        return check_value(text)
    except LabelError as error:
        raise ValueError(str(error)) from None


def _code(text: str) -> str:
    try:
        return check_code(text)
    except LabelError:
        raise ValueError("is not a code") from None


Word = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]+$", max_length=LONGEST)]
"""A name of the program: of a tensor, a figure or an exception."""

Label = Annotated[str, StringConstraints(max_length=LONGEST), AfterValidator(_label)]
Labels = Annotated[tuple[Label, ...], Field(max_length=MOST_CLASSES)]
Value = Annotated[str, StringConstraints(max_length=LONGEST), AfterValidator(_value)]
"""A value of an attribute, such as ``≥ 60 years``: one printable line."""

CodeText = Annotated[str, StringConstraints(max_length=40), AfterValidator(_code)]
Codes = Annotated[tuple[CodeText, ...], Field(min_length=1, max_length=len(SYSTEMS))]
"""Codes of a class, of different systems; see `suture.core.codes`."""

Tensors = Annotated[dict[Word, Tensor], Field(max_length=MOST)]
TensorPath = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)?$", max_length=LONGEST)
]
Channels = Annotated[dict[TensorPath, Tensor], Field(max_length=MOST)]
"""The tensors of channels, by ``name`` or ``name/tensor``; see `suture.protocol.egress.Channel`."""

Count = Annotated[int, Field(ge=0, le=LARGEST)]
Total = Annotated[int, Field(ge=0, le=LARGEST * MOST)]
"""A sum of counts over sites; that of one site is a `Count`, which its check ensures."""

Number = Annotated[FiniteFloat, Field(ge=-LARGEST, le=LARGEST)]
"""A loss or a scalar of a method: its sums cannot overflow. A model whose loss is larger has diverged."""

Step = Annotated[FiniteFloat | None, Field(exclude_if=lambda step: step is None)]
"""To whose multiples a site has rounded a figure; exact figures say nothing of it."""

Protection = Annotated[dict[Literal["clip", "noise", "delta"], FiniteFloat], AfterValidator(check_protection)]

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
"""A BLAKE3 of a site's ledger, in hexadecimal digits."""

TaskName = Literal["handshake", "train", "calibrate", "evaluate"]
Counts = tuple[Count, Count]
"""Numbers of positive and negative images of a class."""

Reason = Literal[
    "budget",
    "code_mismatch",
    "computation",
    "configuration",
    "data_fault",
    "disk_full",
    "gradient_overflow",
    "label_view",
    "labels",
    "ledger",
    "missing_state",
    "non_finite_loss",
    "out_of_memory",
    "read_only",
    "rescue_factor",
]


@dataclasses.dataclass(frozen=True)
class ClassScore:
    """The scores of one class on one test set.

    Attributes:
        auroc: area under the ROC curve, None where undefined.
        low, high: bounds of its 95 % interval, None where undefined or not computed.
        positives, negatives: labelled images of each kind, None where a site withholds them.
        recall: for multiclass labels, the share of the positives that are predicted as the class; None where
            there is no positive.
        step: to whose multiples a site has rounded these figures; None where they are exact.
    """

    auroc: float | None
    low: float | None
    high: float | None
    positives: int | None
    negatives: int | None
    recall: float | None = None
    step: Step = None


KEYS = ("accuracy", "balanced_accuracy", "precision", "recall", "f1")


@dataclass(frozen=True, config=STRICT)
class Figures:
    """Figures of a model on a set of images.

    Attributes:
        n: number of images.
        auroc: mean over the classes that define it.
        overall: for multiclass labels, figures over all classes; see `KEYS`.
    """

    n: Total
    auroc: FiniteFloat | None
    overall: dict[Word, FiniteFloat | None] = Field(default_factory=dict, max_length=MOST)


@dataclass(frozen=True, config=STRICT)
class Metrics:
    """The metrics of a model on one split of a site's data.

    Attributes:
        round: of the model.
        n: number of images.
        loss: the method's objective on them.
        loss_step: to whose multiples the site has rounded the loss; None where it is exact.
        classes: scores of the site's own classes.
        overall: for multiclass labels, figures over all classes; see `KEYS`.
        attributes: figures of the test images by the values of the attribute that the site has named, if any.
        decided: how well test images are decided, of each class for which the site was sent a `Decision`.
    """

    round: Count
    split: Literal["validation", "test"]
    n: Total
    loss: Number | None
    classes: Annotated[dict[Label, ClassScore], Field(max_length=MOST_CLASSES)]
    overall: dict[Word, FiniteFloat | None] = Field(default_factory=dict, max_length=MOST)
    attributes: Annotated[dict[Value, Figures], Field(max_length=MOST_ATTRIBUTES)] = Field(
        default_factory=dict
    )
    decided: Annotated[dict[Label, DecidedClass], Field(max_length=MOST_CLASSES)] = Field(
        default_factory=dict
    )
    loss_step: Step = None


@dataclass(frozen=True, config=STRICT)
class SiteInfo:
    """A site's answer to the handshake.

    Attributes:
        labels: the site's own class names.
        n: number of images in each split.
        threads: number of torch threads. Another number gives other sums, so it is part of a run's identity.
        code: hash of the package that the site runs.
        label_type: multilabel or multiclass.
        counts: training images with and without each class, None where the site withholds them; empty unless
            the method requests them.
        prior: digest of the frozen network that the site holds, where the method has one.
        protection: clip, noise and delta of a site that clips its updates or adds noise; else empty.
        codes: of those of its classes that it states any of, in its own names.
        computed_on: its kind of CPU or GPU, and the precision of its backbone.
        ledger: digest of the ledger of its releases, with this one; see `suture.federation.site.chain`.
        measures: whether it has a validation loss that its limits of disclosure let leave.
    """

    labels: Labels
    n: dict[Literal["train", "validation", "test"], Count]
    threads: Annotated[int, Field(ge=1, le=4096)]
    code: Word
    label_type: LabelType = "multilabel"
    counts: dict[Label, Counts | None] = Field(default_factory=dict, max_length=MOST_CLASSES)
    prior: Word | None = None
    protection: Protection = Field(default_factory=dict)
    codes: dict[Label, Codes] = Field(default_factory=dict, max_length=MOST_CLASSES)
    computed_on: Annotated[str, StringConstraints(pattern=r"^[\w ,./()-]*$", max_length=LONGEST)] = ""
    ledger: Digest | None = None
    measures: bool = True


@dataclass(frozen=True, config=STRICT)
class Spent:
    """What a site has released in all its experiments, by its own ledger: the server cannot know it.

    Attributes:
        epsilon: ε of all its updates together at the site's δ, in three digits, rounded up; None is infinity.
        updates: number of updates with tensors.
        unprotected: number of these that had no noise; one makes ε infinite.
        experiments: number of experiments with such updates.
        figures: number of figures of classes, which noise does not protect.
        numbers: number of other numbers that it does not protect: losses, counts, weights.
        missing: number of releases, at least, that its ledger has lost: ε is then a lower bound.
    """

    epsilon: Annotated[FiniteFloat, Field(ge=0)] | None
    updates: Count
    unprotected: Count
    experiments: Count
    figures: Count
    numbers: Count
    missing: Count = 0


@dataclass(frozen=True, config=STRICT)
class TaskData:
    """What the server sends to one site.

    Attributes:
        round: the round to train, or, for `evaluate`, the round of the model.
        committed: the newest round that the server has committed; the site restores its newest state that
            is not later.
        phase: name of the phase.
        split: the data to evaluate on.
        labels: the classes of the head's rows, in the site's own names.
        shared: the tensors that every site shares.
        head: the rows of `labels`, each ``[len(labels), ...]``.
        fixed: tensors that stay at the site (frozen or local batch norm, a personal head); sent once.
        channels: what the method sends down besides; and of each class what the server has counted at the
            start, ``[len(labels)]``.
        best: the best round so far, whose state the site has to retain; 0 while there is none.
        decisions: by what the site decides its classes, to be measured on test data.
        rule: the one of the thresholds that is measured.
        ledger: the newest digest of the site's ledger that the server has received, in any experiment.
    """

    task: TaskName
    round: Count = 0
    committed: Count = 0
    phase: Word = "main"
    split: Literal["validation", "test"] = "validation"
    labels: Labels = ()
    shared: Tensors = Field(default_factory=dict)
    head: Tensors = Field(default_factory=dict)
    fixed: Tensors = Field(default_factory=dict)
    channels: Channels = Field(default_factory=dict)
    best: Count = 0
    decisions: Annotated[dict[Label, Decision], Field(max_length=MOST_CLASSES)] = Field(default_factory=dict)
    rule: Rule = "sensitivity"
    ledger: Digest | None = None


@dataclass(frozen=True, config=STRICT)
class Update:
    """Everything that leaves a site after local training.

    Attributes:
        round: the trained round.
        labels: the classes of the head's rows, in the site's own names.
        shared: tensors that every site shares, in the model's shapes.
        head: rows of the head, ``[len(labels), ...]`` each.
        class_weights: the site's weight in the mean of each row, ``[len(labels)]``.
        weight: the site's weight in the mean of each shared tensor; `Egress` declares its range.
        kind: whether the tensors are weights or gradients.
        channels: what the method sends up besides.
        scalars: further numbers that the method declares.
        train_loss: mean loss of the round's local steps.
        metrics: of the received global model on the site's validation data.
        spent: what the site has released so far, if it clips its updates.
        state: the round of the state from which the site trained; 0 where it had none.
        ledger: digest of the ledger of the site's releases, with this one.
    """

    round: Count
    labels: Labels
    shared: Tensors
    head: Tensors
    class_weights: Tensor
    weight: FiniteFloat = 1.0
    kind: Literal["weights", "gradient"] = "weights"
    channels: Channels = Field(default_factory=dict)
    scalars: dict[Word, Number] = Field(default_factory=dict, max_length=MOST)
    train_loss: Number | None = None
    metrics: Metrics | None = None
    spent: Spent | None = None
    state: Count = 0
    ledger: Digest | None = None


@dataclass(frozen=True, config=STRICT)
class Scores:
    """A site's answer to `calibrate`.

    Attributes:
        round: of the received model.
        labels: the classes of the rows, in the site's own names: it annotates and does not withhold them.
        class_tensors: ``positives`` and ``negatives``, int32 ``[len(labels), CELLS]``: how many of its
            validation images with and without the class have a score in each cell of `GRID`; `JOINED` for
            a cell that is counted in the next one.
        spent, ledger: as in an `Update`.
    """

    round: Count
    labels: Labels
    class_tensors: Tensors
    spent: Spent | None = None
    ledger: Digest | None = None


@dataclass(frozen=True, config=STRICT)
class Evaluation:
    """A site's answer to `evaluate`.

    Attributes:
        metrics: of the received model.
        local: on the test data, of the model that the site had trained in that round, before aggregation;
            None unless the method keeps local models and the site took part in the round.
        spent, ledger: as in an `Update`.
    """

    metrics: Metrics
    local: Metrics | None = None
    spent: Spent | None = None
    ledger: Digest | None = None


@dataclass(frozen=True, config=STRICT)
class Abstain:
    """A site could not perform a task. The answer names no path, no patient and no text of an error.

    Attributes:
        reason: one of the known reasons.
        error: class name of the exception; the text stays in the site's own log.
        rows: number of faulty rows of data, where the error is about rows.
    """

    reason: Reason
    error: Word
    rows: Count | None = None


Reply = SiteInfo | Update | Scores | Evaluation | Abstain
Message = TaskData | Reply


def ones(labels: Labels) -> Tensor:
    """Return class weights that count every class once, `[len(labels)]`, float64."""
    return torch.ones(len(labels), dtype=torch.float64)


def by_name(tensor: Tensor, before: Labels, now: Labels, *, axis: int = 0) -> Tensor:
    """Return the tensor with its axis of the classes `before` as that of `now`; a new class gets zeros."""
    index = {name: i for i, name in enumerate(before)}
    known = [i for i, name in enumerate(now) if name in index]
    source = torch.tensor([index[now[i]] for i in known], dtype=torch.long)
    fresh = tensor.new_zeros((*tensor.shape[:axis], len(now), *tensor.shape[axis + 1 :]))
    return fresh.index_copy_(axis, torch.tensor(known, dtype=torch.long), tensor.index_select(axis, source))


@overload
def rounded(value: float) -> float: ...
@overload
def rounded(value: float | None) -> float | None: ...
def rounded(value: float | None) -> float | None:
    """Round a number that leaves a site to six significant digits: further digits could carry information."""
    return None if value is None else float(f"{value:.6g}")
