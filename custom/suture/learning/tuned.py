"""tuned.json: what a trained model became on tasks of its own."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from suture.core.errors import ConfigError
from suture.core.files import write_json
from suture.core.labels import canonical
from suture.data.batch import Samples
from suture.data.config import SiteConfig, load_site_config
from suture.data.readers import load_table
from suture.data.table import Split
from suture.learning.finetuning import FineTuning, finetune, summarised
from suture.learning.samples import TARGET, load_samples, single_target
from suture.models.classifier import HEADS, Classifier
from suture.models.saved import load_model, load_spec
from suture.protocol.messages import Labels

log = logging.getLogger(__name__)

FILE = "tuned.json"
TARGETS = "targets"
"""Folder beside the simulated sites with the data of each task that the model is put to."""


def tune_targets(run: Path, how: FineTuning, seed: int, tasks: Path | None = None) -> None:
    """Fine-tunes the model of a run on every task of a folder, and writes tuned.json.

    Args:
        tasks: a folder for each task; by default that of the run's own simulation.

    Raises:
        ConfigError: the run has no such task.
        SutureError: a task's data cannot be read, or are too few.
    """
    places = sorted((tasks or run / "sites" / TARGETS).glob("*/suture.toml"))
    if not places:
        raise ConfigError(f"{run} has no task to fine-tune on; name some in simulation.targets")
    found = {}
    for place in places:
        config = load_site_config(place)
        name = task_name(config)
        for title, one in _ways(name, how):
            log.info("fine-tuning on %s", title)
            found[title] = tune_task(run / "model", config, name, one, seed)
    write_json(run / FILE, written(how, seed, found))


def _ways(name: str, how: FineTuning) -> Iterator[tuple[str, FineTuning]]:
    """A task on all its data and, where few are asked for, on few: the model need not be trained twice."""
    yield name, how
    if how.few is not None:
        yield f"{name}, {how.few} examples", dataclasses.replace(how, examples=how.few)


def written(how: FineTuning, seed: int, targets: Mapping[str, Any]) -> dict[str, Any]:
    """The content of tuned.json."""
    return {"how": dataclasses.asdict(how), "seed": seed, "targets": dict(targets)}


def tune_task(
    model: Path,
    config: SiteConfig,
    name: str,
    how: FineTuning,
    seed: int,
    done: Callable[[Classifier, int], None] = lambda model, run: None,  # noqa: ARG005
) -> dict[str, Any]:
    """Fine-tunes a saved model on one site's data, of all its splits together; see `finetune`.

    Args:
        model: the folder of a saved model.
        config: of the site that has the data; its device, threads and precision are those of training here.
        name: of the task, one of its classes.

    Raises:
        ConfigError: the model or the data cannot be read, or have no such class.
        DataError: the data are too few.
    """
    torch.set_num_threads(config.training.threads)
    trained = load_model(model)[0]
    spec, place = load_spec(model), config.data.table.parent.name
    _, samples = single_target(load_samples(config, spec, place), name, place)
    tensors = begun(trained.state_dict(), trained.labels.names, name)
    device, amp = config.training.device, config.training.amp
    runs = finetune(name, spec, tensors, whole(samples), how, seed, device=device, amp=amp, done=done)
    return summarised(runs)


def task_name(config: SiteConfig) -> str:
    """The task of a site: its target, or else its one class.

    Raises:
        ConfigError: it has several classes and names none.
    """
    if config.data.target is not None:
        return canonical(config.data.target, config.data.synonyms)
    names = load_table(config.data).labels.names
    if len(names) > 1:
        raise ConfigError(f"{config.data.table} has {len(names)} classes; name one with --target")
    return names[0]


def whole(samples: Mapping[Split, Samples]) -> Samples:
    """All splits as one."""
    parts = [part for part in samples.values() if len(part)]
    inputs = {key: torch.cat([part.inputs[key] for part in parts]) for key in parts[0].inputs}
    patients = tuple(patient for part in parts for patient in part.patients)
    return Samples(inputs, torch.cat([part.y for part in parts]), patients)


def begun(tensors: Mapping[str, Tensor], labels: Labels, name: str) -> dict[str, Tensor]:
    """The tensors that a task begins with: all but the head, and of it the task's row where it has one.

    Args:
        labels: of the head's rows.
    """
    row = next((word for word in (TARGET, canonical(name)) if word in labels), None)
    if row is None:
        log.info("%s is new to the model: its row begins at random", name)
        return {key: t for key, t in tensors.items() if not key.startswith(HEADS)}
    at = labels.index(row)
    return {key: t[at : at + 1] if key.startswith(HEADS) else t for key, t in tensors.items()}
