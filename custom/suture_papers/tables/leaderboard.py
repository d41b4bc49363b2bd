"""The leaderboard: every row of every study against the studies' control, as one page and one JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from suture.core.errors import ConfigError
from suture.core.files import atomic_write
from suture_papers.tables.cells import DASH, p_value
from suture_papers.tables.loading import known_tables, load_spec
from suture_papers.tables.outcome import Outcome, collect
from suture_papers.tables.render import preset_title, stem_of
from suture_papers.tables.results import ResultStore
from suture_papers.tables.statistics import over_studies
from suture_papers.tables.study import METRICS, VERDICTS, compared, verdict_of
from suture_papers.tables.verdict import number
from suture_results.report import templates

STEM = "leaderboard"


def write_leaderboard(results: Path) -> list[Path]:
    """Write leaderboard.json and leaderboard.html from the stored runs of all studies.

    Each preset of a study is a column as soon as two seeds of its control are there.

    Returns:
        the files; none where there is no such study.

    Raises:
        ConfigError: two studies have different controls.
        OSError: the folder cannot be written.
    """
    outcomes: dict[str, Outcome] = {}
    for name in known_tables():
        spec = load_spec(name)
        for table in map(spec.preset, spec.presets if spec.plan else ()):
            outcome = collect(table, ResultStore(results / "runs", name))
            if len(outcome.results[spec.reference, "None"]) > 1:
                outcomes[stem_of(table, name)] = outcome
    if not outcomes:
        return []
    board = leaderboard(outcomes)
    content = json.dumps(board, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    written = {
        results / f"{STEM}.json": content.encode(),
        results / f"{STEM}.html": render(board).encode(),
    }
    for path, text in written.items():
        atomic_write(path, text)
    return list(written)


def render(board: Mapping[str, Any]) -> str:
    """Return a leaderboard as a page."""
    page = templates(Path(__file__).parent).get_template(f"{STEM}.html")
    return page.render(board=board, verdicts=VERDICTS, metrics=METRICS, number=_number, p=p_value)


def leaderboard(outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
    """Return the leaderboard as plain values, null where a figure is undefined.

    Returns:
        ``control``; ``studies`` by name: title, question, note, block, metric, effect (δ), registered,
        digest, changed (whether the plan was); ``rows`` by key: name, ``cells`` by study, and
        ``over_studies``.
        A cell names the row whose runs it shares, if any, as ``same_as``.

    Raises:
        ConfigError: two studies have different controls.
    """
    controls = {outcome.table.spec.reference for outcome in outcomes.values()}
    if len(controls) > 1:
        raise ConfigError(
            f"studies have the controls {', '.join(sorted(controls))}; give all the same reference"
        )
    studies: dict[str, dict[str, Any]] = {}
    names: dict[str, str] = {}
    cells: dict[str, dict[str, Any]] = {}
    effects: dict[str, dict[str, list[float]]] = {}
    for study, outcome in outcomes.items():
        spec, plan, record = outcome.table.spec, outcome.table.spec.plan, outcome.plan or {}
        assert plan is not None
        effect = plan.effects[plan.primary]
        studies[study] = {
            "title": preset_title(outcome.table),
            "question": plan.question,
            "note": spec.note,
            "block": plan.block,
            "metric": plan.primary,
            "effect": effect,
            "registered": record.get("date"),
            "digest": record.get("digest"),
            "changed": bool(record.get("amendments")),
        }
        for row, one in compared(outcome, plan.primary).items():
            names.setdefault(row, spec.rows[row].name)
            d = one.difference
            if d is not None and not math.isnan(d.mean):
                effects.setdefault(row, {}).setdefault(plan.block, []).append(d.mean)
            figures: dict[str, Any] = {} if d is None else {k: _round(v) for k, v in vars(d).items()}
            figures = {"difference" if k == "mean" else k: v for k, v in figures.items() if k != "n"}
            if one.same_as is not None:
                figures["same_as"] = one.same_as
            cells.setdefault(row, {})[study] = {
                "mean": _round(one.mean),
                "seeds": one.seeds,
                "seconds": _round(one.seconds),
                **figures,
                "verdict": "control" if d is None else verdict_of(d, effect),
            }
    # Rows that are one model in all of their studies are one test.
    first: dict[str, str] = {}
    same = {row: first.setdefault(json.dumps(of, sort_keys=True), row) for row, of in effects.items()}
    tested = over_studies({row: effects[row] for row in first.values()})
    over = {
        row: {key: _round(value) for key, value in vars(tested[one]).items()} for row, one in same.items()
    }
    rows = {
        row: {"name": name, "cells": cells[row], "over_studies": over.get(row)} for row, name in names.items()
    }
    return {"control": controls.pop(), "studies": studies, "rows": rows}


def _round(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 6)


def _number(value: float | None) -> str:
    return DASH if value is None else number(value)
