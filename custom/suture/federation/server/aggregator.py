"""The aggregator: makes the next model of a round's updates, and finds the best of all rounds.

It measures models on the server's own labelled data, where there are some (`HeldOut`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import chain, starmap

import torch
from torch import Tensor

from suture.core.errors import ConfigError, FederationError, as_word, check_known
from suture.core.labels import LabelSet, canonical
from suture.core.runtime import check_device
from suture.core.validation import flat
from suture.data.batch import Augmentation, Samples, columns
from suture.data.config import SiteConfig
from suture.data.table import Split
from suture.federation.plan import Plan, Schedule, round_context
from suture.federation.server.collector import UpdateCollector
from suture.federation.server.global_model import classifier, pack_model, serve
from suture.federation.server.registry import SiteRegistry, one_name, statements
from suture.federation.server.selection import (
    MEASURED_AT_SITES,
    MEASURED_HERE,
    Best,
    across_sites,
    by_aurocs,
    by_losses,
    coarsest,
    condense,
    over_sites,
)
from suture.federation.server.state import RunState
from suture.learning.evaluation import (
    among_annotated,
    by_attribute,
    class_scores,
    entropy,
    mean_interval,
    overall,
)
from suture.learning.features import FeatureStore
from suture.learning.metrics import mean_defined
from suture.learning.samples import load_samples
from suture.learning.training import SiteContext, predict
from suture.methods.base import GlobalModel, RoundContext, check_channels
from suture.protocol.check import all_finite
from suture.protocol.messages import Labels, Metrics, Update, few
from suture.protocol.records import Round, SiteRound

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Updates:
    """The accepted updates under the federation's class names; see `UpdateCollector.updates`."""

    collector: UpdateCollector
    registry: SiteRegistry

    def __iter__(self) -> Iterator[Update]:
        # It holds no update while the next one is read, as a generator would.
        return starmap(self.registry.from_site, self.collector.updates())


