"""Fine-tuning: a trained model is trained further on a learning task that no site has, and tested on it.

Zhang et al. (PMFL), arXiv:2112.05321, Sec. IV: training starts from the server's model; 90 % of the data
train, 10 % test, for ten epochs, five times. The learning curve shows what the trained model saves. The
results are written to tuned.json.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from suture.core.errors import ConfigError, DataError
from suture.core.files import write_json
from suture.core.labels import LabelSet, canonical
from suture.core.runtime import check_device, seed_for
from suture.data.batch import Augmentation, Samples
from suture.data.config import SiteConfig, load_site_config
from suture.data.readers import load_table
from suture.data.split import by_patient
from suture.data.table import Split
from suture.execution.job import TUNED, FineTuning
from suture.execution.sites import TARGETS
from suture.learning.metrics import auroc, youden
from suture.learning.samples import TARGET, load_samples, single_target
from suture.learning.steps import masked_bce
from suture.learning.training import LocalRound, LocalTraining, SiteContext, fit, on_known, predict
from suture.models import ModelSpec, build
from suture.models.classifier import AMP_DTYPES, HEADS, Classifier, load_tensors
from suture.models.saved import load_model, load_spec, save_model
from suture.protocol.messages import Labels
from suture_results.class_names import class_names

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tuned:
    """The figures of one run: the AUROC after each epoch, and those at a threshold after the last.

    The threshold is that of the greatest Youden index on the test scores themselves, as in the paper.

    Attributes:
        train, test: numbers of examples.
        positives: of the test examples.
        cases: the names of the test examples.
    """

    auroc: tuple[float, ...]
    precision: float
    recall: float
    f1: float
    train: int
    test: int
    positives: int
    cases: tuple[str, ...] = ()


def tune_targets(run: Path, how: FineTuning, seed: int, tasks: Path | None = None) -> None:
    """Fine-tune the model of a run on every learning task of a folder, and write tuned.json.

    Args:
        tasks: a folder with a subfolder for each task; by default that of the run's own simulation.

    Raises:
        ConfigError: the folder has no task.
        SutureError: the data of a task cannot be read, or are too few.
    """
    files = sorted((tasks or run / "sites" / TARGETS).glob("*/suture.toml"))
    if not files:
        raise ConfigError(f"{run} has no task to fine-tune on; name some in simulation.targets")
    found = {}
    for file in files:
        config = load_site_config(file)
        name = task_name(config)
        variants = {name: how}
        if how.few is not None:
            variants[f"{name}, {how.few} examples"] = dataclasses.replace(how, examples=how.few)
        for title, settings in variants.items():
            log.info("fine-tuning on %s", title)
            found[title] = summarise(
                [tuned for _, tuned in tune(run / "model", config, name, settings, seed)]
            )
    _write(run / TUNED, how, seed, found)


def _write(path: Path, how: FineTuning, seed: int, targets: Mapping[str, Any], **origin: str) -> None:
    write_json(path, {"how": dataclasses.asdict(how), "seed": seed, **origin, "targets": targets})


def tune_own(model: Path, data: Path, config: SiteConfig, how: FineTuning, seed: int, out: Path) -> None:
    """Fine-tune a saved model on a task of one's own; write tuned.json and the model of the first run.

    The test split of the data stays out, so that it measures the model. tuned.json says where the trained
    model and the data are, by which `suture_results.trained_images` knows the cases.

    Args:
        model, config: as of `tune`; the class is the target of the data, or its only one.
        data: the file of the configuration.
        out: gets tuned.json and model/.

    Raises:
        ConfigError, DataError: as `tune`.
    """
    name = task_name(config)
    runs = tune(model, config, name, how, seed, ("train", "validation"))
    first, figures = next(runs)
    found = summarise([figures, *(more for _, more in runs)])
    save_model(first, load_spec(model), out / "model", {"begun": str(model)})
    _write(out / TUNED, how, seed, {name: found}, begun=str(model.absolute()), data=str(data.absolute()))


def tune(
    model: Path,
    config: SiteConfig,
    name: str,
    how: FineTuning,
    seed: int,
    splits: Collection[Split] = ("train", "validation", "test"),
) -> Iterator[tuple[Classifier, Tuned]]:
    """Fine-tune a saved model on one site's data, some splits together; yield the model of each run.

    Args:
        model: the folder of a saved model.
        config: of the site that has the data; its device, threads and precision apply.
        name: the class that is learned.

    Raises:
        ConfigError: the model or the data cannot be read, the data have no such class, or there is no such
            device.
        DataError: the data are too few.
    """
    training = config.training
    check_device(training.device, str(config.data.table.parent))
    torch.set_num_threads(training.threads)
    trained = load_model(model)[0]
    spec, folder = load_spec(model), config.data.table.parent.name
    _, samples = single_target(load_samples(config, spec, folder), name, folder)
    known = class_names(model, [name], config.data.stated_codes())[name]
    tensors = initial_tensors(trained.state_dict(), trained.labels.names, known)
    half = AMP_DTYPES.get(training.precision)
    used = {split: part for split, part in samples.items() if split in splits and len(part)}
    if not used:
        raise DataError(
            f"{config.data.table} has nothing in the splits {', '.join(splits)}; check its splits"
        )
    yield from finetune(name, spec, tensors, whole(used), how, seed, training.device, half)


def task_name(config: SiteConfig) -> str:
    """Return the class that a site's data are for: its target, or else its only class.

    Raises:
        ConfigError: the site has several classes and no target.
    """
    if config.data.target is not None:
        return canonical(config.data.target, config.data.synonyms)
    names = load_table(config.data).labels.names
    if len(names) > 1:
        raise ConfigError(f"{config.data.table} has {len(names)} classes; name one with --target")
    return names[0]


def whole(samples: Mapping[Split, Samples]) -> Samples:
    """Return the samples of some splits, none of them empty, as one."""
    parts = list(samples.values())
    inputs = {key: torch.cat([part.inputs[key] for part in parts]) for key in parts[0].inputs}
    patients, names = (tuple(chain(*of)) for of in zip(*((p.patients, p.names) for p in parts), strict=True))
    return Samples(inputs, torch.cat([part.y for part in parts]), patients, names)


def initial_tensors(tensors: Mapping[str, Tensor], labels: Labels, name: str) -> dict[str, Tensor]:
    """Return a model's tensors with the head reduced to the row of one class, if the head has that row.

    Args:
        tensors: of the model, by name.
        labels: the classes of the head's rows.
        name: the class.
    """
    row = next((word for word in (TARGET, canonical(name)) if word in labels), None)
    if row is None:
        log.info("%s is new to the model; its row starts from random weights", name)
        return {key: t for key, t in tensors.items() if not key.startswith(HEADS)}
    at = labels.index(row)
    return {key: t[at : at + 1] if key.startswith(HEADS) else t for key, t in tensors.items()}


def finetune(
    name: str,
    spec: ModelSpec,
    tensors: Mapping[str, Tensor],
    samples: Samples,
    how: FineTuning,
    seed: int,
    device: str = "cpu",
    half: torch.dtype | None = None,
) -> Iterator[tuple[Classifier, Tuned]]:
    """Fine-tune a model in `how.runs` runs; yield the model of each, and its figures.

    Args:
        name: the class, for seeds and messages.
        tensors: of the trained model, with a head of one row.
        samples: all data of the task, ``y`` with one column.
        seed: determines the random splits and the order of training, together with name and run. It does
            not depend on the model, so that methods are compared on the same data.
        half: the short type of mixed precision; None for single precision.

    Raises:
        DataError: the data are too few for a split.
    """
    for run in range(how.runs):
        model = build(spec, LabelSet((name,)), seed_for(seed, "finetune", run), pretrained=False)
        if how.start == "model":
            load_tensors(model, tensors)
        train, test = random_split(samples, how, seed_for(seed, "finetune", name, run), name)
        parts: dict[Split, Samples] = {"train": train, "test": test}
        model.compute_in(half)
        prepare, where = spec.preprocessing, torch.device(device)
        context = SiteContext(name, model.to(device), parts, prepare, Augmentation(), where)
        yield model, _train_and_test(context, how, seed_for(seed, run))


def _train_and_test(context: SiteContext, how: FineTuning, seed: int) -> Tuned:
    """Train a model, test it after each epoch, and return its figures."""
    train, test = context.samples["train"], context.samples["test"]
    truth = test.y.squeeze(1).numpy()
    areas: list[float] = []
    local = LocalTraining(lr=how.lr, epochs=how.epochs, batch_size=how.batch_size)

    def scores() -> Any:
        return predict(context, test).squeeze(1).numpy()

    fit(
        context,
        on_known(masked_bce),
        LocalRound(local, "average", seed, 1),
        after_epoch=lambda: areas.append(auroc(truth, scores())),
    )
    at = youden(truth, scores())
    rates = at.precision, at.recall, at.f1
    return Tuned(tuple(areas), *rates, len(train), len(test), int(truth.sum()), test.names)


def random_split(samples: Samples, how: FineTuning, seed: int, name: str) -> tuple[Samples, Samples]:
    """Return a training and a test part, split by patients, with the same share of positives in both.

    Where `how.examples` limits the training part, all other images test, except those of a patient with
    an image in the training part.

    Raises:
        DataError: a part would have no positive or no negative.
    """
    y = samples.y.numpy()
    split = np.array(by_patient(samples.patients, y, (1 - how.test, 0.0, how.test), seed))
    order = np.random.default_rng(seed).permutation(len(samples))
    parts = []
    for part, most in (("train", how.examples), ("test", None)):
        kinds = [order[(split[order] == part) & (y[order, 0] == value)] for value in (1, 0)]
        if not all(map(len, kinds)):
            raise DataError(
                f"{name} has too few examples to fine-tune and test: {int((y == 1).sum())} positive and "
                f"{int((y == 0).sum())} negative"
            )
        parts.append(np.concatenate([rows if most is None else rows[: most // 2] for rows in kinds]))
    train, test = parts
    if how.examples is not None:
        patients = np.array(samples.patients)
        test = order[~np.isin(patients[order], patients[train])]
    return samples.rows(torch.from_numpy(train)), samples.rows(torch.from_numpy(test))


def summarise(runs: list[Tuned]) -> dict[str, Any]:
    """Return mean and standard deviation of the figures over the runs, and the figures of every run."""
    last = {"auroc": [run.auroc[-1] for run in runs]} | {
        key: [getattr(run, key) for run in runs] for key in ("precision", "recall", "f1")
    }
    return {
        "mean": {key: float(np.mean(values)) for key, values in last.items()},
        "sd": {key: float(np.std(values, ddof=1)) if len(runs) > 1 else None for key, values in last.items()},
        "runs": [dataclasses.asdict(run) for run in runs],
    }
