"""suture.data.readers.hospital: a hospital's own CSV; and the rows of a table with what belongs to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from suture.core.errors import ConfigError, DataError, LabelError
from suture.core.labels import LabelSet
from suture.data.readers import load_table, read_table
from suture.data.readers.hospital import HospitalConfig
from suture.data.table import Table
from world import refused

NAN = np.nan

TABLE = """image,patient,split,Effusion,Mass
a.png,P1,train,1,0
b.png,P1,train,,1.0
c.png,P2,val,0,
d.png,P3,test,0,0
e.png,P4,,1,1
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "labels.csv"
    path.write_text(TABLE)
    return path


def config(path: Path, **more: Any) -> HospitalConfig:
    return HospitalConfig(root=path if "text_column" in more else path.parent, table=path, **more)


def test_a_table_is_read(path: Path) -> None:
    table = load_table(config(path))
    assert table.labels.names == ("Pleural Effusion", "Mass")
    assert table.images == ("a.png", "b.png", "c.png", "d.png", "e.png")
    assert table.patients == ("P1", "P1", "P2", "P3", "P4")
    assert table.split == ("train", "train", "validation", "test", "")
    np.testing.assert_array_equal(table.y, [[1, 0], [NAN, 1], [0, NAN], [0, 0], [1, 1]])
    path.write_text(TABLE.replace("P4", "P1"))
    assert len(load_table(config(path))) == 5, "an unused row tears no patient"


def test_labels_choose_and_order_the_columns_under_any_spelling(path: Path) -> None:
    assert load_table(config(path, labels=("mass",))).labels.names == ("Mass",)
    table = load_table(config(path, labels=("Mass", "Pleural Effusion")))
    assert table.labels.names == ("Mass", "Pleural Effusion")
    assert table.y[0].tolist() == [0, 1]
    path.write_text(TABLE.replace("Mass", "lump"))
    assert "Mass" in load_table(config(path, synonyms={"lump": "Mass"})).labels


def test_an_attribute_is_no_label(path: Path) -> None:
    tones = ("attribute", "light", "dark", "light", "", "dark")
    lines = zip(TABLE.splitlines(), tones, strict=True)
    path.write_text("".join(f"{line},{tone}\n" for line, tone in lines))
    own = {"attribute_column": "attribute"}
    assert load_table(config(path, **own)).labels.names == ("Pleural Effusion", "Mass")
    assert load_table(config(path, **own, labels=("Mass",))).labels.names == ("Mass",)
    with refused("'attribute'", "'light'", by=DataError):
        load_table(config(path))
    with refused("'tone'", "[data] attribute_column", by=DataError):
        load_table(config(path, attribute_column="tone"))


@pytest.mark.parametrize(
    ("old", "new", "error", "named"),
    [
        ("image,", "imge,", DataError, ["'image'", "'imge'", "[data] image_column"]),
        ("patient,", "person,", DataError, ["[data] patient_column"]),
        ("split,", "fold,", DataError, ['split = "patients"']),
        ("Mass", "Pleural Effusion", LabelError, ["'Effusion' and 'Pleural Effusion'"]),
        ("Mass", "Effusion", LabelError, ["'Effusion' and 'Effusion'"]),
        ("b.png,P1,train,,1.0", "b.png,P1,train,,2", DataError, ["row 3, column 'Mass': '2'"]),
        ("c.png", "a.png", DataError, ["row 4"]),
        ("c.png", "", DataError, ["row 4", "image"]),
        ("P2", "", DataError, ["row 4", "patient"]),
        ("val,", "trian,", DataError, ["row 4", "'trian'", "'train'"]),
        ("P2,val", "P1,val", DataError, ["rows 2, 3, 4", "1 patient"]),
        (TABLE, "image,patient,split\na.png,P1,train\n", LabelError, []),
    ],
)
def test_a_fault_names_its_place(
    path: Path, old: str, new: str, error: type[Exception], named: list[str]
) -> None:
    path.write_text(TABLE.replace(old, new, 1))
    with refused(path, *named, by=error):
        load_table(config(path))


