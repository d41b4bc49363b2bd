"""The server: the order of a run, from the handshake to the test of the selected model.

`Exchanges` assigns tasks and collects answers, `Aggregator` makes the next model and finds the best of all,
`RunState` is committed with each round, and `Record` says what happened. The server knows no transport:
`suture.federation.loop.federate` drives it, with sites in this process or over NVIDIA FLARE.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from suture.core.errors import FederationError
from suture.core.labels import check_sites
from suture.data.config import SiteConfig
from suture.federation.plan import Plan, Schedule, check_fits, check_secure, needed_sites
from suture.federation.server.aggregator import Aggregator, HeldOut, Updates
from suture.federation.server.checks import (
    check_decision,
    check_label_type,
    check_liars,
    check_measurable,
    check_owners,
    check_phase,
    check_same_classes,
    check_selection,
)
from suture.federation.server.collector import Receiver, UpdateCollector, list_reasons
from suture.federation.server.decisions import FittedDecisions, fit_decisions
from suture.federation.server.exchanges import Exchanges, Task, Undo
from suture.federation.server.global_model import initial, read_model, serve, unpack_model, with_labels
from suture.federation.server.masks import Masks
from suture.federation.server.norms import NormBound, norm_of
from suture.federation.server.notes import (
    exclusion_notes,
    ledger_notes,
    method_notes,
    notes_at_start,
    older_state_notes,
    secure_notes,
    unprotected_note,
)
from suture.federation.server.record import LEDGERS, Record, SiteLedgers, describe, what_leaves
from suture.federation.server.registry import Agreement, Member, SiteRegistry, admit
from suture.federation.server.selection import MEASURED_AT_SITES, UNMEASURED, Best, ModelSelection
from suture.federation.server.state import Restored, RunState, pack_state, read_newest
from suture.federation.state_files import Rounds, drop_updates, keep_updates
from suture.methods.base import ClassFacts, GlobalModel, RoundContext, check_facts, layout_of
from suture.models import WEIGHTS
from suture.models.classifier import ENCODER
from suture.models.weights import file_digest
from suture.privacy.masking import Identity
from suture.privacy.robust import Merged, outlying, robustly_merged
from suture.protocol.messages import FEW, MaskTask, Metrics, Scores, SiteInfo, TaskName, Update
from suture.protocol.packing import Packed
from suture.protocol.records import Counted, Note, Round, SiteRound

log = logging.getLogger(__name__)


class Stage(Enum):
    """What the server does; the words of its events. docs/architecture.md has the table."""

    IDLE = "idle"
    OPEN = "open"
    COMMITTED = "committed"
    UNCHANGED = "unchanged"
    ROLLED_BACK = "rolled_back"
    FINISHED = "finished"


_NEXT = {
    Stage.IDLE: {Stage.OPEN, Stage.FINISHED},
    Stage.OPEN: {Stage.OPEN, Stage.IDLE, Stage.COMMITTED, Stage.UNCHANGED, Stage.FINISHED},
    Stage.COMMITTED: {Stage.OPEN, Stage.FINISHED},
    Stage.UNCHANGED: {Stage.OPEN, Stage.ROLLED_BACK},
    Stage.ROLLED_BACK: {Stage.OPEN},
    Stage.FINISHED: set[Stage](),
}


class Server:
    """The server of a federation.

    Args:
        plan, schedule: of the job.
        folder: of the experiment; holds the committed rounds and the results of the run.
        held_out: labelled data at the server, if there are any.
        pooled: the sites whose data one party holds in place of them; the report is about these sites.
        ledgers: see `SiteLedgers`; by default those of this experiment alone.
        identity: checks the sites' signatures of secure aggregation; by default those of `Identity`.

    Attributes:
        masks: the server's part in secure aggregation; None without it.
        stage: see `Stage`.
        round: the newest committed round.
        model, state: of that round.
        unmeasured: of each class without a validation AUROC, what the sites have counted of it.
        fitted: decisions by the selected model's scores, once these are counted.

    Raises:
        FederationError: the server cannot select rounds as the schedule requests.
        ConfigError: the method needs more rounds, or no robust merge can take the place of its mean.
    """

    def __init__(
        self,
        plan: Plan,
        schedule: Schedule,
        folder: Path,
        held_out: HeldOut | None,
        pooled: Mapping[str, Member] | None = None,
        ledgers: Path | None = None,
        identity: Identity | None = None,
    ) -> None:
        check_selection(schedule, plan.method, held_out)
        check_fits(schedule.robust, plan.method)
        check_secure(plan.secure_aggregation, plan.method, schedule.robust)
        plan.method.phases(schedule.rounds)  # raises where there are too few
        self.plan, self.schedule = plan, schedule
        constant = f"fixed/{ENCODER}" if plan.model.train != "all" else ""
        self.record, self.states = Record(folder), Rounds(folder / "state", constant)
        self.collector = UpdateCollector(self.states.folder / "spool", self.record.event)
        held = SiteLedgers(ledgers or self.states.folder / LEDGERS)
        self.exchanges = Exchanges(plan, schedule, self.collector, held)
        self.masks: Masks | None = None
        if plan.secure_aggregation:
            told, judge = (self.record.event, self.record.note), identity or Identity()
            self.masks = Masks(plan, schedule.rounds, self.states.folder, self.collector, *told, judge)
        self.aggregator = Aggregator(plan, schedule, held_out)
        self.registry = SiteRegistry({}, ())
        self.stage, self.round = Stage.IDLE, 0
        self.model: GlobalModel
        self.state = RunState(ModelSelection(by=schedule.selection), None, frozenset(), ((0, plan.code),))
        self.fitted: FittedDecisions | None = None
        self.unmeasured: dict[str, dict[str, Counted]] = {}
        self._pooled, self._facts, self._failures = pooled, ClassFacts(), 0

    # The start

    def handshake(self, sites: list[str]) -> dict[str, Packed]:
        """Return the handshake task of every site, which requests its site info.

        Raises:
            ConfigError: a site has a name that cannot be used.
        """
        check_sites(sites)
        self.enter(Stage.OPEN)
        return self.exchanges.handshake(sites)

    def begin(self, missing: Mapping[str, str]) -> None:
        """Agree on the labels with the sites that answered the handshake, and start or continue.

        Raises:
            FederationError: too few sites answered, the labels are not settled, a site holds another prior
                than the others, or than the experiment began with; or no site can measure any round.
            ConfigError: the experiment began with other settings, or with another version of Suture.
        """
        lines, method, schedule = self._close(missing), self.plan.method, self.schedule
        answered, newest = self.collector.replies(SiteInfo), read_newest(self.states, self.plan)
        one_row = method.labels.view == "target"  # it means another class at each site
        agreed = Agreement((), schedule.label_map, one_row or schedule.accept_labels)
        if newest:
            model, began = newest.model, newest.began
            of_experiment = (model.label_type, began.prior, began.codes, began.owners())
            agreed = Agreement(model.labels, agreed.label_map, agreed.accept, *of_experiment)
        self.registry = admit(answered, agreed, lines, schedule.min_sites)
        check_liars(schedule, len(self.registry.members))
        owners, sent = self.registry.owners(), self.registry.senders(self.plan.method)
        check_owners(self.plan.secure_aggregation, sent, owners, len(self.registry.members))
        infos = {site: answered[site] for site in self.registry.members}
        check_label_type(method, self.registry.label_type)
        alike = method, self.registry.label_type, owners, len(self.registry.members)
        check_same_classes(self.plan.secure_aggregation, *alike)
        check_decision(schedule.decision, *alike)
        check_measurable(schedule, infos, newest.state.standings.best if newest else None)
        if newest:
            check_phase(self.plan, schedule.rounds, newest.round, newest.state.pending)
            self._restore(newest)
        else:
            self.record.check_unbegun()
            model = initial(self.plan, self.registry.labels, self.registry.label_type)
            weights = self.plan.model.weights
            if weights and weights not in WEIGHTS:
                self.record.update(pretrained={"file": Path(weights).name, "sha256": file_digest(weights)})
            frozen = {n: t for n, t in model.fixed.items() if n.startswith(ENCODER) and "running_" not in n}
            initial_norm = norm_of(*method.sharing.parts(model.shared, model.head))
            bound = NormBound(initial=initial_norm, encoder=norm_of(frozen))
            self._commit(0, model, replace(self.state, bound=bound))
        if self.held_out:
            self.held_out.take_names(self.registry)
            self.held_out.check_groups(self.registry.labels)
        self._facts = method.class_facts(self.registry.statistics(infos))
        check_facts(self._facts, self.model, method)
        # The pending round is in the state; whatever the record has of it or of later ones is written anew.
        self.record.rewind(self.round)
        self._record_start(newest, {s: str(x.reason) for s, x in lines.items() if s not in infos})
        self.enter(Stage.IDLE)

    def _restore(self, found: Restored) -> None:
        codes = found.state.codes
        if codes[-1][1] != self.plan.code:
            codes = (*codes, (found.round, self.plan.code))
        standings, absent = found.state.standings, self.plan.method.labels.unknown == "negative"
        # Where unknown labels are taught as absent, every site's loss is over all classes.
        same = not (standings.by == "site_loss" and absent) or found.model.labels == self.registry.labels
        by = self.schedule.selection
        standings = standings.restore(self.states, found.round, by, comparable=same)
        self.round, self.state = found.round, replace(found.state, codes=codes, standings=standings)
        self.model = with_labels(found.model, self.registry.labels, self.plan)
        self._keep_best()
        log.info("continuing after round %d", found.round)

    def _record_start(self, found: Restored | None, refused: Mapping[str, str]) -> None:
        """Record who takes part and, when an experiment continues, what is new.

        Args:
            refused: why other sites do not take part.
        """
        plan, registry, record = self.plan, self.registry, self.record
        labels, members, rounds = list(registry.labels), registry.members, self.schedule.rounds
        added = [name for name in labels if found and name not in found.model.labels]
        prior = plan.method.sharing.prior
        held = {"name": prior.name, "digest": registry.prior} if prior and registry.prior else {}
        record.update(label_type=registry.label_type, prior=held)
        notes = [*notes_at_start(self.state, refused, registry, self.schedule.label_map)]
        notes += method_notes(self.model, plan, self._facts)
        if robust := self.schedule.robust:
            few = [name for name, sites in registry.senders(plan.method).items() if sites < robust.fewest]
            record.update(unprotected=few)
            notes += unprotected_note(robust, few)
        notes += secure_notes(plan, registry.owners())
        relations = self.schedule.relations
        related = [name for name in relations.with_ancestors(labels) if name in relations.parents]
        above = {name: list(relations.parents[name]) for name in related}
        record.update(
            status="running",
            rounds=rounds,
            egress=what_leaves(plan, layout_of(self.model, plan.method), registry.label_type),
            labels=labels,
            **({"parents": above} if above else {}),
            sites={s: {"labels": list(m.annotated), "n": dict(m.n)} for s, m in self.reported_sites.items()},
            threads={"server": 1, **{s: m.threads for s, m in members.items()}},
            computed_on={s: m.computed_on for s, m in members.items()},
            protection={s: dict(m.protection) for s, m in members.items() if m.protection},
            **({"new_labels": added} if added else {}),
        )
        start = {"round": self.round, "rounds": rounds, "sites": sorted(members), "labels": labels}
        record.event("begin", **start, refused=dict(refused), new_labels=added)
        record.update(notes=[])
        record.note(notes)

    @property
    def held_out(self) -> HeldOut | None:
        """Labelled data at the server, if there are any."""
        return self.aggregator.held_out

    @property
    def reported_sites(self) -> Mapping[str, Member]:
        """The sites that the report is about: the pooled ones, or those that take part."""
        return self._pooled or self.registry.members

    # Rounds

    @property
    def done(self) -> bool:
        """Whether every round has been committed, or patience has run out."""
        late = self.schedule.selection in MEASURED_AT_SITES  # when they train the next round
        over = self.state.standings.over(self.round - late, self.schedule.patience)
        return over or self.round >= self.schedule.rounds

    def assign(self, masks: Mapping[str, MaskTask] | None = None) -> dict[str, Packed]:
        """Return the training task of the next round for each site.

        Args:
            masks: of each site that takes part, where updates are masked; see `Masks.updates`.
        """
        ctx = self.aggregator.context(self.round + 1)
        self.record.event("round", round=ctx.round, phase=ctx.phase.name)
        return self._send(Task("train", ctx.round, ctx.phase.name), self.model, masks)

    def close_updates(self, missing: Mapping[str, str]) -> list[str]:
        """End the exchange of masked updates; return the sites whose update has arrived."""
        self._close(missing)
        return self.collector.accepted()

    @property
    def quorum(self) -> int:
        """Number of usable updates that a round needs, for a robust merge or a sum too."""
        needs = self.schedule.robust or self.plan.secure_aggregation
        return max(
            needed_sites(self.schedule.min_sites, len(self.registry.members)), needs.fewest if needs else 0
        )

    def receiver(self, task: TaskName = "train") -> Receiver:
        """Return where the transport delivers the answers of the open exchange."""
        collector = self.masks.collector if self.masks and task == "mask" else self.collector
        return collector.receiver(self.quorum, self.schedule.grace)

    def close_round(self, missing: Mapping[str, str]) -> None:
        """Aggregate the accepted updates and commit the round; with too few, the model stays unchanged.

        Raises:
            FederationError: too many rounds in a row failed, or the server's disk did.
            OSError: the round could not be committed; the one before stands.
        """
        ctx = replace(self.aggregator.context(self.round + 1), sites=len(self.registry.members))
        collector, members = self.collector, self.registry
        if self.masks:
            self.masks.close(missing)
            self.masks.added_to(collector.lines)
        else:
            self._close(missing)
        # Such a site gets with its next task what is otherwise sent once.
        lost = collector.abstained("missing_state")
        bound = self.state.bound.in_phase(ctx.phase.name)
        self.state = replace(self.state, holders=self.state.holders - lost, bound=bound)
        usable = collector.accepted()
        # Before the quorum: where no site can train on the model, to repeat the round would help nobody.
        undo = self.exchanges.undo(self.round, self.model, self.state, self.states)
        if undo or len(usable) < self.quorum:
            self._fail(collector.summary(ctx.round, ctx.phase.name, members.rename_keys), usable, undo)
            return
        merged = self._merge(Updates(collector, members), ctx)
        if merged is None:
            self._fail(collector.summary(ctx.round, ctx.phase.name, members.rename_keys), usable, None)
            return
        # Failures count in a row. What the sites have measured is the model of the round before this one,
        # whose line of the history is complete only now.
        self._failures = 0
        self._note_validation()
        model = self.aggregator.aggregate(self.model, merged.updates, ctx)
        removable = self.plan.method.about.removable
        if removable:
            # On disk before the model that has them in it; those of the round before go once it is committed.
            keep_updates(self.states.folder, ctx.round, zip(usable, Updates(collector, members), strict=True))
        states = {site: update.state for site, update in collector.replies(Update).items()}
        self.record.note(older_state_notes(ctx.round, states, self.state.sent))
        norms = {site: collector.norms[site] for site in usable if site in collector.norms}
        line = collector.summary(ctx.round, ctx.phase.name, members.rename_keys)
        kept = dict(zip(usable, merged.kept, strict=False))
        own = {site: replace(line.sites[site], kept=kept.get(site)) for site in usable}
        line = replace(line, sites=line.sites | own)
        if odd := outlying(own):
            self.record.event("outliers", round=ctx.round, sites=odd)
        state = replace(
            self.state,
            pending=line,
            holders=self.state.holders.union(usable),
            norms={site: norm.update for site, norm in norms.items()},
            received=max(map(self.state.bound.model, norms.values()), default=0.0),
            bound=replace(self.state.bound.after(norms), radii=merged.radii),
            sent=self.state.sent | dict.fromkeys(usable, ctx.round),
        )
        self._commit(ctx.round, model, self.aggregator.measured_here(ctx.round, model, state))
        if removable:
            drop_updates(self.states.folder, ctx.round)
        collector.empty()
        self.enter(Stage.COMMITTED, round=ctx.round, seconds=line.seconds)

    def _merge(self, updates: Updates, ctx: RoundContext) -> Merged | None:
        """Return the updates as a robust merge, or secure aggregation, leaves them; None where that failed.

        Rows that too few sites sent are noted.
        """
        if self.masks:
            collector = self.collector
            return self.masks.merge(self.model, collector.updates(), collector.tasks, self.registry)
        robust, before = self.schedule.robust, None
        if robust is None:
            return Merged(updates)
        if robust.kind == "centered" and ctx.phase_round > 1:
            found = self.states.newest(self.round - 1)
            before = unpack_model(found[1]) if found and found[0] == self.round - 1 else None
        merged = robustly_merged(robust, self.model, before, updates, self.state.bound.radii)
        listed = self.record.run.get("unprotected", [])
        self.record.note(unprotected_note(robust, set(merged.plain) - set(listed), ctx.round))
        return merged

    def _fail(self, line: Round, usable: list[str], undo: Undo | None) -> None:
        self._failures += 1
        reasons = {s: x.reason for s, x in line.sites.items() if s not in usable} | self.state.excluded
        why = f"{len(usable)} usable updates of {self.quorum} needed"
        if self.masks and self.masks.stuck:
            reasons |= {site: one.reason for site, one in self.masks.lines.items()}
            why = self.masks.stuck
        told = [f"round {line.round}: {why}", *([list_reasons(reasons)] if reasons else [])]
        why = "; ".join(told)
        self.record.history(replace(line, status="unchanged"))
        self.enter(Stage.UNCHANGED, round=line.round, why=why)
        log.warning("%s; the model stays as it was", why)
        if undo:
            self._step_back(undo)
        if self._failures >= self.schedule.max_failed_rounds:
            raise FederationError(f"{why}. The model of round {self.round} is kept.")

    def _step_back(self, undo: Undo) -> None:
        """Return to the state before the last committed round, and exclude the site that destroyed that.

        What follows is as if the server had been started again from that state. Each step back excludes a
        site, so there are no more of them than sites.

        Raises:
            FederationError: it was the server's own step: nobody is excluded.
        """
        bad, undone, excluded = self.round, self.state.pending, {}
        if undo.site:
            excluded[undo.site] = (
                f"excluded: its update of round {bad} was the largest, and no other site could train on "
                "the resulting model; if the site works correctly, begin a new experiment with a lower "
                "learning rate"
            )
        # Into the state itself: a server that is killed from here on starts again without the site.
        header = {**undo.before.header, "excluded": {**self.state.excluded, **excluded}}
        self.states.step_back(undo.round, replace(undo.before, header=header))
        found = read_newest(self.states, self.plan)
        assert found is not None  # it was written just now
        self._restore(found)
        # Its line was written when the round after it was made, and will be once more.
        self.record.reopen(undo.round)
        if undone:
            sites = dict(undone.sites)
            for site, why in excluded.items():
                sites[site] = replace(sites[site], status="rejected", reason=why)
            self.record.history(replace(undone, status="unchanged", sites=sites))
        self.record.note(exclusion_notes(excluded))
        line = f"back to the model of round {undo.round}"
        line += f"; {list_reasons(excluded)}" if excluded else ""
        self.enter(Stage.ROLLED_BACK, round=undo.round, site=undo.site, why=line)
        log.warning(line)
        if not undo.site:
            raise self.aggregator.divergence_error(
                f"no site can train on the model of round {bad}", self.round
            )

    def _note_validation(self) -> None:
        """Record the sites' losses of the last committed model, and whether it is the best so far."""
        if self.state.pending is None:
            return
        metrics, registry = self.collector.metrics(), self.registry
        state = self.aggregator.measured_at_sites(self.state.pending, metrics, registry, self.state)
        line = state.pending
        assert line is not None
        scores = {site: registry.rename_keys(site, found.classes) for site, found in metrics.items()}
        self.unmeasured = {
            name: {s: (at[name].positives, at[name].negatives) for s, at in scores.items() if name in at}
            for name in line.validation.unmeasured
        }
        self.record.note_validation(line)
        self.state = replace(state, pending=None)

    # The end

    def assign_validation(self) -> dict[str, Packed]:
        """Return the task to compute the validation losses of the last round's model."""
        return self._send(Task("evaluate", self.round, "evaluate"), serve(self.model, self.plan))

    def close_validation(self, missing: Mapping[str, str]) -> None:
        """Select the round whose model is the result.

        Where no site sends an AUROC of enough images, losses or the last round stand in; nobody knows before
        round 1 whether one will.

        Raises:
            FederationError: no validation loss was ever measured.
        """
        self._close(missing)
        self.enter(Stage.IDLE)
        self._note_validation()
        standings, by = self.state.standings, self.schedule.selection
        if by == "site_auroc" and (standings.best is None or standings.best.unmeasured):
            standings = replace(standings, best=Best(self.round, UNMEASURED), by="last")
            self.state = replace(self.state, standings=standings)
        if standings.best is None:
            raise FederationError(
                "no validation loss was measured, so no round can be selected. Give the sites "
                "validation data (enough for their min_loss and min_count), or resume with selection = "
                "'last'"
            )
        if standings.by and standings.by != by:
            self.record.note([Note("selected_by", {"fewest": FEW, "by": standings.by})])
        self._keep_best()

    @property
    def decides(self) -> bool:
        """Whether the job turns scores into decisions: of a model that is the same at every site."""
        return self.schedule.decision is not None and self.plan.method.sharing.personal == "nothing"

    def assign_scores(self) -> dict[str, Packed]:
        """Return the task to count the scores that the selected model gives to the sites' validation data."""
        return self._send(Task("calibrate", None, "calibrate"), self.select_model())

    def close_scores(self, missing: Mapping[str, str]) -> None:
        """Fit the operating points of the selected model."""
        self._close(missing)
        self.enter(Stage.IDLE)
        if self.schedule.decision:
            scores = self.collector.replies(Scores)
            self.fitted = fit_decisions(self.registry, scores, self.schedule.decision)

    def assign_test(self) -> dict[str, Packed]:
        """Return the task to evaluate the selected model, and its decisions, on the sites' test data."""
        return self._send(Task("evaluate", None, "evaluate", "test"), self.select_model())

    def close_test(self, missing: Mapping[str, str]) -> dict[str, Metrics]:
        """Return the sites' metrics on their own test data."""
        self._close(missing)
        self.enter(Stage.IDLE)
        return self.collector.metrics()

    @property
    def selected_round(self) -> int:
        """The round whose model is the result."""
        best = self.state.standings.best
        return best.round if best else self.round

    def select_model(self) -> GlobalModel:
        """Read the model that predicts of the selected round; where none could be selected, of the last one.

        It lacks the classes that have joined since its round, unless each site selects a round of its own.

        Raises:
            SutureError: its file is corrupt; says what to do.
            ConfigError: it holds no model of this experiment.
        """
        if self.state.standings.best is None:
            return serve(self.model, self.plan)
        number = self.selected_round
        where = f"the state of round {number} in {self.states.folder}"
        model = serve(read_model(self.states.read_best(number), self.plan, where), self.plan)
        own = self.plan.method.sharing.personal == "model"
        return with_labels(model, self.registry.labels, self.plan) if own else model

    # Used by several steps

    def enter(self, stage: Stage, **facts: Any) -> None:
        """Go to another stage; with facts of it, an event says so.

        Raises:
            RuntimeError: it does not follow the present one, which is a bug.
        """
        if stage not in _NEXT[self.stage]:
            raise RuntimeError(f"a server that is {self.stage.value} cannot be {stage.value} next")
        self.stage = stage
        if facts:
            self.record.event(stage.value, **facts)

    def _send(
        self, task: Task, model: GlobalModel, masks: Mapping[str, MaskTask] | None = None
    ) -> dict[str, Packed]:
        self.enter(Stage.OPEN)
        decisions = self.fitted.decisions if self.fitted and task.split == "test" else None
        left_out = self.masks.left_out if self.masks and masks else ()
        return self.exchanges.assign(
            task, self.round, model, self.registry, self._facts, self.state, decisions, masks, left_out
        )

    def _close(self, missing: Mapping[str, str]) -> dict[str, SiteRound]:
        """End the open exchange, and note the sites whose ledgers are broken."""
        lines = self.exchanges.close(missing)
        if self.registry.members:  # at the start, `_record_start` notes it
            reasons = {site: str(line.reason) for site, line in lines.items()}
            self.record.note(ledger_notes(reasons))
        return lines

    def _commit(self, number: int, model: GlobalModel, state: RunState) -> None:
        packed = pack_state(model, state, self.registry, self.plan)
        # Until the file is whole the round before is the committed one, and the sites are told no other.
        self.states.save(number, packed, committed=self.round)
        self.round, self.model, self.state = number, model, state
        self._keep_best()

    def _keep_best(self) -> None:
        if self.state.standings.best is not None:
            self.states.keep(self.state.standings.best.round)


def open_server(
    plan: Plan,
    schedule: Schedule,
    config: SiteConfig | None,
    experiments: Path,
    pooled: Mapping[str, Member] | None = None,
    ledgers: Path | None = None,
    identity: Identity | None = None,
) -> Server:
    """Open the server of an experiment, with its labelled data if its configuration names some.

    Args:
        config: the server's own suture.toml, where it has data.
        experiments: folder of the experiments' folders.
        pooled, ledgers, identity: see `Server`.

    Raises:
        CodeMismatch: another version of the package created the job.
        DataError: the server's data cannot be read.
    """
    torch.set_num_threads(1)
    plan.check_code("the server")
    held_out = HeldOut(config, plan) if config else None
    server = Server(plan, schedule, experiments / plan.experiment, held_out, pooled, ledgers, identity)
    describe(server.record, plan, schedule)
    return server
