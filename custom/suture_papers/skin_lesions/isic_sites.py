"""ISIC 2018 Task 3 (HAM10000) partitioned among several sites."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass as validated

from suture.core.errors import ConfigError
from suture.core.validation import LIMIT, STRICT
from suture.data.readers import load_table
from suture.execution.sites import Validation
from suture.methods.base import Method
from suture_papers.partition import PartitionedSites, assigned_sites, write_parts
from suture_papers.public_data import data_folder, images_in, table_in
from suture_papers.skin_lesions.isic import METADATA, TRUTH, IsicConfig


@validated(frozen=True, config=STRICT)
class IsicSites(PartitionedSites):
    """ISIC 2018 Task 3 partitioned among K sites that know some of its seven diagnoses, as in FedLSM.

    An image of a diagnosis that a site does not know is unlabelled there. Where every site knows all
    (``classes=all``), the sites may instead be the long-tailed parts of Fed-MAS.

    Attributes:
        classes: which classes each site knows: ``round_robin`` (the paper's lists, by default), ``disjoint``,
            ``single`` (7 sites of one class) or ``all``; see `suture_papers.partition.class_lists`.
        partition: equal blocks of ``patients`` (lesions or images, see `split`); ``iid``, parts alike in
            every class; or ``dirichlet``, shares of each class drawn from Dir(alpha).
        alpha: parameter of that distribution; the smaller, the more the sites differ.
        split: 70/10/20 by ``lesions``, or by ``images`` as in the published program, where images of one
            lesion may be in training and in testing.
        root: folder of the ground truth or metadata CSV and the images; by default ham10000_112px in
            SUTURE_DATA.
    """

    clients: Annotated[int, Field(ge=1, le=LIMIT)] = 5
    classes: Literal["round_robin", "disjoint", "single", "all"] = "round_robin"
    partition: Literal["patients", "iid", "dirichlet"] = "patients"
    alpha: Annotated[float, Field(gt=0)] = 0.5
    split: Literal["lesions", "images"] = "lesions"
    validation: Validation = "server"

    def prepare(self, folder: Path, runs: Path, seed: int, method: Method) -> list[str]:
        """Write each site, and the held-out rows of the server; see `PhantomSites.prepare`."""
        root = data_folder(self.root, "ham10000_112px", "ISIC 2018 Task 3")
        pooled = load_table(isic_config(root, self.split, self.seed))
        if self.partition != "patients":
            if self.classes != "all":
                raise ConfigError(
                    f"partition={self.partition} needs images of every class; set simulation.classes=all"
                )
            pooled = self.in_fold(pooled)
            sites = assigned_sites(pooled, self.partition, self.clients, self.alpha, self.seed)
            return write_parts(self.destination(folder, runs, method), pooled, sites)
        return self.write_partitioned(folder, runs, method, pooled, color=True)


def isic_config(root: Path, split: Literal["lesions", "images"], seed: int) -> IsicConfig:
    """Return the configuration of a folder of ISIC 2018 Task 3; rows without an image are left out.

    Raises:
        ConfigError: the folder has no table.
    """
    return IsicConfig(
        root=images_in(root),
        table=table_in(root, f"{METADATA}*", f"{TRUTH}*"),
        split=split,
        seed=seed,
        color=True,
        partial=True,
    )
