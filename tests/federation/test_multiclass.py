"""Whole federations of a multiclass task: an image is of exactly one class, which its site may not know."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from noted import noted
from rounds import reply_of
from suture.core.errors import FederationError
from suture.data.config import load_site_config
from suture.federation.site.store import FIRST_COUNTS
from suture.learning.training import LocalTraining
from suture.methods import METHODS
from suture.protocol.messages import KEYS, TaskData
from suture_results.prediction import predict_to_csv
from suture_results.saved_models import evaluate

EVERY = ("Fibrosis", "Hernia", "Mass", "Nodule")
LABELS = {"alpha": ("Mass", "Nodule"), "beta": ("Nodule", "Hernia"), "gamma": ("Fibrosis", "Nodule", "Mass")}


def write_hospital(folder: Path, labels: tuple[str, ...], n: int, seed: int) -> None:
    """Small images, each with one bright band, whose place is the image's class; the classes take turns."""
    rng = np.random.default_rng(seed)
    (folder / "images").mkdir(parents=True)
    rows = []
    for i in range(n):
        band = i % len(EVERY)
        image = rng.integers(60, 110, (16, 16))
        image[4 * band : 4 * band + 3] += 90
        Image.fromarray(image.astype(np.uint8)).save(folder / "images" / f"{i:03d}.png")
        split = ("train", "train", "train", "validation", "test")[i % 5]
        rows.append([f"{i:03d}.png", f"p{i}", split, *(int(EVERY[band] == label) for label in labels)])
    with (folder / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["image", "patient", "split", *labels], *rows])
    (folder / "suture.toml").write_text(
        '[data]\ndataset = "hospital"\nroot = "images"\ntable = "labels.csv"\nlabel_type = "multiclass"\n'
        '[privacy]\nlabel_view = "all"\nmin_count = 0\nmin_loss = 0\n'
    )


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Where `tiny` looks for its hospitals: three multiclass ones of 60 images."""
    for i, (site, own) in enumerate(LABELS.items()):
        write_hospital(tmp_path / "data" / site, own, 60, i)
    return tmp_path / "data"


def method(name: str, **local: Any) -> Any:
    kind: Any = METHODS[name]
    return kind(local=LocalTraining(lr=1e-2, batch_size=12, **local))


def predictions(folder: Path, images: Path) -> dict[str, dict[str, float]]:
    """For each image the probability of each class."""
    predict_to_csv(folder, images, folder / "predictions.csv")
    with (folder / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert all(row.pop("model digest").startswith("sha256:") for row in rows)
    return {Path(row.pop("image")).name: {name: float(p) for name, p in row.items()} for row in rows}


def accuracy(folder: Path, site: Path, own: tuple[str, ...], candidates: tuple[str, ...]) -> float:
    """Of the site's test images of its own classes, how many the model puts first among the candidates."""
    predicted = predictions(folder, site / "images")
    right = []
    for i in range(4, 60, 5):
        truth = EVERY[i % len(EVERY)]
        if truth in own:
            p = predicted[f"{i:03d}.png"]
            right.append(max(candidates, key=lambda name: p[name]) == truth)
    return sum(right) / len(right)


@pytest.mark.complete
@pytest.mark.parametrize("name", ["surgical", "vanilla", "fedavg", "fedlsm", "condist", "fssl", "fedvls"])
def test_a_federation_ends_with_a_model_of_one_class_an_image(name: str, data: Path, tiny: Any) -> None:
    more = {"iterations": 4} if name == "fedlsm" else {}
    server = tiny(method(name, **more), LABELS, rounds=3).run()
    folder = Path(server.record.folder)
    run, metrics, described = (
        json.loads((folder / file).read_text()) for file in ("run.json", "metrics.json", "model/model.json")
    )
    assert run["status"] == "finished"
    assert (run["label_type"], described["label_type"]) == ("multiclass", "multiclass")
    assert tuple(described["labels"]) == EVERY
    assert set(metrics["auroc"]) == set(EVERY)
    assert set(metrics["overall"]) == set(KEYS)
    for probabilities in predictions(folder / "model", data / "alpha" / "images").values():
        assert tuple(probabilities) == EVERY
        assert sum(probabilities.values()) == pytest.approx(1, abs=4e-6)  # six digits of each are written
    # Whether or not a site sees the other classes, its own compete; those of a table, where that is measured.
    expected = [accuracy(folder / "model", data / site, own, own) for site, own in LABELS.items()]
    assert metrics["overall"]["accuracy"] == pytest.approx(sum(expected) / 3)
    for site, own in LABELS.items():
        done = evaluate(folder / "model", load_site_config(data / site / "suture.toml"), "test")
        assert {n: s.auroc for n, s in done.classes.items()} == pytest.approx(
            metrics["sites"][site], abs=1e-6
        )
        columns = [EVERY.index(name) for name in own]
        np.testing.assert_allclose(done.scores[:, columns].sum(axis=1), 1, rtol=1e-5)
        np.testing.assert_allclose(done.predicted.sum(axis=1), 1, rtol=1e-5)
        assert set(done.others) == {*EVERY} - {*own}


