"""Labels from Observations of FHIR R4: the NDJSON files of a bulk export, or a Bundle as JSON.

    image,patient,encounter,date,split
    a/0001.png,17,301,2024-03-01,train
    a/0002.png,23,,2024-03-05,test

An Observation with the code of a class and the value yes makes the class present in the images that it
belongs to, and no makes it absent. No Observation is unknown, and so is one that is not final, is withdrawn,
or says why its value is missing.

Observations are read by an optional package, `pip install "suture[fhir]"`.

Source: HL7 FHIR R4B (4.3.0), Observation; those of R4 (4.0.1) are the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError

from suture.core.errors import DataError, as_word, show_value
from suture.core.validation import LabelName
from suture.data.dataset import SitePath
from suture.data.limits import file_bytes
from suture.data.readers.answers import Answer, Place, Remarks
from suture.data.readers.hospital import values_line
from suture.data.readers.linked import LinkedConfig, OneCodeEach, read_linked
from suture.data.reading import Reading, read_lines, readable_table
from suture.data.table import NUMBERS, Meaning

_YES_NO: dict[str, Meaning] = {
    "http://snomed.info/sct|373066001": 1,
    "http://snomed.info/sct|373067005": 0,
    "http://loinc.org|LA33-6": 1,
    "http://loinc.org|LA32-8": 0,
    "http://terminology.hl7.org/CodeSystem/v2-0136|Y": 1,
    "http://terminology.hl7.org/CodeSystem/v2-0136|N": 0,
}
"""The codes of yes and no in SNOMED CT, LOINC and HL7 v2."""

_MOST_BUNDLE = 2**26
"""Bytes of a Bundle, which is held as a whole."""

_REFERENCE = re.compile(r"(.*/)?(?P<kind>Patient|Encounter)/(?P<id>[^/]+)(/_history/[^/]+)?")
"""To a patient or an encounter; what has another form, such as ``urn:uuid:``, is an identifier as it is."""

_FINAL = ("final", "amended", "corrected")
_NOT_READ = ("registered", "preliminary", "cancelled", "entered-in-error", "unknown")

_Code = Annotated[str, Field(pattern=r"^([^|]+\|)?[^|]+$")]
"""A code as ``system|code``, or the code alone, of any system."""


def _several(found: Any) -> Any:
    return [found] if isinstance(found, str | Path) else found


class FhirConfig(LinkedConfig):
    """Labels from FHIR Observations; `table` lists the images, with visits, days or both.

    Attributes:
        classes: the code of each class: ``system|code``, or the code alone, of any system.
        observations: a file or a list of files, NDJSON (.ndjson, gzipped or not) or a Bundle (.json).
        values: what codes other than yes and no mean, written as those of `classes`: 1, 0 or "unknown". The
            key "" is a missing value.
    """

    dataset: Literal["fhir"] = "fhir"
    classes: Annotated[dict[LabelName, _Code], Field(min_length=1), OneCodeEach]
    observations: Annotated[tuple[SitePath, ...], Field(min_length=1), BeforeValidator(_several)]
    visit_column: str = "encounter"


def read_fhir(config: FhirConfig) -> Reading:
    """Read the images of a site, with labels from FHIR Observations.

    Raises:
        DataError: a file cannot be read, a column is missing, or the package is not installed.
        LabelError: two classes are one.
        ConfigError: `labels` names what is no class.
    """
    remarks = Remarks()
    answers = (answer for path in config.observations for answer in _answers(config, path, remarks))
    return read_linked(config, config.classes, answers, remarks, _identifier)


def _answers(config: FhirConfig, path: Path, remarks: Remarks) -> Iterator[Answer]:
    """The answers of one file."""
    meanings = _YES_NO | config.values
    for place, observation in _observations(path, remarks):
        codes = _codes(observation.code)
        asked = [column for column, code in enumerate(config.classes.values()) if code in codes]
        if not asked or _left_out(place, observation, remarks):
            continue
        try:
            meaning = _meaning(observation, meanings)
        except ValueError as error:
            remarks.faults.add(place, str(error))
            meaning = "unknown"
        person = _resolve_reference(observation.subject, "Patient")
        visit = _resolve_reference(observation.encounter, "Encounter")
        time = observation.effectiveDateTime or observation.effectiveInstant
        day = time.isoformat()[:10] if isinstance(time, date) else ""  # else a month, or a period
        for column in asked:
            yield Answer(place, column, NUMBERS[meaning], person, visit, day)


def _observations(path: Path, remarks: Remarks) -> Iterator[tuple[Place, Any]]:
    """The valid Observations of a file; other resources are passed over."""
    try:
        from fhir.resources.R4B.observation import Observation
    except ImportError:
        raise DataError(f'{path}: FHIR needs another package: pip install "suture[fhir]"') from None
    for place, resource in _resources(path, remarks):
        if resource.get("resourceType") != "Observation":
            continue
        try:
            observation, where = Observation.model_validate(resource), "code"
        except ValidationError as error:
            # Its message would show the value, which may name a patient.
            observation, where = None, ".".join(map(str, error.errors(include_input=False)[0]["loc"]))
        if observation is None or observation.code is None:  # which is missing where it is null
            what = as_word(where or "several values")
            remarks.faults.add(place, f"not a valid Observation of FHIR R4B (at {what}); correct it")
            continue
        yield place, observation


def _resources(path: Path, remarks: Remarks) -> Iterator[tuple[Place, dict[str, Any]]]:
    """The resources of NDJSON, line by line, or of a Bundle.

    Raises:
        DataError: the file cannot be read, or is no Bundle.
    """
    if path.name.removesuffix(".gz").endswith(".ndjson"):
        for number, line in read_lines(path):
            place, found = Place(path, number, "line"), _parse(line)
            if isinstance(found, dict):
                yield place, found
            else:
                remarks.faults.add(place, "not a resource in JSON; correct or remove it")
        return
    with readable_table(path):
        bundle = _parse(file_bytes(path, _MOST_BUNDLE))
    entries = bundle.get("entry", []) if isinstance(bundle, dict) else None
    if not isinstance(entries, list) or bundle.get("resourceType") != "Bundle":
        raise DataError(f"{path} is not a Bundle in JSON; NDJSON files need the ending .ndjson")
    for number, entry in enumerate(entries, 1):
        resource = entry.get("resource") if isinstance(entry, dict) else None
        if isinstance(resource, dict):
            yield Place(path, number, "resource"), resource


def _parse(text: str | bytes) -> Any:
    """The value of a JSON text; None where it has none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _left_out(place: Place, observation: Any, remarks: Remarks) -> bool:
    """Whether an Observation of a class says nothing of its patient; the reason is noted, or is a fault."""
    if observation.status in _NOT_READ:
        remarks.notes.add(place, f"status {observation.status}; skipped")
    elif observation.status not in _FINAL:
        remarks.faults.add(place, f"unknown status {show_value(observation.status)}; correct it")
    elif observation.focus:
        remarks.notes.add(place, "about its focus, not about its patient; skipped")
    elif observation.modifierExtension:
        remarks.faults.add(place, "a modifierExtension may change its meaning; remove the Observation")
    else:
        return False
    return True


