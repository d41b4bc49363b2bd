"""Decisions on DICOM images as Structured Reports: a Comprehensive SR of TID 1500 (PS3.16) for each image.

They are written by an optional package, `pip install "suture[dicom-sr]"`.
"""

from __future__ import annotations

import hashlib
import os
import re
import uuid
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pandas as pd
import pydicom
from pydantic import Field
from pydantic.dataclasses import dataclass as validated
from pydicom.charset import python_encoding
from pydicom.datadict import dictionary_VR
from pydicom.dataelem import DataElement
from pydicom.dataset import Dataset
from pydicom.sr.coding import Code
from pydicom.uid import UID, generate_uid

from suture.core.errors import DataError, as_word
from suture.core.escaping import dicom, printable
from suture.core.files import atomic_write, make_folder, read_json
from suture.core.validation import OPEN, parse
from suture.data.decoding import warned_of
from suture.models.saved import weights_digest
from suture_results.decided_predictions import ALL, NOT_VALIDATED, STATED, read_decisions, threshold_of
from suture_results.inputs import Input

if TYPE_CHECKING:
    from highdicom.sr import ComprehensiveSR, MeasurementReport, MeasurementsAndQualitativeEvaluations

PRIVATE = "99SUTURE"
"""The coding scheme of classes without a code; a private one begins with 99 (PS3.16, 8.2)."""

PRESENCE = {
    "above": Code("52101004", "SCT", "Present"),
    "below": Code("272519000", "SCT", "Absent"),
    NOT_VALIDATED: Code("373068000", "SCT", "Undetermined"),
}
"""What a decision says of a finding: the three values of CID 240."""

PROBABILITY = Code("122157", "DCM", "Probability")
THRESHOLD = Code("122411", "DCM", "Threshold Value")
_CALIBRATED = Code("calibrated", PRIVATE, "calibrated on validation images")
"""The method of a probability that has been calibrated; the model's own has none."""

_CORRECTED = Code("at-prevalence", PRIVATE, "calibrated, then corrected to a stated prevalence")
"""The method where the user has stated a prevalence."""

_NO_UNITS = Code("1", "UCUM", "no units")
_IMAGING = Code("363679005", "SCT", "Imaging procedure")

_NEEDED = ("StudyInstanceUID", "SeriesInstanceUID", "SOPInstanceUID", "SOPClassUID")
_MAY_BE_EMPTY = (
    *("PatientID", "PatientName", "PatientBirthDate", "PatientSex"),
    *("AccessionNumber", "StudyID", "StudyDate", "StudyTime", "ReferringPhysicianName"),
)


@validated(frozen=True, config=OPEN)
class _ClassCode:
    """A code of a class in model.json.

    Attributes:
        system: its coding scheme; ``SCT`` is SNOMED CT.
    """

    system: str
    code: Annotated[str, Field(pattern=r"^[^\\\s]{1,64}$")]
    meaning: Annotated[str, Field(pattern=r"^[^\\\x00-\x1f]{1,64}$")]


@validated(frozen=True, config=OPEN)
class _Facts:
    labels: tuple[str, ...]
    suture: str = "unknown"
    job: str = "unknown"
    round: int | None = None
    codes: dict[str, tuple[_ClassCode, ...]] = Field(default_factory=dict)


@dataclass(frozen=True)
class Reporter:
    """What the reports of a saved model have in common.

    Attributes:
        concepts: the code of each class.
        thresholds: the probability at and above which a class is present; None where it is not decided.
        digest: SHA-256 of model.safetensors, in hexadecimal.
        corrected: the classes whose calibrated probability is that at a stated prevalence.
    """

    concepts: dict[str, Code]
    thresholds: dict[str, float | None]
    version: str
    trained: str
    digest: str
    corrected: Collection[str] = ()


@dataclass(frozen=True)
class Written:
    """What became of the inputs.

    Attributes:
        reports: the files written.
        others: how many inputs are no DICOM files.
        refused: why a DICOM file has no report, by path.
    """

    reports: tuple[Path, ...]
    others: int
    refused: dict[str, str]


