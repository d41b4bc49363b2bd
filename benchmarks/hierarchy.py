"""What relations of classes are worth in training: `python benchmarks/hierarchy.py`.

Phantoms with a planted tree at four sites of different granularity: one annotates only parents, two only
children, one some of both. The runs of each seed differ in nothing but the labels:

- `without`: no atlas, so that parents and children are unrelated classes;
- `naive`: a site takes its children's labels as labels of the parent, absent where all of them are absent;
- `atlas`: the site names an atlas and sets `ancestors`: a child's presence is its parent's, and where all of
  the site's children of it are absent, training expects the parent as `suture.learning.evaluation` says;
- `complete`: every site annotates both parents, which bounds what relations can give.

With `--nih` the images are NIH ChestX-ray14 (64 px, SUTURE_DATA), with parents as CheXpert has them. With
`--weights` the encoder is frozen and the head alone is trained; set SUTURE_CACHE, so that the arms of a seed
share its features. Figures are of the server's fully labelled test set: mean AUROC of parents and of
children, and of parents the Brier score and the share of negative images above .5; "max" has the same model
with coherent predictions. Differences are paired over the seeds, with 95 % intervals of Student's t.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from harness import command, interval, ran, recorded, show
from numpy.typing import NDArray
from PIL import Image
from pydantic.dataclasses import dataclass as validated
from sklearn.metrics import roc_auc_score

from suture.core.labels import LabelSet
from suture.core.runtime import seed_for
from suture.core.validation import STRICT
from suture.data.batch import MILD, Augmentation
from suture.data.config import load_site_config
from suture.data.readers import load_table
from suture.data.readers.hospital import HospitalConfig
from suture.data.split import by_patient
from suture.data.table import Table
from suture.execution.job import Job
from suture.execution.sites import Destination, SimulatedSites, write_site, write_sites
from suture.learning.training import LocalTraining
from suture.methods import METHODS
from suture.methods.base import Method
from suture.models import ModelSpec
from suture_papers.chest_xrays.chest_sites import nih_config
from suture_papers.public_data import data_folder
from suture_results.saved_models import evaluate
from suture_synthetic.phantom import FINDINGS
from suture_synthetic.phantom_scans import Order, PhantomSpec, Scanner

Arm = Literal["without", "naive", "atlas", "complete"]
ARMS: tuple[Arm, ...] = ("without", "naive", "atlas", "complete")


@dataclass(frozen=True)
class Tree:
    """Which classes a study has, and who annotates them.

    Attributes:
        children: of each parent. An image shows a parent where it shows one of these, and nowhere else.
        sites: the classes that each site annotates.
    """

    children: Mapping[str, tuple[str, ...]]
    sites: Mapping[str, tuple[str, ...]]

    @property
    def fine(self) -> tuple[str, ...]:
        """The children."""
        return tuple(sorted({child for group in self.children.values() for child in group}))

    def atlas(self) -> str:
        """The relations as a file."""
        pairs = [(child, parent) for parent, group in self.children.items() for child in group]
        return "[parents]\n" + "".join(f'"{child}" = ["{parent}"]\n' for child, parent in pairs)

    def grown(self, findings: Sequence[str], y: NDArray[np.float32]) -> tuple[LabelSet, NDArray[np.float32]]:
        """The labels ``[n, c]`` of images with a column for each parent."""
        of = {name: i for i, name in enumerate(findings)}
        parents = [y[:, [of[name] for name in group]].max(axis=1) for group in self.children.values()]
        return LabelSet((*findings, *self.children)), np.column_stack([y, *parents])


PLANTED = Tree(
    {"Lung Opacity": ("Atelectasis", "Consolidation", "Edema"), "Lung Lesion": ("Mass", "Nodule")},
    {
        "coarse": ("Lung Opacity", "Lung Lesion", "Cardiomegaly"),
        "fine": ("Consolidation", "Edema", "Nodule", "Pleural Effusion"),
        "finest": ("Atelectasis", "Consolidation", "Mass", "Cardiomegaly"),
        "mixed": ("Lung Opacity", "Mass", "Nodule", "Pleural Effusion"),
    },
)
"""The phantoms' tree: no site annotates all children of a parent."""

