"""suture.data.closing: a site's atlas closes its own labels, wherever its table is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from suture.core.errors import ConfigError
from suture.data.closing import with_ancestors
from suture.data.config import load_site_config, write_site_config
from suture.data.dataset import DatasetConfig
from suture.data.readers import load_table, read_table
from suture_prepare.quality import check
from world import refused, site_config

NAN = np.nan

TABLE = """\
image,patient,split,Lung Opacity,Consolidation,Edema
a.png,1,train,,1,
b.png,2,train,0,,
c.png,3,test,1,0,
d.png,4,test,0,1,
"""

OPEN = TABLE[: TABLE.index("d.png")]

CHILDREN = """\
image,patient,split,Consolidation,Edema
a.png,1,train,1,0
b.png,2,train,0,0
c.png,3,train,,1
d.png,4,validation,1,0
e.png,5,test,0,1
"""

SAME = """\
areas = ["chest"]

[[decisions]]
name = "Air Space Shadow"
relation = "same"
of = "Consolidation"
by = "M. Ruiz"
on = 2026-11-25
"""


def site(folder: Path, table: str, **keys: Any) -> Any:
    folder.mkdir(exist_ok=True)
    (folder / "labels.csv").write_text(table)
    return site_config(folder, data={"dataset": "hospital", "root": ".", "table": "labels.csv"} | keys)


def with_all(folder: Path, table: str, atlas: str = "chest") -> DatasetConfig:
    config: DatasetConfig = site(folder, table, atlas=atlas).data
    return config.model_copy(update={"ancestors": True})


def test_an_area_closes_the_labels_of_the_sites_own_classes_and_adds_none(tmp_path: Path) -> None:
    y = load_table(site(tmp_path, TABLE).data).y  # without an atlas nothing is implied
    np.testing.assert_array_equal(y, [[NAN, 1, NAN], [0, NAN, NAN], [1, 0, NAN], [0, 1, NAN]])
    reading = read_table(site(tmp_path, OPEN, atlas="chest").data)
    assert reading.table.labels.names == ("Lung Opacity", "Consolidation", "Edema")
    np.testing.assert_array_equal(reading.table.y, [[1, 1, NAN], [0, 0, 0], [1, 0, NAN]])
    assert "labels.csv: 3 unknown labels" in reading.notes[-1]


def test_contradictions_are_faults_that_name_the_rows_unless_a_choice_settles_them(tmp_path: Path) -> None:
    config = site(tmp_path, TABLE, atlas="chest")
    (fault,) = read_table(config.data).faults
    assert "labels.csv row 5: 'Lung Opacity' = 0 and 'Consolidation' = 1" in fault
    assert any(fault in problem for problem in check(config).problems)
    for choice, last in (("child wins", [1, 1, NAN]), ("leave out", [NAN, NAN, NAN])):
        reading = read_table(site(tmp_path, TABLE, atlas="chest", contradictions=choice).data)
        assert reading.faults == ()
        np.testing.assert_array_equal(reading.table.y[-1], last)
        assert any("row 5" in note and f'"{choice}"' in note for note in reading.notes)


def test_a_file_of_the_study_is_found_beside_the_sites_file_and_stays_found(tmp_path: Path) -> None:
    (tmp_path / "labels.toml").write_text('[parents]\nConsolidation = ["Edema"]\n')
    config = site(tmp_path / "a", OPEN, atlas="../labels.toml")
    np.testing.assert_array_equal(load_table(config.data).y[0], [NAN, 1, 1])
    (tmp_path / "b").mkdir()
    write_site_config(tmp_path / "b" / "suture.toml", config)
    assert load_site_config(tmp_path / "b" / "suture.toml").data == config.data


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"contradictions": "leave out"}, ["contradictions", "atlas"]),
        ({"atlas": "chest", "label_type": "multiclass"}, ["atlas", "multiclass"]),
        ({"atlas": "chset"}, ["chset", "chest"]),
    ],
)
def test_an_atlas_that_cannot_be_used(tmp_path: Path, keys: dict[str, str], named: list[str]) -> None:
    with refused(*named, by=ConfigError):
        read_table(site(tmp_path, OPEN.replace("1,0,", "1,,"), **keys).data)


def test_ancestors_are_known_where_a_class_below_is_present_and_in_training_alone(tmp_path: Path) -> None:
    config = with_all(tmp_path, CHILDREN)
    table = with_ancestors(load_table(config), config)
    assert table.labels.names == ("Consolidation", "Edema", "Lung Opacity")
    assert table.labels.one_sided == {"Lung Opacity": ("Consolidation", "Edema")}
    assert table.labels.annotated == ("Consolidation", "Edema")
    np.testing.assert_array_equal(table.y[:, 2], [1, NAN, 1, NAN, NAN])
    np.testing.assert_array_equal(table.y[:, :2], load_table(config).y)
    annotated = with_all(tmp_path, OPEN)
    assert with_ancestors(load_table(annotated), annotated).labels.one_sided == {}
    plain = site(tmp_path, CHILDREN, atlas="chest").data
    assert with_ancestors(load_table(plain), plain).labels.names == ("Consolidation", "Edema")


def test_an_unrelated_class_changes_no_label_of_the_others(tmp_path: Path) -> None:
    more = ["Hernia", "1", "0", "", "1", "0"]
    wider = "\n".join(f"{line},{cell}" for line, cell in zip(CHILDREN.split(), more, strict=True))
    configs = [with_all(tmp_path / "a", CHILDREN), with_all(tmp_path / "b", wider)]
    one, two = (with_ancestors(load_table(config), config) for config in configs)
    assert {*two.labels} - {*one.labels} == {"Hernia"}
    where = [two.labels.index(name) for name in one.labels]
    assert one.y.tobytes() == np.ascontiguousarray(two.y[:, where]).tobytes()


def test_a_class_is_closed_under_the_name_that_was_decided(tmp_path: Path) -> None:
    """The site keeps its own name; the atlas relates the class by the other one."""
    (tmp_path / "labels.toml").write_text(SAME)
    own = OPEN.replace("Consolidation", "Air Space Shadow")
    table = load_table(site(tmp_path, own, atlas="labels.toml").data)
    plain = load_table(site(tmp_path / "plain", OPEN, atlas="chest").data)
    where = [table.labels.index({"Consolidation": "Air Space Shadow"}.get(n, n)) for n in plain.labels]
    np.testing.assert_array_equal(table.y[:, where], plain.y)

    config = with_all(tmp_path, CHILDREN.replace("Consolidation", "Air Space Shadow"), "labels.toml")
    wider = with_ancestors(load_table(config), config)
    assert wider.labels.one_sided == {"Lung Opacity": ("Air Space Shadow", "Edema")}
    np.testing.assert_array_equal(wider.y[:, 2], [1, NAN, 1, NAN, NAN])

    (tmp_path / "labels.toml").write_text(SAME.replace("Consolidation", "Edema"))
    with refused("'Air Space Shadow' and 'Edema'", by=ConfigError):  # two columns
        read_table(config)
