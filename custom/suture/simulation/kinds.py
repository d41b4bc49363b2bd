"""What simulated sites are, and every kind of them."""

from __future__ import annotations

from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

from suture.core.entry_points import Registry
from suture.methods.base import Method
from suture.simulation.study import StudySites


@runtime_checkable
class Simulation(Protocol):
    """Simulated sites: a frozen dataclass, whose fields are the settings ``simulation.…`` of a job.

    Sites with tasks for fine-tuning name them in a field `targets`; those whose images are drawn, and show no
    patients, have `synthetic` true.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def prepare(self, folder: Path, runs: Path, seed: int, method: Method) -> list[str]:
        """Write the folder of each site, and the server's; return the names of the sites.

        Args:
            folder: gets a folder for each site; see `suture.simulation.sites`.
            runs: where the server keeps its experiments.
            seed: of the job.
            method: the sites permit it what it needs to see.

        Raises:
            SutureError: the data are missing, or do not fit the settings.
        """


SIMULATIONS: Registry[type[Simulation]] = Registry(
    "suture.simulations",
    "kind of simulated sites",
    {"StudySites": StudySites},
    "a dataclass with a method `prepare`",
    lambda kind: isinstance(kind, type) and is_dataclass(kind) and hasattr(kind, "prepare"),
)
"""The kinds of simulated sites, by the name of their class."""
