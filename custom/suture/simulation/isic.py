"""ISIC 2018 Task 3 (HAM10000) dealt to several sites."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from suture.core.errors import ConfigError
from suture.core.validation import STRICT
from suture.data.config import DataConfig
from suture.data.readers import load_table
from suture.data.readers.isic import METADATA, TRUTH
from suture.methods.base import Method
from suture.simulation.folders import data_folder, images_in
from suture.simulation.long_tailed import parted, write_parts
from suture.simulation.partition import class_lists
from suture.simulation.partitioned import Validation, write_partitioned


@dataclass(frozen=True, config=STRICT)
class IsicSites:
    """ISIC 2018 Task 3 dealt to K sites that know some of its seven diagnoses, as in FedLSM.

    An image of a diagnosis that a site does not know is unlabelled there. Where every site knows all
    (``classes=all``), the sites may instead be the long-tailed parts of Fed-MAS.

    Attributes:
        clients: K.
        classes: who knows which: ``dealt`` (with the defaults the paper's lists), ``disjoint``, ``single`` (7
            sites of one class) or ``all``; see `suture.simulation.partition.class_lists`.
        per_client: classes of each site, where they are dealt.
        partition: equal blocks of ``patients`` (lesions or images, see `split`); ``iid``, parts alike in
            every class; or ``dirichlet``, of each class shares drawn from Dir(alpha).
        alpha: of that draw; smaller is less alike.
        split: 70/10/20 by ``lesions``, or by ``images`` as in the paper, where images of a lesion are in
            training and test alike.
        validation: whether the ``sites`` hold validation images, of their own classes, or the ``server``, of
            all classes.
        root: folder of the ground truth or metadata CSV and the images; by default ham10000_112px in
            SUTURE_DATA.
        seed: of the split and of the sites' blocks.
        learning_rates: of sites that have one of their own.
    """

    clients: Annotated[int, Field(ge=1)] = 5
    classes: Literal["dealt", "disjoint", "single", "all"] = "dealt"
    per_client: Annotated[int, Field(ge=1)] = 3
    partition: Literal["patients", "iid", "dirichlet"] = "patients"
    alpha: Annotated[float, Field(gt=0)] = 0.5
    split: Literal["lesions", "images"] = "lesions"
    validation: Validation = "server"
    root: str | None = None
    seed: Annotated[int, Field(ge=0)] = 1337
    learning_rates: dict[str, float] = Field(default_factory=dict)

    def prepare(self, folder: Path, runs: Path, seed: int, method: type[Method] | Method) -> list[str]:  # noqa: ARG002
        """Writes each site, and the server's held-out rows; see `PhantomSites.prepare`."""
        root = data_folder(self.root, "ham10000_112px", "ISIC 2018 Task 3")
        pooled = load_table(isic_config(root, self.split, self.seed))
        if self.partition != "patients":
            if self.classes != "all":
                raise ConfigError(
                    f"partition={self.partition} divides images of every class; set simulation.classes=all"
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
        lists = class_lists(
            self.classes, pooled.labels, self.clients, seed=self.seed, per_client=self.per_client
        )
        return write_partitioned(
            folder,
            runs,
            pooled,
            lists,
            method,
            seed=self.seed,
            color=True,
            validation=self.validation,
            learning_rates=self.learning_rates,
        )


def isic_config(root: Path, split: Literal["lesions", "images"], seed: int) -> DataConfig:
    """The data of a folder of ISIC 2018 Task 3; rows without an image are left out.

    Raises:
        ConfigError: the folder has no table.
    """
    tables = [path for name in (METADATA, TRUTH) for path in sorted(root.glob(f"{name}*"))]
    if not tables:
        raise ConfigError(
            f"{root} has no {METADATA} and no {TRUTH}; name the folder with --set simulation.root=DIR"
        )
    return DataConfig(
        dataset="isic2018",
        root=images_in(root),
        table=tables[0],
        split=split,
        seed=seed,
        color=True,
        partial=True,
    )
