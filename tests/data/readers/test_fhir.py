"""suture.data.readers.fhir: labels from Observations of FHIR R4."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from hypothesis_profiles import examples
from suture.core.errors import ConfigError, DataError
from suture.data.config import parse_data
from suture.data.readers import read_table
from suture.data.reading import Reading
from world import refused

NAN = np.nan
SCT, LOINC, V2 = "http://snomed.info/sct", "http://loinc.org", "http://terminology.hl7.org/CodeSystem/v2-0136"

IMAGES = """image,patient,encounter,date,split
a.png,101,301,2024-03-01,train
b.png,Patient/101,302,2024-03-08,train
c.png,102,,2024-03-05,validation
d.png,103,304,,test
"""


def coded(system: str | None, code: str) -> dict[str, Any]:
    """A CodeableConcept of one code."""
    return {"coding": [{"code": code} | ({"system": system} if system else {})]}


def observation(
    patient: str, encounter: str = "", when: str = "", code: str = "M", **more: Any
) -> dict[str, Any]:
    """A final Observation of a class, by its code in the system http://x."""
    made: dict[str, Any] = {"resourceType": "Observation", "status": "final", "code": coded("http://x", code)}
    made["subject"] = {"reference": patient}
    if encounter:
        made["encounter"] = {"reference": encounter}
    if when:
        made["effectiveDateTime"] = when
    return made | more


OBSERVATIONS = [
    observation("Patient/101", "Encounter/301", valueBoolean=True),
    observation(
        "Patient/101", "http://h/Encounter/302/_history/2", valueCodeableConcept=coded(LOINC, "LA32-8")
    ),
    observation("https://h/Patient/102", when="2024-03-05", valueCodeableConcept=coded(SCT, "373067005")),
    observation("Patient/103", "Encounter/304", code="E", valueCodeableConcept=coded(V2, "Y")),
    observation("Patient/101", "Encounter/301", code="other", valueString="of no class"),
]


@pytest.fixture
def site(tmp_path: Path) -> dict[str, Any]:
    """A site whose labels are known by hand."""
    (tmp_path / "list.csv").write_text(IMAGES)
    write(tmp_path / "o.ndjson", OBSERVATIONS)
    return {
        "dataset": "fhir",
        "root": tmp_path,
        "table": tmp_path / "list.csv",
        "observations": [tmp_path / "o.ndjson"],
        "classes": {"Mass": "http://x|M", "Edema": "E"},
    }


