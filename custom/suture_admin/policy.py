"""The FLARE policy of a party: which classes a job may name, whether it may bring code, what filters it.

It is strict unless an administrator wants it loose, at a server as at a site.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from suture.core.errors import ConfigError
from suture.core.files import write_json
from suture.flare.compat.deployed import PROCESSES, launchers, mounted_at
from suture.flare.kit import Kit, Role, read_kit_json
from suture.flare.scopes import FILTER, filtered_scopes
from suture_admin.kits import change_policy, components_of, policy_file

CLASSES: dict[Role, tuple[str, ...]] = {
    "server": ("suture.flare.controller.FederationController",),
    "site": ("suture.flare.executor.SiteExecutor", "suture.flare.executor.EgressFilter"),
}
"""The classes that a job of suture names, and that a party must allow where the package is installed."""

COMPONENTS: dict[Role, dict[str, Any]] = {
    "site": {"id": "process_launcher", "path": "suture.flare.compat.launcher.TolerantLauncher", "args": {}},
    "server": {"id": "stale_jobs", "path": "suture.flare.compat.stale_jobs.StaleJobs", "args": {}},
}
"""The component that lets a party survive the death of its processes.

A site's replaces FLARE's launcher of processes, and no other: that of `nvflare deploy prepare` stays.
"""

VALIDATOR: dict[str, Any] = {"path": "suture.flare.compat.plain_json.PlainJson", "args": {}}
"""The app_validator of a party: it refuses a job whose configuration is more than plain JSON."""

PRIVACY: dict[str, Any] = {
    "scopes": [{"name": "suture", "task_result_filters": [{"path": FILTER, "args": {}}]}],
    "default_scope": "suture",
}
"""The strict privacy.json: one scope, which is the default, so its filter applies to every job."""

SHARED = Path("/tmp/nvflare")
"""Where FLARE's provisioning lets every server of a machine store its jobs; each then takes the others'."""

OVERDUE = 60
"""Seconds without an answer after which a site repeats a request: a broken connection loses pending ones."""

# FLARE's "any" for a whole role has to be written out before one right is taken from it.
_RIGHTS = (
    *("submit_job", "clone_job", "manage_job", "download_job", "view", "operate", "shell_commands", "byoc"),
    *("get_job_log", "list_job", "download_job_components"),
)

_ENTRY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\.|[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", re.ASCII)
"""An entry of class_allow_list that is neither `*` nor a name without a dot, as FLARE wants it."""

_BUILT_IN = ("*", "nvflare.", "suture.")
"""Beginnings of the entries of class_allow_list that the strict policy removes."""

_SITE_ONLY = ("operate", "shell_commands")
"""Rights that read or stop what belongs to the party; the strict policy leaves them to its organisation."""


# Classes that a job may name


def missing_classes(kit: Kit) -> tuple[str, ...]:
    """Return the classes of suture that the party does not allow.

    Raises:
        ConfigError: its resources.json is absent or broken, or class_allow_list is no list.
    """
    return tuple(name for name in CLASSES.get(kit.role, ()) if not permits(kit, name))


def is_allowed(name: str, entries: Sequence[str]) -> bool:
    """Return whether FLARE accepts a class: an entry is `*`, a dotted path, or a prefix ending at a dot."""
    return any(e == "*" or name == e or name.startswith(e if e.endswith(".") else f"{e}.") for e in entries)


def allow_classes(kit: Kit) -> Path:
    """Add the classes of suture, and no others, to the party's list; return the file.

    Raises:
        ConfigError: the party has no policy yet, or a broken one.
    """
    return _add_to_list(kit, missing_classes(kit))


def allow_packages(kit: Kit, entries: Sequence[str]) -> Path:
    """Add packages to the party's list, so that jobs may use the methods in them; return the file.

    Args:
        entries: ``PACKAGE.`` for all classes of a package, or the dotted path of one class.

    Raises:
        ConfigError: an entry is neither, or the party has no policy yet, or a broken one.
    """
    check_entries(entries)
    return _add_to_list(kit, [entry for entry in dict.fromkeys(entries) if not permits(kit, entry)])


def check_entries(entries: Sequence[str]) -> None:
    """Check what an administrator adds to the list.

    Raises:
        ConfigError: an entry is neither ``PACKAGE.`` nor the dotted path of a class.
    """
    for entry in entries:
        if not _ENTRY.fullmatch(entry):
            raise ConfigError(
                f"{entry!r} cannot be allowed; write PACKAGE. with a dot at its end for all classes of a "
                "package, or PACKAGE.MODULE.CLASS for one class"
            )


def permits(kit: Kit, name: str) -> bool:
    """Return whether the party's list holds a class or package.

    Raises:
        ConfigError: its resources.json is absent or broken, or class_allow_list is no list.
    """
    return is_allowed(name, _allow_list(kit))


def _allow_list(kit: Kit) -> list[str]:
    path = policy_file(kit, "resources")
    entries = read_kit_json(path).get("class_allow_list", [])
    if not isinstance(entries, list):
        raise ConfigError(f"{path}: class_allow_list is not a list")
    return entries


def _add_to_list(kit: Kit, new: Sequence[str]) -> Path:
    if not new:
        return policy_file(kit, "resources")
    return change_policy(kit, "resources", class_allow_list=[*new, *_allow_list(kit)])


# Code that travels with a job


def code_rights(kit: Kit) -> dict[str, str]:
    """Return FLARE's right ``byoc`` (``any``, ``none``, ...) by the role of a submitter.

    Raises:
        ConfigError: authorization.json is absent or broken.
    """
    path = policy_file(kit, "authorization")
    try:
        roles: dict[str, Any] = dict(read_kit_json(path)["permissions"])
        return {
            role: rights if isinstance(rights, str) else str(rights.get("byoc", "none"))
            for role, rights in roles.items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path}: its permissions cannot be read ({error})") from error


def refuse_code(kit: Kit) -> Path:
    """Take the right to bring code from every role; return the file. FLARE reads it at the next start."""
    code_rights(kit)
    permissions = read_kit_json(policy_file(kit, "authorization"))["permissions"]
    for role, rights in permissions.items():
        own = dict.fromkeys(_RIGHTS, rights) if isinstance(rights, str) else dict(rights)
        permissions[role] = {**own, "byoc": "none"}
    return change_policy(kit, "authorization", permissions=permissions)


# Killed processes


def survive(kit: Kit) -> Path:
    """Install the component that restarts a site's killed job process, or clears a server's stale jobs.

    A server's jobs then lie apart, else it would clear those that other servers run.
    The components belong to this package, so it must be installed for the Python that runs the party. A site
    whose jobs another launcher starts keeps it: FLARE wants exactly one.
    A site also repeats a lost request after `OVERDUE` seconds, unless its file names another time.

    Returns:
        the file.

    Raises:
        ConfigError: the party's resources.json is absent or broken, or lists no components.
    """
    path = policy_file(kit, "resources")
    if (component := COMPONENTS.get(kit.role)) is None:
        return path
    replaced = {component["path"], *([PROCESSES] if kit.role == "site" else [])}
    others = [
        c for c in components_of(path) if c.get("id") != component["id"] and c.get("path") not in replaced
    ]
    added = [] if kit.role == "site" and launchers(others) else [component]
    changes: dict[str, Any] = {"components": [*others, *added]}
    if kit.role == "site":
        changes["client"] = {"communication_timeout": OVERDUE, **read_kit_json(path).get("client", {})}
    changed = change_policy(kit, "resources", **changes)
    return _private_storage(kit) if kit.role == "server" else changed


def survives(kit: Kit) -> bool:
    """Return whether the settings of `survive` are in place."""
    if (component := COMPONENTS.get(kit.role)) is None:
        return True
    path = policy_file(kit, "resources")
    placed = any(c.get("path") == component["path"] for c in components_of(path))
    if kit.role == "server":
        return placed
    repeats = "communication_timeout" in read_kit_json(path).get("client", {})
    return repeats and (placed or bool(launcher_of(kit)))


def launcher_of(kit: Kit) -> str:
    """Return the class of the party's one launcher that starts jobs otherwise than as processes; "" for none.

    Raises:
        ConfigError: the party's resources.json is absent or broken, or lists no components.
    """
    found = launchers(components_of(policy_file(kit, "resources")))
    return found[0] if len(found) == 1 and found[0] not in (PROCESSES, COMPONENTS["site"]["path"]) else ""


# Configurations of jobs


def plain_json(kit: Kit) -> Path:
    """Install the validator that refuses a job whose configuration is more than plain JSON; return the file.

    Raises:
        ConfigError: the party has another validator.
    """
    path = policy_file(kit, "resources")
    if read_kit_json(path).get("app_validator", VALIDATOR) != VALIDATOR:
        raise ConfigError(
            f"{path} has an app_validator of its own; call {VALIDATOR['path']} there, or remove it"
        )
    return change_policy(kit, "resources", app_validator=VALIDATOR)


# What a server stores: jobs with their results, and snapshots; by default for every user to read


def storages(kit: Kit) -> dict[str, Path]:
    """Return the folders in which a server keeps jobs, with their results, and snapshots, by their names.

    What a server in a container names below the folder of its kit there is below its kit here.
    """
    if kit.role != "server":
        return {}
    resources = read_kit_json(policy_file(kit, "resources"))
    found = {name: settings.get(key) for name, (settings, key) in _storage_settings(resources).items()}
    inside = mounted_at(resources.get("components", []))
    roots = {name: PurePosixPath(str(root)) for name, root in found.items() if root}
    return {
        name: kit.folder / (root.relative_to(inside) if inside and root.is_relative_to(inside) else root)
        for name, root in roots.items()
    }


def _storage_settings(resources: dict[str, Any]) -> dict[str, tuple[dict[str, Any], str]]:
    """Return where resources.json names the folder of the jobs and that of the snapshots."""
    managers = [c for c in resources.get("components", []) if c.get("id") == "job_manager"]
    snapshots = resources.get("snapshot_persistor", {}).get("args", {}).get("storage", {}).get("args", {})
    return {
        "jobs": (managers[0].get("args", {}) if managers else {}, "uri_root"),
        "snapshots": (snapshots, "root_dir"),
    }


def readable_by_others(folder: Path) -> bool:
    """Whether other users of the machine can enter a folder, or could if it were created now."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return all(path.stat().st_mode & stat.S_IXOTH for path in (there, *there.parents))


