"""A table of two rows, and stored results whose figures are written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from suture.core.validation import parse
from suture_papers.tables.results import ResultStore
from suture_papers.tables.runs import Run
from suture_papers.tables.spec import TableSpec

SPEC: dict[str, Any] = {
    "title": "two methods",
    "source": "nowhere",
    "job": "demo",
    "reference": "ours",
    "rows": {
        "theirs": {
            "name": "Vanilla FL",
            "set": {"method": "vanilla"},
            "published": {"AUROC, all classes": "0.79"},
        },
        "ours": {"name": "Surgical Aggregation", "set": {"method": "surgical"}},
    },
    "presets": {"tiny": {"note": "for tests", "seeds": [1, 2, 3], "set": {"rounds": 1}}},
}


def table_spec(**changes: Any) -> TableSpec:
    return parse(TableSpec, {**SPEC, **changes}, "test")


def result(
    run: Run, folder: Path, areas: dict[str, float | None], auroc: float | None = 0.5, **settings: Any
) -> None:
    """Store a result by hand: both sites annotate class A, one of them B."""
    a, b = areas["A"], areas["B"]
    content = {
        "run": {"job": run.job, "settings": run.settings, "sites": {"x": ["A", "B"], "y": ["A"]}, **settings},
        "metrics": {
            "mean_auroc": None if a is None or b is None else (a + b) / 2,
            "auroc": areas,
            "groups": {"shared": a, "unique": b},
        },
        "validation_auroc": auroc,
        "validation_loss": 0.1,
        "seconds": 36.0,
    }
    store(folder).put(run.name, content)


def store(folder: Path) -> ResultStore:
    return ResultStore(folder, "test")


def change(folder: Path, run: Run, **fields: Any) -> None:
    """Replace fields of a stored result."""
    record = store(folder).find(run.name)
    assert record is not None
    store(folder).put(run.name, {**record, **fields})


def delete(folder: Path, *names: str) -> None:
    """Delete the lines of stored records, as a person would."""
    for path in folder.glob("*.jsonl"):
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if not any(f'"name":"{n}"' in line for n in names)))
