"""`import suture` as a user calls it, in a notebook or a script."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import suture
from suture import sdk
from world import Trained, refused

SMALL = {"simulation.images": 60, "simulation.held_out": 60, "method.local.epochs": 1}


@pytest.fixture
def results(trained: Trained) -> suture.Results:
    return suture.open_results(trained.run)


# Names


@pytest.mark.complete
def test_importing_it_imports_nothing_heavy_and_no_subpackage_takes_the_place_of_a_name() -> None:
    """Whatever is imported: a subpackage becomes an attribute of the package."""
    script = (
        "import importlib, inspect, pkgutil, sys, suture\n"
        "print([m for m in ('torch', 'pandas', 'nvflare') if m in sys.modules])\n"
        "suture.testing.check_method\n"
        "for found in pkgutil.iter_modules(suture.__path__, 'suture.'):\n"
        "    importlib.import_module(found.name) if found.ispkg else None\n"
        "print([name for name in suture.__all__ if inspect.ismodule(getattr(suture, name))])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "['testing']"]


@pytest.mark.parametrize("package", [suture, sdk])
def test_every_name_is_there_and_no_other(package: Any) -> None:
    assert all(getattr(package, name) is not None for name in package.__all__)
    with pytest.raises(AttributeError, match="'lod_job'"):
        package.lod_job  # noqa: B018
    assert set(suture.__all__) <= set(dir(suture))


# Runs and models


@pytest.mark.complete
def test_results_are_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run of the demo whose folder was named from here; its pages say that no patients are shown."""
    monkeypatch.chdir(tmp_path)
    results = suture.run("demo", rounds=2, out="runs/first", settings=SMALL)
    assert results.folder == tmp_path / "runs" / "first"
    assert results.info.status == "finished"
    assert results.info.synthetic
    card = (results.folder / "model" / "README.md").read_text()
    assert all("show no patients" in page for page in (results.report.read_text(), card))
    assert "- synthetic" in card.split("---")[1]
    classes, rounds, sites = results.classes, results.rounds, results.sites
    assert list(classes.index) == sorted(results.info.labels)
    figures = {"auroc", "low", "high", "positives", "negatives", "recall", "step", "sites"}
    assert set(classes.columns) == figures
    assert classes["auroc"].mean() == pytest.approx(results.mean_auroc)
    assert classes.loc["Edema", "sites"] == "harbor"
    assert rounds["status"].to_dict() == {1: "committed", 2: "committed"}
    assert set(sites.index.get_level_values("site")) == {"harbor", "lakeside", "northfield"}
    assert sites.loc[(1, "harbor"), "train_loss"] > 0
    assert "finished" in repr(results)
    pd.testing.assert_frame_equal(suture.open_results(results.folder).classes, classes)


def test_a_model_is_called_on_tensors_and_on_files(results: suture.Results, trained: Trained) -> None:
    model = suture.load_model(results.folder / "model")
    assert isinstance(model, suture.Model)
    assert model.labels == tuple(results.info.labels)
    n, size = len(model.labels), model.prepare.size
    images = torch.randint(0, 256, (3, 1, size, size), dtype=torch.uint8)
    scores = model(images)
    assert scores.shape == (3, n)
    assert torch.equal(scores, results.model()(images))
    assert bool(((scores > 0) & (scores < 1)).all())
    folder = trained.study / "alpha" / "images"
    files = sorted(folder.iterdir())[:3]
    frame = model.predict(files)
    assert (list(frame.columns), list(frame.index)) == (list(model.labels), [str(path) for path in files])
    pd.testing.assert_frame_equal(model.predict(folder).iloc[:3], frame)
    for other in (images[..., :-1], images.expand(-1, 3, -1, -1), images.float()):
        with refused("uint8", size):
            model(other)


