"""Codes of built-in classes."""

from __future__ import annotations

import re

import pytest

from suture.core.codes import Code, codes_of
from suture.core.vocabulary import CANONICAL

EVERY = codes_of(CANONICAL)


def test_a_class_has_its_codes_and_an_unknown_one_none() -> None:
    found = codes_of(["Hernia", "Pneumothorax", "Anything"])
    assert found == {
        "Pneumothorax": (
            Code("SCT", "36118008", "Pneumothorax"),
            Code("I10", "J93.9", "Pneumothorax, unspecified"),
        )
    }


def test_no_two_classes_share_a_code_and_no_class_has_two_of_a_system() -> None:
    pairs = [(code.system, code.code) for row in EVERY.values() for code in row]
    assert len(set(pairs)) == len(pairs) == 15
    assert all(len({code.system for code in row}) == len(row) for row in EVERY.values())


def test_each_snomed_code_has_the_meaning_that_dicom_lists() -> None:
    concepts = pytest.importorskip("pydicom.sr._concepts_dict").concepts["SCT"]
    listed = {code: entry[0] for keyword in concepts.values() for code, entry in keyword.items()}
    snomed = [code for row in EVERY.values() for code in row if code.system == "SCT"]
    assert [code.meaning for code in snomed] == [listed[code.code] for code in snomed]


def test_each_icd_code_has_the_form_of_whos() -> None:
    codes = [code.code for row in EVERY.values() for code in row if code.system == "I10"]
    assert all(re.fullmatch(r"[A-Z]\d\d(\.\d)?", code) for code in codes)