CHEXPERT = Tree(
    {
        "Lung Opacity": ("Atelectasis", "Consolidation", "Edema", "Pneumonia", "Infiltration"),
        "Lung Lesion": ("Mass", "Nodule"),
    },
    {
        "coarse": ("Lung Opacity", "Lung Lesion", "Cardiomegaly", "Pneumothorax"),
        "fine": ("Consolidation", "Edema", "Infiltration", "Nodule", "Pleural Effusion"),
        "finest": ("Atelectasis", "Pneumonia", "Infiltration", "Mass", "Cardiomegaly"),
        "mixed": ("Lung Opacity", "Mass", "Nodule", "Pleural Effusion", "Pneumothorax"),
    },
)
"""Parents as CheXpert has them. Its Enlarged Cardiomediastinum has one child among NIH's classes: it would be
that child's other name."""


@validated(frozen=True, config=STRICT)
class TreeSites(SimulatedSites):
    """The sites of a tree on disk.

    Attributes:
        images: of each site, and of the server.
        arm: what a site makes of its children's labels.
        nih: the released images, rather than phantoms.
    """

    images: int = 500
    arm: Arm = "atlas"
    nih: bool = False

    @property
    def tree(self) -> Tree:
        """The tree of these images."""
        return CHEXPERT if self.nih else PLANTED

    def prepare(self, folder: Path, runs: Path, seed: int, method: Method) -> list[str]:
        """Write the folder of each site, and the server's; see `Simulation`."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "atlas.toml").write_text(self.tree.atlas())
        data, everybody = {}, [*self.tree.sites, "server"]
        for name, table in zip(everybody, self._tables(folder, everybody, seed), strict=True):
            own = self.tree.sites.get(name)
            if self.arm == "complete" and own:
                own = (*own, *(parent for parent in self.tree.children if parent not in own))
            if self.arm == "naive" and own:
                own, table = self._inherited(own, table)
            write_site(folder / name, table, LabelSet(own) if own else table.labels)
            atlas = str(folder / "atlas.toml") if self.arm == "atlas" and own else None
            at = folder / name / "labels.csv"
            data[name] = HospitalConfig(root=table.root, table=at, atlas=atlas, ancestors=atlas is not None)
        return write_sites(Destination(folder, runs, method), data)

    def _inherited(self, own: tuple[str, ...], table: Table) -> tuple[tuple[str, ...], Table]:
        """A site's classes and table, with its children's labels as those of the parents that it lacks."""
        y = table.y.copy()
        for parent, group in self.tree.children.items():
            known = [table.labels.index(name) for name in group if name in own]
            if parent not in own and known:
                y[:, table.labels.index(parent)] = y[:, known].max(axis=1)
                own = (*own, parent)
        return own, Table(table.labels, table.images, table.patients, y, table.split, table.root)

    def _tables(self, folder: Path, names: list[str], seed: int) -> list[Table]:
        shares = [(0.0, 0.0, 1.0) if name == "server" else (0.85, 0.15, 0.0) for name in names]
        if self.nih:
            return self._released(shares, seed)
        tables = []
        for name, share in zip(names, shares, strict=True):
            spec, root = PhantomSpec(size=32), folder / name / "images"
            n = 3 * self.images if name == "server" else self.images
            images, y, patients = Order(Scanner(), n, spec, seed_for(seed, "tree", name), name).draw()
            root.mkdir(parents=True, exist_ok=True)
            files = tuple(f"{i:05d}.png" for i in range(n))
            for file, pixels in zip(files, images, strict=True):
                Image.fromarray(pixels).save(root / file, compress_level=1)
            labels, y = self.tree.grown(FINDINGS, y)
            split = by_patient(patients, y, share, seed=1337)
            tables.append(Table(labels, files, patients, y, split, root))
        return tables

    def _released(self, shares: list[tuple[float, float, float]], seed: int) -> list[Table]:
        """Patients of NIH's set, each at one site or at the server."""
        whole = load_table(nih_config(data_folder(None, "nih_cxr14_64px", "NIH ChestX-ray14"), 1337))
        everyone = sorted({*whole.patients})
        order = np.random.default_rng(seed).permutation(len(everyone)) % len(shares)
        where = dict(zip(everyone, order.tolist(), strict=True))
        place = np.array([where[patient] for patient in whole.patients])
        tables = []
        for number, share in enumerate(shares):
            rows = np.flatnonzero(place == number)[: self.images * (3 if share[2] == 1 else 1)]
            part = whole.rows(rows)
            labels, y = self.tree.grown(part.labels.names, part.y)
            split = by_patient(part.patients, y, share, seed=1337)
            tables.append(Table(labels, part.images, part.patients, y, split, part.root))
        return tables


