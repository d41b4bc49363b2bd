"""Simulated sites, each written to disk as a hospital would have it.

A simulated site is an ordinary site: a folder with a labels.csv that holds its own columns only, and a
suture.toml. Which site knows which classes is recorded in the run folder of the machine that simulates.

The kinds of sites are imported as they are first used: they import torch, and the names of jobs do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from suture.simulation.kinds import Simulation
    from suture.simulation.phantom_hospitals import PhantomSites
    from suture.simulation.study import StudySites

__all__ = ["PhantomSites", "Simulation", "StudySites"]


def __getattr__(name: str) -> Any:
    if name.startswith("_") or not name[:1].isupper():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from suture.simulation import kinds

    return getattr(kinds, name)
