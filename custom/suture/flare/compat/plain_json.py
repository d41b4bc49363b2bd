"""Refusal of jobs whose configuration is more than plain JSON, at the server and at the sites.

FLARE 2.9.0: it reads a job's meta.conf and config_fed_*.conf with pyhocon before any component of the job
exists. Its `include url(...)` fetches an address; `include file(...)` and `${NAME}` read files and
environment variables of the party. In JSON too, FLARE replaces `{$NAME}` by an environment variable of the
party, and `${secret:NAME}` by a secret: as the title of a run, the server would send it to the submitter.

`suture policy` installs `PlainJson` as ``app_validator`` of local/resources.json. FLARE asks it at each
deployment, but has read the configuration by then; and the server reads meta.conf at the submission, where
FLARE has no hook. So the validator also takes FLARE's readers of other formats away from its process.
Where: nvflare/private/fed/server/job_meta_validator.py: validate
Where: nvflare/fuel/utils/wfconf.py: resolve_var_refs
Expires with: test_flare_reads_variables_of_the_party_in_a_jobs_meta
Expires with: test_flare_replaces_what_is_in_braces
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

from nvflare.apis.app_validation import AppValidator
from nvflare.fuel.utils.config import ConfigFormat, ConfigLoader
from nvflare.fuel.utils.config_factory import ConfigFactory
from nvflare.lighter.tool_consts import NVFLARE_SIG_FILE, NVFLARE_SUBMITTER_CRT_FILE

from suture.core.files import read_regular
from suture.flare import PLAN, SCHEDULE
from suture.flare.compat.allow_list import list_unlisted

SIGNED = (NVFLARE_SIG_FILE, NVFLARE_SUBMITTER_CRT_FILE)
"""Files that FLARE adds to each folder of a submitted job: the submitter's signatures and certificate."""


class PlainJson(AppValidator):
    """Accepts an app whose configuration consists of JSON files without references.

    Constructing it also leaves FLARE's JSON reader as the only one of this process.
    """

    def __init__(self) -> None:
        super().__init__()
        for fmt in set(ConfigFormat) - {ConfigFormat.JSON}:
            ConfigFactory._fmt2Loader[fmt] = Refusing(fmt)

    def validate(self, app_folder: str) -> tuple[str, dict[str, Any]]:
        """Return FLARE's pair of an error (empty where there is none) and properties of the app."""
        app = Path(app_folder)
        return next(chain(faults(app / "config"), list_unlisted(app)), ""), {}


class Refusing(ConfigLoader):
    """Stands in for FLARE's loader of a format that can include files and addresses.

    Raises:
        ValueError: always, which FLARE reports to the submitter.
    """

    def load_config(self, file_path: str) -> NoReturn:
        raise ValueError(
            f"{Path(file_path).name} is not JSON; this party reads no other configuration of a job"
        )

    def load_config_from_str(self, config_str: str) -> NoReturn:
        raise ValueError(
            "the job has a configuration that is not JSON (meta.conf, meta.yml); export it as JSON"
        )

    load_config_from_dict = load_config_from_str


def faults(config: Path) -> Iterator[str]:
    """Yield what is not plain JSON in the folder of an app's configuration.

    Args:
        config: the folder; FLARE also finds files below it.
    """
    for path in sorted(path for path in config.rglob("*") if not path.is_dir() and path.name not in SIGNED):
        name = path.relative_to(config)
        if path.suffix != ".json":
            yield f"config/{name} is not JSON; this party reads no other configuration of a job"
            continue
        try:
            content = json.loads(read_regular(path))
        except (OSError, ValueError, RecursionError) as error:
            yield f"config/{name} is not JSON ({type(error).__name__}); export the job as JSON"
            continue
        # FLARE does not read these two, so names of classes in them may have braces.
        for text in () if str(name) in (PLAN, SCHEDULE) else references(content):
            yield f"config/{name} has a reference {text[:80]!r}; FLARE would replace what is in braces"


def references(value: object) -> Iterator[str]:
    """Yield the texts of a configuration with a brace: FLARE formats them, with ``{name}`` for a variable.

    Args:
        value: plain values, as JSON has them.
    """
    if isinstance(value, str):
        if "{" in value or "}" in value:
            yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from references(key)
            yield from references(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from references(inner)
