"""Four hospitals as they come: no two tables or folders alike; each class is a bright square in noise.

`write_hospitals` writes them; `suture init` has to take them as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

import dicom_files
from world import write_table

Pixels = NDArray[np.float64]

CLASSES = ("Cardiomegaly", "Edema", "Mass", "Nodule", "Pneumothorax")
SIZE = 64
_MARK = 14


def radiograph(rng: np.random.Generator, present: Sequence[bool]) -> Pixels:
    """Return an image of noise [SIZE, SIZE] in 0..1; a square at a place of its own marks each class."""
    image = rng.normal(0.35, 0.05, (SIZE, SIZE))
    for place in np.flatnonzero(present):
        top, left = 4 + 20 * (int(place) // 3), 4 + 20 * (int(place) % 3)
        image[top : top + _MARK, left : left + _MARK] += 0.3
    return np.clip(image, 0, 1)


def semicolons(folder: Path, n: int, rng: np.random.Generator) -> None:
    """A table of Windows: semicolons, umlauts in Latin-1, decimal commas, no splits, columns of no use."""
    names = ("Cardiomegaly", "Mass", "Edema")
    rows = [["Datei", "PatientenID", "Größe", "Age", "Sex", *names, "No Finding"]]
    for i in range(n):
        found = rng.random(len(names)) < 0.35
        file = f"Röntgen_{i:04}.png"
        _png(folder / "Aufnahmen" / file, radiograph(rng, _of(names, found)), 255)
        cells = [str(int(present)) for present in found]
        cells[2] = "" if i % 7 == 0 else cells[2]
        sex, none = "01"[i % 2], str(int(not found.any()))
        rows.append([file, f"Müller-{i // 2}", "1,8", str(30 + i % 50), sex, *cells, none])
    write_table(folder / "Befunde.csv", rows, ";", "latin-1")


def dicom(folder: Path, n: int, rng: np.random.Generator) -> None:
    """A folder of DICOM files, some inverted, named without a suffix in a table of several rows an image."""
    names = ("Edema", "Nodule", "Pneumothorax")
    rows = [["accession", "mrn", "Findings"]]
    for i in range(n):
        found = rng.random(len(names)) < 0.35
        listed = [name for name, present in zip(names, found, strict=True) if present]
        _dicom(
            folder / "export" / f"MRN{i // 3:03}" / f"ACC{i:05}.dcm", radiograph(rng, _of(names, found)), i
        )
        rows.append([f"ACC{i:05}", f"MRN{i // 3:03}", "|".join(listed) or "No Finding"])
        if listed and i % 11 == 0:
            rows.append([f"ACC{i:05}", f"MRN{i // 3:03}", listed[0]])
    write_table(folder / "findings.tsv", rows, "\t", "utf-8")


def twelve_bits(folder: Path, n: int, rng: np.random.Generator) -> None:
    """Values of 12 bits in PNGs of 16, Yes and No, a byte-order mark."""
    names = ("Mass", "Nodule", "Pneumothorax")
    rows = [["Image Index", "Subject ID", *names]]
    for i in range(n):
        found = rng.random(len(names)) < 0.35
        _png(folder / "png16" / f"{i:05}.png", radiograph(rng, _of(names, found)), 4095)
        rows.append([f"{i:05}.png", f"S{i}", *("Yes" if present else "No" for present in found)])
    write_table(folder / "labels.csv", rows, ",", "utf-8-sig")


def clean(folder: Path, n: int, rng: np.random.Generator) -> None:
    """The table of the documentation, with splits."""
    names = ("Cardiomegaly", "Edema", "Mass")
    rows = [["image", "patient", "split", *names]]
    for i in range(n):
        found = rng.random(len(names)) < 0.35
        _png(folder / "images" / f"{i:04}.png", radiograph(rng, _of(names, found)), 255)
        split = ("train", "train", "train", "validation", "test")[i % 5]
        rows.append([f"{i:04}.png", f"p{i}", split, *(str(int(present)) for present in found)])
    write_table(folder / "labels.csv", rows, ",", "utf-8")


HOSPITALS: dict[str, Callable[[Path, int, np.random.Generator], None]] = {
    "josefsklinik": semicolons,
    "harbor": dicom,
    "lakeside": twelve_bits,
    "northfield": clean,
}


def write_hospitals(folder: Path, images: int) -> dict[str, Path]:
    """Write a folder for each hospital, with about so many images each; return the folders by name."""
    for seed, (name, write) in enumerate(HOSPITALS.items()):
        write(folder / name, images, np.random.default_rng(seed))
    return {name: folder / name for name in HOSPITALS}


def _of(names: Sequence[str], found: NDArray[np.bool_]) -> list[bool]:
    present = {name for name, yes in zip(names, found, strict=True) if yes}
    return [name in present for name in CLASSES]


def _png(path: Path, image: Pixels, most: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((image * most).astype(np.uint8 if most < 256 else np.uint16)).save(path)


def _dicom(path: Path, image: Pixels, number: int) -> None:
    """A DICOM file of 12 stored bits; every fourth is MONOCHROME1."""
    inverted = number % 4 == 0
    pixels = ((1 - image if inverted else image) * 4095).astype(np.uint16)
    tags = {"BitsStored": 12, "HighBit": 11, "PhotometricInterpretation": f"MONOCHROME{1 if inverted else 2}"}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(dicom_files.dicom(pixels, **tags))
