"""suture_papers.chest_xrays.chexpert: small files of the official format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from suture.core.errors import ConfigError, DataError
from suture.data.readers import load_table, read_table
from suture_papers.chest_xrays.chexpert import LABELS, SPELLINGS, ChexpertConfig
from suture_papers.chest_xrays.nih import LABELS as NIH

HEADER = "Path,Sex,Age,Frontal/Lateral,AP/PA,No Finding," + ",".join(SPELLINGS) + "\n"


def line(patient: int, view: str = "frontal", folder: str = "train", **labels: str) -> str:
    path = f"CheXpert-v1.0-small/{folder}/patient{patient:05}/study1/view1_{view}.jpg"
    cells = (labels.get(name.replace(" ", "_"), "") for name in SPELLINGS)
    return f"{path},Female,68,{view.capitalize()},AP,," + ",".join(cells) + "\n"


TRAIN = (
    line(1, Edema="1.0", Lung_Opacity="-1.0"),
    line(1, "lateral", Edema="1.0"),
    line(2, Pleural_Effusion="0.0"),
    line(3, Fracture="1.0"),
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "train.csv").write_text(HEADER + "".join(TRAIN))
    (tmp_path / "valid.csv").write_text(HEADER + line(64541, folder="valid", Edema="1.0"))
    return tmp_path


def config(root: Path, **more: Any) -> ChexpertConfig:
    return ChexpertConfig(root=root, table=root / "train.csv", **more)


def test_frontal_images_with_blank_and_uncertain_as_absent(root: Path) -> None:
    table = load_table(config(root))
    assert table.images[0] == "train/patient00001/study1/view1_frontal.jpg"
    assert table.patients == ("patient00001", "patient00002", "patient00003")
    found = [{name for name, v in zip(table.labels, row, strict=True) if v == 1} for row in table.y]
    assert found == [{"Edema"}, set(), {"Fracture"}]
    assert not np.isnan(table.y).any()


@pytest.mark.parametrize(("rule", "value"), [("zeros", 0.0), ("ones", 1.0), ("ignore", np.nan)])
def test_what_uncertain_means(root: Path, rule: str, value: float) -> None:
    y = load_table(config(root, uncertain=rule)).y
    np.testing.assert_equal(float(y[0, LABELS.names.index("Lung Opacity")]), value)
    assert not np.isnan(np.delete(y, LABELS.names.index("Lung Opacity"), axis=1)).any()


def test_all_views_keep_a_patient_in_one_split(root: Path) -> None:
    table = load_table(config(root, views="all"))
    assert len(table) == 4
    assert table.patients[:2] == ("patient00001",) * 2
    assert table.split[0] == table.split[1]


def test_the_official_split_tests_on_valid_csv(root: Path) -> None:
    table = load_table(config(root, split="official"))
    assert table.of("test").images == ("valid/patient64541/study1/view1_frontal.jpg",)
    assert "test" not in table.split[:-1]
    (root / "valid.csv").write_text(HEADER + line(1, folder="valid"))
    (fault,) = read_table(config(root, split="official")).faults
    assert "valid.csv row 2: a patient" in fault
    assert "patient00001" not in fault
    (root / "valid.csv").unlink()
    with pytest.raises(DataError, match=r"valid\.csv"):
        load_table(config(root, split="official"))


def test_seven_findings_are_those_of_nih() -> None:
    shared = set(LABELS) & set(NIH)
    seven = ["Atelectasis", "Cardiomegaly", "Consolidation", "Edema", "Pneumonia", "Pneumothorax"]
    assert shared == {*seven, "Pleural Effusion"}
    assert len(set(LABELS) | set(NIH)) == 20


def test_faults_name_file_row_and_class(root: Path) -> None:
    (root / "train.csv").write_text(HEADER + line(1) + line(2, Edema="yes"))
    with pytest.raises(
        DataError, match=r"train\.csv row 3: 'Edema' is not one of 1\.0, 0\.0, -1\.0 and blank"
    ):
        load_table(config(root))
    (root / "train.csv").write_text(HEADER + line(1, "lateral"))
    with pytest.raises(DataError, match='frontal image; write \\[data\\] views = "all"'):
        load_table(config(root))
    (root / "train.csv").write_text((HEADER + line(1)).replace("Fracture", "Fractures"))
    with pytest.raises(DataError, match=r"no column 'Fracture'; did you mean 'Fractures'\?"):
        load_table(config(root))


def test_a_site_may_annotate_some(root: Path) -> None:
    assert load_table(config(root, labels=("Edema",))).y.tolist() == [[1], [0], [0]]
    with pytest.raises(ConfigError, match=r"'Edeema'; did you mean 'Edema'\?"):
        load_table(config(root, labels=("Edeema",)))
