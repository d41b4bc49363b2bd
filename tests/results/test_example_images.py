"""suture_results.example_images and `suture report --examples`: images of each class of a run."""

from __future__ import annotations

import base64
import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from small_job import SMALL
from suture.core.errors import ConfigError, DataError, SutureError
from suture.core.files import write_json
from suture.data.config import load_server_config
from suture.data.readers import load_table
from suture.execution.run import run_job
from suture_results.example_images import SHOWN, SIDE, example_images, png_uri
from suture_results.prediction import Model, open_model
from suture_results.report import Example, Examples, render_report
from world import refused, suture


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose server has data of its own."""
    return run_job(replace(SMALL, rounds=1), "local", tmp_path_factory.mktemp("runs") / "r")


@pytest.fixture
def run(held_out: Path, tmp_path: Path) -> Path:
    """A copy of the run; its suture.toml still name the data of the original."""
    return Path(shutil.copytree(held_out, tmp_path / "run"))


def every(found: Examples) -> list[Example]:
    return [image for outcomes in found.values() for images in outcomes.values() for image in images]


def png(uri: str) -> bytes:
    return base64.b64decode(uri.partition(",")[2])


@pytest.mark.complete
def test_images_and_outcomes_are_of_held_out_labels_the_model_and_the_threshold(
    run: Path, tmp_path: Path
) -> None:
    found, model = example_images(run), open_model(run / "model")
    assert example_images(run) == found
    assert tuple(found) == model.labels
    assert {"Missed", "Borderline"} <= {outcome for outcomes in found.values() for outcome in outcomes}
    config = load_server_config(run / "sites" / "server" / "suture.toml").held_out
    assert config is not None
    table = load_table(config.data)
    tested = np.array(table.split) == "test"
    wanted = {(True, True): "Found", (True, False): "Missed", (False, True): "False alarms"}
    for label, outcomes in found.items():
        present = int((table.y[tested, table.labels.index(label)] == 1).sum())
        decided = [*outcomes.get("Found", ()), *outcomes.get("Missed", ())]
        assert min(SHOWN, present) <= len(decided) <= present
        assert all(len(images) <= SHOWN for images in outcomes.values())
        for outcome, image in ((outcome, image) for outcome, images in outcomes.items() for image in images):
            positive = image.probability >= image.threshold
            assert outcome == "Borderline" or wanted[image.present, positive] == outcome
            assert image.site == "server"
            assert image.map != image.source or outcome == "Missed"
    for image in every({model.labels[0]: found[model.labels[0]]}):
        (tmp_path / "shown.png").write_bytes(png(image.source))
        predicted = model.predict(tmp_path / "shown.png")[model.labels[0]].item()
        assert predicted == pytest.approx(image.probability, abs=1e-5)
    with Image.open(io.BytesIO(png(png_uri(np.zeros((300, 300), dtype=np.uint8), SIDE)))) as shown:
        assert shown.size == (SIDE, SIDE)


@pytest.mark.complete
def test_without_held_out_data_the_sites_take_turns_and_a_fitted_threshold_decides(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("suture_results.example_images.decisions_of", lambda _: object())
    monkeypatch.setattr("suture_results.example_images.threshold_of", lambda *_: ("all sites", 0.0))
    others = [path for path in (run / "sites").iterdir() if path.name != "server"]
    found = example_images(run)
    for outcomes in found.values():
        assert outcomes.keys() <= {"Found", "False alarms", "Borderline"}
    assert {image.threshold for image in every(found)} == {0}
    for path in others:
        shutil.rmtree(path)
    for name in ("a", "b"):
        shutil.copytree(run / "sites" / "server", run / "sites" / name)
    shutil.rmtree(run / "sites" / "server")
    sites = [image.site for image in next(iter(example_images(run).values()))["Found"]]
    assert sites == ["a", "b", "a", "b"][: len(sites)]
    assert len(sites) > 1


@pytest.mark.complete
def test_only_a_page_of_its_own_has_images(run: Path) -> None:
    suture("report", run)
    assert not (run / "report_with_examples.html").exists()
    suture("report", run, "--examples")
    assert "data:image/png" not in (run / "report.html").read_text()
    page = (run / "report_with_examples.html").read_text()
    assert "This page contains images of patients" in page
    assert page.count("<img ") == 2 * len(every(example_images(run)))  # each with its map


def test_a_run_whose_images_are_not_here_is_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = json.loads((run / "run.json").read_text())
    for env in ("poc", "prod"):
        write_json(run / "run.json", record | {"env": env})
        with refused("--examples", by=ConfigError):
            example_images(run)
    write_json(run / "run.json", record)
    with monkeypatch.context() as patched:
        patched.setattr(Model, "reads_text", True)
        with refused("--examples", by=ConfigError):
            example_images(run)
    config = run / "sites" / "server" / "suture.toml"
    lines = ['root = "gone"' if line.startswith("root") else line for line in config.read_text().split("\n")]
    config.write_text("\n".join(lines))
    with refused("gone", by=SutureError):
        example_images(run)
    shutil.rmtree(run / "model")
    with refused("model", by=ConfigError):
        example_images(run)
    shutil.rmtree(run / "sites")
    with refused("suture.toml", by=ConfigError):
        example_images(run)


def test_an_unreadable_image_is_passed_over(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise DataError("broken")

    monkeypatch.setattr("suture_results.example_images.decode_image", fail)
    found = example_images(run)
    assert not any(found.values())
    assert "<img " not in render_report(run, examples=found)


def test_names_are_escaped(run_folder: Path) -> None:
    example = Example('"><script>x', "data:,", "data:,", 0.83, 0.5, present=True)
    page = render_report(run_folder, examples={"Hernia": {"Found": [example]}})
    assert "<script>x" not in page
    assert "Hernia at &#34;&gt;&lt;script&gt;x, probability 0.83" in page
