"""Simulated sites: what each of them is given, and what a reference is given."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from official import write_chexpert, write_nih
from suture.core.errors import ConfigError
from suture.core.labels import union
from suture.data.config import load_site_config
from suture.data.readers import load_table
from suture.execution.job import Job, with_settings
from suture.execution.run import POOLED, run_job
from suture.learning.training import LocalTraining
from suture.methods import METHODS
from suture.methods.surgical import SurgicalAggregation
from suture.models import ModelSpec
from suture_papers.chest_xrays.chest_sites import SHARED, ChestSites, NihSites
from suture_papers.chest_xrays.chexpert import LABELS as CHEXPERT
from suture_papers.chest_xrays.nih import LABELS as NIH
from suture_synthetic.phantom_hospitals import PhantomSites


@pytest.fixture
def nih(tmp_path: Path) -> Path:
    """120 patients of one image each in the official format; every second one has findings."""
    return write_nih(tmp_path / "nih")


def job(simulation: Any, method: str = "surgical") -> Job:
    made = Job(
        name="small",
        title="sites, Surgical Aggregation",
        method=SurgicalAggregation(local=LocalTraining(lr=1e-3, batch_size=16)),
        model=ModelSpec("cnn", size=16),
        rounds=1,
        simulation=simulation,
    )
    return with_settings(made, [f"method={method}"])


def figures(made: Job, out: Path, env: str = "local") -> dict[str, Any]:
    run_job(made, env, out, resume=False, overwrite=False, workers=None)
    return json.loads((out / "metrics.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.complete
@pytest.mark.parametrize("method", ["surgical", "central", "central_full", "individual"])
def test_groups_of_classes_are_those_of_the_sites_whoever_trains(method: str, nih: Path) -> None:
    made = job(NihSites(root=str(nih), classes="disjoint"), method)
    out = nih.parent / method
    metrics = figures(made, out)
    facts = json.loads((out / "run.json").read_text())
    assert [len(site["labels"]) for site in facts["sites"].values()] == [7, 7]
    assert metrics["groups"]["shared"] is None
    assert metrics["groups"]["unique"] is not None
    assert set(facts["threads"]) == {"server", *(["pooled"] if "central" in method else facts["sites"])}


def test_complete_labels_are_given_to_their_reference_alone(nih: Path) -> None:
    for method, columns in (("central", 7), ("central_full", 14)):
        folder = nih.parent / f"sites-{method}"
        NihSites(root=str(nih), classes="disjoint").prepare(folder, folder, 1, METHODS[method]())
        header = (folder / "site-1" / "labels.csv").read_text().splitlines()[0].split(",")
        assert len(header) - 3 == columns
        assert len(load_table(load_site_config(folder / "site-1" / "suture.toml").data).labels) == 7


@pytest.mark.complete
def test_models_that_stay_at_the_sites_are_measured_on_the_servers_images(nih: Path) -> None:
    made = job(NihSites(root=str(nih)), "pfl")
    metrics = figures(made, nih.parent / "pfl")
    held_out = load_table(load_site_config(nih.parent / "pfl" / "sites" / "server" / "suture.toml").data)
    assert metrics["n"] == 2 * len(held_out)
    assert metrics["source"] == "sites' test data"
    assert not (nih.parent / "pfl" / "model").exists()


def test_pooled_patients_and_labels_stay_apart(tmp_path: Path) -> None:
    from suture.learning.samples import load_samples, pool
    from suture.models import ModelSpec

    PhantomSites(images=30, held_out=30).prepare(tmp_path, tmp_path, 1, METHODS["central"]())
    names, spec = ("harbor", "lakeside", "northfield"), ModelSpec("cnn", size=16)
    parts = {n: load_samples(load_site_config(tmp_path / n / "suture.toml"), spec, n) for n in names}
    labels, samples = pool(parts)
    assert labels.names == tuple(sorted(union(own for own, _ in parts.values()).names))
    train = samples["train"]
    assert len(train) == sum(len(own["train"]) for _, own in parts.values())
    first = parts["harbor"][1]["train"]
    assert train.patients[0] == f"harbor/{first.patients[0]}"
    known = {labels.names[i] for i in np.flatnonzero(~np.isnan(train.y[0].numpy()))}
    assert known == set(parts["harbor"][0])


@pytest.mark.parametrize("method", ["central", "central_full", "individual"])
def test_references_do_not_run_in_a_federation(method: str, tmp_path: Path) -> None:
    from suture.flare.recipe import export_job

    made = job(PhantomSites(images=30, held_out=30), method)
    with pytest.raises(ConfigError, match="cannot run in a federation; use --env local"):
        figures(made, tmp_path / "r", env="sim")
    with pytest.raises(ConfigError, match="cannot run in a federation; use --env local"):
        export_job(made, tmp_path)


def test_a_learning_rate_of_a_sites_own(nih: Path) -> None:
    folder = nih.parent / "sites"
    NihSites(root=str(nih), learning_rates={"site-2": 1e-5}).prepare(folder, folder, 1, METHODS["surgical"]())
    rates = [load_site_config(folder / s / "suture.toml").training.lr for s in ("site-1", "site-2")]
    assert rates == [None, 1e-5]
    with pytest.raises(ConfigError, match=r"'site-3'; did you mean 'site-"):
        NihSites(root=str(nih), learning_rates={"site-3": 1e-5}).prepare(folder, folder, 1, METHODS["pfl"]())


@pytest.mark.complete
def test_pooled_data_take_the_learning_rate_of_the_job(tmp_path: Path) -> None:
    """Whatever the first site's own is."""
    sites = PhantomSites(images=30, held_out=30)
    figures(job(sites, "central"), tmp_path / "plain")
    figures(job(replace(sites, learning_rates={"harbor": 0.5}), "central"), tmp_path / "own")
    models = [tmp_path / run / "model" / "model.safetensors" for run in ("plain", "own")]
    assert models[0].read_bytes() == models[1].read_bytes()


def test_fourteen_sites_of_one_class(nih: Path) -> None:
    """More than nine sites: their names sort as their numbers do."""
    folder = nih.parent / "s"
    names = NihSites(root=str(nih), classes="single").prepare(folder, folder, 1, METHODS["surgical"]())
    assert names == sorted(names)
    assert (len(names), names[0]) == (14, "site-01")
    own = [load_table(load_site_config(folder / name / "suture.toml").data).labels.names for name in names]
    assert own == [(name,) for name in NIH]


def test_two_data_sets_are_two_sites(nih: Path) -> None:
    root = write_chexpert(nih.parent / "chexpert")
    simulation = ChestSites(nih=str(nih), chexpert=str(root))
    metrics = figures(job(simulation), nih.parent / "both")
    facts = json.loads((nih.parent / "both" / "run.json").read_text())
    assert {name: len(site["labels"]) for name, site in facts["sites"].items()} == {"chexpert": 13, "nih": 14}
    assert len(metrics["auroc"]) == 20
    assert len(SHARED) == 7
    assert set(SHARED) == set(NIH) & set(CHEXPERT)
    seven = figures(job(ChestSites(nih=str(nih), chexpert=str(root), classes="shared")), nih.parent / "seven")
    assert set(seven["auroc"]) == set(SHARED)
    with pytest.raises(ConfigError, match="NIH and CheXpert"):
        simulation.prepare(nih.parent / "x", nih.parent, 1, METHODS["central_full"]())
    with pytest.raises(ConfigError, match=r"simulation\.chexpert=DIR"):
        ChestSites(nih=str(nih)).prepare(nih.parent / "x", nih.parent, 1, METHODS["surgical"]())
    assert POOLED == "pooled"
