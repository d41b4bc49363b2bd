"""Three made-up hospitals."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from suture.core.validation import STRICT
from suture.data.config import DataConfig
from suture.methods.base import Method
from suture.simulation.phantom_hospitals import HOSPITALS, PhantomSpec, write_hospitals
from suture.simulation.writing import write_sites


@dataclass(frozen=True, config=STRICT)
class PhantomSites:
    """Three made-up hospitals with phantoms of their own; see `suture.simulation.phantom_hospitals`.

    Attributes:
        images: of each site.
        held_out: fully labelled images at the server.
        contrast: how strongly findings are drawn; lower is harder.
        shift: how different the sites' scanners are; 0 makes them one.
        every_label: whether each site annotates every finding: the reference for partial labels.
        seed: of the images; None takes the job's.
        learning_rates: of sites that have one of their own.
    """

    images: Annotated[int, Field(ge=20)] = 1500
    held_out: Annotated[int, Field(ge=30)] = 1500
    contrast: Annotated[float, Field(gt=0)] = 1.0
    shift: Annotated[float, Field(ge=0)] = 1.0
    every_label: bool = False
    seed: Annotated[int, Field(ge=0)] | None = None
    learning_rates: dict[str, float] = Field(default_factory=dict)

    def prepare(self, folder: Path, runs: Path, seed: int, method: type[Method] | Method) -> list[str]:
        """Writes a folder for each site: its images, its labels.csv and its suture.toml.

        Args:
            folder: where to.
            runs: where the server keeps its experiments.
            seed: of the job.
            method: what it needs, the sites have: permission to see every class name, or every label.

        Returns:
            the names of the sites, without the server's.
        """
        spec = PhantomSpec(
            self.images,
            self.held_out,
            contrast=self.contrast,
            shift=self.shift,
            every_label=self.every_label or method.every_label,
        )
        tables = write_hospitals(folder, spec, seed if self.seed is None else self.seed)
        # Where a reference is given every label, the site still says which ones it annotates.
        own = {hospital.name: hospital.labels for hospital in HOSPITALS} if method.every_label else {}
        data = {
            name: DataConfig(
                dataset="hospital", root=folder / name / "images", table=table, labels=own.get(name)
            )
            for name, table in tables.items()
        }
        return write_sites(folder, runs, data, method, self.learning_rates)
