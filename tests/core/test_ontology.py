"""What labels imply: by hand, and against all ways to fill in the unknown ones; the atlas and its codes."""

from __future__ import annotations

import datetime
import itertools
import tomllib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from hypothesis_profiles import examples
from suture.core.errors import ConfigError, LabelError
from suture.core.labels import LabelSet, canonical, key
from suture.core.ontology import (
    GENERAL,
    LABELS,
    SYSTEMS,
    Atlas,
    Code,
    Decision,
    Relations,
    check_code,
    check_stated,
    codes_of,
    excerpt,
    implied,
    read_atlas,
    record,
    stated_codes,
    study_atlas,
    write_excerpt,
)
from suture.core.vocabulary import AREAS, CANONICAL, ENTRIES, SYNONYMS, groups, read_word_list, rows
from world import refused

NAN = np.nan

LUNG = Relations(
    {"Consolidation": ("Lung Opacity",), "Edema": ("Lung Opacity",), "Lung Opacity": ("Abnormal",)},
    exhaustive=(("Lung Opacity", ("Consolidation", "Edema")),),
)

NAMES = ("Abnormal", "Lung Opacity", "Consolidation", "Edema")
EXCLUSIVE = Relations(LUNG.parents, exclusive=(("Consolidation", "Edema"),))


def row_of(*row: float) -> np.ndarray:
    return np.array([row], dtype=np.float32)


@pytest.mark.parametrize(
    ("relations", "row", "own", "expected"),
    [
        # A child makes its ancestors present, and an absent parent its descendants absent.
        (LUNG, (NAN, NAN, 1, NAN), NAMES, (1, 1, 1, NAN)),
        (LUNG, (0, NAN, NAN, NAN), NAMES, (0, 0, 0, 0)),
        # A present parent, or an absent child alone, says nothing.
        (LUNG, (NAN, 1, NAN, NAN), NAMES, (1, 1, NAN, NAN)),
        (LUNG, (NAN, NAN, 0, NAN), NAMES, (NAN, NAN, 0, NAN)),
        # An exhaustive group counts only where the site annotates all of it.
        (LUNG, (NAN, NAN, 0, 0), NAMES, (NAN, 0, 0, 0)),
        (LUNG, (NAN, 1, 0, NAN), NAMES, (1, 1, 0, 1)),
        (LUNG, (NAN, 1, 0, NAN), NAMES[1:3], (1, 1, 0, NAN)),
        (LUNG, (NAN, NAN, 0, 0), NAMES[1:3], (NAN, NAN, 0, 0)),
        (Relations(LUNG.parents), (NAN, NAN, 0, 0), NAMES, (NAN, NAN, 0, 0)),
        # One of an exclusive group makes the others absent.
        (EXCLUSIVE, (NAN, NAN, 1, NAN), NAMES, (1, 1, 1, 0)),
        (EXCLUSIVE, (NAN, NAN, 0, NAN), NAMES, (NAN, NAN, 0, NAN)),
        # Absence is stated of own classes alone, and reaches them through others.
        (LUNG, (0, NAN, NAN, NAN), ("Abnormal", "Edema"), (0, NAN, NAN, 0)),
    ],
)
def test_what_labels_imply(relations: Relations, row: Any, own: Any, expected: Any) -> None:
    found = implied(row_of(*row), NAMES, relations, own)
    assert not found.contradictions
    np.testing.assert_array_equal(found.labels, row_of(*expected))
    # Also where a class between two is not among those asked for.
    some = [0, 2, 3]
    part = implied(row_of(*row)[:, some], [NAMES[i] for i in some], Relations(LUNG.parents), own).labels
    plain = implied(row_of(*(row[0], NAN, *row[2:])), NAMES, Relations(LUNG.parents), own).labels
    np.testing.assert_array_equal(part, plain[:, some])


def line(n: int) -> dict[str, tuple[str, ...]]:
    return {str(i): (str(i - 1),) for i in range(1, n)}


