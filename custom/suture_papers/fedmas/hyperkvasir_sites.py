"""HyperKvasir partitioned among several sites, as in Fed-MAS."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass as validated

from suture.core.validation import JOB_PATH, LIMIT, STRICT
from suture.data.readers import load_table
from suture.execution.sites import Validation
from suture.methods.base import Method
from suture_papers.fedmas.hyperkvasir import FOLDS, HyperKvasirConfig
from suture_papers.partition import Partition, ReleasedSites, assigned_sites, write_parts
from suture_papers.public_data import data_folder, images_in, lists_folder, official


@validated(frozen=True, config=STRICT)
class HyperKvasirSites(ReleasedSites):
    """The 23 classes of HyperKvasir at K sites that know them all; one of five official folds is for testing.

    Attributes:
        clients: K.
        partition: ``iid``, parts alike in every class, or ``dirichlet``, shares of each class drawn from
            Dir(alpha).
        alpha: parameter of that distribution; the smaller, the more the sites differ.
        fold: the fold for testing, 0 to 4.
        validation: the ``server`` holds the validation images, a tenth of each class of the other folds, or
            the ``sites`` hold their own.
        root: folder of the images; by default hyperkvasir in SUTURE_DATA.
        lists: folder of 5_fold_split.csv; by default that of the images, or hyperkvasir_splits in
            SUTURE_DATA.
    """

    clients: Annotated[int, Field(ge=1, le=LIMIT)] = 8
    partition: Partition = "iid"
    alpha: Annotated[float, Field(gt=0)] = 0.5
    fold: Annotated[int, Field(ge=0, le=LIMIT)] = 0
    validation: Validation = "server"
    lists: Annotated[str | None, JOB_PATH] = None

    def prepare(self, folder: Path, runs: Path, seed: int, method: Method) -> list[str]:
        """Write each site, and the held-out rows of the server; see `PhantomSites.prepare`."""
        root = data_folder(self.root, "hyperkvasir", "HyperKvasir")
        lists = lists_folder(self.lists, root, FOLDS, "hyperkvasir_splits")
        # A full release holds some file names twice: among the labelled and among the segmented images.
        labelled = root / "labeled-images"
        pooled = load_table(
            HyperKvasirConfig(
                root=labelled if labelled.is_dir() else images_in(root),
                table=official(lists, FOLDS),
                fold=self.fold,
                seed=self.seed,
                color=True,
                partial=True,
            )
        )
        sites = assigned_sites(pooled, self.partition, self.clients, self.alpha, self.seed)
        return write_parts(self.destination(folder, runs, method), pooled, sites)
