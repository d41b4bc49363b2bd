"""The scopes of a site's privacy.json: which of them pass every answer through the site's filter.

Of ``privacy`` FLARE reads ``privacy.json`` only, and no ``.default`` of it. A job names its scope, or has the
default one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from suture.core.errors import ConfigError
from suture.core.files import read_regular

FILTER = "suture.flare.executor.EgressFilter"


def filtered_scopes(path: Path) -> dict[str, bool]:
    """Return which scopes of a privacy.json have the filter; under "" that of a job that names none.

    Raises:
        ConfigError: the file is damaged, or has no list of named scopes.
    """
    try:
        privacy = json.loads(read_regular(path))
        scopes = {str(scope["name"]): scope.get("task_result_filters", []) for scope in privacy["scopes"]}
        filtered = {name: any(map(_filters, filters)) for name, filters in scopes.items()}
        default = privacy.get("default_scope")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} has no list of named scopes ({error})") from error
    return {**filtered, **({"": filtered[default]} if default in filtered else {})}


def _filters(entry: Mapping[str, Any]) -> bool:
    """Whether an entry of task_result_filters applies the filter to what a site sends."""
    outward = str(entry.get("direction") or "out").lower() == "out"
    return entry.get("path") == FILTER and not entry.get("disabled") and outward


def check_scope(site: str, root: Path, scope: str) -> None:
    """Refuse a job in a scope without the filter, at a site that has a scope with it.

    A site may have other scopes for other jobs; one of Suture must not pass the site's filter by there.

    Raises:
        ConfigError: the job is in such a scope; names those with the filter.
    """
    path = root / "local" / "privacy.json"
    if not path.exists():
        return
    scopes = filtered_scopes(path)
    if any(scopes.values()) and not scopes.get(scope):
        names = ", ".join(sorted(name for name, has in scopes.items() if has and name))
        where = f"the scope {scope!r}" if scope else "no scope"
        raise ConfigError(
            f"{site}: the job names {where}, in which this site does not filter its answers; submit it with "
            f"--set flare.scope=NAME (of this site: {names})"
        )
