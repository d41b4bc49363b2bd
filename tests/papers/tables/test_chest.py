"""The real-world tables of both papers, run whole on small releases of the three data sets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from official import write_chexpert, write_mimic, write_nih
from suture_papers.tables.cells import lines
from suture_papers.tables.conduct import Session, conduct
from suture_papers.tables.loading import load_spec
from suture_papers.tables.outcome import collect
from suture_papers.tables.results import ResultStore
from suture_papers.tables.spec import Preset, TableSpec

pytestmark = pytest.mark.complete


SMALL = {
    "simulation.nih": "{data}/nih",
    "simulation.chexpert": "{data}/chexpert",
    "model.name": "cnn",
    "model.size": 16,
    "model.weights": None,
    "model.hidden": 0,
    "model.dropout": 0.0,
    "method.local.lr": 1e-3,
    "method.local.warmup_epochs": 0,
    "rounds": 1,
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    root = tmp_path / "data"
    write_nih(root / "nih")
    write_chexpert(root / "chexpert")
    write_mimic(root / "mimic-cxr-jpg")
    return root


@pytest.mark.parametrize(
    ("name", "rows", "undefined"),
    [
        (
            "chest_all",
            ("nih_baseline", "pfl_average", "surgical_average", "surgical_frozen"),
            {("nih_baseline", "CheXpert"), ("nih_baseline", "MIMIC-LT"), ("pfl_average", "MIMIC-LT")},
        ),
        (
            "midl_all",
            ("chexpert_baseline", "central", "surgical"),
            {("chexpert_baseline", "NIH"), ("chexpert_baseline", "NIH, loss")},
        ),
    ],
)
def test_a_mean_is_defined_where_every_class_was_learned(
    name: str, rows: tuple[str, ...], undefined: set[tuple[str, str]], data: Path, tmp_path: Path
) -> None:
    spec = load_spec(name)
    skip = tuple(row for row in spec.rows if row not in rows)
    spec = replace(spec, presets={"small": Preset("small", (1,), SMALL, skip=skip)})
    store = ResultStore(tmp_path / "results", "test")
    outcome = conduct(spec.preset(None), Session(store, tmp_path / "work", data, lambda _: None), 2)
    found = {line.row: line for line in lines(outcome)}
    empty = {
        (row, column)
        for row, line in found.items()
        for column, f in line.estimates.items()
        if f.mean != f.mean
    }
    assert empty == undefined
    reference = found[spec.reference]
    other = found["pfl_average" if name == "chest_all" else "central"]
    against = other.estimates["NIH"].against
    assert against is not None
    assert against.n > 5  # over the classes that the test set defines
    assert reference.estimates["NIH"].against is None
    if name == "midl_all":
        _show_intervals(spec, tmp_path / "results")
        shared = replace(load_spec("midl_shared"), presets=spec.presets)
        _show_intervals(shared, tmp_path / "results")  # the same runs


def _show_intervals(spec: TableSpec, results: Path) -> None:
    """Each AUROC of the reference row has one, and each loss is defined."""
    found = {line.row: line for line in lines(collect(spec.preset(None), ResultStore(results, "test")))}
    figures = found[spec.reference].estimates
    assert all(one.mean == one.mean for one in figures.values())
    with_interval = {column for column, figure in figures.items() if figure.bounds is not None}
    assert with_interval == {column.name for column in spec.columns if column.spread == "interval"}
