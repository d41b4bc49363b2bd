"""Figures beside an experiment's table: what its data are like, and what one of its models makes of them."""

from __future__ import annotations

from pathlib import Path

from suture.core.files import atomic_write
from suture.data.config import SiteConfig
from suture.data.readers import load_table
from suture.experiments.pool import Place
from suture.experiments.runs import Run, final_runs
from suture.experiments.spec import Drawing, Experiment, Preset
from suture.experiments.testing import site_config
from suture.experiments.tuning import chosen
from suture.reports.cooccurrence import cooccurrence, frequencies, relate, unit_of
from suture.reports.plots import latent, plot_contingencies, plot_cooccurrence, plot_frequencies
from suture.simulation.machine import this_machine


def write_plots(experiment: Experiment, preset: Preset, place: Place, folder: Path, stem: str) -> None:
    """Writes STEM-DRAWING.svg of each drawing whose data and model are there.

    One of a model is drawn again only if the model is younger than the file.

    Args:
        stem: as the experiment's other files are named.

    Raises:
        SutureError: the data cannot be read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, drawing in experiment.drawings.items():
        path = folder / f"{stem}-{name}.svg"
        if lacking := [source for source in drawing.sources if source in place.absent]:
            place.say(f"warning: drawing {name!r} is left out: there is no {place.absent[lacking[0]]}")
        elif not drawing.of_a_model:
            _write(path, _of_labels(experiment, drawing, place), place)
        else:
            _draw_model(experiment, preset, name, place, path)


def drawn(experiment: Experiment, folder: Path, stem: str) -> dict[str, str]:
    """The drawings that are there, with their captions."""
    found = {f"{stem}-{name}.svg": _caption(drawing) for name, drawing in experiment.drawings.items()}
    return {file: caption for file, caption in found.items() if (folder / file).exists()}


def _caption(drawing: Drawing) -> str:
    what = {
        "frequencies": "How often each class occurs",
        "cooccurrence": f"Which classes occur together in {drawing.sources[0]}",
        "features": "Features of test images",
        "predictions": "Predictions of related classes",
    }[drawing.of]
    return f"{what} ({drawing.source})" if drawing.source else what


def _of_labels(experiment: Experiment, drawing: Drawing, place: Place) -> bytes:
    tables = {name: load_table(_config(experiment, name, place).data) for name in drawing.sources}
    if drawing.of == "frequencies":
        return plot_frequencies({name: frequencies(table) for name, table in tables.items()})
    name, table = next(iter(tables.items()))
    unit = unit_of(table)
    return plot_cooccurrence(table.labels.names, cooccurrence(table, per=unit), name, unit)


def _draw_model(experiment: Experiment, preset: Preset, name: str, place: Place, path: Path) -> None:
    drawing = experiment.drawings[name]
    run = _run_of(experiment, preset, drawing, place.results)
    if run is None:
        place.say(f"warning: drawing {name!r} is left out: this preset skips its row {drawing.row!r}")
        return
    model = place.work / run.name / "model"
    weights = model / "model.json"
    if not weights.exists():
        place.say(
            f"warning: drawing {name!r} is left out: {model} holds no model; delete the run's kept result "
            "and its folder, and it is done again"
        )
        return
    if path.exists() and path.stat().st_mtime > weights.stat().st_mtime:
        return
    configs = {source: _config(experiment, source, place) for source in drawing.sources}
    device = this_machine().device
    if drawing.of == "features":
        _write(path, latent(model, configs, "test", device=device), place)
    else:
        _write(path, plot_contingencies(relate(model, list(configs.values()), "test", device=device)), place)


def _run_of(experiment: Experiment, preset: Preset, drawing: Drawing, kept: Path) -> Run | None:
    """The row's run of the first seed; None where the preset skips the row."""
    tuned = chosen(experiment, preset, kept)
    return next((run for run in final_runs(experiment, preset, tuned) if run.row == drawing.row), None)


def _config(experiment: Experiment, test: str, place: Place) -> SiteConfig:
    return site_config(test, experiment.tests[test], place.work, place.data_root)


def _write(path: Path, svg: bytes, place: Place) -> None:
    atomic_write(path, svg)
    place.say(f"drawn: {path}")
