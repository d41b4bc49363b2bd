"""What there is to name: methods, models, priors, data sets, jobs and experiments, with a line for each.

Neither torch nor a job's code is imported for it: a list, or the answer to a slip, must not take seconds.
What this package has is in catalogue.json, a copy of its registries that `suture reference` writes and a test
compares with them. Only a method of another package is imported: nothing else tells whether it is usable.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from suture.core.entry_points import registered
from suture.core.errors import ConfigError, unknown
from suture.core.printable import printable
from suture.experiments.loading import known_experiments, load_experiment
from suture.simulation.job_files import job_file, known_jobs, may_register, summary

FILE = Path(__file__).with_name("catalogue.json")

T = TypeVar("T")


def rows() -> Iterator[tuple[str, str, str]]:
    """Yield kind, name and description of everything; of what cannot be used, the reason."""
    own = stored()
    for name, text in own.pop("method").items():
        yield "method", name, text
    for name in sorted(registered()):
        yield "method", name, _or_reason(_outside, name)
    for kind, entries in own.items():
        for name, text in entries.items():
            yield kind, name, text
    for name, path in known_jobs().items():
        yield "job", name, _or_reason(summary, path)
    for name, path in known_experiments().items():
        yield "experiment", name, _or_reason(_experiment, path)


def check_names(job: str, settings: Iterable[str]) -> None:
    """Check the name of a job, and that of a method in its settings, before anything is imported for them.

    Raises:
        ConfigError: there is none of that name; names the nearest.
    """
    path = job_file(job)
    names = {*stored()["method"], *registered()}
    for setting in settings:
        key, _, name = setting.partition("=")
        if key.strip() == "method" and name not in names and not may_register(path):
            raise unknown("method", name, names)


def stored() -> dict[str, dict[str, str]]:
    """Return what catalogue.json holds: description by kind and name."""
    found: dict[str, dict[str, str]] = json.loads(FILE.read_bytes())
    return found


def from_registries() -> dict[str, dict[str, str]]:
    """Return what catalogue.json has to hold."""
    from suture.data.readers import DATASETS
    from suture.methods import METHODS
    from suture.models import MODELS
    from suture.models.priors import PRIORS

    def ours(made: Any) -> bool:
        return str(made.__module__).startswith("suture.")  # others may have been registered meanwhile

    return {
        "method": {name: _titled(kind) for name, kind in sorted(METHODS.items()) if ours(kind)},
        "model": {name: entry.text for name, entry in MODELS.items() if ours(entry.build)},
        "prior": {name: str(entry) for name, entry in PRIORS.items()},
        "data set": {name: entry.description for name, entry in DATASETS.items()},
    }


def _or_reason(describe: Callable[[T], str], what: T) -> str:
    try:
        return describe(what)
    except ConfigError as error:
        return f"not usable: {printable(error)}"


def _outside(name: str) -> str:
    from suture.methods import outside_method

    return printable(_titled(outside_method(name)))


def _titled(kind: Any) -> str:
    return f"{kind.about.title} ({kind.about.paper})"


def _experiment(path: Path) -> str:
    found = load_experiment(str(path))
    return f"{found.title}; presets {', '.join(found.presets)}"