def concept(label: str, codes: tuple[_ClassCode, ...] = ()) -> Code:
    """Return the code of a class: that of SNOMED CT, else a private one, which only its name determines."""
    for one in codes:
        if one.system == "SCT":
            return Code(one.code, one.system, dicom(one.meaning))
    value = hashlib.sha256(label.encode()).hexdigest()[:16]
    return Code(value, PRIVATE, dicom(label))


def open_reporter(model: Path, site: str = ALL, corrected: Collection[str] = ()) -> Reporter:
    """Return what the reports of a saved model say of it; `corrected` is as in `Reporter`.

    Raises:
        ConfigError: as `read_decisions`, or the codes in model.json are faulty.
    """
    facts = parse(_Facts, read_json(model / "model.json"), str(model / "model.json"))
    decisions = read_decisions(model, site)
    return Reporter(
        {label: concept(label, facts.codes.get(label, ())) for label in facts.labels},
        {label: threshold_of(label, decisions, site)[1] for label in facts.labels},
        facts.suture,
        f"job {facts.job}, round {'unknown' if facts.round is None else facts.round}",
        weights_digest(model),
        corrected,
    )


def write_reports(
    reporter: Reporter, frame: pd.DataFrame, found: Mapping[str, Input], folder: Path
) -> Written:
    """Write a report of each input that is a DICOM file, as ``UID.sr.dcm`` by the UID of the image.

    A file that is there is not replaced: the image is refused.

    Args:
        frame: as of `with_decisions`; its index is the names of inputs.
        found: the inputs, by name, as of `suture_results.inputs.find_inputs`.

    Raises:
        DiskError: a report cannot be written.
    """
    make_folder(folder)
    reports: list[Path] = []
    refused: dict[str, str] = {}
    others = 0
    for name, row in frame.iterrows():
        try:
            content = found[str(name)].read()
            if not _is_dicom(str(name), content):
                others += 1
                continue
            with warned_of(str(name)):
                image = _read(content)
            path = _unused(folder / f"{image.SOPInstanceUID}.sr.dcm", reports)
            encoded = BytesIO()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about a name of one word; they show it
                report(reporter, image, row).save_as(encoded)
        except (DataError, OSError) as error:
            refused[str(name)] = str(error)
            continue
        except Exception as error:  # noqa: BLE001  what the packages raise of values that break the standard
            refused[str(name)] = printable(f"invalid DICOM values ({type(error).__name__}: {error})")
            continue
        atomic_write(path, encoded.getvalue(), private=True)
        reports.append(path)
    return Written(tuple(reports), others, refused)


def _unused(path: Path, reports: Collection[Path]) -> Path:
    """Return the path of a report, where nothing is yet.

    Raises:
        DataError: a report of this call, or something of before, has the name.
    """
    if path in reports:
        raise DataError("another input has the same SOPInstanceUID")
    if os.path.lexists(path):
        raise DataError(f"{path} exists already; choose another folder, or remove it")
    return path


def _is_dicom(name: str, content: bytes) -> bool:
    return content[128:132] == b"DICM" or name.lower().endswith((".dcm", ".dicom"))


def _read(content: bytes) -> Dataset:
    """Return an image without its pixels, its texts decoded.

    Raises:
        DataError: it lacks a UID by which a report refers to it, or does not say clearly whose it is.
    """
    image = pydicom.dcmread(BytesIO(content), stop_before_pixels=True, force=True)
    lacking = [name for name in _NEEDED if not UID(str(image.get(name, ""))).is_valid]
    if lacking:
        raise DataError(f"it has no valid {', '.join(lacking)}")
    terms = image.get("SpecificCharacterSet") or ""
    for term in (terms,) if isinstance(terms, str) else terms:
        if _spelt(str(term)) not in _CHARACTER_SETS:
            raise DataError(
                f"its character set {as_word(str(term))} is unknown, so the patient's name cannot be read"
            )
    image.decode()
    for name in _MAY_BE_EMPTY:
        if name not in image:
            setattr(image, name, "")
        _check_clear(image[name])
    return image


