"""Notes of a run for the reader of its report: what a person should know and no figure shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from suture.core.labels import canonical
from suture.federation.plan import Plan
from suture.federation.server.global_model import classifier
from suture.federation.server.registry import SiteRegistry
from suture.federation.server.state import RunState
from suture.methods.base import ClassFacts, GlobalModel

_SHOWN = 200
"""Notes of one kind: classes times sites may be millions."""


def notes_at_start(
    state: RunState, refused: Mapping[str, str], registry: SiteRegistry, label_map: Mapping[str, str]
) -> list[str]:
    """Return what is known before the first round of a job.

    Args:
        refused: why sites do not take part.
        label_map: of the job.
    """
    notes = [*_code_notes(state.codes), *exclusion_notes(state.excluded), *ledger_notes(refused)]
    return [*notes, *_class_notes(registry, label_map)]


def method_notes(model: GlobalModel, plan: Plan, facts: ClassFacts) -> list[str]:
    """Return the notes of a run at its start: on batch norm that stays untrained, and the method's own.

    FedBN+ freezes the values of pretraining; without pretraining, each batch norm stays at mean 0 and
    variance 1. MetaFL leaves a small network no other choice: hence a note, and no error.
    """
    if plan.method.batch_norm != "frozen" or plan.model.weights or not classifier(model, plan).norm_names:
        return list(facts.notes)
    untrained = (
        f"Batch norm is frozen (FedBN+), and {plan.model.name} was not pretrained: it keeps mean 0 and "
        "variance 1, so it does not normalise. Set model.weights, or another batch_norm."
    )
    return [untrained, *facts.notes]


def _class_notes(registry: SiteRegistry, label_map: Mapping[str, str]) -> list[str]:
    """Return a note on every class that a site calls differently, where its codes have shown what it is."""
    mapped = {canonical(spelling): canonical(name) for spelling, name in label_map.items()}
    found = [
        f"By its codes, {own!r} of {site} is the class {name!r}."
        for site, member in registry.members.items()
        for own, name in zip(member.own, member.names, strict=True)
        if mapped.get(canonical(own), canonical(own)) != name
    ]
    more = [f"{len(found) - _SHOWN} more classes of sites were matched by their codes."]
    return found[:_SHOWN] + (more if len(found) > _SHOWN else [])


def _code_notes(codes: Sequence[tuple[int, str]]) -> list[str]:
    """Return a note on every change of the code during an experiment.

    An update of the software must not end an experiment of weeks. But its rounds are then of two codes.

    Args:
        codes: the number of rounds before, and the hash of the code from there on.
    """
    return [
        (
            f"The code changed after round {number}, from {before} to {code}: earlier and later rounds were "
            "computed by different code."
        )
        for (_, before), (number, code) in pairwise(codes)
    ]


def ledger_notes(reasons: Mapping[str, str]) -> list[str]:
    """Return a note on every site that abstains because its ledger is not whole.

    Args:
        reasons: why sites do not take part, or did not in a round.
    """
    return [
        (
            f"{site} releases nothing: lines of its ledger are missing or were changed. Its administrator "
            "can restore the newest copy, or accept the gap with suture ledger --accept."
        )
        for site, reason in reasons.items()
        if reason.startswith("ledger (")
    ]


def older_state_notes(round_: int, states: Mapping[str, int], sent: Mapping[str, int]) -> list[str]:
    """Return a note on every site that has trained from an older state than that of its newest update.

    Args:
        states: round of the state from which each site trained; 0 where it had none.
        sent: round of the newest of each site's updates that was taken.
    """
    return [
        (
            f"{site} trained round {round_} "
            + (f"from its state of round {state}" if state else "without a state")
            + f", although it had sent an update of round {sent[site]}: its state was lost, damaged or "
            "restored from a backup. The model therefore differs from that of an undisturbed run."
        )
        for site, state in states.items()
        if state < sent.get(site, 0)
    ]


def exclusion_notes(excluded: Mapping[str, str]) -> list[str]:
    """Return a note on every site that takes no further part."""
    return [f"{site} left this experiment: {why}." for site, why in excluded.items()]
