"""The shipped atlas is without faults, and a study's labels.toml adds to it."""

from __future__ import annotations

import datetime
import itertools
import tomllib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from suture.core.errors import ConfigError
from suture.core.labels import LabelSet, canonical, key
from suture.core.ontology import (
    LABELS,
    Atlas,
    Decision,
    Relations,
    excerpt,
    implied,
    read_atlas,
    record,
    study_atlas,
    write_excerpt,
)
from suture.core.vocabulary import AREAS, CANONICAL, ENTRIES, SYNONYMS, groups, read_word_list, rows

ON = datetime.date(2026, 11, 25)


def test_every_class_has_one_row_and_its_own_name_in_canonical_form() -> None:
    assert max(Counter(row["class"] for row in rows("classes")).values()) == 1
    assert max(Counter(map(key, CANONICAL)).values()) == 1
    assert [name for name in CANONICAL if canonical(name) != name] == []


def test_no_synonym_is_of_two_classes_or_itself_a_class() -> None:
    of: dict[str, set[str]] = {}
    for row in rows("synonyms"):
        of.setdefault(key(row["synonym"]), set()).add(row["class"])
        assert {*row["language"].split()} <= {"en", "es", "de", "fr", "it", "pt"}
    assert {spelling: names for spelling, names in of.items() if len(names) > 1} == {}
    # "barretts" and the like differ from the class by more than case and dashes; none hides another class.
    assert not {spelling for spelling in of if spelling in map(key, CANONICAL)}
    assert {*SYNONYMS.values()} <= {*CANONICAL}


def test_chest_findings_of_nih_have_names_in_five_languages() -> None:
    spoken: dict[str, set[str]] = {}
    for row in rows("synonyms"):
        spoken.setdefault(row["class"], set()).update(row["language"].split())
    # Where a language has the same word as English, it needs no synonym.
    same = {
        "Consolidation": {"fr"},
        "Hernia": {"es"},
        "Infiltration": {"fr"},
        "Mass": {"de"},  # "Raumforderung" is of any organ, and means more than a mass
        "Nodule": set(),
        "Pneumonia": {"pt"},
        "Pneumothorax": {"de", "fr"},
    }
    for name in read_word_list("nih14"):
        assert {"es", "de", "fr", "pt"} - spoken.get(name, set()) - same.get(name, set()) == set(), name


@pytest.mark.parametrize("table", ["classes", "groups", "synonyms"])
def test_every_source_and_class_of_a_row_is_known(table: str) -> None:
    sources = {row["source"] for row in rows("sources")}
    for row in rows(table):
        cited = {row.get("source", ""), row.get("parents_source", ""), *row.get("lists", "").split(";")}
        assert cited - {""} <= sources, row
        named = {row.get("class", ""), row.get("parent", ""), *row.get("classes", "").split(";")}
        assert {*named, *row.get("parents", "").split(";")} - {""} <= {*CANONICAL}, row
        assert bool(row.get("parents")) == bool(row.get("parents_source")), row


def test_every_source_says_what_it_is_and_under_which_licence_its_data_are() -> None:
    for row in rows("sources"):
        assert row["title"]
        assert row["source"] == "name" or (
            row["reference"] and row["licence_of_the_data"] and row["version"]
        ), row


@pytest.mark.parametrize("area", AREAS)
def test_the_relations_of_an_area_can_hold_and_stay_in_it(area: str) -> None:
    relations = read_atlas(area).relations()
    assert {ENTRIES[name].area for name in relations.order} <= {area}


def test_no_group_spans_two_areas() -> None:
    for kind in ("exhaustive", "exclusive"):
        assert all(len({ENTRIES[name].area for name in group}) == 1 for _, group in groups(kind))


def test_the_lists_are_those_of_the_readers() -> None:
    from suture_papers.chest_xrays import chexpert, nih
    from suture_papers.fedmas.hyperkvasir import LABELS as KVASIR
    from suture_papers.skin_lesions.isic import LABELS as ISIC

    for source, labels in {"isic2018": ISIC, "hyperkvasir": KVASIR, "chexpert": chexpert.LABELS}.items():
        assert {*read_word_list(source)} == {*labels} | ({"No Finding"} & {*read_word_list(source)}), source
    assert {*read_word_list("nih14")} == {*nih.LABELS}
    assert read_word_list("mimic") == read_word_list("brax") == read_word_list("chexpert")
    assert len(read_word_list("cxr-lt")) == 26


