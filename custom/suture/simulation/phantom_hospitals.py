"""Three simulated hospitals: patients with several images, correlated findings, and a scanner per site."""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow
from pydantic import Field
from pydantic.dataclasses import dataclass as validated
from scipy.ndimage import gaussian_filter

from suture.core.errors import DataError
from suture.core.files import make_folder, read_json, remove_leftovers, temporary_beside, write_json, writing
from suture.core.labels import LabelSet
from suture.core.seeds import seed_for
from suture.core.validation import LARGEST_SEED, LIMIT, STRICT
from suture.data.prefetch import ahead
from suture.data.readers import DataConfig
from suture.data.readers.hospital import HospitalConfig
from suture.data.split import by_patient
from suture.data.table import Table
from suture.methods.base import Method, label_use
from suture.simulation.partition import SERVER
from suture.simulation.phantom import FINDINGS, Anatomy, Image, Rng, chest
from suture.simulation.sites import Destination, write_site, write_sites

PREVALENCE: dict[str, float] = {
    "Atelectasis": 0.14,
    "Cardiomegaly": 0.18,
    "Consolidation": 0.14,
    "Edema": 0.10,
    "Emphysema": 0.14,
    "Mass": 0.13,
    "Nodule": 0.17,
    "Pleural Effusion": 0.14,
    "Pneumothorax": 0.13,
    "Support Devices": 0.15,
}

TOGETHER: dict[tuple[str, str], float] = {
    ("Cardiomegaly", "Pleural Effusion"): 0.22,
    ("Cardiomegaly", "Edema"): 0.25,
    ("Pleural Effusion", "Atelectasis"): 0.18,
    ("Edema", "Consolidation"): 0.12,
    ("Pneumothorax", "Support Devices"): 0.25,
    ("Emphysema", "Pneumothorax"): 0.10,
}
"""How much more likely the second finding is where the first one is."""


@dataclass(frozen=True)
class Scanner:
    """How a site acquires its images; the default changes nothing but for noise.

    Attributes:
        blur: of the detector, in pixels of a 64 px image.
        gamma, gain, offset: contrast and brightness.
        noise: standard deviation, of a range of 1.
    """

    blur: float = 0.0
    gamma: float = 1.0
    gain: float = 1.0
    offset: float = 0.0
    noise: float = 0.03

    def between(self, strength: float) -> Scanner:
        """Interpolate between the neutral scanner (strength 0) and this one (1), or extrapolate."""
        neutral = Scanner()
        return Scanner(
            *(
                n + strength * (mine - n)
                for n, mine in zip(asdict(neutral).values(), asdict(self).values(), strict=True)
            )
        )

    def take(self, image: Image, rng: Rng) -> NDArray[np.uint8]:
        """The radiograph as this scanner stores it."""
        seen = gaussian_filter(image, self.blur * image.shape[0] / 64) if self.blur > 0 else image
        seen = np.clip(seen, 0, 1) ** self.gamma * self.gain + self.offset
        noisy = seen + rng.standard_normal(image.shape).astype(np.float32) * self.noise
        return (np.clip(noisy, 0, 1) * 255).astype(np.uint8)


@dataclass(frozen=True)
class Hospital:
    """A phantom site: what it annotates, and its scanner."""

    name: str
    labels: tuple[str, ...]
    scanner: Scanner


HOSPITALS: tuple[Hospital, ...] = (
    Hospital(
        "harbor",
        ("Cardiomegaly", "Pleural Effusion", "Pneumothorax", "Nodule", "Mass", "Edema"),
        Scanner(blur=0.0, gamma=0.95, gain=1.0, offset=0.0, noise=0.035),
    ),
    Hospital(
        "lakeside",
        ("Cardiomegaly", "Pleural Effusion", "Pneumothorax", "Consolidation", "Emphysema", "Atelectasis"),
        Scanner(blur=0.28, gamma=1.05, gain=0.95, offset=0.03, noise=0.03),
    ),
    Hospital(
        "northfield",
        ("Cardiomegaly", "Pleural Effusion", "Nodule", "Consolidation", "Support Devices"),
        Scanner(blur=0.15, gamma=1.12, gain=1.05, offset=-0.015, noise=0.04),
    ),
)


