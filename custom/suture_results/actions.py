"""The commands on a study and on a model as functions, such as `suture.check` and `suture.evaluate`."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from suture.core.entry_points import hook
from suture.core.errors import ConfigError, DataError
from suture.core.escaping import number_of
from suture.core.files import read_json, write_json
from suture.core.validation import parse
from suture.data.config import SiteConfig, load_site_config, site_files
from suture.data.table import Split, Which
from suture.execution.job import TUNED, FineTuning
from suture.learning.calibration import log_odds
from suture.learning.decisions import operating
from suture.learning.metrics import Curves, Floats, histogram, rates
from suture.protocol.decisions import Decisions, DecisionSettings, Rule
from suture.protocol.messages import FEW
from suture_results import comparison, saved_models
from suture_results.card import try_card
from suture_results.comparison import ModelComparison
from suture_results.finetuning import tune_own
from suture_results.finetuning_results import FinetuningResults, read_finetuning_results
from suture_results.model_export.pictures import Drawn, explain_files
from suture_results.prediction import open_model
from suture_results.run_options import model_folder
from suture_results.saved_models import Evaluated, PerPatient
from suture_results.trained_images import remark

log = logging.getLogger(__name__)

AnyPath = str | Path
Format = Literal["onnx", "torch", "monai"]


@contextmanager
def labelled_data(path: Path, split: Which | None, usual: Split) -> Iterator[tuple[SiteConfig, Which]]:
    """Give the configuration of labelled data, and the split that is used of it.

    Args:
        path: a suture.toml, the folder of a site or of a study with one site, or a table or folder, which
            suture_prepare reads.
        split: the one that is wanted; by default `usual`, or all of a table that has no splits.

    Raises:
        ConfigError, DataError: it cannot be read.
    """
    if path.suffix == ".toml" or site_files(path):
        yield load_site_config(path), split or usual
    else:
        with hook("labelled_table")(path, split, usual) as found:
            yield found


def evaluate(
    model: AnyPath,
    data: AnyPath,
    split: Which | None = None,
    *,
    per_patient: PerPatient | None = None,
    device: str = "cpu",
) -> Evaluated:
    """Measure a saved model on labelled data.

    Args:
        model: a run, or its model/.
        data: a suture.toml, or a table or folder as `suture init` reads it.
        split: by default ``test``, and all images of a table that has no splits.
        per_patient: score patients; see `suture_results.saved_models.evaluate`.

    Raises:
        ConfigError, DataError: the model or the data cannot be read, or share no class.
    """
    folder = model_folder(model)
    with labelled_data(Path(data), split, "test") as (config, which):
        done = saved_models.evaluate(folder, config, which, device, per_patient=per_patient)
        return replace(done, remark=_warn(folder, config, which, split))


def _warn(model: Path, config: SiteConfig, which: Which, split: Which | None) -> str:
    """Log that images were among those of the training, or may have been; return the remark."""
    divided = split is not None or which != "all"
    if said := remark(model, config, which, divided=divided):
        log.warning("%s", said)
    return said


def compare(
    first: AnyPath,
    second: AnyPath,
    data: AnyPath,
    split: Which | None = None,
    *,
    per_patient: PerPatient | None = None,
    device: str = "cpu",
) -> ModelComparison:
    """Compare two saved models on the same images, class by class; arguments as for `evaluate`."""
    with labelled_data(Path(data), split, "test") as (config, which):
        folders = model_folder(first), model_folder(second)
        compared = comparison.compare(*folders, config, which, device, per_patient=per_patient)
        for folder in dict.fromkeys(folders):
            _warn(folder, config, which, split)
        return compared


@dataclass(frozen=True)
class Point:
    """A threshold, and what it does with the images that it was fitted to."""

    threshold: float
    sensitivity: float | None
    specificity: float | None
    positives: int
    negatives: int


def decide(
    model: AnyPath,
    data: AnyPath,
    split: Which | None = None,
    *,
    settings: DecisionSettings | Mapping[str, Any] | None = None,
    overwrite: bool = False,
    device: str = "cpu",
) -> dict[str, Point]:
    """Fit thresholds and calibration of a trained model to validation data, and write them into model.json.

    Predictions with ``decide``, exports and reports use them from then on; the weights stay as they are. If
    the folder was signed, sign it again.

    Args:
        data: as for `evaluate`; none that the model was trained or will be tested on.
        split: by default ``validation``, and all images of a table that has no splits.
        settings: the rule and its target, or the keys of ``[decision]``; by default a sensitivity of 0.9.
        overwrite: replace the thresholds that the model has.

    Returns:
        the threshold of each class that the data let fit one.

    Raises:
        ConfigError: the model has thresholds already.
        DataError: no class has `FEW` positive and negative images.
    """
    if not isinstance(settings, DecisionSettings):
        settings = parse(DecisionSettings, settings or {}, "suture decide")
    folder = model_folder(model)
    open_model(folder)  # raises where there is none
    described = read_json(folder / "model.json")
    if described.get("decisions") and not overwrite:
        raise ConfigError(f"{folder} has thresholds already; --overwrite replaces them")
    with labelled_data(Path(data), split, "validation") as (config, which):
        done = saved_models.evaluate(folder, config, which, device)
        _warn(folder, config, which, split)
    alone = np.arange(len(done.patients))
    points, found = {}, {}
    for name, score in done.classes.items():
        y, p = (of[:, done.labels.index(name)].astype(np.float64) for of in (done.y, done.predicted))
        kinds = (histogram(log_odds(p[y == kind]), alone[y == kind], 0) for kind in (1, 0))
        counts = [kind for kind in kinds if kind is not None]
        fitted = operating(Curves.of([(counts[0], counts[1])]), settings) if len(counts) == 2 else None
        if fitted is None:
            n = number_of(score.positives or 0, "positive"), number_of(score.negatives or 0, "negative")
            log.warning("%s gets no threshold from %s and %s; %d of each are needed", name, *n, FEW)
            continue
        known = ~np.isnan(y)
        targets = settings.sensitivity, settings.specificity, settings.cost
        points[name] = replace(fitted, thresholds=exact_thresholds(y[known], p[known], *targets))
        threshold = points[name].thresholds[settings.rule]
        at = rates(y[known], p[known] >= threshold)
        found[name] = Point(threshold, *at, int((y == 1).sum()), int((y == 0).sum()))
    if not found:
        raise DataError(
            f"{data}: no class of the model has {FEW} positive and {FEW} negative rows of {which}"
        )
    decisions = {"decisions": asdict(Decisions(settings, points)), "decided_on": len(done.patients)}
    write_json(folder / "model.json", described | decisions)
    if (folder.parent / "run.json").is_file():
        try_card(folder.parent)
    return found


def explain(
    model: AnyPath,
    sources: AnyPath | Sequence[AnyPath],
    out: AnyPath,
    classes: Sequence[str] = (),
    images: int = 20,
    kind: str = "grad-cam",
) -> Drawn:
    """Draw the regions that predictions depend on; see `pictures.explain_files`."""
    given = [sources] if isinstance(sources, (str, Path)) else sources
    return explain_files(model_folder(model), list(map(Path, given)), Path(out), tuple(classes), images, kind)


def export(model: AnyPath, to: Format, out: AnyPath, *, licence: str = "", opset: int | None = None) -> Path:
    """Write a model as files that other programs load without Suture; return their folder.

    Args:
        to: ``onnx``; ``torch``, a program for torch.export.load; or ``monai``, a bundle.
        licence: text of the LICENSE of a bundle.
        opset: version of the ONNX operators.

    Raises:
        ConfigError: there is no model, or an argument is for another format.
    """
    folder = model_folder(model)
    if opset is not None and to != "onnx":
        raise ConfigError("--opset is for --to onnx")
    if licence and to != "monai":
        raise ConfigError("--license is for --to monai")
    if to == "onnx":
        from suture_results.model_export.onnx import write_onnx  # which needs the extra `onnx`

        return write_onnx(folder, Path(out), opset)
    if to == "monai":
        from suture_results.model_export.bundle import NO_LICENCE, write_bundle

        return write_bundle(folder, Path(out), licence or NO_LICENCE)
    from suture_results.model_export.program import write_torch

    return write_torch(open_model(folder), Path(out))


def finetune(
    model: AnyPath,
    data: AnyPath,
    out: AnyPath,
    target: str | None = None,
    epochs: int = 10,
    runs: int = 5,
    examples: int | None = None,
    fresh: bool = False,
    seed: int = 1,
) -> FinetuningResults:
    """Fine-tune a trained model on a task of your own, and test it; the test split of the data stays out.

    Args:
        data: a suture.toml; learning rate, batch size, device, threads and precision are those of [training].
        out: folder of tuned.json, and of the model of the first run.
        target: class to train; by default [data] target.
        runs: random splits of the data, each of which trains a model.
        examples: largest number of training examples.
        fresh: start from random weights, for comparison.

    Raises:
        ConfigError: `out` holds a model already, or a setting does not fit.
    """
    folder = Path(out)
    if (folder / TUNED).exists():
        raise ConfigError(f"{folder} already holds a fine-tuned model; choose another --out")
    config = load_site_config(Path(data))
    if target is not None:
        config = config.model_copy(update={"data": config.data.model_copy(update={"target": target})})
    steps = {"lr": config.training.lr, "batch_size": config.training.batch_size}
    settings: dict[str, Any] = {"runs": runs, "epochs": epochs, "examples": examples}
    settings |= {"start": "fresh" if fresh else "model"}
    settings |= {key: value for key, value in steps.items() if value is not None}
    how = parse(FineTuning, settings, "suture finetune")
    tune_own(model_folder(model), Path(data), config, how, seed, folder)
    found = read_finetuning_results(folder)
    assert found is not None
    return found


def exact_thresholds(
    y: Floats, p: Floats, sensitivity: float, specificity: float, cost: float
) -> dict[Rule, float]:
    """Return the thresholds of `thresholds` from the scores themselves, halfway to the next lower score.

    Args:
        y: labels ``[n]``: 1 and 0, of both at least one.
        p: probabilities ``[n]``.
    """
    cutoffs = np.append(np.unique(p), 1.0)  # at and above the last no image is positive, but for a score of 1
    sens = 1 - np.searchsorted(np.sort(p[y == 1]), cutoffs) / (y == 1).sum()
    spec = np.searchsorted(np.sort(p[y == 0]), cutoffs) / (y == 0).sum()
    prevalence = float((y == 1).mean())
    loss = cost * prevalence * (1 - sens) + (1 - prevalence) * (1 - spec)
    places: dict[Rule, int] = {
        "sensitivity": int(np.flatnonzero(sens >= sensitivity - 1e-12)[-1]),
        "specificity": int(np.argmax(spec >= min(specificity, spec[-1]) - 1e-12)),
        "youden": int(np.argmax(np.round(sens + spec, 12))),
        "cost": int(np.argmin(np.round(loss, 12))),
    }
    below = np.append(0.0, cutoffs[:-1])
    return {rule: float((cutoffs[i] + below[i]) / 2) for rule, i in places.items()}
