"""The selection of the round whose model is the result, by scores over sites, classes and images."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from statistics import fmean
from typing import Any

from pydantic import FiniteFloat
from pydantic.dataclasses import dataclass as validated

from suture.core.validation import OPEN
from suture.federation.plan import Selection
from suture.federation.server.registry import SiteRegistry
from suture.federation.state_files import Rounds
from suture.learning.evaluation import NOTHING
from suture.learning.metrics import mean_defined
from suture.protocol.messages import ClassScore, Count, Figures, Metrics, few
from suture.protocol.records import Round, informative_weights

log = logging.getLogger(__name__)

Plain = Mapping[str, float | None]
"""Figures as they stand in metrics.json: ``n`` images, mean ``auroc``, and for multiclass labels more."""


def mean_over_sites(registry: SiteRegistry, tested: Mapping[str, Metrics], of_round: int) -> Metrics:
    """Return the sites' metrics as one: each figure is the unweighted mean over the sites that define it."""
    values = dict.fromkeys(value for metrics in tested.values() for value in metrics.attributes)
    return Metrics(
        of_round,
        "test",
        sum(metrics.n for metrics in tested.values()),
        mean_defined(metrics.loss for metrics in tested.values()),
        across_sites({site: registry.rename_keys(site, m.classes) for site, m in sorted(tested.items())}),
        mean_of(metrics.overall for metrics in tested.values()),
        {
            value: _mean([m.attributes[value] for m in tested.values() if value in m.attributes])
            for value in sorted(values)
        },
        loss_step=coarsest(metrics.loss_step for metrics in tested.values()),
    )


def condense(metrics: Metrics) -> Figures:
    """Return metrics without those of single classes."""
    area = mean_defined(score.auroc for score in metrics.classes.values())
    return Figures(metrics.n, area, metrics.overall)


def plain(figures: Figures) -> Plain:
    """Return figures as they stand in metrics.json."""
    return {"n": figures.n, "auroc": figures.auroc, **figures.overall}


def _mean(parts: list[Figures]) -> Figures:
    overall = mean_of(part.overall for part in parts)
    return Figures(sum(part.n for part in parts), mean_defined(part.auroc for part in parts), overall)


def across_sites(sites: Mapping[str, Mapping[str, ClassScore]]) -> dict[str, ClassScore]:
    """Return for each class the unweighted mean of AUROC and recall over the sites that define them.

    Counts are sums over all sites that evaluated the class, None where one of them withholds its own. For
    the interval see `interval_over_sites`.
    """
    return {
        name: _across([at[name] for at in sites.values() if name in at])
        for name in dict.fromkeys(name for at in sites.values() for name in at)
    }


def _across(scores: Sequence[ClassScore]) -> ClassScore:
    defined = [s for s in scores if s.auroc is not None]
    low, high = interval_over_sites(defined) or (None, None)
    return ClassScore(
        mean_defined(s.auroc for s in defined),
        low,
        high,
        _total(s.positives for s in scores),
        _total(s.negatives for s in scores),
        mean_defined(s.recall for s in scores),
        coarsest(s.step for s in defined),
    )


def coarsest(steps: Iterable[float | None]) -> float | None:
    """Return the largest step to which any of some figures is rounded; None where all are exact."""
    return max((step for step in steps if step is not None), default=None)


def _total(counts: Iterable[int | None]) -> int | None:
    total = 0
    for count in counts:
        if count is None:
            return None
        total += count
    return total


_Interval = tuple[float, float]


def interval_over_sites(scores: Sequence[ClassScore]) -> _Interval | None:
    """Return the 95 % interval of the unweighted mean AUROC of one class over sites.

    A site's own interval is of a bootstrap over its test patients. Patients of different sites are different
    people, so the errors of the sites are independent and their variances add. The intervals are about other
    patients of the same sites; about other sites they say nothing.

    Half its width is the root of the sum of the sites' squared half-widths, over their number: the normal
    approximation. The interval of a single site stands as it is.

    Args:
        scores: of the sites that define the AUROC.

    Returns:
        None without a score, or where one has no interval.
    """
    if len(scores) == 1 and (only := scores[0]).low is not None and only.high is not None:
        return only.low, only.high
    share = 1 / max(1, len(scores))
    return _around([[(score, share)] for score in scores])