def _meaning(observation: Any, meanings: dict[str, Meaning]) -> Meaning:
    """What the value of an Observation means.

    Raises:
        ValueError: it has no meaning, or two; with the remedy.
    """
    names = [name for name in type(observation).model_fields if name.startswith("value")]
    given = [name for name in names if "__" not in name and getattr(observation, name) is not None]
    if observation.dataAbsentReason is not None:
        if given:
            raise ValueError(f"both a {given[0]} and a dataAbsentReason; remove one of them")
        return "unknown"
    if observation.valueBoolean is not None:
        return 1 if observation.valueBoolean else 0
    codes = _codes(observation.valueCodeableConcept) if given == ["valueCodeableConcept"] else set()
    if given and not codes:
        raise ValueError(f"a {given[0]} without a code of yes or no; remove the Observation")
    found = {meanings[code] for code in codes or {""} if code in meanings}
    if len(found) > 1:
        raise ValueError("a value whose codes contradict each other; correct it")
    if not found:
        longest = max(codes, key=lambda code: (len(code), code), default="")
        what = f"the value {show_value(longest)} is not yes or no" if codes else "no value"
        raise ValueError(
            f"{what}; add this line to [data], with 1, 0 or unknown for a ?:\n{values_line([longest])}"
        )
    return found.pop()


def _codes(concept: Any) -> set[str]:
    """The codes of a CodeableConcept, each with its system and alone."""
    codings = [coding for coding in concept.coding or () if coding is not None and coding.code]
    return {c.code for c in codings} | {f"{c.system}|{c.code}" for c in codings if c.system}


def _resolve_reference(reference: Any, kind: str) -> str:
    """The identifier that a Reference has; empty for a resource of another kind, or none."""
    text = (reference and reference.reference) or ""
    found = _REFERENCE.fullmatch(text)
    return "" if found and found["kind"] != kind else _identifier(text)


def _identifier(text: str) -> str:
    """The identifier alone, of one or of a reference such as ``https://host/Patient/17/_history/2``."""
    found = _REFERENCE.fullmatch(text)
    return found["id"] if found else text