def exposed(folder: Path) -> str:
    """Return to whom the folder of a server's storage is open; "" where it is the server's alone."""
    if folder.parent == SHARED:
        return f"all servers of this machine share {folder}, and take each other's jobs"
    return f"every user of this machine can read {folder}" if readable_by_others(folder) else ""


def _private_storage(kit: Kit) -> Path:
    """Move a server's storage out of folders that others use or can read, to storage/ of its kit.

    What lies there already stays there.

    Returns:
        the file.
    """
    resources = read_kit_json(policy_file(kit, "resources"))
    there = mounted_at(resources.get("components", [])) or kit.folder
    for name, root in storages(kit).items():
        if exposed(root):
            (kit.folder / "storage").mkdir(mode=0o700, exist_ok=True)
            settings, key = _storage_settings(resources)[name]
            settings[key] = str(there / "storage" / name)
    return change_policy(kit, "resources", **resources)


# The whole policy


def keep_logs(kit: Kit) -> Path:
    """Stop the site from sending its error log to the server; return the file."""
    return change_policy(kit, "resources", allow_log_streaming=False)


def make_strict(kit: Kit) -> list[Path]:
    """Let a party run Suture's jobs alone: no code, no other class, configurations in plain JSON.

    Packages that the administrator has allowed stay so. A site also filters every answer by itself, and keeps
    its logs.

    Returns:
        the files that were written.

    Raises:
        ConfigError: the kit is an administrator's, the site has scopes or a validator of its own, or a file
            is absent or broken.
    """
    if kit.role == "admin":
        raise ConfigError(f"{kit.folder} is an administrator's kit; a policy is a server's or a site's")
    privacy = kit.folder / "local" / "privacy.json"
    scopes = _with_scope(privacy) if kit.role == "site" else {}
    code_rights(kit)
    plain_json(kit)
    own_packages = [name for name in _allow_list(kit) if not f"{name}.".startswith(_BUILT_IN)]
    listed: dict[str, Any] = {"class_list_enforcement_mode": "enforce"}
    listed["class_allow_list"] = [*own_packages, *CLASSES[kit.role]]
    own_logs = {"allow_log_streaming": False} if kit.role == "site" else {}
    resources = change_policy(kit, "resources", **listed, **own_logs)
    permissions = read_kit_json(refuse_code(kit))["permissions"]
    for own in permissions.values():
        own |= {right: "o:site" for right in _SITE_ONLY if own.get(right) == "any"}
    rights = change_policy(kit, "authorization", permissions=permissions)
    if kit.role == "server":
        return [resources, rights]
    write_json(privacy, scopes)
    return [resources, rights, privacy]


