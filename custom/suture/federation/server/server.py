"""The server: sends each site its task, aggregates the updates, commits rounds and selects the best one.

It knows no transport: `suture.federation.loop.federate` drives it, with sites in this process or over NVIDIA
FLARE.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import starmap
from pathlib import Path

import torch

from suture.core.errors import ConfigError, FederationError, as_word
from suture.core.labels import LabelType
from suture.core.names import check_sites
from suture.core.validation import flat
from suture.data.config import ServerConfig, SiteConfig, StorageConfig, find_site_config, load_server_config
from suture.federation.expectation import expected_answer
from suture.federation.plan import Plan, Schedule, needed, round_context
from suture.federation.server.assignments import Assigner, Task
from suture.federation.server.collector import Line, OpenExchange, UpdateCollector, list_reasons
from suture.federation.server.coverage import why_unmeasured
from suture.federation.server.decisions import decisions_of, diagrams_of, fit_decisions, site_diagrams_of
from suture.federation.server.global_model import (
    Began,
    Progress,
    fixed_settings,
    initial,
    pack_model,
    read_model,
    read_progress,
    served,
    unpack_model,
    with_labels,
)
from suture.federation.server.ledgers import LEDGERS, SiteLedgers
from suture.federation.server.norm_bound import NormBound, distance, norm_of, untrainable
from suture.federation.server.notes import (
    class_notes,
    code_notes,
    exclusion_notes,
    ledger_notes,
    older_state_note,
    start_notes,
)
from suture.federation.server.record import Record, describe, what_leaves
from suture.federation.server.registry import (
    Agreement,
    Member,
    SiteRegistry,
    agree,
    misfits,
    participants,
    without,
)
from suture.federation.server.scores import across_sites, coarsest, condensed
from suture.federation.server.selection import (
    MEASURED_HERE,
    Best,
    HeldOut,
    ModelSelection,
    check_measurable,
    check_selection,
)
from suture.federation.store import Rounds
from suture.learning.metrics import mean_defined
from suture.methods.base import ClassFacts, GlobalModel, Method, Phase, RoundContext
from suture.methods.exchange import check_channels, layout_of
from suture.models.classifier import Layout
from suture.protocol.check import all_finite
from suture.protocol.decisions import Decisions, Diagrams
from suture.protocol.messages import Metrics, TaskData, Update
from suture.protocol.packing import Packed
from suture.protocol.records import read_history

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Updates:
    """The accepted updates under the federation's class names; see `UpdateCollector.updates`."""

    collector: UpdateCollector
    registry: SiteRegistry

    def __iter__(self) -> Iterator[Update]:
        # It holds no update while the next one is read, as a generator would.
        return starmap(self.registry.from_site, self.collector.updates())


@dataclass(frozen=True)
class _Undo:
    """The state before the last committed round, its number, and the site whose update has destroyed that."""

    round: int
    before: Packed
    site: str | None


