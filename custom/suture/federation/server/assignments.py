"""Assignments: what the server sends to each site for a task, and what the site may answer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Literal

from torch import Tensor

from suture.federation.plan import Plan
from suture.federation.server.registry import SiteRegistry
from suture.methods.base import GlobalModel
from suture.methods.sharing import layout_of
from suture.protocol.check import AllowedReply
from suture.protocol.decisions import Decision, Rule
from suture.protocol.egress import Egress, reorder_axis
from suture.protocol.messages import Labels, MaskTask, TaskData, TaskName

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
    def _exchanged(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
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
        shared, exchanged_head = self._exchanged
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
        _, head = self._exchanged
        return {**model.fixed, **({} if head else rows)}
