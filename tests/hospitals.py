"""Folders as hospitals have them: other delimiters, encodings, words and names of columns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from world import write_table

SIZE = 24


def table(path: Path, rows: Sequence[Sequence[str]], delimiter: str = ",", encoding: str = "utf-8") -> Path:
    """Write a table whose cells are quoted as they are; the first row is the header."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("".join(delimiter.join(row) + "\r\n" for row in rows).encode(encoding))
    return path


def image(path: Path, seed: int, top: int = 255) -> None:
    """Write a small gray image that no other seed gives."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, top + 1, (SIZE, SIZE))
    Image.fromarray(pixels.astype(np.uint8 if top < 256 else np.uint16)).save(path)


def site(folder: Path, *rows: Sequence[object], seed: int = 0, top: int = 255) -> Path:
    """A folder with t.csv, whose first row is the header, and an image for each name of its first column."""
    for i, name in enumerate(dict.fromkeys(row[0] for row in rows[1:])):
        if not (path := folder / "images" / str(name)).exists():
            image(path, seed + i, top)
    return write_table(folder / "t.csv", rows).parent


def german(folder: Path, n: int = 30) -> Path:
    """A table of Windows: semicolons, cp1252, decimal commas, yes and no, no splits."""
    rows = [["Datei", "PatientenID", "Größe", "Age", "Sex", "Mass", "Edema", "No Finding"]]
    for i in range(n):
        image(folder / "Bilder" / f"{i:03}.png", i)
        mass, edema = ("Yes", "No")[i % 2], ("Yes", "No", "")[i % 3]
        rows.append([f"{i:03}.png", f"Ä{i // 2}", "1,80", str(40 + i), "01"[i % 2], mass, edema, "0"])
    return write_table(folder / "Befunde.csv", rows, ";", "cp1252").parent


def listed(folder: Path, n: int = 30) -> Path:
    """A column that lists findings, images named without a suffix, several rows of one image."""
    rows = [["study", "mrn", "Findings"]]
    for i in range(n):
        image(folder / "files" / f"s{i}.png", 1000 + i)
        rows.append([f"s{i}", f"p{i}", ("Mass|Nodule", "No Finding", "Nodule", "")[i % 4]])
    return write_table(folder / "findings.tsv", [*rows, ["s1", "p1", "Mass"]], "\t").parent


def plain(folder: Path, n: int = 30) -> Path:
    """The table of the documentation, with one strange word and one missing image."""
    rows = [["image", "patient", "split", "Mass", "Hernia"]]
    for i in range(n):
        split = ("train", "train", "validation", "test")[i % 4]
        if i:
            image(folder / "images" / f"{i}.png", 2000 + i)
        rows.append([f"{i}.png", f"q{i}", split, str(i % 2), "sicher" if i % 5 else "kaum"])
    return write_table(folder / "labels.csv", rows).parent
