"""The selection of the round whose model is the result, and labelled data at the server."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, field
from itertools import chain
from typing import Any

import torch
from pydantic import FiniteFloat
from pydantic.dataclasses import dataclass
from torch import Tensor

from suture.core.devices import check_device
from suture.core.errors import ConfigError, FederationError, unknown
from suture.core.labels import LabelSet, canonical
from suture.core.validation import OPEN, parse
from suture.data.augmentation import Augmentation
from suture.data.batch import Samples, columns
from suture.data.config import SiteConfig
from suture.data.table import Split
from suture.federation.plan import Plan, Schedule, Selection
from suture.federation.server.classes import one_name, statements
from suture.federation.server.global_model import classifier
from suture.federation.server.registry import SiteRegistry
from suture.federation.store import Rounds
from suture.learning.evaluation import by_attribute, class_scores, entropy, mean_interval, overall
from suture.learning.metrics import mean_defined
from suture.learning.samples import load_samples
from suture.learning.training import SiteContext, predict
from suture.methods.base import GlobalModel, Method
from suture.protocol.messages import Count, Labels, Metrics, SiteInfo

log = logging.getLogger(__name__)

MEASURED_HERE: dict[Selection, str] = {
    "server_metric": "server_auroc",
    "server_balanced_accuracy": "server_balanced_accuracy",
}
"""The figure of `HeldOut.validate` that decides, for each selection that the server measures itself."""


@dataclass(frozen=True, config=OPEN)
class Best:
    """The best round so far.

    Attributes:
        value: more is better.
        auroc: of the sites' validation data, where rounds are compared by their losses; 0 if undefined.
    """

    round: Count
    value: FiniteFloat
    auroc: FiniteFloat = 0.0

    @property
    def unmeasured(self) -> bool:
        """Whether the round only stands in until another is measured."""
        return self.value == UNMEASURED


UNMEASURED = -sys.float_info.max
"""The value of a round that any other replaces."""

_SAME = 1e-9
"""Means of the same figures differ by less, depending on the order of the sum."""


def better(best: Best | None, candidate: Best) -> Best:
    """Return the better of two rounds, the earlier one where they are equal."""
    return candidate if best is None or candidate.value > best.value else best


def lower_loss(best: Best | None, candidate: Best) -> Best:
    """Return the round of the lower loss; where they are equal, of the higher AUROC, or else the later one.

    Sites round their losses to a grid (`suture.protocol.disclosure`), on which a model that still improves
    stands for several rounds: the first of these would be the worst. AUROC is a mean over classes, which
    falls between the steps of their grids.
    """
    if best is None or abs(candidate.value - best.value) > _SAME:
        return better(best, candidate)
    return candidate if candidate.auroc >= best.auroc - _SAME else best


@dataclass(config=OPEN)
class ModelSelection:
    """The best round so far, of the federation and of each site.

    Attributes:
        best: by the selection rule of the job.
        own: by the site's validation loss, where every site has a model of its own.
        improved: the round since which none was better; one that is as good may be the best and is no
            improvement.
        by: the selection rule that `best` was found by; None in states of earlier versions.
    """

    best: Best | None = None
    own: dict[str, Best] = field(default_factory=dict)
    improved: Count = 0
    by: Selection | None = None

    def continue_by(self, selection: Selection, restored: int) -> None:
        """Go on by a rule; the values of another one do not compare, so the restored round takes the place of
        its best until another is better.
        """
        if self.by not in (None, selection):
            self.best, self.improved = Best(restored, UNMEASURED), restored
        self.by = selection

    def note(self, candidate: Best) -> None:
        """Consider a round that may be the best."""
        self._note(better(self.best, candidate))

    def note_loss(self, candidate: Best, in_common: tuple[Best, Best] | None = None) -> None:
        """Consider a round that may be the best by the sites' mean validation loss.

        Args:
            in_common: the best round and the candidate as the sites that measured both see them, where others
                have measured one of them: a mean over other sites does not compare.
        """
        best, seen = in_common or (self.best, candidate)
        if lower_loss(best, seen) is seen:
            self._take(candidate, best, seen)

    def _note(self, found: Best) -> None:
        self._take(found, self.best, found)

    def _take(self, found: Best, best: Best | None, seen: Best) -> None:
        if best is None or seen.value > best.value + _SAME or seen.auroc > best.auroc + _SAME:
            self.improved = found.round
        self.best = found

    def note_own(self, candidates: Mapping[str, Best]) -> None:
        """Consider a round that may be the best of some sites, by their validation losses."""
        for site, candidate in candidates.items():
            self.own[site] = lower_loss(self.own.get(site), candidate)

    def over(self, measured: int, patience: int | None) -> bool:
        """Whether the last `patience` measured rounds were no better than the best."""
        if patience is None or self.best is None:
            return False
        return measured - (self.improved or self.best.round) >= patience

    def of(self, site: str) -> int:
        """Return the round whose state a site has to keep; 0 while there is none."""
        found = self.own.get(site, self.best)
        return found.round if found else 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for the state."""
        return asdict(self)

    def fall_back(self, states: Rounds, restored: int) -> None:
        """Replace a best round whose model is not on disk by the restored one, until another is better."""
        if self.best is None or states.holds(self.best.round):
            return
        log.warning(
            "%s has no model of round %d, the best so far; round %d is used until a better one",
            *(states.folder, self.best.round, restored),
        )
        self.best = Best(restored, UNMEASURED)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelSelection:
        """Read what `to_dict` has returned.

        Raises:
            ConfigError: it is something else.
        """
        return parse(cls, values, "the selection in the state")


