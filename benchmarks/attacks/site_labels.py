"""A malicious server reads labels out of a site's figures: `python benchmarks/attacks/site_labels.py`.

The server has 72 images of a site's validation split and wants to know which of them show a Mass. It chooses
the model: calibrated features, and a row of the head that gives each image x_i the logit z_i that it wants.
The figures are then linear in the labels y,

    loss  = mean_i softplus(z_i) - z_i y_i              AUROC = (sum_i rank_i y_i - P (P + 1) / 2) / P N

so that every answer is an equation, as exact as the figure's grid. Three servers ask a real `Site`:

    bits      z_i = 2^k for 16 images at a time, 0 for the others: a loss of six digits is their labels
    single    z_i on one image alone, the others at 0, where the loss of either label is ln 2
    dense     random signs for all images; labels by least squares over all equations (Dinur & Nissim 2003)

Printed: labels right after a number of answers, with those never asked for guessed by a coin: 36 is chance.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import lsq_linear
from scipy.stats import rankdata

sys.path.append(str(Path(__file__).parents[1]))

from harness import command, show
from parts.sites import hospital

from suture.core.labels import LabelSet
from suture.data.batch import Augmentation
from suture.data.config import load_site_config
from suture.federation.plan import Plan, code_hash
from suture.federation.site.site import Site
from suture.federation.state_files import experiment_folder
from suture.methods.surgical import SurgicalAggregation
from suture.models import ModelSpec, build
from suture.models.classifier import split_state
from suture.privacy.secure_aggregation import SecureAggregation
from suture.protocol.check import check_reply
from suture.protocol.messages import Evaluation, Metrics, TaskData
from suture.protocol.packing import unpack

Floats = NDArray[np.float64]

IMAGES, LABEL, SIZE = 72, "Mass", 16
STRICT = ""
"""Default limits."""
EXACT = "min_loss = 0\n"
"""Losses of six digits and without a bound, as sites sent them by default before they had a grid."""
SECURE = "secure_aggregation = true\n"
"""The site's updates are masked; its figures are not."""
BOUND = 5.0


@dataclass(frozen=True)
class Victim:
    """A site, and what the server knows: its validation images ``[n, 1, h, w]``; y ``[n]`` is to be found."""

    site: Site
    images: torch.Tensor
    y: NDArray[np.bool_]


def victim(folder: Path, seed: int, limits: str = STRICT, rounds: int = 100) -> Victim:
    """Write a hospital of noise images, half of them with a Mass, and return its site."""
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.arange(IMAGES) % 2 == 0)
    pixels = rng.integers(0, 256, (IMAGES + 4, SIZE, SIZE), dtype=np.uint8)
    rows = [("validation", int(label)) for label in y] + [("train", i % 2) for i in range(4)]
    config = load_site_config(hospital(folder, pixels, rows, (LABEL,), limits))
    model = ModelSpec("cnn", size=SIZE)
    masks = SecureAggregation() if SECURE in limits else None
    plan = Plan(
        SurgicalAggregation(), model, Augmentation(), 1, "attack", code_hash(), secure_aggregation=masks
    )
    state = experiment_folder(folder / "state", plan.experiment)
    site = Site("victim", config, plan, rounds, state)
    return Victim(site, torch.from_numpy(pixels[:IMAGES, None]), y)


class Server:
    """A server that gives each image the logit that it wants, and counts the answers."""

    def __init__(self, target: Victim) -> None:
        self._site, plan = target.site, target.site.plan
        self._model = build(plan.model, LabelSet((LABEL,)), plan.seed, pretrained=False)
        x = plan.model.preprocessing(target.images)
        for module in self._model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.momentum = None
        with torch.no_grad():
            self._model.train()({"image": x})
            self._features = self._model.eval().backbone(x).double().numpy()
        self.answers = 0

    def ask(self, wanted: Floats) -> tuple[Floats, Metrics]:
        """Return the logits ``[n]`` that the images have, nearly the wanted ones, and the site's figures.

        Raises:
            RejectedUpdate: the site's filter would hold the answer back.
        """
        known = np.column_stack([self._features, np.ones(len(wanted))])
        row = np.linalg.lstsq(known, wanted, rcond=1e-9)[0]
        self._model.head.weight.data = torch.from_numpy(row[None, :-1]).float()
        self._model.head.bias.data = torch.from_numpy(row[-1:]).float()
        shared, head = split_state(self._model.state_dict())
        self.answers += 1
        task = TaskData("evaluate", self.answers, labels=(LABEL,), shared=shared, head=head)
        sent = self._site.answer(task)
        answer = unpack(sent.packed)
        assert isinstance(answer, Evaluation), answer
        assert sent.allowed
        check_reply(answer, sent.allowed)
        row = np.append(head["head.weight"].double().numpy(), head["head.bias"].double().numpy())
        return known @ row, answer.metrics


