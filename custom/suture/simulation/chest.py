"""NIH ChestX-ray14 and CheXpert as two sites: the real-world experiments of Surgical Aggregation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from suture.core.errors import ConfigError
from suture.core.validation import STRICT
from suture.data.readers import DataConfig
from suture.data.readers.chexpert import LABELS as CHEXPERT
from suture.data.readers.chexpert import ChexpertConfig
from suture.data.readers.nih import LABELS as NIH
from suture.methods.base import Method
from suture.simulation.nih import nih_config
from suture.simulation.sites import Destination, write_sites

SHARED = tuple(name for name in NIH if name in CHEXPERT)
"""The seven findings that both data sets annotate, of twenty."""


@dataclass(frozen=True, config=STRICT)
class ChestSites:
    """NIH ChestX-ray14 at one site and CheXpert at the other, each divided 70/10/20 by patient.

    Attributes:
        nih: folder of Data_Entry_2017*.csv and the images.
        chexpert: folder of CheXpert's train.csv, beside its folders train and valid.
        classes: ``all``, 14 and 13 findings; ``shared``, the seven that both annotate.
        views: which images of CheXpert: ``frontal`` (2024), or ``all`` (MIDL 2023).
        seed: of the random splits.
        learning_rates: by name of the site, for sites with one of their own.
    """

    nih: str | None = None
    chexpert: str | None = None
    classes: Literal["all", "shared"] = "all"
    views: Literal["frontal", "all"] = "frontal"
    seed: Annotated[int, Field(ge=0)] = 1337
    learning_rates: dict[str, float] = Field(default_factory=dict)

    def prepare(self, folder: Path, runs: Path, seed: int, method: type[Method] | Method) -> list[str]:  # noqa: ARG002
        """Write the suture.toml of both sites; the data stay where they are. See `PhantomSites.prepare`."""
        if method.labels.complete:
            raise ConfigError(
                f"{method.about.title} needs every label of every image, which NIH and CheXpert do not have; "
                "use central"
            )
        labels = SHARED if self.classes == "shared" else None
        data: dict[str, DataConfig] = {
            "chexpert": chexpert_config(_folder(self.chexpert, "chexpert"), self.seed, labels, self.views),
            "nih": nih_config(_folder(self.nih, "nih"), self.seed, labels),
        }
        return write_sites(Destination(folder, runs, method, self.learning_rates), data)


def chexpert_config(
    root: Path, seed: int, labels: tuple[str, ...] | None, views: Literal["frontal", "all"]
) -> ChexpertConfig:
    """The data of a folder of CheXpert."""
    return ChexpertConfig(
        root=root,
        table=root / "train.csv",
        labels=labels,
        split="patients",
        seed=seed,
        views=views,
    )


def _folder(given: str | None, name: str) -> Path:
    if not given:
        raise ConfigError(f"where is the {name} data? Name its folder with --set simulation.{name}=DIR")
    path = Path(given).expanduser().resolve()
    if not path.is_dir():
        raise ConfigError(f"{path} is no folder; correct simulation.{name}")
    return path
