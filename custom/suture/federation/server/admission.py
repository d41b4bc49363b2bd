"""Who can take part, and what is written down about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from suture.core.errors import FederationError
from suture.federation.plan import Plan, Quorum, needed
from suture.federation.server.collector import Line, told
from suture.federation.server.global_model import classifier
from suture.federation.server.record import Record
from suture.federation.server.registry import Member, SiteRegistry
from suture.methods.base import ClassFacts, GlobalModel
from suture.models.norm import norm_names
from suture.protocol.messages import SiteInfo


def admitted(
    infos: Mapping[str, SiteInfo], lines: dict[str, Line], min_sites: Quorum | None
) -> dict[str, SiteInfo]:
    """The sites that can take part.

    Args:
        hellos: of the sites that introduced themselves.
        lines: one for each site that was asked; that of a site without training images is changed.
        min_sites: of `Schedule`.

    Raises:
        FederationError: there are too few; says why each one is missing.
    """
    for site in [s for s, info in infos.items() if not info.n.get("train")]:
        lines[site] |= {"status": "rejected", "reason": "it has no training images"}
    welcomed = {s: info for s, info in infos.items() if info.n.get("train")}
    if len(welcomed) < needed(min_sites, len(lines)):
        refused = {s: line["reason"] for s, line in lines.items() if s not in welcomed}
        raise FederationError(f"the federation cannot start; {told(refused)}")
    return welcomed


def introduce(
    record: Record,
    registry: SiteRegistry,
    known: Mapping[str, Member],
    round_: int,
    rounds: int,
    added: Sequence[str],
    refused: Mapping[str, str],
) -> None:
    """Writes down who takes part and, when a run continues, what is new.

    Args:
        record: its notes are told to whoever follows the run.
        known: the sites whose labels these are.
        added: classes that the model did not have before.
        refused: why other sites do not take part.
    """
    record.update(
        status="running",
        rounds=rounds,
        labels=list(registry.labels),
        sites={s: {"labels": list(m.names), "n": dict(m.n)} for s, m in known.items()},
        threads={"server": 1, **{s: m.threads for s, m in registry.members.items()}},
        protection={s: dict(m.protection) for s, m in registry.members.items() if m.protection},
        **({"new_labels": list(added)} if added else {}),
    )
    record.event(
        "begin",
        round=round_,
        rounds=rounds,
        sites=sorted(registry.members),
        labels=list(registry.labels),
        refused=dict(refused),
        new_labels=list(added),
    )
    for note in record.run["notes"]:
        record.event("note", text=note)


def held_prior(plan: Plan, registry: SiteRegistry) -> dict[str, str]:
    """The name and digest of the frozen network that all sites hold; empty where the method has none."""
    if plan.method.prior is None or registry.prior is None:
        return {}
    return {"name": plan.method.prior.name, "digest": registry.prior}


def noted(model: GlobalModel, plan: Plan, facts: ClassFacts) -> list[str]:
    """Sentences for whoever reads of the run: of batch norm that rests untrained, and the method's own.

    FedBN+ freezes the values of pretraining; without these each batch norm stays at mean 0 and variance 1, as
    if there were none. MetaFL leaves a small network no other choice: hence a note and no refusal.
    """
    if plan.method.batch_norm != "frozen" or plan.model.weights or not norm_names(classifier(model, plan)):
        return list(facts.notes)
    idle = (
        f"Batch norm is frozen (FedBN+), and {plan.model.name} was not pretrained: it stays at mean 0 and "
        "variance 1, which normalises nothing. Set model.weights, or another batch_norm."
    )
    return [idle, *facts.notes]
