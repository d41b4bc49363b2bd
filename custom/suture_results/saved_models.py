"""Evaluating a saved model on any labelled data, such as a test set that its training never used."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from suture.core.errors import DataError, FederationError
from suture.core.escaping import as_cell
from suture.core.files import atomic_write, read_json
from suture.core.labels import LabelSet
from suture.core.runtime import generator_for
from suture.data.batch import Augmentation, Samples, columns
from suture.data.config import SiteConfig
from suture.data.images import ImageSource
from suture.data.table import Split
from suture.learning.evaluation import among_annotated, entropy, mean_interval, ranking
from suture.learning.metrics import mean_defined, mean_sd, score_classes
from suture.learning.samples import load_samples
from suture.learning.steps import probabilities
from suture.learning.training import SiteContext, predict
from suture.models.saved import load_model, load_spec
from suture.protocol.messages import ClassScore
from suture_results.class_names import class_names

_BOOTSTRAP = 1000
_BATCH = 256

GLOBAL = "global"
"""The key of the global model among the models that a run left."""

PerPatient = Literal["mean", "max"]


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
        scores: probabilities [n, len(labels)] that are measured; where an image has one label they are among
            `tested`, NaN for others.
        predicted: those that `Model.predict` gives, among all of `labels`.
        images: name of each image; none where patients are scored.
        patients: patient of each image.
        called: what the data call each of `tested`; see `class_names`.
        classes: AUROC of each of `tested`, with its interval and counts.
        unlearned: classes of the data that the model does not have.
        together: figures of `tested`.
        groups: for each group with a class of `tested`, by its name, the figures of these classes.
        remark: what makes the figures too good, as far as is known; see `suture_results.trained_images`.
    """

    labels: tuple[str, ...]
    tested: tuple[str, ...]
    y: NDArray[np.float32]
    scores: NDArray[np.float32]
    predicted: NDArray[np.float32]
    patients: tuple[str, ...]
    classes: Mapping[str, ClassScore]
    unlearned: tuple[str, ...]
    together: GroupFigures
    groups: Mapping[str, GroupFigures] = field(default_factory=dict)
    images: tuple[str, ...] = ()
    called: Mapping[str, str] = field(default_factory=dict)
    remark: str = ""

    @property
    def columns(self) -> dict[str, int]:
        """The columns of the tested classes under the data's names, by which several models are compared."""
        return {self.called[name]: self.labels.index(name) for name in self.tested}

    @property
    def others(self) -> list[str]:
        """The classes of the model that do not compete: the data do not label them, and an image has one."""
        return [name for name, p in zip(self.labels, self.scores.T, strict=True) if np.isnan(p).any()]

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
    split: Split | Literal["all"],
    device: str = "cpu",
    groups: Mapping[str, Collection[str]] | None = None,
    per_patient: PerPatient | None = None,
) -> Evaluated:
    """Evaluate a saved model on one split of a site's data, or on all.

    Args:
        groups: further groups of classes to measure together, by name.
        per_patient: score patients: the mean or the largest of the probabilities of a patient's images. A
            patient has a class if one of the images has it, and lacks it if none has and one is known to lack
            it.

    Raises:
        ConfigError: the folder holds no model.
        DataError: the data cannot be read, have nothing in the split, or share no class with the model.
    """
    labels, part, logits, called = _predict(model_folder, config, split, device)
    if per_patient:
        part, logits = _of_patients(part, logits, labels, per_patient)
    names = labels.names
    tested = tuple(name for name in names if name in called)
    where = [labels.index(name) for name in tested]
    predicted = probabilities(logits.double(), labels.label_type).numpy().astype(np.float32)
    logits, scores = among_annotated(logits, part.y, labels.label_type), predicted
    if labels.label_type == "multiclass":
        scores = probabilities(logits.double(), labels.label_type).numpy().astype(np.float32)
        scores[:, [i for i in range(len(names)) if i not in where]] = np.nan
    y, ranked = part.y.numpy(), ranking(logits, labels.label_type).numpy()
    classes = score_classes(tested, y[:, where], ranked[:, where], part.patients, _BOOTSTRAP)
    known = {name: [c for c in tested if c in group] for name, group in (groups or {}).items()}

    def together(names: Sequence[str]) -> GroupFigures:
        return _together({name: classes[name] for name in names}, part, logits, labels)

    return Evaluated(
        names,
        tested,
        y,
        scores,
        predicted,
        part.patients,
        classes,
        tuple(own for name, own in called.items() if name not in names),
        together(tested),
        {name: together(some) for name, some in known.items() if some},
        _as_predicted(config, part.names),
        {name: called[name] for name in tested},
    )


