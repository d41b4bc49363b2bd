"""A job in the form that FLARE takes: a recipe, or a folder for the admin console and for submission."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from suture.core.errors import ConfigError
from suture.federation.plan import needed
from suture.flare.recipe import FederationRecipe
from suture.simulation.job import Job, check_federated


def recipe_of(
    job: Job, experiment: str | None = None, sites: Sequence[str] = (), bundle: bool = True
) -> FederationRecipe:
    """Return the FLARE recipe of a job.

    Args:
        experiment: identifier under which the parties store their state; a new one by default.
        sites, bundle: as in `FederationRecipe`.

    Raises:
        ConfigError: its method cannot run in a federation.
    """
    check_federated(job)
    name = experiment or f"{job.name}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    # Sites that are named are all needed, unless the job says how many are enough.
    least = max(needed(job.min_sites, len(sites)), 1)
    return FederationRecipe(job.name, job.plan(name), job.schedule(), sites, least, bundle)


def export_job(
    job: Job, folder: Path, experiment: str | None = None, sites: Sequence[str] = (), bundle: bool = True
) -> Path:
    """Write the job as a folder that FLARE's admin console accepts; return the folder.

    Args:
        folder: in which the job's folder is created.
        experiment, sites, bundle: as in `recipe_of`.

    Raises:
        ConfigError: the folder already holds a job of that name, or the method cannot run in a federation.
    """
    target = folder / job.name
    if target.exists():
        raise ConfigError(f"{target} already exists; choose another folder")
    recipe_of(job, experiment, sites, bundle).export(str(folder))
    return target
