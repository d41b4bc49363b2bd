"""ISIC 2018 Task 3 (HAM10000) partitioned among several sites."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from suture.core.errors import ConfigError
from suture.core.validation import LARGEST_SEED, LIMIT, STRICT
from suture.data.readers import load_table
from suture.data.readers.isic import METADATA, TRUTH, IsicConfig
from suture.methods.base import Method
from suture.simulation.partition import assigned_sites, class_lists
from suture.simulation.public_data import data_folder, images_in
from suture.simulation.sites import Destination, Validation, write_partitioned, write_parts


@dataclass(frozen=True, config=STRICT)
class IsicSites:
    """ISIC 2018 Task 3 partitioned among K sites that know some of its seven diagnoses, as in FedLSM.

    An image of a diagnosis that a site does not know is unlabelled there. Where every site knows all
    (``classes=all``), the sites may instead be the long-tailed parts of Fed-MAS.

    Attributes:
        clients: K.
        classes: which classes each site knows: ``dealt`` (the paper's lists, by default), ``disjoint``,
            ``single`` (7 sites of one class) or ``all``; see `suture.simulation.partition.class_lists`.
        per_client: number of classes of each site, for ``dealt``.
        partition: equal blocks of ``patients`` (lesions or images, see `split`); ``iid``, parts alike in
            every class; or ``dirichlet``, shares of each class drawn from Dir(alpha).
        alpha: parameter of that distribution; the smaller, the more the sites differ.
        split: 70/10/20 by ``lesions``, or by ``images`` as in the published program, where images of one
            lesion may be in training and in testing.
        validation: the ``sites`` hold validation images, labelled for their own classes, or the ``server``
            does, labelled for all classes.
        root: folder of the ground truth or metadata CSV and the images; by default ham10000_112px in
            SUTURE_DATA.
        seed: of the split and of the partition.
        learning_rates: by name of the site, for sites with one of their own.
    """

    clients: Annotated[int, Field(ge=1, le=LIMIT)] = 5
    classes: Literal["dealt", "disjoint", "single", "all"] = "dealt"
    per_client: Annotated[int, Field(ge=1, le=LIMIT)] = 3
    partition: Literal["patients", "iid", "dirichlet"] = "patients"
    alpha: Annotated[float, Field(gt=0)] = 0.5
    split: Literal["lesions", "images"] = "lesions"
    validation: Validation = "server"
    root: str | None = None
    seed: Annotated[int, Field(ge=0, le=LARGEST_SEED)] = 1337
    learning_rates: dict[str, float] = Field(default_factory=dict)

    def prepare(self, folder: Path, runs: Path, seed: int, method: type[Method] | Method) -> list[str]:  # noqa: ARG002
        """Write each site, and the held-out rows of the server; see `PhantomSites.prepare`."""
        root = data_folder(self.root, "ham10000_112px", "ISIC 2018 Task 3")
        pooled = load_table(isic_config(root, self.split, self.seed))
        to = Destination(folder, runs, method, self.learning_rates, self.validation)
        if self.partition != "patients":
            if self.classes != "all":
                raise ConfigError(
                    f"partition={self.partition} needs images of every class; set simulation.classes=all"
                )
            sites = assigned_sites(pooled, self.partition, self.clients, self.alpha, self.seed)
            return write_parts(to, pooled, sites)
        lists = class_lists(
            self.classes, pooled.labels, self.clients, seed=self.seed, per_client=self.per_client
        )
        return write_partitioned(to, pooled, lists, self.seed, color=True)


def isic_config(root: Path, split: Literal["lesions", "images"], seed: int) -> IsicConfig:
    """Return the configuration of a folder of ISIC 2018 Task 3; rows without an image are left out.

    Raises:
        ConfigError: the folder has no table.
    """
    tables = [path for name in (METADATA, TRUTH) for path in sorted(root.glob(f"{name}*"))]
    if not tables:
        raise ConfigError(
            f"{root} has no {METADATA} and no {TRUTH}; name the folder with --set simulation.root=DIR"
        )
    return IsicConfig(
        root=images_in(root),
        table=tables[0],
        split=split,
        seed=seed,
        color=True,
        partial=True,
    )
