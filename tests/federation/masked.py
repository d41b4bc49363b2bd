"""Federations with secure aggregation, and how far their models are from those of plain ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from parties import history

from suture.federation.server.server import Server
from suture.privacy.secure_aggregation import SecureAggregation

BOTH = ("Mass", "Nodule")
FOUR = {"alpha": BOTH, "beta": BOTH, "delta": ("Mass",), "gamma": BOTH}
SAME = dict.fromkeys(FOUR, BOTH)


def secured(federation: Any, colluders: int = 0) -> Any:
    plan = replace(federation.plan, secure_aggregation=SecureAggregation(colluders))
    return replace(federation, plan=plan)


def plain(federation: Any) -> Any:
    return replace(federation, plan=replace(federation.plan, secure_aggregation=None))


def furthest(one: Server, other: Server) -> float:
    a, b = ({**s.model.shared, **s.model.head} for s in (one, other))
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def accepted(server: Server) -> list[str]:
    """Of each attempt, by rounds, the first letters of the sites in its sum; "" where the model stayed."""
    return [
        "".join(site[0] for site, of in line["sites"].items() if of["status"] == "accepted")
        if line["status"] == "committed"
        else ""
        for line in sorted(history(server), key=lambda line: (line["round"], line["status"] == "committed"))
    ]
