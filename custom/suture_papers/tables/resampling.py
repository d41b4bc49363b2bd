"""The metrics of a finished run of a study on draws of its test patients.

A two-level bootstrap needs, for each run, how its figures vary with the patients who happen to be in the test
set. Scores would do, but 2,500 images of 14 classes are 140 kB a run and tell of patients. So each run stores
`DRAWS` values of each metric instead, 3 kB that can lie in a repository. How often draw b takes a patient is
a Poisson number of mean 1 that depends on b and the patient's name alone (Hanley and MacGibbon 2006, Comput
Methods Programs Biomed 83:57). So it is the same in all rows, whose difference at draw b is then paired, as
if it had been computed from both models' scores; and in all seeds, whose test sets share patients. Scores
stay in the run's folder.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from suture.core.errors import ConfigError, DataError
from suture.core.files import named_regular, read_json, read_toml
from suture.core.labels import LabelType
from suture.core.runtime import seed_for
from suture.data.batch import Augmentation
from suture.data.config import load_site_config
from suture.execution.study import SERVER
from suture.learning.evaluation import ranking
from suture.learning.features import FeatureStore
from suture.learning.metrics import Floats, auroc, bootstrap_auroc, weighted_auroc
from suture.learning.samples import load_samples
from suture.learning.training import SiteContext, predict
from suture.models.saved import load_model, load_spec
from suture_papers.tables.spec import Metric
from suture_papers.tables.statistics import clustered_delong
from suture_results.saved_models import models_of

DRAWS = 200
"""Draws of patients in each run. A two-level bootstrap takes one of them for each seed that it draws."""

SCORES = "test_scores.npz"
"""In the folder of a run."""

Weighted = Callable[[Floats, NDArray[np.bool_], Floats], Floats]


@dataclass(frozen=True)
class TestScores:
    """The scores of a run's models on the test images that its simulation holds out.

    Attributes:
        y: labels ``[n, c]``; NaN where unknown.
        labels: names of the c classes.
        label_type: of these labels.
        patients: of each image.
        scores: of each model that the run left, ``[n, c]``; a class that it does not have is NaN.
    """

    __test__ = False  # not a test of pytest's

    y: Floats
    labels: tuple[str, ...]
    label_type: LabelType
    patients: tuple[str, ...]
    scores: tuple[Floats, ...]


def test_scores(out: Path) -> TestScores:
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
    return TestScores(part.y.double().numpy(), labels.names, labels.label_type, part.patients, tuple(found))


test_scores.__test__ = False  # type: ignore[attr-defined]


def resample(out: Path, metrics: Sequence[Metric]) -> dict[str, Any]:
    """Return what a study stores of a finished run beside its figures.

    Returns:
        ``train`` and ``n``, the numbers of training and test images; ``overlap``, whether runs of other seeds
        share patients (synthetic images are drawn anew); ``patients``, the number with test images;
        ``test``, a digest of these patients and their labels, equal where draws are paired; and by metric the
        ``value`` and the values of the ``draws``, to four digits, null where undefined. {} without metrics.

    Raises:
        SutureError: as `test_scores`.
    """
    if not metrics:
        return {}
    of = _keep(out) if (out / SCORES).exists() else test_scores(out)
    np.savez_compressed(out / SCORES, **vars(of))
    facts = read_json(out / "run.json", "sites")
    content = repr(("Poisson", of.labels, of.patients)).encode() + of.y.tobytes()
    found: dict[str, Any] = {
        "train": sum(site["n"]["train"] for site in facts["sites"].values()),
        "overlap": not facts.get("synthetic", False),
        "n": len(of.y),
        "patients": len(set(of.patients)),
        "test": hashlib.sha256(content).hexdigest()[:16],
    }
    return found | {name: draw(of, name) for name in metrics}


def compared_classes(runs: Mapping[str, Path]) -> dict[str, dict[str, dict[str, float | None]]]:
    """Compare the models of finished runs, class by class, with that of the first run: `clustered_delong`.

    Args:
        runs: the folder of each row's run; runs of one seed, so of the same test images.

    Returns:
        By row and class ``auroc``, ``low`` and ``high`` (95 % interval over patients), and of all rows but
        the first ``p``, null where a class has too few patients. A row with models of single sites is left
        out: none of these has all classes.

    Raises:
        DataError: a folder has no scores.
    """
    found: dict[str, dict[str, dict[str, float | None]]] = {}
    first = None
    for row, out in runs.items():
        of = _keep(out)
        if len(of.scores) > 1:
            continue
        first = first or of
        found[row] = {}
        for i, name in enumerate(of.labels):
            y, own = of.y[:, i], of.scores[0][:, i]
            bounds = bootstrap_auroc(y, own, of.patients)
            values = dict(zip(("auroc", "low", "high"), (auroc(y, own), *bounds), strict=True))
            if of is not first:
                enough = min(len({p for p, v in zip(of.patients, y, strict=True) if v == k}) for k in (0, 1))
                theirs = first.scores[0][:, i]
                values["p"] = clustered_delong(y, theirs, own, of.patients).p if enough > 1 else math.nan
            found[row][name] = {k: None if math.isnan(v) else round(v, 6) for k, v in values.items()}
    return found


def _keep(out: Path) -> TestScores:
    """Return the scores that `resample` has kept in the folder of a run: its images may be gone."""
    if not (out / SCORES).exists():
        raise DataError(f"{out} has no {SCORES}; delete the run's line and its folder, and it is done again")
    with named_regular(out / SCORES) as opened, np.load(opened, allow_pickle=False) as kept:
        labels, patients = (tuple(map(str, kept[key])) for key in ("labels", "patients"))
        label_type: LabelType = "multiclass" if str(kept["label_type"]) == "multiclass" else "multilabel"
        return TestScores(kept["y"], labels, label_type, patients, tuple(kept["scores"]))


def draw(of: TestScores, metric: Metric, draws: int = DRAWS) -> dict[str, Any]:
    """Return a metric of the test images as they are, ``value``, and on `draws` draws of their patients.

    Raises:
        DataError: balanced accuracy of multilabel data.
    """
    names, patient = np.unique(np.asarray(of.patients), return_inverse=True)
    rngs = [np.random.default_rng(seed_for("patient of a study", str(name))) for name in names]
    often = np.stack([rng.poisson(1.0, draws) for rng in rngs], axis=1).astype(np.float64)
    values: list[float] = []
    for some in (np.ones((1, len(names))), *np.array_split(often, max(1, draws // 50))):
        values += map(float, _mean_over_classes(of, metric, some[:, patient]))
    plain = [None if math.isnan(v) else round(v, 4) for v in values]
    return {"value": None if math.isnan(values[0]) else round(values[0], 6), "draws": plain[1:]}


def _mean_over_classes(of: TestScores, metric: Metric, weights: Floats) -> Floats:
    """Return the mean over the classes that a draw defines, ``[draws]``.

    NaN where no model of the run has learned some class that has both labels in the test set. Of several
    models, a class has the mean of those that have learned it.
    """
    if metric == "balanced_accuracy" and of.label_type == "multilabel":
        raise DataError("balanced accuracy is for multiclass labels; take auroc and ap")
    figure: Weighted = {"auroc": weighted_auroc, "ap": weighted_ap}.get(metric, _weighted_recall)
    classes = []
    for i in range(len(of.labels)):
        known = ~np.isnan(of.y[:, i])
        truth = of.y[known, i] == 1
        if truth.all() or not truth.any():
            continue
        able = [scores for scores in of.scores if not np.isnan(scores[:, i]).any()]
        if metric == "balanced_accuracy":
            able = [np.where(np.nanargmax(scores, axis=1) == i, 1.0, 0.0)[:, None] for scores in able]
        columns = [scores[known, 0 if metric == "balanced_accuracy" else i] for scores in able]
        if not columns:
            return np.full(len(weights), math.nan)
        classes.append(np.mean([figure(weights[:, known], truth, one) for one in columns], axis=0))
    if not classes:
        return np.full(len(weights), math.nan)
    each = np.stack(classes)
    defined = (~np.isnan(each)).sum(axis=0)
    return np.where(defined > 0, np.nansum(each, axis=0) / np.maximum(defined, 1), math.nan)


def weighted_ap(weights: Floats, truth: NDArray[np.bool_], score: Floats) -> Floats:
    """Return the average precision for each row of weights: the sum over thresholds of the gain in recall
    times precision.

    Thresholds are the distinct scores, from the highest on, so that ties count at once; there is no
    interpolation (scikit-learn's `average_precision_score`).

    Args:
        weights: ``[draws, n]``, how often each image counts.
        truth: ``[n]``.
        score: ``[n]``, any scale.

    Returns:
        ``[draws]``; NaN where no positive has a weight.
    """
    order = np.argsort(-score, kind="stable")
    last = np.append(np.flatnonzero(np.diff(score[order])), len(score) - 1)  # of each group of ties
    found = np.cumsum(weights[:, order] * truth[order], axis=1)[:, last]
    taken = np.cumsum(weights[:, order], axis=1)[:, last]
    gained = np.diff(found, axis=1, prepend=0.0)
    precision = np.divide(found, taken, out=np.zeros_like(found), where=taken > 0)
    areas = np.full(len(weights), math.nan)
    np.divide((gained * precision).sum(axis=1), found[:, -1], out=areas, where=found[:, -1] > 0)
    return areas


def _weighted_recall(weights: Floats, truth: NDArray[np.bool_], hit: Floats) -> Floats:
    positives = weights[:, truth].sum(axis=1)
    recall = np.full(len(weights), math.nan)
    np.divide((weights * hit)[:, truth].sum(axis=1), positives, out=recall, where=positives > 0)
    return recall
