"""Runs of long-tailed sites: what their server groups, what is told apart, and which models are measured."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from test_long_tailed_sites import prepared, tables, write_flamby, write_hyperkvasir, write_tones

from suture.core.errors import ConfigError
from suture.data.config import load_site_config
from suture.data.readers import load_table
from suture.execution.job import Job, load_job, with_settings
from suture.execution.run import run_job
from suture.federation.plan import needed_sites
from suture.learning.training import LocalTraining
from suture.methods.fedavg import FedAvg
from suture.models import ModelSpec
from suture_papers.fedmas.hyperkvasir_sites import HyperKvasirSites
from suture_papers.skin_lesions.flamby import LABELS
from suture_papers.skin_lesions.flamby_sites import AttributeSites, FlambySites


def test_sites_that_keep_their_models_have_the_test_images_too(tmp_path: Path) -> None:
    """As those of a method whose models stay; the server keeps its own, for the global model."""
    root = write_hyperkvasir(tmp_path / "hk")
    simulation = HyperKvasirSites(root=str(root), clients=2)
    names = simulation.prepare(tmp_path / "s", tmp_path, 1, FedAvg(keep_local=True))
    found = {name: load_table(load_site_config(tmp_path / "s" / name / "suture.toml").data) for name in names}
    plain = tables(prepared(simulation, tmp_path / "t"))
    for name, table in found.items():
        assert table.of("test").images == plain["server"].of("test").images
        assert table.of("train").images == plain[name].of("train").images
        assert not len(plain[name].of("test"))


@pytest.mark.complete
def test_long_tailed_sites_run(tmp_path: Path) -> None:
    """All the way, with a server that selects, tests and groups; tones are told apart, and no label."""
    flamby = write_flamby(tmp_path / "flamby")
    made = Job(
        name="small",
        title="long tail",
        method=FedAvg(local=LocalTraining(lr=1e-3, iterations=2, batch_size=8), keep_local=True),
        model=ModelSpec("cnn", size=16, color=True),
        rounds=2,
        selection="server_balanced_accuracy",
    )
    tones = AttributeSites(tones=str(write_tones(tmp_path)), root=str(flamby), clients=2, split="images")
    for name, simulation in {"centres": FlambySites(root=str(flamby)), "tones": tones}.items():
        job = dataclasses.replace(made, simulation=simulation)
        run_job(job, "local", tmp_path / name, resume=False, overwrite=False, workers=None)
        metrics = json.loads((tmp_path / name / "metrics.json").read_text())
        assert metrics["source"] == "server test set"
        assert metrics["n"] > 0
        lines = (tmp_path / name / "history.jsonl").read_text().splitlines()
        found = [json.loads(line)["validation"]["server_balanced_accuracy"] for line in lines]
        assert metrics["selected_round"] == 1 + found.index(max(found))
        groups = metrics["long_tail"]
        assert {group: sorted(names) for group, names in groups["classes"].items()} == {
            "tail": sorted(LABELS.names)  # 44 images of a class at most
        }
        recall = [value for value in metrics["recall"].values() if value is not None]
        assert groups["accuracy"]["tail"] == groups["accuracy"]["all"] == pytest.approx(np.mean(recall))
        assert metrics["overall"]["balanced_accuracy"] == pytest.approx(np.mean(recall))
        if name == "tones":
            by_tone = metrics["attributes"]["values"]
            assert sum(by_tone[tone]["n"] for tone in ("light", "dark")) == metrics["n"]
            right = sum(part["n"] * part["accuracy"] for part in by_tone.values())
            assert right == pytest.approx(metrics["n"] * metrics["overall"]["accuracy"])
            mean = metrics["attributes"]["mean"]["balanced_accuracy"]
            assert mean == pytest.approx(np.mean([p["balanced_accuracy"] for p in by_tone.values()]))
        else:
            assert metrics["attributes"] == {}
        assert set(metrics["local_models"]["sites"]) == set(metrics["sites"])


@pytest.mark.complete
def test_the_job_of_skin_tones_runs_on_a_few_images(tmp_path: Path) -> None:
    """Its command, on small files; the prior is the one that needs no download."""
    root, tones = write_flamby(tmp_path / "flamby"), write_tones(tmp_path)
    data = [f"simulation.tones={tones}", f"simulation.root={root}", f"simulation.lists={root}"]
    small = ["rounds=1", "model.name=cnn", "model.size=16", "model.projection=128"]
    prior = ["method.prior.name=phantoms", "method.prior.size=32"]
    job = with_settings(load_job("fedmas_tones"), [*data, *small, *prior])
    run_job(job, "local", tmp_path / "r", resume=False, overwrite=False, workers=None)
    run = json.loads((tmp_path / "r" / "run.json").read_text())
    assert list(run["sites"]) == [f"isic-{i}" for i in range(4)]
    assert run["prior"]["name"] == "phantoms"
    metrics = json.loads((tmp_path / "r" / "metrics.json").read_text())
    assert set(metrics["attributes"]["values"]) == {"light", "dark"}
    assert min(metrics["weighting"]["mean_share"].values()) > 0
    with pytest.raises(ConfigError, match=r"skin tones with --set simulation"):
        run_job(
            load_job("fedmas_tones"), "local", tmp_path / "t", resume=False, overwrite=False, workers=None
        )


@pytest.mark.parametrize("name", ["fedmas_ham10000", "fedmas_hyperkvasir", "fedmas_isic", "fedmas_tones"])
def test_half_of_the_sites_are_enough_for_fed_mas(name: str) -> None:
    schedule = load_job(name).schedule()
    assert [needed_sites(schedule.min_sites, n) for n in (1, 4, 6, 8)] == [1, 2, 3, 4]
