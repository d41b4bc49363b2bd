"""What a party's FLARE policy permits: which classes a job may name, and whether it may bring code.

FLARE reads ``local/NAME.json``, and where that is absent ``local/NAME.json.default``, as provisioned.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from suture.core.errors import ConfigError
from suture.core.files import write_json
from suture.flare.admin.kit import Kit, Role, read_json

CLASSES: dict[Role, tuple[str, ...]] = {
    "server": ("suture.flare.controller.FederationController",),
    "site": ("suture.flare.executor.SiteExecutor", "suture.flare.filters.EgressFilter"),
}
"""The classes that a job of suture names, and that a party must allow where the package is installed."""

COMPONENTS: dict[Role, dict[str, Any]] = {
    "site": {"id": "process_launcher", "path": "suture.flare.launcher.TolerantLauncher", "args": {}},
    "server": {"id": "abandoned_jobs", "path": "suture.flare.stale_jobs.StaleJobs", "args": {}},
}
"""What lets a party survive the death of its processes; the site's takes the place of FLARE's launcher."""

OVERDUE = 60
"""Seconds without an answer after which a site asks again: a connection that is cut loses what was on it."""

# FLARE's "any" for a whole role has to be written out before one right is taken from it.
_RIGHTS = (
    *("submit_job", "clone_job", "manage_job", "download_job", "view", "operate", "shell_commands", "byoc"),
    *("get_job_log", "list_job", "download_job_components"),
)


def policy_file(kit: Kit, name: str) -> Path:
    """The file that FLARE reads, of ``resources``, ``authorization`` or ``privacy``; it may be absent."""
    own = kit.folder / "local" / f"{name}.json"
    default = own.with_name(f"{name}.json.default")
    return default if default.exists() and not own.exists() else own


def missing_classes(kit: Kit) -> tuple[str, ...]:
    """Suture's classes that the party does not allow.

    Raises:
        ConfigError: its resources.json is absent, broken, or its list is no list.
    """
    path = policy_file(kit, "resources")
    entries = read_json(path).get("class_allow_list", [])
    if not isinstance(entries, list):
        raise ConfigError(f"{path}: class_allow_list is no list")
    return tuple(name for name in CLASSES.get(kit.role, ()) if not allowed(name, entries))


def allowed(name: str, entries: Sequence[str]) -> bool:
    """Whether FLARE takes a class: `*`, its dotted path, or a prefix of it that ends at a dot."""
    return any(e == "*" or name == e or name.startswith(e if e.endswith(".") else f"{e}.") for e in entries)


def code_rights(kit: Kit) -> dict[str, str]:
    """For each role of a submitter, whose jobs may bring code: FLARE's word (``any``, ``none``, ...).

    Raises:
        ConfigError: its authorization.json is absent or broken.
    """
    path = policy_file(kit, "authorization")
    try:
        roles: dict[str, Any] = dict(read_json(path)["permissions"])
        return {
            role: rights if isinstance(rights, str) else str(rights.get("byoc", "none"))
            for role, rights in roles.items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path}: its permissions cannot be read ({error})") from error


def allow_classes(kit: Kit) -> Path:
    """Adds suture's classes, and nothing else, to the party's list; returns the file.

    Raises:
        ConfigError: there is no policy to begin with.
    """
    path = policy_file(kit, "resources")
    missing, resources = missing_classes(kit), read_json(path)
    target = path.with_name("resources.json")
    if missing:
        resources["class_allow_list"] = [*missing, *resources.get("class_allow_list", [])]
        write_json(target, resources)
    return target if missing else path


def survive(kit: Kit) -> Path:
    """Lets a site's job outlive the death of its process, or a server forget the jobs of an earlier life.

    Both are components of this package, so it must be installed for the Python that the party runs with.
    A site also asks again sooner where a request has been lost, unless its file says when.

    Returns:
        the file.

    Raises:
        ConfigError: the party's resources.json is absent or broken, or lists no components.
    """
    path = policy_file(kit, "resources")
    resources, component = read_json(path), COMPONENTS.get(kit.role)
    if component is None:
        return path
    if not isinstance(resources.get("components"), list):
        raise ConfigError(f"{path} lists no components; restore it from the startup kit's archive")
    others = [c for c in resources["components"] if c.get("id") != component["id"]]
    changed = {**resources, "components": [*others, component]}
    if kit.role == "site":
        changed["client"] = {"communication_timeout": OVERDUE, **resources.get("client", {})}
    target = path.with_name("resources.json")
    write_json(target, changed)
    return target


def survives(kit: Kit) -> bool:
    """Whether `survive` has been here."""
    component = COMPONENTS.get(kit.role)
    if component is None:
        return True
    resources = read_json(policy_file(kit, "resources"))
    placed = any(c.get("path") == component["path"] for c in resources.get("components", []))
    return placed and (kit.role != "site" or "communication_timeout" in resources.get("client", {}))


def refuse_code(kit: Kit) -> Path:
    """Takes from every role the right to bring code with a job; FLARE reads it at the party's next start.

    Returns:
        the file.
    """
    path = policy_file(kit, "authorization")
    code_rights(kit)
    content = read_json(path)
    for role, rights in content["permissions"].items():
        own = dict.fromkeys(_RIGHTS, rights) if isinstance(rights, str) else dict(rights)
        content["permissions"][role] = {**own, "byoc": "none"}
    target = path.with_name("authorization.json")
    write_json(target, content)
    return target


def keep_logs(kit: Kit) -> Path:
    """Stops the site from sending its error log to the server; returns the file."""
    path = policy_file(kit, "resources")
    target = path.with_name("resources.json")
    write_json(target, {**read_json(path), "allow_log_streaming": False})
    return target
