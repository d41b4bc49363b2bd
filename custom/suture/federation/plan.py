"""The plan, which every party of a federation knows, and the schedule, which only the server knows."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StrictBool
from pydantic.dataclasses import dataclass as validated

from suture.core.errors import CodeMismatch, ConfigError, LabelError, show_value
from suture.core.files import within_folder
from suture.core.labels import canonical, check_experiment
from suture.core.ontology import Relations
from suture.core.validation import LIMIT, STRICT, LabelName, changed, flat, parse, with_paths
from suture.data.batch import Augmentation
from suture.data.embedding import TFIDF
from suture.methods import METHODS, method_class
from suture.methods.base import Method, RoundContext
from suture.methods.source import code_hash as code_hash
from suture.models import RANDOM, ModelSpec, check_portable, encoder_of
from suture.models.classifier import Coherence
from suture.privacy.robust import RobustMerge, unmergeable
from suture.privacy.secure_aggregation import SecureAggregation, unmaskable
from suture.protocol.decisions import DecisionSettings
from suture.protocol.egress import Egress, Layout, Transport, check_declared
from suture.protocol.messages import Word

Selection = Literal["site_loss", "site_auroc", "server_metric", "server_balanced_accuracy", "last"]


def _whole_or_share(value: float) -> float:
    if (isinstance(value, int) and 1 <= value <= LIMIT) or 0 < value < 1:
        return value
    raise ValueError(
        f"must be a number of sites from 1 (at most {LIMIT}), or a share of them between 0 and 1"
    )


Quorum = Annotated[int | float, AfterValidator(_whole_or_share)]
"""How many sites are enough: a number of sites, or a share below 1."""


def needed_sites(quorum: Quorum | None, sites: int) -> int:
    """Return how many of `sites` sites are enough: all of them without a quorum; a share is rounded up."""
    if quorum is None:
        return sites
    return quorum if isinstance(quorum, int) else max(1, math.ceil(round(quorum * sites, 9)))


@dataclasses.dataclass(frozen=True)
class Plan:
    """What every party needs to know. It says nothing of which site annotates which label.

    Attributes:
        method: the method, by its name, and its hyperparameters.
        model: the network and its input.
        augmentation: random changes of training images.
        seed: of initialisation, of the order of the images and of their augmentation.
        experiment: identifier under which server and sites store their states; a new job of the same
            experiment continues it.
        code: hash of the package that created the job, or of its server's.
        transport: the type in which float32 weights and gradients travel in the rounds: ``float16`` halves
            the bytes, ``int8`` takes about 0.26 of them. See `suture.protocol.packing`.
        secure_aggregation: the server learns sums of the sites' updates only; None lets it see each.

    Raises:
        ConfigError: the experiment's name cannot be used, the settings contradict one another, or the model
            names a file of words rather than the words.
    """

    method: Method
    model: ModelSpec
    augmentation: Augmentation
    seed: int
    experiment: str
    code: str
    transport: Transport = "float32"
    secure_aggregation: SecureAggregation | None = None

    def __post_init__(self) -> None:
        check_experiment(self.experiment)
        check_portable(self.model, "a job")
        sharing = self.method.sharing
        if sharing.batch_norm == "local" and sharing.personal == "nothing":
            raise ConfigError(
                "batch_norm='local', FedBN, leaves no global model to evaluate, so "
                f"{self.method.about.title} cannot use it; choose 'average' or 'frozen'"
            )
        if self.method.local.warmup_init == "independent" and not self.method.local.warmup_epochs:
            raise ConfigError(
                "warmup_init='independent' needs a warm-up; set warmup_epochs, or remove warmup_init"
            )
        if self.model.second_head and sharing.prior is None:
            raise ConfigError(
                f"{self.method.about.title} does not train a second head; set model.second_head=false"
            )
        if self.method.about.images_only and (reads := encoder_of(self.model).reads) != "image":
            others = ", ".join(name for name, kind in METHODS.items() if not kind.about.images_only)
            raise ConfigError(
                f"{self.method.about.title} needs images, and the model {self.model.name!r} reads {reads}; "
                f"choose a model of images, or one of the methods that take both: {others}"
            )
        if self.model.name_vectors and sharing.part_at_site:
            raise ConfigError(
                f"model.name_vectors: only the server reads the file, and {self.method.about.title} "
                "begins rows at the sites; remove it: named rows need no file"
            )
        check_secure(self.secure_aggregation, self.method, transport=self.transport)
        check_declared(self.method.egress(Layout({}, {})), self.method.about.title)
        # Here, so that every party settles it alike, whoever made the plan.
        object.__setattr__(self, "model", self.method.adapted(self.model))
        if self.model.train != "all":
            self._check_frozen_encoder()

    def egress(self, layout: Layout) -> Egress:
        """Return everything that may leave a site: what the method declares, and how its tensors travel."""
        sharing, egress = self.method.sharing, self.method.egress(layout)
        prior = sharing.prior is not None
        return dataclasses.replace(egress, local=sharing.keep_local, prior=prior, transport=self.transport)

    def _check_frozen_encoder(self) -> None:
        """Refuse a method whose exchange is about the backbone, where that is a frozen encoder."""
        sharing, model, title = self.method.sharing, self.model, self.method.about.title
        if model.weights is None:
            raise ConfigError(
                f"model.train={model.train!r} freezes the encoder, and {model.name} has no pretrained "
                "weights. Set model.weights to a file, or to 'random' for features of random weights. Or "
                "choose a model that has some (suture list models)"
            )
        if model.reads_features and self.method.about.pixels:
            raise ConfigError(
                f"{title} {self.method.about.pixels}, and with model.train='head' sites train on stored "
                "features. Set model.views=0, with which the encoder reads every image in each step"
            )
        if sharing.batch_norm == "local":
            raise ConfigError(
                "batch_norm='local' (FedBN) keeps each site's batch norm, but "
                f"model.train={model.train!r} freezes its statistics at every site. Set "
                "method.batch_norm='average', or model.train='all'"
            )
        if model.adapters and model.adapters.kind == "bias" and sharing.batch_norm == "frozen":
            raise ConfigError(
                "batch_norm='frozen' (FedBN+) keeps batch norm as it was, but model.adapters.kind='bias' "
                "trains it; set method.batch_norm='average', or model.adapters.kind='lora'"
            )
        if (
            model.train == "head"
            and sharing.head_at_site
            and not (model.hidden or model.neck or model.projection)
        ):
            raise ConfigError(
                f"{title} keeps the head at each site and shares what is before it, which model.train='head' "
                "freezes: sites would exchange nothing. Set model.hidden, a block that they share, or "
                "model.train='all'"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values for the configuration of a job."""
        values = dataclasses.asdict(self)
        return {"method": self.method.about.name, "hyperparameters": values.pop("method"), **values}

    def to_job(self) -> dict[str, Any]:
        """Return the plan as a job's file has it: without the values that are defaults."""
        parts = {"hyperparameters": self.method, "model": self.model, "augmentation": self.augmentation}
        short = {key: changed(part) for key, part in parts.items()}
        values = {**self.to_dict(), **short, "model": {"name": self.model.name, **short["model"]}}
        usual = {field.name: field.default for field in dataclasses.fields(_Values)}
        return {key: value for key, value in values.items() if value not in (usual[key], {})}

    def digest(self, rounds: int) -> str:
        """Return the digest of how a job has its sites train, but for files, which are each party's."""
        files = list[str]()

        def note(key: str, name: str, _mark: str) -> str:
            files.append(key)
            return name

        with_paths(self, note)
        settings = flat("", dataclasses.asdict(self))
        settings |= dict.fromkeys((f".{key}" for key in files), None)
        return sha256(json.dumps([self.method.about.name, rounds, settings]).encode()).hexdigest()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Plan:
        """Read the plan from the configuration of a job.

        Raises:
            ConfigError: a key is unknown or missing, or a value does not fit; where another version of the
                package created the job, the error says so.
        """
        if isinstance(values, Mapping) and (
            wrong := (values.keys() - _PLAN_KEYS) | (_NEEDED - values.keys())
        ):
            raise ConfigError(
                f"the job's plan has a missing or unknown key {show_value(min(map(str, wrong)))}; export the "
                "job again with the version of suture that runs it"
            )
        parsed = parse(_Values, values, "the job's plan")
        kind: type[Method] | None = None
        try:
            kind = method_class(parsed.method)
            method = parse(kind, parsed.hyperparameters, "hyperparameters")
            model = parse(ModelSpec, parsed.model, "model")
            augmentation = parse(Augmentation, parsed.augmentation, "augmentation")
            secure = parsed.secure_aggregation
            rest = parsed.seed, parsed.experiment, parsed.code, parsed.transport
            return cls(method, model, augmentation, *rest, secure)
        except ConfigError as error:
            if parsed.code == (own := code_hash(kind)):
                raise
            raise CodeMismatch(f"{_other_code('this party', own, parsed.code)} ({error})") from error

    def with_paths(self, folder: Path, keys: Collection[str]) -> Plan:
        """Return the plan with what it names by `keys` as files of a party's own folder.

        Args:
            keys: dotted settings, such as ``model.weights``; their words, such as ``download``, stay.

        Raises:
            ConfigError: see `named_file`.
        """
        own_words = (*(encoder_of(self.model).weights or ()), RANDOM)
        words = {"model.weights": own_words, "model.embedding": (TFIDF,)}

        def own(key: str, name: str, _mark: str) -> str:
            stays = key not in keys or name in words.get(key, ())
            return name if stays else str(named_file(name, folder, key))

        return with_paths(self, own)

    def check_code(self, party: str) -> None:
        """Refuse a job that another version of the package created.

        Args:
            party: who runs the job, for the message.

        Raises:
            CodeMismatch: the hashes of the code differ.
        """
        if self.code != (own := code_hash(type(self.method))):
            raise CodeMismatch(_other_code(party, own, self.code))


