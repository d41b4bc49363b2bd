"""Structured Reports of decisions, read back by highdicom and pydicom."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tarfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import highdicom as hd
import numpy as np
import pandas as pd
import pydicom
import pytest
from pydicom.sr import _cid_dict, _concepts_dict
from pydicom.uid import generate_uid

from dicom_files import dicom
from small_models import saved_model
from suture.core.errors import ConfigError, DataError
from suture.models import ModelSpec
from suture.protocol.decisions import Calibration, Decisions, DecisionSettings, Operating
from suture_results.commands import _decider
from suture_results.decided_predictions import with_decisions
from suture_results.inputs import find_inputs
from suture_results.model_export.dicom_report import (
    PRESENCE,
    PRIVATE,
    PROBABILITY,
    THRESHOLD,
    Written,
    concept,
    open_reporter,
    write_reports,
)
from world import refused, suture, write_image

pytestmark = pytest.mark.complete

LABELS = ("Edema", "Mass", "Größe", "Hernia")
DECISIONS = Decisions(
    DecisionSettings(),
    {label: Operating({"sensitivity": 0.4}, None, 0.5) for label in LABELS[:3]},
    {"north": {"Edema": Operating({"sensitivity": 0.08175402042}, Calibration(2.0, 1.0), 0.5)}},
)
P = {"Edema": 0.0912345678, "Mass": 0.25, "Größe": 0.4, "Hernia": 0.9}
CODES = {
    "Edema": [
        {"system": "99LOCAL", "code": "E1", "meaning": "swelling"},
        {"system": "SCT", "code": "19242006", "meaning": "Pulmonary edema"},
    ]
}


def a_model(folder: Path, codes: Any = CODES) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    facts = {"labels": LABELS, "suture": "0.1.0", "job": "demo", "round": 15, "codes": codes}
    (folder / "model.json").write_text(json.dumps(facts | {"decisions": asdict(DECISIONS)}))
    return folder


def an_image(path: Path, **values: str) -> Path:
    """Write a grey image of 8 x 8 pixels; an empty value leaves its element out."""
    uid = generate_uid()
    tags = {
        "SpecificCharacterSet": "ISO_IR 100",
        "SOPClassUID": pydicom.uid.SecondaryCaptureImageStorage,
        "SOPInstanceUID": uid,
        "StudyInstanceUID": generate_uid(),
        "SeriesInstanceUID": generate_uid(),
        "PatientID": "P7",
        "PatientName": "Müller^Eva",
        "PatientBirthDate": "19500102",
        "Modality": "OT",
        "StudyDate": "20260301",
    }
    given = {name: value for name, value in (tags | values).items() if value}
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(dicom(np.arange(64, dtype=np.uint8).reshape(8, 8), **given))
    return path


def reported(tmp_path: Path, *paths: Path) -> Written:
    frame = pd.DataFrame([P] * len(paths), index=[str(path) for path in paths])
    decided = with_decisions(frame, DECISIONS, "north")
    reporter = open_reporter(a_model(tmp_path / "model"), "north")
    with find_inputs(paths, "image") as inputs:
        return write_reports(reporter, decided, inputs.found, tmp_path / "reports")


def groups_of(path: Path) -> Any:
    return hd.sr.srread(path).content.get_image_measurement_groups()


def test_the_codes_are_those_of_the_standard() -> None:
    known = _concepts_dict.concepts
    for code in (*PRESENCE.values(), PROBABILITY, THRESHOLD):
        meanings = [
            found[code.value][0] for found in known[code.scheme_designator].values() if code.value in found
        ]
        assert code.meaning in meanings
    for keyword in ("Present", "Absent", "Undetermined"):  # of CID 240, Present-Absent
        assert keyword in _cid_dict.cid_concepts[240]["SCT"]
        assert [code.value for code in PRESENCE.values() if code.meaning == keyword] == [
            code for code, (_, groups) in known["SCT"][keyword].items() if 240 in groups
        ]


def test_each_class_is_one_coded_finding(tmp_path: Path) -> None:
    image = pydicom.dcmread(an_image(tmp_path / "a.dcm"))
    [path] = reported(tmp_path, tmp_path / "a.dcm").reports
    assert path.name == f"{image.SOPInstanceUID}.sr.dcm"
    found, calibrated = {}, {}
    for group in groups_of(path):
        [evaluation] = group.get_qualitative_evaluations()
        measured = group.get_measurements()
        assert {one.unit.value for one in measured} == {"1"}
        assert [one.referenced_sop_instance_uid for one in group.source_images] == [image.SOPInstanceUID]
        name, label = evaluation.name, group.tracking_identifier
        numbers = {one.name.value: one.value for one in measured if one.method is None}
        found[label] = (name.scheme_designator, name.value, evaluation.value, numbers)
        calibrated |= {(label, one.method.value): one.value for one in measured if one.method}
    hashed = {label: hashlib.sha256(label.encode()).hexdigest()[:16] for label in LABELS}
    assert list(found) == list(LABELS)
    assert found["Edema"][:2] == ("SCT", "19242006")
    assert [found[label][:2] for label in LABELS[1:]] == [(PRIVATE, hashed[label]) for label in LABELS[1:]]
    assert [one[2].meaning for one in found.values()] == ["Present", "Absent", "Present", "Undetermined"]
    assert found["Edema"][3] == pytest.approx({"122157": 0.0912345678, "122411": 0.08175402042})
    assert found["Mass"][3] == pytest.approx({"122157": 0.25, "122411": 0.4})
    assert found["Hernia"][3] == pytest.approx({"122157": 0.9})
    # Edema at north is calibrated by sigmoid(2 logit p + 1), no other class is.
    odds = (P["Edema"] / (1 - P["Edema"])) ** 2 * np.e
    assert calibrated == {("Edema", "calibrated"): pytest.approx(odds / (1 + odds), abs=1e-6)}


def test_it_is_of_the_patient_and_study_and_says_who_observed(tmp_path: Path) -> None:
    image = pydicom.dcmread(an_image(tmp_path / "a.dcm"))
    [path] = reported(tmp_path, tmp_path / "a.dcm").reports
    found = pydicom.dcmread(path)
    assert found.SOPClassUID == pydicom.uid.ComprehensiveSRStorage
    for name in ("StudyInstanceUID", "PatientID", "PatientName", "PatientBirthDate", "StudyDate"):
        assert found[name].value == image[name].value
    assert str(found.PatientName) == "Müller^Eva"
    assert found.SeriesInstanceUID != image.SeriesInstanceUID
    assert (found.VerificationFlag, found.Modality) == ("UNVERIFIED", "SR")
    [evidence] = found.CurrentRequestedProcedureEvidenceSequence
    [series] = evidence.ReferencedSeriesSequence
    assert series.SeriesInstanceUID == image.SeriesInstanceUID
    assert series.ReferencedSOPSequence[0].ReferencedSOPInstanceUID == image.SOPInstanceUID
    texts = [item.TextValue for item in found.ContentSequence if "TextValue" in item]
    digest = hashlib.sha256(b"weights").hexdigest()
    assert texts == ["Suture 0.1.0", "Suture", "job demo, round 15", digest]
    assert found.DeviceSerialNumber == digest


def test_a_private_code_depends_on_the_name_alone_and_fits(tmp_path: Path) -> None:
    assert concept("Mass") == concept("Mass") != concept("Nodule")
    long = concept("a\\b" * 50)
    assert (len(long.value), len(long.meaning)) == (16, 64)
    assert "\\" not in long.meaning
    faulty = {"Edema": [{"system": "SCT", "code": "", "meaning": "Edema"}]}
    with refused("codes.Edema", by=ConfigError):
        open_reporter(a_model(tmp_path, faulty))


def test_inputs_without_a_report_are_counted_or_named(tmp_path: Path) -> None:
    good = an_image(tmp_path / "good.dcm", PatientName="", PatientID="")
    twin = Path(shutil.copy(good, tmp_path / "twin.dcm"))
    lacking = an_image(tmp_path / "lacking.dcm", StudyInstanceUID="")
    with pytest.warns(UserWarning, match="Invalid value for VR UI"):
        wicked = an_image(tmp_path / "wicked.dcm", SOPInstanceUID="../../evil")
    archive, png = tmp_path / "in.tar", write_image(tmp_path / "a.png")
    with tarfile.open(archive, "w") as file:
        file.add(an_image(tmp_path / "deep.dcm"), "deep/a.dcm")
    found = reported(tmp_path, lacking, wicked, png, good, twin)
    assert (len(found.reports), found.others) == (1, 1)
    named = {lacking: "StudyInstanceUID", wicked: "SOPInstanceUID", twin: "SOPInstanceUID"}
    assert found.refused.keys() == {str(path) for path in named}
    assert all(uid in found.refused[str(path)] for path, uid in named.items())
    assert list((tmp_path / "reports").iterdir()) == list(found.reports)  # nothing half written beside it
    with find_inputs([archive], "image") as inputs:
        decided = with_decisions(pd.DataFrame([P], index=list(inputs.found)), DECISIONS, "north")
        done = write_reports(open_reporter(tmp_path / "model"), decided, inputs.found, tmp_path / "reports")
    assert len(done.reports) == 1


def test_predict_writes_reports_of_the_images_that_it_decides(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """Of b the series is unknown, c is no DICOM file, and d of another modality."""
    facts = {"job": "demo", "round": 1, "decisions": asdict(DECISIONS)}
    spec = ModelSpec("cnn", size=16, modalities=("OT",))
    model = saved_model(tmp_path / "model", spec, LABELS, **facts)
    images, out, reports = tmp_path / "images", tmp_path / "out.csv", tmp_path / "reports"
    image = an_image(images / "a.dcm", PatientName="Eva")
    an_image(images / "b.dcm", SeriesInstanceUID="")
    write_image(images / "c.png")
    an_image(images / "d.dcm", Modality="CT")
    words = ["predict", model, images, "-o", out, "--decide", "north", "--prevalence", "Edema=0.02"]
    with refused("1 of 3", by=DataError):
        suture(*words, "--dicom-sr", tmp_path / "others", "--max-failed", 1)
    assert len(list((tmp_path / "others").iterdir())) == 1
    said = suture(*words, "--dicom-sr", reports, "--max-failed", 2)
    assert "SeriesInstanceUID" in said
    [path] = reports.iterdir()
    assert path.name == f"{pydicom.dcmread(image).SOPInstanceUID}.sr.dcm"
    numbers = {one.method and one.method.value: one.value for one in groups_of(path)[0].get_measurements()}
    assert numbers.keys() == {None, "at-prevalence"}
    written = pd.read_csv(out).iloc[0]
    assert numbers["at-prevalence"] == pytest.approx(written["Edema calibrated"], abs=1e-6)
    assert groups_of(path)[0].get_measurements()[0].value == pytest.approx(written["Edema"], abs=1e-6)
    assert "Eva" not in " ".join(str(one.message) for one in recwarn)


def test_what_cannot_be_reported_is_refused_before_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out = a_model(tmp_path / "model"), tmp_path / "out.csv"
    words = ["predict", model, tmp_path, "-o", out, "--dicom-sr", tmp_path / "reports"]
    with refused("--decide", by=ConfigError):
        suture(*words)
    with refused("'south'", by=ConfigError):
        suture(*words, "--decide", "south")
    assert not out.exists()
    monkeypatch.setitem(sys.modules, "highdicom", None)
    with refused("suture[dicom-sr]", by=ConfigError):
        _decider(model, "north", (), tmp_path)


def patched(path: Path, old: bytes, new: bytes) -> Path:
    """Change the bytes of a file, as no writer of DICOM would."""
    content = path.read_bytes()
    assert content.count(old) >= 1
    assert len(old) == len(new)
    path.write_bytes(content.replace(old, new, 1))
    return path


_AFTER = b"\0\x08\0\x18"
_CLASS = b"1.2.840.10008.5.1.4.1.1.7" + _AFTER  # of the image, not of the file's head
BROKEN = {
    "unknown charset": (b"ISO_IR 100", b"BOGUS_9999", "BOGUS_9999"),
    "codec of Python": (b"ISO_IR 100", b"rot13     ", "rot13"),
    "another charset": (b"ISO_IR 100", b"ISO_IR 192", "PatientName"),
    "NUL in charset": (b"ISO_IR 100", b"ISO\0IR\xff100", "character set"),
    "class of no image": (_CLASS, b"1.2.840.10008.1.1".ljust(25, b"\0") + _AFTER, "KeyError"),
    "numeric patient": (b"\x10\0\x20\0LO", b"\x10\0\x20\0US", "PatientID"),
    "float name": (b"\x10\0\x10\0PN", b"\x10\0\x10\0FL", "BytesLengthException"),
    "unknown VR": (b"\x08\0\x20\0DA", b"\x08\0\x20\0ZZ", "NotImplementedError"),
    "two patients": (b"P7", b"\\7", "PatientID"),
    "escape in name": (b"ller^Eva", b"ll\x1b[31ma", ""),
    "impossible date": (b"20260301", b"20269999", "ValueError"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_image_is_left_out_and_those_after_it_are_reported(fault: str, tmp_path: Path) -> None:
    old, new, named = BROKEN[fault]
    broken = patched(an_image(tmp_path / "a.dcm"), old, new)
    name = "Yamada^Tarou=山田^太郎"
    good = an_image(tmp_path / "b.dcm", PatientName=name, SpecificCharacterSet="ISO_IR 192")
    found = reported(tmp_path, broken, good)
    assert list(found.refused) == [str(broken)]
    assert named in found.refused[str(broken)]
    assert "\x1b" not in found.refused[str(broken)]
    [path] = found.reports
    assert list((tmp_path / "reports").iterdir()) == [path]
    assert str(hd.sr.srread(path).PatientName) == name


def test_files_that_are_cut_or_hold_anything_are_left_out(tmp_path: Path) -> None:
    whole = an_image(tmp_path / "whole.dcm").read_bytes()
    bad = {f"cut {n}.dcm": whole[:n] for n in (0, 131, 133, 200, 400, 500)}
    bad |= {"noise.dcm": bytes(range(256)) * 9, "marked.dcm": b"\0" * 128 + b"DICM" + b"\xff" * 99}
    for name, content in bad.items():
        (tmp_path / name).write_bytes(content)
    found = reported(tmp_path, *(tmp_path / name for name in bad), tmp_path / "whole.dcm")
    assert len(found.reports) == 1
    assert set(found.refused) == {str(tmp_path / name) for name in bad}


def test_private_elements_and_odd_but_clear_values_are_reported(tmp_path: Path) -> None:
    image = pydicom.dcmread(an_image(tmp_path / "a.dcm", PatientID=""))
    image.add_new(0x00091001, "UN", b"\xff" * 9)
    image.PatientName = "A^B^C^D^E=F^G=H"
    image.save_as(tmp_path / "a.dcm")
    patched(tmp_path / "a.dcm", b"ISO_IR 100", b"ISO IR 100")
    found = reported(tmp_path, tmp_path / "a.dcm")
    assert not found.refused
    assert str(hd.sr.srread(found.reports[0]).PatientName) == "A^B^C^D^E=F^G=H"


def test_a_report_of_an_earlier_call_is_never_replaced(tmp_path: Path) -> None:
    first = an_image(tmp_path / "first.dcm")
    [path] = reported(tmp_path, first).reports
    before = path.read_bytes()
    second = an_image(tmp_path / "second.dcm", SOPInstanceUID=pydicom.dcmread(first).SOPInstanceUID)
    third, outside = an_image(tmp_path / "third.dcm"), tmp_path / "outside"
    (path.parent / f"{pydicom.dcmread(third).SOPInstanceUID}.sr.dcm").symlink_to(outside)
    found = reported(tmp_path, second, third)
    assert not found.reports
    assert found.refused.keys() == {str(second), str(third)}
    assert path.read_bytes() == before
    assert not outside.exists()