@pytest.mark.parametrize("kind", [str, Path])
def test_paths_are_text_or_paths_and_start_where_the_call_is(
    kind: type, results: suture.Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(results.folder.parent)
    name = results.folder.name
    found = [suture.open_results(kind(name)), suture.Results(kind(name))]
    network = suture.load_model(kind(f"{name}/model"))
    frame = network.predict(kind("study/alpha/images"))
    (tmp_path / "mine").mkdir()
    job = '[method]\nname = "surgical"\n[model]\nname = "cnn"\n'
    (tmp_path / "mine" / "job.toml").write_text(f"rounds = 1\n{job}")
    monkeypatch.chdir(tmp_path)
    loaded = suture.load_job(kind("mine"))
    assert [one.folder for one in found] == [results.folder] * 2
    assert [one.info.status for one in found] == ["finished"] * 2
    assert len(frame)
    assert loaded.simulation is not None
    assert loaded.simulation.folder == str(tmp_path / "mine")
    with refused(tmp_path / "mine"):
        suture.run(loaded, out=kind("r"))


@pytest.mark.complete
def test_settings_are_those_of_the_command_line(tmp_path: Path) -> None:
    """None is a value, the order does not matter, and a named argument wins, as an option does."""
    job = replace(suture.load_job("demo"), patience=3)
    settings = {**SMALL, "rounds": 5, "method.keep_local": True, "method": "fedavg", "patience": None}
    done = suture.run(job, out=tmp_path / "r", rounds=1, seed=np.int64(7), settings=settings)  # type: ignore[arg-type]
    schedule, plan = (json.loads((done.folder / "job.json").read_text())[key] for key in ("schedule", "plan"))
    assert (schedule["rounds"], schedule["patience"]) == (1, None)
    assert (plan["method"], plan["seed"], plan["hyperparameters"]["keep_local"]) == ("fedavg", 7, True)


def test_mistakes_are_one_sentence(results: suture.Results, tmp_path: Path) -> None:
    for named, call in (
        ("'demo'", lambda: suture.run("demoo")),
        ("'imges'", lambda: suture.run("demo", settings={"imges": 3})),
        ("study", lambda: suture.run("demo", rounds=2, out=results.folder, settings=SMALL)),
        (str(tmp_path), lambda: suture.open_results(tmp_path)),
        ("'seed'", lambda: suture.run("demo", seed=tmp_path)),  # type: ignore[arg-type]
        ("list of images", lambda: results.model().predict([])),
        ("'gpu'", lambda: suture.load_model(results.folder / "model", device="gpu")),
    ):
        with refused(named):
            call()


# Methods


@pytest.fixture
def near() -> Iterator[type[suture.Method]]:
    """A method of this process, registered for a test."""

    @suture.register
    @suture.hyperparameters
    class Near(suture.LocalAveraging):
        """FedProx in a notebook."""

        about = suture.About("near", "Near", "a notebook")
        labels = suture.LabelUse(view="own")
        mu: float = 1.0

        def objective(self, model, batch, reference):  # type: ignore[no-untyped-def]
            pairs = zip(model.parameters(), reference.parameters(), strict=True)
            distance = sum((w - received).square().sum() for w, received in pairs)
            return super().objective(model, batch, reference) + self.mu / 2 * distance

    yield Near
    from suture.methods import METHODS

    del METHODS["near"]


@pytest.mark.complete
def test_a_method_of_the_notebook_runs_here(near: type[suture.Method], tmp_path: Path) -> None:
    assert suture.known_methods()["near"] is near
    job = suture.Job(
        name="own",
        title="a method of one's own",
        method=near(local=suture.LocalTraining(lr=1e-3, batch_size=16)),  # type: ignore[call-arg]
        model=suture.ModelSpec("cnn", size=64),
        rounds=1,
        augmentation=suture.Augmentation(),
        simulation=suture.PhantomSites(images=40, held_out=30),
    )
    assert suture.run(job, out=tmp_path / "own").info.method.name == "near"
    assert suture.run("demo", rounds=1, out=tmp_path / "set", settings={**SMALL, "method": "near"}).mean_auroc
    with refused("entry point"):
        suture.run(job, "sim", tmp_path / "sim")
    assert not (tmp_path / "sim").exists()


def test_only_a_complete_method_of_a_new_name_is_registered() -> None:
    from suture.methods.surgical import SurgicalAggregation

    with refused("'surgical'"):
        suture.register(SurgicalAggregation)
    whats: tuple[Any, ...] = (int, "near", suture.LocalTraining, suture.Method)
    for what in whats:
        with refused():
            suture.register(what)
