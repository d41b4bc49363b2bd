"""The files of a run folder, validated as they are read.

They are run.json, history.jsonl, metrics.json and diagnostics.jsonl.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import FiniteFloat, NonNegativeInt, ValidationError

from suture.core.errors import DataError
from suture.core.files import check_count, read_bounded, read_lines
from suture.core.validation import adapter_of, in_words
from suture.protocol.decisions import DecidedClass, DecisionSettings, Diagrams, Operating
from suture.protocol.messages import SiteNumbers, Spent

log = logging.getLogger(__name__)

Number = FiniteFloat | None


Counted = tuple[int | None, int | None]
"""Numbers of images with and without a class, None where withheld."""


@dataclass(frozen=True)
class Note:
    """Something that a person should know: what, as a code, and its values; readers make the sentence."""

    code: str
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class MethodRecord:
    """The method, its paper, its hyperparameters, and which part of the model stays at a site.

    Attributes:
        pooled: whether one party holds the images of all sites.
        pseudo: whether sites without a class may label its images.
    """

    name: str
    title: str
    paper: str
    hyperparameters: dict[str, Any]
    personal: Literal["nothing", "head", "model"] = "nothing"
    pooled: bool = False
    pseudo: bool = False


@dataclass(frozen=True)
class Member:
    """A site: the classes that it annotates, and its number of images per split (None where withheld)."""

    labels: list[str]
    n: dict[str, int | None]


@dataclass(frozen=True)
class Egress:
    """A field that may leave a site, and its purpose."""

    field: str
    shape: str
    why: str


@dataclass(frozen=True)
class Run:
    """run.json: what was run, by which sites, and how it ended.

    Attributes:
        notes: what happened, for the reader of the report.
        left_out: sentences of sites on this machine, on what they left out of their data.
        spent: the newest statement of each site on what it has released.
        unmeasured: of each class without a validation AUROC, what each site has counted of it.
        measured_here: the classes whose AUROC the server's validation data define.
        tested: the sites that have measured the selected model on test data.
        prior: name and digest of the frozen network that all sites held; empty where there was none.
        pretrained: name and SHA-256 of the file of weights that the model began with; empty without one.
        command: the command line that runs the same job again; None where none does.
        without_limits: what the sites' limits of disclosure would do with the figures of a run on one
            machine; empty where they were applied.
        synthetic: whether the images are drawn and show no patients, as those of the demo.
        parents: the direct parents of classes, by the job's atlas; empty where it had none.
        robust: kind and number of liars of the job's robust merge; empty without one.
        secure_aggregation: its settings; empty without it.
        unprotected: the classes whose rows too few sites send for it.
        computed_on: of each site, CPU or model of the GPU, and precision.
        protection: clip, noise or epsilon, and delta of each protected site.
    """

    job: str
    title: str
    method: MethodRecord
    model: dict[str, Any]
    rounds: int
    seed: int
    experiment: str
    env: str
    status: Literal["finished", "failed", "running", "interrupted"]
    started: datetime
    versions: dict[str, str]
    threads: dict[str, int]
    labels: list[str]
    sites: dict[str, Member]
    selection: str
    error: str | None = None
    finished: datetime | None = None
    selected_round: int | None = None
    egress: list[Egress] = field(default_factory=list)
    augmentation: dict[str, Any] = field(default_factory=dict)
    label_type: str = "multilabel"
    notes: list[Note] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    spent: dict[str, Spent] = field(default_factory=dict)
    unmeasured: dict[str, dict[str, Counted]] = field(default_factory=dict)
    measured_here: list[str] = field(default_factory=list)
    tested: list[str] = field(default_factory=list)
    prior: dict[str, str] = field(default_factory=dict)
    pretrained: dict[str, str] = field(default_factory=dict)
    command: str | None = None
    without_limits: str = ""
    synthetic: bool = False
    computed_on: dict[str, str] = field(default_factory=dict)
    parents: dict[str, tuple[str, ...]] = field(default_factory=dict)
    robust: dict[str, Any] = field(default_factory=dict)
    unprotected: list[str] = field(default_factory=list)
    secure_aggregation: dict[str, Any] = field(default_factory=dict)
    protection: dict[str, dict[str, float]] = field(default_factory=dict)

    def unit(self, site: str, split: str) -> str:
        """Return what the site's number of a split is of, where it is not the exact number of its images."""
        noisy = split == "train" and "epsilon" in self.protection.get(site, {})
        return " patients, with noise" if noisy else ""

    @property
    def parties(self) -> dict[str, dict[str, int | None]]:
        """Numbers of images of who took part: of each site, or of the one party with the data of all."""
        if not self.method.pooled:
            return {name: site.n for name, site in self.sites.items()}
        splits = dict.fromkeys(split for site in self.sites.values() for split in site.n)
        pooled: dict[str, int | None] = {}
        pooled |= {split: sum(site.n.get(split) or 0 for site in self.sites.values()) for split in splits}
        return dict.fromkeys(self.threads.keys() - {"server"}, pooled)

    def owners(self, label: str) -> tuple[str, ...]:
        """Return the sites that annotate a class."""
        return self._owners.get(label, ())

    @cached_property
    def _owners(self) -> dict[str, tuple[str, ...]]:
        owners: dict[str, tuple[str, ...]] = {}
        for name, site in self.sites.items():
            owners |= {label: (*owners.get(label, ()), name) for label in dict.fromkeys(site.labels)}
        return owners


