"""Simulated sites, each written to disk as a hospital would have it.

A simulated site is an ordinary site: a folder with a labels.csv that holds its own columns only, and a
suture.toml. Which site knows which classes is recorded in the run folder of the machine that simulates.
"""

from __future__ import annotations

from suture.simulation.chest import ChestSites, NihSites
from suture.simulation.flamby import AttributeSites, FlambySites
from suture.simulation.hyperkvasir import HyperKvasirSites
from suture.simulation.isic import IsicSites
from suture.simulation.openi import OpeniSites
from suture.simulation.phantom_hospitals import PhantomSites
from suture.simulation.single_target import SingleTargetSites
from suture.simulation.study import StudySites

Simulation = (
    PhantomSites
    | NihSites
    | ChestSites
    | IsicSites
    | HyperKvasirSites
    | FlambySites
    | AttributeSites
    | OpeniSites
    | SingleTargetSites
    | StudySites
)

__all__ = [
    "AttributeSites",
    "ChestSites",
    "FlambySites",
    "HyperKvasirSites",
    "IsicSites",
    "NihSites",
    "OpeniSites",
    "PhantomSites",
    "Simulation",
    "SingleTargetSites",
    "StudySites",
]
