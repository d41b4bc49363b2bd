"""What each site is sent for a task, and what it may answer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

from torch import Tensor

from suture.check import Expectation
from suture.messages import Payload, TaskName
from suture.methods.contract import GlobalModel, Method
from suture.methods.crossing import parts
from suture.models.classifier import Layout
from suture.server.roster import Roster

Assignments = dict[str, tuple[Payload, Expectation]]


def assignments(
    method: Method,
    roster: Roster,
    model: GlobalModel,
    task: TaskName,
    rounds: Mapping[str, int],
    *,
    committed: int,
    best: Mapping[str, int],
    holders: Collection[str],
    phase: str,
    class_tensors: Mapping[str, Tensor] | None = None,
    split: Literal["validation", "test"] = "validation",
) -> Assignments:
    """The payload of every site, in the order of their names, with what it is expected to answer.

    Args:
        model: its shared tensors go to all, its rows to the sites that may see them.
        rounds: for each site the round to be trained, or that of the model to be measured.
        committed: the newest committed round.
        best: for each site the best round so far.
        holders: the sites that hold what is sent only once.
        class_tensors: what else is said of each class, in the order of the model's.
    """
    shared, crossing_head = parts(method, model.shared, model.head)
    egress = method.egress(Layout.of(shared, crossing_head))
    asked: Assignments = {}
    for site, member in sorted(roster.members.items()):
        rows = roster.rows_for(site, method.label_view)
        labels = roster.to_site(site, rows)
        head, fixed = model.rows(rows), dict(model.fixed)
        if method.share is not None:  # a site begins with a whole model of its own
            fixed |= {**model.shared, **head}
        if not crossing_head:  # the initial rows are sent once and become the site's own
            head, fixed = {}, fixed | head
        payload = Payload(
            task,
            rounds[site],
            committed,
            phase,
            split,
            labels,
            shared,
            head,
            {} if site in holders else fixed,
            {name: tensor[model.where(rows)] for name, tensor in (class_tensors or {}).items()},
            best[site],
        )
        asked[site] = (
            payload,
            Expectation(
                task,
                rounds[site],
                committed,
                split,
                labels,
                member.own,
                egress,
                member.n.get("train", 0),
                method.keep_local,
            ),
        )
    return asked
