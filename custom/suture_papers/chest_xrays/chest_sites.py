"""NIH ChestX-ray14 and CheXpert as two sites: the real-world experiments of Surgical Aggregation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass as validated

from suture.core.errors import ConfigError
from suture.core.validation import JOB_PATH, LARGEST_SEED, LIMIT, STRICT
from suture.data.readers import DataConfig, load_table
from suture.execution.sites import Destination, SimulatedSites, write_sites
from suture.methods.base import Method
from suture_papers.chest_xrays.chexpert import LABELS as CHEXPERT
from suture_papers.chest_xrays.chexpert import ChexpertConfig
from suture_papers.chest_xrays.nih import LABELS as NIH
from suture_papers.chest_xrays.nih import NihConfig
from suture_papers.partition import PartitionedSites, subset
from suture_papers.public_data import data_folder, images_in

NihSplit = Literal["patients", "official"]


@validated(frozen=True, config=STRICT)
class NihSites(PartitionedSites):
    """NIH ChestX-ray14 partitioned by patients among K sites, as in the simulations of Surgical Aggregation.

    Attributes:
        clients: K; for the published class lists 2, 3, 4, 5, 6, 8 or 10.
        shared: choose the published lists for 4 clients with this many classes known to all.
        split: 70/10/20 by ``patients``, or the ``official`` lists of training and test images, as in FedLSM,
            with 12.5 % of the patients of the former for validation.
        training_images: take at most this many, over all sites.
        root: folder of Data_Entry_2017*.csv and the images; by default nih_cxr14_64px in SUTURE_DATA.
    """

    shared: Annotated[int, Field(ge=0, le=LIMIT)] | None = None
    split: NihSplit = "patients"
    training_images: Annotated[int, Field(ge=1, le=LIMIT)] | None = None

    def prepare(self, folder: Path, runs: Path, seed: int, method: Method) -> list[str]:
        """Write each site, and the held-out rows of the server; see `PhantomSites.prepare`."""
        root = data_folder(self.root, "nih_cxr14_64px", "NIH ChestX-ray14")
        pooled = load_table(nih_config(root, self.seed, split=self.split))
        if self.training_images is not None:
            pooled = subset(pooled, self.training_images, self.seed)
        return self.write_partitioned(folder, runs, method, pooled, shared=self.shared)


def nih_config(
    root: Path, seed: int, labels: tuple[str, ...] | None = None, split: NihSplit = "patients"
) -> NihConfig:
    """Return the configuration of a folder of NIH ChestX-ray14; rows without an image are left out.

    Raises:
        ConfigError: the folder has no table.
    """
    table, images = nih_release(root)
    if not table.exists():
        raise ConfigError(f"{root} has no {table.name}; put it there, or name the folder that has it")
    return NihConfig(
        root=images,
        table=table,
        labels=labels,
        split=split,
        seed=seed,
        partial=True,
    )


def nih_release(root: Path) -> tuple[Path, Path]:
    """Return the table (or the pattern of its name) and the images in a folder of NIH ChestX-ray14."""
    pattern = "Data_Entry_2017*.csv*"
    return next(iter(sorted(root.glob(pattern))), root / pattern), images_in(root)


SHARED = tuple(name for name in NIH if name in CHEXPERT)
"""The seven findings that both data sets annotate, of twenty."""


@validated(frozen=True, config=STRICT)
class ChestSites(SimulatedSites):
    """NIH ChestX-ray14 at one site and CheXpert at the other, each divided 70/10/20 by patient.

    Attributes:
        nih: folder of Data_Entry_2017*.csv and the images.
        chexpert: folder of CheXpert's train.csv, beside its folders train and valid.
        classes: ``all``, 14 and 13 findings; ``shared``, the seven that both annotate.
        views: which images of CheXpert: ``frontal`` (2024), or ``all`` (MIDL 2023).
        seed: of the random splits.
    """

    nih: Annotated[str | None, JOB_PATH] = None
    chexpert: Annotated[str | None, JOB_PATH] = None
    classes: Literal["all", "shared"] = "all"
    views: Literal["frontal", "all"] = "frontal"
    seed: Annotated[int, Field(ge=0, le=LARGEST_SEED)] = 1337

    def prepare(self, folder: Path, runs: Path, seed: int, method: Method) -> list[str]:
        """Write the suture.toml of both sites; the data stay where they are. See `PhantomSites.prepare`."""
        if method.labels.complete:
            raise ConfigError(
                f"{method.about.title} needs every label of every image, but NIH and CheXpert lack "
                "some; use central"
            )
        labels = SHARED if self.classes == "shared" else None
        root = _folder(self.chexpert, "chexpert")
        data: dict[str, DataConfig] = {
            "chexpert": ChexpertConfig(
                root=root, table=root / "train.csv", labels=labels, seed=self.seed, views=self.views
            ),
            "nih": nih_config(_folder(self.nih, "nih"), self.seed, labels),
        }
        return write_sites(Destination(folder, runs, method, self.learning_rates), data)


def _folder(given: str | None, name: str) -> Path:
    if not given:
        raise ConfigError(f"name the folder of the {name} data with --set simulation.{name}=DIR")
    path = Path(given).expanduser().resolve()
    if not path.is_dir():
        raise ConfigError(f"{path} is not a folder; correct simulation.{name}")
    return path