class Server:
    """The server of a federation.

    Args:
        plan, schedule: of the job.
        folder: of the experiment; holds the committed rounds and the results of the run.
        held_out: labelled data at the server, if there are any.
        pooled: the sites whose data one party holds in place of them; the report is about these sites.
        ledgers: see `SiteLedgers`; by default those of this experiment alone.

    Raises:
        FederationError: the server cannot select rounds as the schedule requests.
        ConfigError: the method needs more rounds.
    """

    def __init__(
        self,
        plan: Plan,
        schedule: Schedule,
        folder: Path,
        held_out: HeldOut | None,
        pooled: Mapping[str, Member] | None = None,
        ledgers: Path | None = None,
    ) -> None:
        check_selection(schedule, plan.method, held_out)
        plan.method.phases(schedule.rounds)  # raises where there are too few
        self.plan = plan
        self.schedule = schedule
        self.held_out = held_out
        self._pooled = pooled
        self.record = Record(folder)
        self.states = Rounds(folder / "state")
        spool = self.states.folder / "spool"
        self.ledgers = SiteLedgers(ledgers or self.states.folder / LEDGERS)
        self.collector = UpdateCollector(spool, self.record.event)
        self.round = 0
        self.registry = SiteRegistry({}, ())
        self.model: GlobalModel
        self.standings = ModelSelection(by=self.schedule.selection)
        self._losses_of_best: tuple[int, Mapping[str, float]] = (0, {})
        self.unmeasured: dict[str, str] = {}
        self._facts = ClassFacts()
        self._holders: set[str] = set()  # sites that hold the tensors sent only once
        self._pending: Line | None = None  # the last round's history, until its losses are known
        self._norms: dict[str, float] = {}  # of the updates that the model was made of
        self._received = 0.0  # the norm of the model that they began from
        self._bound = NormBound()
        self._sent: dict[str, int] = {}  # the newest committed round of which each site's update was taken
        self._excluded: dict[str, str] = {}  # sites that take no further part, with the reason
        self._failures = 0
        self.decisions: Decisions | None = None
        self.diagrams: dict[str, Diagrams] = {}
        self.site_diagrams: dict[str, dict[str, Diagrams]] = {}
        self._codes = [(0, plan.code)]  # the code of the rounds after a number, as often as it changed

    # The start

    def handshake(self, sites: list[str]) -> dict[str, Packed]:
        """Return the handshake task of every site, which requests its site info.

        Raises:
            ConfigError: a site has a name that cannot be used.
        """
        check_sites(sites)
        held = self.ledgers.read()
        expected = expected_answer(
            self.plan.method, TaskData("handshake"), self.plan.method.egress(Layout({}, {}))
        )
        payloads = {site: TaskData("handshake", ledger=held.get(site)) for site in sites}
        return self.collector.open({site: (payload, expected) for site, payload in payloads.items()})

    def begin(self, missing: Mapping[str, str]) -> None:
        """Agree on the labels with the sites that answered the handshake, and start or continue.

        Raises:
            FederationError: too few sites answered, the labels are not settled, a site holds another prior
                than the others, or than the experiment began with; or no site can measure any round.
            ConfigError: the experiment began with other settings, or with another version of Suture.
        """
        lines = self._close(missing)
        infos = participants(self.collector.infos(), lines, self.schedule.min_sites)
        found = read_progress(self.states, self.plan)
        previous, began = (found.model.labels, found.header.registry) if found else ((), Began(None))
        one_row = self.plan.method.labels.view == "target"  # it means another class at each site
        named, accepted = self.schedule.label_map, one_row or self.schedule.accept_labels
        label_type = found.model.label_type if found else None
        so_far = Agreement(previous, named, accepted, label_type, began.prior, began.codes, began.owners())
        unfit = misfits(infos, so_far)
        if len(infos) - len(unfit) >= needed(self.schedule.min_sites, len(lines)):
            infos = without(infos, unfit, lines, self.schedule.min_sites)
        # Where the others are too few, `agree` raises and says what all sites have.
        self.registry = agree(infos, previous, named, accepted, began.prior, began.codes)
        check_label_type(self.plan.method, self.registry.label_type)
        best = ModelSelection.from_dict(found.header.standings).best if found else None
        check_measurable(self.schedule, {site: infos[site] for site in self.registry.members}, best)
        if found:
            self._check_phase(found)
            self._restore(found)
            self.model = with_labels(found.model, self.registry.labels, self.plan)
        else:
            self.model = initial(self.plan, self.registry.labels, self.registry.label_type)
            exchanged = self.plan.method.exchange.parts(self.model.shared, self.model.head)
            self._bound = NormBound(initial=norm_of(*exchanged))
            self._commit(0)
        if self.held_out:
            self.held_out.take_names(self.registry)
            self.held_out.check_groups(self.registry.labels)
        self._facts = self.plan.method.class_facts(self.registry.statistics(infos))
        self.record.rewind(self.round)
        added = [name for name in self.registry.labels if found and name not in previous]
        self._record_start(added, {s: str(x["reason"]) for s, x in lines.items() if s not in infos})

    def _check_phase(self, found: Progress) -> None:
        """Refuse a number of rounds that would put the last committed round into another phase."""
        last, rounds = found.header.pending, self.schedule.rounds
        if last is None or found.round > rounds:
            return
        now = self._phase_of(found.round).name
        if (was := last.get("phase", now)) != now:
            raise ConfigError(
                f"round {found.round} was trained in the phase {as_word(was)}, but in a run of {rounds} "
                f"rounds it belongs to the phase {now}. Set rounds to its former value, or begin a new "
                "experiment"
            )

    def _phase_of(self, number: int) -> Phase:
        return round_context(self.plan, self.schedule.rounds, min(number, self.schedule.rounds)).phase

    def _restore(self, found: Progress) -> None:
        self.round = found.round
        self.standings = ModelSelection.from_dict(found.header.standings)
        self.standings.fall_back(self.states, found.round)
        self.standings.continue_by(self.schedule.selection, found.round)
        self._pending = found.header.pending
        self._holders = set(found.header.holders)
        self._norms, self._sent = dict(found.header.norms), dict(found.header.sent)
        self._received, self._bound = found.header.received, found.header.bound
        self._excluded = dict(found.header.excluded)
        self._codes = list(found.header.codes)
        if self._codes[-1][1] != self.plan.code:
            self._codes.append((found.round, self.plan.code))
        self._keep_best()
        log.info("continuing after round %d", found.round)

    def _record_start(self, added: list[str], refused: Mapping[str, str]) -> None:
        """Record who takes part and, when an experiment continues, what is new.

        Args:
            added: classes that the model did not have before.
            refused: why other sites do not take part.
        """
        labels, members, rounds = list(self.registry.labels), self.registry.members, self.schedule.rounds
        prior = self.plan.method.exchange.prior
        held = {"name": prior.name, "digest": self.registry.prior} if prior and self.registry.prior else {}
        self.record.update(label_type=self.registry.label_type, prior=held)
        notes = [*code_notes(self._codes), *exclusion_notes(self._excluded), *ledger_notes(refused)]
        notes += class_notes(self.registry, self.schedule.label_map)
        self.record.update(notes=[*notes, *start_notes(self.model, self.plan, self._facts)])
        self.record.update(
            status="running",
            rounds=rounds,
            egress=what_leaves(self.plan, layout_of(self.model, self.plan.method), self.registry.label_type),
            labels=labels,
            sites={s: {"labels": list(m.names), "n": dict(m.n)} for s, m in self.reported_sites.items()},
            threads={"server": 1, **{s: m.threads for s, m in members.items()}},
            computed_on={s: m.computed_on for s, m in members.items()},
            protection={s: dict(m.protection) for s, m in members.items() if m.protection},
            **({"new_labels": added} if added else {}),
        )
        start = {"round": self.round, "rounds": rounds, "sites": sorted(members), "labels": labels}
        self.record.event("begin", **start, refused=dict(refused), new_labels=added)
        for note in self.record.run["notes"]:
            self.record.event("note", text=note)

    @property
    def reported_sites(self) -> Mapping[str, Member]:
        """The sites that the report is about: the pooled ones, or those that take part."""
        return self._pooled or self.registry.members

    @property
    def quorum(self) -> int:
        """Number of usable updates that a round needs."""
        return needed(self.schedule.min_sites, len(self.registry.members))

    def receiver(self) -> OpenExchange:
        """Return where the transport delivers the answers of the open exchange."""
        return self.collector.receiver(self.quorum, self.schedule.grace)

    # Rounds

    @property
    def done(self) -> bool:
        """Whether every round has been committed, or patience has run out."""
        late = self.schedule.selection == "site_loss"  # a model is measured when the next round is trained
        over = self.standings.over(self.round - late, self.schedule.patience)
        return over or self.round >= self.schedule.rounds

    def assign(self) -> dict[str, Packed]:
        """Return the training task of the next round for each site."""
        ctx = round_context(self.plan, self.schedule.rounds, self.round + 1)
        self.record.event("round", round=ctx.round, phase=ctx.phase.name)
        self._bound = self._bound.in_phase(ctx.phase.name)
        # Noise may begin with a job, and makes an update longer than all before.
        noisy = {site for site, member in self.registry.members.items() if member.protection.get("noise")}
        largest = {site: of for site, of in self._bound.largest.items() if site not in noisy}
        self.collector.bound = replace(self._bound, factor=self.schedule.max_update, largest=largest)
        return self._send(Task("train", ctx.round, ctx.phase.name), self.model)

    def close_round(self, missing: Mapping[str, str]) -> None:
        """Aggregate the accepted updates and commit the round; with too few, the model stays unchanged.

        Raises:
            FederationError: too many rounds in a row failed, or the server's disk did.
            OSError: the round could not be committed; the one before stands.
        """
        ctx = round_context(self.plan, self.schedule.rounds, self.round + 1)
        ctx = replace(ctx, sites=len(self.registry.members))
        self._close(missing)
        self._holders -= self.collector.abstained("missing_state")
        usable = self.collector.accepted()
        if (undo := self._undo()) or len(usable) < self.quorum:
            self._failed(self._summary(ctx), usable, undo)
            return
        self._failures = 0
        self._note_validation()
        self.model = self._aggregated(ctx)
        self._holders |= set(usable)
        norms = {site: self.collector.norms[site] for site in usable}
        self._norms = {site: norm.update for site, norm in norms.items()}
        self._received = max(map(self._bound.model, norms.values()))
        self._bound = self._bound.after(norms)
        self._note_older_states(ctx.round)
        self._sent |= dict.fromkeys(usable, ctx.round)
        self._pending = self._summary(ctx)
        self._select_at_server(ctx.round)
        self._commit(ctx.round)
        self.collector.empty()
        self.record.event("committed", round=ctx.round, seconds=self._pending["seconds"])

    def _summary(self, ctx: RoundContext) -> Line:
        return self.collector.summary(ctx.round, ctx.phase.name, self.registry.named)

    def _failed(self, line: Line, usable: list[str], undo: _Undo | None = None) -> None:
        self._failures += 1
        reasons = {s: x["reason"] for s, x in line["sites"].items() if s not in usable} | self._excluded
        why = f"round {line['round']}: {len(usable)} usable updates of {self.quorum} needed; "
        why += list_reasons(reasons)
        self.record.history(line | {"status": "unchanged"})
        self.record.event("unchanged", round=line["round"], why=why)
        log.warning("%s; the model stays as it was", why)
        if undo:
            self._step_back(undo)
        if self._failures >= self.schedule.max_failed_rounds:
            raise FederationError(f"{why}. The model of round {self.round} is kept.")

    def _undo(self) -> _Undo | None:
        """Return how to undo the last committed round, if no site that had a part in it can train on it.

        The site with the largest update is excluded if that update explains it. If none does, it was the
        server's own step. What some sites claim of a model that another can train changes nothing.
        """
        unable = self.collector.abstained("non_finite_loss")
        site = untrainable(self._norms, unable)
        before = self.states.newest(self.round - 1) if site else None
        if site is None or before is None or {*self.collector.accepted()} - {site}:
            return None
        moved = distance(self.model, unpack_model(before[1]))
        explained = self._norms[site] > self._received and moved <= 1.01 * math.hypot(*self._norms.values())
        return _Undo(*before, site if explained else None) if explained or {*self._norms} <= unable else None

    def _step_back(self, undo: _Undo) -> None:
        """Return to the state before the last committed round, and exclude the site that destroyed that.

        What follows is as if the server had been started again from that state. Each step back excludes a
        site, so there are no more of them than sites.

        Raises:
            FederationError: it was the server's own step: nobody is excluded.
        """
        bad, undone, excluded = self.round, self._pending, {}
        if undo.site:
            excluded[undo.site] = (
                f"excluded: its update of round {bad} was the largest, and no other site could train on "
                "the resulting model; if the site works correctly, begin a new experiment with a lower "
                "learning rate"
            )
        header = {**undo.before.header, "excluded": {**self._excluded, **excluded}}
        self.states.step_back(undo.round, replace(undo.before, header=header))
        progress = read_progress(self.states, self.plan)
        assert progress is not None  # it was written just now
        self._restore(progress)
        self.model = with_labels(progress.model, self.registry.labels, self.plan)
        self.record.reopen(undo.round)
        if undone:
            for site, why in excluded.items():
                undone["sites"][site] |= {"status": "rejected", "reason": why}
            self.record.history(undone | {"status": "unchanged"})
        self.record.update(notes=[*self.record.run["notes"], *exclusion_notes(excluded)])
        line = f"back to the model of round {undo.round}"
        line += f"; {list_reasons(excluded)}" if excluded else ""
        self.record.event("rolled_back", round=undo.round, site=undo.site, why=line)
        log.warning(line)
        if not undo.site:
            raise self._diverged(f"no site can train on the model of round {bad}")

    def _aggregated(self, ctx: RoundContext) -> GlobalModel:
        """Return the next model.

        Raises:
            FederationError: it cannot be computed, or a number of it is not finite.
        """
        try:
            model = self.plan.method.aggregate(self.model, _Updates(self.collector, self.registry), ctx)
        except (ArithmeticError, RuntimeError) as error:
            if not isinstance(error, ArithmeticError) and "overflow" not in str(error):
                raise  # a bug of the method; torch tells an overflow by its text alone
            log.exception("round %d", ctx.round)
            what = f"round {ctx.round}: {as_word(error)}"
            raise self._diverged(what) from error
        check_channels(model, self.plan.method)
        for name, tensor in pack_model(model, {}).tensors.items():
            if tensor.is_floating_point() and not all_finite(tensor):
                raise self._diverged(f"{name} of the model of round {ctx.round} is not finite")
        return model

    def _diverged(self, what: str) -> FederationError:
        """Return the error of a step of the server after which the model is of no use."""
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
            f"site is excluded, and the model of round {self.round} is kept; begin a new experiment "
            f"with a lower {lower}"
        )

    def _note_validation(self) -> None:
        """Record the sites' losses of the last committed model, and whether it is the best so far."""
        if self._pending is None:
            return
        metrics = self.collector.metrics()
        losses = {s: m.loss for s, m in metrics.items() if m.loss is not None}
        for site, value in losses.items():
            joined = {"status": "missing", "reason": "joined after this round"}
            line = self._pending["sites"].setdefault(site, joined)
            line |= {"validation_loss": value, "validation_auroc": condensed(metrics[site]).auroc}
        scores = {s: self.registry.classes_from_site(s, m) for s, m in metrics.items()}
        areas = {name: score.auroc for name, score in across_sites(scores).items()}
        loss, auroc = mean_defined(losses.values()), mean_defined(areas.values())
        figures = self._pending["validation"] | {"loss": loss, "auroc": auroc}
        steps = {
            "loss_step": coarsest(m.loss_step for m in metrics.values()),
            "auroc_step": coarsest(score.step for at in scores.values() for score in at.values()),
        }
        figures |= {name: step for name, step in steps.items() if step is not None}
        unmeasured = [name for name in self.registry.labels if areas.get(name) is None]
        self.unmeasured = {
            name: why_unmeasured({site: at[name] for site, at in scores.items() if name in at})
            for name in unmeasured
        }
        self._pending["validation"] = figures | ({"unmeasured": unmeasured} if unmeasured else {})
        self.record.history(self._pending)
        self.record.event("validated", round=self.round, sites=sorted(losses), **figures)
        self._pending = None
        selectable = self._phase_of(self.round).selectable
        if self.schedule.selection == "site_loss" and loss is not None and selectable:
            now = Best(self.round, -loss, auroc or 0.0)
            self.standings.note_loss(now, self._in_common(losses))
            if self.standings.best is now:
                self._losses_of_best = self.round, losses
        if self.plan.method.exchange.personal == "model":
            own = {site: condensed(metrics[site]).auroc or 0.0 for site in losses}
            self.standings.note_own({s: Best(self.round, -loss, own[s]) for s, loss in losses.items()})

    def _in_common(self, losses: Mapping[str, float]) -> tuple[Best, Best] | None:
        """Return the best round and this one by the losses of the sites that measured both; None where the
        same sites did. Their AUROCs are then over other classes, and say nothing.
        """
        best = self.standings.best
        if best is None or best.unmeasured:
            return None
        if self._losses_of_best[0] != best.round:  # of a run that was resumed
            lines = [line.sites for line in read_history(self.record.folder) if line.round == best.round]
            found = {s: one.validation_loss for sites in lines for s, one in sites.items()}
            self._losses_of_best = best.round, {s: v for s, v in found.items() if v is not None}
        before = self._losses_of_best[1]
        if not before or before.keys() == losses.keys():
            return None
        both = before.keys() & losses.keys()
        if not both:  # nothing shows that this round is better
            return Best(best.round, 0.0), Best(self.round, -1.0)
        means = [math.fsum(of[site] for site in both) / len(both) for of in (before, losses)]
        return Best(best.round, -means[0]), Best(self.round, -means[1])

    def _select_at_server(self, number: int) -> None:
        """Select a round without the sites: by labelled data at the server, or because it is the last."""
        if self.schedule.selection == "last":
            self.standings.best = Best(number, 0.0)
        elif (by := MEASURED_HERE.get(self.schedule.selection)) and self.held_out and self._pending:
            found = self.held_out.validate(served(self.model, self.plan))
            self._pending["validation"] |= found
            if (value := found[by]) is not None and self._phase_of(number).selectable:
                self.standings.note(Best(number, value))

    # The end

    def assign_validation(self) -> dict[str, Packed]:
        """Return the task to compute the validation losses of the last round's model."""
        return self._send(Task("evaluate", self.round, "evaluate"), served(self.model, self.plan))

    def close_validation(self, missing: Mapping[str, str]) -> None:
        """Select the round whose model is the result.

        Raises:
            FederationError: no validation loss was ever measured.
        """
        self._close(missing)
        self._note_validation()
        if self.standings.best is None:
            raise FederationError(
                "no validation loss was measured, so no round can be selected; give the sites "
                "validation data (enough for their min_loss and min_count), or resume with selection = "
                "'last'"
            )
        self._keep_best()

    @property
    def decides(self) -> bool:
        """Whether the job turns scores into decisions: of a model that is the same at every site."""
        return self.schedule.decision is not None and self.plan.method.exchange.personal == "nothing"

    def assign_scores(self) -> dict[str, Packed]:
        """Return the task to count the scores that the selected model gives to the sites' validation data."""
        return self._send(Task("calibrate", None, "calibrate"), self.selected())

    def close_scores(self, missing: Mapping[str, str]) -> None:
        """Fit the operating points of the selected model."""
        self._close(missing)
        if self.schedule.decision:
            scores = self.collector.scores()
            self.decisions = fit_decisions(self.registry, scores, self.schedule.decision)
            self.diagrams = diagrams_of(self.registry, scores, self.decisions)
            self.site_diagrams = site_diagrams_of(self.registry, scores, self.decisions)

    def assign_test(self) -> dict[str, Packed]:
        """Return the task to evaluate the selected model, and its decisions, on the sites' test data."""
        return self._send(Task("evaluate", None, "evaluate", "test"), self.selected())

    def close_test(self, missing: Mapping[str, str]) -> dict[str, Metrics]:
        """Return the sites' metrics on their own test data."""
        self._close(missing)
        return self.collector.metrics()

    @property
    def selected_round(self) -> int:
        """The round whose model is the result."""
        return self.standings.best.round if self.standings.best else self.round

    def selected(self) -> GlobalModel:
        """Read the model that predicts of the selected round; where none could be selected, of the last one.

        It lacks the classes that have joined since its round, unless each site selects a round of its own.

        Raises:
            SutureError: its file is corrupt; says what to do.
            ConfigError: it holds no model of this experiment.
        """
        if self.standings.best is None:
            return served(self.model, self.plan)
        number = self.selected_round
        where = f"the state of round {number} in {self.states.folder}"
        model = served(read_model(self.states.read_best(number), self.plan, where), self.plan)
        own = self.plan.method.exchange.personal == "model"
        return with_labels(model, self.registry.labels, self.plan) if own else model

    # Used by several steps

    def _close(self, missing: Mapping[str, str]) -> dict[str, Line]:
        """End the open exchange; keep the digests of the sites' ledgers, and note those that are broken."""
        lines = self.collector.close(missing)
        self.ledgers.note(self.collector.ledgers())
        if self.registry.members:  # at the start, `_record_start` notes it
            reasons = {site: str(line["reason"]) for site, line in lines.items()}
            self._note([n for n in ledger_notes(reasons) if n not in self.record.run.get("notes", [])])
        return lines

    def _note(self, notes: list[str]) -> None:
        """Add notes for the reader of the report."""
        if notes:
            self.record.update(notes=[*self.record.run.get("notes", []), *notes])
            for note in notes:
                self.record.event("note", text=note)

    def _note_older_states(self, round_: int) -> None:
        """Note the sites that have trained a round from an older state than they had."""
        states = self.collector.states()
        self._note(
            [
                older_state_note(s, round_, n, self._sent[s])
                for s, n in states.items()
                if n < self._sent.get(s, 0)
            ]
        )

    def _send(self, task: Task, model: GlobalModel) -> dict[str, Packed]:
        best = {site: self.standings.of(site) for site in self.registry.members}
        assigner = Assigner(
            self.plan.method,
            self.registry,
            model,
            self.round,
            best,
            self._holders,
            self._facts.tensors,
            self.plan.half,
            ledgers=self.ledgers.read(),
        )
        if self.decisions and task.split == "test":
            own = {s: decisions_of(self.decisions, self.registry, s) for s in self.registry.members}
            assigner = replace(assigner, decisions=own, rule=self.decisions.settings.rule)
        assigned = assigner.assign(task).items()
        return self.collector.open({site: one for site, one in assigned if site not in self._excluded})

    def _commit(self, number: int) -> None:
        header = {
            "plan": fixed_settings(self.plan),
            "registry": self.registry.to_dict(),
            "standings": self.standings.to_dict(),
            "pending": self._pending,
            "holders": sorted(self._holders),
            "codes": self._codes,
            "norms": self._norms,
            "received": self._received,
            "bound": asdict(self._bound),
            "excluded": self._excluded,
            "sent": self._sent,
        }
        self.states.save(number, pack_model(self.model, header), committed=self.round)
        self.round = number
        self._keep_best()

    def _keep_best(self) -> None:
        if self.standings.best is not None:
            self.states.keep(self.standings.best.round)


