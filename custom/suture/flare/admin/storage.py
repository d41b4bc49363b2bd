"""What FLARE's server stores: jobs with their results, and snapshots; by default for every user to read."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

from suture.flare.admin.kit import Kit, change_policy, policy_file, read_json


def storages(kit: Kit) -> dict[str, Path]:
    """Return the folders in which a server keeps jobs, with their results, and snapshots, by their names."""
    if kit.role != "server":
        return {}
    resources = read_json(policy_file(kit, "resources"))
    found = {name: settings.get(key) for name, (settings, key) in _storage_settings(resources).items()}
    return {name: kit.folder / str(root) for name, root in found.items() if root}


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


def private_storage(kit: Kit) -> Path:
    """Move a server's storage out of folders that other users can read, to storage/ of its kit.

    FLARE's provisioning puts it below /tmp. What lies there already stays there.

    Returns:
        the file.
    """
    resources = read_json(policy_file(kit, "resources"))
    own = kit.folder / "storage"
    for name, root in storages(kit).items():
        if readable_by_others(root):
            own.mkdir(mode=0o700, exist_ok=True)
            settings, key = _storage_settings(resources)[name]
            settings[key] = str(own / name)
    return change_policy(kit, "resources", **resources)
