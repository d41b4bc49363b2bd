"""The messages of a federation: everything that server and sites send to each other.

The docstrings of what a site sends are the page of what leaves it (`suture egress`); see `Trait` too.

The server sends a `TaskData`. A site answers with a `SiteInfo`, an `Update`, `Scores`, an `Evaluation` or,
when it cannot perform the task, an `Abstain`. Each is a frozen value that validates its fields on
construction, so that a received message is either well-formed or an error. `suture.protocol.packing`
converts messages into tensors and a header.
"""

from __future__ import annotations

import dataclasses
from enum import Enum
from functools import lru_cache
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import torch
from pydantic import AfterValidator, Field, FiniteFloat, StringConstraints
from pydantic.dataclasses import dataclass as validated
from torch import Tensor

from suture.core.errors import LabelError
from suture.core.labels import LONGEST, LabelType, check_spelling, check_value
from suture.core.ontology import SYSTEMS, check_code
from suture.core.privacy import Protected, check_protection
from suture.core.validation import MOST_ATTRIBUTES, STRICT, check_with
from suture.protocol.decisions import DecidedClass, Decision, Rule

MOST_TENSORS = 2_000
"""Largest number of tensors of a model, and of a method's scalars: longer lists are rejected."""

MOST_CLASSES = 10_000
"""Largest number of classes of a federation."""

LARGEST = 10**9
"""The largest count: an integer of Python is unlimited, and so could carry anything."""


@lru_cache(maxsize=2 * MOST_CLASSES)  # they come with every message
def _known_spelling(name: str) -> str:
    try:
        return check_spelling(name)
    except LabelError as error:
        raise ValueError(str(error)) from None


def _code(text: str) -> str:
    try:
        return check_code(text)
    except LabelError:
        raise ValueError("is not a code") from None


Word = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]+$", max_length=LONGEST)]
"""A name of the program: of a tensor, a figure or an exception."""

Label = Annotated[str, StringConstraints(max_length=LONGEST), AfterValidator(_known_spelling)]
Labels = Annotated[tuple[Label, ...], Field(max_length=MOST_CLASSES)]
Value = Annotated[str, StringConstraints(max_length=LONGEST), check_with(check_value)]
"""A value of an attribute, such as ``≥ 60 years``: one printable line."""

CodeText = Annotated[str, StringConstraints(max_length=40), AfterValidator(_code)]
Codes = Annotated[tuple[CodeText, ...], Field(min_length=1, max_length=len(SYSTEMS))]
"""Codes of a class, of different systems; see `suture.core.ontology`."""

Tensors = Annotated[dict[Word, Tensor], Field(max_length=MOST_TENSORS)]
TensorPath = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)?$", max_length=LONGEST)
]
Channels = Annotated[dict[TensorPath, Tensor], Field(max_length=MOST_TENSORS)]
"""The tensors of channels, by ``name`` or ``name/tensor``; see `suture.protocol.egress.Channel`."""

Count = Annotated[int, Field(ge=0, le=LARGEST)]
Total = Annotated[int, Field(ge=0, le=LARGEST * MOST_TENSORS)]
"""A sum of counts over sites; that of one site is a `Count`, which its check ensures."""

Number = Annotated[FiniteFloat, Field(ge=-LARGEST, le=LARGEST)]
"""A loss or a scalar of a method: its sums cannot overflow. A model whose loss is larger has diverged."""

Step = Annotated[FiniteFloat | None, Field(exclude_if=lambda step: step is None)]
"""To whose multiples a site has rounded a figure; exact figures say nothing of it."""

Protection = Annotated[dict[Protected, FiniteFloat], AfterValidator(check_protection)]

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
"""A BLAKE3 of a site's ledger, in hexadecimal digits."""

SiteName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}$")]
Bytes = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{2})*$", max_length=4096)]
"""Bytes of a key, a signature, a share or a sealed message, in hexadecimal digits."""

MOST_SITES = 1_000
"""Largest number of sites of secure aggregation: each sends every other one a sealed message."""

