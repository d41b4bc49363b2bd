"""A table of two rows, and stored results whose figures are written by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from suture.core.validation import parse
from suture_papers.tables.outcome import Outcome, collect
from suture_papers.tables.results import ResultStore
from suture_papers.tables.runs import Run, final_runs
from suture_papers.tables.spec import Table, TableSpec

Areas = dict[str, float | None]

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


def result(run: Run, folder: Path, areas: Areas, auroc: float | None = 0.5, **settings: Any) -> None:
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


def filled(table: Table, folder: Path, areas: Callable[[Run], Areas | None]) -> Outcome:
    """Store a result of each run that has areas, and collect them."""
    for run in final_runs(table, {}):
        if (own := areas(run)) is not None:
            result(run, folder, own)
    return collect(table, store(folder))


def tuned_spec(**changes: Any) -> TableSpec:
    columns = [
        {"name": "A", "task": "A"},
        {"name": "epochs", "task": "A", "metric": "epochs"},
        {"name": "B, F1", "task": "B", "metric": "f1"},
    ]
    rows = {"theirs": {"name": "FL", "set": {"method": "fl"}}, "ours": {"name": "PMFL"}}
    more = {"job": "pmfl_openi", "pairs": "tuned", "goal": "theirs", "columns": columns, "rows": rows}
    presets = {"tiny": {"note": "for tests", "seeds": [1]}}
    return parse(TableSpec, {**SPEC, **more, "presets": presets, **changes}, "test")


def task(*ends: float) -> dict[str, Any]:
    """A run of two epochs for each end; it is within .01 of its best in the second."""
    rest = {"precision": 0.5, "recall": 0.5, "train": 90, "test": 10, "positives": 5}
    return {"runs": [{"auroc": [0.5, end], "f1": end / 2, **rest} for end in ends]}


def tuned(run: Run, folder: Path, **tasks: Any) -> None:
    result(run, folder, {"A": None, "B": None})
    change(folder, run, tuned=tasks)


def tuned_outcome(spec: TableSpec, folder: Path) -> Outcome:
    """Ours is better by .1, .2 and .3 on task A, and by 0 on B."""
    for run in final_runs(spec.preset(None), {}):
        more = 1 if run.row == "ours" else 0
        a = task(0.6 + 0.1 * more, 0.6 + 0.2 * more, 0.6 + 0.3 * more)
        tuned(run, folder, A=a, B=task(0.8, 0.9, 1.0))
    return collect(spec.preset(None), store(folder))


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
