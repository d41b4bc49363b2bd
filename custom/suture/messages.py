"""The messages of a federation: all that crosses between server and sites.

Down goes a `Payload`; up comes a `Hello`, an `Update`, an `Evaluation` or, when a site cannot do what was
asked, an `Abstain`. Each is a frozen value whose plain fields are validated as it is made, so that a message
read from the wire is either well-formed or an error. `packing.py` turns them into tensors and a header.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import ConfigDict, Field, FiniteFloat, NonNegativeInt, StringConstraints
from pydantic.dataclasses import dataclass
from torch import Tensor

from suture.evaluation.metrics import ClassScore
from suture.labels import Task

STRICT = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

Name = Annotated[str, StringConstraints(min_length=1, max_length=200)]
Tensors = dict[Name, Tensor]
Labels = tuple[Name, ...]

TaskName = Literal["hello", "train", "evaluate"]
Counts = tuple[NonNegativeInt, NonNegativeInt]
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
    "threads",
]


@dataclass(frozen=True, config=STRICT)
class Metrics:
    """How a model did on one split of a site's data.

    Attributes:
        classes: of the site's own classes only.
        overall: accuracy and its like, of a multiclass task.
    """

    round: NonNegativeInt
    split: Literal["validation", "test"]
    n: NonNegativeInt
    loss: FiniteFloat | None
    classes: dict[Name, ClassScore]
    overall: dict[Name, FiniteFloat | None] = Field(default_factory=dict)


@dataclass(frozen=True, config=STRICT)
class Hello:
    """A site introduces itself.

    Attributes:
        labels: the site's own class names.
        n: number of images in each split.
        threads: torch threads; another count gives other sums, so it is part of a run's identity.
        code: hash of the package that the site runs.
        task: multilabel or multiclass.
        counts: training images with and without each class, None where the site withholds them; empty unless
            the method asks for them.
        prior: digest of the frozen network that the site holds, where the method has one.
        protection: clip, noise and delta of a site that clips its updates or adds noise; else empty.
    """

    labels: Labels
    n: dict[Literal["train", "validation", "test"], NonNegativeInt]
    threads: Annotated[int, Field(ge=1, le=4096)]
    code: Name
    task: Task = "multilabel"
    counts: dict[Name, Counts | None] = Field(default_factory=dict)
    prior: Name | None = None
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
    round: NonNegativeInt = 0
    committed: NonNegativeInt = 0
    phase: Name = "main"
    split: Literal["validation", "test"] = "validation"
    labels: Labels = ()
    shared: Tensors = Field(default_factory=dict)
    head: Tensors = Field(default_factory=dict)
    fixed: Tensors = Field(default_factory=dict)
    class_tensors: Tensors = Field(default_factory=dict)
    best: NonNegativeInt = 0


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

    round: NonNegativeInt
    labels: Labels
    shared: Tensors
    head: Tensors
    class_weights: Tensor
    weight: FiniteFloat = 1.0
    kind: Literal["weights", "gradient"] = "weights"
    class_tensors: Tensors = Field(default_factory=dict)
    scalars: dict[Name, FiniteFloat] = Field(default_factory=dict)
    train_loss: FiniteFloat | None = None
    metrics: Metrics | None = None


@dataclass(frozen=True, config=STRICT)
class Evaluation:
    """A site's answer to `evaluate`."""

    metrics: Metrics


@dataclass(frozen=True, config=STRICT)
class Abstain:
    """A site could not do what was asked, and says why without a path, a patient or a message text.

    Attributes:
        reason: one of the known reasons.
        error: class name of the exception; the text stays in the site's own log.
        rows: how many rows of data were at fault, where that is what it is about.
    """

    reason: Reason
    error: Name
    rows: NonNegativeInt | None = None


Reply = Hello | Update | Evaluation | Abstain
Message = Payload | Reply


def ones(labels: Labels) -> Tensor:
    """Every class of a site counts once."""
    return torch.ones(len(labels), dtype=torch.float64)