RowNumber = Annotated[int, Field(ge=0, lt=2**56)]
"""Stands for a class in secure aggregation; made of its name and a secret of the server."""

BySite = Annotated[dict[SiteName, Bytes], Field(max_length=MOST_SITES)]
MaskStep = Literal["keys", "shares", "update", "survivors", "reveal"]

TaskName = Literal["handshake", "mask", "train", "calibrate", "evaluate"]
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
    "masking",
    "missing_state",
    "non_finite_loss",
    "out_of_memory",
    "read_only",
    "rescue_factor",
]


class Trait(Enum):
    """What follows for a field of an answer, written as ``Annotated[type, Trait.COUNTED]``."""

    COUNTED = "its numbers count in the site's ledger, as ones that no noise protects"
    LOSS = "a mean loss of local steps: on a grid, and withheld if it is of few samples"


FEW = 10
"""Positives, or negatives, below which a class is marked: a figure of so few says little."""


def few(*counts: float | None) -> bool:
    """Return whether there are fewer than `FEW` of some kind; what is withheld is not told."""
    return any(count is not None and count < FEW for count in counts)


@dataclasses.dataclass(frozen=True)
class ClassScore:
    """The scores of one class on one test set.

    Attributes:
        auroc: area under the ROC curve, rounded to a grid.
        low: lower bound of its 95 % interval, on the same grid; of test data only.
        high: upper bound, the same.
        positives: as first sent in the experiment, rounded to `round_counts`; the whole score is withheld
            below `min_count`, or if it would reveal such a count.
        negatives: the same.
        recall: with multiclass labels, on the same grid.
        step: of the grid; it bounds the share of the patient with the most images.
    """

    auroc: float | None
    low: float | None
    high: float | None
    positives: int | None
    negatives: int | None
    recall: float | None = None
    step: Step = None


KEYS = ("accuracy", "balanced_accuracy", "precision", "recall", "f1")


@validated(frozen=True, config=STRICT)
class Figures:
    """Figures of a model on a set of images.

    Attributes:
        n: number of images or documents.
        auroc: mean AUROC over the classes that define it, rounded to a grid.
        overall: with multiclass labels, the same figures as above, rounded to grids.
    """

    n: Total
    auroc: FiniteFloat | None
    overall: dict[Word, FiniteFloat | None] = Field(default_factory=dict, max_length=MOST_TENSORS)


@validated(frozen=True, config=STRICT)
class Metrics:
    """The metrics of a model on one split of a site's data.

    Attributes:
        round: number of the round whose model it is.
        split: `validation`, or `test` at the end.
        n: number of images or documents.
        loss: mean over labels, each at most 5, without withheld classes, rounded to a grid; withheld below
            `min_loss` samples.
        classes: figures of each class of the site: see below.
        overall: with multiclass labels: accuracy, balanced_accuracy, precision, recall, f1, rounded to grids,
            over the images of classes that are not withheld; precision only if `min_count` is 0.
        attributes: of test data, where the site names an attribute: number of images, mean AUROC and
            `overall` for each of its values, at most 20; a value with fewer than `min_count` images is
            omitted, and so is any value that would reveal it.
        decided: of test data, if the job has a `decision` section: see below.
        loss_step: of the grid of the loss; it bounds the share of the patient with the most labels.
    """

    round: Count
    split: Literal["validation", "test"]
    n: Total
    loss: Number | None
    classes: Annotated[dict[Label, ClassScore], Field(max_length=MOST_CLASSES)]
    overall: dict[Word, FiniteFloat | None] = Field(default_factory=dict, max_length=MOST_TENSORS)
    attributes: Annotated[dict[Value, Figures], Field(max_length=MOST_ATTRIBUTES)] = Field(
        default_factory=dict
    )
    decided: Annotated[dict[Label, DecidedClass], Field(max_length=MOST_CLASSES)] = Field(
        default_factory=dict
    )
    loss_step: Step = None


