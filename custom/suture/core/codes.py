"""Codes of built-in classes in clinical terminologies: SNOMED CT (as in DICOM PS3.16) and ICD-10 (WHO)."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import resources


@dataclass(frozen=True)
class Code:
    """A coded concept (DICOM PS3.3, section 8).

    Attributes:
        system: its coding scheme: ``SCT`` for SNOMED CT, ``I10`` for ICD-10.
    """

    system: str
    code: str
    meaning: str


def codes_of(labels: Iterable[str]) -> dict[str, tuple[Code, ...]]:
    """Return the codes of those classes that have any."""
    known = _builtin()
    return {label: known[label] for label in labels if label in known}


@cache
def _builtin() -> dict[str, tuple[Code, ...]]:
    found: dict[str, tuple[Code, ...]] = {}
    text = (resources.files("suture.core") / "codes.csv").read_text(encoding="utf-8")
    for row in csv.DictReader(text.splitlines()):
        code = Code(row["system"], row["code"], row["meaning"])
        found[row["class"]] = (*found.get(row["class"], ()), code)
    return found
