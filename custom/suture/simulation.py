"""Sites for a simulation, each written to disk as a hospital would have it.

A simulated site is an ordinary site: a folder with a labels.csv that holds its own columns only, and a
suture.toml. Who knows what stays in the run folder of the machine that starts the simulation.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from suture.config import (
    DataConfig,
    PrivacyConfig,
    SiteConfig,
    StorageConfig,
    TrainingConfig,
    write_site_config,
)
from suture.data import load_table
from suture.data.partition import SERVER, nih_sites, write_site
from suture.data.phantom_sites import PhantomSpec, write_hospitals
from suture.errors import ConfigError
from suture.messages import STRICT
from suture.methods.contract import LabelView


@dataclass(frozen=True, config=STRICT)
class PhantomSites:
    """Three made-up hospitals with phantoms of their own; see `suture.data.phantom_sites`.

    Attributes:
        images: of each site.
        held_out: fully labelled images at the server.
        contrast: how strongly findings are drawn; lower is harder.
        shift: how different the sites' scanners are; 0 makes them one.
        every_label: whether each site annotates every finding: the reference for partial labels.
        seed: of the images; None takes the job's.
    """

    images: Annotated[int, Field(ge=20)] = 1500
    held_out: Annotated[int, Field(ge=30)] = 1500
    contrast: Annotated[float, Field(gt=0)] = 1.0
    shift: Annotated[float, Field(ge=0)] = 1.0
    every_label: bool = False
    seed: Annotated[int, Field(ge=0)] | None = None

    def prepare(self, folder: Path, runs: Path, seed: int, view: LabelView) -> list[str]:
        """Writes a folder for each site: its images, its labels.csv and its suture.toml.

        Args:
            folder: where to.
            runs: where the server keeps its experiments.
            seed: of the job.
            view: the label view that the method needs; a simulated site permits it.

        Returns:
            the names of the sites, without the server's.
        """
        spec = PhantomSpec(
            self.images,
            self.held_out,
            contrast=self.contrast,
            shift=self.shift,
            every_label=self.every_label,
        )
        tables = write_hospitals(folder, spec, seed if self.seed is None else self.seed)
        for name, table in tables.items():
            data = DataConfig(dataset="hospital", root=folder / name / "images", table=table)
            _write(folder / name, data, runs if name == SERVER else folder / name / "state", view)
        return [name for name in tables if name != SERVER]


@dataclass(frozen=True, config=STRICT)
class NihSites:
    """NIH ChestX-ray14 dealt to K sites with the class lists of Surgical Aggregation 2024.

    Attributes:
        clients: K; 2, 3, 4, 5, 6, 8 or 10.
        root: folder of Data_Entry_2017*.csv and the images; by default nih_cxr14_64px in SUTURE_DATA.
        seed: of the split by patient and of the sites' patient blocks.
    """

    clients: Annotated[int, Field(ge=1)] = 2
    root: str | None = None
    seed: Annotated[int, Field(ge=0)] = 1337

    def prepare(self, folder: Path, runs: Path, seed: int, view: LabelView) -> list[str]:  # noqa: ARG002
        """Writes each site, and the server's held-out rows; see `PhantomSites.prepare`."""
        root = self._root()
        tables = sorted(root.glob("Data_Entry_2017*.csv*"))
        if not tables:
            raise ConfigError(
                f"{root} has no Data_Entry_2017*.csv; name the folder with --set simulation.root=DIR"
            )
        pooled = load_table(
            DataConfig(
                dataset="nih",
                root=_images(root),
                table=tables[0],
                split="patients",
                seed=self.seed,
                partial=True,
            )
        )
        sites = nih_sites(pooled, self.clients, self.seed)
        for name, table in sites.items():
            write_site(folder / name, table, table.labels)
            data = DataConfig(dataset="hospital", root=pooled.root, table=folder / name / "labels.csv")
            _write(folder / name, data, runs if name == SERVER else folder / name / "state", view)
        return [name for name in sites if name != SERVER]

    def _root(self) -> Path:
        if self.root:
            return Path(self.root).expanduser().resolve()
        if shared := os.environ.get("SUTURE_DATA"):
            return (Path(shared) / "nih_cxr14_64px").resolve()
        raise ConfigError(
            "where is NIH ChestX-ray14? Set SUTURE_DATA to the folder that holds nih_cxr14_64px, or name the "
            "folder of Data_Entry_2017*.csv with --set simulation.root=DIR"
        )


def _images(root: Path) -> Path:
    """The images of NIH's folder: its one archive, its folder `images`, or all of it."""
    return next((p for p in (root / "images.tar", root / "images") if p.exists()), root)


def _write(folder: Path, data: DataConfig, state: Path, view: LabelView) -> None:
    """A simulated site's own configuration; its data are public, so it withholds no count."""
    config = SiteConfig(
        data=data,
        training=TrainingConfig(),
        privacy=PrivacyConfig(label_view=view, min_count=0),
        storage=StorageConfig(state=state, cache=folder / "cache"),
    )
    write_site_config(folder / "suture.toml", config)