def test_what_the_chest_says() -> None:
    chest = read_atlas("chest").relations()
    assert chest.with_ancestors(["Nodule"])[::-1] == (
        "Nodule",
        "Nodule or Mass",
        "Lung Lesion",
        "Lung Opacity",
    )
    assert {*chest.with_ancestors(["Hydropneumothorax"])} >= {"Pneumothorax", "Pleural Effusion"}
    assert ("Nodule or Mass", ("Nodule", "Mass")) in chest.exhaustive


FILE = """\
areas = ["chest"]
exclusive = [["mild scoliosis", "Severe Scoliosis"]]

[parents]
"Mild Scoliosis" = ["scoliosis"]
"Severe Scoliosis" = ["Scoliosis"]

[exhaustive]
Scoliosis = [["Mild Scoliosis", "Severe Scoliosis"]]
"""


def decide(name: str, relation: str, of: str) -> Decision:
    return Decision(name=name, relation=relation, of=of, by="M. Ruiz", on=ON)  # type: ignore[arg-type]


def test_a_studys_file_adds_to_the_shipped_relations(tmp_path: Path) -> None:
    (tmp_path / LABELS).write_text(FILE)
    found = study_atlas(tmp_path).relations()
    assert found.parents["Mild Scoliosis"] == ("Scoliosis",)
    assert found.parents["Consolidation"] == ("Lung Opacity",)
    assert found.exhaustive[-1] == ("Scoliosis", ("Mild Scoliosis", "Severe Scoliosis"))
    assert found.exclusive[-1] == ("Mild Scoliosis", "Severe Scoliosis")
    assert study_atlas(tmp_path / "none") == Atlas()


def test_decisions_are_added_to_the_file_and_the_last_one_holds(tmp_path: Path) -> None:
    (tmp_path / LABELS).write_text(FILE + "# a remark\n")
    record(tmp_path, [decide("Lesion", "same", "Lung Lesion"), decide("Spot", "different", "Lesion")])
    record(tmp_path, [decide("Shadow", "same", "Lesion"), decide("Streak", "child", "Shadow")])
    text = (tmp_path / LABELS).read_text()
    assert text.startswith(FILE + "# a remark\n")
    assert 'by = "M. Ruiz"\non = 2026-11-25\n' in text
    atlas = study_atlas(tmp_path)
    assert [one.name for one in atlas.decisions] == ["Lesion", "Spot", "Shadow", "Streak"]
    assert atlas.list_decisions("same") == [("Lesion", "Lung Lesion"), ("Shadow", "Lesion")]
    assert atlas.list_decisions("different") == [("Spot", "Lesion")]
    assert atlas.name("SHADOW") == "Lung Lesion"
    assert atlas.relations().parents["Streak"] == ("Lung Lesion",)

    record(tmp_path, [decide("Lung Lesion", "different", "Lesion")])
    assert study_atlas(tmp_path).list_decisions("same") == [("Shadow", "Lesion")]


def test_without_a_file_the_first_decision_makes_one(tmp_path: Path) -> None:
    record(tmp_path, [decide("Lesion", "same", "Lung Lesion")])
    assert study_atlas(tmp_path).relations() == Relations()
    assert study_atlas(tmp_path).decisions == (decide("Lesion", "same", "Lung Lesion"),)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('areas = ["chets"]', "unknown area of the atlas 'chets'; did you mean 'chest'"),
        ('[parents]\nA = ["B"]\nB = ["A"]', "labels.toml: 'A' < 'B' < 'A'|labels.toml: 'B' < 'A' < 'B'"),
        ('areas = ["chest"]\n[parents]\n"Lung Opacity" = ["Nodule"]', "cannot be its own ancestor"),
        ('[exhaustive]\nA = [["B"]]', "which is not among its parents"),
        ("[parents]\nA = []", "parents.A"),
        ('parent = "B"', "unknown key 'parent'; did you mean 'parents'"),
        ('[parents]\n"$x" = ["B"]', "not a label name"),
        ("decisions = [{}]", "decisions"),
    ],
)
def test_a_file_with_a_fault(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / LABELS).write_text(text)
    with pytest.raises(ConfigError, match=says):
        study_atlas(tmp_path)


