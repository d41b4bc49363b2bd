"""The exchanges of a run: each site is assigned its task, and its answer is collected and checked."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from suture.federation.plan import Plan, Schedule
from suture.federation.server.assignments import Assigner, Task
from suture.federation.server.collector import UpdateCollector
from suture.federation.server.decisions import decisions_of
from suture.federation.server.global_model import unpack_model
from suture.federation.server.ledgers import SiteLedgers
from suture.federation.server.norm_bound import distance, untrainable
from suture.federation.server.registry import SiteRegistry
from suture.federation.server.state import RunState
from suture.federation.store import Rounds
from suture.methods.base import ClassFacts, GlobalModel
from suture.models.classifier import Layout
from suture.protocol.check import AllowedReply
from suture.protocol.decisions import Decisions
from suture.protocol.messages import Abstain, Masking, MaskTask, TaskData
from suture.protocol.packing import Packed
from suture.protocol.records import SiteRound


@dataclass(frozen=True)
class Undo:
    """The state before the last committed round, its number, and the site whose update has destroyed that."""

    round: int
    before: Packed
    site: str | None


@dataclass(frozen=True)
class Exchanges:
    """Assigns tasks to the sites and collects their answers, one exchange after the other.

    Attributes:
        ledgers: the newest digests of the sites' ledgers, which travel with the tasks.
    """

    plan: Plan
    schedule: Schedule
    collector: UpdateCollector
    ledgers: SiteLedgers

    def handshake(self, sites: list[str]) -> dict[str, Packed]:
        """Return the handshake task of every site, which requests its site info."""
        held, egress = self.ledgers.read(), self.plan.egress(Layout({}, {}))
        tasks = {site: TaskData("handshake", ledger=held.get(site)) for site in sites}
        return self.collector.open({site: AllowedReply(task, egress) for site, task in tasks.items()})

    def assign(
        self,
        task: Task,
        number: int,
        model: GlobalModel,
        registry: SiteRegistry,
        facts: ClassFacts,
        state: RunState,
        decisions: Decisions | None = None,
        masks: Mapping[str, MaskTask] | None = None,
        left_out: Collection[str] = (),
    ) -> dict[str, Packed]:
        """Return the task of each site that is not excluded.

        Args:
            number: the newest committed round.
            facts: of each class; they go down besides the model.
            decisions: by which the sites decide their test images.
            masks, left_out: see `Assigner`.
        """
        if task.name == "train":
            # Noise may begin with a job, and makes an update longer than all before.
            declared = ((site, member.protection) for site, member in registry.members.items())
            noisy = {site for site, own in declared if own.get("noise") or "epsilon" in own}
            bound = state.bound.in_phase(task.phase)
            largest = {site: of for site, of in bound.largest.items() if site not in noisy}
            self.collector.bound = replace(bound, factor=self.schedule.max_update, largest=largest)
        assigner = Assigner(
            self.plan,
            registry,
            model,
            number,
            {site: state.standings.of(site) for site in registry.members},
            state.holders,
            facts.tensors,
            ledgers=self.ledgers.read(),
            masks=masks,
            left_out=left_out,
        )
        if decisions:
            own = {site: decisions_of(decisions, registry, site) for site in registry.members}
            assigner = replace(assigner, decisions=own, rule=decisions.settings.rule)
        assigned = assigner.assign(task).items()
        return self.collector.open({site: one for site, one in assigned if site not in state.excluded})

    def close(self, missing: Mapping[str, str]) -> dict[str, SiteRound]:
        """End the open exchange, and keep the digests that sites have stated of their ledgers.

        Returns:
            a line for each site; see `UpdateCollector.close`.
        """
        lines = self.collector.close(missing)
        answers = self.collector.answers.items()
        self.ledgers.note(
            {s: r.ledger for s, r in answers if not isinstance(r, (Abstain, Masking)) and r.ledger}
        )
        return lines

    def undo(self, number: int, model: GlobalModel, state: RunState, states: Rounds) -> Undo | None:
        """Return how to undo the last committed round, if no site that had a part in it can train on it.

        The site with the largest update is excluded if that update explains it. If none does, it was the
        server's own step. What some sites claim of a model that another can train changes nothing.
        """
        unable = self.collector.abstained("non_finite_loss")
        site = untrainable(state.norms, unable)
        before = states.newest(number - 1) if site else None
        # An accepted update of another site shows that the model can be trained on, whatever some claim.
        if site is None or before is None or {*self.collector.accepted()} - {site}:
            return None
        # A weighted mean moves the model by no more than its updates together; what moved it further was the
        # server's own step. 1 % is for rounding.
        moved = distance(model, unpack_model(before[1]))
        explained = state.norms[site] > state.received and moved <= 1.01 * math.hypot(*state.norms.values())
        return Undo(*before, site if explained else None) if explained or {*state.norms} <= unable else None