def _with_scope(privacy: Path) -> dict[str, Any]:
    """Return the content of a privacy.json with Suture's scope beside the site's own, whose default stays.

    The site's executor refuses Suture's jobs in a scope without the filter, see `check_scope`.
    """
    if not privacy.exists():
        return PRIVACY
    own, scopes = read_kit_json(privacy), filtered_scopes(privacy)
    name, entries = PRIVACY["default_scope"], own["scopes"]
    if filtered := [scope for scope, has in scopes.items() if has and scope]:
        name = filtered[0]
    else:
        entries = [*PRIVACY["scopes"], *(scope for scope in entries if scope["name"] != name)]
    return {**own, "scopes": entries, "default_scope": own["default_scope"] if "" in scopes else name}


def bypasses(kit: Kit) -> Iterator[str]:
    """Yield each way in which a job could do more than its method declares, or run other code.

    Raises:
        ConfigError: a file of the policy is absent or broken.
    """
    if any(right != "none" for right in code_rights(kit).values()):
        yield "jobs may bring code"
    resources = read_kit_json(policy_file(kit, "resources"))
    if resources.get("class_list_enforcement_mode", "enforce") != "enforce":
        yield "the list of classes is not enforced"
    listed = resources.get("class_allow_list")
    if listed is None:
        yield "jobs may name every class that FLARE allows by default"
    elif others := sum(entry not in CLASSES[kit.role] for entry in listed):
        yield f"jobs may name {others} more class{'es' if others > 1 else ''}"
    if resources.get("app_validator") != VALIDATOR:
        yield "the configuration of a job may fetch addresses and read files and environment variables"
    if kit.role == "site":
        yield from _list_unfiltered(kit.folder / "local" / "privacy.json")


def _list_unfiltered(path: Path) -> Iterator[str]:
    """Yield what lacks the filter in a privacy.json; FLARE reads this file, and no ``.default`` of it."""
    if not path.exists():
        yield "there is no privacy.json with the filter"
        return
    scopes = filtered_scopes(path)
    if not any(scopes.values()):
        yield "no scope of privacy.json has the filter, or it is disabled"
    elif "" not in scopes:
        yield "privacy.json has no default scope"
