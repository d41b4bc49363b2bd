"""Codes of classes in clinical terminologies: SNOMED CT, ICD-10 (WHO), ICD-10-CM and RadLex.

A code is written ``SYSTEM:CODE``; SYSTEM is DICOM's designator of the coding scheme (PS3.16, section 8).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from suture.core.errors import LabelError, shown
from suture.core.labels import canonical
from suture.core.vocabulary import rows

SYSTEMS = {"SCT": "SNOMED CT", "I10": "WHO's ICD-10", "I10C": "ICD-10-CM", "RADLEX": "RadLex"}
"""The coding schemes, by their designators."""

GENERAL = frozenset({"SCT:4147007", "SCT:27925004"})
"""Built-in codes of a shape in any organ, mass and nodule: they describe a finding, and identify no class."""

_MEANING = 64
"""Characters of a code's meaning (PS3.5, 6.2: LO)."""

Stated = Mapping[str, tuple[str, ...]]
"""Codes by the name of their class, at most one of each system."""


@dataclass(frozen=True)
class Code:
    """A coded concept (DICOM PS3.3, section 8).

    Attributes:
        system: its coding scheme, one of `SYSTEMS`.
    """

    system: str
    code: str
    meaning: str

    def __str__(self) -> str:
        return f"{self.system}:{self.code}"


def codes_of(labels: Iterable[str], stated: Stated | None = None) -> dict[str, tuple[Code, ...]]:
    """Return the codes of those classes that have any: the built-in ones, then the stated ones.

    A stated code replaces the built-in one of its system. A class of another name has the built-in codes of
    the one whose code it states. A stated code that is not built in has the name of its class for a meaning.
    """
    known, found = builtin(), {}
    holder = {str(code): codes for codes in known.values() for code in codes}
    for label in labels:
        said = {*(stated or {}).get(label, ())}
        systems = set(map(system_of, said))
        meant = known.get(label) or next((holder[text] for text in sorted(said) if text in holder), ())
        own = [code for code in meant if str(code) in said or code.system not in systems]
        added = sorted(said - {*map(str, own)})
        pairs = (text.split(":") for text in added)
        if codes := (*own, *(Code(system, code, label[:_MEANING].strip()) for system, code in pairs)):
            found[label] = codes
    return found


@cache
def builtin() -> dict[str, tuple[Code, ...]]:
    """Return the codes of the built-in classes, from ``atlas_data/codes.csv``."""
    found: dict[str, tuple[Code, ...]] = {}
    for row in rows("codes"):
        code = Code(row["system"], row["code"], row["meaning"])
        found[row["class"]] = (*found.get(row["class"], ()), code)
    return found


def system_of(code: str) -> str:
    """Return the system of a code."""
    return code.partition(":")[0]


def check_code(text: str) -> str:
    """Check the form of a code, and return it; whether the terminology has such a code is not known here.

    Raises:
        LabelError: it has no known system, not the form of its system, or is one of `GENERAL`.
    """
    system, _, code = text.partition(":")
    if system not in SYSTEMS:
        known = ", ".join(f"{word} ({name})" for word, name in SYSTEMS.items())
        raise LabelError(
            f"{shown(text)}: codes are written SYSTEM:CODE, such as SCT:36118008; the systems are {known}"
        )
    if why := _fault(system, code):
        raise LabelError(f"{shown(text)} is not a valid code of {SYSTEMS[system]}: {why}")
    if text in GENERAL:
        raise LabelError(f"{text} describes a shape in any organ, not a class; write the code of the finding")
    return text


def check_stated(codes: Stated) -> None:
    """Check that a party gives each class one code of a system, and no code to two classes.

    Raises:
        LabelError: names the class and the code.
    """
    holder: dict[str, str] = {}
    for name, texts in codes.items():
        systems: dict[str, str] = {}
        for text in map(check_code, texts):
            if (other := systems.setdefault(system_of(text), text)) != text:
                raise LabelError(f"{name!r} has two codes of the same system, {other} and {text}; keep one")
            if (first := holder.setdefault(text, name)) != name:
                raise LabelError(f"{first!r} and {name!r} both have the code {text}; correct one of them")


def stated_codes(
    codes: Mapping[str, str | tuple[str, ...]], synonyms: Mapping[str, str] | None = None
) -> dict[str, tuple[str, ...]]:
    """Return the codes of a configuration by canonical names of classes.

    Args:
        codes: one code, or several of different systems, by any spelling of a class.
        synonyms: see `canonical`.

    Raises:
        LabelError: a code has not the form of its system, two spellings are one class, or see `check_stated`.
    """
    found: dict[str, tuple[str, ...]] = {}
    for spelling, texts in codes.items():
        name = canonical(spelling, synonyms)
        if name in found:
            raise LabelError(f"{spelling!r} is {name!r}, which has codes already; write them in one line")
        found[name] = (texts,) if isinstance(texts, str) else tuple(texts)
        for text in found[name]:
            try:
                check_code(text)
            except LabelError as error:
                raise LabelError(f"{spelling!r}: {error}") from None
    check_stated(found)
    return found


def _snomed_fault(code: str) -> str:
    """Why this is no identifier of a concept (SNOMED CT Release File Specifications, section 6)."""
    if not re.fullmatch(r"[1-9][0-9]{5,17}", code):
        return "an identifier has 6 to 18 digits and does not begin with 0"
    if _verhoeff(code):
        return "its check digit, the last one, does not match the others; look for a typing error"
    if code[-3:-1] not in ("00", "10"):
        return (
            "it does not identify a concept: in a concept's code the two digits before the last are 00 or 10"
        )
    return ""


def _verhoeff(digits: str) -> int:
    """Return the checksum of a number with its check digit; 0 where it fits (Verhoeff 1969)."""
    permutation = (1, 5, 7, 6, 2, 8, 3, 0, 9, 4)
    total = 0
    for place, digit in enumerate(map(int, reversed(digits))):
        for _ in range(place % 8):
            digit = permutation[digit]
        # The product of two elements of the dihedral group D5: rotations are 0 to 4, reflections 5 to 9.
        turned = total - digit if total > 4 else total + digit
        total = turned % 5 + 5 * ((total > 4) != (digit > 4))
    return total


_FORMS = {
    "I10": (
        r"[A-Z][0-9]{2}(\.[0-9]{1,2})?",
        "write a capital letter and two digits, optionally a point and one or two digits: J93.9",
    ),
    "I10C": (
        r"[A-Z][0-9][0-9A-Z](\.[0-9A-Z]{1,4})?",
        "write three capital letters or digits, optionally a point and one to four more: J93.83",
    ),
    "RADLEX": (r"RID[1-9][0-9]{0,8}", "write RID and a number: RID5352"),
}
"""The form of the codes of the other systems, and what to write."""


def _fault(system: str, code: str) -> str:
    """Why a code has not the form of its system; an empty text where it has."""
    if system == "SCT":
        return _snomed_fault(code)
    form, remedy = _FORMS[system]
    return "" if re.fullmatch(form, code) else remedy
