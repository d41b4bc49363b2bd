"""A data set before any image is decoded: the patient, image or document, labels and split of each row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from suture.core.errors import DataError
from suture.core.labels import LabelSet

Split = Literal["train", "validation", "test"]
Which = Split | Literal["all"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


@dataclass(frozen=True)
class Table:
    """One row per image, or per document.

    Attributes:
        labels: the classes of the columns of `y`.
        images: name of each image within `root`, n of them; of documents, an identifier.
        patients: patient identifier of each row; a patient is never in two splits.
        y: labels [n, c] as float32: 1 present, 0 absent, NaN unknown.
        split: ``train``, ``validation`` or ``test`` for each row; the empty string where a row is unused.
        root: the folder of the images, or a tar archive (or folder of archives) that holds them; the file or
            folder that documents came from.
        texts: the document of each row, where the data are text.
        attributes: the value of each row by which figures are broken down (such as a skin tone), empty where
            unknown; None where the site names no such column. Training does not see it.
        follow_links: whether images may lie where links within `root` lead out of it.
        bits: the true depth of images that are stored with 16 bits; None for all 16.
        modalities: those that DICOM images may be of, as the model is for no others; none for any.
    """

    labels: LabelSet
    images: tuple[str, ...]
    patients: tuple[str, ...]
    y: NDArray[np.float32]
    split: tuple[str, ...]
    root: Path
    texts: tuple[str, ...] | None = None
    attributes: tuple[str, ...] | None = None
    follow_links: bool = False
    bits: int | None = None
    modalities: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        n = len(self.images)
        texts = n if self.texts is None else len(self.texts)
        if {len(self.patients), len(self.split), texts} != {n} or self.y.shape != (n, len(self.labels)):
            raise DataError(
                f"{self.root}: {n:,} images, {texts:,} texts, {len(self.patients):,} patients, "
                f"{len(self.split)} splits and labels of shape {self.y.shape} have different lengths"
            )

    def __len__(self) -> int:
        return len(self.images)

    def rows(self, keep: NDArray[np.bool_] | NDArray[np.intp]) -> Table:
        """The rows that a mask or an index array selects, in that order."""
        where = np.flatnonzero(keep) if keep.dtype == np.bool_ else keep
        return replace(
            self,
            images=tuple(self.images[i] for i in where),
            patients=tuple(self.patients[i] for i in where),
            y=self.y[where],
            split=tuple(self.split[i] for i in where),
            texts=None if self.texts is None else tuple(self.texts[i] for i in where),
            attributes=None if self.attributes is None else tuple(self.attributes[i] for i in where),
        )

    def of(self, split: Split) -> Table:
        """The rows of one split."""
        return self.rows(np.array([s == split for s in self.split], dtype=np.bool_))

    def restrict(self, labels: LabelSet) -> Table:
        """The same rows with the columns of `labels`, in their order; a class that is not here is unknown."""
        positions = np.array(self.labels.align(labels))
        y = np.full((len(self), len(labels)), np.nan, dtype=np.float32)
        y[:, positions >= 0] = self.y[:, positions[positions >= 0]]
        return replace(self, labels=labels, y=y)