@pytest.mark.complete
@pytest.mark.parametrize("name", ["surgical", "vanilla", "fedavg", "fedlsm"])
def test_images_of_no_known_class_teach_nothing(name: str, data: Path, tiny: Any) -> None:
    """Every image of alpha is of a class that it does not know: its loss is 0, and it has no accuracy."""
    table = data / "alpha" / "labels.csv"
    header, *rows = table.read_text().splitlines()
    table.write_text("\n".join([header, *(row.rsplit(",", 2)[0] + ",0,0" for row in rows)]) + "\n")
    server = tiny(method(name), {site: LABELS[site] for site in ("alpha", "beta")}, rounds=1).run()
    folder = Path(server.record.folder)
    line = json.loads((folder / "history.jsonl").read_text())["sites"]
    assert (line["alpha"]["train_loss"], line["alpha"]["validation_loss"]) == (0, 0)
    assert line["beta"]["train_loss"] > 0.1
    alone = accuracy(folder / "model", data / "beta", LABELS["beta"], LABELS["beta"])
    overall = json.loads((folder / "metrics.json").read_text())["overall"]
    assert overall["accuracy"] == pytest.approx(alone)


@pytest.mark.complete
def test_what_no_site_sees_together_is_told_apart(data: Path, tiny: Any) -> None:
    """Hernia is known at one site and Fibrosis at another; the model that is left knows both."""
    server = tiny(method("fedavg"), LABELS, rounds=8, selection="last").run()
    folder = Path(server.record.folder)
    assert json.loads((folder / "metrics.json").read_text())["mean_auroc"] > 0.9
    right = [accuracy(folder / "model", data / site, own, EVERY) for site, own in LABELS.items()]
    assert sum(right) / 3 > 0.75  # a guess is right in one of four


@pytest.mark.complete
def test_the_task_survives_a_restart(data: Path, tiny: Any) -> None:
    federation = tiny(method("surgical"), LABELS, rounds=1)
    federation.run()
    longer = tiny(method("surgical"), LABELS, rounds=2)
    server = longer.run()
    assert (server.round, server.model.label_type, server.registry.label_type) == (
        2,
        "multiclass",
        "multiclass",
    )
    whole = tiny(method("surgical"), LABELS, rounds=2).run("whole")
    assert all(torch.equal(t, whole.model.head[key]) for key, t in server.model.head.items())


@pytest.mark.complete
def test_thresholds_are_of_the_probabilities_that_the_model_predicts(data: Path, tiny: Any) -> None:
    with pytest.raises(FederationError, match=r"\[decision\].*'Fibrosis'.*suture decide"):
        tiny(method("surgical"), LABELS, decision={}).run()
    for name in ("fedavg", "pfl"):  # sites see all rows; there is no model of all sites
        tiny(method(name), LABELS, rounds=1, decision={}).run(name)


def test_a_site_of_another_label_type_stops_the_federation(data: Path, tiny: Any) -> None:
    config = data / "beta" / "suture.toml"
    config.write_text(config.read_text().replace("multiclass", "multilabel"))
    with pytest.raises(FederationError, match=r"multiclass and beta is multilabel"):
        tiny(method("fedavg"), LABELS).run()


@pytest.mark.complete
@pytest.mark.parametrize("name", ["fedavg", "fedlsm"])
def test_no_site_sends_counts_that_nobody_uses(name: str, data: Path, tiny: Any) -> None:
    """Class weights are of binary cross-entropies; here there are none, and no word of counts withheld."""
    federation = tiny(method(name, iterations=1), LABELS, rounds=1)
    for site in federation.sites().values():
        assert reply_of(site, TaskData("handshake")).counts == {}
        assert not (site.folder / FIRST_COUNTS).exists()
    server = federation.run()
    assert noted(server) == []
