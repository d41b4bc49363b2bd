"""Continuing an experiment: what must be as it was, and the best model where its file has gone."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from suture.core.errors import ConfigError, SutureError
from suture.core.validation import flat
from suture.federation.plan import Plan
from suture.federation.server.global_model import unpack_model
from suture.federation.server.selection import Best
from suture.federation.store import Rounds
from suture.methods.base import GlobalModel
from suture.protocol.packing import Packed, load

log = logging.getLogger(__name__)

_SAME = {
    "seed": "seed",
    "method": "method",
    "hyperparameters": "method",
    "model": "model",
    "augmentation": "augmentation",
}
"""The parts of a plan that a later job may not change, with the word that a job has for each."""


@dataclass(frozen=True)
class Begun:
    """Where an experiment stands that is continued.

    Attributes:
        round: that was committed last.
        header: of its state.
    """

    round: int
    model: GlobalModel
    header: Mapping[str, Any]

    @property
    def prior(self) -> str | None:
        """Digest of the frozen network that it was begun with; None without one, and in older states."""
        digest: str | None = self.header.get("registry", {}).get("prior")
        return digest


def begun(states: Rounds, plan: Plan) -> Begun | None:
    """The newest state of an experiment, None before there is one.

    Raises:
        ConfigError: it was begun with another plan; names the setting.
    """
    found = states.newest()
    if found is None:
        return None
    number, packed = found
    refuse_another(packed.header.get("plan", {}), begun_with(plan), plan.experiment)
    return Begun(number, unpack_model(packed), packed.header)


def begun_with(plan: Plan) -> dict[str, Any]:
    """What of a plan is kept with every state."""
    values = plan.to_dict()
    return {key: values[key] for key in _SAME}


def refuse_another(before: Mapping[str, Any], now: Mapping[str, Any], experiment: str) -> None:
    """Sees to it that an experiment is continued as it was begun; rounds and the schedule may change.

    Args:
        before, now: what `begun_with` gives, or a part of it.

    Raises:
        ConfigError: they differ; names the setting.
    """
    for part in (key for key in _SAME if key in before and key in now):
        was, has = (flat(_SAME[part], json.loads(json.dumps(plan[part]))) for plan in (before, now))
        for key in sorted(was.keys() | has.keys()):
            if was.get(key) != has.get(key):
                raise ConfigError(
                    f"the experiment {experiment!r} was begun with {key}={was.get(key)}, and this job has "
                    f"{key}={has.get(key)}; set it back, or begin a new experiment"
                )


def still_there(best: Best | None, states: Rounds, restored: int) -> Best | None:
    """The best round so far, if its model is on disk; else the restored one, until another is better."""
    if best is None or states.holds(best.round):
        return best
    log.warning(
        "%s holds no model of round %d, the best so far; round %d takes its place until another is better",
        *(states.folder, best.round, restored),
    )
    return Best(restored, -sys.float_info.max)


def read_best(states: Rounds, number: int) -> Packed:
    """The state of the best round.

    Raises:
        SutureError: its file is corrupt; says how to go on without it.
    """
    try:
        return load(states.kept(number))
    except SutureError as error:
        raise SutureError(
            f"{error}, and it is the selected round; delete the files of round {number} in "
            f"{states.folder} and continue the experiment: the newest round takes its place"
        ) from error
