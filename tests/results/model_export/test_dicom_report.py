"""Structured Reports of decisions, read back by highdicom and pydicom."""

from __future__ import annotations

import hashlib
import json
import re
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
from PIL import Image
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.sr import _cid_dict, _concepts_dict
from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid
from typer.testing import CliRunner

from suture.cli.app import app
from suture.core.errors import ConfigError
from suture.core.labels import LabelSet
from suture.models import ModelSpec, build
from suture.models.saved import save_model
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
    meta = FileMetaDataset()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID = (
        SecondaryCaptureImageStorage,
        generate_uid(),
    )
    image = FileDataset(str(path), {}, file_meta=meta, preamble=b"\0" * 128)
    image.SpecificCharacterSet = "ISO_IR 100"
    image.SOPClassUID, image.SOPInstanceUID = SecondaryCaptureImageStorage, meta.MediaStorageSOPInstanceUID
    image.StudyInstanceUID, image.SeriesInstanceUID = generate_uid(), generate_uid()
    image.PatientID, image.PatientName, image.PatientBirthDate = "P7", "Müller^Eva", "19500102"
    image.Modality, image.StudyDate = "OT", "20260301"
    image.Rows = image.Columns = 8
    image.SamplesPerPixel, image.PhotometricInterpretation = 1, "MONOCHROME2"
    image.BitsAllocated = image.BitsStored = 8
    image.HighBit, image.PixelRepresentation = 7, 0
    image.PixelData = np.arange(64, dtype=np.uint8).tobytes()
    for name, value in values.items():
        if value:
            setattr(image, name, value)
        else:
            delattr(image, name)
    image.save_as(path)
    return path


def reported(tmp_path: Path, *paths: Path, codes: Any = CODES) -> Written:
    model = a_model(tmp_path / "model", codes)
    frame = pd.DataFrame([P] * len(paths), index=[str(path) for path in paths])
    decided = with_decisions(frame, DECISIONS, "north")
    with find_inputs(paths, "image") as inputs:
        return write_reports(open_reporter(model, "north"), decided, inputs.found, tmp_path / "reports")


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
    groups = hd.sr.srread(path).content.get_image_measurement_groups()
    found = {}
    for group in groups:
        [evaluation] = group.get_qualitative_evaluations()
        numbers = {one.name.value: one.value for one in group.get_measurements() if one.method is None}
        assert {one.unit.value for one in group.get_measurements()} == {"1"}
        assert [one.referenced_sop_instance_uid for one in group.source_images] == [image.SOPInstanceUID]
        name = evaluation.name
        found[group.tracking_identifier] = (name.scheme_designator, name.value, evaluation.value, numbers)
    hashed = {label: hashlib.sha256(label.encode()).hexdigest()[:16] for label in LABELS}
    assert list(found) == list(LABELS)
    assert found["Edema"][:2] == ("SCT", "19242006")
    assert [found[label][:2] for label in LABELS[1:]] == [(PRIVATE, hashed[label]) for label in LABELS[1:]]
    assert [one[2].meaning for one in found.values()] == ["Present", "Absent", "Present", "Undetermined"]
    assert found["Edema"][3] == pytest.approx({"122157": 0.0912345678, "122411": 0.08175402042})
    assert found["Mass"][3] == pytest.approx({"122157": 0.25, "122411": 0.4})
    assert found["Hernia"][3] == pytest.approx({"122157": 0.9})


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


def test_inputs_without_a_report_are_counted_or_named(tmp_path: Path) -> None:
    good = an_image(tmp_path / "good.dcm", PatientName="", PatientID="")
    twin = tmp_path / "twin.dcm"
    shutil.copy(good, twin)
    lacking = an_image(tmp_path / "lacking.dcm", StudyInstanceUID="")
    with pytest.warns(UserWarning, match="Invalid value for VR UI"):
        wicked = an_image(tmp_path / "wicked.dcm", SOPInstanceUID="../../evil")
    png = tmp_path / "a.png"
    png.write_bytes(b"\x89PNG\r\n")
    found = reported(tmp_path, lacking, wicked, png, good, twin)
    assert (len(found.reports), found.others) == (1, 1)
    assert found.refused == {
        str(lacking): "it has no valid StudyInstanceUID",
        str(wicked): "it has no valid SOPInstanceUID",
        str(twin): "another input has the same SOPInstanceUID",
    }
    assert list((tmp_path / "reports").iterdir()) == list(found.reports)  # nothing half written beside it


def test_a_private_code_depends_on_the_name_alone_and_fits() -> None:
    assert concept("Mass") == concept("Mass") != concept("Nodule")
    long = concept("a\\b" * 50)
    assert (len(long.value), len(long.meaning)) == (16, 64)
    assert "\\" not in long.meaning


def test_faulty_codes_are_refused(tmp_path: Path) -> None:
    model = a_model(tmp_path / "model", {"Edema": [{"system": "SCT", "code": "", "meaning": "Edema"}]})
    with pytest.raises(ConfigError, match="code"):
        open_reporter(model)


