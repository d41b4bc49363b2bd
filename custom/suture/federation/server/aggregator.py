"""The aggregator: makes the next model of a round's updates, and finds the best of all rounds."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import starmap

from suture.core.errors import FederationError, as_word
from suture.core.validation import flat
from suture.federation.plan import Plan, Schedule, round_context
from suture.federation.server.checks import HeldOut
from suture.federation.server.collector import UpdateCollector
from suture.federation.server.global_model import pack_model, serve
from suture.federation.server.registry import SiteRegistry
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
from suture.learning.metrics import mean_defined
from suture.methods.base import GlobalModel, RoundContext, check_channels
from suture.protocol.check import all_finite
from suture.protocol.messages import Metrics, Update
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