@dataclass(frozen=True)
class PhantomSpec:
    """The number of phantoms, and how difficult they are.

    Attributes:
        images: number of images at each site.
        held_out: number of images at the server, fully labelled, from all scanners.
        size: pixels of a side.
        contrast: how strongly findings are drawn; lower is harder.
        shift: how different the sites' scanners are; with 0 they are all the same.
        every_label: each site annotates every finding: the reference for partial labels.
    """

    images: int = 1500
    held_out: int = 1500
    size: int = 64
    contrast: float = 1.0
    shift: float = 1.0
    every_label: bool = False


def findings_of(rng: Rng, before: frozenset[str] | None = None) -> frozenset[str]:
    """Draw the findings of an image; a follow-up image shows most findings of the one `before` it."""
    found: set[str] = set()
    for name in sorted(PREVALENCE, key=lambda n: n not in {first for first, _ in TOGETHER}):
        chance = PREVALENCE[name] + sum(
            more for (first, second), more in TOGETHER.items() if second == name and first in found
        )
        if before is not None:
            chance = 0.85 if name in before else 0.2 * chance
        if rng.random() < chance:
            found.add(name)
    return frozenset(found)


def generate(
    scanner: Scanner, n: int, spec: PhantomSpec, seed: int, prefix: str = "p"
) -> tuple[NDArray[np.uint8], NDArray[np.float32], tuple[str, ...]]:
    """Draw images of one scanner with all their labels.

    Returns:
        images ``[n, size, size]``, labels ``[n, len(FINDINGS)]`` (all known), and the patient of each.
    """
    rng = np.random.default_rng(seed)
    images = np.empty((n, spec.size, spec.size), dtype=np.uint8)
    y = np.zeros((n, len(FINDINGS)), dtype=np.float32)
    patients: list[str] = []
    person = 0
    while len(patients) < n:
        anatomy, seen, person = Anatomy.draw(rng), None, person + 1
        for _ in range(int(rng.integers(1, 4))):
            if len(patients) == n:
                break
            seen = findings_of(rng, seen)
            i = len(patients)
            images[i] = scanner.take(chest(anatomy, seen, spec.size, spec.contrast, rng), rng)
            y[i] = [name in seen for name in FINDINGS]
            patients.append(f"{prefix}{person:05d}")
    return images, y, tuple(patients)


def write_hospitals(folder: Path, spec: PhantomSpec, seed: int) -> dict[str, Path]:
    """Write each phantom site, and the server's fully labelled data, as a hospital would have them.

    A site's folder holds images/ and labels.csv with its own columns. A folder that exists already for the
    same specification and seed is reused.

    Returns:
        the labels.csv of each site and of the server.
    """
    every = {**{hospital.name: hospital for hospital in HOSPITALS}, SERVER: None}
    missing = [name for name in every if not _is_there(folder / name, spec, seed)]
    drawn = ((name, _drawn(every[name], spec, seed)) for name in missing)
    # Compression and the disk leave a core to the next hospital's drawing.
    for name, part in ahead(drawn, 1):
        _write(folder / name, part, *_annotated(every[name], spec), spec, seed)
    return {name: folder / name / "labels.csv" for name in every}


def _drawn(hospital: Hospital | None, spec: PhantomSpec, seed: int) -> Part:
    """Draw the images of a hospital, or the server's, which are of all scanners."""
    if hospital is not None:
        return _of(hospital, spec.images, spec, seed, "site")
    parts = [_of(h, spec.held_out // len(HOSPITALS), spec, seed, "held out") for h in HOSPITALS]
    images, y = np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])
    return images, y, tuple(patient for p in parts for patient in p[2])


def _annotated(hospital: Hospital | None, spec: PhantomSpec) -> tuple[LabelSet, tuple[float, float, float]]:
    """Return what a hospital, or the server, annotates, and the shares of its splits."""
    if hospital is None:
        return LabelSet(FINDINGS), (0.0, 0.3, 0.7)
    return LabelSet(FINDINGS if spec.every_label else hospital.labels), (0.7, 0.1, 0.2)


