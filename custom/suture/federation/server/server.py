"""The server: it sends each site its part, merges what comes back, commits, and keeps the best round.

It knows no transport. `federation.federate` drives it, with sites in this process or across NVIDIA FLARE.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from suture.core.errors import FederationError
from suture.core.names import check_sites
from suture.federation.plan import Plan, Schedule, needed, round_context
from suture.federation.server.admission import admitted, held_prior, introduce, noted
from suture.federation.server.collector import Line, OpenExchange, UpdateCollector, told
from suture.federation.server.global_model import initial, pack_model, unpack_model, with_labels
from suture.federation.server.payloads import assignments
from suture.federation.server.record import Record
from suture.federation.server.registry import Member, SiteRegistry, agree
from suture.federation.server.resume import Begun, begun, begun_with, read_best, still_there
from suture.federation.server.selection import MEASURED_HERE, Best, HeldOut, Standings, check_selection
from suture.federation.server.summary import across_sites
from suture.federation.store import Rounds
from suture.learning.metrics import mean_defined
from suture.methods.base import ClassFacts, GlobalModel, RoundContext
from suture.models.classifier import Layout
from suture.protocol.check import Expectation
from suture.protocol.messages import Metrics, Payload, TaskName
from suture.protocol.packing import Packed

log = logging.getLogger(__name__)


class Server:
    """The server of a federation.

    Args:
        plan, schedule: what is about to be done.
        folder: of the experiment; holds the committed rounds, and everything that the run leaves.
        held_out: labelled data that lies at the server, if it has any.
        pooled: the sites whose data one party holds, where that is so; the report is about them.
    """

    def __init__(
        self,
        plan: Plan,
        schedule: Schedule,
        folder: Path,
        held_out: HeldOut | None,
        pooled: Mapping[str, Member] | None = None,
    ) -> None:
        check_selection(schedule, plan.method, held_out)
        self.plan = plan
        self.schedule = schedule
        self.held_out = held_out
        self._pooled = pooled
        self.record = Record(folder)
        self.states = Rounds(folder / "state")
        self.collector = UpdateCollector(self.states.folder / "spool", self.record.event)
        self.round = 0
        self.registry = SiteRegistry({}, ())
        self.model: GlobalModel
        self.standings = Standings()
        self._facts = ClassFacts()
        self._holders: set[str] = set()  # sites that keep the fixed tensors
        self._pending: Line | None = None  # the last round's history, until its losses have come
        self._failures = 0

    # The start

    def handshake(self, sites: list[str]) -> dict[str, Packed]:
        """The payload that asks every site to introduce itself."""
        check_sites(sites)
        egress = self.plan.method.egress(Layout({}, {}))
        expected = Expectation("handshake", 0, 0, "", (), (), egress)
        return self.collector.open({site: (Payload("handshake"), expected) for site in sites})

    def begin(self, missing: Mapping[str, str]) -> None:
        """Agrees on the labels with the sites that introduced themselves, and starts or continues.

        Raises:
            FederationError: a site that the job needs did not introduce itself, labels are not settled, or a
                site holds another prior than the others, or than the experiment was begun with.
            ConfigError: the experiment was begun with another plan.
        """
        lines = self.collector.close(missing)
        infos = admitted(self.collector.infos(), lines, self.schedule.min_sites)
        found = begun(self.states, self.plan)
        previous, prior = (found.model.labels, found.prior) if found else ((), None)
        self.registry = agree(infos, previous, self.schedule.label_map, self.schedule.accept_labels, prior)
        if found:
            self._restore(found)
            self.model = with_labels(found.model, self.registry.labels, self.plan)
        else:
            self.model = initial(self.plan, self.registry.labels, self.registry.label_type)
            self._commit(0)
        if self.held_out:
            self.held_out.check_groups(self.registry.labels)
        self._facts = self.plan.method.class_facts(self.registry.statistics(infos))
        self.record.update(label_type=self.registry.label_type, prior=held_prior(self.plan, self.registry))
        self.record.update(notes=noted(self.model, self.plan, self._facts))
        self.record.rewind(self.round)
        added = [name for name in self.registry.labels if found and name not in previous]
        refused = {s: str(x["reason"]) for s, x in lines.items() if s not in infos}
        introduce(self.record, self.registry, self.known, self.round, self.schedule.rounds, added, refused)

    def _restore(self, found: Begun) -> None:
        self.round = found.round
        self.standings = Standings.from_dict(found.header["standings"])
        self.standings.best = still_there(self.standings.best, self.states, found.round)
        self._pending = found.header["pending"]
        self._holders = set(found.header["holders"])
        self._keep_best()
        log.info("continuing after round %d", found.round)

    @property
    def known(self) -> Mapping[str, Member]:
        """The sites whose labels these are."""
        return self._pooled or self.registry.members

    @property
    def quorum(self) -> int:
        """Usable updates that a round needs."""
        return needed(self.schedule.min_sites, len(self.registry.members))

    def intake(self) -> OpenExchange:
        """What the transport hands the answers of the open exchange to."""
        return self.collector.intake(self.quorum, self.schedule.grace)

    # Rounds

    @property
    def done(self) -> bool:
        """Whether every round has been committed, or patience has run out."""
        late = self.schedule.selection == "site_loss"  # a model is measured when the next round is trained
        over = self.standings.over(self.round - late, self.schedule.patience)
        return over or self.round >= self.schedule.rounds

    def assign(self) -> dict[str, Packed]:
        """The payload of the next round for each site: the shared tensors, and its own rows."""
        ctx = round_context(self.plan, self.schedule.rounds, self.round + 1)
        self.record.event("round", round=ctx.round, phase=ctx.phase.name)
        return self._send("train", ctx.round, self.model, ctx.phase.name)

    def close_round(self, missing: Mapping[str, str]) -> None:
        """Merges what was accepted and commits the round; with too few updates the model stays as it was.

        Raises:
            FederationError: too many rounds in a row failed, or the server's disk did.
            OSError: the round could not be committed; the one before stands.
        """
        ctx = round_context(self.plan, self.schedule.rounds, self.round + 1)
        self.collector.close(missing)
        self._holders -= self.collector.abstained("missing_state")
        usable = self.collector.accepted()
        if len(usable) < self.quorum:
            self._failed(self._summary(ctx), usable)
            return
        self._failures = 0
        self._validated()
        updates = (self.registry.from_site(site, update) for site, update in self.collector.updates())
        self.model = self.plan.method.aggregate(self.model, updates, ctx)
        self._holders |= set(usable)
        self._pending = self._summary(ctx)
        self._select_here(ctx.round)
        self._commit(ctx.round)
        self.collector.empty()
        self.record.event("committed", round=ctx.round, seconds=self._pending["seconds"])

    def _summary(self, ctx: RoundContext) -> Line:
        return self.collector.summary(ctx.round, ctx.phase.name, self.registry.named)

    def _failed(self, line: Line, usable: list[str]) -> None:
        self._failures += 1
        reasons = {s: x["reason"] for s, x in line["sites"].items() if s not in usable}
        why = f"round {line['round']}: {len(usable)} usable updates of {self.quorum} needed; {told(reasons)}"
        self.record.history(line | {"status": "unchanged"})
        self.record.event("unchanged", round=line["round"], why=why)
        log.warning("%s; the model stays as it was", why)
        if self._failures >= self.schedule.max_failed_rounds:
            raise FederationError(f"{why}. The model of round {self.round} is kept.")

    def _validated(self) -> None:
        """Notes the sites' losses of the last committed model, and whether it is the best so far."""
        if self._pending is None:
            return
        metrics = self.collector.metrics()
        losses = {s: m.loss for s, m in metrics.items() if m.loss is not None}
        for site, value in losses.items():
            newcomer = {"status": "missing", "reason": "joined after this round"}
            own = mean_defined(score.auroc for score in metrics[site].classes.values())
            line = self._pending["sites"].setdefault(site, newcomer)
            line |= {"validation_loss": value, "validation_auroc": own}
        areas = across_sites({s: self.registry.classes_from_site(s, m) for s, m in metrics.items()})
        loss, auroc = mean_defined(losses.values()), mean_defined(s.auroc for s in areas.values())
        self._pending["validation"] |= {"loss": loss, "auroc": auroc}
        self.record.history(self._pending)
        self.record.event("validated", round=self.round, loss=loss, auroc=auroc)
        self._pending = None
        if self.schedule.selection == "site_loss" and loss is not None:
            self.standings.note(Best(self.round, -loss))
        if self.plan.method.personal == "model":
            self.standings.note_own(self.round, losses)

    def _select_here(self, number: int) -> None:
        """The selections that need no site: labelled data at the server, or simply the last round."""
        if self.schedule.selection == "last":
            self.standings.best = Best(number, 0.0)
        elif (by := MEASURED_HERE.get(self.schedule.selection)) and self.held_out and self._pending:
            found = self.held_out.validate(self.model)
            self._pending["validation"] |= found
            if (value := found[by]) is not None:
                self.standings.note(Best(number, value))

    # The end

    def assign_validation(self) -> dict[str, Packed]:
        """The payload that asks for the losses of the last round's model."""
        return self._send("evaluate", self.round, self.model, "evaluate")

    def close_validation(self, missing: Mapping[str, str]) -> None:
        """Selects the round whose model is kept.

        Raises:
            FederationError: nothing was measured that could select one.
        """
        self.collector.close(missing)
        self._validated()
        if self.standings.best is None:
            raise FederationError(
                "no validation loss was ever measured, so no round can be selected; give the sites "
                "validation data, or set selection = 'last'"
            )
        self._keep_best()

    def assign_test(self) -> dict[str, Packed]:
        """The payload that asks for the selected model's figures on the sites' test data."""
        return self._send("evaluate", None, self.selected(), "evaluate", "test")

    def close_test(self, missing: Mapping[str, str]) -> dict[str, Metrics]:
        """What the sites measured on their own test data."""
        self.collector.close(missing)
        return self.collector.metrics()

    @property
    def selected_round(self) -> int:
        """The round whose model is kept."""
        return self.standings.best.round if self.standings.best else self.round

    def selected(self) -> GlobalModel:
        """The model of the selected round.

        Raises:
            SutureError: its file has rotted; says what to do.
        """
        return unpack_model(read_best(self.states, self.selected_round))

    # What they share

    def _send(
        self,
        task: TaskName,
        number: int | None,
        model: GlobalModel,
        phase: str,
        split: Literal["validation", "test"] = "validation",
    ) -> dict[str, Packed]:
        best = {site: self.standings.of(site) for site in self.registry.members}
        asked = assignments(
            self.plan.method,
            self.registry,
            model,
            task,
            best if number is None else dict.fromkeys(best, number),
            committed=self.round,
            best=best,
            holders=self._holders,
            phase=phase,
            class_tensors=self._facts.tensors,
            split=split,
        )
        return self.collector.open(asked)

    def _commit(self, number: int) -> None:
        header = {
            "plan": begun_with(self.plan),
            "registry": self.registry.to_dict(),
            "standings": self.standings.to_dict(),
            "pending": self._pending,
            "holders": sorted(self._holders),
        }
        self.states.save(number, pack_model(self.model, header), committed=self.round)
        self.round = number
        self._keep_best()

    def _keep_best(self) -> None:
        if self.standings.best is not None:
            self.states.keep(self.standings.best.round)