def softplus(z: Floats) -> Floats:
    """ln(1 + e^z)."""
    return np.logaddexp(0, z)


def bits(server: Server, answers: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """16 images an answer: the loss as a number in the base of 2."""
    guess = rng.integers(0, 2, IMAGES).astype(bool)
    for first in range(0, min(16 * answers, IMAGES), 16):
        chosen = np.arange(first, min(first + 16, IMAGES))
        wanted = np.zeros(IMAGES)
        wanted[chosen] = 2.0 ** np.arange(len(chosen))
        z, metrics = server.ask(wanted)
        total = round(float(softplus(z).sum()) - IMAGES * (metrics.loss or 0))
        guess[chosen] = [total >> k & 1 for k in range(len(chosen))]
    return guess


def single(server: Server, answers: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """One image an answer, with the sign of its logit chosen so that the two losses differ most."""
    guess = rng.integers(0, 2, IMAGES).astype(bool)
    for i in range(min(answers, IMAGES)):
        wanted = np.zeros(IMAGES)
        wanted[i] = BOUND
        z, metrics = server.ask(wanted)
        either = (softplus(z).sum() - np.array([0.0, z[i]])) / IMAGES  # losses of label 0 and of label 1
        guess[i] = np.argmin(np.abs(either - (metrics.loss or 0)))
    return guess


def dense(server: Server, answers: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """All images in each answer; every equation is weighted by the grid of its figure."""
    rows, values = [], []
    positives = 0
    for _ in range(answers):
        wanted = rng.choice([-1.0, 1.0], IMAGES) * rng.uniform(0.8, 1.0, IMAGES) * BOUND
        z, metrics = server.ask(wanted)
        score = metrics.classes[LABEL]
        positives = score.positives or IMAGES // 2
        if metrics.loss is not None:
            z = np.clip(z, -BOUND, BOUND)
            rows.append(z / BOUND)
            values.append((softplus(z).sum() - IMAGES * metrics.loss) / BOUND)
        if score.auroc is not None:
            pairs, fewer = positives * (IMAGES - positives), min(positives, IMAGES - positives)
            rows.append(rankdata(z) / fewer)
            values.append((score.auroc * pairs + positives * (positives + 1) / 2) / fewer)
    rows.append(np.full(IMAGES, 10.0))
    values.append(10.0 * positives)
    found = lsq_linear(np.array(rows), np.array(values), (0, 1)).x
    least = np.sort(found)[-positives - 1] if 0 < positives < IMAGES else 0.5
    return np.asarray(found > least)


Attack = Callable[[Server, int, np.random.Generator], NDArray[np.bool_]]
ATTACKS: dict[str, Attack] = {"bits": bits, "single": single, "dense": dense}


def right(attack: Attack, limits: str, answers: int, seed: int) -> int:
    """Return how many of the 72 labels the server has right after a number of answers."""
    with tempfile.TemporaryDirectory() as folder:
        target = victim(Path(folder) / "victim", seed, limits)
        guess = attack(Server(target), answers, np.random.default_rng([seed, 1]))
        return int((guess == target.y).sum())


def main(answers: tuple[int, ...] = (1, 2, 5, 10, 15, 30, 72), seeds: tuple[int, ...] = (1, 2, 3)) -> None:
    """Print a table: labels right, mean over the seeds."""
    torch.set_num_threads(1)
    rows = (
        (
            "default limits" if limits == STRICT else "six digits",
            name,
            *(f"{np.mean([right(attack, limits, count, seed) for seed in seeds]):.1f}" for count in answers),
        )
        for limits in (EXACT + "min_count = 0\n", STRICT)
        for name, attack in ATTACKS.items()
    )
    show(("figures", "server", *(f"{count} answers" for count in answers)), rows)


if __name__ == "__main__":
    command(main, answers=(1, 5), seeds=(1,))
