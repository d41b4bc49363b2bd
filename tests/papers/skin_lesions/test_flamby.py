"""suture_papers.skin_lesions.flamby: FLamby's table of six centres, and the lists of Fed-MAS."""

from __future__ import annotations

import gzip
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from suture.core.errors import DataError
from suture.data.readers import load_table, read_table
from suture_papers.skin_lesions.flamby import (
    LABELS,
    SPELLINGS,
    TRUTH,
    FlambyConfig,
    centres,
    list_images,
    tones,
)

# Image, class and whether it trains: twenty of each class.
Row = tuple[str, int, bool]
ROWS: tuple[Row, ...] = tuple((f"ISIC_{24306 + i:07d}", i % 8, i % 5 > 0) for i in range(160))


def write_whole(folder: Path, rows: tuple[Row, ...] = ROWS) -> Path:
    lines = ["image," + ",".join(SPELLINGS) + ",UNK,target,center,fold,fold2"]
    for i, (image, dx, trains) in enumerate(rows):
        cells = ",".join("1.0" if k == dx else "0.0" for k in range(8))
        part = "train" if trains else "test"
        lines.append(f"{image},{cells},0.0,{dx},{i % 6},{part},{part}_{i % 6}")
    (folder / TRUTH).write_text("\n".join(lines) + "\n")
    return folder / TRUTH


def write_list(folder: Path, rows: tuple[Row, ...] = ROWS) -> Path:
    path = folder / "train_flamby_isic_fl_0_1.csv"
    lines = [",image_name,dx", *(f"{i},{image},{dx}" for i, (image, dx, _) in enumerate(rows))]
    path.write_text("\n".join(lines) + "\n")
    return path


def write_lesions(folder: Path, blank: int = 0) -> Path:
    """Two images of each lesion (which are then of one class), as far as they have one."""
    path = folder / "ISIC_2019_Training_Metadata.csv"
    lines = ["image,age_approx,anatom_site_general,lesion_id,sex"]
    for i, (image, _, _) in enumerate(ROWS):
        lines.append(
            f"{image},55.0,anterior torso,{'' if i < blank else f'BCN_{i // 16 * 8 + i % 8}'},female"
        )
    path.write_text("\n".join(lines) + "\n")
    return path


def config(path: Path, **more: Any) -> FlambyConfig:
    return FlambyConfig(root=path.parent, table=path, **more)


def test_both_tables_say_the_same(tmp_path: Path) -> None:
    whole, own = (load_table(config(write(tmp_path))) for write in (write_whole, write_list))
    assert (own.labels, own.images, own.patients) == (whole.labels, whole.images, whole.patients)
    np.testing.assert_array_equal(own.y, whole.y)
    np.testing.assert_array_equal(whole.y[:8], np.eye(8))
    assert whole.labels == LABELS
    assert LABELS.names[3] == "Actinic Keratosis"
    assert LABELS.names[7] == "Squamous Cell Carcinoma"
    assert LABELS.label_type == "multiclass"
    assert whole.images[0] == "ISIC_0024306.jpg"


def test_the_official_division_with_a_tenth_of_each_class_for_validation(tmp_path: Path) -> None:
    whole = load_table(config(write_whole(tmp_path)))
    assert [split != "test" for split in whole.split] == [trains for _, _, trains in ROWS]
    # Of twenty images of a class four test and sixteen train: 14.4 and 1.6.
    for name, n in (("train", 14), ("validation", 2), ("test", 4)):
        assert whole.of(name).y.sum(axis=0).tolist() == [n] * 8  # type: ignore[arg-type]
    own = load_table(config(write_list(tmp_path)))
    assert Counter(own.split) == {"train": 144, "validation": 16}
    assert load_table(config(write_list(tmp_path), seed=1)).split != own.split


@pytest.mark.parametrize("write", [write_whole, write_list])
def test_lesions_or_images_may_be_divided_instead(tmp_path: Path, write: Any) -> None:
    path = write(tmp_path)
    with pytest.raises(DataError, match=r"neither ISIC_2019_Training_Metadata.csv nor HAM10000_metadata.csv"):
        load_table(config(path, split="lesions"))
    write_lesions(tmp_path)
    table = load_table(config(path, split="lesions"))
    assert table.patients[0] == table.patients[8] == "BCN_0"
    assert [table.split.count(s) for s in ("train", "validation", "test")] == [112, 16, 32]
    of = dict(zip(table.patients, table.split, strict=True))
    assert [of[lesion] for lesion in table.patients] == list(table.split)
    images = load_table(config(path, split="images"))
    assert images.patients == images.images
    assert all(images.of("test").y.sum(axis=0) == 4)


