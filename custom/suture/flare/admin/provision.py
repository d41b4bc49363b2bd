"""FLARE's own provisioning of a federation on this machine: the same as `nvflare poc prepare -i PROJECT`."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path

from nvflare.tool.poc.poc_commands import prepare_poc_provision, save_startup_kit_dir_config

from suture.core.errors import FederationError


def provision(project: Path, folder: Path) -> None:
    """Makes the startup kits of a project file, and makes this POC the one of the `nvflare` commands.

    Raises:
        FederationError: FLARE does not accept the project.
    """
    with redirect_stdout(io.StringIO()):
        try:
            made = prepare_poc_provision([], 0, str(folder), "", False, str(project))
        except (ValueError, RuntimeError, KeyError) as error:
            raise FederationError(f"{project}: FLARE cannot provision it: {error}") from error
        save_startup_kit_dir_config(str(folder), made["name"])
