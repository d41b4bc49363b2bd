"""Sites that lie against each merge; `table.py` runs them.

4 sites with one liar, and 10 with two, train a hidden block and a head on the features of a frozen network,
on phantoms and on NIH ChestX-ray14 (in SUTURE_DATA); three in four sites annotate a class. A liar trains on
its own data, then changes what it sends:

    flip x10           ten times the change with its sign turned
    scale x10          ten times the change
    labels             trains on inverted labels
    together           all liars send mean - 1.5 standard deviations of all sites' changes (ALIE, Baruch,
                       Baruch, Goldberg, NeurIPS 2019, with z = 1.5)
    two flip x10       as flip x10, two liars also among 4 sites: more than the merge is set for
    free rider         sends what it received
    free noise         sends noise as long as the mean of the others' changes

Backdoors train a small network on phantoms instead. The liars put a white square into half of their images
and call these `TARGET`; `backdoor x10` sends ten times the change besides. Success is the share of test
images without `TARGET` that score, with the square, above what 5 % of them exceed without it: 0.05 is chance.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import secure
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from suture.core.labels import LabelSet
from suture.data.batch import FEATURES, ROW, Augmentation, Samples
from suture.data.config import SiteConfig
from suture.data.table import Split
from suture.federation.plan import Plan, code_hash, round_context
from suture.federation.server.global_model import initial
from suture.federation.server.norms import Measure, cosines
from suture.federation.site.releases import count_mechanism
from suture.learning.dp_sgd import PatientPrivacy
from suture.learning.metrics import auroc
from suture.learning.samples import load_samples
from suture.learning.training import LocalTraining, SiteContext
from suture.methods.base import GlobalModel, layout_of, local_round
from suture.methods.surgical import SurgicalAggregation
from suture.models import ModelSpec, build
from suture.models.classifier import Classifier, load_tensors
from suture.privacy.differential_privacy import Mechanism, multiplier_for
from suture.privacy.robust import RobustMerge, outlying, robustly_merged
from suture.protocol.messages import TaskData, Update
from suture.protocol.packing import Packed
from suture.protocol.records import SiteRound
from suture_synthetic.phantom import FINDINGS
from suture_synthetic.phantom_scans import Order, PhantomSpec, Scanner

MERGES = ("clip", "median", "trimmed")
LIARS = {4: 1, 10: 2}
"""Sites, and the liars among them."""

TRAIN, TEST, SIZE, SMALL = 1500, 600, 64, 32
FROZEN = ModelSpec(
    "efficientnet_lite0", size=SIZE, color=True, hidden=64, weights="package", train="head", views=1
)
TARGET = "Mass"
LARGEST = 1e8
"""No number of an update is larger, so that a run that an attack destroys ends with figures."""

Change = dict[tuple[str, str], Tensor]
"""What a site has changed, by tensor and, for rows, class."""


@dataclass(frozen=True)
class Cell:
    """One run."""

    data: str
    sites: int
    attack: str
    merge: str
    seed: int

    @property
    def liars(self) -> list[str]:
        """The names of the sites that lie."""
        number = 0 if self.attack == "none" else 2 if self.attack.startswith("two") else LIARS[self.sites]
        return [f"site{i:02d}" for i in range(number)]


# Data


@cache
def pool(data: str) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """Images ``[n, c, s, s]``, labels ``[n, c]`` and the classes: `TRAIN` images, and `TEST` after them."""
    if data == "nih":
        names, chosen = nih()
        return torch.cat([part.inputs["image"] for part in chosen]), torch.cat([p.y for p in chosen]), names
    size = SMALL if data == "small phantoms" else SIZE
    drawn, found, _ = Order(Scanner(), TRAIN + TEST, PhantomSpec(size=size), 7).draw()
    channels = 1 if data == "small phantoms" else 3
    images = torch.from_numpy(drawn)[:, None].repeat(1, channels, 1, 1)
    return images, torch.from_numpy(found), tuple(FINDINGS)


@cache
def nih() -> tuple[tuple[str, ...], list[Samples]]:
    """The classes of NIH ChestX-ray14 at 64 pixels, `TRAIN` images and `TEST` images."""
    root = Path(os.environ["SUTURE_DATA"]) / "nih_cxr14_64px"
    table = root / "Data_Entry_2017_v2020.csv"
    own = {"dataset": "nih", "root": root / "images.tar", "table": table, "split": "patients"}
    config = SiteConfig.model_validate({"data": own, "storage": {"cache": CACHE, "state": CACHE}})
    labels, samples = load_samples(config, FROZEN, "nih")
    draw, sizes = torch.Generator().manual_seed(0), {"train": TRAIN, "test": TEST}
    parts: list[tuple[Samples, int]] = [(samples[split], n) for split, n in sizes.items()]  # type: ignore[index]
    return labels.names, [part.rows(torch.randperm(len(part), generator=draw)[:n]) for part, n in parts]


def patients(data: str) -> tuple[str, ...]:
    """The patient of each training image."""
    return nih()[1][0].patients if data == "nih" else tuple(map(str, range(TRAIN)))


@cache
def inputs_of(data: str) -> dict[str, Tensor]:
    """What a model reads of the pool: images; or the features of the frozen network, stored in the cache."""
    images, _, names = pool(data)
    if data == "small phantoms":
        return {"image": images}
    path = CACHE / f"{data}.safetensors"
    if not path.exists():
        network, prepare = build(FROZEN, LabelSet(names), 1, pretrained=True).eval(), FROZEN.preprocessing
        with torch.no_grad():
            found = [network.encode({"image": prepare(x)}) for x in torch.split(images, 64)]
        save_file({FEATURES: torch.cat(found)}, path)
    return {**load_file(path), ROW: torch.arange(len(images))}


class Features:
    """The features of a site's training images in place of views, as a `FeatureStore` gives them."""

    def __init__(self, of: Tensor) -> None:
        self._of = of

    def view(self, _model: Classifier, _how: Augmentation, rows: Tensor, _noise: torch.Generator) -> Tensor:
        """Return the features of some images."""
        return self._of[rows]


