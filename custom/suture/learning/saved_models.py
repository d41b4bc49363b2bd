"""Evaluating a saved model on any labelled data, such as a test set that its training never used."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from suture.core.errors import DataError
from suture.core.files import atomic_write, make_folder
from suture.core.labels import LabelSet
from suture.core.spreadsheets import as_cell
from suture.data.augmentation import Augmentation
from suture.data.batch import Samples, columns
from suture.data.config import SiteConfig
from suture.data.table import Split
from suture.learning.evaluation import entropy, mean_interval, ranking
from suture.learning.losses import probabilities
from suture.learning.metrics import mean_defined, mean_sd, score_classes
from suture.learning.samples import load_samples
from suture.learning.training import SiteContext, predict
from suture.models.saved import load_model, load_spec
from suture.protocol.messages import ClassScore

_BOOTSTRAP = 1000


@dataclass(frozen=True)
class GroupFigures:
    """Figures of some classes together.

    Attributes:
        loss: cross-entropy of their known labels; None if no label is known.
        bounds: 95 % interval of their mean AUROC; None if undefined.
    """

    loss: float | None
    bounds: tuple[float, float] | None


@dataclass(frozen=True)
class Evaluated:
    """A model's scores on a test set.

    Attributes:
        labels: the classes of the model.
        tested: the classes of the model that the data label.
        y: labels [n, len(labels)], NaN where unknown.
        scores: probabilities [n, len(labels)].
        patients: patient of each image.
        classes: AUROC of each of `tested`, with its interval and counts.
        unlearned: classes of the data that the model does not have.
        together: figures of `tested`.
        groups: for each group with a class of `tested`, by its name, the figures of these classes.
    """

    labels: tuple[str, ...]
    tested: tuple[str, ...]
    y: NDArray[np.float32]
    scores: NDArray[np.float32]
    patients: tuple[str, ...]
    classes: Mapping[str, ClassScore]
    unlearned: tuple[str, ...]
    together: GroupFigures
    groups: Mapping[str, GroupFigures] = field(default_factory=dict)

    @property
    def loss(self) -> float | None:
        """Cross-entropy of the known labels of `tested`."""
        return self.together.loss

    @property
    def mean(self) -> float | None:
        """Mean AUROC over the classes of the data; None if the model lacks one of them.

        Kulkarni et al. 2024, Sec. 4.3.
        """
        return None if self.unlearned else mean_defined(s.auroc for s in self.classes.values())

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of `mean`."""
        return None if self.mean is None else self.together.bounds

    @property
    def spread(self) -> float | None:
        """The population SD of the AUROC over the classes of `mean`."""
        spread = mean_sd([score.auroc for score in self.classes.values()], sample=False)[1]
        return None if self.mean is None or math.isnan(spread) else spread


def evaluate(
    model_folder: Path,
    config: SiteConfig,
    split: Split,
    device: str = "cpu",
    groups: Mapping[str, Collection[str]] | None = None,
) -> Evaluated:
    """Evaluate a saved model on one split of a site's data.

    Args:
        groups: further groups of classes to measure together, by name.

    Raises:
        ConfigError: the folder holds no model.
        DataError: the data cannot be read, have nothing in the split, or share no class with the model.
    """
    labels, part, logits, own = _predict(model_folder, config, split, device)
    names = labels.names
    tested = tuple(name for name in names if name in own)
    where = [labels.index(name) for name in tested]
    y, ranked = part.y.numpy(), ranking(logits, labels.label_type).numpy()
    known = {name: [c for c in tested if c in group] for name, group in (groups or {}).items()}
    return Evaluated(
        names,
        tested,
        y,
        probabilities(logits.double(), labels.label_type).numpy().astype(np.float32),
        part.patients,
        score_classes(tested, y[:, where], ranked[:, where], part.patients, _BOOTSTRAP),
        tuple(name for name in own if name not in names),
        _together(tested, part, logits, labels),
        {name: _together(some, part, logits, labels) for name, some in known.items() if some},
    )


def _predict(
    model_folder: Path, config: SiteConfig, split: Split, device: str
) -> tuple[LabelSet, Samples, Tensor, LabelSet]:
    """Return the model's classes, the samples with these as columns, their logits, and the site's classes."""
    model, prepare = load_model(model_folder)
    own, samples = load_samples(config, load_spec(model_folder), config.data.root.name, only=split)
    part, names = samples[split], model.labels.names
    if not len(part):
        raise DataError(f"{config.data.table} has no {split} images; choose another --split")
    if not set(names) & set(own.names):
        raise DataError(f"{config.data.table} labels none of the model's classes: {', '.join(names)}")
    context = SiteContext(
        "evaluation", model.to(device), samples, prepare, Augmentation(), torch.device(device), batch_size=256
    )
    return model.labels, columns(part, own, model.labels), predict(context, part), own


def _together(names: Sequence[str], part: Samples, logits: Tensor, labels: LabelSet) -> GroupFigures:
    """Return the figures of the classes of `names`, from samples with the model's classes as columns."""
    others = [i for i, name in enumerate(labels.names) if name not in names]
    y = part.y.clone()
    y[:, others] = torch.nan
    return GroupFigures(
        entropy(replace(part, y=y), logits, labels.label_type),
        mean_interval(part, logits, labels, names, _BOOTSTRAP, seed=0),
    )


def as_metrics(done: Evaluated) -> dict[str, Any]:
    """Return the figures as plain values."""
    return {
        "n": len(done.patients),
        "mean_auroc": done.mean,
        "mean_interval": done.interval,
        "loss": done.loss,
        "sd_auroc": done.spread,
        "auroc": {name: score.auroc for name, score in done.classes.items()},
        "classes": {name: asdict(score) for name, score in done.classes.items()},
        "unlearned": list(done.unlearned),
    }


def write_scores(done: Evaluated, path: Path) -> None:
    """Write a CSV with a row per image: patient, label and probability of every class; blank is unknown.

    Names of patients and classes are written by `as_cell`.

    Raises:
        OSError: the file cannot be written.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [as_cell(name) for name in done.labels]
    writer.writerow(["patient", *(f"{name} label" for name in names), *names])
    for patient, y, scores in zip(done.patients, done.y, done.scores, strict=True):
        known = ("" if np.isnan(v) else f"{v:g}" for v in y)
        writer.writerow([as_cell(patient), *known, *(f"{s:.6f}" for s in scores)])
    make_folder(path.parent)
    atomic_write(path, text.getvalue().encode())
