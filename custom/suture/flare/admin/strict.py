"""The strict policy of a site: its own filter looks at every answer, and no job can get round it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from suture.core.errors import ConfigError
from suture.core.files import write_json
from suture.flare.admin.kit import Kit, read_json
from suture.flare.admin.policy import CLASSES, code_rights, keep_logs, policy_file, refuse_code

FILTER = "suture.flare.filters.EgressFilter"

PRIVACY: dict[str, Any] = {
    "scopes": [{"name": "suture", "task_result_filters": [{"path": FILTER, "args": {}}]}],
    "default_scope": "suture",
}
"""One scope, the default one: its filter holds for every job."""

_AT_THE_SITE = ("operate", "shell_commands")
"""Rights that read or stop what is the site's: for its own organisation alone."""


def make_strict(kit: Kit) -> list[Path]:
    """Installs the filter at a site, allows suture's classes alone, refuses code, and keeps logs.

    Returns:
        the files that were written.

    Raises:
        ConfigError: the kit is not a site's, the site has scopes of its own, or a file is absent or broken.
    """
    if kit.role != "site":
        raise ConfigError(f"{kit.folder} is the kit of a {kit.role}; the strict policy is a site's")
    privacy = kit.folder / "local" / "privacy.json"
    if privacy.exists() and read_json(privacy) != PRIVACY:
        raise ConfigError(
            f"{privacy} has scopes of the site's own; add {FILTER} to the task_result_filters of each, or "
            "move the file away"
        )
    path = policy_file(kit, "resources")
    listed = {
        **read_json(path),
        "class_list_enforcement_mode": "enforce",
        "class_allow_list": CLASSES["site"],
    }
    rights = refuse_code(kit)
    content = read_json(rights)
    for own in content["permissions"].values():
        own |= {right: "o:site" for right in _AT_THE_SITE if own.get(right) == "any"}
    write_json(rights, content)
    write_json(path.with_name("resources.json"), listed)
    write_json(privacy, PRIVACY)
    return [keep_logs(kit), rights, privacy]


def ways_round(kit: Kit) -> Iterator[str]:
    """How a job could send what its method did not declare, under a site's policy.

    Raises:
        ConfigError: a file of the policy is absent or broken.
    """
    if any(right != "none" for right in code_rights(kit).values()):
        yield "jobs may bring code"
    resources = read_json(policy_file(kit, "resources"))
    if resources.get("class_list_enforcement_mode", "enforce") != "enforce":
        yield "the list of classes is not enforced"
    listed = resources.get("class_allow_list")
    if listed is None:
        yield "jobs may name every class that FLARE allows by default"
    elif others := sum(entry not in CLASSES["site"] for entry in listed):
        yield f"jobs may name {others} more class{'es' if others > 1 else ''}"
    yield from _unfiltered(kit.folder / "local" / "privacy.json")


def _unfiltered(path: Path) -> Iterator[str]:
    """FLARE reads privacy.json alone, not its .default."""
    if not path.exists():
        yield "there is no privacy.json with the filter"
        return
    privacy = read_json(path)
    try:
        filters = {
            str(scope["name"]): [f.get("path") for f in scope.get("task_result_filters", [])]
            for scope in privacy["scopes"]
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} has no list of named scopes ({error})") from error
    for name, paths in filters.items():
        if FILTER not in paths:
            yield f"scope {name} of privacy.json lacks the filter"
    if privacy.get("default_scope") not in filters:
        yield "privacy.json has no default scope"