def context_of(cell: Cell, number: int, spec: ModelSpec) -> SiteContext:
    """A site, which annotates three of four classes; a liar's data are as its attack makes them."""
    inputs, (_, y, names) = inputs_of(cell.data), pool(cell.data)
    rows, name = torch.arange(TRAIN)[number :: cell.sites], f"site{number:02d}"
    own = [c for c in range(len(names)) if (number + c) % 4 < 3]
    labels = LabelSet(tuple(names[c] for c in own))
    mine, known = {key: tensor[rows].clone() for key, tensor in inputs.items()}, y[rows][:, own].clone()
    if name in cell.liars and cell.attack == "labels":
        known = 1 - known
    if name in cell.liars and cell.attack.startswith("backdoor"):
        mine["image"][::2] = marked(mine["image"][::2])
        if TARGET in labels.names:
            known[::2, labels.names.index(TARGET)] = 1
    features: Any = Features(mine[FEATURES]) if FEATURES in mine else None
    mine = mine | ({ROW: torch.arange(len(rows))} if features else {})
    ids = tuple(map(str, rows.tolist()))
    train: dict[Split, Samples] = {"train": Samples(mine, known, ids, ids)}
    model = network(spec, labels)
    cpu = torch.device("cpu")
    return SiteContext(
        name, model, train, spec.preprocessing, Augmentation(), cpu, prefetch=0, features=features
    )


@cache
def network(spec: ModelSpec, labels: LabelSet) -> Classifier:
    """A network of some classes: sites with the same ones train in turn, each with what it received."""
    return build(spec, labels, 1, pretrained=False)


def marked(images: Tensor) -> Tensor:
    """The images with a white square in a corner."""
    images = images.clone()
    images[..., 1:6, 1:6] = 255
    return images


# A run


@cache
def first(spec: ModelSpec, seed: int, names: tuple[str, ...]) -> GlobalModel:
    """The model at the start: the same in all runs of a seed, as an attacker knows it."""
    plan = Plan(SurgicalAggregation(), spec, Augmentation(), seed, "run", code_hash(SurgicalAggregation))
    return initial(plan, names)