@validated(frozen=True, config=STRICT)
class SiteInfo:
    """A site's answer to the handshake.

    Attributes:
        labels: the site's own class names, at most 200 characters each.
        n: number of images or documents in each split; with `epsilon`, for `train` the number of training
            patients, with noise that ε covers.
        threads: number of torch threads.
        code: hash of the installed package.
        label_type: `multilabel` or `multiclass`.
        counts: where the method requests them: images with and without each class, sent once in an
            experiment; rounded to `round_counts`, withheld below `min_count`.
        prior: where the method has one: digest of the frozen network at the site.
        protection: `clip`, `noise` or `epsilon`, and `delta` of the site, if it has set them.
        codes: the codes of its classes, at most one of each terminology.
        computed_on: `cpu` or the model of the GPU, and the precision.
        ledger: BLAKE3 of the site's ledger, including this answer. Each line of the ledger has a secret salt
            of 128 random bits, so the digest reveals nothing about the lines.
        measures: whether it has a validation loss that `min_loss` and `min_count` allow to leave.
        one_sided: those of `labels` that the site does not annotate, but knows to be present where one of
            their descendants is, by the relations of its atlas.
    """

    labels: Labels
    n: Annotated[dict[Literal["train", "validation", "test"], Count], Trait.COUNTED]
    threads: Annotated[int, Field(ge=1, le=4096)]
    code: Word
    label_type: LabelType = "multilabel"
    counts: Annotated[dict[Label, Counts | None], Trait.COUNTED] = Field(
        default_factory=dict, max_length=MOST_CLASSES
    )
    prior: Word | None = None
    protection: Protection = Field(default_factory=dict)
    codes: dict[Label, Codes] = Field(default_factory=dict, max_length=MOST_CLASSES)
    computed_on: Annotated[str, StringConstraints(pattern=r"^[\w ,./()-]*$", max_length=LONGEST)] = ""
    ledger: Digest | None = None
    measures: bool = True
    one_sided: Annotated[Labels, Field(exclude_if=lambda names: not names)] = ()


@validated(frozen=True, config=STRICT)
class Spent:
    """What a site has released in all its experiments, by its own ledger: the server cannot know it.

    Attributes:
        epsilon: ε of all updates of the site, in all its experiments; three digits, rounded up.
        updates: number of its updates.
        unprotected: number of updates without noise.
        experiments: number of its experiments.
        figures: number of figures of classes that it has sent.
        numbers: number of losses, counts, weights and other numbers that it has sent.
        missing: number of missing lines of its ledger that the site's administrator has accepted.
    """

    epsilon: Annotated[FiniteFloat, Field(ge=0)] | None
    updates: Count
    unprotected: Count
    experiments: Count
    figures: Count
    numbers: Count
    missing: Count = 0


@validated(frozen=True, config=STRICT)
class MaskKeys:
    """The keys of a site for one attempt, signed by its startup kit's key; the other sites receive them.

    Attributes:
        cipher: public key (X25519) by which others seal shares for the site.
        mask: public key (X25519) of its masks.
        seed: SHA-256 of the seed of its self mask.
        rows: numbers of the classes whose rows it sends, as the server has numbered them.
        certificate: of the startup kit; in a simulation a key that its process has made.
        among: the sites of the attempt in which it first masked its update of the round, if there was one.
        learned: numbers of the classes of which it has an optimiser's moments and the like.
        histories: of each of these a digest of the models and sums since it began afresh.
        signature: of all that, with experiment, round and attempt.
    """

    cipher: Digest
    mask: Digest
    seed: Digest
    rows: Annotated[tuple[RowNumber, ...], Field(max_length=MOST_CLASSES)]
    certificate: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9\s+/=-]*$", max_length=16_384)]
    among: Annotated[tuple[SiteName, ...], Field(max_length=MOST_SITES)] = ()
    learned: Annotated[tuple[RowNumber, ...], Field(max_length=MOST_CLASSES)] = ()
    histories: Annotated[tuple[Digest, ...], Field(max_length=MOST_CLASSES)] = ()
    signature: Bytes = ""


Roster = Annotated[dict[SiteName, MaskKeys], Field(max_length=MOST_SITES)]