@pytest.mark.parametrize(
    "many",
    [
        {"parents": {str(i): ("top",) for i in range(10_001)}},
        {"parents": line(300)},
        {"parents": {str(i): tuple(map(str, range(i))) for i in range(60)}},
        {"parents": line(30), "exclusive": (("0",),) * 900},
    ],
)
def test_relations_that_would_fill_the_memory_are_refused(
    many: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("suture.core.ontology._MOST_PAIRS", 190 * 189 // 2)  # those of a line of 190
    assert len(Relations(line(190)).ancestors["189"]) == 189
    assert len(Relations({str(i): ("top",) for i in range(9_999)}).order) == 10_000
    with refused(by=LabelError):
        Relations(**many)


TORN = np.array([[NAN, 0, 1, NAN], [1, 1, 1, 0], [NAN, 1, 0, 0]], dtype=np.float32)


def test_contradictions_name_rows_and_can_be_settled() -> None:
    torn = implied(TORN, NAMES, LUNG)
    assert torn.contradictions == {
        "'Lung Opacity' = 0 and 'Consolidation' = 1": (0,),
        "'Lung Opacity' = 1 and what the other labels imply": (2,),
    }
    np.testing.assert_array_equal(torn.labels, TORN)
    unknown = [NAN] * 4
    for settle, first, third in (
        ("child wins", [1, 1, 1, NAN], [NAN, 0, 0, 0]),
        ("leave out", unknown, unknown),
    ):
        found = implied(TORN, NAMES, LUNG, settle=settle)  # type: ignore[arg-type]
        assert (found.contradictions, found.settled) == ({}, (0, 2))
        np.testing.assert_array_equal(found.labels, [first, [1, 1, 1, 0], third])
    # Children that exclude each other are not settled by winning.
    found = implied(row_of(NAN, 0, 1, 1), NAMES, EXCLUSIVE, settle="child wins")
    assert list(found.contradictions.values()) == [(0,)]


def test_relations_that_cannot_be() -> None:
    for relations, named in (
        ({"parents": {"A": ("B",), "B": ("C",), "C": ("A",)}}, ["'A'", "'B'", "'C'"]),
        ({"parents": {"A": ("A",)}}, ["'A'"]),
        ({"exhaustive": (("A", ("B",)),)}, ["'A'", "'B'"]),
        ({"exclusive": (("A", "B", "A"),)}, ["'A'"]),
        ({"exclusive": ((),)}, []),
        ({"parents": {"C": ("A", "B")}, "exclusive": (("A", "B"),)}, ["'C'", "'A'", "'B'"]),
        ({"parents": {"B": ("A",)}, "exclusive": (("A", "B"),)}, ["'A'", "'B'"]),
    ):
        with refused(*named, by=LabelError):
            Relations(**relations)


LETTERS = "ABCDEF"


@st.composite
def cases(draw: st.DrawFn, exhaustive: bool) -> tuple[Relations, set[str], np.ndarray]:
    """Relations of a random DAG of six classes, the own classes of a site, and labels."""
    parents = {
        name: tuple(draw(st.sets(st.sampled_from(LETTERS[:i]), max_size=2)))
        for i, name in enumerate(LETTERS)
        if i
    }
    groups = []
    for parent in LETTERS if exhaustive else ():
        children = [name for name in parents if parent in parents[name]]
        if children and draw(st.sampled_from([True, False])):
            groups.append((parent, tuple(children)))
    exclusive = draw(st.lists(st.sets(st.sampled_from(LETTERS), min_size=2, max_size=3), max_size=2))
    try:
        relations = Relations(parents, tuple(groups), tuple(tuple(sorted(group)) for group in exclusive))
    except LabelError:
        relations = Relations(parents, tuple(groups))
    own = draw(st.sets(st.sampled_from(LETTERS), min_size=1))
    row = draw(st.lists(st.sampled_from([0.0, 1.0, NAN, NAN]), min_size=6, max_size=6))
    return relations, own, np.array(row, dtype=np.float32)


def models(relations: Relations, own: set[str], row: np.ndarray) -> np.ndarray:
    """All ways [m, 6] to fill in a row that keep the rules; an exhaustive group is one if it is own."""
    kept = []
    for values in itertools.product([0, 1], repeat=6):
        of = dict(zip(LETTERS, values, strict=True))
        if (
            all(np.isnan(known) or known == value for known, value in zip(row, values, strict=True))
            and all(of[child] <= of[p] for child, above in relations.parents.items() for p in above)
            and all(
                of[p] <= sum(of[c] for c in group) for p, group in relations.exhaustive if {*group} <= own
            )
            and all(sum(of[name] for name in group) <= 1 for group in relations.exclusive)
        ):
            kept.append(values)
    return np.array(kept).reshape(-1, 6)


@pytest.mark.complete
@examples(150)
@given(cases(exhaustive=False))
def test_what_is_implied_is_what_all_models_share(case: tuple[Relations, set[str], np.ndarray]) -> None:
    relations, own, row = case
    found, possible = implied(row[None], LETTERS, relations, own), models(relations, own, row)
    if not len(possible):
        assert list(found.contradictions.values()) == [(0,)]
        return
    assert not found.contradictions
    for i, name in enumerate(LETTERS):
        shared = {*possible[:, i].tolist()}
        if len(shared) == 2 or (shared == {0} and name not in own and row[i] != 0):
            assert np.isnan(found.labels[0, i])
        else:
            assert found.labels[0, i] == shared.pop()


@pytest.mark.complete
@examples(150)
@given(cases(exhaustive=True))
def test_with_exhaustive_groups_all_that_is_implied_is_true(
    case: tuple[Relations, set[str], np.ndarray],
) -> None:
    relations, own, row = case
    found, possible = implied(row[None], LETTERS, relations, own), models(relations, own, row)
    if found.contradictions:
        assert not len(possible)
    for i in np.flatnonzero(~np.isnan(found.labels[0])) if len(possible) else ():
        assert {*possible[:, i].tolist()} == {found.labels[0, i]}
    again = implied(found.labels, LETTERS, relations, own)
    np.testing.assert_array_equal(again.labels, found.labels)


@pytest.mark.complete
@given(cases(exhaustive=True))
def test_an_unrelated_class_changes_nothing(case: tuple[Relations, set[str], np.ndarray]) -> None:
    relations, own, row = case
    wider = implied(np.append(row, np.float32(1))[None], [*LETTERS, "Z"], relations, {*own, "Z"})
    np.testing.assert_array_equal(wider.labels[:, :6], implied(row[None], LETTERS, relations, own).labels)
    assert wider.labels[0, 6] == 1


def test_no_finding_is_the_absence_of_the_sites_own_classes() -> None:
    """Nodule is not annotated by the site."""
    names = ("No Finding", "Mass", "Hernia", "Support Devices", "Pacemaker", "Nodule")
    relations = Relations({"Pacemaker": ("Support Devices",)}, nothing={"No Finding": ("Support Devices",)})
    cases: list[tuple[dict[str, int], dict[str, int]]] = [
        ({"No Finding": 1}, {"Hernia": 0, "Mass": 0}),
        ({"Mass": 1}, {"No Finding": 0}),
        ({"Pacemaker": 1}, {"Support Devices": 1}),
        ({"No Finding": 1, "Support Devices": 1}, {"Hernia": 0, "Mass": 0}),
        (
            {"No Finding": 0, "Mass": 0, "Hernia": 0},
            {},
        ),  # another, which the site does not list, may be there
        ({"Mass": 0, "Hernia": 0}, {}),
    ]
    for known, more in cases:
        row = row_of(*(known.get(name, NAN) for name in names))
        found = implied(row, names, relations, names[:-1]).labels[0]
        assert {n: int(y) for n, y in zip(names, found, strict=True) if not np.isnan(y)} == known | more


# The shipped atlas


def test_rows_of_the_atlas_name_known_classes_and_sources_once() -> None:
    assert max(Counter(row["class"] for row in rows("classes")).values()) == 1
    assert max(Counter(map(key, CANONICAL)).values()) == 1
    assert [name for name in CANONICAL if canonical(name) != name] == []
    sources = {row["source"] for row in rows("sources")}
    for row in itertools.chain.from_iterable(map(rows, ("classes", "groups", "synonyms"))):
        cited = {row.get("source", ""), row.get("parents_source", ""), *row.get("lists", "").split(";")}
        assert cited - {""} <= sources, row
        named = {row.get("class", ""), row.get("parent", ""), *row.get("classes", "").split(";")}
        assert {*named, *row.get("parents", "").split(";")} - {""} <= {*CANONICAL}, row
        assert bool(row.get("parents")) == bool(row.get("parents_source")), row
    for row in rows("sources"):
        needed = () if row["source"] == "name" else ("reference", "licence_of_the_data", "version")
        assert all(row[one] for one in ("title", *needed)), row


def test_no_synonym_is_of_two_classes_or_itself_a_class() -> None:
    of: dict[str, set[str]] = {}
    for row in rows("synonyms"):
        of.setdefault(key(row["synonym"]), set()).add(row["class"])
        assert {*row["language"].split()} <= {"en", "es", "de", "fr", "it", "pt"}
    assert {spelling: names for spelling, names in of.items() if len(names) > 1} == {}
    assert not {spelling for spelling in of if spelling in map(key, CANONICAL)}
    assert {*SYNONYMS.values()} <= {*CANONICAL}


def test_the_relations_of_an_area_can_hold_and_stay_in_it() -> None:
    for area in AREAS:
        assert {ENTRIES[name].area for name in read_atlas(area).relations().order} <= {area}
    for kind in ("exhaustive", "exclusive"):
        assert all(len({ENTRIES[name].area for name in group}) == 1 for _, group in groups(kind))


def test_the_lists_of_published_data_sets_are_those_of_the_readers() -> None:
    from suture_papers.chest_xrays import chexpert, nih
    from suture_papers.fedmas.hyperkvasir import LABELS as KVASIR
    from suture_papers.skin_lesions.isic import LABELS as ISIC

    for row in rows("sources"):
        if names := read_word_list(row["source"]):
            assert LabelSet.of(names).names == names
    for source, labels in {"isic2018": ISIC, "hyperkvasir": KVASIR, "chexpert": chexpert.LABELS}.items():
        assert {*read_word_list(source)} == {*labels} | ({"No Finding"} & {*read_word_list(source)}), source
    assert {*read_word_list("nih14")} == {*nih.LABELS}
    assert read_word_list("mimic") == read_word_list("brax") == read_word_list("chexpert")
    assert len(read_word_list("cxr-lt")) == 26


def test_what_the_chest_says() -> None:
    chest = read_atlas("chest").relations()
    above = chest.with_ancestors(["Nodule"])[::-1]
    assert above == ("Nodule", "Nodule or Mass", "Lung Lesion", "Lung Opacity")
    assert ("Nodule or Mass", ("Nodule", "Mass")) in chest.exhaustive
    assert chest.nothing == {"No Finding": ("Support Devices",)}  # the exception of CheXpert


# A study's labels.toml


ON = datetime.date(2026, 11, 25)

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
    record(tmp_path / "new", [decide("Lesion", "same", "Lung Lesion")])
    assert study_atlas(tmp_path / "new").decisions == (decide("Lesion", "same", "Lung Lesion"),)
    (tmp_path / LABELS).write_text(FILE + "# a remark\n")
    record(tmp_path, [decide("Lesion", "same", "Lung Lesion"), decide("Spot", "different", "Lesion")])
    record(tmp_path, [decide("Shadow", "same", "Lesion"), decide("Streak", "child", "Shadow")])
    assert (tmp_path / LABELS).read_text().startswith(FILE + "# a remark\n")
    atlas = study_atlas(tmp_path)
    assert [one.name for one in atlas.decisions] == ["Lesion", "Spot", "Shadow", "Streak"]
    assert {(one.by, one.on) for one in atlas.decisions} == {("M. Ruiz", ON)}
    assert atlas.list_decisions("same") == [("Lesion", "Lung Lesion"), ("Shadow", "Lesion")]
    assert atlas.list_decisions("different") == [("Spot", "Lesion")]
    assert atlas.name("SHADOW") == "Lung Lesion"
    assert atlas.relations().parents["Streak"] == ("Lung Lesion",)

    record(tmp_path, [decide("Lung Lesion", "different", "Lesion")])
    assert study_atlas(tmp_path).list_decisions("same") == [("Shadow", "Lesion")]


def test_a_file_with_a_fault(tmp_path: Path) -> None:
    for text, named in (
        ('areas = ["chets"]', ["'chets'", "'chest'"]),
        ('[parents]\nA = ["B"]\nB = ["A"]', ["labels.toml", "'A'", "'B'"]),
        ('areas = ["chest"]\n[parents]\n"Lung Opacity" = ["Nodule"]', ["Lung Opacity"]),
        ('[exhaustive]\nA = [["B"]]', ["'A'", "'B'"]),
        ("[parents]\nA = []", ["parents.A"]),
        ('parent = "B"', ["'parent'", "'parents'"]),
        ('[parents]\n"$x" = ["B"]', ["$x"]),
        ("decisions = [{}]", ["decisions"]),
    ):
        (tmp_path / LABELS).write_text(text)
        with refused(*named, by=ConfigError):
            study_atlas(tmp_path)


def test_a_decision_that_cannot_be_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    for decision, named in (
        (decide("Effusion", "same", "pleural effusion"), "Effusion"),
        (decide("Lung Opacity", "child", "Consolidation"), "Consolidation"),
        (decide("A", "same", "B").model_copy(update={"by": "a\nb"}), "a\\nb"),
    ):
        (tmp_path / LABELS).write_text(FILE)
        with refused(named, by=ConfigError):
            record(tmp_path, [decision])
        assert (tmp_path / LABELS).read_text() == FILE


def test_shipped_relations_hold_under_the_names_that_were_decided() -> None:
    """Also where the decided name is not the vocabulary's own."""
    new = {"Consolidation": "Air Space Shadow", "Lung Opacity": "Shadow", "No Finding": "Normal Chest"}
    atlas = Atlas(areas=("chest",), decisions=tuple(decide(a, "same", b) for a, b in new.items()))
    found, plain = atlas.relations(), Atlas(areas=("chest",)).relations()
    assert found.parents["Air Space Shadow"] == found.parents["Edema"] == ("Shadow",)
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
    assert excerpt(study_atlas(tmp_path), ("Blob", "Ring")).exhaustive == {"Shape": (("Blob", "Ring"),)}
    # What the whole file implies of the site's labels, its excerpt implies too.
    y = np.array(list(itertools.product((0, 1, np.nan), repeat=3)), dtype=np.float32)
    whole, part = study_atlas(tmp_path), read_atlas(tmp_path / "part.toml")
    closed = [implied(y, tuple(map(one.name, own)), one.relations()) for one in (whole, part)]
    np.testing.assert_array_equal(closed[0].labels, closed[1].labels)


# Codes


EVERY = codes_of(CANONICAL)


def texts(codes: Iterable[Code]) -> list[str]:
    return [str(code) for code in codes]


def test_stated_codes_come_after_the_built_in_ones_and_mean_their_class() -> None:
    long = "X" * 100
    found = codes_of(
        ["Pneumothorax", long, "Hernia"],
        {"Pneumothorax": ("RADLEX:RID5352", "SCT:36118008"), long: ("RADLEX:RID1",)},
    )
    assert found.keys() == {"Pneumothorax", long}
    assert texts(found["Pneumothorax"]) == ["SCT:36118008", "I10C:J93.9", "RADLEX:RID5352"]
    assert found[long] == (Code("RADLEX", "RID1", "X" * 64),), "DICOM takes 64 characters of a meaning"
    named = codes_of(["PTX"], {"PTX": ("SCT:36118008", "RADLEX:RID5352")})["PTX"]
    assert [code.meaning for code in named] == ["Pneumothorax", "Pneumothorax, unspecified", "PTX"]
    # One of the same system replaces the built-in one.
    other = codes_of(["Pneumothorax"], {"Pneumothorax": ("I10C:J93.83", "I10:J93.8")})["Pneumothorax"]
    assert texts(other) == ["SCT:36118008", "I10:J93.8", "I10C:J93.83"]


def test_every_built_in_code_is_on_the_page_with_its_meaning_source_and_licence() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/codes.md").read_text(encoding="utf-8")
    codes = []
    for row in rows("codes"):
        assert row["class"] in CANONICAL
        assert row["system"] in SYSTEMS
        assert len(row["meaning"]) <= 64
        assert all(value and value == value.strip() for value in row.values())
        codes.append(f"{row['system']}:{row['code']}")
        cells = (row["class"], codes[-1], row["meaning"], row["source"], row["licence"])
        assert f"| {' | '.join(cells)} |\n" in page
    assert len(codes) == len({*codes}) == 35
    assert {*codes} > GENERAL
    # No two classes share one, and none has two of a system.
    check_stated({name: tuple({*map(str, found)} - GENERAL) for name, found in EVERY.items()})


def test_snomed_codes_have_the_meaning_and_the_form_that_dicom_lists() -> None:
    """All 11,349 that pydicom has a copy of are read, but one whose check digit does not fit."""
    concepts = pytest.importorskip("pydicom.sr._concepts_dict").concepts["SCT"]
    listed = {(code, entry[0]) for keyword in concepts.values() for code, entry in keyword.items()}
    snomed = {(code.code, code.meaning) for row in EVERY.values() for code in row if code.system == "SCT"}
    assert snomed - listed == set()
    assert len(snomed) == 16
    wrong = []
    for code in {code for code, _ in listed} - {text.removeprefix("SCT:") for text in GENERAL}:
        try:
            check_code(f"SCT:{code}")
        except LabelError:
            wrong.append(code)
    assert wrong == ["115347700"]


def test_a_slip_in_a_digit_is_found() -> None:
    right = "36118008"
    for place, kept in enumerate(right):
        slips = {f"{right[:place]}{digit}{right[place + 1 :]}" for digit in {*"123456789"} - {kept}}
        slips |= {right[:place] + right[place + 1 : place + 2] + kept + right[place + 2 :]} - {right}
        for slip in slips:
            with refused(slip, by=LabelError):
                check_code(f"SCT:{slip}")


def test_codes_of_another_form_are_refused() -> None:
    for text in ("SCT:36118008", "I10:M23.24", "I10C:S27.0XXA", "I10C:C4A.9", "RADLEX:RID5352"):
        assert check_code(text) == text
    for text in (
        *("36118008", "SNOMED:36118008", "SCT:3611", "SCT:036118008", "SCT:٣٦١١٨٠٠٨", "SCT:36118008:1"),
        "SCT:361100017",  # of a description: its partition is 01
        *("I10:j93.9", "I10C:S27.0XXAB", "I10C:j93.9", "I10:J93.", "I10:S27.0XXA"),
        *("RADLEX:5352", "RADLEX:RID5352\n"),
        *sorted(GENERAL),  # a shape in any organ
    ):
        with refused(text.strip(), by=LabelError):
            check_code(text)


def test_a_party_states_one_code_of_a_system_for_a_class_and_no_code_twice() -> None:
    synonyms = {"Pneu": "PTX"}
    assert stated_codes({"Pneu": ("I10:J93.9", "SCT:36118008"), "effusion": "I10:J90"}, synonyms) == {
        "PTX": ("I10:J93.9", "SCT:36118008"),
        "Pleural Effusion": ("I10:J90",),
    }
    faulty: list[tuple[dict[str, Any], list[str]]] = [
        ({"A": ("I10:J93.9", "I10:J90")}, ["'A'", "I10:J93.9", "I10:J90"]),
        ({"A": "I10:J90", "B": "I10:J90"}, ["'A'", "'B'", "I10:J90"]),
        ({"PTX": "I10:J90", "Pneu": "I10:J93.9"}, ["'Pneu'", "'PTX'"]),
        ({"PTX": "I10:Pneu"}, ["'PTX'", "I10:Pneu"]),
    ]
    for codes, named in faulty:
        with refused(*named, by=LabelError):
            stated_codes(codes, synonyms)
