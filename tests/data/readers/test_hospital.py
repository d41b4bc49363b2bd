"""suture.data.readers.hospital: a hospital's own CSV."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from suture.core.errors import ConfigError, DataError, LabelError
from suture.core.labels import LabelSet
from suture.data.readers import load_table, read_table
from suture.data.readers.hospital import HospitalConfig

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
    nan = np.nan
    assert table.labels.names == ("Pleural Effusion", "Mass")
    assert table.images == ("a.png", "b.png", "c.png", "d.png", "e.png")
    assert table.patients == ("P1", "P1", "P2", "P3", "P4")
    assert table.split == ("train", "train", "validation", "test", "")
    np.testing.assert_array_equal(table.y, [[1, 0], [nan, 1], [0, nan], [0, 0], [1, 1]])


def test_labels_choose_and_order_the_columns_under_any_spelling(path: Path) -> None:
    assert load_table(config(path, labels=("mass",))).labels.names == ("Mass",)
    table = load_table(config(path, labels=("Mass", "Pleural Effusion")))
    assert table.labels.names == ("Mass", "Pleural Effusion")
    assert table.y[0].tolist() == [0, 1]


def test_an_attribute_is_no_label(path: Path) -> None:
    tones = ("attribute", "light", "dark", "light", "", "dark")
    lines = zip(TABLE.splitlines(), tones, strict=True)
    path.write_text("".join(f"{line},{tone}\n" for line, tone in lines))
    table = load_table(config(path, attribute_column="attribute"))
    assert table.labels.names == ("Pleural Effusion", "Mass")
    assert load_table(config(path, attribute_column="attribute", labels=("Mass",))).labels.names == ("Mass",)
    with pytest.raises(DataError, match="column 'attribute': 'light' is not 1, 0 or blank"):
        load_table(config(path))
    with pytest.raises(DataError, match=r"no column 'tone'; .*\(\[data\] attribute_column names it\)"):
        load_table(config(path, attribute_column="tone"))


def test_synonyms_rename_columns(path: Path) -> None:
    path.write_text(TABLE.replace("Mass", "lump"))
    assert "Mass" in load_table(config(path, synonyms={"lump": "Mass"})).labels


def test_patients_can_be_divided_here(path: Path) -> None:
    path.write_text("image,patient,Mass\n" + "".join(f"{i}.png,P{i // 2},{i % 2}\n" for i in range(40)))
    split = load_table(config(path, split="patients")).split
    assert (split.count("train"), split.count("validation"), split.count("test")) == (28, 4, 8)


@pytest.mark.parametrize(
    ("old", "new", "error", "words"),
    [
        (
            "image,",
            "imge,",
            DataError,
            "no column 'image'; did you mean 'imge'? ([data] image_column names it)",
        ),
        ("patient,", "person,", DataError, "[data] patient_column"),
        ("split,", "fold,", DataError, 'or split = "patients"'),
        ("Mass", "Pleural Effusion", LabelError, "'Effusion' and 'Pleural Effusion' both"),
        ("Mass", "Effusion", LabelError, "labels 'Effusion' and 'Effusion' both"),
        (
            "b.png,P1,train,,1.0",
            "b.png,P1,train,,2",
            DataError,
            "row 3, column 'Mass': '2' is not 1, 0 or blank",
        ),
        ("c.png", "a.png", DataError, "row 4: a repeated image"),
        ("c.png", "", DataError, "row 4: the image name"),
        ("P2", "", DataError, "row 4: the patient"),
        ("val,", "trian,", DataError, "row 4: unknown split 'trian'; did you mean 'train'?"),
        ("P2,val", "P1,val", DataError, "rows 2, 3, 4: 1 patient in two splits"),
    ],
)
def test_a_fault_names_its_place_and_the_remedy(
    path: Path, old: str, new: str, error: type[Exception], words: str
) -> None:
    path.write_text(TABLE.replace(old, new, 1))
    with pytest.raises(error) as caught:
        load_table(config(path))
    assert str(path) in str(caught.value)
    assert words in str(caught.value)


def test_no_label_column_is_an_empty_label_set(path: Path) -> None:
    path.write_text("image,patient,split\na.png,P1,train\n")
    with pytest.raises(LabelError, match=r"labels\.csv: the label set is empty"):
        load_table(config(path))


def test_a_label_that_the_table_lacks_is_proposed(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"labels\.csv.*'Maas'; did you mean 'Mass'\?"):
        load_table(config(path, labels=("Maas",)))


def test_a_label_named_twice_is_refused(path: Path) -> None:
    with pytest.raises(LabelError, match="'Mass' and 'mass' both mean 'Mass'"):
        load_table(config(path, labels=("Mass", "mass")))


def test_an_unused_row_tears_no_patient(path: Path) -> None:
    path.write_text(TABLE.replace("P4", "P1"))
    assert len(load_table(config(path))) == 5


def test_all_faults_are_read_and_no_patient_is_named(path: Path) -> None:
    path.write_text(TABLE.replace("P2,val", "P1,val").replace("d.png", "a.png").replace("1.0", "perhaps"))
    faults = read_table(config(path)).faults
    assert len(faults) == 3
    assert "P1" not in " ".join(faults)
    with pytest.raises(DataError, match="and 2 more; `suture data check` lists them"):
        load_table(config(path))


def test_blank_documents_are_left_out_where_the_site_says_so(path: Path) -> None:
    path.write_text(
        'image,patient,report,split,Mass\n1,A,old,train,1\n2,B," ",train,x\n3,C,,test,0\n4,D,new,test,0\n'
    )
    assert "rows 3, 4" in " ".join(read_table(config(path, text_column="report")).faults)
    reading = read_table(config(path, text_column="report", partial=True))
    assert (reading.faults, reading.absent) == ((), 2)
    assert (reading.table.texts, reading.table.images) == (("old", "new"), ("1", "4"))


def test_a_partial_download_is_said_and_counted(path: Path) -> None:
    (path.parent / "b.png").touch()
    assert len(load_table(config(path))) == 5
    reading = read_table(config(path, partial=True))
    assert reading.table.images == ("b.png",)
    assert reading.absent == 4
    (path.parent / "b.png").unlink()
    with pytest.raises(DataError, match="none of the 5 images"):
        load_table(config(path, partial=True))


def test_a_multiclass_table_has_at_most_one_class_a_row(path: Path) -> None:
    path.write_text(TABLE.replace("e.png,P4,,1,1", "e.png,P4,,0,1"))
    assert load_table(config(path)).labels.label_type == "multilabel"
    table = load_table(config(path, label_type="multiclass"))
    assert table.labels.label_type == "multiclass"
    assert table.y[3].tolist() == [0, 0]
    assert (
        load_table(config(path, label_type="multiclass", labels=("Mass",))).labels.label_type == "multiclass"
    )


def test_two_classes_in_a_row_of_a_multiclass_table_are_a_fault(path: Path) -> None:
    path.write_text(TABLE.replace("b.png,P1,train,,1.0", "b.png,P1,train,1,1.0"))
    reading = read_table(config(path, label_type="multiclass"))
    assert reading.faults == (
        (
            f"{path} rows 3, 6: several classes in a multiclass table; keep one 1 in a row, or write [data] "
            'label_type = "multilabel"'
        ),
    )
    assert np.isnan(reading.table.y[[1, 4]]).all()
    assert not read_table(config(path)).faults
    assert not read_table(config(path, label_type="multiclass", labels=("Mass",))).faults


def test_a_column_of_documents(tmp_path: Path) -> None:
    path = tmp_path / "reports.csv"
    path.write_text(
        'study,patient,split,report,Mass\n1,P1,train,"No mass,\nno edema.",0\n2,P2,test,Mass.,1\n'
    )
    own = {"image_column": "study", "text_column": "report"}
    table = load_table(HospitalConfig(table=path, **own))
    assert table.images == ("1", "2")
    assert table.texts == ("No mass,\nno edema.", "Mass.")
    assert table.labels.names == ("Mass",)
    assert table.root == path
    assert table.of("test").restrict(LabelSet(("Edema",))).texts == ("Mass.",)
    with pytest.raises(DataError, match=r"no column 'reprot'.*\[data\] text_column"):
        load_table(HospitalConfig(table=path, image_column="study", text_column="reprot"))
    path.write_text(path.read_text().replace("Mass.,1", ",1"))
    with pytest.raises(DataError, match=r"row 3: column 'report'"):
        load_table(HospitalConfig(table=path, **own))
