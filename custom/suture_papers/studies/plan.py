"""The plan of a study, stored with a digest before its first run, so that later changes are seen."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from suture.core.errors import ConfigError
from suture.core.validation import flat
from suture_papers.studies.design import Design
from suture_papers.tables.results import ResultStore

PLAN = "plan"
"""The name of its record."""


def digest(plan: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a plan: of its JSON with sorted keys and without spaces."""
    text = json.dumps(plan, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def register(design: Design, store: ResultStore, amend: str | None = None) -> None:
    """Store the plan before the first run, or check that it is still the stored one.

    Args:
        amend: the reason of a change, which is stored with what has changed and shown on the page.

    Raises:
        ConfigError: the plan differs from the stored one, and there is no reason; names what differs.
    """
    plan, record = design.plan(), store.find(PLAN)
    now = {"date": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", "commit": _commit(), "digest": digest(plan)}
    if record is None and store.every():
        raise ConfigError(
            f"{store.path} has runs and no plan; restore the line of the plan, or delete the file, and all "
            "runs are done again"
        )
    if record is None:
        return store.put(PLAN, {**now, "plan": plan, "amendments": []})
    changed = changes(record["plan"], plan)
    if not changed:
        return None
    if not (amend and amend.strip()):
        listed = "; ".join(f"{key}: {old} is now {new}" for key, (old, new) in changed.items())
        raise ConfigError(
            f"the plan of {design.stem} has changed since it was registered on {record['date']}. Set it "
            f"back, or give the reason with --amend, and the page shows the change: {listed}"
        )
    amendments = [*record["amendments"], {"why": amend, **now, "changed": changed}]
    return store.put(PLAN, {**record, "digest": now["digest"], "plan": plan, "amendments": amendments})


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return what differs, by dotted name: the former value and the present one, None where absent."""
    old, new = flat("plan", before), flat("plan", now)
    keys = sorted(old.keys() | new.keys())
    return {key[5:]: [old.get(key), new.get(key)] for key in keys if old.get(key) != new.get(key)}


def _commit() -> str | None:
    """Return the commit of this code, with ``-dirty`` where files differ from it; None outside of Git."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
