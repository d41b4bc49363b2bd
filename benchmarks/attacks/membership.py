"""Was this patient in the training data? Membership inference with shadow runs, after LiRA.

    Carlini, Chien, Nasr, Song, Terzis, Tramèr. Membership Inference Attacks From First Principles. S&P 2022.
    Steinke, Nasr, Jagielski. Privacy Auditing with One (1) Training Run. NeurIPS 2023 (the bound on ε).

Each site has 100 candidate patients. A run takes each with probability 1/2 and trains a head on the features
of a frozen network. 64 shadow runs show how a patient's scores are distributed with it and
without it (Gaussians, one variance for all patients of a class); in target runs the attacker decides by the
likelihood ratio, summed over a patient's classes and images. The score of a class is its signed logit

    reader   in the last model
    server   in what the patient's site sent, minus in what it had received, summed over the rounds; with
             secure aggregation in the mean of all sites' updates

The bound: an attacker that may abstain is right in at most Binomial(r, e^ε / (1 + e^ε)) of r guesses, but for
a probability of 2 m δ over m patients. So v right ones of r give a lower bound on ε, at 95 % confidence:
Clopper-Pearson at 96 %, and 1 % for δ. How many to guess is chosen on the shadow runs.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from functools import cache
from statistics import mean
from typing import Any

import liars
import numpy as np
import torch
from liars import LARGEST, SIZE, TEST, TRAIN, Features
from numpy.typing import NDArray
from scipy.stats import beta, norm
from torch import Tensor

from suture.core.labels import LabelSet
from suture.data.batch import FEATURES, ROW, Augmentation, Samples
from suture.data.table import Split
from suture.learning.metrics import auroc
from suture.learning.training import LocalTraining, SiteContext
from suture.methods.base import GlobalModel
from suture.methods.surgical import SurgicalAggregation
from suture.models import ModelSpec
from suture.models.classifier import Classifier

Floats = NDArray[np.float64]

CANDIDATES, SHADOWS = 100, 64
"""Candidate patients of a site; shadow runs."""
TARGETS = 8
"""Target runs of a seed; the seeds share the shadow runs."""
ROUNDS, LOCAL = 5, LocalTraining(lr=5e-3, epochs=2, batch_size=25)
SPEC = ModelSpec("efficientnet_lite0", size=SIZE, color=True, weights="package", train="head", views=1)
DELTA = 1e-7
VIEWS = ("reader", "server")


@dataclass(frozen=True)
class Pool:
    """What the attacker knows: the images of all candidates, and a test set.

    Attributes:
        features, y: of the candidates' images, ``[n, d]`` and ``[n, c]``.
        patient: of each image, ``[n]``.
        test, test_y: as `features` and `y`, of other patients.
    """

    features: Tensor
    y: Tensor
    patient: NDArray[np.int64]
    test: Tensor
    test_y: Tensor
    names: tuple[str, ...]


@cache
def everybody(data: str) -> Pool:
    """The candidates of ten sites, of the images that `liars` trains on: phantoms of one image each, or
    patients of NIH ChestX-ray14."""
    _, y, names = liars.pool(data)
    features = liars.inputs_of(data)[FEATURES]
    first: dict[str, int] = {}
    patient = np.array([first.setdefault(name, len(first)) for name in liars.patients(data)])
    rows = torch.from_numpy(np.flatnonzero(patient < 10 * CANDIDATES))
    return Pool(features[rows], y[rows], patient[rows.numpy()], features[TRAIN:], y[TRAIN:], names)


@cache
def pool(data: str, sites: int) -> Pool:
    """The candidates of so many sites."""
    whole = everybody(data)
    rows = np.flatnonzero(whole.patient < sites * CANDIDATES)
    return replace(whole, features=whole.features[rows], y=whole.y[rows], patient=whole.patient[rows])


@dataclass(frozen=True)
class Seen:
    """A run as the attacker sees it.

    Attributes:
        members: of the candidates, ``[p]``.
        scores: by view, of each image and class, ``[n, c]``; NaN where its site does not annotate the class.
    """

    members: NDArray[np.bool_]
    scores: dict[str, Floats]
    auroc: float
    seconds: float
    bytes: int


def run(data: str, sites: int, defence: str, number: int) -> Seen:
    """Train on a random half of the candidates; see `Seen`."""
    found, rng = pool(data, sites), np.random.default_rng([number, 40])
    members = rng.random(int(found.patient.max()) + 1) < 0.5
    method = SurgicalAggregation(local=LOCAL)
    names, n = tuple(sorted(found.names)), len(found.patient)
    private = None
    if defence.startswith("ε"):
        private = liars.private(float(defence.split()[1]), LOCAL, ROUNDS, CANDIDATES // 2, DELTA)
    began, cpu, sizes = time.process_time(), torch.device("cpu"), list[int]()
    contexts, images = [], []
    for i in range(sites):
        draw = np.random.default_rng(1000 * number + i).bytes
        own = [c for c in range(len(found.names)) if (i + c) % 4 < 3]
        of_site = np.flatnonzero(found.patient % sites == i)
        mine = torch.from_numpy(of_site[members[found.patient[of_site]]])
        inputs = {FEATURES: found.features[mine], ROW: torch.arange(len(mine))}
        ids = tuple(str(found.patient[row]) for row in mine.tolist())
        train: dict[Split, Samples] = {"train": Samples(inputs, found.y[mine][:, own], ids, ids)}
        features: Any = Features(found.features[mine])
        contexts.append(
            SiteContext(
                f"site{i:02d}", head(tuple(found.names[c] for c in own)), train,
                SPEC.preprocessing, Augmentation(), cpu, prefetch=0, features=features,
                private=replace(private, draw=draw) if private else None,
            )
        )  # fmt: skip
        images.append(torch.from_numpy(of_site))
    moved = np.full((n, len(names)), np.nan)

    def see(model: GlobalModel, sent: Any) -> None:
        for update, at in zip(sent, images, strict=True):
            columns, seen = np.array([names.index(n) for n in update.labels]), found.features[at]
            change = logits(update.head, seen) - logits(model.rows(update.labels), seen)
            where = np.ix_(at.numpy(), columns)
            moved[where] = np.nan_to_num(moved[where]) + change
            sizes.append(liars.size(update, defence))

    model = liars.trained(method, number, ROUNDS, liars.first(SPEC, 1, names), contexts, defence, see=see)
    order = [found.names.index(name) for name in names]
    sign = 2 * found.y[:, order].double().numpy() - 1
    last = np.where(np.isnan(moved), np.nan, logits(model.head, found.features))
    tested, truth = logits(model.head, found.test), found.test_y[:, order].numpy()
    areas = [auroc(truth[:, c], tested[:, c]) for c in range(len(names)) if 0 < truth[:, c].sum() < TEST]
    scores = {"reader": sign * last, "server": sign * moved}
    return Seen(members, scores, mean(areas), time.process_time() - began, sum(sizes) // len(sizes))


@cache
def head(labels: tuple[str, ...]) -> Classifier:
    """A head over stored features: the frozen network itself would cost most of the time."""
    return Classifier(torch.nn.Identity(), 1280, LabelSet(labels), trains="head")


def logits(head: Any, features: Tensor) -> Floats:
    """The logits ``[n, c]`` of a linear head."""
    found = features @ head["head.weight"].T + head["head.bias"]
    values: Floats = found.clamp(-LARGEST, LARGEST).double().numpy()
    return values


# The attack


def ratios(shadows: list[Seen], targets: list[Seen], view: str, patient: NDArray[np.int64]) -> Floats:
    """Log likelihood ratio of each target run and patient, ``[t, p]``; of a shadow run without itself."""
    x = np.stack([run.scores[view] for run in shadows])  # [s, n, c]
    inside = np.stack([run.members[patient] for run in shadows])[:, :, None]
    found = np.empty((len(targets), len(targets[0].members)))
    number = {True: inside.sum(0), False: (~inside).sum(0)}
    total = {side: (x * (inside == side)).sum(0) for side in (True, False)}
    spread = {}
    for side in (True, False):
        squares = (x - total[side] / number[side]) ** 2 * (inside == side)
        spread[side] = np.sqrt(np.nanmean(squares.sum(0), axis=0) / (number[side].mean() - 1)) + 1e-12
    for t, target in enumerate(targets):
        at = next((s for s, run in enumerate(shadows) if run is target), None)
        density = {}
        # A patient that all shadow runs had, or none, gives no ratio, and counts as 0.
        for side in (True, False):
            sums, count = total[side], number[side]
            if at is not None:
                here = inside[at] == side
                sums, count = sums - x[at] * here, count - here
            with np.errstate(divide="ignore", invalid="ignore"):
                width = spread[side] * np.sqrt(1 + 1 / count)  # of a new value, the mean being estimated
                density[side] = norm.logpdf(target.scores[view], sums / count, width)
        each = np.nansum(density[True] - density[False], axis=1)
        found[t] = np.bincount(patient, each, found.shape[1])
    return found


def lower_bound(right: int, guesses: int) -> float:
    """The least ε, at 95 % confidence, with which so many guesses can be right."""
    share = float(beta.ppf(0.04, right, guesses - right + 1)) if right else 0.0
    return max(0.0, math.log(share / (1 - share))) if 0 < share < 1 else 0.0


SHARES = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
"""Shares of the patients that are guessed."""


def guessed(found: Floats, members: NDArray[np.bool_], limits: tuple[float, float]) -> tuple[int, int]:
    """How many guesses are right, and how many there are: below the first limit out, above the second in."""
    out, into = found < limits[0], found > limits[1]
    return int((out & ~members).sum() + (into & members).sum()), int(out.sum() + into.sum())


def attack(data: str, sites: int, defence: str, seeds: list[int]) -> list[dict[str, Any]]:
    """Shadow and target runs of a defence; a record of each seed and view."""
    patient = pool(data, sites).patient
    shadows = [run(data, sites, defence, number) for number in range(SHADOWS)]
    targets = {s: [run(data, sites, defence, 1000 * s + t) for t in range(TARGETS)] for s in seeds}
    records, every = [], [run for of in targets.values() for run in of]
    cost = {
        "auroc": mean(r.auroc for r in every),
        "seconds": mean(r.seconds for r in every),
        "bytes": every[0].bytes,
    }
    for view in VIEWS:
        known, inside = ratios(shadows, shadows, view, patient), np.stack([r.members for r in shadows])
        options = [(-math.inf, float(np.quantile(known, 1 - s))) for s in SHARES]
        options += [(float(np.quantile(known, s)), math.inf) for s in SHARES]
        options += [(float(np.quantile(known, s / 2)), float(np.quantile(known, 1 - s / 2))) for s in SHARES]
        limits = max(options, key=lambda pair: lower_bound(*guessed(known, inside, pair)))
        truths = {s: np.stack([r.members for r in targets[s]]) for s in seeds}
        parts = {s: (ratios(shadows, targets[s], view, patient), truths[s]) for s in seeds}
        counted = [guessed(*parts[s], limits) for s in seeds]
        bound = lower_bound(sum(v for v, _ in counted), sum(r for _, r in counted))
        for s, (found, truth) in parts.items():
            above = np.quantile(found[~truth], 0.99)
            area = auroc(truth.ravel().astype(float), found.ravel())
            records.append({
                "attack": f"membership, {view}", "data": data, "sites": sites, "defence": defence, "seed": s,
                "success": float((found[truth] > above).mean()), "membership_auroc": area,
                "least_epsilon": bound, **cost, "auroc": mean(r.auroc for r in targets[s]),
            })  # fmt: skip
    return records