@dataclass(frozen=True)
class SiteRound(SiteNumbers):
    """The part of one site in one round, from the answer's arrival on; with the numbers that it has sent.

    Attributes:
        rows: the site's weight in the row of each class; None where each of its rows has weight 1.
        norm: of the update's change, or of its gradient.
        cosine: of the update to the mean of the others' directions.
        spent: what the site said of its releases with this answer, if it clips its updates.
        kept: share of its change of the shared parameters that a robust merge has kept, where the kind has
            one; 0 for a site that it left out.
    """

    status: Literal["accepted", "rejected", "abstained", "missing"]
    reason: str | None = None
    weight: Number = None
    bytes_down: int = 0
    bytes_up: int = 0
    validation_loss: Number = None
    validation_auroc: Number = None
    seconds: Number = None
    rows: dict[str, Number] | None = None
    spent: Spent | None = None
    norm: Number = None
    cosine: Number = None
    kept: Number = None

    @property
    def numbers(self) -> dict[str, float]:
        """What the site has said of its round, by name: its `SiteNumbers`, and each of the scalars."""
        own = {one.name: getattr(self, one.name) for one in fields(SiteNumbers) if one.name != "scalars"}
        return {name: value for name, value in {**own, **self.scalars}.items() if value is not None}


@dataclass(frozen=True)
class Validation:
    """The evaluation of a round's model after aggregation: means over the sites, and at the server.

    Attributes:
        selecting_auroc: mean over the AUROCs of at least ten positives and ten negatives at a site, by which
            `selection = "site_auroc"` compares rounds.
        unmeasured: classes whose AUROC no site could measure.
        loss_step, auroc_step: the largest step to which a site has rounded its part; None if all are exact.
    """

    loss: Number = None
    auroc: Number = None
    selecting_auroc: Number = None
    server_auroc: Number = None
    server_balanced_accuracy: Number = None
    unmeasured: list[str] = field(default_factory=list)
    loss_step: Number = None
    auroc_step: Number = None


@dataclass(frozen=True)
class Round:
    """One line of history.jsonl."""

    round: int
    phase: str
    status: Literal["committed", "unchanged"]
    seconds: FiniteFloat
    bytes_down: int
    bytes_up: int
    sites: dict[str, SiteRound]
    validation: Validation

    @cached_property
    def weights(self) -> dict[str, float]:
        """The weights of the merged updates; none of an unchanged round."""
        if self.status != "committed":
            return {}
        accepted = {name: site.weight for name, site in self.sites.items() if site.status == "accepted"}
        return {name: weight for name, weight in accepted.items() if weight is not None}

    @cached_property
    def shares(self) -> dict[str, float]:
        """Each site's share of the sum of all weights; none where the sum is 0."""
        total = math.fsum(self.weights.values())
        return {site: weight / total for site, weight in self.weights.items()} if total > 0 else {}

    @property
    def has_row_weights(self) -> bool:
        """Whether it is committed, and records the weight of any site in the rows of its classes."""
        return self.status == "committed" and any(site.rows for site in self.sites.values())


