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

SMALL = {"simulation.images": 60, "simulation.held_out": 60, "method.local.epochs": 1}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> suture.Results:
    """A short run of the demo, started with a relative path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("notebook"))
        return suture.run("demo", rounds=2, out="runs/first", settings=SMALL)


@pytest.mark.complete
def test_importing_it_imports_nothing_heavy() -> None:
    script = "import sys, suture; print([m for m in ('torch', 'pandas', 'nvflare') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_name_is_there_and_no_other() -> None:
    assert 15 <= len(suture.__all__) <= 30
    for name in suture.__all__:
        assert getattr(suture, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'lod_job'; it has About"):
        suture.lod_job  # noqa: B018
    assert set(suture.__all__) <= set(dir(suture))


@pytest.mark.complete
def test_no_subpackage_takes_the_place_of_a_public_name() -> None:
    """Whatever was imported before: a subpackage becomes an attribute of the package when it is imported."""
    script = (
        "import importlib, inspect, pkgutil, suture\n"
        "for found in pkgutil.iter_modules(suture.__path__, 'suture.'):\n"
        "    importlib.import_module(found.name) if found.ispkg else None\n"
        "print([name for name in suture.__all__ if inspect.ismodule(getattr(suture, name))])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['testing']"


@pytest.mark.complete
@pytest.mark.parametrize(
    "line",
    [
        "import suture.testing; suture.testing.check_method",
        "import suture; suture.testing.check_method",
    ],
)
def test_the_checks_of_a_method_are_a_module(line: str) -> None:
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.complete
def test_results_are_frames(results: suture.Results) -> None:
    assert results.info.status == "finished"
    assert results.report.is_file()
    assert results.info.synthetic
    card = (results.folder / "model" / "README.md").read_text()
    for page in (results.report.read_text(), card):
        assert "show no patients" in page
    assert "- synthetic" in card.split("---")[1]
    assert results.folder.is_absolute()
    classes, rounds, sites = results.classes, results.rounds, results.sites
    assert list(classes.index) == sorted(results.info.labels)
    assert {"auroc", "low", "high", "positives", "negatives", "recall", "step", "sites"} == set(
        classes.columns
    )
    assert classes["auroc"].mean() == pytest.approx(results.mean_auroc)
    assert classes.loc["Edema", "sites"] == "harbor"
    assert list(rounds.index) == [1, 2]
    assert (rounds["status"] == "committed").all()
    assert set(sites.index.get_level_values("site")) == {"harbor", "lakeside", "northfield"}
    assert sites.loc[(1, "harbor"), "train_loss"] > 0
    assert "finished" in repr(results)
    again = suture.open_results(results.folder)
    pd.testing.assert_frame_equal(again.classes, classes)


@pytest.mark.complete
def test_a_model_is_called_on_tensors_and_on_files(results: suture.Results) -> None:
    model = suture.load_model(results.folder / "model")
    assert isinstance(model, suture.Model)
    assert model.labels == tuple(results.info.labels)
    images = torch.randint(0, 256, (3, 1, 64, 64), dtype=torch.uint8)
    scores = model(images)
    assert scores.shape == (3, len(model.labels))
    assert torch.equal(scores, results.model()(images))
    assert bool(((scores > 0) & (scores < 1)).all())
    folder = results.folder / "sites" / "harbor" / "images"
    files = sorted(folder.iterdir())[:3]
    frame = model.predict(files)
    assert list(frame.columns) == list(model.labels)
    assert list(frame.index) == [str(path) for path in files]
    pd.testing.assert_frame_equal(model.predict(folder).iloc[:3], frame)


@pytest.mark.parametrize("kind", [str, Path])
def test_paths_are_text_or_paths_and_start_where_the_call_is(
    kind: type, results: suture.Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = results.folder.parent
    monkeypatch.chdir(runs)
    first, model = kind("first"), kind("first/model")
    found = [suture.open_results(first), suture.Results(first)]
    network = suture.load_model(model)
    frame = network.predict(kind("first/sites/harbor/images"))
    (runs / "mine").mkdir(exist_ok=True)
    job = '[method]\nname = "surgical"\n[model]\nname = "cnn"\n'
    (runs / "mine" / "job.toml").write_text(f"rounds = 1\n{job}")
    loaded = suture.load_job(kind("mine"))
    monkeypatch.chdir(tmp_path)
    assert [one.folder for one in found] == [results.folder] * 2
    assert [one.info.status for one in found] == ["finished"] * 2
    assert len(frame)
    assert loaded.simulation is not None
    assert loaded.simulation.folder == str(runs / "mine")
    with pytest.raises(suture.SutureError, match="contains no site"):
        suture.run(loaded, out=kind("r"))


@pytest.mark.parametrize(
    "images",
    [
        torch.zeros(1, 1, 32, 32, dtype=torch.uint8),
        torch.zeros(1, 3, 64, 64, dtype=torch.uint8),
        torch.zeros(1, 1, 64, 64),
    ],
)
def test_other_images_are_refused(results: suture.Results, images: torch.Tensor) -> None:
    with pytest.raises(suture.SutureError, match=r"the model reads uint8 images \[n, 1, 64, 64\]"):
        results.model()(images)


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
    with pytest.raises(suture.SutureError, match="entry point"):
        suture.run(job, "sim", tmp_path / "sim")
    assert not (tmp_path / "sim").exists()


def test_a_method_of_suture_is_not_replaced() -> None:
    from suture.methods.surgical import SurgicalAggregation

    with pytest.raises(suture.SutureError, match="there is a method 'surgical' already"):
        suture.register(SurgicalAggregation)


def test_mistakes_are_one_sentence(results: suture.Results, tmp_path: Path) -> None:
    with pytest.raises(suture.SutureError, match="did you mean 'demo'"):
        suture.run("demoo")
    with pytest.raises(suture.SutureError, match="unknown setting 'imges'"):
        suture.run("demo", settings={"imges": 3})
    with pytest.raises(suture.SutureError, match="contains a run of demo"):
        suture.run("demo", rounds=2, out=results.folder, settings=SMALL)
    with pytest.raises(suture.SutureError, match="is not a run folder"):
        suture.open_results(tmp_path)
    with pytest.raises(suture.SutureError, match="setting 'seed' is a PosixPath"):
        suture.run("demo", seed=tmp_path)  # type: ignore[arg-type]
    with pytest.raises(suture.SutureError, match="list of images is empty"):
        results.model().predict([])
    with pytest.raises(suture.SutureError, match="device 'gpu' cannot be used"):
        suture.load_model(results.folder / "model", device="gpu")


@pytest.mark.parametrize("what", [int, "near", suture.LocalTraining, suture.Method], ids=str)
def test_only_a_complete_method_is_registered(what: Any) -> None:
    with pytest.raises(
        suture.SutureError, match=r"is not a subclass of suture\.Method|lacks about and labels"
    ):
        suture.register(what)


@pytest.mark.complete
def test_settings_are_those_of_the_command_line(results: suture.Results, tmp_path: Path) -> None:
    """None is a value, the order does not matter, and a named argument wins, as an option does."""
    job = replace(suture.load_job("demo"), patience=3)
    settings = {**SMALL, "rounds": 5, "method.keep_local": True, "method": "fedavg", "patience": None}
    done = suture.run(job, out=tmp_path / "r", rounds=1, seed=np.int64(7), settings=settings)  # type: ignore[arg-type]
    schedule, plan = (json.loads((done.folder / "job.json").read_text())[key] for key in ("schedule", "plan"))
    assert (schedule["rounds"], schedule["patience"]) == (1, None)
    assert (plan["method"], plan["seed"], plan["hyperparameters"]["keep_local"]) == ("fedavg", 7, True)


def test_the_reference_names_everything() -> None:
    page = (Path(__file__).resolve().parents[1] / "docs" / "reference" / "python.md").read_text()
    assert [name for name in suture.__all__ if name not in page] == []


def test_what_authors_import_is_there_and_no_other() -> None:
    from suture import sdk

    for name in sdk.__all__:
        assert getattr(sdk, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Methods'"):
        sdk.Methods  # noqa: B018
