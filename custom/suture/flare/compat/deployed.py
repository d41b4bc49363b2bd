"""What a party's resources.json says of how its jobs are started, by FLARE's own reading of it.

FLARE 2.9.0: `nvflare deploy prepare` (Docker, Kubernetes, Slurm) replaces the launchers whose ids it knows in
resources.json.default, and deletes resources.json, in which an administrator keeps their policy. Two
launchers, or none, are noticed only when a job starts.
Where: nvflare/tool/deploy/deploy_common.py: _patch_resources
Where: nvflare/private/fed/utils/fed_utils.py: get_job_launcher
Expires with: test_flare_deploys_without_the_policy_in_resources_json
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from pydoc import ErrorDuringImport, locate
from typing import Any

from nvflare.apis.job_launcher_spec import JobLauncherSpec
from nvflare.app_opt.job_launcher.study_data import DATA_MOUNT_ROOT as DATA_MOUNT_ROOT
from nvflare.app_opt.job_launcher.study_runtime import STUDY_RUNTIME_FILE, load_study_runtime_file
from nvflare.tool.deploy.deploy_common import (
    DOCKER_CLIENT_LAUNCHER,
    DOCKER_SERVER_LAUNCHER,
    LAUNCHER_IDS,
    PROCESS_CLIENT_LAUNCHER,
    WORKSPACE_MOUNT_PATH,
)

from suture.core.errors import ConfigError

PROCESSES = PROCESS_CLIENT_LAUNCHER
"""FLARE's own launcher of a site's jobs, as processes of the same machine."""


def launchers(components: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the class paths of the components that offer to start a job: FLARE wants exactly one of them.

    A class that cannot be imported here, such as one that only a container has, counts by its id.
    """
    return [str(c.get("path")) for c in components if _is_launcher(c)]


def _is_launcher(component: Mapping[str, Any]) -> bool:
    try:
        kind = locate(str(component.get("path")))
    except ErrorDuringImport:
        kind = None
    if isinstance(kind, type):
        return issubclass(kind, JobLauncherSpec)
    return component.get("id") in LAUNCHER_IDS


def mounted_at(components: Iterable[Mapping[str, Any]]) -> PurePosixPath | None:
    """Return the folder in which the party's container has its kit; None where it runs without one."""
    components = list(components)
    if _in_docker(components):
        return PurePosixPath(WORKSPACE_MOUNT_PATH)
    for component in components:
        if mount := component.get("args", {}).get("workspace_mount_path"):
            return PurePosixPath(str(mount))
    return None


def images(folder: Path, components: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return by study the image that a party in containers has chosen for those of its jobs.

    Args:
        folder: of its kit.

    Raises:
        ConfigError: FLARE does not accept the file; names it.
    """
    path, mode = folder / STUDY_RUNTIME_FILE, "docker" if _in_docker(components) else "k8s"
    try:
        studies = load_study_runtime_file(str(path), mode) if path.exists() else {}
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return {study: own.container_image or "" for study, own in studies.items()}


def _in_docker(components: Iterable[Mapping[str, Any]]) -> bool:
    return any(c.get("path") in (DOCKER_CLIENT_LAUNCHER, DOCKER_SERVER_LAUNCHER) for c in components)
