"""The readers of ISIC 2018 Task 3 and of FLamby's six centres: small files of the official formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from public_tables import at_fault, change, moved, sizes
from suture.core.errors import ConfigError, DataError
from suture.data.readers import load_table, read_table
from suture.data.table import SPLITS
from suture_papers.skin_lesions import flamby, isic
from suture_papers.skin_lesions.flamby import FlambyConfig, centres, list_images, tones
from suture_papers.skin_lesions.isic import GROUPINGS, METADATA, IsicConfig
from world import refused, write_table

Row = tuple[str, str, str]

# Lesion, image and class; every lesion has two images.
HAM: tuple[Row, ...] = tuple(
    (f"HAM_{i // 2:07d}", f"ISIC_{24306 + i:07d}", isic.SPELLINGS[i // 2 % 7]) for i in range(140)
)


def of_truth(folder: Path, rows: tuple[Row, ...] = HAM, **settings: Any) -> IsicConfig:
    ones = [[image, *(f"{dx == s:.1f}" for s in isic.SPELLINGS)] for _, image, dx in rows]
    table = write_table(folder / isic.TRUTH, [["image", *isic.SPELLINGS], *ones])
    return IsicConfig(root=folder, table=table, **settings)


def of_metadata(folder: Path, rows: tuple[Row, ...] = HAM, **settings: Any) -> IsicConfig:
    lines = [[lesion, image, dx.lower(), "vidir"] for lesion, image, dx in rows]
    table = write_table(folder / METADATA, [["lesion_id", "image_id", "dx", "dataset"], *lines])
    return IsicConfig(root=folder, table=table, **settings)


def write_groupings(folder: Path, rows: tuple[Row, ...] = HAM) -> Path:
    return write_table(folder / GROUPINGS, [["image", "lesion_id"], *((r[1], r[0]) for r in rows)])


def test_both_tables_of_isic_say_the_same(tmp_path: Path) -> None:
    write_groupings(tmp_path)
    truth, table = load_table(of_truth(tmp_path)), load_table(of_metadata(tmp_path))
    for part in ("labels", "images", "patients", "split"):
        assert getattr(table, part) == getattr(truth, part)
    np.testing.assert_array_equal(table.y, truth.y)
    np.testing.assert_array_equal(truth.y[:14:2], np.eye(7))
    assert truth.labels == isic.LABELS
    assert truth.labels.label_type == "multiclass"
    assert truth.labels.names[:2] == ("Melanoma", "Melanocytic Nevus")
    assert truth.labels.names[3] == "Actinic Keratosis or Intraepithelial Carcinoma"
    assert truth.images[0] == "ISIC_0024306.jpg"
    assert truth.patients[:3] == ("HAM_0000000", "HAM_0000000", "HAM_0000001")


def test_a_lesion_stays_together_or_images_are_divided(tmp_path: Path) -> None:
    table = load_table(of_metadata(tmp_path))
    assert sizes(table) == [98, 14, 28]
    assert table.split[0::2] == table.split[1::2]
    assert load_table(of_metadata(tmp_path, seed=1)).split != table.split
    for write in (of_truth, of_metadata):
        table = load_table(write(tmp_path, split="images"))
        assert table.patients == tuple(image for _, image, _ in HAM)
        assert sizes(table) == [98, 14, 28]
        assert table.split[0::2] != table.split[1::2]


def test_a_site_may_annotate_some_of_the_seven(tmp_path: Path) -> None:
    chosen = of_metadata(tmp_path, labels=("vasc", "Melanoma", "mole"), synonyms={"mole": "NV"})
    table = load_table(chosen)
    assert table.labels.names == ("Vascular Lesion", "Melanoma", "Melanocytic Nevus")
    assert table.labels.label_type == "multiclass"
    assert table.y[:5:2].tolist() == [[0, 1, 0], [0, 0, 1], [0, 0, 0]]
    assert table.split == load_table(of_metadata(tmp_path)).split
    # "AK" is another class than this table's, which is of two diagnoses.
    with refused("labels", "Actinic Keratosis", by=ConfigError):
        load_table(of_metadata(tmp_path, labels=("AK",)))


def test_the_groupings_may_lie_elsewhere_and_their_absence_is_named(tmp_path: Path) -> None:
    with refused(tmp_path / GROUPINGS, "lists", METADATA, by=DataError):
        load_table(of_truth(tmp_path))
    lists = moved(write_groupings(tmp_path), tmp_path / "lists")
    assert load_table(of_truth(tmp_path, lists=lists)).patients[0] == "HAM_0000000"


def test_an_image_without_a_lesion_or_with_two_is_a_fault(tmp_path: Path) -> None:
    write_groupings(tmp_path, (*HAM[1:4], ("HAM_0000099", *HAM[1][1:])))
    config = of_truth(tmp_path, HAM[:4])
    assert at_fault(config) == [f"{GROUPINGS} row 5", f"{isic.TRUTH} row 2"]
    assert "HAM_0" not in " ".join(read_table(config).faults)
    rows = (("", *HAM[0][1:]), *HAM[1:])
    assert at_fault(of_metadata(tmp_path, rows)) == [f"{METADATA} row 2"]
    assert not at_fault(of_metadata(tmp_path, rows, split="images"))


def test_words_and_rows_that_are_of_no_class_are_faults(tmp_path: Path) -> None:
    rows = [(lesion, image, "scc" if i % 50 == 0 else dx) for i, (lesion, image, dx) in enumerate(HAM)]
    config = of_metadata(tmp_path, (*rows[:-1], (*rows[-1][:2], "blk")))
    assert at_fault(config) == [f"{METADATA} rows 2, 52, 102", f"{METADATA} row 141"]
    assert np.isnan(read_table(config).table.y[[0, 50, 100, 139]]).all()
    with refused("'scc'", by=DataError):
        load_table(config)
    for cells in ("1,1,0,0,0,0,0", "0,0,0,0,0,0,0", "1,,0,0,0,0,0", "2,-1,0,0,0,0,0"):
        config = of_truth(tmp_path, split="images")
        change(config.table, "1.0,0.0,0.0,0.0,0.0,0.0,0.0", cells)
        assert at_fault(config) == [f"{isic.TRUTH} row 2"]
        assert np.isnan(read_table(config).table.y[0]).all()


def test_a_blank_and_a_repeated_image_are_faults(tmp_path: Path) -> None:
    config = of_metadata(tmp_path, (*HAM[:4], ("HAM_0000050", "", "NV"), ("HAM_0000051", HAM[0][1], "NV")))
    assert at_fault(config) == [f"{METADATA} row 6", f"{METADATA} row 7"]


@pytest.mark.parametrize("kind", [IsicConfig, FlambyConfig])
def test_another_table_is_told(tmp_path: Path, kind: Any) -> None:
    for column, named in (("picture", "columns"), ("image", "'MEL'")):
        table = write_table(tmp_path / "labels.csv", [[column, "patient"], ["a.png", 1]])
        with refused("labels.csv", named, by=DataError):
            load_table(kind(root=tmp_path, table=table))


# FLamby

# Image, class and whether it trains: twenty of each class.
Image = tuple[str, int, bool]
CENTRES: tuple[Image, ...] = tuple((f"ISIC_{24306 + i:07d}", i % 8, i % 5 > 0) for i in range(160))
LESIONS = "ISIC_2019_Training_Metadata.csv"


def of_all(folder: Path, rows: tuple[Image, ...] = CENTRES, **settings: Any) -> FlambyConfig:
    lines = [
        [image, *(f"{k == dx:.1f}" for k in range(8)), 0.0, i % 6, "train" if trains else "test"]
        for i, (image, dx, trains) in enumerate(rows)
    ]
    head = ["image", *flamby.SPELLINGS, "UNK", "center", "fold"]
    table = write_table(folder / flamby.TRUTH, [head, *lines])
    return FlambyConfig(root=folder, table=table, **settings)


def of_centre(folder: Path, rows: tuple[Image, ...] = CENTRES, **settings: Any) -> FlambyConfig:
    lines = [(i, image, dx) for i, (image, dx, _) in enumerate(rows)]
    table = write_table(folder / "train_flamby_isic_fl_0_1.csv", [["", "image_name", "dx"], *lines])
    return FlambyConfig(root=folder, table=table, **settings)


def write_lesions(folder: Path, blank: int = 0) -> None:
    """Two images of each lesion (which are then of one class), as far as they have one."""
    of = [f"BCN_{i // 16 * 8 + i % 8}" if i >= blank else "" for i in range(len(CENTRES))]
    rows = [(image, lesion) for (image, _, _), lesion in zip(CENTRES, of, strict=True)]
    write_table(folder / LESIONS, [["image", "lesion_id"], *rows])


def test_both_tables_of_flamby_say_the_same(tmp_path: Path) -> None:
    whole, own = load_table(of_all(tmp_path)), load_table(of_centre(tmp_path))
    assert (own.labels, own.images, own.patients) == (whole.labels, whole.images, whole.patients)
    np.testing.assert_array_equal(own.y, whole.y)
    np.testing.assert_array_equal(whole.y[:8], np.eye(8))
    assert whole.labels == flamby.LABELS
    assert flamby.LABELS.label_type == "multiclass"
    assert (whole.labels.names[3], whole.labels.names[7]) == ("Actinic Keratosis", "Squamous Cell Carcinoma")
    assert whole.images[0] == "ISIC_0024306.jpg"


def test_the_official_division_with_a_tenth_of_each_class_for_validation(tmp_path: Path) -> None:
    whole = load_table(of_all(tmp_path))
    assert [split != "test" for split in whole.split] == [trains for _, _, trains in CENTRES]
    # Of twenty images of a class four test and sixteen train: 14.4 and 1.6.
    assert [whole.of(part).y.sum(axis=0).tolist() for part in SPLITS] == [[14] * 8, [2] * 8, [4] * 8]
    own = load_table(of_centre(tmp_path))
    assert sizes(own) == [144, 16, 0]
    assert load_table(of_centre(tmp_path, seed=1)).split != own.split


@pytest.mark.parametrize("write", [of_all, of_centre])
def test_lesions_or_images_may_be_divided_instead(tmp_path: Path, write: Any) -> None:
    with refused(LESIONS, METADATA, by=DataError):
        load_table(write(tmp_path, split="lesions"))
    write_lesions(tmp_path)
    table = load_table(write(tmp_path, split="lesions"))
    assert table.patients[0] == table.patients[8] == "BCN_0"
    assert sizes(table) == [112, 16, 32]
    of = dict(zip(table.patients, table.split, strict=True))
    assert [of[lesion] for lesion in table.patients] == list(table.split)
    images = load_table(write(tmp_path, split="images"))
    assert images.patients == images.images
    assert all(images.of("test").y.sum(axis=0) == 4)


def test_an_image_without_a_lesion_is_one_of_its_own(tmp_path: Path) -> None:
    write_lesions(tmp_path, blank=1)
    table = load_table(of_all(tmp_path, split="lesions"))
    assert (table.patients[0], table.patients[8]) == ("ISIC_0024306.jpg", "BCN_0")
    rows = [["lesion_id", "image_id"], ["HAM_1", CENTRES[0][0]], ["HAM_1", CENTRES[8][0]]]
    lists = moved(write_table(tmp_path / METADATA, rows), tmp_path / "lists")
    table = load_table(of_all(tmp_path, split="lesions", lists=lists))
    assert (*table.patients[:2], table.patients[8]) == ("HAM_1", "ISIC_0024307.jpg", "HAM_1")


def test_faults_of_flamby_name_their_rows(tmp_path: Path) -> None:
    rows = tuple((image, 8 if i % 70 == 0 else dx, t) for i, (image, dx, t) in enumerate(CENTRES))
    for config in (of_centre(tmp_path, rows), of_all(tmp_path, rows)):
        assert at_fault(config) == [f"{config.table.name} rows 2, 72, 142"]
        assert np.isnan(read_table(config).table.y[[0, 70]]).all()
    config = of_all(tmp_path, (*CENTRES, ("", 1, True), CENTRES[0]))
    change(config.table, ",train", ",trian")
    assert at_fault(config) == [f"{flamby.TRUTH} row {row}" for row in (3, 162, 163)]


def test_the_centre_of_each_image_and_the_images_of_a_list(tmp_path: Path) -> None:
    path = of_all(tmp_path).table
    assert centres(path)["ISIC_0024311.jpg"] == 5
    assert list_images(of_centre(tmp_path).table) == {f"{image}.jpg" for image, _, _ in CENTRES}
    write_table(path, [["image", "center"], ["a", "vienna"]])
    with refused("row 2", "'center'", by=DataError):
        centres(path)


def test_skin_tones(tmp_path: Path) -> None:
    path = tmp_path / "tones.csv"
    write_table(path, [["image", "skin_tone"], ["ISIC_1", "Dark"], ["ISIC_2.jpg", "light"]])
    assert tones(path) == {"ISIC_1.jpg": "dark", "ISIC_2.jpg": "light"}
    change(path, "Dark", "medium")
    with refused("row 2", "'medium'", by=DataError):
        tones(path)
    change(path, "skin_tone", "tone")
    with refused("'skin_tone'", by=DataError):
        tones(path)
