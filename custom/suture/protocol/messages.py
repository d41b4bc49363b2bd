"""The messages of a federation: all that crosses between server and sites.

Down goes a `Payload`; up comes a `SiteInfo`, an `Update`, an `Evaluation` or, when a site cannot do what was
asked, an `Abstain`. Each is a frozen value whose plain fields are validated as it is made, so that a message
read from the wire is either well-formed or an error. `packing.py` turns them into tensors and a header.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal, overload

import torch
from pydantic import AfterValidator, Field, FiniteFloat, StringConstraints
from pydantic.dataclasses import dataclass
from torch import Tensor

from suture.core.errors import LabelError
from suture.core.labels import LabelType
from suture.core.names import LONGEST, check_label
from suture.core.validation import STRICT

MOST = 2_000
"""Classes of a federation, and tensors of a model: a longer list in a message is not read to its end."""

LARGEST = 10**9
"""The largest count: an integer of Python has no end, and so could carry anything."""


def _label(name: str) -> str:
    try:
        return check_label(name)
    except LabelError:
        raise ValueError("is not a label name") from None  # without the name, which is not fit to be logged


Word = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]+$", max_length=LONGEST)]
"""A name of the program's own: a tensor, a number, an exception."""

Label = Annotated[str, StringConstraints(max_length=LONGEST), AfterValidator(_label)]
Labels = Annotated[tuple[Label, ...], Field(max_length=MOST)]
Tensors = Annotated[dict[Word, Tensor], Field(max_length=MOST)]
Count = Annotated[int, Field(ge=0, le=LARGEST)]

TaskName = Literal["handshake", "train", "evaluate"]
Counts = tuple[Count, Count]
"""Positive and negative images of a class."""

Reason = Literal[
    "code_mismatch",
    "configuration",
    "data_fault",
    "disk_full",
    "label_view",
    "labels",
    "missing_state",
    "non_finite_loss",
    "out_of_memory",
    "read_only",
    "rescue_factor",
    "threads",
]


@dataclasses.dataclass(frozen=True)
class ClassScore:
    """What is known of one class on one test set.

    Attributes:
        auroc: area under the ROC curve, None where undefined.
        low, high: bounds of its 95 % interval, None where undefined or not computed.
        positives, negatives: labelled images of each kind, None where a site withholds them.
        recall: of a single-label task, the share of the positives that is predicted as the class; None where
            there is none.
    """

    auroc: float | None
    low: float | None
    high: float | None
    positives: int | None
    negatives: int | None
    recall: float | None = None


KEYS = ("accuracy", "balanced_accuracy", "precision", "recall", "f1")

MOST_ATTRIBUTES = 20
"""Values of an attribute that figures are given by; a column of more is something else."""


@dataclass(frozen=True, config=STRICT)
class Figures:
    """How a model did on some images, in a few numbers.

    Attributes:
        auroc: the mean over the classes where it is defined.
        overall: accuracy and its like, of a multiclass task.
    """

    n: Count
    auroc: FiniteFloat | None
    overall: dict[Word, FiniteFloat | None] = Field(default_factory=dict, max_length=MOST)


@dataclass(frozen=True, config=STRICT)
class Metrics:
    """How a model did on one split of a site's data.

    Attributes:
        classes: of the site's own classes only.
        overall: accuracy and its like, of a multiclass task.
        attributes: of the test images by the values of the attribute that the site has named, if any.
    """

    round: Count
    split: Literal["validation", "test"]
    n: Count
    loss: FiniteFloat | None
    classes: Annotated[dict[Label, ClassScore], Field(max_length=MOST)]
    overall: dict[Word, FiniteFloat | None] = Field(default_factory=dict, max_length=MOST)
    attributes: Annotated[dict[Label, Figures], Field(max_length=MOST_ATTRIBUTES)] = Field(
        default_factory=dict
    )


