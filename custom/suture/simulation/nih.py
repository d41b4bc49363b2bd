"""NIH ChestX-ray14 dealt to several sites."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from suture.config import DataConfig
from suture.data import load_table
from suture.data.partition import SERVER, Classes, class_lists, deal, subset, write_site
from suture.data.table import Table
from suture.errors import ConfigError
from suture.messages import STRICT
from suture.methods.contract import Method
from suture.simulation.writing import write_sites


@dataclass(frozen=True, config=STRICT)
class NihSites:
    """NIH ChestX-ray14 dealt to K sites by patients, as in the simulations of Surgical Aggregation.

    Attributes:
        clients: K; for the published class lists 2, 3, 4, 5, 6, 8 or 10.
        classes: who knows which: ``published``, ``disjoint``, ``single`` (14 sites of one class) or ``all``;
            see `suture.data.partition.class_lists`.
        shared: of the published lists for 4 clients, those with so many classes known to all.
        training_images: take no more than so many, of all sites together.
        root: folder of Data_Entry_2017*.csv and the images; by default nih_cxr14_64px in SUTURE_DATA.
        seed: of the split by patient and of the sites' patient blocks.
        learning_rates: of sites that have one of their own.
    """

    clients: Annotated[int, Field(ge=1)] = 2
    classes: Classes = "published"
    shared: Annotated[int, Field(ge=0)] | None = None
    training_images: Annotated[int, Field(ge=1)] | None = None
    root: str | None = None
    seed: Annotated[int, Field(ge=0)] = 1337
    learning_rates: dict[str, float] = Field(default_factory=dict)

    def prepare(self, folder: Path, runs: Path, seed: int, method: type[Method] | Method) -> list[str]:  # noqa: ARG002
        """Writes each site, and the server's held-out rows; see `PhantomSites.prepare`."""
        pooled = read_pooled(nih_folder(self.root), self.seed)
        if self.training_images is not None:
            pooled = subset(pooled, self.training_images, self.seed)
        lists = class_lists(self.classes, pooled.labels, self.clients, self.shared, self.seed)
        known = (pooled.labels,) * len(lists) if method.every_label else lists
        sites = deal(pooled, known, self.seed, test=method.personal != "nothing")
        names = [name for name in sites if name != SERVER]
        # Where a reference is given every label, the site still says which ones it annotates.
        own = dict(zip(names, lists, strict=True)) if method.every_label else {}
        data = {}
        for name, table in sites.items():
            path = write_site(folder / name, table, table.labels)
            labels = own[name].names if name in own else None
            data[name] = DataConfig(dataset="hospital", root=pooled.root, table=path, labels=labels)
        return write_sites(folder, runs, data, method, self.learning_rates)


def read_pooled(root: Path, seed: int) -> Table:
    """The images of a folder of NIH ChestX-ray14 with all their labels, divided 70/10/20 by patient.

    Raises:
        ConfigError: the folder has no table.
        DataError: the table cannot be read.
    """
    return load_table(nih_config(root, seed))


def nih_config(root: Path, seed: int, labels: tuple[str, ...] | None = None) -> DataConfig:
    """The data of a folder of NIH ChestX-ray14; rows without an image are left out.

    Raises:
        ConfigError: the folder has no table.
    """
    tables = sorted(root.glob("Data_Entry_2017*.csv*"))
    if not tables:
        raise ConfigError(
            f"{root} has no Data_Entry_2017*.csv; name the folder with --set simulation.root=DIR"
        )
    return DataConfig(
        dataset="nih",
        root=_images(root),
        table=tables[0],
        labels=labels,
        split="patients",
        seed=seed,
        partial=True,
    )


def nih_folder(root: str | None) -> Path:
    """The folder that is named, or nih_cxr14_64px in SUTURE_DATA.

    Raises:
        ConfigError: neither is given.
    """
    if root:
        return Path(root).expanduser().resolve()
    if shared := os.environ.get("SUTURE_DATA"):
        return (Path(shared) / "nih_cxr14_64px").resolve()
    raise ConfigError(
        "where is NIH ChestX-ray14? Set SUTURE_DATA to the folder that holds nih_cxr14_64px, or name the "
        "folder of Data_Entry_2017*.csv with --set simulation.root=DIR"
    )


def _images(root: Path) -> Path:
    """The images of NIH's folder: its one archive, its folder `images`, or all of it."""
    return next((p for p in (root / "images.tar", root / "images") if p.exists()), root)
