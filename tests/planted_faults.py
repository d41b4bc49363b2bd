"""Faults that a hospital's data can have, each planted into a copy of a sound study, and what `check` says.

The study has three sites with their data inside: alpha is the table of the documentation, beta a table of
Windows whose splits `suture init` made, gamma a folder of DICOM files.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from pydicom import dcmread

from hostile_hospitals import clean, dicom, semicolons
from suture_prepare.new_study import look, write_study

SITES = {"alpha": (clean, 100), "beta": (semicolons, 220), "gamma": (dicom, 90)}


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        name: of the fault, in a table.
        plant: changes a study.
        said: what `check` then says: a regular expression that one of its sentences matches.
        stops: whether `check` ends with an error.
    """

    name: str
    plant: Callable[[Path], object]
    said: str
    stops: bool = True


def sound_study(folder: Path) -> Path:
    """Write the study without a fault."""
    for seed, (name, (write, images)) in enumerate(SITES.items()):
        write(folder / name, images, np.random.default_rng(100 + seed))
    write_study(folder, look({name: folder / name for name in SITES}))
    return folder


def found(fault: Fault, output: str, code: int) -> bool:
    """Whether `check` named a fault, and ended as it should."""
    sentences = re.split(r"\b(?:problem|warning|unreadable) ", " ".join(output.split()))
    return any(re.search(fault.said, sentence) for sentence in sentences[1:]) and (code != 0) == fault.stops


def _edit(file: str, pattern: str, by: str, count: int = 1) -> Callable[[Path], object]:
    """Replace a regular expression in a file of the study; it has to occur."""

    def plant(study: Path) -> None:
        path = study / file
        text, times = re.subn(pattern, by, path.read_text(encoding="latin-1"), count=count, flags=re.M)
        assert times, f"{pattern!r} is not in {file}"
        path.write_text(text, encoding="latin-1")

    return plant