@dataclass(frozen=True, config=STRICT)
class SiteInfo:
    """A site introduces itself.

    Attributes:
        labels: the site's own class names.
        n: number of images in each split.
        threads: torch threads; another count gives other sums, so it is part of a run's identity.
        code: hash of the package that the site runs.
        label_type: multilabel or multiclass.
        counts: training images with and without each class, None where the site withholds them; empty unless
            the method asks for them.
        prior: digest of the frozen network that the site holds, where the method has one.
        protection: clip, noise and delta of a site that clips its updates or adds noise; else empty.
    """

    labels: Labels
    n: dict[Literal["train", "validation", "test"], Count]
    threads: Annotated[int, Field(ge=1, le=4096)]
    code: Word
    label_type: LabelType = "multilabel"
    counts: dict[Label, Counts | None] = Field(default_factory=dict, max_length=MOST)
    prior: Word | None = None
    protection: dict[Literal["clip", "noise", "delta"], FiniteFloat] = Field(default_factory=dict)


@dataclass(frozen=True, config=STRICT)
class Payload:
    """What the server sends to one site.

    Attributes:
        round: the round to be trained, or, for `evaluate`, the round of the model.
        committed: the newest round that the server has committed; the site restores its newest state that
            is not later.
        labels: the classes of the head's rows, in the site's own names.
        shared: the tensors that every site shares.
        head: the rows of `labels`, each ``[len(labels), ...]``.
        fixed: tensors that stay at the site (frozen or local batch norm, a personal head); sent once.
        class_tensors: what else the server says of each class, ``[len(labels)]``.
        best: the best round so far, whose personal tensors the site is to keep; 0 while there is none.
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
    class_tensors: Tensors = Field(default_factory=dict)
    best: Count = 0


@dataclass(frozen=True, config=STRICT)
class Update:
    """All that leaves a site after local training.

    Attributes:
        shared: tensors shared by every site, in the model's shapes.
        head: rows of the head, ``[len(labels), ...]`` each.
        labels: the classes of those rows, in the site's own names.
        weight: how much the site counts in the mean of each shared tensor.
        class_weights: how much it counts in the mean of each row, ``[len(labels)]``.
        scalars: further numbers that the method declares.
        train_loss: mean loss of the round's local steps.
        metrics: the received global model on the site's validation data.
    """

    round: Count
    labels: Labels
    shared: Tensors
    head: Tensors
    class_weights: Tensor
    weight: FiniteFloat = 1.0
    kind: Literal["weights", "gradient"] = "weights"
    class_tensors: Tensors = Field(default_factory=dict)
    scalars: dict[Word, FiniteFloat] = Field(default_factory=dict, max_length=MOST)
    train_loss: FiniteFloat | None = None
    metrics: Metrics | None = None


@dataclass(frozen=True, config=STRICT)
class Evaluation:
    """A site's answer to `evaluate`.

    Attributes:
        metrics: of the model that was sent.
        local: on the test data, of the model that the site had trained in that round, before the merge; None
            unless the method keeps it, and the site took part in the round.
    """

    metrics: Metrics
    local: Metrics | None = None


@dataclass(frozen=True, config=STRICT)
class Abstain:
    """A site could not do what was asked, and says why without a path, a patient or a message text.

    Attributes:
        reason: one of the known reasons.
        error: class name of the exception; the text stays in the site's own log.
        rows: how many rows of data were at fault, where that is what it is about.
    """

    reason: Reason
    error: Word
    rows: Count | None = None


Reply = SiteInfo | Update | Evaluation | Abstain
Message = Payload | Reply


def ones(labels: Labels) -> Tensor:
    """Every class of a site counts once."""
    return torch.ones(len(labels), dtype=torch.float64)


@overload
def rounded(value: float) -> float: ...
@overload
def rounded(value: float | None) -> float | None: ...
def rounded(value: float | None) -> float | None:
    """A number that leaves a site, to six digits: the rest would tell more than anybody needs."""
    return None if value is None else float(f"{value:.6g}")