@validated(frozen=True, config=STRICT)
class MaskTask:
    """What the server sends to a site for one step of an attempt of secure aggregation.

    Attributes:
        attempt: 32 random bytes of the server, another one for each attempt.
        numbers: of `keys`: the number of each class of the site, by its own name.
        roster: of `shares`: the keys of all sites of the attempt.
        sealed: of `update`: the shares that others have sealed for the site.
        survivors: of `survivors`: the sites whose masked updates have arrived.
        signatures: of `reveal`: their signatures of that list.
    """

    step: MaskStep
    attempt: Digest
    numbers: Annotated[dict[Label, RowNumber], Field(max_length=MOST_CLASSES)] = Field(default_factory=dict)
    roster: Roster = Field(default_factory=dict)
    sealed: BySite = Field(default_factory=dict)
    survivors: Annotated[tuple[SiteName, ...], Field(max_length=MOST_SITES)] = ()
    signatures: BySite = Field(default_factory=dict)


@validated(frozen=True, config=STRICT)
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
        mask: of `mask`, and of `train` where updates are masked: the step of secure aggregation.
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
    mask: Annotated[MaskTask | None, Field(exclude_if=lambda step: step is None)] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SiteNumbers:
    """What a site says of its round in numbers: a part of its update, and of history.jsonl and the report.

    A new number is declared here, and nowhere else. What training knows is set in `fit` and `update_of`, what
    the site knows in `Site`; where each patient has an ε, only what that covers.

    Attributes:
        scalars: numbers: see the method; six digits.
        train_loss: mean loss of the local steps, at most 5, rounded to a grid; withheld if they used fewer
            samples than `min_loss`, and with `epsilon`.
    """

    scalars: Annotated[dict[Word, Number], Field(max_length=MOST_TENSORS), Trait.COUNTED] = dataclasses.field(
        default_factory=dict
    )
    train_loss: Annotated[Number | None, Trait.COUNTED, Trait.LOSS] = None


RECORDED = ("weight", *(field.name for field in dataclasses.fields(SiteNumbers)))
"""The numbers of an update that the server writes into the site's part of the round's record."""


@validated(frozen=True, config=STRICT)
class Update(SiteNumbers):
    """Everything that leaves a site after local training.

    Attributes:
        round: number of the round.
        labels: the class names of the rows, as the site received them.
        shared: tensors: see the method. With `secure_aggregation` in the job all are masked int64 numbers;
            with `transport = "float16"` or `"int8"`, float32 ones leave in that type, weights as their
            change of what the site received.
        head: rows of classes, ``[len(labels), ...]`` each: see the method; the same.
        class_weights: a number for each row, float64 ``[len(labels)]``: see the method.
        weight: a number: see the method.
        kind: `weights` or `gradient`.
        channels: further tensors: see the method; rows of classes are zeros for a class of fewer images than
            `min_count`; a site with `clip` refuses a method that has any.
        metrics: figures of the received model on the validation data: see below.
        spent: of its ledger: see below.
        state: number of the round from whose state the site continued; 0 without one.
        ledger: BLAKE3 of the site's ledger, including this answer. Each line of the ledger has a secret salt
            of 128 random bits, so the digest reveals nothing about the lines.
    """

    round: Count
    labels: Labels
    shared: Tensors
    head: Tensors
    class_weights: Annotated[Tensor, Trait.COUNTED]
    weight: Annotated[FiniteFloat, Trait.COUNTED] = 1.0
    kind: Literal["weights", "gradient"] = "weights"
    channels: Channels = Field(default_factory=dict)
    metrics: Metrics | None = None
    spent: Spent | None = None
    state: Count = 0
    ledger: Digest | None = None