@pytest.mark.parametrize(
    ("decision", "says"),
    [
        (decide("Effusion", "same", "pleural effusion"), "spellings of one name"),
        (decide("Lung Opacity", "child", "Consolidation"), "cannot be its own ancestor"),
        (decide("A", "same", "B").model_copy(update={"by": "a\nb"}), "printable"),
    ],
)
def test_a_decision_that_cannot_be_leaves_the_file_as_it_was(
    tmp_path: Path, decision: Decision, says: str
) -> None:
    (tmp_path / LABELS).write_text(FILE)
    with pytest.raises(ConfigError, match=says):
        record(tmp_path, [decision])
    assert (tmp_path / LABELS).read_text() == FILE


def test_a_missing_file_names_the_areas(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"or an area of the atlas \(known: chest, endoscopy"):
        read_atlas(tmp_path / LABELS)


def test_the_lists_of_published_data_sets_are_label_sets() -> None:
    for row in rows("sources"):
        if names := read_word_list(row["source"]):
            assert LabelSet.of(names).names == names


def test_shipped_relations_hold_under_the_names_that_were_decided() -> None:
    """Also where the decided name is not the vocabulary's own."""
    decided = [
        ("Consolidation", "Air Space Shadow"),
        ("Lung Opacity", "Shadow"),
        ("No Finding", "Normal Chest"),
    ]
    atlas = Atlas(
        areas=("chest",),
        decisions=tuple(Decision(name=a, relation="same", of=b, by="M. Ruiz", on=ON) for a, b in decided),
    )
    found, plain = atlas.relations(), Atlas(areas=("chest",)).relations()
    assert found.parents["Air Space Shadow"] == ("Shadow",)
    assert found.parents["Edema"] == ("Shadow",)
    new = dict(decided)
    assert {*found.parents} == {new.get(name, name) for name in plain.parents}
    assert {*found.nothing} == {new.get(name, name) for name in plain.nothing}


EXCERPTED = """
areas = ["chest"]
exclusive = [["Shape", "Foreign"], ["Foreign", "Other Foreign"]]
[parents]
Spot = ["Shape"]
Ring = ["Shape"]
Shape = ["Thing"]
Foreign = ["Thing", "Sign"]
[exhaustive]
Shape = [["Spot", "Ring"]]
Thing = [["Shape", "Foreign"]]
"""


def test_an_excerpt_names_the_sites_classes_as_it_spells_them_and_their_ancestors(tmp_path: Path) -> None:
    (tmp_path / LABELS).write_text(EXCERPTED)
    record(tmp_path, [decide("Blob", "same", "Spot"), decide("Edema", "child", "Sign")])
    own = LabelSet(("Blob", "Ring", "Cardiomegaly"))
    write_excerpt(tmp_path / "part.toml", study_atlas(tmp_path), own)
    text = (tmp_path / "part.toml").read_text()
    assert tomllib.loads(text) == {
        "areas": ["chest"],
        "parents": {
            "Shape": ["Thing"],
            "Blob": ["Shape"],
            "Ring": ["Shape"],
            "Cardiomegaly": ["Enlarged Cardiomediastinum"],
        },
        "exhaustive": {"Shape": [["Blob", "Ring"]]},
    }
    # What the whole file implies of the site's labels, its excerpt implies too.
    y = np.array(list(itertools.product((0, 1, np.nan), repeat=3)), dtype=np.float32)
    whole, part = study_atlas(tmp_path), read_atlas(tmp_path / "part.toml")
    closed = [implied(y, tuple(map(one.name, own)), one.relations()) for one in (whole, part)]
    np.testing.assert_array_equal(closed[0].labels, closed[1].labels)


def test_an_excerpt_for_a_site_without_relations_is_empty() -> None:
    assert excerpt(Atlas(parents={"Spot": ("Shape",)}), ["Ring"]) == Atlas()
