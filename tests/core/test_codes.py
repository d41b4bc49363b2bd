"""Codes of classes: the built-in ones, and the form of those that sites state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from suture.core import vocabulary
from suture.core.errors import LabelError
from suture.core.ontology import GENERAL, SYSTEMS, Code, check_code, check_stated, codes_of, stated_codes
from suture.core.vocabulary import CANONICAL

EVERY = codes_of(CANONICAL)


def test_a_class_has_its_codes_and_an_unknown_one_none() -> None:
    found = codes_of(["Hernia", "Pneumothorax", "Anything"])
    assert found == {
        "Pneumothorax": (
            Code("SCT", "36118008", "Pneumothorax"),
            Code("I10C", "J93.9", "Pneumothorax, unspecified"),
        )
    }


def test_stated_codes_come_after_the_built_in_ones_and_mean_their_class() -> None:
    stated = {"Pneumothorax": ("RADLEX:RID5352", "SCT:36118008"), "X" * 100: ("RADLEX:RID1",)}
    found = codes_of(["Pneumothorax", "X" * 100, "Hernia"], stated)
    assert [str(code) for code in found["Pneumothorax"]] == ["SCT:36118008", "I10C:J93.9", "RADLEX:RID5352"]
    assert found["Pneumothorax"][-1].meaning == "Pneumothorax"
    assert found["X" * 100] == (Code("RADLEX", "RID1", "X" * 64),), "DICOM takes 64 characters of a meaning"
    assert "Hernia" not in found
    named = codes_of(["Ptx"], {"Ptx": ("SCT:36118008", "RADLEX:RID5352")})["Ptx"]
    assert [code.meaning for code in named] == ["Pneumothorax", "Pneumothorax, unspecified", "Ptx"]


def test_a_stated_code_replaces_the_built_in_one_of_its_system() -> None:
    found = codes_of(["Pneumothorax"], {"Pneumothorax": ("I10C:J93.83", "I10:J93.8")})["Pneumothorax"]
    assert [str(code) for code in found] == ["SCT:36118008", "I10:J93.8", "I10C:J93.83"]
    named = codes_of(["Ptx"], {"Ptx": ("I10C:J93.83", "SCT:36118008")})["Ptx"]
    assert [str(code) for code in named] == ["SCT:36118008", "I10C:J93.83"]


def test_every_built_in_code_has_a_form_a_meaning_a_source_and_a_licence() -> None:
    rows = vocabulary.rows("codes")
    assert {row["class"] for row in rows} <= {*CANONICAL}
    assert {row["system"] for row in rows} <= {*SYSTEMS}
    assert all(value and value == value.strip() for row in rows for value in row.values())
    assert all(len(row["meaning"]) <= 64 for row in rows)
    codes = [f"{row['system']}:{row['code']}" for row in rows]
    docs = (Path(__file__).parents[2] / "docs/reference/codes.md").read_text(encoding="utf-8")
    for row, code in zip(rows, codes, strict=True):
        assert (
            f"| {row['class']} | {code} | {row['meaning']} | {row['source']} | {row['licence']} |\n" in docs
        )
    assert len(codes) == len({*codes}) == 35
    assert {*codes} > GENERAL
    assert [check_code(code) for code in codes if code not in GENERAL]


@pytest.mark.parametrize("code", sorted(GENERAL))
def test_a_shape_in_any_organ_is_no_code_of_a_class(code: str) -> None:
    with pytest.raises(LabelError, match="a shape in any organ"):
        check_code(code)


def test_no_two_classes_share_a_code_and_no_class_has_two_of_a_system() -> None:
    check_stated({name: tuple({*map(str, codes)} - GENERAL) for name, codes in EVERY.items()})


def test_each_snomed_code_has_the_meaning_that_dicom_lists() -> None:
    concepts = pytest.importorskip("pydicom.sr._concepts_dict").concepts["SCT"]
    listed = {(code, entry[0]) for keyword in concepts.values() for code, entry in keyword.items()}
    snomed = {(code.code, code.meaning) for row in EVERY.values() for code in row if code.system == "SCT"}
    assert snomed - listed == set()
    assert len(snomed) == 16


def test_the_codes_that_dicom_lists_have_the_form_of_snomed_ct() -> None:
    """All 11,349 that pydicom has a copy of, but one whose check digit does not fit."""
    concepts = pytest.importorskip("pydicom.sr._concepts_dict").concepts["SCT"]
    refused = []
    listed = {code for keyword in concepts.values() for code in keyword}
    for code in listed - {text.removeprefix("SCT:") for text in GENERAL}:
        try:
            check_code(f"SCT:{code}")
        except LabelError:
            refused.append(code)
    assert refused == ["115347700"]


@pytest.mark.parametrize("place", range(8))
def test_a_slip_in_a_digit_is_found(place: int) -> None:
    right = "36118008"
    for digit in set("123456789") - {right[place]}:
        with pytest.raises(LabelError, match="check digit"):
            check_code(f"SCT:{right[:place]}{digit}{right[place + 1 :]}")
    swapped = right[: place - 1] + right[place] + right[place - 1] + right[place + 1 :] if place else right
    if swapped != right:
        with pytest.raises(LabelError):
            check_code(f"SCT:{swapped}")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("36118008", "SYSTEM:CODE"),
        ("SNOMED:36118008", "I10 .WHO's ICD-10."),
        ("SCT:3611", "6 to 18 digits"),
        ("SCT:036118008", "does not begin with 0"),
        ("SCT:٣٦١١٨٠٠٨", "6 to 18 digits"),
        ("SCT:361100017", "00 or 10"),  # of a description: its partition is 01
        ("I10:j93.9", "capital letter"),
        ("I10C:S27.0XXAB", "capital letters"),
        ("I10C:j93.9", "capital letters"),
        ("I10:J93.", "capital letter"),
        ("I10:S27.0XXA", "capital letter"),
        ("RADLEX:5352", "RID and a number"),
        ("RADLEX:RID5352\n", "RID and a number"),
        ("SCT:36118008:1", "6 to 18 digits"),
    ],
)
def test_a_code_of_another_form_is_refused_in_a_line(text: str, why: str) -> None:
    with pytest.raises(LabelError, match=why) as caught:
        check_code(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["SCT:36118008", "I10:M23.24", "I10C:S27.0XXA", "I10C:C4A.9", "RADLEX:RID5352"]
)
def test_a_code_of_the_right_form_is_itself(text: str) -> None:
    assert check_code(text) == text


def test_a_party_states_one_code_of_a_system_for_a_class_and_no_code_twice() -> None:
    synonyms = {"Pneu": "PTX"}
    assert stated_codes({"Pneu": ("I10:J93.9", "SCT:36118008"), "effusion": "I10:J90"}, synonyms) == {
        "Ptx": ("I10:J93.9", "SCT:36118008"),
        "Pleural Effusion": ("I10:J90",),
    }
    faulty: list[tuple[dict[str, Any], str]] = [
        ({"A": ("I10:J93.9", "I10:J90")}, "'A' .*I10:J93.9 and I10:J90"),
        ({"A": "I10:J90", "B": "I10:J90"}, "'A' and 'B' both have the code I10:J90"),
        ({"PTX": "I10:J90", "Pneu": "I10:J93.9"}, "'Pneu' is 'Ptx', which has codes already"),
        ({"PTX": "I10:Pneu"}, "'PTX': 'I10:Pneu' .*WHO's ICD-10"),
    ]
    for codes, why in faulty:
        with pytest.raises(LabelError, match=why):
            stated_codes(codes, synonyms)