def interval_of_mean(sites: Mapping[str, Mapping[str, ClassScore]]) -> _Interval | None:
    """Return an interval, of at least 95 %, of the mean over classes of their mean AUROCs over sites.

    The classes of one site are measured on the same patients, and how much their errors go together is not
    sent. The standard deviation of a weighted sum is at most the weighted sum of the standard deviations
    (Cauchy-Schwarz), which is taken for each site; over sites the variances add. So the interval is too wide
    rather than too narrow.

    Args:
        sites: the scores of each site by class; those without an AUROC do not count.

    Returns:
        None where no class, or not every defined one, has an interval.
    """
    defined = {site: {n: s for n, s in at.items() if s.auroc is not None} for site, at in sites.items()}
    names = {name for at in defined.values() for name in at}
    owners = {name: sum(name in at for at in defined.values()) for name in names}
    parts = [
        [(score, 1 / (len(names) * owners[name])) for name, score in at.items()] for at in defined.values()
    ]
    return _around(parts)


def _around(parts: Sequence[Sequence[tuple[ClassScore, float]]]) -> _Interval | None:
    """Return the interval of a weighted sum of AUROCs; errors add within a part, variances over the parts.

    Args:
        parts: the scores of each part with their weights.
    """
    bounds = [(s.low, s.high, share) for part in parts for s, share in part]
    if not bounds or any(low is None or high is None for low, high, _ in bounds):
        return None
    middle = math.fsum((s.auroc or 0.0) * share for part in parts for s, share in part)
    width = math.hypot(*(math.fsum(_half(s) * share for s, share in part) for part in parts))
    return max(0.0, middle - width), min(1.0, middle + width)


def _half(score: ClassScore) -> float:
    """Return half the width of a score's interval, which it has."""
    return ((score.high or 0.0) - (score.low or 0.0)) / 2


def by_frequency(groups: Mapping[str, Sequence[str]], recall: Mapping[str, float | None]) -> dict[str, Any]:
    """Return the accuracy of the head, medium and tail classes (Fed-MAS, Elbatel et al. 2023, Table 1).

    Args:
        groups: the classes of each group, such as those of `suture.data.split.long_tail_groups`.
        recall: share of each class's images that are predicted as this class; undefined for a class without
            test images.

    Returns:
        ``classes`` of each group, and its ``accuracy``, the mean recall of its classes; ``all`` is the mean
        of the groups, which differs from the mean of the classes where groups differ in size. {} where no
        class has a recall.
    """
    if not groups or not any(value is not None for value in recall.values()):
        return {}
    accuracy = {group: mean_defined(recall.get(name) for name in names) for group, names in groups.items()}
    return {
        "classes": {group: list(names) for group, names in groups.items()},
        "accuracy": accuracy | {"all": mean_defined(accuracy.values())},
    }


def by_attribute(found: Mapping[str, Plain]) -> dict[str, Any]:
    """Return figures by attribute, and their unweighted mean (Fed-MAS, Table 3: Light, Dark, Avg).

    Returns:
        the ``values`` and their ``mean``; {} where there is no attribute.
    """
    values = {name: dict(figures) for name, figures in found.items()}
    return {"values": values, "mean": mean_of(found.values())} if found else {}


def local_and_global(sites: Mapping[str, tuple[Plain, Plain]]) -> dict[str, Any]:
    """Return figures of the global model (gFL) and of the sites' own (pFL) on their data (Fed-MAS, Table 8).

    Args:
        sites: for each site the figures of the global model, and of the model that the site had trained in
            the same round, before aggregation.

    Returns:
        both of the ``sites``, and their ``mean`` over the sites; {} where no site has a model of its own.
    """
    if not sites:
        return {}
    found = {site: {"global": dict(g), "local": dict(own)} for site, (g, own) in sites.items()}
    kinds = ("global", "local")
    return {"sites": found, "mean": {kind: mean_of(both[kind] for both in found.values()) for kind in kinds}}


def mean_of(parts: Iterable[Plain]) -> dict[str, float | None]:
    """Return for each figure the unweighted mean over the parts that define it, but for ``n``."""
    parts = list(parts)
    names = dict.fromkeys(name for part in parts for name in part if name != "n")
    return {name: mean_defined(part.get(name) for part in parts) for name in names}


