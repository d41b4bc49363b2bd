"""What is stored of a finished run of a study: AUROC by class, and the influence of each test patient.

Scores of 2,500 images and 14 classes would be 140 kB a run and tell of patients. Influences are 3 kB, carry
no name, and are all that the comparison of two runs on the same patients needs.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from suture.core.errors import ConfigError
from suture.core.files import read_json, read_records, read_toml
from suture.data.batch import Augmentation
from suture.data.config import load_site_config
from suture.execution.study import SERVER
from suture.learning.evaluation import ranking
from suture.learning.features import FeatureStore
from suture.learning.metrics import Floats
from suture.learning.samples import load_samples
from suture.learning.training import SiteContext, predict
from suture.models.saved import load_model, load_spec
from suture_papers.studies.design import Metric
from suture_papers.studies.inference import Measured, influence, recall_influence
from suture_results.saved_models import models_of

UNIT = 1e-5
"""Of the stored influences, which are whole numbers."""


@dataclass(frozen=True)
class Tested:
    """The scores of a run's models on the test images that its simulation holds out.

    Attributes:
        y: labels ``[n, c]``; NaN where unknown.
        labels: names of the c classes.
        patients: of each image.
        scores: of each model that the run left, ``[n, c]``; a class that it does not have is NaN.
    """

    y: Floats
    labels: tuple[str, ...]
    patients: tuple[str, ...]
    scores: tuple[Floats, ...]


def test_run(out: Path) -> Tested:
    """Return the scores of the models of a finished run.

    Raises:
        ConfigError: the simulation holds out no test images.
        SutureError: the test images cannot be read, or the run left no model.
    """
    described = out / "sites" / SERVER / "suture.toml"
    if "data" not in read_toml(described):
        raise ConfigError(
            f"the simulation of {out.name} holds out no test images at the server, which a study compares "
            "its rows on; choose another kind of sites"
        )
    config, found = load_site_config(described), []
    torch.set_num_threads(config.training.threads)  # as in the run: the stored features are of this number
    for folder in models_of(out).values():
        (model, prepare), spec = load_model(folder), load_spec(folder)
        labels, samples = load_samples(config, spec, SERVER, only="test")
        if spec.reads_features:  # those that the server has kept
            samples = FeatureStore(model, spec, samples, config.storage.feature_folder, SERVER).samples
        part, device = samples["test"], torch.device("cpu")
        logits = predict(SiteContext(SERVER, model, {"test": part}, prepare, Augmentation(), device), part)
        both = [name for name in labels.names if name in model.labels]
        of_both = logits[:, [model.labels.index(name) for name in both]]  # those that data annotate compete
        columns = np.full((len(part), len(labels)), math.nan)
        columns[:, [labels.index(name) for name in both]] = (
            ranking(of_both, labels.label_type).double().numpy()
        )
        found.append(columns)
    return Tested(part.y.double().numpy(), labels.names, part.patients, tuple(found))


test_run.__test__ = False  # type: ignore[attr-defined]


def record_test(out: Path, metric: Metric = "auroc") -> dict[str, Any]:
    """Return what is stored of a finished run.

    Returns:
        ``classes``, the metric of each, null where undefined or not learned; ``mean`` over those that the
        test images define, null where one of them was not learned; ``influence`` of each patient on the
        mean, in units of `UNIT`; ``test``, a digest of the patients and labels; ``images``; ``hidden``, the
        share of the labels of the training images that their sites do not annotate; and the facts of
        `record_validation`.

    Raises:
        SutureError: as `test_run`.
    """
    tested = test_run(out)
    names, patient = np.unique(np.asarray(tested.patients), return_inverse=True)
    areas: dict[str, float | None] = {}
    moved, defined = np.zeros(len(names)), 0
    for i, name in enumerate(tested.labels):
        y = tested.y[:, i]
        able = [scores for scores in tested.scores if not np.isnan(scores[:, i]).any()]
        # Of several models, those that have learned the class count, as their mean.
        if metric == "auroc":
            found = [influence(y, scores[:, i], patient, len(names)) for scores in able]
        else:
            hits = [(np.nanargmax(scores, axis=1) == i).astype(np.float64) for scores in able]
            found = [recall_influence(y, hit, patient, len(names)) for hit in hits]
        both = [one for one in found if one is not None]
        areas[name] = float(np.mean([area for area, _ in both])) if both else None
        defined += bool((y == 1).any() and (y == 0).any())
        if both:
            moved += np.mean([one for _, one in both], axis=0)
    known = [area for area in areas.values() if area is not None]
    mean = float(np.mean(known)) if known and len(known) == defined else None
    sites = read_json(out / "run.json", "sites")["sites"].values()
    every = sum(site["n"]["train"] for site in sites) * len(tested.labels)
    content = repr((tested.labels, tested.patients)).encode() + tested.y.tobytes()
    return {
        "classes": {name: None if area is None else round(area, 5) for name, area in areas.items()},
        "mean": None if mean is None else round(mean, 6),
        "influence": [round(value / UNIT) for value in (moved / max(1, defined)).tolist()],
        "test": hashlib.sha256(content).hexdigest()[:16],
        "images": len(tested.y),
        "hidden": round(1 - sum(site["n"]["train"] * len(site["labels"]) for site in sites) / every, 4),
        **record_validation(out, metric),
    }


def record_validation(out: Path, metric: Metric = "auroc") -> dict[str, Any]:
    """Return the validation metric of each round, of the server's images or else the sites' AUROC, and the
    seconds.
    """
    history = read_records(out / "history.jsonl")
    found = [line["validation"] for line in history]
    areas = [one["auroc"] if one[f"server_{metric}"] is None else one[f"server_{metric}"] for one in found]
    return {
        "validation": [None if area is None else round(area, 5) for area in areas],
        "seconds": round(sum(line["seconds"] for line in history), 1),
    }


def measured(record: Mapping[str, Any]) -> Measured:
    """Return a stored test."""
    mean = math.nan if record["mean"] is None else float(record["mean"])
    return Measured(mean, np.asarray(record["influence"], dtype=np.float64) * UNIT, record["test"])
