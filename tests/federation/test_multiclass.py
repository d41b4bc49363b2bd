"""Whole federations of a multiclass task: an image is of exactly one class, which its site may not know."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parties import history, record
from PIL import Image

from rounds import reply_of
from suture.core.errors import FederationError
from suture.data.config import load_site_config
from suture.federation.site.releases import FIRST_COUNTS
from suture.learning.training import LocalTraining
from suture.methods import METHODS
from suture.protocol.messages import KEYS, TaskData
from suture_results.prediction import predict_to_csv
from suture_results.saved_models import evaluate
from world import refused, site_config, write_table

pytestmark = pytest.mark.complete
EVERY = ("Fibrosis", "Hernia", "Mass", "Nodule")
LABELS = {"alpha": ("Mass", "Nodule"), "beta": ("Nodule", "Hernia"), "gamma": ("Fibrosis", "Nodule", "Mass")}


def write_multiclass(folder: Path, labels: tuple[str, ...], n: int, seed: int) -> None:
    """Small images, each with one bright band, whose place is the image's class; the classes take turns."""
    rng, rows = np.random.default_rng(seed), []
    (folder / "images").mkdir(parents=True)
    for i in range(n):
        band = i % len(EVERY)
        image = rng.integers(60, 110, (16, 16))
        image[4 * band : 4 * band + 3] += 90
        Image.fromarray(image.astype(np.uint8)).save(folder / "images" / f"{i:03d}.png")
        split = ("train", "train", "train", "validation", "test")[i % 5]
        rows.append([f"{i:03d}.png", f"p{i}", split, *(int(EVERY[band] == label) for label in labels)])
    write_table(folder / "labels.csv", [["image", "patient", "split", *labels], *rows])
    data = {"dataset": "hospital", "root": "images", "table": "labels.csv", "label_type": "multiclass"}
    site_config(folder, data=data, privacy={"label_view": "all", "min_count": 0, "min_loss": 0})


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Where `tiny` looks for its hospitals: three multiclass ones of 60 images."""
    for i, (site, own) in enumerate(LABELS.items()):
        write_multiclass(tmp_path / "data" / site, own, 60, i)
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


@pytest.mark.parametrize("name", ["surgical", "vanilla", "fedavg", "fedlsm"])
def test_a_federation_ends_with_a_model_of_one_class_an_image(name: str, data: Path, tiny: Any) -> None:
    more = {"iterations": 4} if name == "fedlsm" else {}
    federation = tiny(method(name, **more), LABELS, rounds=3)
    if name in ("fedavg", "fedlsm"):  # class weights are of binary cross-entropies: no site sends counts
        for site in federation.sites("asked").values():
            assert reply_of(site, TaskData("handshake")).counts == {}
            assert not (site.folder / FIRST_COUNTS).exists()
    server = federation.run()
    folder, metrics = server.record.folder, record(server, "metrics.json")
    described = record(server, "model/model.json")
    assert record(server, "run.json")["label_type"] == described["label_type"] == "multiclass"
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
        areas = {name: score.auroc for name, score in done.classes.items()}
        assert areas == pytest.approx(metrics["sites"][site], abs=1e-6)
        columns = [EVERY.index(name) for name in own]
        np.testing.assert_allclose(done.scores[:, columns].sum(axis=1), 1, rtol=1e-5)
        np.testing.assert_allclose(done.predicted.sum(axis=1), 1, rtol=1e-5)
        assert set(done.others) == {*EVERY} - {*own}


@pytest.mark.parametrize("name", ["surgical", "fedavg", "fedlsm"])
def test_images_of_no_known_class_teach_nothing(name: str, data: Path, tiny: Any) -> None:
    """Every image of alpha is of a class that it does not know: its loss is 0, and it has no accuracy."""
    table = data / "alpha" / "labels.csv"
    header, *rows = table.read_text().splitlines()
    table.write_text("\n".join([header, *(row.rsplit(",", 2)[0] + ",0,0" for row in rows)]) + "\n")
    server = tiny(method(name), {site: LABELS[site] for site in ("alpha", "beta")}, rounds=1).run()
    line = history(server)[0]["sites"]
    assert (line["alpha"]["train_loss"], line["alpha"]["validation_loss"]) == (0, 0)
    assert line["beta"]["train_loss"] > 0.1
    alone = accuracy(server.record.folder / "model", data / "beta", LABELS["beta"], LABELS["beta"])
    assert record(server, "metrics.json")["overall"]["accuracy"] == pytest.approx(alone)


def test_what_no_site_sees_together_is_told_apart(data: Path, tiny: Any) -> None:
    """Hernia is known at one site and Fibrosis at another; the model that is left knows both."""
    server = tiny(method("fedavg"), LABELS, rounds=8, selection="last").run()
    assert record(server, "metrics.json")["mean_auroc"] > 0.9
    right = [
        accuracy(server.record.folder / "model", data / site, own, EVERY) for site, own in LABELS.items()
    ]
    assert sum(right) / 3 > 0.75  # a guess is right in one of four


def test_thresholds_are_of_the_probabilities_that_the_model_predicts(data: Path, tiny: Any) -> None:
    with refused("[decision]", "'Fibrosis'", by=FederationError):
        tiny(method("surgical"), LABELS, decision={}).run()
    for name in ("fedavg", "pfl"):  # sites see all rows; there is no model of all sites
        tiny(method(name), LABELS, rounds=1, decision={}).run(name)