def test_predict_writes_reports_of_the_dicom_images_alone(tmp_path: Path) -> None:
    model, images, reports = tmp_path / "model", tmp_path / "images", tmp_path / "reports"
    spec = ModelSpec(name="cnn", size=16)
    facts = {"job": "demo", "round": 1, "decisions": asdict(DECISIONS)}
    save_model(build(spec, LabelSet(LABELS), 1, pretrained=False), spec, model, facts)
    images.mkdir()
    an_image(images / "a.dcm")
    an_image(images / "b.dcm", SeriesInstanceUID="")
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(images / "c.png")
    out = tmp_path / "out.csv"
    words = [str(model), str(images), "-o", str(out), "--decide", "north", "--dicom-sr", str(reports)]
    result = CliRunner().invoke(app, ["predict", *words, "--max-failed", "1"], catch_exceptions=False)
    said = " ".join(result.output.split())
    assert "it has no valid SeriesInstanceUID" in said
    assert "DICOM: 1 input" in said
    [path] = reports.iterdir()
    group = hd.sr.srread(path).content.get_image_measurement_groups()[0]
    probability = pd.read_csv(out)["Edema"][0]
    assert group.get_measurements()[0].value == pytest.approx(probability, abs=1e-6)


def test_an_image_of_another_modality_has_no_report(tmp_path: Path) -> None:
    spec = ModelSpec(name="cnn", size=16, modalities=("DX",))
    model = build(spec, LabelSet(LABELS), 1, pretrained=False)
    save_model(model, spec, tmp_path / "model", {"decisions": asdict(DECISIONS)})
    (tmp_path / "images").mkdir()
    chest = an_image(tmp_path / "images" / "chest.dcm", Modality="DX")
    an_image(tmp_path / "images" / "other.dcm", Modality="CT")
    words = [str(tmp_path / "model"), str(tmp_path / "images"), "-o", str(tmp_path / "out.csv")]
    done = CliRunner().invoke(
        app, ["predict", *words, "--decide", "north", "--dicom-sr", str(tmp_path / "reports")]
    )
    assert done.exit_code == 1
    [path] = (tmp_path / "reports").iterdir()
    assert path.name == f"{pydicom.dcmread(chest).SOPInstanceUID}.sr.dcm"


def test_what_cannot_be_reported_is_refused_before_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.csv"
    arguments = ["predict", str(a_model(tmp_path / "model")), str(tmp_path), "-o", str(out)]
    result = CliRunner().invoke(app, [*arguments, "--dicom-sr", str(tmp_path / "reports")])
    assert result.exit_code != 0
    assert isinstance(result.exception, ConfigError)
    assert "add --decide SITE" in str(result.exception)
    assert not out.exists()
    result = CliRunner().invoke(
        app, [*arguments, "--decide", "south", "--dicom-sr", str(tmp_path / "reports")]
    )
    assert "unknown site 'south'" in str(result.exception)
    monkeypatch.setitem(sys.modules, "highdicom", None)
    with pytest.raises(ConfigError, match=r'pip install "suture\[dicom-sr\]"'):
        _decider(tmp_path / "model", "north", (), tmp_path)


def test_a_calibrated_probability_says_that_it_is_one(tmp_path: Path) -> None:
    """Edema at north is calibrated by sigmoid(2 logit p + 1), no other class is."""
    [path] = reported(tmp_path, an_image(tmp_path / "a.dcm")).reports
    found = {
        (group.tracking_identifier, one.method.value): one.value
        for group in hd.sr.srread(path).content.get_image_measurement_groups()
        for one in group.get_measurements()
        if one.method is not None
    }
    odds = (P["Edema"] / (1 - P["Edema"])) ** 2 * np.e
    assert found == {("Edema", "calibrated"): pytest.approx(odds / (1 + odds), abs=1e-6)}