def write(path: Path, observations: list[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(one)}\n" for one in observations))


def read(site: dict[str, Any], **more: Any) -> Reading:
    return read_table(parse_data(site | more, "suture.toml"))


def also(site: dict[str, Any], *more: dict[str, Any]) -> Reading:
    """What is read with more Observations, from line 6 on."""
    write(site["observations"][0], [*OBSERVATIONS, *more])
    return read(site)


BY_HAND = [[1, NAN], [0, NAN], [0, NAN], [NAN, 1]]


def test_yes_is_1_no_is_0_and_no_observation_is_unknown(site: dict[str, Any]) -> None:
    reading = read(site)
    assert reading.table.labels.names == ("Mass", "Edema")
    assert reading.table.patients == ("101", "101", "102", "103")
    assert reading.table.split == ("train", "train", "validation", "test")
    np.testing.assert_array_equal(reading.table.y, BY_HAND)
    assert not reading.faults
    assert "4 of 4" in reading.notes[0]


def test_a_bundle_and_several_files_hold_the_same(site: dict[str, Any], tmp_path: Path) -> None:
    entries = [{"resource": one} for one in (*OBSERVATIONS[:2], {"resourceType": "Patient", "id": "101"})]
    bundle = {"resourceType": "Bundle", "type": "searchset", "entry": [*entries, {"fullUrl": "urn:x"}]}
    (tmp_path / "b.json").write_text(json.dumps(bundle))
    lines = "\n\n".join(map(json.dumps, OBSERVATIONS[2:]))
    (tmp_path / "c.ndjson.gz").write_bytes(gzip.compress(lines.encode()))
    several = [tmp_path / "c.ndjson.gz", tmp_path / "b.json"]
    for observations in (several, str(site["observations"][0])):  # one file needs no list
        reading = read(site, observations=observations)
        np.testing.assert_array_equal(reading.table.y, BY_HAND)
        assert not reading.faults


ABSENT = coded("http://terminology.hl7.org/CodeSystem/data-absent-reason", "unknown")


@pytest.mark.parametrize(
    ("value", "label"),
    [
        ({"valueBoolean": True}, 1),
        ({"valueBoolean": False}, 0),
        ({"valueCodeableConcept": coded(SCT, "373066001")}, 1),
        ({"valueCodeableConcept": coded(SCT, "373067005")}, 0),
        ({"valueCodeableConcept": coded(LOINC, "LA33-6")}, 1),
        ({"valueCodeableConcept": coded(LOINC, "LA32-8")}, 0),
        ({"valueCodeableConcept": coded(V2, "Y")}, 1),
        ({"valueCodeableConcept": {"coding": [{"code": "local"}, *coded(V2, "N")["coding"]]}}, 0),
        ({"dataAbsentReason": ABSENT}, NAN),
        ({"valueBoolean": True, "status": "amended"}, 1),
        ({"valueBoolean": True, "status": "corrected"}, 1),
        # What is not final or withdrawn, or about another than its patient, is no answer.
        *(({"valueBoolean": True, "status": word}, NAN) for word in ("registered", "cancelled", "unknown")),
        ({"valueBoolean": True, "focus": [{"reference": "RelatedPerson/9"}]}, NAN),
    ],
)
def test_each_value_by_hand(site: dict[str, Any], value: dict[str, Any], label: float) -> None:
    reading = also(site, observation("Patient/103", "Encounter/304", **value))
    assert not reading.faults
    np.testing.assert_array_equal(reading.table.y[:, 0], [1, 0, 0, label])
    skipped = value.get("status", "final") in ("registered", "cancelled", "unknown") or "focus" in value
    assert any("line 6" in note for note in reading.notes) == skipped


def test_a_class_whose_answers_are_all_withdrawn_is_not_annotated(site: dict[str, Any]) -> None:
    write(
        site["observations"][0], [observation("Patient/103", valueBoolean=False, status="entered-in-error")]
    )
    assert "'http://x|M' of 'Mass'" in read(site).faults[0]


@pytest.mark.parametrize(
    "reference", ["Group/103", "#103", "Patient/104", "urn:uuid:103", "Patient?identifier=103"]
)
def test_a_reference_to_anything_else_belongs_to_no_image(site: dict[str, Any], reference: str) -> None:
    reading = also(site, observation(reference, "Encounter/304", "2024-03-05", valueBoolean=True))
    np.testing.assert_array_equal(reading.table.y, BY_HAND)
    assert not reading.faults
    assert "4 of 5" in reading.notes[-1]


def test_identifiers_with_a_slash_are_not_mixed_up(site: dict[str, Any]) -> None:
    site["table"].write_text("image,patient,encounter,split\na.png,2023/17,1,train\nb.png,2024/17,1,test\n")
    write(site["observations"][0], [observation("Patient/17", "1", valueBoolean=True)])
    reading = read(site, classes={"Mass": "M"})
    assert reading.table.patients == ("2023/17", "2024/17")
    assert np.isnan(reading.table.y).all()
    assert "0 of 1" in reading.faults[0]


@pytest.mark.parametrize(
    ("when", "label"),
    [
        ({"effectiveDateTime": "2024-03-05T23:30:00-05:00"}, 1),
        ({"effectiveInstant": "2024-03-05T00:30:00.000+09:00"}, 1),
        ({"effectiveDateTime": "2024-03-06"}, NAN),
        ({"effectiveDateTime": "2024-03"}, NAN),
        ({"effectivePeriod": {"start": "2024-03-05", "end": "2024-03-05"}}, NAN),
        ({}, NAN),
    ],
)
def test_the_day_is_as_it_is_written(site: dict[str, Any], when: dict[str, Any], label: float) -> None:
    reading = also(site, observation("Patient/102", code="E", valueBoolean=True, **when))
    np.testing.assert_array_equal(reading.table.y[:, 1], [NAN, NAN, label, 1])


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({}, 'values = { "" = "unknown" }'),
        ({"valueCodeableConcept": coded("http://x", "maybe")}, 'values = { "http://x|maybe" = "?" }'),
        ({"valueCodeableConcept": {"text": "yes"}}, "valueCodeableConcept"),
        ({"valueString": "yes"}, "valueString"),
        ({"valueBoolean": True, "dataAbsentReason": {"text": "x"}}, "valueBoolean and a dataAbsentReason"),
        ({"valueCodeableConcept": {"coding": coded(V2, "Y")["coding"] + coded(V2, "N")["coding"]}}, "codes"),
        ({"status": "done", "valueBoolean": True}, "'done'"),
        (
            {"modifierExtension": [{"url": "x", "valueBoolean": True}], "valueBoolean": True},
            "modifier",
        ),
        ({"effectiveDateTime": "5.3.2024", "valueBoolean": True}, "(at effectiveDateTime)"),
        ({"valueBoolean": True, "valueString": "x"}, "(at several values)"),
        ({"valueBoolean": True, "nonsense": "x"}, "(at nonsense)"),
    ],
)
def test_a_fault_names_its_line_and_nobody(site: dict[str, Any], more: dict[str, Any], named: str) -> None:
    reading = also(site, observation("Patient/103", "Encounter/304", **more))
    (fault,) = reading.faults
    assert fault.startswith(f"{site['observations'][0]} line 6: ")
    assert named in fault
    assert not any(word in fault.replace(str(site["root"]), "") for word in ("103", "304", "5.3.2024"))
    np.testing.assert_array_equal(reading.table.y, BY_HAND)