def trained(
    method: SurgicalAggregation,
    seed: int,
    rounds: int,
    model: GlobalModel,
    sites: list[SiteContext],
    defence: str,
    look: Callable[[Mapping[str, TaskData], dict[str, Update]], None] = lambda *_: None,
    see: Callable[[GlobalModel, Any], None] = lambda *_: None,
) -> GlobalModel:
    """The last model of a federation in one process.

    Args:
        look: gets what the sites of a round received and send, and may change the latter.
        see: gets the model of a round and what the server has of each site.
    """
    robust = RobustMerge(defence, LIARS[len(sites)]) if defence in MERGES else None  # type: ignore[arg-type]
    kept: list[dict[str, Tensor]] = [{}] * len(sites)
    before, radii = None, dict[str, float]()
    for number in range(1, rounds + 1):
        ctx, updates, received = round_context(method, seed, rounds, number), {}, {}
        for i, site in enumerate(sites):
            labels = site.model.labels.names
            received[site.name] = task = TaskData(
                "train", number, labels=labels, shared=dict(model.shared), head=model.rows(labels)
            )
            load_tensors(site.model, {**({} if site.features else model.fixed), **task.shared, **task.head})
            state = Packed(kept[i], {"phase": "main", "labels": list(labels)})
            update, kept[i] = method.train(site, task, local_round(method, site, state, ctx))
            updates[site.name] = replace(update, shared=copied(update.shared), head=copied(update.head))
        look(received, updates)
        sent: Any = secure.summed(model, updates) if defence == secure.DEFENCE else list(updates.values())
        see(model, sent)
        if robust:
            merged = robustly_merged(robust, model, before, sent, radii)
            sent, radii = merged.updates, dict(merged.radii)
        before, model = model, method.aggregate(model, sent, ctx)
    return model


def size(update: Update, defence: str) -> int:
    """The bytes of an update; masked numbers have eight."""
    numbers = sum(t.numel() for t in (*update.shared.values(), *update.head.values()))
    return numbers * (8 if defence == secure.DEFENCE else 4)


