"""The selection of the round whose model is the result."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import field, replace

from pydantic import FiniteFloat
from pydantic.dataclasses import dataclass as validated

from suture.core.validation import OPEN
from suture.federation.plan import Selection
from suture.federation.store import Rounds
from suture.protocol.messages import Count

log = logging.getLogger(__name__)

MEASURED_HERE: dict[Selection, str] = {
    "server_metric": "server_auroc",
    "server_balanced_accuracy": "server_balanced_accuracy",
}
"""The figure of `HeldOut.validate` that decides, for each selection that the server measures itself."""


@validated(frozen=True, config=OPEN)
class Best:
    """The best round so far.

    Attributes:
        value: more is better.
        auroc: of the sites' validation data, where rounds are compared by their losses; 0 if undefined.
        parts: what `value` is the mean of, by what was measured: a class at the server, or the classes of a
            site (`classes_of`). A mean over other classes or sites does not compare.
    """

    round: Count
    value: FiniteFloat
    auroc: FiniteFloat = 0.0
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
    """Return the key of what a site has measured; its loss over other classes is another figure."""
    return f"{site}: {', '.join(sorted(names))}"


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


def lower_loss(best: Best | None, candidate: Best) -> Best:
    """Return the round of the lower loss; where they are equal, of the higher AUROC, or else the later one.

    Sites round their losses to a grid (`suture.protocol.disclosure`), on which a model that still improves
    stands for several rounds: the first of these would be the worst. AUROC is a mean over classes, which
    falls between the steps of their grids.
    """
    if best is None or abs(candidate.value - best.value) > _SAME:
        return candidate if best is None or candidate.value > best.value else best
    return candidate if candidate.auroc >= best.auroc - _SAME else best


@validated(frozen=True, config=OPEN)
class ModelSelection:
    """The best round so far, of the federation and of each site.

    Attributes:
        best: by the selection rule of the job.
        own: by the site's validation loss, where every site has a model of its own.
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

    def after_losses(self, candidate: Best) -> ModelSelection:
        """Consider a round that may be the best by the sites' mean validation loss."""
        best, seen = in_common(self.best, candidate)
        return self._with(candidate, best, seen) if lower_loss(best, seen) is seen else self

    def _with(self, found: Best, best: Best | None, seen: Best) -> ModelSelection:
        improves = best is None or seen.value > best.value + _SAME or seen.auroc > best.auroc + _SAME
        return replace(self, best=found, improved=found.round if improves else self.improved)

    def after_own(self, candidates: Mapping[str, Best]) -> ModelSelection:
        """Consider a round that may be the best of some sites, by their validation losses.

        A site that annotates other classes than before begins anew: its models before lack some of them.
        """
        before = {site: self.own[site] for site in candidates.keys() & self.own.keys()}
        kept = {s: one for s, one in before.items() if one.parts.keys() <= candidates[s].parts.keys()}
        own = {site: lower_loss(kept.get(site), one) for site, one in candidates.items()}
        return replace(self, own={**self.own, **own})

    def restored(
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
        if self.by != selection or (best and not comparable):
            best, improved = Best(number, UNMEASURED), number
        return replace(self, best=best, improved=improved, by=selection)

    def over(self, measured: int, patience: int | None) -> bool:
        """Whether the last `patience` measured rounds were no better than the best."""
        if patience is None or self.best is None:
            return False
        return measured - (self.improved or self.best.round) >= patience

    def of(self, site: str) -> int:
        """Return the round whose state a site has to keep; 0 while there is none."""
        found = self.own.get(site, self.best)
        return found.round if found else 0
