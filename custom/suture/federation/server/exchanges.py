"""The exchanges of a run: each site is assigned its task, and its answer is collected and checked.

`Assigner` makes what the server sends to each site, with what the site may answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Literal

from torch import Tensor

from suture.federation.plan import Plan, Schedule
from suture.federation.server.collector import UpdateCollector
from suture.federation.server.decisions import decisions_of
from suture.federation.server.global_model import unpack_model
from suture.federation.server.norms import distance, untrainable
from suture.federation.server.record import SiteLedgers
from suture.federation.server.registry import SiteRegistry
from suture.federation.server.state import RunState
from suture.federation.state_files import Rounds
from suture.methods.base import ClassFacts, GlobalModel, layout_of
from suture.models.classifier import Layout
from suture.protocol.check import AllowedReply
from suture.protocol.decisions import Decision, Decisions, Rule
from suture.protocol.egress import Egress, reorder_axis
from suture.protocol.messages import Abstain, Labels, Masking, MaskTask, TaskData, TaskName
from suture.protocol.packing import Packed
from suture.protocol.records import SiteRound

_Rows = tuple[dict[str, Tensor], dict[str, Tensor]]


@dataclass(frozen=True)
class Task:
    """A task for all sites.

    Attributes:
        round: the round to train, or that of the model to evaluate; None where each site evaluates the model
            of its own best round.
        phase: name of the phase.
        split: the data to evaluate on.
    """

    name: TaskName
    round: int | None
    phase: str
    split: Literal["validation", "test"] = "validation"


@dataclass(frozen=True)
class Assigner:
    """Makes the assignments of the sites from one global model.

    Attributes:
        model: its shared tensors go to all sites, its rows to the sites that may see them.
        committed: the newest committed round.
        best: the best round so far of each site; 0 while there is none.
        holders: the sites that already hold the tensors that are sent only once.
        facts: of each class, in the order of the registry's classes; they go down besides the channels.
        decisions: by what each site decides its classes, in its own names.
        rule: see `TaskData`.
        ledgers: the newest digest of each site's ledger.
        masks: the step of secure aggregation of each site that takes part; None where updates are not masked.
        left_out: classes that no site trains in this task.
    """

    plan: Plan
    registry: SiteRegistry
    model: GlobalModel
    committed: int
    best: Mapping[str, int]
    holders: Collection[str]
    facts: Mapping[str, Tensor] = field(default_factory=dict)
    decisions: Mapping[str, Mapping[str, Decision]] = field(default_factory=dict)
    rule: Rule = "sensitivity"
    ledgers: Mapping[str, str] = field(default_factory=dict)
    masks: Mapping[str, MaskTask] | None = None
    left_out: Collection[str] = ()

    def assign(self, task: Task) -> dict[str, AllowedReply]:
        """Return the task of every site in the order of their names, with what it may answer.

        A model of an earlier round may lack classes that have joined since: their rows are left out, and so
        is a site that would see none.
        """
        # Sites that see the same classes share the tensors: memory grows with the sets of classes.
        assignments, rows_of = {}, cache(self._rows)
        known = frozenset(self.model.labels).difference(self.left_out)
        for site, member in sorted(self.registry.members.items()):
            rows = self.registry.rows_for(site, self.plan.method.labels.view)
            rows = tuple(name for name in rows if name in known)
            if not rows or (self.masks is not None and site not in self.masks):
                continue
            own, images = self._task(task, site, rows, rows_of), member.n.get("train", 0)
            assignments[site] = AllowedReply(own, self._egress, member.own, images)
        return assignments

    @cached_property
    def _exchange(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The shared tensors, and the head's rows, as far as they are exchanged in each round."""
        return self.plan.method.sharing.parts(self.model.shared, self.model.head)

    @cached_property
    def _egress(self) -> Egress:
        return self.plan.egress(layout_of(self.model, self.plan.method))

    def _rows(self, labels: Labels) -> _Rows:
        """Return the head's rows of some classes, and what goes down besides: the facts and the channels."""
        model, every = self.model, self.registry.labels
        facts, down = self._egress.forms("facts"), self._egress.forms("down")
        told = {name: reorder_axis(facts[name], tensor, every, labels) for name, tensor in self.facts.items()}
        for name, form in down.items():
            told[name] = reorder_axis(form, model.channels[name], model.labels, labels)
        return model.rows(labels), told

    def _task(self, task: Task, site: str, rows: Labels, rows_of: Callable[[Labels], _Rows]) -> TaskData:
        shared, exchanged_head = self._exchange
        head, channels = rows_of(rows)
        return TaskData(
            task.name,
            self.best[site] if task.round is None else task.round,
            self.committed,
            task.phase,
            task.split,
            self.registry.to_site(site, rows),
            shared,
            head if exchanged_head else {},
            {} if site in self.holders else self._sent_once(head),
            channels,
            self.best[site],
            dict(self.decisions.get(site, {})),
            self.rule,
            self.ledgers.get(site),
            self.masks[site] if self.masks is not None else None,
        )

    def _sent_once(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what a site receives once and then keeps: its local parameters at the beginning.

        Args:
            rows: the head's rows of the classes that it may see.
        """
        model = self.model
        if self.plan.method.sharing.share is not None:  # a site begins with a whole model of its own
            return {**model.fixed, **model.shared, **rows}
        _, head = self._exchange
        return {**model.fixed, **({} if head else rows)}


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
            site_decisions = {site: decisions_of(decisions, registry, site) for site in registry.members}
            assigner = replace(assigner, decisions=site_decisions, rule=decisions.settings.rule)
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
