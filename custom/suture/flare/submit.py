"""Handing a job to FLARE: as a folder for the console, or to a running POC or production system."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from nvflare.recipe import ProdEnv

from suture.errors import ConfigError, FederationError
from suture.flare.recipe import FederationRecipe
from suture.job import Job

_POC = Path("example_project") / "prod_00" / "admin@nvidia.com"


def recipe_of(
    job: Job, experiment: str | None = None, sites: Sequence[str] = (), bundle: bool = True
) -> FederationRecipe:
    """The FLARE recipe of a job.

    Raises:
        ConfigError: its method is no federation.

    Args:
        experiment: identifier under which the parties keep their state; a new one by default.
        sites, bundle: as in `FederationRecipe`.
    """
    if job.method.here_only:
        raise ConfigError(
            f"{job.method.title} {job.method.here_only}, so it cannot run in a federation; use --env local"
        )
    name = experiment or f"{job.name}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    return FederationRecipe(job.name, job.plan(name), job.schedule(), sites, job.min_sites or 1, bundle)


def export_job(
    job: Job, folder: Path, experiment: str | None = None, sites: Sequence[str] = (), bundle: bool = True
) -> Path:
    """Writes the job as a folder that FLARE's admin console accepts.

    Raises:
        ConfigError: the folder already holds a job of that name.
    """
    target = folder / job.name
    if target.exists():
        raise ConfigError(f"{target} already exists; choose another folder")
    recipe_of(job, experiment, sites, bundle).export(str(folder))
    return target


def submit(job: Job, env: str, startup_kit: Path | None, sites: Sequence[str] = ()) -> str:
    """Submits the job; returns FLARE's job id.

    Args:
        env: ``poc`` or ``prod``.
        startup_kit: of an administrator; a POC's own is found where `nvflare poc prepare` puts it.

    Raises:
        ConfigError: there is no startup kit.
        FederationError: the server did not take the job.
    """
    kit = startup_kit
    if kit is None and env == "poc":
        kit = Path(os.environ.get("NVFLARE_POC_WORKSPACE", "/tmp/nvflare/poc")) / _POC
    if kit is None or not (kit / "startup").is_dir():
        where = f"{kit} is none" if kit else "none was named"
        raise ConfigError(
            f"--env {env} needs an administrator's startup kit and {where}; give --startup-kit DIR"
        )
    try:
        run = recipe_of(job, sites=sites).execute(ProdEnv(startup_kit_location=str(kit), username=kit.name))
    except RuntimeError as error:
        raise FederationError(f"the job was not accepted: {error}; is the server running?") from error
    return str(run.get_job_id())
