"""All settings of a run, as it was done and as its job is now: a run's name knows only what is overridden."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from suture.core.validation import flat
from suture.experiments.spec import DATA
from suture.simulation.job import load_job, with_settings

_SCHEDULE = ("rounds", "selection", "patience")
"""What of the schedule changes a model."""


def settings_done(done: Path, data_root: Path | None) -> dict[str, Any]:
    """The settings that a run in the folder `done` was made with, by dotted name; paths with ``{data}``."""
    text = (done / "job.json").read_text()
    content = json.loads(text if data_root is None else text.replace(str(data_root), DATA))
    return _settings(content["plan"], content["schedule"], content.get("simulation", {}))


def settings_now(name: str, options: list[str]) -> dict[str, Any]:
    """The same of a job as it stands.

    Args:
        options: ``key=value``, as of `suture run --set`.

    Raises:
        ConfigError: the job, or a setting, does not exist any more.
    """
    job = with_settings(load_job(name), options)
    # Its words are those of documents that only a simulation has read.
    job = dataclasses.replace(job, model=dataclasses.replace(job.model, vocabulary="clinical"))
    simulation = dataclasses.asdict(job.simulation) if job.simulation else {}
    settings = _settings(job.plan("x").to_dict(), job.schedule().to_dict(), simulation)
    plain: dict[str, Any] = json.loads(json.dumps(settings))
    return plain


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """The first setting that is not as it was; one that there was not yet does not count."""
    return next((key for key in sorted(before) if key not in now or now[key] != before[key]), None)


def _settings(
    plan: Mapping[str, Any], schedule: Mapping[str, Any], simulation: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "seed": plan["seed"],
        "method": plan["method"],
        **{key: schedule[key] for key in _SCHEDULE},
        **flat("method", plan["hyperparameters"]),
        **flat("model", {k: v for k, v in plan["model"].items() if k != "vocabulary"}),
        **flat("augmentation", plan["augmentation"]),
        **(flat("simulation", simulation) if simulation else {}),  # a folder of an older version has none
    }
