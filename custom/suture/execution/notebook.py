"""What `import suture` gives to a notebook or a script: run a job, and methods of this process."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from suture.core.entry_points import find_foreign, hook, of_this_distribution
from suture.core.errors import ConfigError
from suture.execution.job import Job, load_job, with_settings
from suture.execution.run import Environment, run_job
from suture.methods import METHODS, check_kind, outside_method
from suture.methods.base import Method

if TYPE_CHECKING:
    from suture_results.frames import Results

M = TypeVar("M", bound=type[Method])


def run(
    job: Job | str | Path,
    env: Environment = "local",
    out: str | Path | None = None,
    *,
    rounds: int | None = None,
    seed: int | None = None,
    settings: Mapping[str, Any] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: bool | None = None,
    trust: bool = False,
) -> Results:
    """Run a job with simulated sites on this machine.

    Args:
        job: a job, its name in jobs/, or the path of its file.
        env: ``local`` for a loop in this process, ``sim`` for FLARE's simulator in another one.
        out: run folder, by default ``runs/JOB-TIME``; relative paths start at the working directory.
        rounds: in place of the job's.
        seed: in place of the job's.
        settings: further settings by dotted name, as ``--set`` takes them: ``{"method.local.lr": 1e-3}``;
            None is a value.
        resume: continue the unfinished run in the folder.
        overwrite: delete the content of the folder first.
        progress: show the progress on the standard output; by default in notebooks.
        trust: whether the job.py of a folder may be run, see `load_job`.

    Raises:
        ConfigError: a setting is unknown or does not fit, or the folder is in use; nothing is written.
        FederationError: the run failed; its folder says why.
    """
    chosen = job if isinstance(job, Job) else load_job(job, trust=trust)
    named = {key: value for key, value in (("rounds", rounds), ("seed", seed)) if value is not None}
    given = {**(settings or {}), **named}
    first = sorted(given, key=lambda key: key != "method")  # further settings are those of the method
    words = [f"{key}={_text(key, given[key])}" for key in first]
    shown = "ipykernel" in sys.modules if progress is None else progress
    folder = run_job(
        with_settings(chosen, words), env, out, resume=resume, overwrite=overwrite, progress=shown
    )
    results: Results = hook("open_results")(folder)
    return results


def _text(key: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value.item() if isinstance(value, np.generic) else value)
    except TypeError as error:
        raise ConfigError(
            f"setting {key!r} is a {type(value).__name__}; give a number, text or list"
        ) from error


def register(kind: M) -> M:
    """Register a method of this process, so that ``method=NAME`` finds it; usable as a decorator.

    It runs with ``env="local"`` alone. For other processes and sites a method must be in an installed
    package, under the entry point ``suture.methods``. Registering it again replaces it, as notebooks do.

    Raises:
        ConfigError: it is no class of a method; or the name is that of a method of suture or of an
            installed package.
    """
    check_kind(kind, f"register({kind!r})")
    name = kind.about.name
    known = METHODS.get(name)
    if name in find_foreign() or (known is not None and of_this_distribution(known.__module__)):
        raise ConfigError(f"there is a method {name!r} already; give {kind.__qualname__} another name")
    METHODS[name] = kind
    return kind


def known_methods() -> dict[str, type[Method]]:
    """The methods by name: those of suture, of installed packages and of this process.

    One that cannot be used is left out; a warning says why.
    """
    methods = dict(METHODS)
    for name in find_foreign():
        try:
            methods[name] = outside_method(name)
        except ConfigError as error:
            warnings.warn(f"left out: {error}", stacklevel=2)
    return dict(sorted(methods.items()))
