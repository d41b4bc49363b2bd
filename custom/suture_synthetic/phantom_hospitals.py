"""Three simulated hospitals on disk: patients with several images, correlated findings, a scanner each."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
from PIL import Image as Pillow
from pydantic import Field
from pydantic.dataclasses import dataclass as validated

from suture.core.errors import DataError
from suture.core.files import make_folder, read_json, remove_leftovers, temporary_beside, write_json, writing
from suture.core.labels import LabelSet
from suture.core.runtime import seed_for
from suture.core.validation import LARGEST_SEED, LIMIT, STRICT
from suture.data.readers import DataConfig
from suture.data.readers.hospital import HospitalConfig
from suture.data.split import by_patient
from suture.data.table import Table
from suture.execution.sites import Destination, SimulatedSites, write_site, write_sites
from suture.execution.study import SERVER
from suture.learning.training import prefetch
from suture.methods.base import Method
from suture_synthetic.phantom import FINDINGS
from suture_synthetic.phantom_scans import HOSPITALS, Hospital, Order, Part, PhantomSpec, drawing


def write_hospitals(folder: Path, spec: PhantomSpec, seed: int) -> dict[str, Path]:
    """Write each phantom site, and the server's fully labelled data, as a hospital would have them.

    A site's folder holds images/ and labels.csv with its own columns. A folder that exists already for the
    same specification and seed is reused.

    Returns:
        the labels.csv of each site and of the server.
    """
    every = {**{hospital.name: hospital for hospital in HOSPITALS}, SERVER: None}
    missing = [name for name in every if not _is_there(folder / name, spec, seed)]
    orders = {name: _orders(every[name], spec, seed) for name in missing}
    with drawing([order for own in orders.values() for order in own]) as parts:
        drawn = ((name, _join(islice(parts, len(own)))) for name, own in orders.items())
        # Compression and the disk leave a core to the next hospital's drawing.
        for name, part in prefetch(drawn, 1):
            _write(folder / name, part, *_annotate(every[name], spec), spec, seed)
    return {name: folder / name / "labels.csv" for name in every}


def _orders(hospital: Hospital | None, spec: PhantomSpec, seed: int) -> list[Order]:
    """Return what is drawn for a hospital, or for the server, whose images are of all scanners."""

    def order(hospital: Hospital, n: int, what: str) -> Order:
        own = seed_for(seed, "phantom", what, hospital.name)
        return Order(hospital.scanner.between(spec.shift), n, spec, own, f"{hospital.name}-")

    if hospital is not None:
        return [order(hospital, spec.images, "site")]
    return [order(each, spec.held_out // len(HOSPITALS), "held out") for each in HOSPITALS]


def _join(parts: Iterable[Part]) -> Part:
    images, y, patients = zip(*parts, strict=True)
    return np.concatenate(images), np.concatenate(y), tuple(chain(*patients))


def _annotate(hospital: Hospital | None, spec: PhantomSpec) -> tuple[LabelSet, tuple[float, float, float]]:
    """Return what a hospital, or the server, annotates, and the shares of its splits."""
    if hospital is None:
        return LabelSet(FINDINGS), (0.0, 0.3, 0.7)
    return LabelSet(FINDINGS if spec.every_label else hospital.labels), (0.7, 0.1, 0.2)


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
class PhantomSites(SimulatedSites):
    """Three simulated hospitals (`HOSPITALS`), each with phantoms of its own.

    Attributes:
        images: number of images at each site.
        held_out: number of fully labelled images at the server.
        contrast: how strongly findings are drawn; lower is harder.
        shift: how much the sites' scanners differ; 0 makes them equal.
        seed: seed of the images; None takes the job's.
    """

    images: Annotated[int, Field(ge=20, le=LIMIT)] = 1500
    held_out: Annotated[int, Field(ge=30, le=LIMIT)] = 1500
    contrast: Annotated[float, Field(gt=0)] = 1.0
    shift: Annotated[float, Field(ge=0)] = 1.0
    seed: Annotated[int, Field(ge=0, le=LARGEST_SEED)] | None = None

    synthetic: ClassVar[bool] = True

    def prepare(self, folder: Path, runs: Path, seed: int, method: Method) -> list[str]:
        """Write a folder for each site: its images, its labels.csv and its suture.toml.

        Args:
            folder: gets one folder for each site.
            runs: where the server keeps its experiments.
            seed: of the job.
            method: the sites give it what it needs: permission to see every class name, or every label.

        Returns:
            the names of the sites, without the server's.
        """
        every = method.labels.complete
        spec = PhantomSpec(
            self.images, self.held_out, every_label=every, contrast=self.contrast, shift=self.shift
        )
        tables = write_hospitals(folder, spec, seed if self.seed is None else self.seed)
        # A reference method gets every label; the site still names the ones that it annotates.
        own = {hospital.name: hospital.labels for hospital in HOSPITALS} if method.labels.complete else {}
        data: dict[str, DataConfig] = {
            name: HospitalConfig(root=folder / name / "images", table=table, labels=own.get(name))
            for name, table in tables.items()
        }
        return write_sites(Destination(folder, runs, method, self.learning_rates), data)
