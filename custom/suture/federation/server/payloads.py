"""What each site is sent for a task, and what it may answer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

from torch import Tensor

from suture.federation.server.registry import SiteRegistry
from suture.methods.base import GlobalModel, Method
from suture.methods.parameters import parts
from suture.models.classifier import Layout
from suture.protocol.check import Expectation
from suture.protocol.messages import Labels, Payload, TaskName

Assignments = dict[str, tuple[Payload, Expectation]]


def assignments(
    method: Method,
    registry: SiteRegistry,
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
    for site, member in sorted(registry.members.items()):
        rows, number = registry.rows_for(site, method.label_view), rounds[site]
        labels = registry.to_site(site, rows)
        payload = Payload(
            task,
            number,
            committed,
            phase,
            split,
            labels,
            shared,
            model.rows(rows) if crossing_head else {},
            {} if site in holders else for_good(method, model, rows, crosses=bool(crossing_head)),
            {name: tensor[model.where(rows)] for name, tensor in (class_tensors or {}).items()},
            best[site],
        )
        images = member.n.get("train", 0)
        expected = Expectation(
            task, number, committed, split, labels, member.own, egress, images, method.keep_local
        )
        asked[site] = (payload, expected)
    return asked


def for_good(method: Method, model: GlobalModel, rows: Labels, *, crosses: bool) -> dict[str, Tensor]:
    """What a site is sent once and then keeps.

    Args:
        rows: the classes that it is sent.
        crosses: whether the head crosses in each round; else its first rows become the site's own.
    """
    if method.share is not None:  # a site begins with a whole model of its own
        return {**model.fixed, **model.shared, **model.rows(rows)}
    return {**model.fixed, **({} if crosses else model.rows(rows))}