def weighting(images: Mapping[str, int | None], history: Sequence[Round]) -> dict[str, Any]:
    """Return the sites' weights for metrics.json; empty where the weights are uninformative.

    Args:
        images: number of training images of each site, None where withheld.
        history: the rounds of the run.

    Returns:
        ``rounds``, the committed ones; ``weights`` and ``shares`` (0 to 1) of each site in them, None where
        its update was not merged; and its ``mean_share`` over the rounds in which it was merged.
    """
    merged = [r for r in history if r.status == "committed"]
    if not informative_weights(images, merged):
        return {}
    shares = [r.shares for r in merged]
    return {
        "rounds": [r.round for r in merged],
        "weights": {site: [r.weights.get(site) for r in merged] for site in images},
        "shares": {site: [given.get(site) for given in shares] for site in images},
        "mean_share": {site: mean_defined(given.get(site) for given in shares) for site in images},
    }


MEASURED_HERE: dict[Selection, str] = {
    "server_metric": "server_auroc",
    "server_balanced_accuracy": "server_balanced_accuracy",
}
"""The figure of `HeldOut.validate` that decides, for each selection that the server measures itself."""

MEASURED_AT_SITES: dict[Selection, str] = {"site_loss": "loss", "site_auroc": "selecting_auroc"}
"""The figure of a round's `Validation` that decides, for each selection by what the sites measure."""


@validated(frozen=True, config=OPEN)
class Best:
    """The best round so far.

    Attributes:
        value: more is better.
        tie: what decides between equal values of the sites, which round them; more is better.
        parts: what `value` is the mean of, by what was measured: a class at the server, or classes of a site
            (`classes_of`). A mean over other classes or sites does not compare.
    """

    round: Count
    value: FiniteFloat
    tie: FiniteFloat = 0.0
    parts: dict[str, FiniteFloat] = field(default_factory=dict)

    @property
    def unmeasured(self) -> bool:
        """Whether the round only stands in until another is measured."""
        return self.value == UNMEASURED


UNMEASURED = -sys.float_info.max
"""The value of a round that any other replaces."""

_SAME = 1e-9
"""Means of the same figures differ by less, depending on the order of the sum."""


def classes_of(site: str, names: Iterable[str]) -> str:
    """Return the key of what a site has measured; a figure over other classes is another one."""
    return f"{site}: {', '.join(sorted(names))}"


def by_losses(
    number: int, losses: Mapping[str, float], scores: Mapping[str, Mapping[str, ClassScore]]
) -> dict[str, Best]:
    """Return a round by the validation loss of each site that has sent one; ties by the site's AUROC.

    Args:
        scores: of each site, by the federation's names of its classes; a loss is over those that it shows.
    """
    found = {}
    for site, loss in sorted(losses.items()):
        shown = {name: score for name, score in scores[site].items() if score != NOTHING}
        auroc = mean_defined(score.auroc for score in shown.values())
        found[site] = Best(number, -loss, auroc or 0.0, {classes_of(site, shown): -loss})
    return found


def by_aurocs(
    number: int, losses: Mapping[str, float], scores: Mapping[str, Mapping[str, ClassScore]]
) -> dict[str, Best]:
    """Return a round by the mean validation AUROC of each site that has sent one of enough images.

    A class with fewer than `FEW` positives or negatives at a site says little there and is left out; so are
    classes that the site withholds.

    Args:
        losses, scores: see `by_losses`; ties by the site's loss.
    """
    found = {}
    for site, at in sorted(scores.items()):
        parts = {
            classes_of(site, [name]): score.auroc
            for name, score in at.items()
            if score.auroc is not None and not few(score.positives, score.negatives)
        }
        if parts:
            found[site] = Best(number, fmean(parts.values()), -losses.get(site, 0.0), parts)
    return found


def over_sites(candidates: Mapping[str, Best], tie: float) -> Best | None:
    """Return a round by what all sites have measured; None where none has."""
    parts = {key: value for one in candidates.values() for key, value in one.parts.items()}
    numbers = [one.round for one in candidates.values()]
    return Best(numbers[0], fmean(parts.values()), tie, parts) if parts else None


