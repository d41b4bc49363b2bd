"""What a person should know of a run and no figure shows, as codes and values: readers make the sentences."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise
from typing import Any

from suture.core.errors import nearest
from suture.core.labels import canonical
from suture.federation.plan import Plan
from suture.federation.server.global_model import classifier
from suture.federation.server.registry import SiteRegistry
from suture.federation.server.state import RunState
from suture.methods.base import ClassFacts, GlobalModel
from suture.models import encoder_of
from suture.privacy.robust import RobustMerge
from suture.protocol.records import Note

SHOWN = 200
"""Notes of one kind: classes times sites may be millions."""


def notes_at_start(
    state: RunState, refused: Mapping[str, str], registry: SiteRegistry, label_map: Mapping[str, str]
) -> Iterator[Note]:
    """Yield what is known before the first round of a job.

    Args:
        refused: why sites do not take part.
        label_map: of the job.
    """
    # An update of the software must not end an experiment of weeks. But its rounds are then of two codes.
    for (_, before), (number, code) in pairwise(state.codes):
        yield Note("code_changed", {"round": number, "before": before, "after": code})
    yield from exclusion_notes(state.excluded)
    yield from ledger_notes(refused)
    yield from _class_notes(registry, label_map)
    for name in registry.labels[:SHOWN]:
        if sites := [site for site, member in registry.members.items() if name in member.one_sided]:
            yield Note("one_sided", {"label": name, "sites": sites})


def method_notes(model: GlobalModel, plan: Plan, facts: ClassFacts) -> Iterator[Note]:
    """Yield the notes of a run at its start: on the model's pretraining, and the method's own.

    FedBN+ freezes the values of pretraining; without pretraining, each batch norm stays at mean 0 and
    variance 1. MetaFL leaves a small network no other choice: hence a note, and no error.
    """
    spec, policy = plan.model, plan.method.sharing.batch_norm
    entry = encoder_of(spec)
    if spec.pretrained and entry.reads == "image" and entry.size not in (None, spec.size):
        yield Note("pretrained_size", {"model": spec.name, "pretrained": entry.size, "size": spec.size})
    if policy == "average" or entry.reads != "image":
        pass
    elif not classifier(model, plan).norm_names:
        yield Note("no_batch_norm", {"model": spec.name, "policy": policy})
    elif policy == "frozen" and not spec.pretrained:
        yield Note("frozen_batch_norm", {"model": spec.name})
    yield from (Note("method", {"text": text}) for text in facts.notes)


def secure_notes(plan: Plan, owners: Mapping[str, Collection[str]]) -> Iterator[Note]:
    """Yield that updates are masked, and the classes that the sites which annotate them alone could learn.

    Args:
        owners: the sites that annotate each class.
    """
    if plan.secure_aggregation is None:
        return
    fewest = plan.secure_aggregation.fewest
    yield Note("experimental")
    if few := [name for name, sites in owners.items() if len(sites) < fewest]:
        yield Note("few_owners", {"fewest": fewest, "labels": few[:SHOWN]})
    yield Note("masked")


def unprotected_note(robust: RobustMerge, classes: Collection[str], round_: int | None = None) -> list[Note]:
    """Return a note on the classes whose rows too few sites send for a robust merge; "" are shared tensors.

    Args:
        round_: the round in which it was so, because sites were missing; None at the start.
    """
    values: dict[str, Any] = {"kind": robust.kind, "fewest": robust.fewest, "round": round_}
    values |= {"labels": sorted(classes)[: SHOWN + 1]}
    return [Note("unprotected", values)] if classes else []


def _class_notes(registry: SiteRegistry, label_map: Mapping[str, str]) -> Iterator[Note]:
    """Yield each class whose codes have shown what it is, and the spellings that no site has."""
    mapped = {canonical(spelling): canonical(name) for spelling, name in label_map.items()}
    notes = [
        Note("class_by_code", {"site": site, "own": own, "label": name})
        for site, member in registry.members.items()
        for own, name in zip(member.own, member.names, strict=True)
        if mapped.get(canonical(own), canonical(own)) != name
    ]
    yield from notes[:SHOWN]
    if len(notes) > SHOWN:
        yield Note("more_by_code", {"number": len(notes) - SHOWN})
    for spelling in label_map:
        if canonical(spelling) not in registry.names:
            yield Note(
                "unused_spelling", {"spelling": spelling, "instead": nearest(spelling, registry.names)}
            )


def ledger_notes(reasons: Mapping[str, str]) -> list[Note]:
    """Return a note on every site that abstains because its ledger is not whole.

    Args:
        reasons: why sites do not take part, or did not in a round.
    """
    return [Note("ledger", {"site": s}) for s, reason in reasons.items() if reason.startswith("ledger (")]


def older_state_notes(round_: int, states: Mapping[str, int], sent: Mapping[str, int]) -> list[Note]:
    """Return a note on every site that has trained from an older state than that of its newest update.

    Args:
        states: round of the state from which each site trained; 0 where it had none.
        sent: round of the newest of each site's updates that was taken.
    """
    return [
        Note("older_state", {"site": site, "round": round_, "state": state, "sent": sent[site]})
        for site, state in states.items()
        if state < sent.get(site, 0)
    ]


def exclusion_notes(excluded: Mapping[str, str]) -> list[Note]:
    """Return a note on every site that takes no further part."""
    return [Note("excluded", {"site": site, "why": why}) for site, why in excluded.items()]