def test_an_image_without_a_lesion_is_one_of_its_own(tmp_path: Path) -> None:
    path = write_whole(tmp_path)
    write_lesions(tmp_path, blank=1)
    table = load_table(config(path, split="lesions"))
    assert (table.patients[0], table.patients[8]) == ("ISIC_0024306.jpg", "BCN_0")
    lists = tmp_path / "lists"
    lists.mkdir()
    ham = f"lesion_id,image_id,dx\nHAM_1,{ROWS[0][0]},nv\nHAM_1,{ROWS[8][0]},nv\n"
    (lists / "HAM10000_metadata.csv.gz").write_bytes(gzip.compress(ham.encode()))
    table = load_table(config(path, split="lesions", lists=lists))
    assert table.patients[:2] == ("HAM_1", "ISIC_0024307.jpg")
    assert table.patients[8] == "HAM_1"


def test_what_is_no_class_is_a_fault(tmp_path: Path) -> None:
    rows = tuple((image, 8 if i % 70 == 0 else dx, t) for i, (image, dx, t) in enumerate(ROWS))
    reading = read_table(config(write_list(tmp_path, rows)))
    assert len(reading.faults) == 1
    assert "rows 2, 72, 142: unknown dx '8'; known: 0, 1, 2" in reading.faults[0]
    assert np.isnan(reading.table.y[0]).all()
    reading = read_table(config(write_whole(tmp_path, rows)))
    assert "rows 2, 72, 142: " in reading.faults[0]
    assert np.isnan(reading.table.y[70]).all()


def test_an_unknown_part_a_blank_and_a_repeated_image_are_faults(tmp_path: Path) -> None:
    path = write_whole(tmp_path, (*ROWS, ("", 1, True), ROWS[0]))
    path.write_text(path.read_text().replace(",train,", ",trian,", 1))
    fold, blank, repeated = (fault.partition(TRUTH)[2] for fault in read_table(config(path)).faults)
    assert fold.startswith(" row 3: column 'fold'")
    assert blank.startswith(" row 162: the image name")
    assert repeated.startswith(" row 163: a repeated image")


def test_another_table_is_told(tmp_path: Path) -> None:
    path = tmp_path / "labels.csv"
    path.write_text("picture,patient\na.png,1\n")
    with pytest.raises(DataError, match=f"the columns neither of {TRUTH} nor of a centre's list"):
        load_table(config(path))
    path.write_text("image,patient\na.png,1\n")
    with pytest.raises(DataError, match="no column 'MEL'"):
        load_table(config(path))


def test_the_centre_of_each_image_and_the_images_of_a_list(tmp_path: Path) -> None:
    path = write_whole(tmp_path)
    assert centres(path)["ISIC_0024311.jpg"] == 5
    assert list_images(write_list(tmp_path)) == {f"{image}.jpg" for image, _, _ in ROWS}
    path.write_text("image,center\na,vienna\n")
    with pytest.raises(DataError, match="row 2: column 'center'"):
        centres(path)


def test_skin_tones(tmp_path: Path) -> None:
    path = tmp_path / "tones.csv"
    path.write_text("image,skin_tone\nISIC_1,Dark\nISIC_2.jpg,light\n")
    assert tones(path) == {"ISIC_1.jpg": "dark", "ISIC_2.jpg": "light"}
    path.write_text("image,skin_tone\nISIC_1,medium\n")
    with pytest.raises(DataError, match="row 2: unknown skin_tone 'medium'; write light or dark"):
        tones(path)
    path.write_text("image,tone\nISIC_1,dark\n")
    with pytest.raises(DataError, match="no column 'skin_tone'"):
        tones(path)


@pytest.mark.complete
@pytest.mark.data
def test_the_real_lists_are_the_training_images_of_the_real_table(data_root: Path) -> None:
    folder = data_root / "flamby_isic"
    whole = load_table(config(folder / f"{TRUTH}.gz"))
    assert Counter(whole.split)["test"] == 4650
    of = centres(folder / f"{TRUTH}.gz")
    sizes = {}
    for k in range(6):
        own = load_table(config(folder / f"train_flamby_isic_fl_{k}_1.csv.gz"))
        here = np.array([of[image] == k for image in whole.images]) & (np.array(whole.split) != "test")
        assert set(own.images) == set(whole.rows(here).images)
        sizes[k] = len(own)
        # No class that a centre has is missing in its training images.
        assert ((own.of("train").y.sum(axis=0) > 0) == (own.y.sum(axis=0) > 0)).all()
    assert list(sizes.values()) == [9930, 3163, 2691, 1807, 655, 351]
    y = dict(zip(whole.images, whole.y.argmax(axis=1).tolist(), strict=True))
    assert all(y[image] == k for image, k in zip(own.images, own.y.argmax(axis=1).tolist(), strict=True))