def in_common(best: Best | None, candidate: Best) -> tuple[Best | None, Best]:
    """Return two rounds by the figures that both have; as they are where they have the same.

    The AUROCs are over other classes or sites where they have not, and say nothing.
    """
    if best is None or not best.parts or best.parts.keys() == candidate.parts.keys():
        return best, candidate
    both = best.parts.keys() & candidate.parts.keys()
    if not both:  # nothing shows that the candidate is better
        return Best(best.round, 0.0), Best(candidate.round, -1.0)
    mean, new = (math.fsum(one.parts[key] for key in both) / len(both) for one in (best, candidate))
    return Best(best.round, mean), Best(candidate.round, new)


def better(best: Best | None, candidate: Best) -> Best:
    """Return the round of the larger value; where they are equal, of the larger `tie`, or else the later one.

    Sites round their figures to grids (`suture.protocol.egress`), on which a model that still improves stands
    for several rounds: the first of these would be the worst. Losses tie more often than AUROCs, whose mean
    over classes falls between the steps of their grids.
    """
    if best is None or abs(candidate.value - best.value) > _SAME:
        return candidate if best is None or candidate.value > best.value else best
    return candidate if candidate.tie >= best.tie - _SAME else best


@validated(frozen=True, config=OPEN)
class ModelSelection:
    """The best round so far, of the federation and of each site.

    Attributes:
        best: by the selection rule of the job.
        own: by the site's own figure, where every site has a model of its own.
        improved: the round since which none was better; one that is as good may be the best and is no
            improvement.
        by: the selection rule that `best` was found by.
    """

    best: Best | None = None
    own: dict[str, Best] = field(default_factory=dict)
    improved: Count = 0
    by: Selection | None = None

    def after(self, candidate: Best) -> ModelSelection:
        """Consider a round that may be the best; the earlier one stays where they are equal."""
        best, seen = in_common(self.best, candidate)
        better = best is None or seen.value > best.value
        return self._with(candidate, best, seen) if better else self

    def after_sites(self, candidate: Best, by: Selection) -> ModelSelection:
        """Consider a round that may be the best by the sites' validation figures.

        Args:
            by: which figures; losses stand in for AUROCs until there are some.
        """
        known = self.best if self.best and not self.best.unmeasured else None
        if known and self.by != by:
            if by == "site_loss":
                return self
            known = None
        best, seen = in_common(known, candidate)
        return replace(self, by=by)._with(candidate, best, seen) if better(best, seen) is seen else self

    def _with(self, found: Best, best: Best | None, seen: Best) -> ModelSelection:
        improves = best is None or seen.value > best.value + _SAME or seen.tie > best.tie + _SAME
        return replace(self, best=found, improved=found.round if improves else self.improved)

    def after_own(self, candidates: Mapping[str, Best]) -> ModelSelection:
        """Consider a round that may be the best of some sites, by their validation figures.

        A site that annotates other classes than before begins anew: its models before lack some of them.
        """
        before = {site: self.own[site] for site in candidates.keys() & self.own.keys()}
        kept = {s: one for s, one in before.items() if one.parts.keys() <= candidates[s].parts.keys()}
        own = {site: better(kept.get(site), one) for site, one in candidates.items()}
        return replace(self, own={**self.own, **own})

    def restore(
        self, states: Rounds, number: int, selection: Selection, *, comparable: bool = True
    ) -> ModelSelection:
        """Return it as of a restored round, from which a job goes on by a selection rule.

        The restored round takes the place of a best one whose model is not on disk, or whose value does not
        compare: it was found by another rule, or is not `comparable`. Any measured round is better then.
        """
        best, improved = self.best, self.improved
        if best and not states.holds(best.round):
            log.warning(
                "%s has no model of round %d, the best so far; round %d is used until a better one",
                *(states.folder, best.round, number),
            )
            best = Best(number, UNMEASURED)
        stands_in = selection == "site_auroc" and self.by == "site_loss"
        if (self.by != selection and not stands_in) or (best and not comparable):
            best, improved = Best(number, UNMEASURED), number
        return replace(self, best=best, improved=improved, by=self.by if stands_in else selection)

    def over(self, measured: int, patience: int | None) -> bool:
        """Whether the last `patience` measured rounds were no better than the best."""
        if patience is None or self.best is None:
            return False
        return measured - (self.improved or self.best.round) >= patience

    def of(self, site: str) -> int:
        """Return the round whose state a site has to keep; 0 while there is none."""
        found = self.own.get(site, self.best)
        return found.round if found else 0