def test_labels_that_the_table_lacks_or_that_are_one_are_refused(path: Path) -> None:
    with refused("labels.csv", "'Maas'", "'Mass'", by=ConfigError):
        load_table(config(path, labels=("Maas",)))
    with refused("'Mass' and 'mass'", by=LabelError):
        load_table(config(path, labels=("Mass", "mass")))


def test_all_faults_are_read_and_no_patient_is_named(path: Path) -> None:
    path.write_text(TABLE.replace("P2,val", "P1,val").replace("d.png", "a.png").replace("1.0", "perhaps"))
    faults = read_table(config(path)).faults
    assert len(faults) == 3
    assert "P1" not in " ".join(faults)
    with refused("2 more", by=DataError):
        load_table(config(path))


def test_a_partial_download_is_said_and_counted(path: Path) -> None:
    (path.parent / "b.png").touch()
    assert len(load_table(config(path))) == 5
    reading = read_table(config(path, partial=True))
    assert (reading.table.images, reading.absent) == (("b.png",), 4)
    (path.parent / "b.png").unlink()
    with refused("5 images", by=DataError):
        load_table(config(path, partial=True))


def test_a_multiclass_table_has_at_most_one_class_a_row(path: Path) -> None:
    assert load_table(config(path)).labels.label_type == "multilabel"
    path.write_text(TABLE.replace("b.png,P1,train,,1.0", "b.png,P1,train,1,1.0"))
    reading = read_table(config(path, label_type="multiclass"))
    assert reading.table.labels.label_type == "multiclass"
    (fault,) = reading.faults
    assert f"{path} rows 3, 6" in fault
    assert np.isnan(reading.table.y[[1, 4]]).all()
    assert reading.table.y[3].tolist() == [0, 0]
    assert not read_table(config(path)).faults
    one = read_table(config(path, label_type="multiclass", labels=("Mass",)))
    assert (one.faults, one.table.labels.label_type) == ((), "multiclass")


def test_a_column_of_documents(path: Path) -> None:
    path.write_text(
        'study,patient,split,report,Mass\n1,P1,train,"No mass,\nno edema.",0\n2,P2,test,Mass.,1\n'
    )
    own = {"image_column": "study", "text_column": "report"}
    table = load_table(HospitalConfig(table=path, **own))
    assert (table.images, table.labels.names, table.root) == (("1", "2"), ("Mass",), path)
    assert table.texts == ("No mass,\nno edema.", "Mass.")
    assert table.of("test").restrict(LabelSet(("Edema",))).texts == ("Mass.",)
    with refused("'reprot'", "[data] text_column", by=DataError):
        load_table(HospitalConfig(table=path, image_column="study", text_column="reprot"))
    path.write_text(path.read_text().replace("Mass.,1", ",x"))
    assert any("row 3" in fault for fault in read_table(HospitalConfig(table=path, **own)).faults)
    partial = read_table(HospitalConfig(table=path, **own, partial=True))
    assert (partial.faults, partial.absent) == ((), 1)
    assert (partial.table.texts, partial.table.images) == (("No mass,\nno edema.",), ("1",))


def notes(*texts: str) -> Table:
    y = np.array([[1, 0], [0, 1], [np.nan, 1]], dtype=np.float32)
    split = ("train", "test", "train")
    return Table(LabelSet(("A", "B")), ("1", "2", "3"), ("P", "Q", "P"), y, split, Path("t.csv"), texts)


def test_documents_go_with_their_rows() -> None:
    table = notes("one", "two", "three")
    assert table.rows(np.array([2, 0])).texts == ("three", "one")
    assert table.of("test").texts == ("two",)
    restricted = table.restrict(LabelSet(("B", "C")))
    assert restricted.texts == table.texts
    np.testing.assert_array_equal(restricted.y, [[0, np.nan], [1, np.nan], [1, np.nan]])
    with refused("t.csv", "3 images", "2 texts", by=DataError):
        notes("one", "two")
