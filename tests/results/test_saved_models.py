"""A saved model on data: measured, compared, decided and plotted; and methods compared on one's own study."""

from __future__ import annotations

import json
import math
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import suture as api
from small_hospitals import EVERY, small_study
from small_models import CNN_16, saved_model
from suture.core.errors import ConfigError, DataError, LabelError
from suture.data.config import SiteConfig, load_site_config, write_site_config
from suture.data.readers import read_table
from suture.execution.job import load_job, with_settings
from suture.execution.study import StudySites
from suture.learning.metrics import auroc
from suture.models import ModelSpec
from suture.protocol.decisions import DecisionSettings
from suture_results.comparison import compare
from suture_results.cooccurrence import predicted_together
from suture_results.method_comparison import _fold, compare_methods
from suture_results.plots import plot_features
from suture_results.run_options import load_sources
from suture_results.saved_models import as_metrics, evaluate, models_of
from suture_results.trained_images import remark
from world import Trained, refused, site_config, suture, write_table


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of Fibrosis, Hernia, Mass and Nodule."""
    return saved_model(tmp_path / "model", CNN_16, EVERY)


@pytest.fixture
def data(hospital: Callable[..., Path], tmp_path: Path) -> dict[str, Path]:
    """Two data sets of 60 test images: one labels Mass and Nodule, the other Hernia alone."""
    return {
        "north": hospital(tmp_path / "north", ("Mass", "Nodule"), 300, 5),
        "south": hospital(tmp_path / "south", ("Hernia",), 300, 6),
    }


@pytest.fixture
def external(trained: Trained, tmp_path: Path) -> Path:
    """A table of gamma as somebody else has it: no splits, two images of each patient."""
    table = read_table(load_site_config(trained.study / "gamma" / "suture.toml").data).table
    rows = [
        [table.root / name, f"q{i // 2}", *("" if np.isnan(v) else int(v) for v in y)]
        for i, (name, y) in enumerate(zip(table.images, table.y, strict=True))
    ]
    return write_table(tmp_path / "external.csv", [["image", "patient", *table.labels], *rows])


def test_classes_are_matched_by_name_and_the_mean_is_over_those_of_the_data(
    hospital: Callable[..., Path], model: Path, tmp_path: Path
) -> None:
    """Only the images of the split are read."""
    path = hospital(tmp_path / "other", ("Mass", "Hernia"), 50, seed=9)
    for i in range(50):
        if i % 5 != 4:
            (tmp_path / "other" / "images" / f"{i:03d}.png").unlink()
    done = evaluate(model, load_site_config(path), "test")
    assert (done.labels, done.tested, done.unlearned) == (EVERY, ("Hernia", "Mass"), ())
    assert done.y.shape == done.scores.shape == (10, 4)
    assert np.isnan(done.y[:, 0]).all()
    values = [score.auroc for score in done.classes.values()]
    assert done.mean == pytest.approx(np.mean([v for v in values if v is not None]))
    assert done.spread == pytest.approx(np.std([v for v in values if v is not None]))
    right = np.where(done.y == 1, done.scores, 1 - done.scores)[~np.isnan(done.y)]
    assert done.loss == pytest.approx(-np.log(right).mean(), rel=1e-5)
    metrics = as_metrics(done)
    assert (metrics["n"], metrics["loss"]) == (10, done.loss)
    low, high = metrics["mean_interval"]
    assert low <= done.mean <= high
    out, scores = tmp_path / "metrics.json", tmp_path / "out" / "scores.csv"
    suture("evaluate", model, path, "-o", out, "--scores", scores)
    assert json.loads(out.read_text())["loss"] == pytest.approx(done.loss)
    rows = pd.read_csv(scores)
    assert len(rows) == 10
    assert rows["Fibrosis label"].isna().all()
    np.testing.assert_allclose(rows[list(EVERY)].to_numpy(), done.scores, atol=1e-6)


def test_a_class_that_the_model_has_not_learned_leaves_the_mean_undefined(
    hospital: Callable[..., Path], tmp_path: Path
) -> None:
    narrow = saved_model(tmp_path / "narrow", CNN_16, ("Mass",))
    config = load_site_config(hospital(tmp_path / "other", ("Mass", "Hernia"), 50, seed=9))
    done = evaluate(narrow, config, "test")
    assert (done.unlearned, done.mean, done.interval) == (("Hernia",), None, None)
    foreign = load_site_config(hospital(tmp_path / "foreign", ("Nodule",), 50, seed=9))
    with refused("Mass", by=DataError):
        evaluate(narrow, foreign, "test")
    with refused("model.json", by=ConfigError):
        evaluate(tmp_path, config, "test")


@pytest.mark.complete
def test_two_models_are_compared_on_the_classes_that_both_know(
    model: Path, data: dict[str, Path], tmp_path: Path
) -> None:
    north = load_site_config(data["north"])
    other = saved_model(tmp_path / "other", ModelSpec("cnn", size=16, hidden=4), EVERY)
    mass = saved_model(tmp_path / "mass", CNN_16, ("Mass",))
    found = compare(model, other, north, "test", draws=200).classes
    assert set(found) == {"Mass", "Nodule"}
    for one in found.values():
        assert one.a.auroc is not None
        assert one.b.auroc is not None
        assert one.difference.difference == pytest.approx(one.a.auroc - one.b.auroc, abs=1e-6)
    same = compare(model, model, north, "test", draws=50)
    assert all(one.difference.p == 1 for one in same.classes.values())
    assert (same.mean.difference, same.mean.p) == (0, 1)
    assert set(compare(model, mass, north, "test", draws=10).classes) == {"Mass"}
    with refused("Mass", by=DataError):
        compare(model, mass, load_site_config(data["south"]), "test")
    said = suture("compare", model, other, data["north"], "--page", tmp_path / "page.html")
    assert said.startswith("AUROC of ")
    shown = (tmp_path / "page.html").read_text()
    assert all(name in said and f"<th>{name}</th>" in shown for name in ("Mass", "Nodule", "Mean"))


@pytest.mark.complete
def test_a_threshold_comes_from_the_data_set_that_can_give_it(
    model: Path, data: dict[str, Path], tmp_path: Path
) -> None:
    configs = [load_site_config(path) for path in data.values()]
    (one,) = predicted_together(model, configs, "test", [("Mass", "Hernia")])
    assert sum(map(sum, one.counts)) == 60
    (alone,) = predicted_together(model, configs[:1], "test", [("Mass", "Hernia")])
    assert "Hernia" in alone.why
    with refused("Hernia", by=LabelError):
        predicted_together(
            saved_model(tmp_path / "mass", CNN_16, ("Mass",)), configs[:1], "test", [("Mass", "Hernia")]
        )
    out = tmp_path / "pairs.svg"
    assert "P(Hernia | Mass)" in suture(
        "plot", "predictions", model, *data.values(), "-o", out, "--pair", "Mass:Hernia"
    )
    assert out.read_text().startswith("<svg")


@pytest.mark.complete
def test_data_sets_are_plotted_under_the_names_of_their_folders_or_files(
    model: Path, data: dict[str, Path], tmp_path: Path
) -> None:
    configs = {name: load_site_config(path) for name, path in data.items()}
    assert plot_features(model, configs, "test", images=20) == plot_features(
        model, configs, "test", images=20
    )
    for name, path in data.items():  # absolute paths, so that the two can lie beside each other
        write_site_config(tmp_path / f"{name}.toml", load_site_config(path))
    both = [tmp_path / "north.toml", tmp_path / "south.toml"]
    for given in (both, data.values()):
        suture("plot", "features", model, *given, "-o", tmp_path / "features.svg", "--images", 10)
        text = (tmp_path / "features.svg").read_text()
        assert "north" in text
        assert "south" in text
    suture("plot", "labels", *both, "-o", tmp_path / "plots")
    assert (tmp_path / "plots" / "cooccurrence-south.svg").exists()
    (tmp_path / "north.toml").write_bytes(data["south"].read_bytes())
    with refused("north.toml", "'north'", by=ConfigError):
        load_sources([data["north"], tmp_path / "north.toml"])


@pytest.mark.parametrize(("options", "unit"), [((), "patients"), (("--per", "image"), "images")])
def test_classes_occur_together_in_patients_by_default(
    options: tuple[str, ...], unit: str, data: dict[str, Path], tmp_path: Path
) -> None:
    """North's images are two of each patient; each of south's is a patient of its own."""
    table = data["north"].parent / "labels.csv"
    header, *rows = (line.split(",") for line in table.read_text().splitlines())
    write_table(
        table, [header, *([row[0], f"p{i - i % 10 + i % 5}", *row[2:]] for i, row in enumerate(rows))]
    )
    suture("plot", "labels", *data.values(), "-o", tmp_path / "plots", *options)
    plots = {path.name: path.read_text() for path in (tmp_path / "plots").iterdir()}
    assert plots.keys() == {"frequencies.svg", "cooccurrence-north.svg", "cooccurrence-south.svg"}
    assert f"of the {unit} with the class" in plots["cooccurrence-north.svg"]
    assert "of the images with the class" in plots["cooccurrence-south.svg"]


def test_saved_models_compute_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUTURE_DEVICE", "gpu7")
    for words in (("evaluate", "m", "d"), ("compare", "m", "m", "d"), ("predict", "m", "d", "-o", "o")):
        with refused("'gpu7'", "SUTURE_DEVICE", by=ConfigError):
            suture(*words)


@pytest.mark.complete
def test_a_run_ends_with_the_figures_of_its_model(trained: Trained) -> None:
    results = api.open_results(trained.run)
    for site, figures in results.metrics.sites.items():
        own = api.evaluate(trained.run, trained.study / site / "suture.toml").classes
        assert figures == {name: pytest.approx(score.auroc, abs=1e-6) for name, score in own.items()}
    for shown in (results, results.model()):
        assert "Fibrosis" in shown._repr_html_()
    assert "method.local.lr" in api.load_job(trained.study)._repr_html_()


@pytest.mark.complete
def test_patients_are_scored_by_their_images(trained: Trained, external: Path) -> None:
    images = api.evaluate(trained.run, external)
    column = images.labels.index("Fibrosis")
    frame = pd.DataFrame({"p": images.scores[:, column], "y": images.y[:, column], "who": images.patients})
    for how in ("mean", "max"):
        by = frame.groupby("who").agg({"p": how, "y": "max"})
        found = api.evaluate(trained.run, external, per_patient=how)  # type: ignore[arg-type]
        assert len(found.patients) == 30
        assert found.classes["Fibrosis"].auroc == pytest.approx(auroc(by["y"], by["p"]), abs=1e-6)
        assert found.classes["Fibrosis"].positives == int(by["y"].sum())


@pytest.mark.complete
@pytest.mark.parametrize(("kind", "left"), [(0, 0), (1, 9)])
def test_a_class_of_few_images_of_a_kind_gets_no_threshold(
    kind: int, left: int, trained: Trained, external: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    frame = pd.read_csv(external)
    frame.loc[frame.index[frame["Fibrosis"] == kind][left:], "Fibrosis"] = np.nan
    frame.to_csv(external, index=False)
    points = api.decide(shutil.copytree(trained.run, tmp_path / "run"), external)
    assert points
    assert "Fibrosis" not in points
    told = next(message for message in caplog.messages if "Fibrosis" in message)
    assert f"{left} {('negatives', 'positives')[kind]}" in told
    [line] = [line for line in suture("evaluate", trained.run, external).splitlines() if "Fibrosis" in line]
    assert ("(few)" in line) is (left > 0)
    assert math.isnan(api.compare(trained.run, trained.run, external).classes["Fibrosis"].difference.p)
    frame.drop(columns=points).to_csv(external, index=False)
    with refused("10", by=DataError):
        api.decide(shutil.copytree(trained.run, tmp_path / "other"), external)


@pytest.mark.complete
def test_thresholds_are_fitted_after_training(trained: Trained, external: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(trained.run, tmp_path / "run"))
    weights = (run / "model" / "model.safetensors").read_bytes()
    points = api.decide(run, external, settings=DecisionSettings(sensitivity=0.8))
    done = api.evaluate(run, external)
    for name, point in points.items():
        y, p = done.y[:, done.labels.index(name)], done.scores[:, done.labels.index(name)]
        assert point.sensitivity == pytest.approx((p[y == 1] >= point.threshold).mean())
        assert point.positives == (y == 1).sum()
        assert 0.8 <= point.sensitivity < 0.8 + 1 / point.positives
    assert (run / "model" / "model.safetensors").read_bytes() == weights
    suture("predict", run / "model", external, "-o", run / "predicted.csv", "--decide", "all")
    found = pd.read_csv(run / "predicted.csv")
    name, point = next(iter(points.items()))
    assert ((found[name] >= point.threshold) == (found[f"{name} decision"] == "above")).mean() > 0.99
    with refused("--overwrite", by=ConfigError):
        api.decide(run, external)
    suture("decide", run, external, "--specificity", 0.7, "--overwrite")
    described = json.loads((run / "model" / "model.json").read_text())["decisions"]
    assert described["settings"]["rule"] == "specificity"


def test_a_study_is_begun_and_checked_from_python(tmp_path: Path, external: Path) -> None:
    files = api.init(tmp_path / "new", {"gamma": external})
    assert {path.name for path in files} >= {"suture.toml", "job.toml"}
    done = api.check(tmp_path / "new")
    assert done.problems == []
    assert done.page.is_file()


def labelled(study: Path, folder: Path, splits: bool = False) -> Path:
    """A table of the images of gamma, as they lie in a folder."""
    gamma = pd.read_csv(study / "gamma" / "labels.csv")
    names = [str(folder / name) for name in gamma["image"]]
    gamma = gamma.assign(image=names, patient=gamma["image"])
    path = folder.parent / f"{folder.name}.csv"
    (gamma if splits else gamma.drop(columns="split")).to_csv(path, index=False)
    return path


TRAINED_ON = " 36 of these 60 "


@pytest.mark.complete
def test_figures_of_images_of_the_training_are_called_too_good(
    trained: Trained, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They are known by their bytes, wherever they lie, and by no name."""
    run, own = trained.run, Path(shutil.copytree(trained.study, tmp_path / "study")) / "gamma" / "images"
    done = api.evaluate(run, labelled(trained.study, own))
    assert TRAINED_ON in done.remark
    words = shlex.split(done.remark.rpartition(": ")[2])[1:]  # the remedy measures new images
    assert words[-2:] == ["--split", "test"]
    new = api.evaluate(words[1], words[2], "test")
    assert (len(new.patients), new.remark) == (12, "")
    table, out = labelled(trained.study, own, splits=True), tmp_path / "figures.json"
    assert api.evaluate(run, table).remark == ""
    assert " 36 of these 36 " in api.evaluate(run, table, "train").remark
    model = Path(shutil.copytree(run / "model", tmp_path / "model"))  # where those of the training are not
    for split in ("all", "test"):
        assert api.evaluate(model, table, split).remark == ""
    table = labelled(trained.study, own)
    assert "--split" in api.evaluate(model, table).remark
    caplog.clear()
    suture("evaluate", run, table, "-o", out)
    assert json.loads(out.read_text())["remark"] == caplog.messages[0]
    api.compare(run, run, table)
    api.decide(Path(shutil.copytree(run, tmp_path / "run")), table)
    assert [TRAINED_ON in message for message in caplog.messages] == [True] * 3
    for path in own.iterdir():
        if path.name != "000.png":  # the name of an image of the training, and the bytes of another
            shutil.copyfile(trained.study / "gamma" / "images" / "004.png", path)
    assert " 1 of these 60 " in api.evaluate(run, table).remark


