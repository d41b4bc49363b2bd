"""The public releases themselves, where they are at hand: rows, patients, parts, and images of each class."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from public_tables import sizes
from suture.data.images import ImageSource
from suture.data.readers import load_table, read_table
from suture_papers.chest_xrays.nih import NihConfig
from suture_papers.chest_xrays.openi import FINDINGS, OpeniConfig
from suture_papers.fedmas.hyperkvasir import HyperKvasirConfig
from suture_papers.metafl.eicu import EicuConfig
from suture_papers.metafl.mtsamples import MtsamplesConfig
from suture_papers.skin_lesions.flamby import TRUTH, FlambyConfig, centres
from suture_papers.skin_lesions.isic import METADATA, IsicConfig

pytestmark = [pytest.mark.complete, pytest.mark.data]

NIH = [11559, 2776, 4667, 2303, 13317, 2516, 1686, 227, 19894, 5782, 6331, 3385, 1431, 5302]
"""As Wang et al. (2017) count them."""

KVASIR = [
    *(41, 53, 646, 1148, 1009, 1002, 989, 403, 260, 6, 9, 131, 1028, 999, 391, 764),
    *(35, 201, 11, 443, 28, 133, 932),
]

NOTES = [
    *(7, 8, 18, 371, 14, 516, 27, 27, 29, 10, 108, 96, 75, 19, 224, 259, 90, 6, 16, 8, 23, 81, 223, 94),
    *(155, 50, 83, 355, 59, 70, 21, 47, 53, 273, 10, 20, 166, 9, 1088, 156),
]

# A table and its settings; how many rows, patients, absent rows and rows with an unknown label there are; how
# many train, validate and test; and how many are of each class.
RELEASES: list[tuple[Any, str, dict[str, Any], list[int], list[int], list[int]]] = [
    (NihConfig, "nih_metadata/Data_Entry_2017_v2020.csv.gz", {},
     [112_120, 30_805, 0, 0], [75_499, 11_025, 25_596], NIH),
    (OpeniConfig, "openi_reports/NLMCXR_reports.tgz", {"labels": FINDINGS},
     [3927, 3927, 28, 95], [2749, 392, 786], [161, 163, 196, 274, 305, 332, 375, 455]),
    (HyperKvasirConfig, "hyperkvasir_splits/5_fold_split.csv.gz", {"fold": 4},
     [10_662, 10_662, 0, 0], [7640, 848, 2174], KVASIR),
    (HyperKvasirConfig, "hyperkvasir_splits/2_fold_split.csv.gz", {"fold": 1},
     [10_662, 10_662, 0, 0], [4795, 529, 5338], KVASIR),
    (EicuConfig, "eicu_demo/patient.csv.gz", {},
     [2350, 1764, 170, 198], [1642, 231, 477], [10, 101, 54, 10, 101, 140, 285]),
    (MtsamplesConfig, "mtsamples/mtsamples.csv.gz", {},
     [2357, 2357, 33, 0], [1650, 236, 471], NOTES),
    (IsicConfig, f"ham10000_112px/{METADATA}", {},
     [8012, 6304, 0, 0], [5579, 803, 1630], [887, 5372, 404, 261, 887, 87, 114]),
]  # fmt: skip


@pytest.mark.parametrize("release", RELEASES, ids=[row[1] for row in RELEASES])
def test_the_whole_of_a_release_is_read(release: Any, data_root: Path) -> None:
    kind, file, settings, numbers, parts, classes = release
    table = data_root / file
    images = {"root": table.parent} if kind in (NihConfig, HyperKvasirConfig, IsicConfig) else {}
    reading = read_table(kind(table=table, **images, **settings))
    read = reading.table
    unknown = int(np.isnan(read.y).any(axis=1).sum())
    assert [len(read), len(set(read.patients)), reading.absent, unknown] == numbers
    assert (sizes(read), reading.faults) == (parts, ())
    assert (read.y == 1).sum(axis=0).tolist() == classes
    of = dict(zip(read.patients, read.split, strict=True))
    assert [of[patient] for patient in read.patients] == list(read.split)


def test_the_images_of_ham10000_are_those_of_its_table(data_root: Path) -> None:
    folder = data_root / "ham10000_112px"
    table = load_table(IsicConfig(root=folder, table=folder / METADATA))
    with ImageSource(folder / "images.tar") as source:
        assert all(name in source for name in table.images)
        assert source.read(table.images[0], color=True).shape == (84, 112, 3)


def test_the_real_lists_are_the_training_images_of_the_real_table(data_root: Path) -> None:
    folder = data_root / "flamby_isic"
    path = folder / f"{TRUTH}.gz"
    whole, of, found = load_table(FlambyConfig(root=folder, table=path)), centres(path), []
    assert Counter(whole.split)["test"] == 4650
    y = dict(zip(whole.images, whole.y.argmax(axis=1).tolist(), strict=True))
    for k in range(6):
        table = folder / f"train_flamby_isic_fl_{k}_1.csv.gz"
        own = load_table(FlambyConfig(root=folder, table=table))
        here = np.array([of[image] == k for image in whole.images]) & (np.array(whole.split) != "test")
        assert set(own.images) == set(whole.rows(here).images)
        found.append(len(own))
        # No class that a centre has is missing in its training images.
        assert ((own.of("train").y.sum(axis=0) > 0) == (own.y.sum(axis=0) > 0)).all()
        assert own.y.argmax(axis=1).tolist() == [y[image] for image in own.images]
    assert found == [9930, 3163, 2691, 1807, 655, 351]