def informative_weights(images: Mapping[str, int | None], history: Sequence[Round]) -> bool:
    """Whether any weight is neither 1 nor the number of the site's training images."""
    return any(w not in (1, images.get(site)) for line in history for site, w in line.weights.items())


@dataclass(frozen=True)
class LongTail:
    """Groups of common and rare classes: their names, their mean recall, and ``all``, the mean of these."""

    classes: dict[str, list[str]] = field(default_factory=dict)
    accuracy: dict[str, Number] = field(default_factory=dict)


@dataclass(frozen=True)
class Attributes:
    """Figures of the test images of each attribute, and their mean."""

    values: dict[str, dict[str, Number]] = field(default_factory=dict)
    mean: dict[str, Number] = field(default_factory=dict)


Models = Literal["global", "local"]


@dataclass(frozen=True)
class LocalModels:
    """Figures of the global model and of each site's own, at the sites, and their mean."""

    sites: dict[str, dict[Models, dict[str, Number]]] = field(default_factory=dict)
    mean: dict[Models, dict[str, Number]] = field(default_factory=dict)


@dataclass(frozen=True)
class Weighting:
    """How much each site counted in the mean; see `suture.federation.server.selection.weighting`."""

    rounds: list[int] = field(default_factory=list)
    weights: dict[str, list[Number]] = field(default_factory=dict)
    shares: dict[str, list[Number]] = field(default_factory=dict)
    mean_share: dict[str, Number] = field(default_factory=dict)


@dataclass(frozen=True)
class DecisionRecord:
    """By what the selected model decides, and how well it does at each site; see `suture.protocol.decisions`.

    Attributes:
        settings: of the job; None where it decides nothing.
        measured: of each site and class.
        counts: test images of a site with and without a class, where they have left it.
        diagrams: of each class that is decided, over all sites.
        site_diagrams: of each site and class whose counts show a curve.
    """

    settings: DecisionSettings | None = None
    pooled: dict[str, Operating] = field(default_factory=dict)
    sites: dict[str, dict[str, Operating]] = field(default_factory=dict)
    measured: dict[str, dict[str, DecidedClass]] = field(default_factory=dict)
    counts: dict[str, dict[str, tuple[NonNegativeInt, NonNegativeInt]]] = field(default_factory=dict)
    diagrams: dict[str, Diagrams] = field(default_factory=dict)
    site_diagrams: dict[str, dict[str, Diagrams]] = field(default_factory=dict)


@dataclass(frozen=True)
class Metrics:
    """metrics.json, as `suture.federation.server.results.Results` writes it.

    Attributes:
        steps: of each class whose AUROC sites have rounded, the largest step to whose multiples one has.
        site_steps: the same of each site.
        site_counts: test images with and without each class at each site, where it sends them.
        loss_step: the same of `loss`; None where it is exact.
    """

    mean_auroc: Number
    auroc: dict[str, Number]
    intervals: dict[str, tuple[FiniteFloat, FiniteFloat] | None]
    counts: dict[str, tuple[int | None, int | None]]
    groups: dict[str, Number]
    sites: dict[str, dict[str, Number]]
    n: int | None
    source: str
    selected_round: int | None
    undefined: dict[str, Note]
    overall: dict[str, Number] = field(default_factory=dict)
    recall: dict[str, Number] = field(default_factory=dict)
    long_tail: LongTail = field(default_factory=LongTail)
    attributes: Attributes = field(default_factory=Attributes)
    local_models: LocalModels = field(default_factory=LocalModels)
    loss: Number = None
    mean_interval: tuple[FiniteFloat, FiniteFloat] | None = None
    weighting: Weighting = field(default_factory=Weighting)
    decisions: DecisionRecord = field(default_factory=DecisionRecord)
    steps: dict[str, FiniteFloat] = field(default_factory=dict)
    site_steps: dict[str, dict[str, FiniteFloat]] = field(default_factory=dict)
    site_counts: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)
    loss_step: Number = None

    @property
    def coarsest(self) -> float | None:
        """The largest step of an AUROC; None where all are exact."""
        return max(self.steps.values(), default=None)