class HeldOut:
    """Labelled data at the server, evaluated there.

    Args:
        config: the server's own suture.toml.
        plan: its model determines how samples are read.

    Attributes:
        labels: the classes of the data.
        groups: the classes of each group, under canonical names.
    """

    def __init__(self, config: SiteConfig, plan: Plan) -> None:
        check_device(config.training.device, "server")
        self._device = torch.device(config.training.device)
        self._plan = plan
        self._codes = config.data.stated_codes()
        self.labels, self._samples = load_samples(config, plan.model, "server")
        self._folder = config.storage.feature_folder
        self._read = not plan.model.reads_features  # whether the samples are as the model reads them
        self.groups: dict[str, tuple[str, ...]] = {
            group: tuple(canonical(name, config.data.synonyms) for name in names)
            for group, names in config.data.groups.items()
        }

    def take_names(self, registry: SiteRegistry) -> None:
        """Give the federation's names to the classes, by the names that sites have for them and by codes.

        Raises:
            ClassConflict: their codes contradict those of the federation.
            LabelError: two of them become one.
        """
        called, every = registry.names, (*self.labels, *chain(*self.groups.values()))
        own = {name: called.get(name, name) for name in every}
        codes = {own[name]: codes for name, codes in self._codes.items()}
        said = [*statements(codes, "the server's data"), *statements(registry.codes, "the sites")]
        classes = one_name(said, registry.labels)
        names = {name: classes.get(one, one) for name, one in own.items()}
        self.labels = LabelSet.of([names[name] for name in self.labels], label_type=self.labels.label_type)
        self.groups = {group: tuple(names[name] for name in of) for group, of in self.groups.items()}

    def check_groups(self, labels: Labels) -> None:
        """Check before any training that the groups consist of the federation's classes.

        Raises:
            ConfigError: a group names another class, or two groups name the same.
        """
        named = Counter(chain.from_iterable(self.groups.values()))
        for name, times in named.items():
            check_known("class under [data.groups] of the server's suture.toml", name, labels)
            if times > 1:
                raise ConfigError(
                    f"the server's suture.toml names {name!r} twice under [data.groups]; a class "
                    "belongs to one group"
                )

    def has(self, split: Split) -> bool:
        """Whether a split has any samples."""
        return split in self._samples and len(self._samples[split]) > 0

    def measurable_labels(self, split: Split) -> Labels:
        """The classes whose AUROC a split defines: they have a positive and a negative there."""
        if not self.has(split):
            return ()
        y = self._samples[split].y
        both = (y == 1).any(dim=0) & (y == 0).any(dim=0)
        return tuple(name for name, some in zip(self.labels, both.tolist(), strict=True) if some)

    def test(
        self, model: GlobalModel, of_round: int, bootstrap: int
    ) -> tuple[Metrics, tuple[float, float] | None]:
        """Evaluate the model on the test split, on every class that both the model and the data have.

        Returns:
            the metrics, and the 95 % interval of the mean AUROC.
        """
        part, logits, labels, names = self._predict(model, "test")
        seed = self._plan.seed
        metrics = Metrics(
            of_round,
            "test",
            len(part),
            entropy(part, logits, labels.label_type),
            class_scores(part, logits, labels, names, bootstrap=bootstrap, seed=seed),
            overall(part, logits, labels.label_type),
            by_attribute(part, logits, labels, names),
        )
        return metrics, mean_interval(part, logits, labels, metrics.classes, bootstrap, seed)

    def validate(self, model: GlobalModel) -> dict[str, dict[str, float]]:
        """Return the AUROC of each class that defines it and, for multiclass labels, the recall, by the name
        of their mean.

        The AUROC of a class with fewer than ten positives or negatives moves the mean by chance, so that it
        is left out where another class has enough.
        """
        part, logits, labels, names = self._predict(model, "validation")
        every = class_scores(part, logits, labels, names)
        scores = {name: s for name, s in every.items() if not few(s.positives, s.negatives)} or every
        found = {"server_auroc": {n: s.auroc for n, s in scores.items() if s.auroc is not None}}
        if labels.label_type == "multiclass":
            recalls = {name: s.recall for name, s in every.items() if s.recall is not None}
            found["server_balanced_accuracy"] = recalls
        return found

    def _predict(self, model: GlobalModel, split: Split) -> tuple[Samples, Tensor, LabelSet, Labels]:
        """Return the samples of a split under the model's classes, its logits, the model's classes, and those
        that the data have too.
        """
        labels = LabelSet(model.labels, model.label_type)
        network = classifier(model, self._plan).to(self._device)
        if not self._read:
            store = FeatureStore(network, self._plan.model, self._samples, self._folder, "server")
            self._samples, self._read = dict(store.samples), True
        part = columns(self._samples[split], self.labels, labels)
        context = SiteContext(
            "server", network, {split: part}, self._plan.model.preprocessing, Augmentation(), self._device
        )
        logits = among_annotated(predict(context, part), part.y, labels.label_type)
        return part, logits, labels, tuple(n for n in model.labels if n in self.labels)


