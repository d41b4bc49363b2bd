"""What there is to name: methods, models, priors, data sets, jobs and the like, with a line for each.

Neither torch nor a job's code is imported for it: a list, or the answer to a slip, must not take seconds.
What this distribution has is in catalogue.json, a copy of its registries: benchmarks/reference.py writes it,
a test compares. Only what another package registers is imported: nothing else tells whether it is usable.
"""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from suture.core.entry_points import (
    Registry,
    find_entry_points,
    find_foreign,
    load,
    package_of,
)
from suture.core.errors import ConfigError, DataError, unknown
from suture.core.escaping import printable
from suture.execution.job_files import job_file, jobs_of_flare, known_jobs, may_register, summary

log = logging.getLogger(__name__)

CATALOGUE_FILE = Path(__file__).with_name("catalogue.json")

T = TypeVar("T")


def rows() -> Iterator[tuple[str, str, str]]:
    """Yield kind, name and description of everything; of what cannot be used, the reason."""
    stored = read_stored()
    for name, entry in stored.pop("method").items():
        yield "method", name, f"{entry['title']} ({entry['paper']})"
    for name in sorted(find_foreign()):
        yield "method", name, _or_reason(_outside_method, name)
    for kind, entries in stored.items():
        for name, text in entries.items():
            yield kind, name, text
        for name in sorted(find_foreign(_GROUPS[kind])):
            yield kind, name, _or_reason(_outside, (kind, name))
    for name, path in {**known_jobs(), **jobs_of_flare()}.items():
        yield "job", name, _or_reason(summary, path)
    for kind, points in find_entry_points("suture.catalogue").items():
        try:
            listed = load(points[0], "catalogue", "a function")
        except ConfigError as reason:
            yield kind, package_of(points[0]), str(reason)
            continue
        for name, describe in listed():
            yield kind, name, _or_reason(lambda text: text(), describe)


@dataclass(frozen=True)
class ListedRun:
    """A run as `suture list runs` shows it."""

    folder: Path
    job: str
    method: str
    status: str
    rounds: int
    mean_auroc: float | None


def runs_below(folder: Path) -> list[ListedRun]:
    """Return the runs in a folder and below it, the newest first; one that cannot be read is a warning.

    Raises:
        ConfigError: there is no such folder.
    """
    from suture.protocol.records import read_metrics, read_run

    if not folder.is_dir():
        raise ConfigError(f"{folder} does not exist; name the folder in which runs are")
    found: list[tuple[float, ListedRun]] = []
    for place, folders, files in os.walk(folder):
        if "run.json" not in files:
            continue
        folders.clear()  # of its sites: a run holds no other one
        try:
            run, metrics = read_run(Path(place)), read_metrics(Path(place))
        except DataError as error:
            log.warning("%s", error)
            continue
        mean = metrics.mean_auroc if metrics else None
        row = ListedRun(Path(place), run.job, run.method.name, run.status, run.rounds, mean)
        found.append((run.started.timestamp(), row))
    return [row for _, row in sorted(found, key=lambda one: one[0], reverse=True)]


def check_names(job: str, settings: Iterable[str], trust: bool = False) -> None:
    """Check the name of a job, and that of a method in its settings, before anything is imported for them.

    Raises:
        ConfigError: there is none of that name (names the nearest), or the job is code without `trust`.
    """
    path = job_file(job, trust=trust)
    names = {*read_stored()["method"], *find_foreign()}
    for setting in settings:
        key, _, name = setting.partition("=")
        if key.strip() == "method" and name not in names and not may_register(path):
            raise unknown("method", name, names)


def model_facts(name: str) -> Iterator[tuple[str, str]]:
    """Yield what there is to know of a model before it is used: its input, its size, its weights.

    Raises:
        ConfigError: there is no such model, or its package, file or folder cannot be used.
    """
    from suture.core.runtime import seed_torch
    from suture.models import ModelSpec, encoder_of, example_of, self_contained
    from suture.models.adapters import default_targets

    spec = self_contained(ModelSpec(name))
    entry = encoder_of(spec)
    yield "model", str(entry)
    if entry.reads == "image":
        size = entry.size or max(spec.size, entry.smallest)
        spec = replace(spec, size=size)
        prepare = spec.preprocessing
        channels = "3 channels (gray images are repeated)" if prepare.channels == 3 else "1 channel"
        own = "as in its pretraining" if entry.size else f"for example; {entry.smallest} or more"
        yield "images", f"{channels}; model.size={size}, {own}"
        yield "normalisation", f"of values in [0, 1]: mean {list(prepare.mean)}, std {list(prepare.std)}"
    if entry.tokenise:
        yield "documents", f"the first {entry.size} tokens; model.longest sets another number"
    with seed_torch(0):
        network, width = entry.build(spec, None)
    state = network.state_dict()
    norms = sum(name.endswith("running_mean") for name in state)
    yield "features", f"{width} for each {entry.reads}"
    yield "parameters", f"{sum(p.numel() for p in network.parameters()):,}"
    yield "batch norm", f"{norms} layers" if norms else "none: batch_norm changes nothing"
    targets = ", ".join(default_targets(network, example_of(spec, entry)))
    yield "adapters", targets or "of kind bias only"
    words = ", ".join(["a file or folder", *(entry.weights or ())])
    none = "none: it is trained from the beginning"
    yield "weights", none if entry.weights is None else f"model.weights: {words}"


def read_stored() -> dict[str, dict[str, Any]]:
    """Return what catalogue.json holds: by kind and name a description, or the entry of a method."""
    entries: dict[str, dict[str, Any]] = json.loads(CATALOGUE_FILE.read_bytes())
    return entries


def registries() -> dict[str, Registry[Any]]:
    """Return what is registered of each kind, beside methods."""
    from suture.data.readers import DATASETS
    from suture.execution.sites import SIMULATIONS
    from suture.models import MODELS
    from suture.models.priors import PRIORS

    return {"model": MODELS, "prior": PRIORS, "data set": DATASETS, "simulation": SIMULATIONS}


def by_question() -> dict[str, dict[str, dict[str, Any]]]:
    """Return the entries of the methods of this package by question and name; the most asked first."""
    methods = read_stored()["method"]
    asked = Counter(entry["question"] for entry in methods.values())
    order = [question for question, _ in asked.most_common() if question != "references"]
    return {
        question: {name: entry for name, entry in methods.items() if entry["question"] == question}
        for question in [*order, "references"]
    }


def _or_reason(describe: Callable[[T], str], what: T) -> str:
    try:
        return describe(what)
    except ConfigError as error:
        return f"not usable: {printable(error)}"


def _outside_method(name: str) -> str:
    from suture.methods import outside_method

    about = outside_method(name).about
    return printable(f"{about.title} ({about.paper})")


_GROUPS = {
    "model": "suture.encoders",
    "prior": "suture.priors",
    "data set": "suture.datasets",
    "simulation": "suture.simulations",
}
"""The entry points of each kind that other packages register, beside methods."""


def _outside(kind_and_name: tuple[str, str]) -> str:
    kind, name = kind_and_name
    return printable(line_of(registries()[kind].find(name)))


def line_of(entry: Any) -> str:
    """Return the line of a prior, a data set, or a kind of simulated sites."""
    if isinstance(entry, type):
        return " ".join((entry.__doc__ or "").split("\n\n")[0].split())
    return str(getattr(entry, "description", entry))
