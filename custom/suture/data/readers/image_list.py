"""A site's own list of images: the name and the patient of each, and its split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from suture.core.errors import ConfigError, nearest
from suture.data.dataset import DatasetConfig, SitePath
from suture.data.images import ImageSource, image_name, is_foreign, loosely, stem
from suture.data.reading import Sheet, fault, read_sheet
from suture.data.split import by_rarest
from suture.data.table import SPLITS

SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "validate", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
    "": "",
}


class ImageListConfig(DatasetConfig):
    """The keys of ``[data]`` that say how a site's own table names its images, their patients and splits.

    Attributes:
        image_column: column of the image names within `root`.
        patient_column: column of the patient identifiers.
        split: ``column`` reads `split_column`; ``file`` reads `split_file`; ``patients`` divides the patients
            randomly 70/10/20, those of rare classes first.
        split_column: column with train, validation, test or blank (unused).
        split_file: a CSV with the columns ``patient`` and ``split``.
    """

    image_column: str = "image"
    patient_column: str = "patient"
    split: Literal["column", "file", "patients"] = "column"
    split_column: str = "split"
    split_file: SitePath | None = None

    def idle(self) -> dict[str, str]:
        """As in the base, and what another split would need."""
        idle = super().idle()
        for key, its in (("seed", "patients"), ("split_file", "file"), ("split_column", "column")):
            if self.split != its:
                idle[key] = f'with split = "{self.split}"; remove it, or write split = "{its}"'
        return idle


def find_split(
    sheet: Sheet,
    config: ImageListConfig,
    patients: Sequence[str],
    y: NDArray[np.float32],
    same: Callable[[str], str] = str,
) -> tuple[tuple[str, ...], list[str]]:
    """Return the split of each row, and the faults of what it is read from.

    Args:
        patients: of each row.
        y: labels [n, c], over which ``patients`` is stratified.
        same: gives the spellings of one patient in `split_file` the form that `patients` have.

    Raises:
        ConfigError: there is no `split_file`.
        DataError: it cannot be read, or a column is missing.
    """
    if config.split == "patients":
        return by_rarest(patients, y, config.seed), []
    if config.split == "column":
        return _splits(sheet, config.split_column, '[data] split_column, or split = "patients",')
    if config.split_file is None:
        raise ConfigError(
            '[data] split = "file" needs a split_file, a CSV with the columns patient and split'
        )
    kept = read_sheet(config.split_file)
    splits, faults = _splits(kept, "split", "[data] split_file")
    part = dict(zip(map(same, kept.column("patient", "[data] split_file")), splits, strict=True))
    new = [patient not in part for patient in patients]
    what = f"a patient who is missing from {config.split_file}; add a line with the split"
    return tuple(part.get(patient, "") for patient in patients), faults + fault(sheet, new, what)


def _splits(sheet: Sheet, column: str, key: str) -> tuple[tuple[str, ...], list[str]]:
    """The splits that a column names, and its faults; arguments as in `Sheet.position`."""
    cells = sheet.column(column, key)
    splits = [SPLIT_WORDS.get(cell.casefold()) for cell in cells]
    faults: list[str] = []
    if None in splits:
        first = cells[splits.index(None)]
        hint = nearest(first, SPLITS)
        bad = [split is None for split in splits]
        faults = fault(sheet, bad, f"unknown split {first!r}; {hint} (blank is unused)")
    return tuple(split or "" for split in splits), faults


def within_root(
    images: Sequence[str], config: DatasetConfig, match: Literal["path", "stem", "loose"] = "path"
) -> tuple[str, ...]:
    """Return the images as `ImageSource` finds them, by paths of this or another machine, or as `match` says.

    A name that fits no image, or several, is returned as it is.
    """
    if match == "path" and not any(map(is_foreign, images)):
        return tuple(images)
    with ImageSource(config.root, config.follow_links) as source:
        if match == "path":
            return tuple(image_name(name, config.root, source) for name in images)
        if match == "stem":
            names = source.stems()
            return tuple(names.get(stem(name), name) for name in images)
        find = loosely(source.paths())
        return tuple(find(name) or name for name in images)