@dataclass(frozen=True)
class Aggregator:
    """Aggregates the updates of a round, and considers each round as the one whose model is the result.

    Attributes:
        held_out: labelled data at the server, if there are any.
    """

    plan: Plan
    schedule: Schedule
    held_out: HeldOut | None

    def context(self, number: int) -> RoundContext:
        """Return phase and seed of a round; of one that is beyond the last, those of the last."""
        plan, rounds = self.plan, self.schedule.rounds
        return round_context(plan.method, plan.seed, rounds, min(number, rounds))

    def aggregate(self, model: GlobalModel, updates: Iterable[Update], ctx: RoundContext) -> GlobalModel:
        """Return the next model.

        Raises:
            FederationError: it cannot be computed, or a number of it is not finite.
        """
        try:
            following = self.plan.method.aggregate(model, updates, ctx)
        except (ArithmeticError, RuntimeError) as error:
            if not isinstance(error, ArithmeticError) and "overflow" not in str(error):
                raise  # a bug of the method; torch tells an overflow by its text alone
            log.exception("round %d", ctx.round)
            raise self.divergence_error(f"round {ctx.round}: {as_word(error)}", ctx.round - 1) from error
        check_channels(following, self.plan.method)
        for name, tensor in pack_model(following, {}).tensors.items():
            if tensor.is_floating_point() and not all_finite(tensor):
                what = f"{name} of the model of round {ctx.round} is not finite"
                raise self.divergence_error(what, ctx.round - 1)
        return following

    def divergence_error(self, what: str, kept: int) -> FederationError:
        """Return the error of a step of the server after which the model is of no use.

        Args:
            kept: the round whose model stays.
        """
        method = self.plan.method
        settings = flat("method", asdict(method))  # type: ignore[call-overload]
        of_sites = ("method.local.", "method.retrain.")
        rates = [
            f"{key} (now {value:g})"
            for key, value in settings.items()
            if key.endswith((".lr", "_lr")) and not key.startswith(of_sites)
        ]
        lower = " or ".join(rates or [f"method.local.lr (now {method.local.lr:g})"])
        return FederationError(
            f"{what} after the server's step of {method.about.title}; no update was unusually large. No "
            f"site is excluded, and the model of round {kept} is kept; begin a new experiment "
            f"with a lower {lower}"
        )

    def measured_here(self, number: int, model: GlobalModel, state: RunState) -> RunState:
        """Consider a new round without the sites: by data at the server, or because it is the last."""
        if self.schedule.selection == "last":
            return replace(state, standings=replace(state.standings, best=Best(number, 0.0)))
        by = MEASURED_HERE.get(self.schedule.selection)
        if by is None or self.held_out is None or state.pending is None:
            return state
        standings, measured = state.standings, self.held_out.validate(serve(model, self.plan))
        found = {key: mean_defined(parts.values()) for key, parts in measured.items()}
        if (value := found[by]) is not None and self.context(number).phase.selectable:
            standings = standings.after(Best(number, value, parts=measured[by]))
        validation = replace(state.pending.validation, **found)  # type: ignore[arg-type]
        return replace(state, pending=replace(state.pending, validation=validation), standings=standings)

    def measured_at_sites(
        self, line: Round, metrics: Mapping[str, Metrics], registry: SiteRegistry, state: RunState
    ) -> RunState:
        """Consider the newest committed round by the sites' figures, and add these to its pending line."""
        number, standings = line.round, state.standings
        losses = {s: m.loss for s, m in metrics.items() if m.loss is not None}
        aurocs = {site: condense(metrics[site]).auroc for site in losses}
        joined = SiteRound("missing", "joined after this round")
        sites = {
            site: replace(line.sites.get(site, joined), validation_loss=value, validation_auroc=aurocs[site])
            for site, value in losses.items()
        }
        scores = {s: registry.rename_keys(s, m.classes) for s, m in metrics.items()}
        areas = {name: score.auroc for name, score in across_sites(scores).items()}
        loss, auroc = mean_defined(losses.values()), mean_defined(areas.values())
        telling = by_aurocs(number, losses, scores)
        by_auroc = over_sites(telling, -(loss or 0.0))
        validation = replace(
            line.validation,
            loss=loss,
            auroc=auroc,
            selecting_auroc=by_auroc.value if by_auroc else None,
            unmeasured=[name for name in registry.labels if areas.get(name) is None],
            loss_step=coarsest(m.loss_step for m in metrics.values()),
            auroc_step=coarsest(score.step for at in scores.values() for score in at.values()),
        )
        line = replace(line, sites=line.sites | sites, validation=validation)
        if self.schedule.selection in MEASURED_AT_SITES and self.context(number).phase.selectable:
            own = by_losses(number, losses, scores)
            by_loss = over_sites(own, auroc or 0.0)
            if self.schedule.selection == "site_auroc" and by_auroc:
                own, standings = own | telling, standings.after_sites(by_auroc, "site_auroc")
            elif by_loss:
                standings = standings.after_sites(by_loss, "site_loss")
            if self.plan.method.sharing.personal == "model":
                standings = standings.after_own(own)
        return replace(state, pending=line, standings=standings)
