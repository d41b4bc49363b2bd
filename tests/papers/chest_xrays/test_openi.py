"""suture_papers.chest_xrays.openi: Indiana University's reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from official import Report, write_openi
from suture.core.errors import ConfigError, DataError
from suture.data.readers import load_table, read_table
from suture_papers.chest_xrays.openi import FINDINGS, OpeniConfig

REPORTS: list[Report] = [
    ("Heart is large.", "Cardiomegaly.", ("Cardiomegaly/mild", "Opacity/lung/base/left")),
    ("", "Normal chest.", ("normal",)),
    ("", "", ("Opacity",)),
    ("Blurred.", "", ("No Indexing",)),
    ("Atelectasis.", "Edema.", ("Pulmonary Atelectasis/base", "Pulmonary Atelectasis/mild", "opacity")),
    ("Clear.", "", ("Technical Quality of Image Unsatisfactory",)),
]


def config(path: Path, **more: Any) -> OpeniConfig:
    return OpeniConfig(table=path, **{"labels": ("Atelectasis", "Cardiomegaly", "Opacity"), **more})


@pytest.mark.parametrize("unpacked", [False, True])
def test_sections_are_the_document_and_headings_the_labels(tmp_path: Path, unpacked: bool) -> None:
    path = write_openi(tmp_path, REPORTS)
    reading = read_table(config(path.parent if unpacked else path))
    table, nan = reading.table, np.nan
    assert reading.absent == 1
    assert reading.faults == ()
    assert table.images == table.patients == ("CXR1", "CXR2", "CXR4", "CXR5", "CXR6")
    assert table.texts == (
        "Heart is large. Cardiomegaly.",
        "Normal chest.",
        "Blurred.",
        "Atelectasis. Edema.",
        "Clear.",
    )
    # Nobody coded the third: what it shows is unknown.
    np.testing.assert_array_equal(table.y, [[0, 1, 1], [0, 0, 0], [nan] * 3, [1, 0, 1], [0, 0, 0]])


def test_frequent_headings_are_labels_by_default(tmp_path: Path) -> None:
    path = write_openi(tmp_path, [("a", "b", ("Opacity", "Mass") if i else ("Opacity",)) for i in range(100)])
    table = load_table(config(path, labels=None))
    assert table.labels.names == ("Opacity",)
    assert [table.split.count(part) for part in ("train", "validation", "test")] == [70, 10, 20]
    assert load_table(config(path, labels=("Mass",))).y.sum() == 99
    with pytest.raises(ConfigError, match=r"'Opacty'; did you mean 'Opacity'"):
        load_table(config(path, labels=("Opacty",)))


def test_rare_headings_only_and_no_headings_at_all(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no label .*100 rows; name .* \[data\] labels"):
        load_table(config(write_openi(tmp_path / "a", REPORTS), labels=None))
    with pytest.raises(DataError, match="no row has a label"):
        load_table(config(write_openi(tmp_path / "b", REPORTS[1:2])))
    with pytest.raises(DataError, match="no report with text"):
        load_table(config(write_openi(tmp_path / "c", REPORTS[2:3])))


def test_broken_and_repeated_reports_are_faults(tmp_path: Path) -> None:
    folder = write_openi(tmp_path, REPORTS).parent / "ecgen-radiology"
    (folder / "2.xml").write_text("<eCitation>")
    (folder / "4.xml").write_text("<eCitation/>")
    (folder / "7.xml").write_bytes((folder / "1.xml").read_bytes())
    faults = read_table(config(folder)).faults
    assert len(faults) == 2
    assert "2.xml, 4.xml: not an XML report with a uId" in faults[0]
    assert "7.xml: a repeated report" in faults[1]


def test_a_cut_and_a_missing_archive_are_named(tmp_path: Path) -> None:
    path = write_openi(tmp_path, REPORTS)
    path.write_bytes(path.read_bytes()[:200])
    for wrong in (path, tmp_path / "nowhere.tgz"):
        with pytest.raises(DataError, match=rf"{wrong.name} cannot be read"):
            load_table(config(wrong))


@pytest.mark.complete
@pytest.mark.data
def test_the_archive_is_read(data_root: Path) -> None:
    reading = read_table(config(data_root / "openi_reports" / "NLMCXR_reports.tgz", labels=FINDINGS))
    table = reading.table
    assert (len(table), reading.absent, reading.faults) == (3927, 28, ())
    counts = dict(zip(FINDINGS, (table.y == 1).sum(axis=0).tolist(), strict=True))
    assert counts == {
        "Pleural Effusion": 161,
        "Markings": 163,
        "Cicatrix": 196,
        "Calcified Granuloma": 274,
        "Calcinosis": 305,
        "Atelectasis": 332,
        "Cardiomegaly": 375,
        "Opacity": 455,
    }
    assert np.isnan(table.y).any(axis=1).sum() == 95
    assert [table.split.count(part) for part in ("train", "validation", "test")] == [2749, 392, 786]


@pytest.mark.parametrize("encoding", ["foo", "shift_jis", "utf-7", "undefined", "base64", "idna"])
def test_a_report_in_an_encoding_that_cannot_be_read_is_a_fault(encoding: str, tmp_path: Path) -> None:
    folder = write_openi(tmp_path, REPORTS).parent / "ecgen-radiology"
    (folder / "9.xml").write_text(f'<?xml version="1.0" encoding="{encoding}"?><eCitation/>')
    (fault,) = read_table(config(folder)).faults
    assert "9.xml: not an XML report with a uId" in fault
