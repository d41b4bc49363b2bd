"""The readers of reports: MIMIC-CXR's beside CheXpert's labels, and Indiana University's."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from official import Report, write_openi
from public_tables import change
from suture.core.errors import DataError
from suture.data.readers import load_table, read_table
from suture_papers.chest_xrays.chexpert import SPELLINGS
from suture_papers.chest_xrays.mimic import MimicReportsConfig
from suture_papers.chest_xrays.openi import OpeniConfig
from world import refused, write_table

FILES = {
    "10000032/s50414267": "FINAL REPORT\n Effusion.\n",
    "10000032/s53189527": "Clear.",
    "11000764/s5": "Edema?",
    "11000764/s6": "Nobody labelled this.",
}
CELLS: dict[tuple[str, str], dict[str, str]] = {
    ("11000764", "5"): {"Edema": "-1.0"},
    ("10000032", "53189527"): {},
    ("10000032", "50414267"): {"Pleural Effusion": "1.0"},
}


def mimic(folder: Path, root: str = "", archive: bool = False, **more: Any) -> MimicReportsConfig:
    """Three studies of two patients, in another order than their reports; a fourth report has no labels."""
    for name, text in FILES.items():
        path = folder / "files" / f"p{name[:2]}" / f"p{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    if archive:
        with zipfile.ZipFile(folder / "reports.zip", "w") as file:
            for path in sorted((folder / "files").rglob("*.txt")):
                file.write(path, Path("mimic-cxr-reports") / path.relative_to(folder))
        with tarfile.open(folder / "reports.tar.gz", "w:gz") as tar:
            tar.add(folder / "files", "files")
    rows = [[*study, *(found.get(name, "") for name in SPELLINGS)] for study, found in CELLS.items()]
    table = write_table(folder / "labels.csv", [["subject_id", "study_id", *SPELLINGS], *rows])
    labels = ("Pleural Effusion", "Edema")
    return MimicReportsConfig(**{"root": folder / root, "table": table, "labels": labels, **more})


@pytest.mark.parametrize("root", ["", "reports.zip", "reports.tar.gz"])
def test_reports_and_labels_are_joined_by_their_numbers(tmp_path: Path, root: str) -> None:
    table = load_table(mimic(tmp_path, root, archive=bool(root)))
    assert table.images == ("5", "53189527", "50414267")
    assert table.texts == ("Edema?", "Clear.", "FINAL REPORT\n Effusion.")
    assert table.patients == ("11000764", "10000032", "10000032")
    assert table.y.tolist() == [[0, 0], [0, 0], [1, 0]]
    assert table.split[1] == table.split[2]
    assert load_table(mimic(tmp_path, root, uncertain="ones")).y[0].tolist() == [0, 1]
    assert set(load_table(mimic(tmp_path, root, split="test")).split) == {"test"}


def test_a_study_without_a_report_is_a_fault_unless_the_site_says_so(tmp_path: Path) -> None:
    config = mimic(tmp_path)
    (tmp_path / "files/p10/p10000032/s53189527.txt").unlink()
    with refused("labels.csv row 3", by=DataError):
        load_table(config)
    reading = read_table(config.model_copy(update={"partial": True}))
    assert reading.table.images == ("5", "50414267")
    assert (reading.absent, reading.faults) == (1, ())


def test_other_folders_and_damaged_reports_are_named(tmp_path: Path) -> None:
    report = tmp_path / "files/p11/p11000764/s5.txt"
    with refused("files/p11/p11000764/s5.txt", by=DataError):
        load_table(mimic(tmp_path, "files"))
    (tmp_path / "reports.zip").write_bytes(b"PK")
    for root in ("reports.zip", "nowhere"):
        with refused(root, by=DataError):
            load_table(mimic(tmp_path, root))
    config = mimic(tmp_path)
    report.write_bytes(b"\xff")
    with refused("s5.txt", "UTF-8", by=DataError):
        load_table(config)
    report.write_text("Edema?")
    change(config.table, "5,,", "5,x,")
    with refused("labels.csv row 2", SPELLINGS[0], by=DataError):
        load_table(config)


# Indiana University

REPORTS: list[Report] = [
    ("Heart is large.", "Cardiomegaly.", ("Cardiomegaly/mild", "Opacity/lung/base/left")),
    ("", "Normal chest.", ("normal",)),
    ("", "", ("Opacity",)),
    ("Blurred.", "", ("No Indexing",)),
    ("Atelectasis.", "Edema.", ("Pulmonary Atelectasis/base", "Pulmonary Atelectasis/mild", "opacity")),
    ("Clear.", "", ("Technical Quality of Image Unsatisfactory",)),
]


def openi(path: Path, **more: Any) -> OpeniConfig:
    return OpeniConfig(table=path, **{"labels": ("Atelectasis", "Cardiomegaly", "Opacity"), **more})


@pytest.mark.parametrize("unpacked", [False, True])
def test_sections_are_the_document_and_headings_the_labels(tmp_path: Path, unpacked: bool) -> None:
    path = write_openi(tmp_path, REPORTS)
    reading = read_table(openi(path.parent if unpacked else path))
    table, nan = reading.table, np.nan
    assert (reading.absent, reading.faults) == (1, ())
    assert table.images == table.patients == ("CXR1", "CXR2", "CXR4", "CXR5", "CXR6")
    texts = ("Heart is large. Cardiomegaly.", "Normal chest.", "Blurred.", "Atelectasis. Edema.", "Clear.")
    assert table.texts == texts
    # Nobody coded the third: what it shows is unknown.
    np.testing.assert_array_equal(table.y, [[0, 1, 1], [0, 0, 0], [nan] * 3, [1, 0, 1], [0, 0, 0]])


def test_headings_and_texts_that_are_missing_are_refused(tmp_path: Path) -> None:
    cases = ((REPORTS, {"labels": None}, "labels"), (REPORTS[1:2], {}, "label"), (REPORTS[2:3], {}, "text"))
    for i, (reports, settings, named) in enumerate(cases):
        path = write_openi(tmp_path / str(i), reports)
        with refused(path, named, by=DataError):
            load_table(openi(path, **settings))
    path.write_bytes(path.read_bytes()[:200])
    for wrong in (path, tmp_path / "nowhere.tgz"):
        with refused(wrong.name, by=DataError):
            load_table(openi(wrong))


def test_broken_and_repeated_reports_are_faults(tmp_path: Path) -> None:
    folder = write_openi(tmp_path, REPORTS).parent / "ecgen-radiology"
    (folder / "2.xml").write_text("<eCitation>")
    (folder / "4.xml").write_text("<eCitation/>")
    (folder / "7.xml").write_bytes((folder / "1.xml").read_bytes())
    for encoding in ("foo", "shift_jis", "utf-7", "undefined", "base64", "idna"):
        text = f'<?xml version="1.0" encoding="{encoding}"?><eCitation/>'
        (folder / f"9{encoding}.xml").write_text(text)
    broken, twice = read_table(openi(folder)).faults
    for name in ("2.xml, 4.xml", "9foo", "9shift_jis", "9utf-7", "9undefined", "9base64", "9idna"):
        assert name in broken
    assert "7.xml: " in twice
