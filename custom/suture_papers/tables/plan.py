"""The plan of a study: kept with a digest before its first run, so that later changes are seen."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from suture.core.errors import ConfigError
from suture.core.validation import flat
from suture_papers.tables.results import ResultStore, read_result
from suture_papers.tables.runs import Run, final_runs, tuning_runs
from suture_papers.tables.spec import Table

NAME = "plan-"
"""The record of a study's plan is named after it and its preset."""


def plan_table(table: Table) -> dict[str, Any]:
    """Return everything that decides the runs of a study and how they are judged, as plain values.

    Titles and notes are left out: to correct a word changes no result.
    """
    spec, preset = table.spec, table.preset
    content = {
        "plan": asdict(spec.plan) if spec.plan else {},
        "job": spec.job,
        "control": spec.reference,
        "rows": {
            key: {"set": row.set, "tune": asdict(row.tune) if row.tune else None}
            for key, row in table.rows.items()
        },
        "set": spec.set,
        "preset": {"seeds": preset.seeds, "set": preset.set, "rows": preset.rows},
        "tune": asdict(preset.tune) if preset.tune else None,
    }
    plain: dict[str, Any] = json.loads(json.dumps(content))
    return plain


def digest(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a plan: of its JSON with sorted keys and without spaces."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def register(table: Table, store: ResultStore, amend: str | None = None) -> None:
    """Store the plan before the first run, or check that it is still the stored one.

    Args:
        amend: the reason of a change, which is stored with what has changed and shown on the page.

    Raises:
        ConfigError: the plan differs from the stored one, and there is no reason; names what differs.
    """
    name, content = f"{NAME}{store.table}-{table.size}", plan_table(table)
    record, now = store.find(name), {"date": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", "commit": _commit()}
    if record is None:
        before = sum(read_result(store, run) is not None for run in _possible(table))
        first = {"digest": digest(content), **now, "results_before": before, "plan": content}
        return store.put(name, {**first, "amendments": []})
    differs = changes(record["plan"], content)
    if not differs:
        return None
    if not (amend and amend.strip()):
        listed = "; ".join(f"{key}: {old} is now {new}" for key, (old, new) in differs.items())
        raise ConfigError(
            f"the plan of {store.table} was registered on {record['date']}, before its runs, and has changed "
            f"({listed}). Set it back, or give the reason with --amend, and the page shows the change"
        )
    amended = {"why": amend, "digest": digest(content), **now, "changed": differs}
    return store.put(name, {**record, "plan": content, "amendments": [*record["amendments"], amended]})


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return what differs, by dotted name: the former value and the present one, None where absent."""
    old, new = flat("plan", before), flat("plan", now)
    keys = sorted(old.keys() | new.keys())
    return {key[5:]: [old.get(key), new.get(key)] for key in keys if old.get(key) != new.get(key)}


def read_registered(table: Table, store: ResultStore) -> dict[str, Any] | None:
    """Return the stored record of the plan; None before the first run."""
    return store.find(f"{NAME}{store.table}-{table.size}")


def _possible(table: Table) -> list[Run]:
    """Return every run that the study may need, whatever value a row will be tuned to."""
    grids = {row: grid.values if (grid := table.tried_grid(row)) else (None,) for row in table.rows}
    found = list(tuning_runs(table))
    for k in range(len(grids[table.spec.reference])):
        found += final_runs(table, {(row, str(x)): grids[row][k] for row, x in table.cells})
    return list({run.name: run for run in found}.values())


def _commit() -> str | None:
    """Return the commit of this code, with ``-dirty`` where files differ from it; None outside of Git."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