def check_selection(schedule: Schedule, method: Method, held_out: HeldOut | None) -> None:
    """Check before any training that the rounds can be compared as the schedule requests.

    Raises:
        FederationError: the server is to measure models that it does not have, or has no data for it.
    """
    if schedule.selection not in MEASURED_HERE:
        return
    if method.exchange.personal != "nothing":
        raise FederationError(
            f"{method.about.title} keeps its models at the sites, so the server cannot measure them; "
            "select by 'site_loss'"
        )
    if not (held_out and held_out.has("validation")):
        raise FederationError(
            f"selection={schedule.selection!r} needs labelled validation data at the server; name it in the "
            "server's suture.toml, or select by 'site_loss'"
        )
    if schedule.selection == "server_balanced_accuracy" and held_out.labels.label_type != "multiclass":
        raise FederationError(
            "selection='server_balanced_accuracy' needs one label for each image, but the server's "
            "data have several; select by 'server_metric'"
        )


def check_measurable(schedule: Schedule, infos: Mapping[str, SiteInfo], best: Best | None) -> None:
    """Check before round 1 that a site can measure a loss, where rounds are selected by the sites' losses.

    Args:
        infos: of each site that takes part.
        best: the best round of an experiment that continues.

    Raises:
        FederationError: none can; says why, and what to set.
    """
    held = {site: info.n.get("validation", 0) for site, info in infos.items()}
    if schedule.selection != "site_loss" or best or any(held[s] and infos[s].measures for s in infos):
        return
    few = "{} validation images are too few for its min_loss and min_count"
    why = (f"{s}: {few.format(n) if n else 'no validation images'}" for s, n in sorted(held.items()))
    raise FederationError(
        f"no site has a validation loss that may leave it ({'; '.join(why)}), so no round could be selected "
        "by selection='site_loss'; give a site more validation images, or set selection='last', or "
        "'server_metric' with labelled validation data at the server"
    )


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
            if name not in labels:
                raise unknown("class under [data.groups] of the server's suture.toml", name, labels)
            if times > 1:
                raise ConfigError(
                    f"the server's suture.toml names {name!r} twice under [data.groups]; a class "
                    "belongs to one group"
                )

    def has(self, split: Split) -> bool:
        """Whether a split has any samples."""
        return split in self._samples and len(self._samples[split]) > 0

    def measured(self, split: Split) -> Labels:
        """The classes whose AUROC a split defines: they have a positive and a negative there."""
        if not self.has(split):
            return ()
        y = self._samples[split].y
        both = (y == 1).any(dim=0) & (y == 0).any(dim=0)
        return tuple(name for name, some in zip(self.labels, both.tolist(), strict=True) if some)

    def tested(
        self, model: GlobalModel, of_round: int, bootstrap: int
    ) -> tuple[Metrics, tuple[float, float] | None]:
        """Evaluate the model on the test split, on every class that both the model and the data have.

        Returns:
            the metrics, and the 95 % interval of the mean AUROC.
        """
        part, logits, labels, names = self._predicted(model, "test")
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
        return metrics, mean_interval(part, logits, labels, names, bootstrap, seed)

    def validate(self, model: GlobalModel) -> dict[str, float | None]:
        """Return the mean AUROC over the classes that define it and, for multiclass labels, the balanced
        accuracy.
        """
        part, logits, labels, names = self._predicted(model, "validation")
        areas = (score.auroc for score in class_scores(part, logits, labels, names).values())
        found = {"server_auroc": mean_defined(areas)}
        if labels.label_type == "multiclass":
            accuracy = overall(part, logits, labels.label_type).get("balanced_accuracy")
            found["server_balanced_accuracy"] = accuracy
        return found

    def _predicted(self, model: GlobalModel, split: Split) -> tuple[Samples, Tensor, LabelSet, Labels]:
        """Return the samples of a split under the model's classes, its logits, the model's classes, and those
        that the data have too.
        """
        labels = LabelSet(model.labels, model.label_type)
        part = columns(self._samples[split], self.labels, labels)
        network = classifier(model, self._plan).to(self._device)
        context = SiteContext(
            "server", network, {split: part}, self._plan.model.preprocessing, Augmentation(), self._device
        )
        return part, predict(context, part), labels, tuple(n for n in model.labels if n in self.labels)
