"""HyperKvasir dealt to several sites, as in Fed-MAS."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from suture.core.validation import STRICT
from suture.data.config import DataConfig
from suture.data.readers import load_table
from suture.data.readers.hyperkvasir import FOLDS
from suture.methods.base import Method
from suture.simulation.folders import data_folder, images_in
from suture.simulation.long_tailed import Partition, lists_folder, official, parted, write_parts
from suture.simulation.partitioned import Validation


@dataclass(frozen=True, config=STRICT)
class HyperKvasirSites:
    """The 23 classes of HyperKvasir at K sites that know them all; one of five official folds is for testing.

    Attributes:
        clients: K.
        partition: ``iid``, parts alike in every class, or ``dirichlet``, of each class shares drawn from
            Dir(alpha).
        alpha: of that draw; smaller is less alike.
        fold: the one for testing, 0 to 4.
        validation: whether the ``server`` holds the validation images, a tenth of each class of the other
            folds, or the ``sites`` their own.
        root: folder of the images; by default hyperkvasir in SUTURE_DATA.
        lists: folder of 5_fold_split.csv; by default that of the images, or hyperkvasir_splits in
            SUTURE_DATA.
        seed: of the validation split and of the sites' parts.
        learning_rates: of sites that have one of their own.
    """

    clients: Annotated[int, Field(ge=1)] = 8
    partition: Partition = "iid"
    alpha: Annotated[float, Field(gt=0)] = 0.5
    fold: Annotated[int, Field(ge=0)] = 0
    validation: Validation = "server"
    root: str | None = None
    lists: str | None = None
    seed: Annotated[int, Field(ge=0)] = 1337
    learning_rates: dict[str, float] = Field(default_factory=dict)

    def prepare(self, folder: Path, runs: Path, seed: int, method: type[Method] | Method) -> list[str]:  # noqa: ARG002
        """Writes each site, and the server's held-out rows; see `PhantomSites.prepare`."""
        root = data_folder(self.root, "hyperkvasir", "HyperKvasir")
        lists = lists_folder(self.lists, root, FOLDS, "hyperkvasir_splits")
        # Beside the labelled images a full release has the same files again, as segmented ones.
        labelled = root / "labeled-images"
        pooled = load_table(
            DataConfig(
                dataset="hyperkvasir",
                root=labelled if labelled.is_dir() else images_in(root),
                table=official(lists, FOLDS),
                fold=self.fold,
                seed=self.seed,
                color=True,
                partial=True,
            )
        )
        return write_parts(
            folder,
            runs,
            pooled,
            parted(pooled, self.partition, self.clients, self.alpha, self.seed),
            method,
            validation=self.validation,
            learning_rates=self.learning_rates,
        )