def test_a_probability_at_a_stated_prevalence_says_so_and_no_warning_shows_a_name(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    model, out = tmp_path / "model", tmp_path / "out.csv"
    spec = ModelSpec(name="cnn", size=16)
    save_model(
        build(spec, LabelSet(LABELS), 1, pretrained=False), spec, model, {"decisions": asdict(DECISIONS)}
    )
    image = an_image(tmp_path / "a.dcm", PatientName="Eva")
    words = [str(model), str(image), "-o", str(out), "--decide", "north", "--prevalence", "Edema=0.02"]
    CliRunner().invoke(app, ["predict", *words, "--dicom-sr", str(tmp_path)], catch_exceptions=False)
    [path] = tmp_path.glob("*.sr.dcm")
    group = hd.sr.srread(path).content.get_image_measurement_groups()[0]
    [(how, value)] = [(one.method.value, one.value) for one in group.get_measurements() if one.method]
    assert how == "at-prevalence"
    assert value == pytest.approx(pd.read_csv(out)["Edema calibrated"][0], abs=1e-6)
    assert "Eva" not in " ".join(str(one.message) for one in recwarn)


def test_an_image_within_an_archive_has_a_report(tmp_path: Path) -> None:
    image = an_image(tmp_path / "a.dcm")
    archive, png = tmp_path / "in.tar", tmp_path / "b.png"
    png.write_bytes(b"\x89PNG\r\n")
    with tarfile.open(archive, "w") as file:
        file.add(image, "deep/a.dcm")
        file.add(png, "b.png")
    model = a_model(tmp_path / "model")
    with find_inputs([archive], "image") as inputs:
        frame = pd.DataFrame([P] * 2, index=list(inputs.found))
        decided = with_decisions(frame, DECISIONS, "north")
        done = write_reports(open_reporter(model, "north"), decided, inputs.found, tmp_path / "reports")
    uid = pydicom.dcmread(image).SOPInstanceUID
    assert (done.reports, done.others, done.refused) == ((tmp_path / "reports" / f"{uid}.sr.dcm",), 1, {})


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
    "unknown charset": (b"ISO_IR 100", b"BOGUS_9999", "its character set BOGUS_9999 is unknown"),
    "codec of Python": (b"ISO_IR 100", b"rot13     ", "its character set rot13 is unknown"),
    "wide codec": (b"ISO_IR 100", b"utf_16    ", "its character set utf_16 is unknown"),
    "another charset": (b"ISO_IR 100", b"ISO_IR 192", "PatientName cannot be read in the character set"),
    "NUL in charset": (b"ISO_IR 100", b"ISO\0IR\xff100", "its character set"),
    "unknown class": (_CLASS, b"1.2.840.10008.5.1.4.9.9.7" + _AFTER, "KeyError"),
    "class of no image": (_CLASS, b"1.2.840.10008.1.1".ljust(25, b"\0") + _AFTER, "KeyError"),
    "numeric patient": (b"\x10\0\x20\0LO", b"\x10\0\x20\0US", "its PatientID is stored as US instead of LO"),
    "float name": (b"\x10\0\x10\0PN", b"\x10\0\x10\0FL", "BytesLengthException"),
    "unknown VR": (b"\x08\0\x20\0DA", b"\x08\0\x20\0ZZ", "NotImplementedError"),
    "two patients": (b"P7", b"\\7", "its PatientID has 2 values instead of one"),
    "escape in name": (b"ller^Eva", b"ll\x1b[31ma", "invalid DICOM values|its PatientName cannot be read"),
    "impossible date": (b"20260301", b"20269999", "ValueError: month must be"),
    "no date": (b"19500102", b"1950x\xff02", "ValueError"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_image_is_left_out_and_those_after_it_are_reported(fault: str, tmp_path: Path) -> None:
    old, new, reason = BROKEN[fault]
    broken = patched(an_image(tmp_path / "a.dcm"), old, new)
    good = an_image(
        tmp_path / "b.dcm", PatientName="Yamada^Tarou=山田^太郎", SpecificCharacterSet="ISO_IR 192"
    )
    found = reported(tmp_path, broken, good)
    assert list(found.refused) == [str(broken)]
    assert re.search(reason, found.refused[str(broken)])
    assert "\x1b" not in found.refused[str(broken)]
    [path] = found.reports
    assert list((tmp_path / "reports").iterdir()) == [path]
    assert str(hd.sr.srread(path).PatientName) == "Yamada^Tarou=山田^太郎"


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
    image = pydicom.dcmread(an_image(tmp_path / "a.dcm", PatientID="", SpecificCharacterSet="ISO_IR 100"))
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
    third = an_image(tmp_path / "third.dcm")
    outside = tmp_path / "outside"
    (path.parent / f"{pydicom.dcmread(third).SOPInstanceUID}.sr.dcm").symlink_to(outside)
    found = reported(tmp_path, second, third)
    assert not found.reports
    assert all("exists already" in reason for reason in found.refused.values())
    assert len(found.refused) == 2
    assert path.read_bytes() == before
    assert not outside.exists()


def test_an_image_without_a_report_is_an_exit_code(tmp_path: Path) -> None:
    model, spec = tmp_path / "model", ModelSpec(name="cnn", size=16)
    save_model(
        build(spec, LabelSet(LABELS), 1, pretrained=False), spec, model, {"decisions": asdict(DECISIONS)}
    )
    (tmp_path / "images").mkdir()
    an_image(tmp_path / "images" / "a.dcm", SeriesInstanceUID="")
    an_image(tmp_path / "images" / "b.dcm")
    words = ["predict", str(model), str(tmp_path / "images"), "-o", str(tmp_path / "out.csv")]
    words += ["--decide", "north", "--dicom-sr", str(tmp_path / "reports")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1
    assert "1 of 2 predicted images have no report" in str(done.exception)
    assert len(list((tmp_path / "reports").iterdir())) == 1