def test_the_site_says_what_other_values_mean(site: dict[str, Any]) -> None:
    detected = observation("Patient/103", "Encounter/304", valueCodeableConcept=coded(SCT, "260373001"))
    bare = observation("Patient/102", when="2024-03-05", code="E")
    assert len(also(site, detected, bare).faults) == 2
    reading = read(site, values={f"{SCT}|260373001": 1, "": 0})
    assert not reading.faults
    np.testing.assert_array_equal(reading.table.y, [[1, NAN], [0, NAN], [0, 0], [1, 1]])


def test_contradictions_name_their_lines(site: dict[str, Any]) -> None:
    (fault,) = also(site, observation("Patient/101", "Encounter/301", valueBoolean=False)).faults
    path = site["observations"][0]
    assert f"{site['table']} row 2: class 'Mass' is both present and absent in" in fault
    assert f"{path} line 1 and {path} line 6" in fault


@pytest.mark.parametrize("line", ["[1", "[]", '{"resourceType": NaN', "[" * 100_000])
def test_a_line_that_is_no_resource_is_a_fault(site: dict[str, Any], line: str) -> None:
    path = site["observations"][0]
    path.write_text(path.read_text() + line + "\n")
    reading = read(site)
    (fault,) = reading.faults
    assert fault.startswith(f"{path} line 6: ")
    np.testing.assert_array_equal(reading.table.y, BY_HAND)


def test_a_file_that_is_no_bundle_and_a_missing_package_are_refused(
    site: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text in ("", "[]", '{"resourceType": "Patient"}', '{"resourceType":"Bundle","entry":3}'):
        (tmp_path / "b.json").write_text(text)
        with refused("b.json", "Bundle", by=DataError):
            read(site, observations=[tmp_path / "b.json"])
    for name in ("absent.json", "absent.ndjson"):
        with refused(name, by=DataError):
            read(site, observations=[tmp_path / name])
    monkeypatch.setitem(sys.modules, "fhir.resources.R4B.observation", None)
    with refused("suture[fhir]", by=DataError):
        read(site)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"observations": []}, "[data] observations"),
        ({"classes": {"Mass": ""}}, "[data] classes.Mass = ''"),
        ({"classes": {"Mass": "a|b|c"}}, "[data] classes.Mass = 'a|b|c'"),
        ({"classes": {"Mass": "E", "Edema": "E"}}, "two classes"),
        ({"measurements": "m.csv"}, "'omop'"),
    ],
)
def test_a_wrong_key_is_refused(site: dict[str, Any], more: dict[str, Any], named: str) -> None:
    with refused(named, by=ConfigError):
        read(site, **more)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=5,
)
KEYS = ("status", "code", "subject", "encounter", "effectiveDateTime", "valueBoolean", "valueCodeableConcept")


@pytest.mark.complete
@examples(150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(st.sampled_from([*KEYS, "focus", "valueInteger"]), anything, max_size=3))
def test_an_observation_of_anything_is_read_or_a_fault(site: dict[str, Any], changes: dict[str, Any]) -> None:
    """Whatever its elements are, nothing else ends the reading, and no other image gets another label."""
    reading = also(site, observation("Patient/103", "Encounter/304", valueBoolean=False) | changes)
    np.testing.assert_array_equal(reading.table.y[:3], BY_HAND[:3])
