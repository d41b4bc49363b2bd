"""ISIC 2019 as FLamby's six centres, and as clients of different skin tones: both as in Fed-MAS."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from pydantic.dataclasses import dataclass as validated

from suture.core.errors import ConfigError
from suture.core.validation import JOB_PATH, LIMIT, STRICT
from suture.data.readers import load_table
from suture.data.split import Codes, classes, cross_strata, divide, in_turn
from suture.data.table import Table
from suture.execution.sites import Validation
from suture.methods.base import Method
from suture_papers.partition import ReleasedSites, by_attribute, write_parts
from suture_papers.public_data import data_folder, images_in, lists_folder, official
from suture_papers.skin_lesions.flamby import (
    TRUTH,
    FlambyConfig,
    centres,
    list_images,
    tones,
    with_validation,
)

LOG = logging.getLogger(__name__)

Centre = Annotated[int, Field(ge=0, le=5)]
Split = Literal["official", "folds", "lesions", "images"]

DOMINANCE = 0.9
"""Share of the images with the rarer tone that the last client holds, and of that tone among its images."""

FOLDS = 5


@validated(frozen=True, config=STRICT)
class FlambySites(ReleasedSites):
    """Fed-ISIC2019: one site for each centre. All know eight classes; some centres have no image of some.

    A centre without any image is left out.

    Attributes:
        centres: 0 Barcelona, 1, 2 and 5 Vienna, 3 Rosendahl, 4 New York.
        split: ``official`` trains on the lists of Fed-MAS and tests on all other images of a centre;
            ``folds`` divides the lesions into five parts alike in centres and classes, because the lists of
            one fold only are public; ``lesions`` and ``images`` cut each class of each centre 70/10/20, for
            releases without the official test images.
        fold: with ``official``, the number in the names of Fed-MAS's lists (the first is FLamby's own split);
            with ``folds``, the fold for testing.
        validation: the ``server`` holds the validation images, a tenth of each class, or the ``sites`` hold
            their own.
        root: folder of the images and, for ``folds`` and ``lesions``, of the file that names the lesions; by
            default ham10000_112px in SUTURE_DATA.
        lists: folder of flamby_train_test_split.csv and the training lists; by default that of the images, or
            flamby_isic in SUTURE_DATA.
    """

    centres: Annotated[tuple[Centre, ...], Field(min_length=1)] = (0, 1, 2, 3, 4, 5)
    split: Split = "official"
    fold: Annotated[int, Field(ge=1, le=FOLDS)] = 1
    validation: Validation = "server"
    lists: Annotated[str | None, JOB_PATH] = None

    def prepare(self, folder: Path, runs: Path, seed: int, method: Method) -> list[str]:
        """Write each centre, and the held-out rows of the server; see `PhantomSites.prepare`."""
        root, lists = _folders(self.root, self.lists)
        whole = load_table(flamby_config(root, lists, self.split, self.seed))
        of = centres(official(lists, TRUTH))
        centre = np.array([of[image] for image in whole.images])
        for k in self.centres:
            if not (centre == k).any():
                LOG.warning("%s: no image of centre %d; the centre is left out", whole.root, k)
        wanted = np.isin(centre, self.centres)
        if not wanted.any():
            raise ConfigError(
                f"{whole.root} has no image of these centres; correct simulation.centres or root"
            )
        pooled, centre = whole.rows(wanted), centre[wanted]
        split = (
            self._official(pooled, centre, lists)
            if self.split == "official"
            else self._divide(pooled, cross_strata(centre, classes(pooled.y)))
        )
        to = self.destination(folder, runs, method)
        return write_parts(to, replace(pooled, split=split), tuple(f"centre-{k}" for k in centre))

    def _divide(self, table: Table, strata: Codes) -> tuple[str, ...]:
        """The split of each row without official lists: by five folds, or 70/10/20 of each stratum."""
        if self.split != "folds":
            return divide(table, (0.7, 0.1, 0.2), self.seed, strata)
        fold = in_turn(strata, FOLDS, self.seed, table.patients)
        return with_validation(table, fold != self.fold - 1, self.seed, strata)

    def _official(self, table: Table, centre: NDArray[np.intp], lists: Path) -> tuple[str, ...]:
        """The split of each row by the lists of its centre."""
        split = np.full(len(table), "", dtype="<U10")
        for k in np.unique(centre):
            here = centre == k
            own = table.rows(here)
            trained = list_images(official(lists, f"train_flamby_isic_fl_{k}_{self.fold}.csv"))
            split[here] = with_validation(
                own, np.array([image in trained for image in own.images]), self.seed
            )
        if "test" not in split:
            raise ConfigError(
                f"{table.root} has none of the images that fold {self.fold} tests with; divide those that "
                "are there with --set simulation.split=lesions"
            )
        return tuple(split.tolist())


@validated(frozen=True, config=STRICT)
class AttributeSites(ReleasedSites):
    """ISIC 2019 at four clients of different skin tones, each divided 70/15/15, as in Fed-MAS.

    One client, the last, is dominated by the rarer tone, the others by the other. The paper prints neither
    the files nor the shares: 90 % is this project's choice.

    Attributes:
        tones: CSV with the columns image and skin_tone, light or dark; only its images are used.
        clients: number of clients, at least 2.
        split: divide ``lesions``, whose images stay together, or ``images``.
        root, lists: as in `FlambySites`.
    """

    tones: Annotated[str | None, JOB_PATH] = None
    clients: Annotated[int, Field(ge=2, le=LIMIT)] = 4
    split: Literal["lesions", "images"] = "lesions"
    validation: Validation = "server"
    lists: Annotated[str | None, JOB_PATH] = None

    def prepare(self, folder: Path, runs: Path, seed: int, method: Method) -> list[str]:
        """Write each client, and the held-out rows of the server; see `PhantomSites.prepare`."""
        if not self.tones:
            raise ConfigError("name the CSV of the skin tones with --set simulation.tones=FILE")
        tone = tones(Path(self.tones).expanduser().resolve())
        root, lists = _folders(self.root, self.lists)
        whole = load_table(flamby_config(root, lists, self.split, self.seed))
        pooled = whole.rows(np.array([image in tone for image in whole.images]))
        if len(pooled) < len(whole):
            LOG.warning("%s: %d images have no skin tone; left out", whole.root, len(whole) - len(pooled))
        attribute = [tone[image] for image in pooled.images]
        site = by_attribute(pooled, attribute, self.clients, DOMINANCE, self.seed)
        strata = cross_strata(site, attribute, classes(pooled.y))
        split = divide(pooled, (0.7, 0.15, 0.15), self.seed, strata)
        to = self.destination(folder, runs, method)
        pooled = replace(pooled, split=split, attributes=tuple(attribute))
        return write_parts(to, pooled, tuple(f"isic-{i}" for i in site))


def flamby_config(root: Path, lists: Path, split: Split, seed: int) -> FlambyConfig:
    """Return the configuration of all centres; rows without an image are left out.

    Raises:
        ConfigError: the lists are not there.
    """
    cut = "lesions" if split == "folds" else split  # `FlambySites` makes the folds itself
    return FlambyConfig(
        root=images_in(root),
        table=official(lists, TRUTH),
        lists=root if cut == "lesions" else None,
        split=cut,
        seed=seed,
        color=True,
        partial=True,
    )


def _folders(root: str | None, lists: str | None) -> tuple[Path, Path]:
    images = data_folder(root, "ham10000_112px", "ISIC 2019")
    return images, lists_folder(lists, images, TRUTH, "flamby_isic")