@dataclass(frozen=True)
class PseudoLabels:
    """Number of positive pseudo-labels of a site in one class, and of the correct ones among them."""

    made: NonNegativeInt
    right: NonNegativeInt

    def __post_init__(self) -> None:
        if self.right > self.made:
            raise ValueError(f"{self.right} of {self.made} pseudo-labels cannot be correct")


@dataclass(frozen=True)
class Diagnostic:
    """One line of diagnostics.jsonl: one round of one site.

    Attributes:
        classes: pseudo-labels of each class, made and correct.
        figures: the method's own figures of each class, by name.
    """

    site: str
    round: int
    classes: dict[str, PseudoLabels]
    figures: dict[str, dict[str, FiniteFloat]] = field(default_factory=dict)


T = TypeVar("T")


def parse(kind: type[T], value: object, where: str) -> T:
    """Convert parsed JSON into a record.

    Raises:
        DataError: naming `where` and the field that is missing or of another type.
    """
    try:
        return adapter_of(kind).validate_python(value)
    except ValidationError as error:
        raise _unreadable(where, error) from error


def read_run(folder: Path) -> Run:
    """Read run.json of a run folder.

    Raises:
        DataError: there is none, or it cannot be read.
    """
    path = folder / "run.json"
    if not path.is_file():
        raise DataError(f"{folder} is not a run folder: run.json is missing; give the folder of a run")
    return _read(Run, path)


def read_history(folder: Path) -> list[Round]:
    """Read the rounds of history.jsonl in their order; none if the run ended before the first one.

    Raises:
        DataError: naming the line that cannot be read; a last line that was never ended is left out.
    """
    return _read_lines(Round, folder / "history.jsonl")


def read_diagnostics(folder: Path) -> list[Diagnostic]:
    """Read the lines of diagnostics.jsonl; none without the file, which only a simulation can write.

    Raises:
        DataError: naming the line that cannot be read.
    """
    return _read_lines(Diagnostic, folder / "diagnostics.jsonl")


def read_metrics(folder: Path) -> Metrics | None:
    """Read metrics.json; None if the run ended before it was written.

    Raises:
        DataError: it cannot be read.
    """
    path = folder / "metrics.json"
    return _read(Metrics, path) if path.is_file() else None


def _read_lines(kind: type[T], path: Path) -> list[T]:
    """Read a record from each line; a last line that was never ended is left out, with a warning."""
    records: list[T] = []
    lines = enumerate(read_lines(path) if path.is_file() else (), 1)
    while numbered := _next(lines, path):
        number, line = numbered
        if not line.strip():
            continue
        try:
            records.append(_parse_text(kind, line, f"{path}, line {number}"))
        except DataError:
            if line.endswith(b"\n"):
                raise
            log.warning("%s: line %d is incomplete and is skipped", path, number)
    return records


def _next(lines: Iterator[tuple[int, bytes]], path: Path) -> tuple[int, bytes] | None:
    try:
        return next(lines, None)
    except ValueError as error:
        raise _unreadable(str(path), error) from error


def _read(kind: type[T], path: Path) -> T:
    try:
        return _parse_text(kind, read_bounded(path), str(path))
    except ValueError as error:
        raise _unreadable(str(path), error) from error


def _parse_text(kind: type[T], text: bytes, where: str) -> T:
    try:
        check_count(text)
        return adapter_of(kind).validate_json(text)
    except ValueError as error:
        raise _unreadable(where, error) from error


def _unreadable(where: str, error: ValueError) -> DataError:
    why = str(error)
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        at = ".".join(map(str, first["loc"]))
        why = f"{f'{at}: ' if at else ''}{in_words(first)}"
    return DataError(
        f"{where}: {why}; the file is damaged or from another version of suture: restore it or run the "
        "job again"
    )
