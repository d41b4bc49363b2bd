"""suture_papers.chest_xrays.mimic: MIMIC-CXR's reports and CheXpert's labels."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from suture.core.errors import ConfigError, DataError
from suture.data.readers import load_table, read_table
from suture_papers.chest_xrays.chexpert import SPELLINGS
from suture_papers.chest_xrays.mimic import MimicReportsConfig

FILES = {
    "10000032/s50414267": "FINAL REPORT\n Effusion.\n",
    "10000032/s53189527": "Clear.",
    "11000764/s5": "Edema?",
}
LABELS = ("Pleural Effusion", "Edema")


def write(root: Path, archive: bool = False) -> Path:
    """Three studies of two patients, in another order than their reports; a fourth report has no labels."""
    for name, text in {**FILES, "11000764/s6": "Nobody labelled this."}.items():
        path = root / "files" / f"p{name[:2]}" / f"p{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    if archive:
        with zipfile.ZipFile(root / "reports.zip", "w") as file:
            for path in sorted((root / "files").rglob("*.txt")):
                file.write(path, Path("mimic-cxr-reports") / path.relative_to(root))
        with tarfile.open(root / "reports.tar.gz", "w:gz") as tar:
            tar.add(root / "files", "files")
    cells = {
        "11000764,5": {"Edema": "-1.0"},
        "10000032,53189527": {},
        "10000032,50414267": {"Pleural Effusion": "1.0"},
    }
    rows = [
        f"{study}," + ",".join(found.get(name, "") for name in SPELLINGS) for study, found in cells.items()
    ]
    table = root / "mimic-cxr-2.0.0-chexpert.csv"
    table.write_text("\n".join([f"subject_id,study_id,{','.join(SPELLINGS)}", *rows]))
    return table


def config(table: Path, **more: Any) -> MimicReportsConfig:
    return MimicReportsConfig(**{"root": table.parent, "table": table, "labels": LABELS, **more})


@pytest.mark.parametrize("root", ["", "reports.zip", "reports.tar.gz"])
def test_reports_and_labels_are_joined_by_their_numbers(tmp_path: Path, root: str) -> None:
    path = write(tmp_path, archive=bool(root))
    table = load_table(config(path, root=tmp_path / root))
    assert table.images == ("5", "53189527", "50414267")
    assert table.texts == ("Edema?", "Clear.", "FINAL REPORT\n Effusion.")
    assert table.patients == ("11000764", "10000032", "10000032")
    assert table.y.tolist() == [[0, 0], [0, 0], [1, 0]]
    assert table.split[1] == table.split[2]
    assert load_table(config(path, uncertain="ones")).y[0].tolist() == [0, 1]
    assert set(load_table(config(path, split="test")).split) == {"test"}
    with pytest.raises(ConfigError, match="did you mean 'Edema'"):
        load_table(config(path, labels=("Edemma",)))


def test_a_study_without_a_report_is_a_fault_unless_the_site_says_so(tmp_path: Path) -> None:
    path = write(tmp_path)
    (tmp_path / "files/p10/p10000032/s53189527.txt").unlink()
    with pytest.raises(DataError, match=r"row 3: a study without a report; .* set partial"):
        load_table(config(path))
    reading = read_table(config(path, partial=True))
    assert reading.table.images == ("5", "50414267")
    assert (reading.absent, reading.faults) == (1, ())


def test_other_folders_and_damaged_files_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, archive=True)
    with pytest.raises(DataError, match=r"contains no report of .*files/p11/p11000764/s5\.txt"):
        load_table(config(path, root=tmp_path / "files"))
    (tmp_path / "reports.zip").write_bytes(b"PK")
    for root in ("reports.zip", "nowhere"):
        with pytest.raises(DataError, match=rf"{root} cannot be read"):
            load_table(config(path, root=tmp_path / root))
    (tmp_path / "files/p11/p11000764/s5.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"s5\.txt is not UTF-8"):
        load_table(config(path))
    path.write_text(path.read_text().replace("5,,", "5,x,", 1))
    (tmp_path / "files/p11/p11000764/s5.txt").write_text("Edema?")
    with pytest.raises(DataError, match=r"is not one of 1\.0, 0\.0"):
        load_table(config(path))