def check_label_type(method: Method, label_type: LabelType) -> None:
    """Refuse a federation of labels that the method is not defined for.

    Raises:
        ConfigError: names the methods that are.
    """
    if label_type in method.labels.types:
        return
    kind = {"multilabel": "several labels an image", "multiclass": "one label an image"}[label_type]
    raise ConfigError(
        f"{method.about.title} does not support {kind}, which the sites have; choose another method "
        "(`suture list methods` shows what each is for)"
    )


def open_server(
    plan: Plan,
    schedule: Schedule,
    config: SiteConfig | None,
    experiments: Path,
    pooled: Mapping[str, Member] | None = None,
    ledgers: Path | None = None,
) -> Server:
    """Open the server of an experiment, with its labelled data if its configuration names some.

    Args:
        config: the server's own suture.toml, where it has data.
        experiments: folder of the experiments' folders.
        pooled, ledgers: see `Server`.

    Raises:
        CodeMismatch: another version of the package created the job.
        DataError: the server's data cannot be read.
    """
    torch.set_num_threads(1)
    plan.check_code("the server")
    held_out = HeldOut(config, plan) if config else None
    server = Server(plan, schedule, experiments / plan.experiment, held_out, pooled, ledgers)
    describe(server.record, plan, schedule)
    return server


def find_server_config(workspace: Path) -> ServerConfig:
    """Read the server's own suture.toml; without one, experiments lie in suture/ of the workspace.

    Raises:
        ConfigError: the file cannot be used.
    """
    try:
        path = find_site_config("server", workspace)
    except ConfigError:
        files = workspace / "local" / "files"
        return ServerConfig(storage=StorageConfig(state=workspace / "suture", files=files))
    return load_server_config(path)
