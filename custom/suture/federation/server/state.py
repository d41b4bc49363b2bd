"""The state of a run at the server: what it commits with each round, and what a later job continues from."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

from pydantic import Field, FiniteFloat
from pydantic.dataclasses import dataclass as validated

from suture.core.errors import ConfigError, as_word
from suture.core.validation import OPEN, flat, parse
from suture.federation.plan import Plan
from suture.federation.server.global_model import pack_model, read_model
from suture.federation.server.norms import NormBound
from suture.federation.server.registry import SiteRegistry
from suture.federation.server.selection import ModelSelection
from suture.federation.state_files import Rounds
from suture.methods.base import GlobalModel
from suture.protocol.messages import Codes, Count, Label, Word
from suture.protocol.packing import Packed
from suture.protocol.records import Round


@validated(frozen=True, config=OPEN)
class RunState:
    """What the server commits with the model of a round.

    Attributes:
        standings: the best round so far.
        pending: the last round's line of history.jsonl, until its validation losses are known.
        holders: the sites that hold the tensors that are sent only once.
        codes: the code of the rounds after a number, as often as it changed.
        norms: of the updates that the model was made of.
        received: the norm of the model that they began from.
        bound: of the norms of updates.
        excluded: the sites that take no further part, with the reason.
        sent: the newest committed round of which each site's update was taken.
    """

    standings: ModelSelection
    pending: Round | None
    holders: frozenset[str]
    codes: Annotated[tuple[tuple[Count, Word], ...], Field(min_length=1)]
    norms: dict[str, FiniteFloat] = Field(default_factory=dict)
    received: FiniteFloat = 0.0
    bound: NormBound = NormBound()
    excluded: dict[str, str] = Field(default_factory=dict)
    sent: dict[str, Count] = Field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for the header of the state."""
        return asdict(self) | {"holders": sorted(self.holders)}

    @classmethod
    def from_dict(cls, header: Mapping[str, Any], where: str) -> RunState:
        """Read it from the header of a state.

        Raises:
            ConfigError: it is something else; `where` names it.
        """
        return parse(cls, header, where)


@validated(frozen=True, config=OPEN)
class _BegunMember:
    """A site of the experiment so far, with the federation's names of its classes."""

    names: tuple[Label, ...] = ()


@validated(frozen=True, config=OPEN)
class _Began:
    """What the experiment began with: the digest of its frozen network, None without one; and what sites have
    stated so far, the codes of its classes and, by site, the federation's names of their own.
    """

    prior: str | None
    codes: dict[Label, Codes] = Field(default_factory=dict)
    members: dict[str, _BegunMember] = Field(default_factory=dict)

    def owners(self) -> dict[str, set[str]]:
        """Return the sites of each class so far."""
        found: dict[str, set[str]] = {}
        for site, member in self.members.items():
            for name in member.names:
                found.setdefault(name, set()).add(site)
        return found


@validated(frozen=True, config=OPEN)
class _Begun:
    """What the header of a state says of the experiment as a whole."""

    plan: dict[str, Any]
    registry: _Began


@dataclasses.dataclass(frozen=True)
class Restored:
    """Where an experiment stands that continues.

    Attributes:
        round: the newest committed round.
        model, state: of that round.
        began: what the experiment began with.
    """

    round: int
    model: GlobalModel
    state: RunState
    began: _Began


def pack_state(model: GlobalModel, state: RunState, registry: SiteRegistry, plan: Plan) -> Packed:
    """Return the state of a round as it is stored."""
    whole = {"plan": fixed_settings(plan), "registry": registry.to_dict()}
    return pack_model(model, {**whole, **state.to_dict()})


def read_newest(states: Rounds, plan: Plan) -> Restored | None:
    """Read the newest state of an experiment; None before there is one.

    Raises:
        ConfigError: the experiment began with other settings, names the first; or with another version of
            Suture; or the state is not one of a server.
        SutureError: every state is corrupt.
    """
    found = states.newest()
    if found is None:
        return None
    number, packed = found
    where = f"the state of round {number} in {states.folder}"
    begun, state = parse(_Begun, packed.header, where), RunState.from_dict(packed.header, where)
    check_unchanged(begun.plan, fixed_settings(plan), plan.experiment)
    return Restored(number, read_model(packed, plan, where), state, begun.registry)


_FIXED = ("seed", "method", "hyperparameters", "model", "augmentation", "transport", "secure_aggregation")
"""The parts of a plan that a later job of the experiment may not change."""


def fixed_settings(plan: Plan) -> dict[str, Any]:
    """Return the settings of a plan that later jobs of the experiment may not change."""
    values = plan.to_dict()
    return {key: values[key] for key in _FIXED}


def check_unchanged(before: Mapping[str, Any], now: Mapping[str, Any], experiment: str) -> None:
    """Check that an experiment continues with the settings that it began with.

    Args:
        before, now: what `fixed_settings` returns, or a part of it.

    Raises:
        ConfigError: they differ; names the setting.
    """
    for part in (key for key in _FIXED if key in before and key in now):
        word = "method" if part == "hyperparameters" else part  # as in a job
        was, has = (flat(word, json.loads(json.dumps(plan[part]))) for plan in (before, now))
        for key in sorted(was.keys() | has.keys()):
            if was.get(key) != has.get(key):
                raise ConfigError(
                    f"the experiment {experiment!r} was begun with {as_word(key)}={as_word(was.get(key))}, "
                    f"and this job has {as_word(key)}={as_word(has.get(key))}; set it back, or begin a new "
                    "experiment"
                )