def _as_predicted(config: SiteConfig, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the paths of images as `Model.predict` names them; the names of documents are those of both."""
    if config.data.holds_text or not config.data.root.exists() or not names:
        return names
    with ImageSource(config.data.root, config.data.follow_links) as source:
        return tuple(source.path(name) if source.missing(name) is None else name for name in names)


def _predict(
    model_folder: Path, config: SiteConfig, split: Split | Literal["all"], device: str
) -> tuple[LabelSet, Samples, Tensor, dict[str, str]]:
    """Return the model's classes, the samples with these as columns, their logits, and the data's names of
    their classes by the model's.
    """
    model, prepare = load_model(model_folder)
    only: Split | None = None if split == "all" else split
    own, samples = load_samples(config, load_spec(model_folder), config.data.root.name, only=only)
    known = class_names(model_folder, own, config.data.stated_codes())
    mine, names = LabelSet(tuple(known.values()), own.label_type), model.labels.names
    parts = [columns(part, mine, model.labels) for part in samples.values() if len(part)]
    if not parts and only is None:
        raise DataError(f"{config.data.table} has no row in any split; check its split column")
    if not parts:
        raise DataError(f"{config.data.table} has no row of the split {split}; choose another --split")
    if not set(names) & set(mine.names):
        raise DataError(f"{config.data.table} labels none of the model's classes: {', '.join(names)}")
    where, plain = torch.device(device), Augmentation()
    context = SiteContext("evaluation", model.to(where), samples, prepare, plain, where, batch_size=_BATCH)
    logits = torch.cat([predict(context, part) for part in parts])
    patients, images = (
        tuple(chain.from_iterable(getattr(part, name) for part in parts)) for name in ("patients", "names")
    )
    whole = Samples({}, torch.cat([part.y for part in parts]), patients, images)
    return model.labels, whole, logits, {name: called for called, name in known.items()}


def _of_patients(part: Samples, logits: Tensor, labels: LabelSet, how: PerPatient) -> tuple[Samples, Tensor]:
    """Return a sample for each patient, and log-odds, or log-probabilities, of its images together."""
    whose = np.asarray(part.patients)
    p = pd.DataFrame(probabilities(logits.double(), labels.label_type).numpy()).groupby(whose).agg(how)
    y = pd.DataFrame(part.y.numpy()).groupby(whose).max()  # of the known labels
    scores = torch.from_numpy(p.to_numpy(copy=True)).clamp(1e-15, 1 - 1e-15)
    joined = scores.logit() if labels.label_type == "multilabel" else scores.log()
    return Samples({}, torch.from_numpy(y.to_numpy(copy=True)), tuple(map(str, y.index))), joined


def _together(
    scores: Mapping[str, ClassScore], part: Samples, logits: Tensor, labels: LabelSet
) -> GroupFigures:
    """Return the figures of some classes together, from samples with the model's classes as columns."""
    others = [i for i, name in enumerate(labels.names) if name not in scores]
    y = part.y.clone()
    y[:, others] = torch.nan
    return GroupFigures(
        entropy(replace(part, y=y), logits, labels.label_type),
        mean_interval(part, logits, labels, scores, _BOOTSTRAP, seed=0),
    )


def models_of(run: Path) -> dict[str, Path]:
    """Return the folders of the models that a run left: the global one, under `GLOBAL`, or one of each site.

    Raises:
        FederationError: there is none.
    """
    if (run / "model" / "model.json").exists():
        return {GLOBAL: run / "model"}
    experiment = read_json(run / "run.json", "experiment")["experiment"]
    sites = sorted((run / "sites").glob(f"*/state/**/{experiment}/model/model.json"))
    if not sites:
        raise FederationError(f"{run} has no model; delete the folder, and the run is done again")
    return {path.relative_to(run / "sites").parts[0]: path.parent for path in sites}


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
        **({"remark": done.remark} if done.remark else {}),
    }


def write_scores(done: Evaluated, path: Path) -> None:
    """Write a CSV with a row per image, or patient: image and patient as `predict` names them, then label and
    probability of every class; blank is unknown, or a class that did not compete.

    Names are written by `as_cell`.

    Raises:
        OSError: the file cannot be written.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [as_cell(name) for name in done.labels]
    writer.writerow(["image", "patient", *(f"{name} label" for name in names), *names])
    images = done.images or [""] * len(done.patients)
    for image, patient, y, scores in zip(images, done.patients, done.y, done.scores, strict=True):
        cells = (
            "" if np.isnan(v) else f"{v:{form}}" for row, form in ((y, "g"), (scores, ".6f")) for v in row
        )
        writer.writerow([as_cell(image), as_cell(patient), *cells])
    atomic_write(path, text.getvalue().encode(), private=True)


@torch.no_grad()
def features_of(
    folder: Path,
    configs: Mapping[str, SiteConfig],
    split: Split,
    images: int = 500,
    seed: int = 1,
    device: str = "cpu",
) -> dict[str, NDArray[np.float32]]:
    """Return a saved model's features, [n, d], of some images of each source.

    Args:
        configs: the data of each source by its name.
        images: the largest number of images of a source; they are chosen at random.

    Raises:
        ConfigError: there is no model.
        DataError: the data cannot be read, or a source has no image in the split.
    """
    model, prepare = load_model(folder)
    spec = load_spec(folder)
    model.to(device)
    found = {}
    for name, config in configs.items():
        _, samples = load_samples(config, spec, name, only=split)
        part = samples[split]
        if not len(part):
            raise DataError(
                f"{name}: {config.data.table} has no row of the split {split}; choose another --split"
            )
        order = torch.randperm(len(part), generator=generator_for(seed, "latent", name))[:images]
        features = []
        for rows in torch.split(order, _BATCH):
            pixels = prepare(part.batch(rows).inputs["image"].to(device))
            features.append(model.features({"image": pixels}).cpu())
        found[name] = torch.cat(features).numpy()
    return found