@validated(frozen=True, config=STRICT)
class Masking:
    """A site's answer to `mask`, one step of secure aggregation: nothing that depends on data.

    Attributes:
        step: `keys`, `shares`, `survivors` or `reveal`.
        keys: public keys of the attempt: see below.
        sealed: of `shares`: for each other site a message that only it can open, with its shares of the
            site's mask key and seed.
        signature: of `survivors`: of the list of sites whose masked updates have arrived.
        unopened: of `survivors`: the sites whose sealed shares it could not open.
        seeds: of `reveal`: the site's share of the seed of each site on that list.
        secrets: of `reveal`: its share of the mask key of each site that dropped out; of no site both.
    """

    step: MaskStep
    keys: MaskKeys | None = None
    sealed: BySite = Field(default_factory=dict)
    signature: Bytes = ""
    unopened: Annotated[tuple[SiteName, ...], Field(max_length=MOST_SITES)] = ()
    seeds: BySite = Field(default_factory=dict)
    secrets: BySite = Field(default_factory=dict)


@validated(frozen=True, config=STRICT)
class Scores:
    """A site's answer to `calibrate`.

    Attributes:
        round: number of the round whose model it is.
        labels: the class names of the rows: classes of the site that are not withheld.
        class_tensors: `positives` and `negatives`, int32 ``[len(labels), 386]``: how many validation images
            with and without each class have a score in each of 386 cells of log-odds between -12 and 12;
            neighbouring cells are joined until each has images of `min_count` patients, and `round_counts`
            images; rounded to `round_counts`.
        spent: of its ledger: see above.
        ledger: the same as of an update.
    """

    round: Count
    labels: Labels
    class_tensors: Tensors
    spent: Spent | None = None
    ledger: Digest | None = None


@validated(frozen=True, config=STRICT)
class Evaluation:
    """A site's answer to `evaluate`.

    Attributes:
        metrics: figures of the received model: see below.
        local: where the method keeps local models, the same of the model that the site itself trained in the
            selected round, before aggregation.
        spent: of its ledger: see below.
        ledger: the same as of an update.
    """

    metrics: Metrics
    local: Metrics | None = None
    spent: Spent | None = None
    ledger: Digest | None = None


@validated(frozen=True, config=STRICT)
class Abstain:
    """A site could not perform a task. The answer names no path, no patient and no text of an error.

    Attributes:
        reason: one of `budget`, `code_mismatch`, `computation`, `configuration`, `data_fault`, `disk_full`,
            `gradient_overflow`, `label_view`, `labels`, `ledger`, `masking`, `missing_state`,
            `non_finite_loss`, `out_of_memory`, `read_only`, `rescue_factor`.
        error: class name of the exception, never its text.
        rows: number of faulty rows of data, if that is the reason.
    """

    reason: Reason
    error: Word
    rows: Count | None = None


Reply = SiteInfo | Masking | Update | Scores | Evaluation | Abstain
Message = TaskData | Reply

_HINTS: dict[type[Any], dict[str, Any]] = {
    kind: get_type_hints(kind, include_extras=True) for kind in get_args(Reply)
}


def fields_with(kind: type[Any], trait: Trait) -> tuple[str, ...]:
    """Return the fields of a kind of answer that have a trait; single values before those by name."""
    hints = _HINTS[kind]
    found = [name for name, hint in hints.items() if trait in getattr(hint, "__metadata__", ())]
    return tuple(sorted(found, key=lambda name: get_origin(hints[name].__origin__) is dict))


def ones(labels: Labels) -> Tensor:
    """Return class weights that count every class once, `[len(labels)]`, float64."""
    return torch.ones(len(labels), dtype=torch.float64)


def align_rows(tensor: Tensor, before: Labels, now: Labels, *, axis: int = 0) -> Tensor:
    """Return the tensor with its axis of the classes `before` as that of `now`; a new class gets zeros."""
    index = {name: i for i, name in enumerate(before)}
    known = [i for i, name in enumerate(now) if name in index]
    source = torch.tensor([index[now[i]] for i in known], dtype=torch.long)
    fresh = tensor.new_zeros((*tensor.shape[:axis], len(now), *tensor.shape[axis + 1 :]))
    return fresh.index_copy_(axis, torch.tensor(known, dtype=torch.long), tensor.index_select(axis, source))