Part = tuple[NDArray[np.uint8], NDArray[np.float32], tuple[str, ...]]


def _of(hospital: Hospital, n: int, spec: PhantomSpec, seed: int, what: str) -> Part:
    scanner = hospital.scanner.between(spec.shift)
    return generate(scanner, n, spec, seed_for(seed, "phantom", what, hospital.name), f"{hospital.name}-")


def _is_there(folder: Path, spec: PhantomSpec, seed: int) -> bool:
    note = folder / "phantom.json"
    try:
        return read_json(note) == _note(spec, seed)
    except DataError:  # absent, or of a process that was killed: the hospital is written again
        return False


def _note(spec: PhantomSpec, seed: int) -> dict[str, object]:
    return {**asdict(spec), "seed": seed}


def _write(
    target: Path,
    part: Part,
    labels: LabelSet,
    fractions: tuple[float, float, float],
    spec: PhantomSpec,
    seed: int,
) -> None:
    """Write a hospital's folder under a temporary name, and rename it when it is complete."""
    images, y, patients = part
    make_folder(target.parent)
    remove_leftovers(target.parent, f".{target.name}.*.tmp")
    temporary = temporary_beside(target)
    try:
        with writing(target):
            (temporary / "images").mkdir(parents=True)
            names = [f"{i:05d}.png" for i in range(len(images))]
            for name, pixels in zip(names, images, strict=True):
                Pillow.fromarray(pixels).save(temporary / "images" / name, compress_level=1)
            split = by_patient(patients, y, fractions, seed=1337)
            table = Table(LabelSet(FINDINGS), tuple(names), patients, y, split, temporary / "images")
            write_site(temporary, table, labels)
            write_json(temporary / "phantom.json", _note(spec, seed))
            if target.exists():
                shutil.rmtree(target)
            os.replace(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@validated(frozen=True, config=STRICT)
class PhantomSites:
    """Three simulated hospitals (`HOSPITALS`), each with phantoms of its own.

    Attributes:
        images: number of images at each site.
        held_out: number of fully labelled images at the server.
        contrast: how strongly findings are drawn; lower is harder.
        shift: how different the sites' scanners are; with 0 they are all the same.
        every_label: each site annotates every finding: the reference for partial labels.
        seed: seed of the images; None takes the job's.
        learning_rates: by name of the site, for sites with one of their own.
    """

    images: Annotated[int, Field(ge=20, le=LIMIT)] = 1500
    held_out: Annotated[int, Field(ge=30, le=LIMIT)] = 1500
    contrast: Annotated[float, Field(gt=0)] = 1.0
    shift: Annotated[float, Field(ge=0)] = 1.0
    every_label: bool = False
    seed: Annotated[int, Field(ge=0, le=LARGEST_SEED)] | None = None
    learning_rates: dict[str, float] = Field(default_factory=dict)

    def prepare(self, folder: Path, runs: Path, seed: int, method: type[Method] | Method) -> list[str]:
        """Write a folder for each site: its images, its labels.csv and its suture.toml.

        Args:
            folder: gets one folder for each site.
            runs: where the server keeps its experiments.
            seed: of the job.
            method: the sites give it what it needs: permission to see every class name, or every label.

        Returns:
            the names of the sites, without the server's.
        """
        spec = PhantomSpec(
            self.images,
            self.held_out,
            contrast=self.contrast,
            shift=self.shift,
            every_label=self.every_label or label_use(method).complete,
        )
        tables = write_hospitals(folder, spec, seed if self.seed is None else self.seed)
        # A reference method gets every label; the site still names the ones that it annotates.
        own = {hospital.name: hospital.labels for hospital in HOSPITALS} if label_use(method).complete else {}
        data: dict[str, DataConfig] = {
            name: HospitalConfig(root=folder / name / "images", table=table, labels=own.get(name))
            for name, table in tables.items()
        }
        return write_sites(Destination(folder, runs, method, self.learning_rates), data)
