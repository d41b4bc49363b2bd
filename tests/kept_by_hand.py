"""An experiment of two rows, and kept results whose figures are written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from suture.core.validation import parse
from suture.experiments.runs import Run
from suture.experiments.spec import Experiment

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


def experiment(**changes: Any) -> Experiment:
    return parse(Experiment, {**SPEC, **changes}, "test")


def result(
    run: Run, folder: Path, areas: dict[str, float | None], auroc: float | None = 0.5, **settings: Any
) -> None:
    """Writes a kept result by hand: class A is known to both sites, B to one."""
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
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{run.name}.json").write_text(json.dumps(content))
