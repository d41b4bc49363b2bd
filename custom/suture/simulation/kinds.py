"""Every kind of simulated sites."""

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