def run(cell: Cell) -> dict[str, Any]:
    """Train, and measure the last model on the test images.

    As in a federation, but without messages, checks and files: `max_update` rejects nothing.
    """
    small = cell.data == "small phantoms"
    spec = ModelSpec("cnn", size=SMALL) if small else FROZEN
    local = LocalTraining(lr=3e-3, epochs=2 if small else 1, batch_size=32 if small else 64)
    method = SurgicalAggregation(local=local)
    names = tuple(sorted(pool(cell.data)[2]))
    begun = first(spec, cell.seed, names)
    sites = [context_of(cell, number, spec) for number in range(cell.sites)]
    if cell.merge.startswith("ε"):  # honest sites, and liars too: it changes nothing of what they can do
        own = private(float(cell.merge.split()[1]), local, 8, TRAIN // cell.sites, 1e-5)
        draws = [np.random.default_rng([cell.seed, i]).bytes for i in range(cell.sites)]
        sites = [replace(s, private=replace(own, draw=d)) for s, d in zip(sites, draws, strict=True)]
    began = time.process_time()
    noise, measure, marks = torch.Generator().manual_seed(cell.seed), Measure(), list[dict[str, bool]]()
    egress, sizes = method.egress(layout_of(begun, method)), dict[str, int]()

    def lie(received: Mapping[str, TaskData], updates: dict[str, Update]) -> None:
        if cell.attack not in ("none", "labels", "backdoor"):
            changes = {name: changed(received[name], update) for name, update in updates.items()}
            for liar in cell.liars:
                own = lied(cell.attack, liar, changes, noise)
                updates[liar] = with_change(received[liar], updates[liar], own)
        seen = {name: measure(update, received[name], egress) for name, update in updates.items()}
        pointing = cosines({name: norms.direction for name, norms in seen.items()})
        lines = {n: SiteRound("accepted", norm=seen[n].update, cosine=pointing[n]) for n in seen}
        marks.append({name: name in outlying(lines) for name in lines})
        sizes.update({name: size(update, cell.merge) for name, update in updates.items()})

    model = trained(method, cell.seed, 5 if small else 8, begun, sites, cell.merge, lie)
    _, y, classes = pool(cell.data)
    truth = y[TRAIN:][:, [classes.index(name) for name in names]]
    logits = scores(model, spec, {key: tensor[TRAIN:] for key, tensor in inputs_of(cell.data).items()})
    areas = [
        auroc(truth[:, c].numpy(), logits[:, c]) for c in range(len(names)) if 0 < truth[:, c].sum() < TEST
    ]
    found: dict[str, Any] = {"auroc": mean(areas), "seconds": time.process_time() - began}
    shares = {site.name: mean(line[site.name] for line in marks) for site in sites}
    if cell.merge != secure.DEFENCE:  # the server sees no update to mark
        found["marked"] = mean(shares[name] for name in cell.liars) if cell.liars else 0.0
        found["marked_honest"] = max(share for name, share in shares.items() if name not in cell.liars)
    found["bytes"] = sizes[sites[0].name]
    if small:
        absent = truth[:, c := names.index(TARGET)] == 0
        patched = scores(model, spec, {"image": marked(pool(cell.data)[0][TRAIN:][absent])})[:, c]
        found["success"] = float((patched > np.quantile(logits[absent, c], 0.95)).mean())
    return found


@cache
def private(epsilon: float, local: LocalTraining, rounds: int, patients: int, delta: float) -> PatientPrivacy:
    """How a site with so many patients trains with ε in so many rounds; it clips to 1."""
    rate, steps = local.draws_of(patients)
    planned = [Mechanism(0.0, rate, rounds * steps)]
    found = multiplier_for(epsilon, delta, planned, count_mechanism(epsilon))
    return PatientPrivacy(1.0, found, patients)


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies: sites share networks here."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


def changed(received: TaskData, update: Update) -> Change:
    """What a site has changed of the parameters; statistics of batch norm stay honest."""
    found = {(n, ""): t - received.shared[n] for n, t in update.shared.items() if "running" not in n}
    for name, rows in update.head.items():
        for label, row, was in zip(update.labels, rows, received.head[name], strict=True):
            found[name, label] = row - was
    return found


def with_change(received: TaskData, update: Update, change: Change) -> Update:
    """The update with another change."""
    shared = {
        n: received.shared[n] + change.get((n, ""), t - received.shared[n]) for n, t in update.shared.items()
    }
    head = {
        name: rows + torch.stack([change[name, label] for label in update.labels])
        for name, rows in received.head.items()
    }
    shared, head = ({n: t.clamp(-LARGEST, LARGEST) for n, t in part.items()} for part in (shared, head))
    return replace(update, shared=shared, head=head)


def lied(attack: str, liar: str, changes: Mapping[str, Change], noise: torch.Generator) -> Change:
    """What a liar sends as its change."""
    own = changes[liar]
    if attack in ("flip x10", "two flip x10"):
        return {key: -10 * t for key, t in own.items()}
    if attack in ("scale x10", "backdoor x10"):
        return {key: 10 * t for key, t in own.items()}
    if attack == "free rider":
        return {key: torch.zeros_like(t) for key, t in own.items()}
    if attack == "free noise":
        honest = [change for name, change in changes.items() if name != liar]
        others = [torch.cat([t.flatten() for t in change.values()]).norm() for change in honest]
        drawn = {key: torch.randn(t.shape, generator=noise) for key, t in own.items()}
        length = torch.stack(others).mean() / torch.cat([t.flatten() for t in drawn.values()]).norm()
        return {key: length * t for key, t in drawn.items()}
    assert attack == "together", attack
    every = {key: torch.stack([c[key] for c in changes.values() if key in c]) for key in own}
    return {key: t.mean(0) - 1.5 * t.std(0, correction=0) for key, t in every.items()}


@torch.no_grad()
def scores(model: GlobalModel, spec: ModelSpec, inputs: Mapping[str, Tensor]) -> NDArray[np.float32]:
    """The logits ``[n, c]``."""
    found = network(spec, LabelSet(model.labels)).eval()
    load_tensors(found, {**model.shared, **model.head})
    if "image" in inputs:
        load_tensors(found, model.fixed)
        inputs = {"image": spec.preprocessing(inputs["image"])}
    logits: NDArray[np.float32] = found(inputs).numpy()
    return logits


CACHE = Path()
"""Of images and features."""