@validated(frozen=True, config=STRICT)
class _Values:
    """`Plan.to_dict`, before the method is known whose hyperparameters it has."""

    method: str
    experiment: str
    code: Word
    model: dict[str, Any]
    hyperparameters: dict[str, Any] = dataclasses.field(default_factory=dict)
    augmentation: dict[str, Any] = dataclasses.field(default_factory=dict)
    seed: int = 1
    transport: Transport = "float32"
    secure_aggregation: SecureAggregation | None = None


_PLAN_KEYS = {field.name for field in dataclasses.fields(_Values)}
_NEEDED = {"method", "experiment", "code", "model"}


def _other_code(party: str, own: str, code: str) -> str:
    return (
        f"{party} runs another version of suture, or of the method's package, than the job or its "
        f"server states: {own}, not {code}. Install the same version at every party, or export the job again"
    )


@validated(frozen=True, kw_only=True, config=STRICT)
class Schedule:
    """What only the server needs to know.

    Attributes:
        name: name of the job on the command line, and in the names of its runs.
        title: title in reports.
        rounds: number of communication rounds.
        min_sites: number of usable updates that a round needs, or (below 1) their share of the participating
            sites, rounded up; None needs all. At the start, the run needs this number or share of the
            requested sites.
        round_timeout: seconds in which a site must answer a task.
        grace: seconds for which a round waits for further updates after `min_sites` have arrived; None waits
            until the timeout, but not for a site that is lost or gone. Later updates are ignored.
        selection: which round's model is the result: the one with the highest mean of the sites' validation
            AUROCs of classes with at least ten positives and ten negatives at the site (`site_auroc`;
            `site_loss` where no site sends one, and `last` where none sends a loss either), the lowest mean
            of their validation losses (`site_loss`; ties by the highest AUROC), the highest mean AUROC on
            the server's validation data (`server_metric`), the highest balanced accuracy there
            (`server_balanced_accuracy`, multiclass only), or the `last`. If the head is re-trained, one of
            those rounds.
        patience: training stops after this number of rounds without improvement; None trains all `rounds`.
        max_failed_rounds: the job stops after this number of consecutive rounds without enough updates.
        max_update: an update is rejected if its norm is more than this many times that of the model, or of
            the site's largest earlier update in this phase of training (or of the median over sites of their
            largest ones, if that is larger); None accepts any.
        robust: what takes the place of the mean of the updates, so that a few lying sites cannot move it far;
            None takes the method's own.
        label_map: maps a site's spelling of a class to the federation's name, for spellings that Suture does
            not recognise.
        accept_labels: similar names that are different classes, and general names such as "label" that are
            the same class at several sites; True accepts all.
        decision: how scores become decisions; None fits no thresholds.
        coherent: makes the saved model's predictions coherent, in `predict`, `evaluate` and exports: a class
            gets the largest probability of itself and the classes below it (`max`), or is present unless all
            of these are absent, independently (`noisy-or`). Sites see their own rows only, so the run's own
            figures stay without it, and `decision` is refused.
        parents: the direct parents of a class; by default those of the labels.toml beside the job.

    Raises:
        ConfigError: patience cannot work with the selection, or coherent with decision or without parents.
    """

    name: str
    title: str
    rounds: Annotated[int, Field(ge=1, le=LIMIT)]
    min_sites: Quorum | None = None
    round_timeout: Annotated[int, Field(ge=1, le=LIMIT)] = 3600
    grace: Annotated[float, Field(ge=0, le=LIMIT)] | None = None
    selection: Selection = "site_auroc"
    patience: Annotated[int, Field(ge=1, le=LIMIT)] | None = None
    max_failed_rounds: Annotated[int, Field(ge=1, le=LIMIT)] = 2
    max_update: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = 100.0
    robust: RobustMerge | None = None
    label_map: dict[LabelName, LabelName] = dataclasses.field(default_factory=dict)
    accept_labels: StrictBool | tuple[str, ...] = False
    decision: DecisionSettings | None = None
    coherent: Coherence = "none"
    parents: dict[LabelName, tuple[LabelName, ...]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.patience is not None and self.selection == "last":
            raise ConfigError(
                f"patience={self.patience} has no effect with selection='last', because there every "
                "round counts as the best; select by 'site_loss' or 'server_metric', or remove patience"
            )
        if self.coherent != "none" and self.decision:
            raise ConfigError(
                f"coherent={self.coherent!r}: sites see their own rows alone, so that the thresholds of "
                "[decision] would be those of other probabilities; remove one of them"
            )
        if self.coherent != "none" and not self.parents:
            raise ConfigError(
                f"coherent={self.coherent!r} needs parents: write them under [parents] in the labels.toml "
                "beside the job, or set areas there"
            )
        try:
            _ = self.relations
        except LabelError as error:
            raise ConfigError(f"parents: {error}") from error

    @property
    def relations(self) -> Relations:
        """The `parents` by canonical names."""
        return Relations({canonical(name): tuple(map(canonical, up)) for name, up in self.parents.items()})

    def to_dict(self) -> dict[str, Any]:
        """Return the schedule as plain values for the configuration of a job."""
        values = dataclasses.asdict(self)
        if isinstance(self.accept_labels, tuple):
            values["accept_labels"] = list(self.accept_labels)
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Schedule:
        """Read the schedule from the configuration of a job.

        Raises:
            ConfigError: a key is unknown, or a value does not fit.
        """
        return parse(cls, values, "schedule")


def round_context(method: Method, seed: int, rounds: int, round_: int) -> RoundContext:
    """Return phase and seed of round `round_` (from 1) of `rounds`.

    Raises:
        ConfigError: there is no such round.
    """
    last = 0
    for phase in method.phases(rounds):
        if round_ <= last + phase.rounds:
            return RoundContext(round_, phase, seed, round_ - last)
        last += phase.rounds
    raise ConfigError(f"round {round_} is beyond the {rounds} rounds of the plan")


def named_file(name: str, folder: Path, key: str) -> Path:
    """Return the file or folder that another party names, which lies directly in a folder of one's own.

    Args:
        name: a bare name, never a path.
        key: what gives the name, for the message.

    Raises:
        ConfigError: it is no bare name, is not in the folder, or is a link out of it.
    """
    rule = f"{key}={name[:80]!r}: a job must name a file of {folder} ([storage] files) by its bare name"
    if name in ("", ".", "..") or not name.isprintable() or "/" in name or "\\" in name:
        raise ConfigError(rule)
    path = folder / name
    if not path.exists() or not within_folder(folder)(path):
        raise ConfigError(
            f"{rule}; copy it there: the folder has no such file, or a link that leads out of it"
        )
    return path


def check_fits(robust: RobustMerge | None, method: Method) -> None:
    """Check that a robust merge can take the place of the method's mean.

    Raises:
        ConfigError: it cannot; says why, and names the methods that fit.
    """
    if robust and (why := unmergeable(method)):
        others = ", ".join(name for name, kind in METHODS.items() if not unmergeable(kind()))
        raise ConfigError(
            f"robust.kind={robust.kind!r}: {method.about.title} {why}; remove [robust], or choose one of the "
            f"methods that fit: {others}"
        )


def check_secure(
    secure: SecureAggregation | None,
    method: Method,
    robust: RobustMerge | None = None,
    transport: Transport = "float32",
) -> None:
    """Check that a method's updates can be added up without the server seeing them.

    Raises:
        ConfigError: they cannot; says why, and the remedy.
    """
    if secure is None:
        return
    if robust:
        raise ConfigError(
            f"secure_aggregation and robust.kind={robust.kind!r} exclude each other. Robust aggregation "
            "compares the sites' updates, which the server does not see; remove one of the two sections"
        )
    if transport != "float32":
        raise ConfigError(
            f"secure_aggregation and transport={transport!r} exclude each other: masked numbers "
            "have 64 bits; set transport='float32'"
        )
    if why := unmaskable(method):
        others = ", ".join(name for name, kind in METHODS.items() if not unmaskable(kind()))
        raise ConfigError(
            f"secure_aggregation: {method.about.title} {why}; remove [secure_aggregation], or choose one of "
            f"the methods that fit: {others}"
        )