def _spelt(term: str) -> str:
    """Return the term of a character set as it should be spelt; "ISO IR 100" is often written."""
    return re.sub("[ -]", "_", term.strip())


_CHARACTER_SETS = {_spelt(term) for term in python_encoding}


def _check_clear(element: DataElement) -> None:
    """Check an element that files the report: a report of another patient would be worse than none.

    Raises:
        DataError: it has another type than the standard gives it, several values, or unreadable text.
    """
    name, value = element.keyword, element.value
    if dictionary_VR(element.tag) != element.VR:
        raise DataError(f"its {name} is stored as {element.VR} instead of {dictionary_VR(element.tag)}")
    if element.VM > 1:
        raise DataError(f"its {name} has {element.VM} values instead of one")
    if "\ufffd" in str(value) or any(ord(letter) < 32 for letter in str(value)):
        raise DataError(f"its {name} cannot be read in the character set that it names")


def report(reporter: Reporter, image: Dataset, row: pd.Series[Any]) -> ComprehensiveSR:
    """Return the report of one image: of its patient and study, in a new series, not verified.

    Args:
        image: with `_NEEDED`, and `_MAY_BE_EMPTY`, which may be empty.
        row: its probabilities and decisions.
    """
    from highdicom import sr

    found = sr.ComprehensiveSR(
        evidence=[image],
        content=_content(reporter, image, row)[0],
        series_instance_uid=generate_uid(),
        series_number=1,
        sop_instance_uid=generate_uid(),
        instance_number=1,
        manufacturer="Suture",
        manufacturer_model_name=dicom(reporter.trained),
        software_versions=dicom(reporter.version),
        device_serial_number=reporter.digest,
        is_complete=True,
        is_verified=False,
        specific_character_set="ISO_IR 192",
    )
    scheme = Dataset()
    scheme.CodingSchemeDesignator = PRIVATE
    scheme.CodingSchemeName = "Suture: classes by the SHA-256 of their names, and methods"
    found.CodingSchemeIdentificationSequence = [scheme]
    return found


def _content(reporter: Reporter, image: Dataset, row: pd.Series[Any]) -> MeasurementReport:
    from highdicom import sr

    device = sr.DeviceObserverIdentifyingAttributes(
        uid=f"2.25.{uuid.uuid5(uuid.NAMESPACE_OID, reporter.digest).int}",
        name=printable(f"Suture {reporter.version}"),
        manufacturer_name="Suture",
        model_name=printable(reporter.trained),
        serial_number=reporter.digest,
    )
    observer = sr.ObserverContext(Code("121007", "DCM", "Device"), device)
    groups = [_finding(reporter, image, row, label) for label in reporter.concepts]
    context = sr.ObservationContext(observer_device_context=observer)
    return sr.MeasurementReport(context, _IMAGING, groups)


def _finding(
    reporter: Reporter, image: Dataset, row: pd.Series[Any], label: str
) -> MeasurementsAndQualitativeEvaluations:
    """Return the group (TID 1501) of a class: whether it is present, by what probability and threshold."""
    from highdicom import sr

    presence = PRESENCE[row[f"{label} decision"]]
    threshold = None if row.get(f"{label} threshold") == STATED else reporter.thresholds[label]
    how = _CORRECTED if label in reporter.corrected else _CALIBRATED
    numbers = ((PROBABILITY, row[label], None), (PROBABILITY, row.get(f"{label} calibrated"), how))
    return sr.MeasurementsAndQualitativeEvaluations(
        sr.TrackingIdentifier(uid=generate_uid(), identifier=printable(label)),
        measurements=[
            sr.Measurement(name, float(value), _NO_UNITS, method=method)
            for name, value, method in (*numbers, (THRESHOLD, threshold, None))
            if not pd.isna(value)
        ],
        qualitative_evaluations=[sr.QualitativeEvaluation(reporter.concepts[label], presence)],
        source_images=[sr.SourceImageForMeasurementGroup(image.SOPClassUID, image.SOPInstanceUID)],
    )