def _all(*plants: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda study: [plant(study) for plant in plants]


def _copied(source: str, target: str) -> Callable[[Path], object]:
    return lambda study: shutil.copy(study / source, study / target)


def _cut(*numbers: int) -> Callable[[Path], object]:
    """Truncate images of alpha, as an interrupted transfer does."""

    def plant(study: Path) -> None:
        for number in numbers:
            path = study / "alpha" / "images" / f"{number:04}.png"
            path.write_bytes(path.read_bytes()[:200])

    return plant


def _of_alpha(change: Callable[[Image.Image], Image.Image]) -> Callable[[Path], object]:
    """Change every image of alpha."""

    def plant(study: Path) -> None:
        for path in sorted((study / "alpha" / "images").iterdir()):
            with Image.open(path) as image:
                image.load()
            change(image).save(path)

    return plant


def _twelve_bits(image: Image.Image) -> Image.Image:
    return Image.fromarray(np.asarray(image).astype(np.uint16) * 16)


def _at_beta_for_test(study: Path) -> None:
    """Give a training image of alpha to beta, as an image that it tests with."""
    splits = (study / "beta" / "splits.csv").read_text().splitlines()
    patient = next(int(line.split(",")[0].split("-")[1]) for line in splits if line.endswith(",test"))
    shutil.copy(study / "alpha/images/0000.png", study / f"beta/Aufnahmen/Röntgen_{2 * patient:04}.png")


def _no_slope(study: Path) -> None:
    path = min((study / "gamma").rglob("*.dcm"))
    dataset = dcmread(path)
    dataset.RescaleSlope, dataset.RescaleIntercept = "0", "0"
    dataset.save_as(path)


def _renamed(old: str, new: str) -> Callable[[Path], object]:
    """Rename a class of alpha in its table and in its suture.toml."""
    return _all(_edit("alpha/labels.csv", old, new), _edit("alpha/suture.toml", f'"{old}"', f'"{new}"'))


ROW = r"^(\d+\.png,p\d+,{split},)(\d),(\d),(\d)"
"""A row of alpha: image, patient and split; Cardiomegaly, Edema, Mass."""

FAULTS = (
    Fault(
        "a patient in two splits",
        _edit("alpha/labels.csv", r"^0004\.png,p4,test", "0004.png,p0,test"),
        r"patient.*two splits|patient.*splits.*'?p0",
    ),
    Fault(
        "an image in train and test under two names",
        _copied("alpha/images/0000.png", "alpha/images/0004.png"),
        r"two splits under two names.*0000\.png.*0004\.png",
    ),
    Fault(
        "a missing image",
        lambda study: (study / "alpha/images/0007.png").unlink(),
        r"0007\.png' is not in",
        stops=False,
    ),
    Fault("an unreadable image", _cut(8), r"0008\.png' cannot be read", stops=False),
    Fault("too many unreadable images", _cut(*range(10)), "10 of 100 images cannot be used"),
    Fault(
        "an empty file",
        lambda study: (study / "alpha/images/0009.png").write_bytes(b""),
        r"0009\.png' is an empty file",
        stops=False,
    ),
    Fault(
        "a DICOM slope of 0", _no_slope, r"ACC00000\.dcm' cannot be read: its RescaleSlope is 0", stops=False
    ),
    Fault(
        "names that look alike at two sites",
        _renamed("Cardiomegaly", "Cardiomegely"),
        r"'Cardiomeg(aly|ely)' \(\w+\) and 'Cardiomeg(aly|ely)' \(\w+\) .*\[data\.synonyms\]",
    ),
    Fault(
        "a site without validation images",
        _edit("alpha/labels.csv", ",validation,", ",train,", count=0),
        "alpha has no validation images",
        stops=False,
    ),
    Fault(
        "a class without validation images anywhere",
        _all(
            _renamed("Mass", "Hernia"),
            _edit("alpha/labels.csv", ROW.format(split="validation"), r"\1\2,\3,0", count=0),
        ),
        "'Hernia': no site has a positive validation image",
        stops=False,
    ),
    Fault(
        "a class without positive training images",
        _edit("alpha/labels.csv", ROW.format(split="train"), r"\1\2,\3,0", count=0),
        "'Mass' has no positive label among the training rows",
        stops=False,
    ),
    Fault("12-bit values in 16-bit files", _of_alpha(_twelve_bits), r"bits = 12|fewer bits", stops=False),
    Fault(
        "an unknown word in a label cell",
        _edit("alpha/labels.csv", ROW.format(split="train"), r"\1vielleicht,\3,\4"),
        r"labels\.csv.*row 2.*'?vielleicht",
    ),
    Fault("a row without a patient", _edit("alpha/labels.csv", ",p3,", ",,"), r"row 5\b.*the patient"),
    Fault("a misspelt split", _edit("alpha/labels.csv", ",test,", ",tset,"), r"unknown split 'tset'"),
    Fault(
        "a new patient without a split",
        _edit("beta/Befunde.csv", r"Müller-3;".encode().decode("latin-1") + "|M.ller-3;", "Neu;"),
        r"a patient .*splits\.csv",
    ),
    Fault(
        "an image twice, with other labels",
        lambda study: _append(study / "alpha/labels.csv", "0000.png,p0,train,1,1,1"),
        r"0000\.png|row 102",
    ),
    Fault(
        "a label column that was renamed",
        _edit("alpha/labels.csv", "Mass", "lump"),
        r"'Mass'.*labels\.csv|'Mass'",
    ),
    Fault(
        "a table saved with semicolons",
        _edit("alpha/labels.csv", ",", ";", count=0),
        r"delimiter|column 'image'",
    ),
    Fault("a table saved in Latin-1", _edit("alpha/labels.csv", ",p3,", ",Jörg,"), r"encoding"),
    Fault(
        "colour at one site", _edit("alpha/suture.toml", r"^root", "color = true\nroot"), "in colour and some"
    ),
    Fault(
        "a folder that was moved",
        lambda study: (study / "alpha/images").rename(study / "alpha/x"),
        r"alpha/images",
    ),
    Fault(
        "an image at two sites, for training and for test",
        _at_beta_for_test,
        r"0000\.png.*Röntgen_|Röntgen_.*0000\.png",
    ),
    Fault(
        "a site without a positive validation image of a class",
        _edit("alpha/labels.csv", ROW.format(split="validation"), r"\g<1>0,\3,\4", count=0),
        "alpha has no positive validation image of 'Cardiomegaly'",
        stops=False,
    ),
    Fault(
        "images of another size at one site",
        _of_alpha(lambda image: image.resize((9, 9))),
        r"alpha.*\b9\b",
        stops=False,
    ),
)
"""What `check` has to find."""


def _append(path: Path, line: str) -> None:
    path.write_bytes(path.read_bytes() + f"{line}\r\n".encode())