def test_documents_are_known_by_name_and_text(tmp_path: Path) -> None:
    def config(folder: Path, first: str) -> SiteConfig:
        rows = [[f"d{i}", f"p{i}", "train" if i < 6 else "test", f"report {i}", i % 2] for i in range(8)]
        rows[0][3] = first
        write_table(folder / "t.csv", [["name", "patient", "split", "text", "Mass"], *rows])
        columns = {"image_column": "name", "patient_column": "patient", "split_column": "split"}
        data = {"dataset": "hospital", "table": "t.csv", "text_column": "text", **columns}
        return site_config(folder, data=data)

    run = tmp_path / "run"
    own = config(run / "sites" / "a", "report 0")
    (run / "run.json").write_text("{}")
    assert " 6 of these 8 " in remark(run / "model", own, "all", divided=True)
    other = config(tmp_path / "other", "another report")
    assert " 5 of these 8 " in remark(run / "model", other, "all", divided=True)
    assert remark(run / "model", other, "test", divided=True) == ""


def hide_names(site: Path) -> None:
    """Set the view that `suture init` writes."""
    config = site / "suture.toml"
    config.write_text(config.read_text().replace('label_view = "all"', 'label_view = "own"'))


@pytest.mark.complete
def test_methods_are_compared_by_the_figures_of_their_models_after_each_site_alone(tmp_path: Path) -> None:
    study, out = small_study(tmp_path / "study", images=60), tmp_path / "out"
    hide_names(study / "beta")
    words = ["run", study, "--compare", "surgical,vanilla", "--seeds", 2, "--rounds", 1, "--out", out]
    said = suture(*words)
    [told] = (line for line in said.splitlines() if "label_view" in line)
    assert "beta" in told
    assert all(
        f"{name}, seed {seed}" in said for name in ("individual", "surgical", "vanilla") for seed in (3, 4)
    )
    found = json.loads((out / "comparison.json").read_text())
    assert found["verdict"] in said
    assert f"<b>{found['verdict']}</b>" in (out / "comparison.html").read_text()
    assert list(found["methods"]) == ["individual", "surgical", "vanilla"]
    configs = StudySites(str(study)).configs()
    expected = {}
    for name in found["methods"]:
        areas = []
        for seed in (3, 4):
            models = models_of(out / "runs" / f"{name}-all-{seed}")
            done = {s: evaluate(models.get(s) or models["global"], c, "test") for s, c in configs.items()}
            areas.append([done[s].classes[n].auroc for s, of in found["sites"].items() for n in of])
        expected[name] = np.array(areas, dtype=float)
        assert found["methods"][name]["mean"][0] == pytest.approx(expected[name].mean())
        assert found["methods"][name]["seeds"] == pytest.approx(expected[name].mean(axis=1).tolist())
        assert found["methods"][name]["gains"] == pytest.approx(
            (expected[name] - expected["individual"]).mean(axis=1)
        )
    difference, low, high = found["methods"]["surgical"]["difference"]
    assert difference == pytest.approx((expected["surgical"] - expected["individual"]).mean())
    assert low <= difference <= high
    times = {path: path.stat().st_mtime_ns for path in out.rglob("model.safetensors")}
    suture(*words)
    assert times == {path: path.stat().st_mtime_ns for path in out.rglob("model.safetensors")}, "kept"
    with refused(by=ConfigError):
        suture(*words, "--set", "method.local.lr=0.1")
    limited = with_settings(load_job(study), ["simulation.limits=true"])
    with refused("beta", "label_view", by=ConfigError):  # before any training
        compare_methods(limited, ["surgical", "vanilla"], tmp_path / "limited")
    assert not (tmp_path / "limited").exists()


@pytest.mark.complete
def test_folds_test_each_patient_once(tmp_path: Path) -> None:
    study = small_study(tmp_path / "study")
    configs = StudySites(str(study)).configs()
    tested: list[str] = []
    for k in range(5):
        for site, config in _fold(configs, tmp_path / str(k), k, 5).configs().items():
            table = read_table(config.data).table
            parts = {split: set(table.of(split).patients) for split in ("train", "validation", "test")}
            assert all(len(found) >= 5 for found in parts.values())
            assert len(set.union(*parts.values())) == sum(map(len, parts.values())) == 25
            tested += [f"{site} {patient}" for patient in parts["test"]]
    assert len(tested) == len(set(tested)) == 75
    job = with_settings(load_job(study), ["rounds=1"])
    done = compare_methods(job, ["surgical"], tmp_path / "out", folds=3)
    assert done.images == {"alpha": 25, "beta": 25, "gamma": 25}
    with refused("3", by=ConfigError):
        compare_methods(job, ["surgical"], tmp_path / "other", folds=2)
