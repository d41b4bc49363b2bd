"""Three drawn hospitals with tables as real ones have them, for the tutorial: files alone, no settings."""

from __future__ import annotations

import csv
import shutil
import tempfile
from pathlib import Path

from suture.core.escaping import as_csv
from suture.core.files import read_regular
from suture_synthetic.phantom_hospitals import write_hospitals
from suture_synthetic.phantom_scans import PhantomSpec


def write_untidy_hospitals(folder: Path, images: int = 300) -> None:
    """Write harbor with a German table, lakeside with a list of findings, northfield in Excel with a title.

    Args:
        images: number of a hospital.

    Raises:
        DiskError: they cannot be written.
    """
    with tempfile.TemporaryDirectory() as scratch:
        drawn = Path(scratch)
        write_hospitals(drawn, PhantomSpec(images, held_out=30), seed=1)
        for name, write in (("harbor", _german), ("lakeside", _exported), ("northfield", _excel)):
            pictures = "Bilder 1" if name == "harbor" else "images"
            shutil.copytree(drawn / name / "images", folder / name / pictures)
            text = read_regular(drawn / name / "labels.csv").decode()
            rows = list(csv.DictReader(text.splitlines()))
            write(folder / name, [*rows[0]][3:], rows)


def _german(folder: Path, findings: list[str], rows: list[dict[str, str]]) -> None:
    lines = [["Bild", "Patient-Nr", "Größe", *findings]]
    for row in rows:
        lines.append(
            [row["image"], row["patient"], "1,70", *("ja" if row[f] == "1" else "nein" for f in findings)]
        )
    (folder / "Befunde.csv").write_bytes("".join(";".join(line) + "\r\n" for line in lines).encode("cp1252"))


def _exported(folder: Path, findings: list[str], rows: list[dict[str, str]]) -> None:
    lines = []
    for row in rows:
        present = "|".join(finding for finding in findings if row[finding] == "1") or "No Finding"
        lines.append((f"D:\\PACS\\images\\{row['image']}", row["patient"], present))
    (folder / "export.csv").write_text(as_csv(("file", "MRN", "findings"), lines), newline="")


def _excel(folder: Path, findings: list[str], rows: list[dict[str, str]]) -> None:
    from openpyxl import Workbook

    book = Workbook()
    sheet = book.active
    for line in (["Chest findings, reading room 2"], [], ["image", "patient_id", *findings]):
        sheet.append(line)
    for row in rows:
        sheet.append([row["image"], row["patient"], *("yes" if row[f] == "1" else "no" for f in findings)])
    book.save(folder / "list.xlsx")
