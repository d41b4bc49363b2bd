"""The startup kits of a POC in a folder that holds something already.

FLARE 2.9.0: ``nvflare poc prepare`` deletes the folder first, and with it the data of the simulated sites.
So this calls what the command does after that.
Where: nvflare/tool/poc/poc_commands.py: _prepare_poc
Expires with: test_flare_deletes_the_folder_in_which_it_prepares_a_poc
"""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path

from suture.core.errors import FederationError
from suture.core.files import writing


def provision(project: Path, folder: Path) -> None:
    """Write the startup kits of a project, and make this POC the one of FLARE's own commands.

    Raises:
        FederationError: FLARE does not accept the project.
    """
    from nvflare.tool.poc.poc_commands import prepare_poc_provision, save_startup_kit_dir_config

    with redirect_stdout(io.StringIO()), writing(folder):
        try:
            made = prepare_poc_provision([], 0, str(folder), "", False, str(project))
        except (ValueError, RuntimeError, KeyError) as error:
            raise FederationError(f"{project}: FLARE cannot provision it: {error}") from error
        save_startup_kit_dir_config(str(folder), made["name"])
