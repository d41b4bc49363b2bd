"""suture_papers.chest_xrays.nih: the official files of NIH ChestX-ray14."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from suture.core.errors import ConfigError, DataError, LabelError
from suture.data.readers import load_table, read_table
from suture_papers.chest_xrays.nih import LABELS, NihConfig

V2020 = (
    "Image Index,Finding Labels,Follow-up #,Patient ID,Patient Age,Patient Gender,View Position,"
    "OriginalImage[Width,Height],OriginalImagePixelSpacing[x,y]\n"
)
ORIGINAL = V2020.replace("\n", ",\n")
ROWS = (
    ("00000001_000.png", "Cardiomegaly", "1"),
    ("00000001_001.png", "Cardiomegaly|Effusion", "1"),
    ("00000002_000.png", "No Finding", "2"),
    ("00000003_000.png", "Pleural_Thickening", "3"),
)


def write(folder: Path, header: str = V2020, rows: tuple[tuple[str, str, str], ...] = ROWS) -> Path:
    end = ",\n" if header == ORIGINAL else "\n"
    lines = [f"{i},{f},0,{p},57,M,PA,2682,2749,0.143,0.143{end}" for i, f, p in rows]
    path = folder / "Data_Entry_2017.csv"
    path.write_text(header + "".join(lines))
    return path


def config(path: Path, **more: Any) -> NihConfig:
    return NihConfig(root=path.parent, table=path, **{"split": "patients", **more})


@pytest.mark.parametrize("header", [V2020, ORIGINAL])
def test_both_headers_are_read(tmp_path: Path, header: str) -> None:
    table = load_table(config(write(tmp_path, header)))
    assert table.images[1] == "00000001_001.png"
    assert table.patients == ("1", "1", "2", "3")
    found = [{name for name, v in zip(table.labels, row, strict=True) if v == 1} for row in table.y]
    assert found == [{"Cardiomegaly"}, {"Cardiomegaly", "Pleural Effusion"}, set(), {"Pleural Thickening"}]
    assert not np.isnan(table.y).any()


def test_a_site_may_annotate_some_of_the_fourteen(tmp_path: Path) -> None:
    path = write(tmp_path)
    table = load_table(config(path, labels=("Effusion", "Cardiomegaly")))
    assert table.labels.names == ("Pleural Effusion", "Cardiomegaly")
    assert table.y.tolist() == [[0, 1], [1, 1], [0, 0], [0, 0]]
    with pytest.raises(ConfigError, match=r"'Cardiomegally'; did you mean 'Cardiomegaly'\?"):
        load_table(config(path, labels=("Cardiomegally",)))
    with pytest.raises(LabelError, match="both mean 'Pleural Effusion'"):
        load_table(config(path, labels=("Effusion", "Pleural Effusion")))


def test_an_unknown_finding_and_a_contradiction_are_faults(tmp_path: Path) -> None:
    rows = (*ROWS, ("4.png", "Efusion|Mass", "4"), ("5.png", "No Finding|Mass", "5"))
    reading = read_table(config(write(tmp_path, rows=rows)))
    assert len(reading.faults) == 2
    assert "row 6: unknown finding 'Efusion'; did you mean 'Effusion'?" in reading.faults[0]
    assert "row 7: unknown finding 'No Finding'" in reading.faults[1]
    assert np.isnan(reading.table.y[4:]).all()


def test_the_official_lists_decide_and_a_patient_stays_together(tmp_path: Path) -> None:
    rows = tuple(
        (f"{p:03d}_{i}.png", "Mass" if p % 2 else "No Finding", str(p)) for p in range(100) for i in (0, 1)
    )
    path = write(tmp_path, rows=rows)
    (tmp_path / "train_val_list.txt").write_text("".join(f"{i}\n" for i, _, p in rows if int(p) < 80))
    (tmp_path / "test_list.txt.gz").write_bytes(
        gzip.compress("".join(f"{i}\r\n" for i, _, p in rows if int(p) >= 80).encode())
    )
    split = load_table(config(path, split="official")).split
    assert [split.count(s) for s in ("train", "validation", "test")] == [140, 20, 40]
    assert set(split[160:]) == {"test"}
    assert split[0::2] == split[1::2]
    assert load_table(config(path, split="official", seed=1)).split != split


def test_an_image_in_no_list_and_a_missing_list_are_named(tmp_path: Path) -> None:
    path = write(tmp_path)
    with pytest.raises(DataError, match=r"train_val_list\.txt is missing; set \[data\] lists"):
        load_table(config(path, split="official"))
    lists = tmp_path / "lists"
    lists.mkdir()
    (lists / "train_val_list.txt").write_text("\n".join(image for image, _, _ in ROWS[:3]))
    (lists / "test_list.txt").write_text("")
    with pytest.raises(DataError, match=r"row 5: .*train_val_list\.txt and test_list\.txt"):
        load_table(config(path, split="official", lists=lists))


def test_a_hospital_table_is_not_an_nih_table(tmp_path: Path) -> None:
    path = tmp_path / "labels.csv"
    path.write_text("image,patient\na.png,1\n")
    with pytest.raises(DataError, match="no column 'Image Index'"):
        load_table(config(path))


@pytest.mark.complete
@pytest.mark.data
def test_the_whole_of_nih_is_read(data_root: Path) -> None:
    folder = data_root / "nih_metadata"
    table = load_table(config(folder / "Data_Entry_2017_v2020.csv.gz", split="official"))
    assert len(table) == 112_120
    assert len(set(table.patients)) == 30_805
    # Wang et al. (2017) count the same images.
    assert dict(zip(LABELS, table.y.sum(axis=0).astype(int).tolist(), strict=True)) == {
        "Atelectasis": 11559,
        "Cardiomegaly": 2776,
        "Consolidation": 4667,
        "Edema": 2303,
        "Pleural Effusion": 13317,
        "Emphysema": 2516,
        "Fibrosis": 1686,
        "Hernia": 227,
        "Infiltration": 19894,
        "Mass": 5782,
        "Nodule": 6331,
        "Pleural Thickening": 3385,
        "Pneumonia": 1431,
        "Pneumothorax": 5302,
    }
    assert table.split.count("test") == 25_596
    assert table.split.count("train") + table.split.count("validation") == 86_524
    learning = {p for p, s in zip(table.patients, table.split, strict=True) if s != "test"}
    validation = {p for p, s in zip(table.patients, table.split, strict=True) if s == "validation"}
    assert len(validation) == pytest.approx(0.125 * len(learning), abs=1)
