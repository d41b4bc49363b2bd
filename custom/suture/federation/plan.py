"""What a federation is about to do: the part that every site may know, and the part that is the server's."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass

from suture.core.errors import ConfigError
from suture.core.names import check_experiment
from suture.core.validation import STRICT, parse
from suture.data.augmentation import Augmentation
from suture.methods import METHODS, method_class
from suture.methods.base import Method, RoundContext
from suture.methods.source import code_hash as code_hash
from suture.models import MODELS, ModelSpec

Selection = Literal["site_loss", "server_metric", "server_balanced_accuracy", "last"]


def _whole_or_share(value: float) -> float:
    if (value >= 1 and isinstance(value, int)) or 0 < value < 1:
        return value
    raise ValueError("is a number of sites from 1, or a share of them between 0 and 1")


Quorum = Annotated[int | float, AfterValidator(_whole_or_share)]
"""How many sites are enough: so many, or a share of them below 1."""


def needed(quorum: Quorum | None, sites: int) -> int:
    """Of so many sites, how many are enough: all of them where nothing is said; a share is rounded up."""
    if quorum is None:
        return sites
    return quorum if isinstance(quorum, int) else max(1, math.ceil(round(quorum * sites, 9)))


@dataclasses.dataclass(frozen=True)
class Plan:
    """What every party needs to know, and nothing about who knows which label.

    Attributes:
        experiment: identifier under which server and sites keep their state; a new job with it continues.
        code: hash of the package that the job was made with.
    """

    method: Method
    model: ModelSpec
    augmentation: Augmentation
    seed: int
    experiment: str
    code: str

    def __post_init__(self) -> None:
        check_experiment(self.experiment)
        if self.method.batch_norm == "local" and self.method.personal == "nothing":
            raise ConfigError(
                "batch_norm='local' (FedBN) leaves no global model to evaluate, so "
                f"{self.method.title} cannot use it; choose 'average' (FedAvg) or 'frozen' (FedBN+)"
            )
        if self.method.local.warmup_init == "independent" and not self.method.local.warmup_epochs:
            raise ConfigError(
                "warmup_init='independent' is of the warm-up, and there is none; set warmup_epochs, "
                "or remove it"
            )
        if self.model.second_head and self.method.prior is None:
            raise ConfigError(
                f"{self.method.title} would never train a second head; set model.second_head=false"
            )
        if self.method.images_only and (reads := MODELS[self.model.name].reads) != "image":
            others = ", ".join(name for name, kind in METHODS.items() if not kind.images_only)
            raise ConfigError(
                f"{self.method.title} needs images, and the model {self.model.name!r} reads {reads}; "
                f"choose a model of images, or one of the methods that take both: {others}"
            )
        self.method.check_model(self.model)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as they stand in a job's configuration."""
        return {
            "method": self.method.name,
            "hyperparameters": dataclasses.asdict(self.method),  # type: ignore[call-overload]
            "model": dataclasses.asdict(self.model),
            "augmentation": dataclasses.asdict(self.augmentation),
            "seed": self.seed,
            "experiment": self.experiment,
            "code": self.code,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Plan:
        """The plan of a job's configuration.

        Raises:
            ConfigError: a key is unknown or missing, or a value does not fit.
        """
        if wrong := values.keys() ^ {
            "method",
            "hyperparameters",
            "model",
            "augmentation",
            "seed",
            "experiment",
            "code",
        }:
            raise ConfigError(
                f"the job's plan has a missing or unknown key {min(wrong)!r}; export the job anew"
            )
        method = parse(method_class(values["method"]), values["hyperparameters"], "hyperparameters")
        return cls(
            method,
            parse(ModelSpec, values["model"], "model"),
            parse(Augmentation, values["augmentation"], "augmentation"),
            int(values["seed"]),
            str(values["experiment"]),
            str(values["code"]),
        )


@dataclass(frozen=True, config=STRICT)
class Schedule:
    """What the server alone needs to know.

    Attributes:
        job, title: for people.
        rounds: communication rounds.
        min_sites: usable updates that a round needs, or a share (below 1) of the sites that were accepted at
            the start, rounded up; None means every one of them. A run needs as many sites, or that share of
            those asked, to start.
        round_timeout: seconds that a site has for a task.
        grace: seconds that a round waits for more updates once it has `min_sites`; None waits for all of
            them until the deadline. What comes later is dropped.
        selection: the round whose model is kept: lowest mean validation loss of the sites (`site_loss`),
            highest mean AUROC on the server's own validation data (`server_metric`), or where images have one
            label the balanced accuracy (`server_balanced_accuracy`), or the `last`.
        patience: rounds without a better one after which training stops; None trains all `rounds`. Where the
            `last` round is kept, each is the best so far, so that there is nothing to wait for.
        max_failed_rounds: rounds in a row that may leave the model as it was before the job stops.
        label_map: site spelling to federation name, for names that differ by more than spelling.
        accept_labels: look-alike names that are meant to be different classes; True accepts all.
    """

    rounds: Annotated[int, Field(ge=1)]
    job: str = "job"
    title: str = "federated training"
    min_sites: Quorum | None = None
    round_timeout: Annotated[int, Field(ge=1)] = 3600
    grace: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    selection: Selection = "site_loss"
    patience: Annotated[int, Field(ge=1)] | None = None
    max_failed_rounds: Annotated[int, Field(ge=1)] = 2
    label_map: dict[str, str] = Field(default_factory=dict)
    accept_labels: bool | tuple[str, ...] = False

    def __post_init__(self) -> None:
        if self.patience is not None and self.selection == "last":
            raise ConfigError(
                f"patience={self.patience} would never stop a run of selection='last', in which every round "
                "is the best so far; select by 'site_loss' or 'server_metric', or remove patience"
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as they stand in a job's configuration."""
        values = dataclasses.asdict(self)
        if isinstance(self.accept_labels, tuple):
            values["accept_labels"] = list(self.accept_labels)
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Schedule:
        """The schedule of a job's configuration."""
        return parse(cls, values, "schedule")


def round_context(plan: Plan, rounds: int, round_: int) -> RoundContext:
    """Where round `round_` (from 1) of `rounds` stands: its phase and the seed."""
    last = 0
    for phase in plan.method.phases(rounds):
        if round_ <= last + phase.rounds:
            return RoundContext(round_, phase, plan.seed, round_ - last)
        last += phase.rounds
    raise ConfigError(f"round {round_} lies beyond the {rounds} rounds of the plan")
