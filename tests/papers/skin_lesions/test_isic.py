"""suture_papers.skin_lesions.isic: the official files of ISIC 2018 Task 3 and HAM10000."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from suture.core.errors import ConfigError, DataError, LabelError
from suture.data.images import ImageSource
from suture.data.readers import load_table, read_table
from suture.data.table import SPLITS
from suture_papers.skin_lesions.isic import GROUPINGS, LABELS, METADATA, SPELLINGS, TRUTH, IsicConfig

Row = tuple[str, str, str]

# Lesion, image and class; every lesion has two images.
ROWS: tuple[Row, ...] = tuple(
    (f"HAM_{i // 2:07d}", f"ISIC_{24306 + i:07d}", SPELLINGS[i // 2 % 7]) for i in range(140)
)


def write_truth(folder: Path, rows: tuple[Row, ...] = ROWS) -> Path:
    lines = ["image," + ",".join(SPELLINGS)]
    lines += [f"{image}," + ",".join("1.0" if dx == s else "0.0" for s in SPELLINGS) for _, image, dx in rows]
    (folder / TRUTH).write_text("\n".join(lines) + "\n")
    return folder / TRUTH


def write_groupings(folder: Path, rows: tuple[Row, ...] = ROWS) -> Path:
    lines = ["image,lesion_id,diagnosis_confirm_type"]
    lines += [f"{image},{lesion},histopathology" for lesion, image, _ in rows]
    (folder / GROUPINGS).write_text("\n".join(lines) + "\n")
    return folder / GROUPINGS


def write_metadata(folder: Path, rows: tuple[Row, ...] = ROWS, dataset: bool = False) -> Path:
    more = (",dataset", ",vidir_modern") if dataset else ("", "")
    lines = ["lesion_id,image_id,dx,dx_type,age,sex,localization" + more[0]]
    lines += [f"{lesion},{image},{dx.lower()},histo,80.0,male,scalp{more[1]}" for lesion, image, dx in rows]
    (folder / METADATA).write_text("\n".join(lines) + "\n")
    return folder / METADATA


def config(path: Path, **more: Any) -> IsicConfig:
    return IsicConfig(root=path.parent, table=path, **more)


def test_both_tables_say_the_same(tmp_path: Path) -> None:
    write_groupings(tmp_path)
    truth = load_table(config(write_truth(tmp_path)))
    for dataset in (False, True):
        table = load_table(config(write_metadata(tmp_path, dataset=dataset)))
        assert (table.labels, table.images, table.patients) == (truth.labels, truth.images, truth.patients)
        assert table.split == truth.split
        np.testing.assert_array_equal(table.y, truth.y)
    assert truth.labels == LABELS
    assert truth.labels.label_type == "multiclass"
    assert truth.labels.names[:2] == ("Melanoma", "Melanocytic Nevus")
    assert truth.labels.names[3] == "Actinic Keratosis or Intraepithelial Carcinoma"
    assert truth.images[0] == "ISIC_0024306.jpg"
    assert truth.patients[:3] == ("HAM_0000000", "HAM_0000000", "HAM_0000001")
    np.testing.assert_array_equal(truth.y[:14:2], np.eye(7))


def test_a_lesion_stays_together(tmp_path: Path) -> None:
    path = write_metadata(tmp_path)
    split = load_table(config(path)).split
    assert [split.count(s) for s in ("train", "validation", "test")] == [98, 14, 28]
    assert split[0::2] == split[1::2]
    assert load_table(config(path, seed=1)).split != split


@pytest.mark.parametrize("write", [write_truth, write_metadata])
def test_images_may_be_divided_instead(tmp_path: Path, write: Any) -> None:
    table = load_table(config(write(tmp_path), split="images"))
    assert table.patients == tuple(image for _, image, _ in ROWS)
    assert [table.split.count(s) for s in ("train", "validation", "test")] == [98, 14, 28]
    assert table.split[0::2] != table.split[1::2]


def test_a_site_may_annotate_some_of_the_seven(tmp_path: Path) -> None:
    path = write_metadata(tmp_path)
    table = load_table(config(path, labels=("vasc", "Melanoma", "mole"), synonyms={"mole": "NV"}))
    assert table.labels.names == ("Vascular Lesion", "Melanoma", "Melanocytic Nevus")
    assert table.labels.label_type == "multiclass"
    assert table.y[0].tolist() == [0, 1, 0]
    assert table.y[2].tolist() == [0, 0, 1]
    assert table.y[4].tolist() == [0, 0, 0]
    assert table.split == load_table(config(path)).split
    with pytest.raises(ConfigError, match=r"'Melanomma'; did you mean 'Melanoma'\?"):
        load_table(config(path, labels=("Melanomma",)))
    with pytest.raises(ConfigError, match=r"unknown \[data\] labels entry 'Actinic Keratosis'"):
        load_table(config(path, labels=("AK",)))
    with pytest.raises(LabelError, match="both mean 'Melanoma'"):
        load_table(config(path, labels=("MEL", "Melanoma")))


def test_the_groupings_may_lie_elsewhere_and_their_absence_is_named(tmp_path: Path) -> None:
    path = write_truth(tmp_path)
    with pytest.raises(DataError) as caught:
        load_table(config(path))
    for words in (
        f"{tmp_path / GROUPINGS} is missing",
        "[data] lists",
        "HAM10000_metadata",
        'split = "images"',
    ):
        assert words in str(caught.value)
    lists = tmp_path / "lists"
    lists.mkdir()
    (lists / f"{GROUPINGS}.gz").write_bytes(gzip.compress(write_groupings(tmp_path).read_bytes()))
    (tmp_path / GROUPINGS).unlink()
    assert load_table(config(path, lists=lists)).patients[0] == "HAM_0000000"


def test_an_image_without_a_lesion_or_with_two_is_a_fault(tmp_path: Path) -> None:
    path = write_truth(tmp_path, ROWS[:4])
    write_groupings(tmp_path, (*ROWS[1:4], ("HAM_0000099", *ROWS[1][1:])))
    faults = read_table(config(path)).faults
    assert len(faults) == 2
    assert f"{GROUPINGS} row 5: an earlier row assigns its image to another lesion" in faults[0]
    assert f"{TRUTH} row 2: not listed in {tmp_path / GROUPINGS}" in faults[1]
    assert "HAM_0" not in " ".join(faults)
    path = write_metadata(tmp_path, (("", *ROWS[0][1:]), *ROWS[1:]))
    with pytest.raises(DataError, match="row 2: the lesion is blank; use the official table"):
        load_table(config(path))
    assert not read_table(config(path, split="images")).faults


def test_an_unknown_word_is_a_fault(tmp_path: Path) -> None:
    rows = tuple((lesion, image, "scc" if i % 50 == 0 else dx) for i, (lesion, image, dx) in enumerate(ROWS))
    rows = (*rows[:-1], (*rows[-1][:2], "blk"))
    reading = read_table(config(write_metadata(tmp_path, rows)))
    assert len(reading.faults) == 2
    assert "rows 2, 52, 102: unknown dx 'scc'" in reading.faults[0]
    assert "row 141: unknown dx 'blk'; did you mean 'bkl'?" in reading.faults[1]
    assert np.isnan(reading.table.y[[0, 50, 100, 139]]).all()


@pytest.mark.parametrize(
    "cells",
    [
        "1.0,1.0,0.0,0.0,0.0,0.0,0.0",
        "0.0,0.0,0.0,0.0,0.0,0.0,0.0",
        "1.0,,0.0,0.0,0.0,0.0,0.0",
        "2.0,-1.0,0,0,0,0,0",
    ],
)
def test_a_row_of_the_ground_truth_is_of_one_class(tmp_path: Path, cells: str) -> None:
    path = write_truth(tmp_path)
    path.write_text(path.read_text().replace("1.0,0.0,0.0,0.0,0.0,0.0,0.0", cells, 1))
    reading = read_table(config(path, split="images"))
    assert len(reading.faults) == 1
    assert f"{path} row 2: a row must have 1.0 for one class" in reading.faults[0]
    assert np.isnan(reading.table.y[0]).all()


def test_a_blank_and_a_repeated_image_are_faults(tmp_path: Path) -> None:
    rows = (*ROWS[:4], ("HAM_0000050", "", "NV"), ("HAM_0000051", ROWS[0][1], "NV"))
    faults = read_table(config(write_metadata(tmp_path, rows))).faults
    blank, repeated = (fault.partition(METADATA)[2] for fault in faults)
    assert blank.startswith(" row 6: the image name")
    assert repeated.startswith(" row 7: a repeated image")


def test_a_hospital_table_is_not_one_of_isic(tmp_path: Path) -> None:
    path = tmp_path / "labels.csv"
    path.write_text("picture,patient\na.png,1\n")
    with pytest.raises(DataError, match=f"the columns neither of {TRUTH} nor of {METADATA}"):
        load_table(config(path))
    path.write_text("image,patient\na.png,1\n")
    with pytest.raises(DataError, match="no column 'MEL'"):
        load_table(config(path))


def test_a_partial_download_is_counted(tmp_path: Path) -> None:
    path = write_metadata(tmp_path)
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / f"{ROWS[3][1]}.jpg").touch()
    reading = read_table(config(path, partial=True))
    assert reading.table.images == ("ISIC_0024309.jpg",)
    assert reading.absent == 139


@pytest.mark.complete
@pytest.mark.data
def test_the_real_metadata_are_read(data_root: Path) -> None:
    folder = data_root / "ham10000_112px"
    table = load_table(config(folder / METADATA))
    assert len(table) == 8_012
    assert dict(zip(SPELLINGS, table.y.sum(axis=0).astype(int).tolist(), strict=True)) == {
        "MEL": 887,
        "NV": 5372,
        "BCC": 404,
        "AKIEC": 261,
        "BKL": 887,
        "DF": 87,
        "VASC": 114,
    }
    parts = {s: set(table.of(s).patients) for s in SPLITS}
    assert sum(map(len, parts.values())) == len(set(table.patients)) < len(table)
    assert len(parts["train"]) == pytest.approx(0.7 * len(set(table.patients)), abs=1)
    with ImageSource(folder / "images.tar") as source:
        assert all(name in source for name in table.images)
        assert source.read(table.images[0], color=True).shape == (84, 112, 3)
