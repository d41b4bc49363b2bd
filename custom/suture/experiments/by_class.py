"""Single classes of some rows, compared image by image: no mean over seeds, but one model beside another.

Source: Kulkarni et al., MIDL 2023, Appendix B (Tables 3 and 4).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from suture.core.files import write_json
from suture.data.config import SiteConfig, StorageConfig, load_site_config
from suture.experiments.pool import SERVER, Place
from suture.experiments.runs import Run, final_runs
from suture.experiments.spec import Experiment, Preset
from suture.experiments.tuning import chosen
from suture.learning.comparison import Compared, compare
from suture.protocol.messages import ClassScore
from suture.simulation.machine import this_machine

Kept = Mapping[str, Mapping[str, Mapping[str, float | None]]]
"""By row and class: ``auroc``, ``low``, ``high``, and of all rows but the first ``p``."""


def compare_rows(experiment: Experiment, preset: Preset, place: Place) -> None:
    """Compares the models of the first seed on the images that their simulation held out, once.

    What comes out is kept beside the results of runs. Where a model is gone it says so, and keeps nothing.

    Raises:
        SutureError: the images cannot be read.
    """
    runs = _runs(experiment, preset, place.results)
    if runs is None or (path := _path(place.results, runs)).exists():
        return
    folders = [place.work / run.name for run in runs.values()]
    described = folders[0] / SERVER / "suture.toml"
    for needed in (described, *(folder / "model" / "model.json" for folder in folders)):
        if not needed.exists():
            place.say(
                f"warning: single classes are not compared: there is no {needed}; delete the run's kept "
                "result and its folder, and it is done again"
            )
            return
    storage = StorageConfig(state=place.work, cache=place.work / "tests")
    config, device = SiteConfig(data=load_site_config(described).data, storage=storage), this_machine().device
    first, *others = runs
    found: dict[str, dict[str, Any]] = {}
    for row, folder in zip(others, folders[1:], strict=True):
        compared = compare(folders[0] / "model", folder / "model", config, "test", device)
        found[first] = {name: _figures(one.a) for name, one in compared.items()}
        found[row] = {name: _figures(one.b) | {"p": _p(one)} for name, one in compared.items()}
    write_json(path, {"runs": {row: run.name for row, run in runs.items()}, "rows": found})
    place.say(f"compared, class by class: {', '.join(runs)}")


def compared_rows(experiment: Experiment, preset: Preset, kept: Path) -> Kept | None:
    """What `compare_rows` kept; None where it has not been done."""
    runs = _runs(experiment, preset, kept)
    if runs is None or not (path := _path(kept, runs)).exists():
        return None
    rows: Kept = json.loads(path.read_text())["rows"]
    return rows


def _runs(experiment: Experiment, preset: Preset, kept: Path) -> dict[str, Run] | None:
    """The run of each row at the first seed; None where none is asked for, or a rate is not tuned yet."""
    if experiment.by_class is None or set(experiment.by_class.rows) & set(preset.skip):
        return None
    tuned = chosen(experiment, preset, kept)
    if preset.tune and any((row, "None") not in tuned for row in experiment.by_class.rows):
        return None
    values = dict.fromkeys(((row, "None") for row in experiment.rows), None) | tuned
    first = preset.seeds[0]
    runs = {run.row: run for run in final_runs(experiment, preset, values) if run.settings["seed"] == first}
    return {row: runs[row] for row in experiment.by_class.rows}


def _path(kept: Path, runs: Mapping[str, Run]) -> Path:
    names = json.dumps([run.name for run in runs.values()])
    return kept / f"by-class-{hashlib.sha256(names.encode()).hexdigest()[:10]}.json"


def _figures(score: ClassScore) -> dict[str, float | None]:
    return {key: _rounded(getattr(score, key)) for key in ("auroc", "low", "high")}


def _p(one: Compared) -> float | None:
    p = one.difference.p
    return None if p != p else _rounded(p)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