COLUMNS = ("parents' AUROC", "children's AUROC", "parents' Brier score", "parents' negatives above .5")


def measured(job: Job, arm: Arm) -> dict[str, list[float]]:
    """The figures of `COLUMNS` of one run, with predictions as they are and with coherent ones."""
    assert isinstance(job.simulation, TreeSites)
    sites = replace(job.simulation, arm=arm)
    with ran(replace(job, simulation=sites)) as out:
        (toml,) = out.glob("sites/server/suture.toml")
        done = evaluate(out / "model", load_site_config(toml), "test")
    column = {name: i for i, name in enumerate(done.labels)}
    coherent = done.scores.copy()
    for parent, group in sites.tree.children.items():
        coherent[:, column[parent]] = done.scores[:, [column[name] for name in (parent, *group)]].max(axis=1)

    def figures(scores: NDArray[np.floating]) -> list[float]:
        of = {name: (done.y[:, i], scores[:, i]) for name, i in column.items()}
        parents = [of[name] for name in sites.tree.children]
        return [
            statistics.mean(float(roc_auc_score(y, p)) for y, p in parents),
            statistics.mean(float(roc_auc_score(*of[name])) for name in sites.tree.fine),
            statistics.mean(float(((p - y) ** 2).mean()) for y, p in parents),
            statistics.mean(float((p[y == 0] > 0.5).mean()) for y, p in parents),
        ]

    return {arm: figures(done.scores), f"{arm}, max": figures(coherent)}


def main(
    nih: bool = False,
    method: str = "surgical",
    seeds: tuple[int, ...] = tuple(range(1, 11)),
    rounds: int = 15,
    images: int = 500,
    lr: float = 4e-3,
    model: str = "cnn",
    weights: str | None = None,
    arms: tuple[Arm, ...] = ARMS,
    records: Path | None = None,
) -> None:
    """Print a table as soon as all seeds are done.

    Args:
        images: of each site; the server has three times these.
        weights: of a frozen encoder; trains the head alone.
        records: keeps the figures of each run; what it has is not run again.
    """
    spec = ModelSpec(model, size=64 if nih else 32)
    if weights:
        spec = replace(spec, weights=weights, train="head")
    made: Any = METHODS[method]  # whose classes take different fields
    job = Job(
        name="hierarchy",
        title="A planted tree",
        method=made(local=LocalTraining(lr=lr, batch_size=32)),
        model=spec,
        rounds=rounds,
        augmentation=Augmentation() if weights else MILD,
        simulation=TreeSites(images=images, nih=nih),
        selection="last",
    )
    found: dict[str, list[list[float]]] = defaultdict(list)
    for seed in seeds:
        for arm in arms:
            run = partial(measured, replace(job, seed=seed), arm)
            conditions = {"seed": seed, "arm": arm, "job": f"{job}"}
            for labels, values in (recorded(records, conditions, run) if records else run()).items():
                found[labels].append(values)

    def rows() -> Iterator[list[str]]:
        for name, values in found.items():
            yield [name, *(f"{statistics.mean(column):.3f}" for column in zip(*values, strict=True))]
        for name, other in [(n, o) for o in ("without", "naive") for n in found if n != o and o in found]:
            pairs = zip(found[name], found[other], strict=True)
            differences = zip(*([a - b for a, b in zip(*pair, strict=True)] for pair in pairs), strict=True)
            yield [f"{name} - {other}", *map(interval, differences)]

    show(("labels", *COLUMNS), rows())


if __name__ == "__main__":
    command(main, seeds=(1,), rounds=1, images=60, arms=("without", "atlas"))
