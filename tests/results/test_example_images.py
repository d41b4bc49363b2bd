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
from typer.testing import CliRunner

from small_job import SMALL
from suture.cli.app import app
from suture.core.errors import ConfigError, DataError, SutureError
from suture.core.files import write_json
from suture.data.config import load_server_config
from suture.data.readers import load_table
from suture.execution.run import run_job
from suture_results.example_images import SHOWN, SIDE, example_images, png_uri
from suture_results.prediction import Model, open_model
from suture_results.report import Example, Examples, render_report


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_job(replace(SMALL, rounds=1), "local", tmp_path_factory.mktemp("runs") / "r")


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run; its suture.toml still name the data of the original."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def every(found: Examples) -> list[Example]:
    return [image for outcomes in found.values() for images in outcomes.values() for image in images]


@pytest.mark.complete
def test_outcomes_are_of_the_labels_and_the_threshold(run: Path) -> None:
    found = example_images(run)
    for outcomes in found.values():
        for outcome, images in outcomes.items():
            for image in images:
                positive = image.probability >= image.threshold
                if outcome != "Borderline":
                    wanted = {(True, True): "Found", (True, False): "Missed", (False, True): "False alarms"}
                    assert wanted[image.present, positive] == outcome
                assert image.map != image.source or outcome == "Missed"
    assert {"Missed", "Borderline"} <= {outcome for outcomes in found.values() for outcome in outcomes}


@pytest.fixture
def all_positive(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fitted threshold of 0."""
    monkeypatch.setattr("suture_results.example_images.decisions_of", lambda _: object())
    monkeypatch.setattr("suture_results.example_images.threshold_of", lambda *_: ("all sites", 0.0))


@pytest.mark.complete
@pytest.mark.usefixtures("all_positive")
def test_a_fitted_threshold_decides(run: Path) -> None:
    for outcomes in example_images(run).values():
        assert outcomes.keys() <= {"Found", "False alarms", "Borderline"}
        assert all(image.threshold == 0 for images in outcomes.values() for image in images)


@pytest.mark.complete
def test_each_class_has_a_few_held_out_images_with_the_models_probability(run: Path) -> None:
    found = example_images(run)
    assert tuple(found) == open_model(run / "model").labels
    config = load_server_config(run / "sites" / "server" / "suture.toml").held_out
    assert config is not None
    table = load_table(config.data)
    tested = np.array(table.split) == "test"
    for label, outcomes in found.items():
        present = int((table.y[tested, table.labels.index(label)] == 1).sum())
        decided = [*outcomes.get("Found", ()), *outcomes.get("Missed", ())]
        assert min(SHOWN, present) <= len(decided) <= present
        assert all(len(images) <= SHOWN for images in outcomes.values())
    for image in every(found):
        assert image.site == "server"
        assert 0 <= image.probability <= 1
        with Image.open(io.BytesIO(base64.b64decode(image.source.partition(",")[2]))) as shown:
            assert shown.size == (16, 16)
    assert example_images(run) == found


def test_probabilities_are_those_of_predict(run: Path, tmp_path: Path) -> None:
    label, outcomes = next(iter(example_images(run).items()))
    model = open_model(run / "model")
    for image in every({label: outcomes}):
        path = tmp_path / "shown.png"
        path.write_bytes(base64.b64decode(image.source.partition(",")[2]))
        assert model.predict(path)[label].item() == pytest.approx(image.probability, abs=1e-5)


@pytest.mark.complete
def test_the_shareable_report_stays_without_images(run: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(run), "--examples"])
    assert result.exit_code == 0, result.output
    assert "report_with_examples.html" in result.output.replace("\n", "")
    assert "data:image/png" not in (run / "report.html").read_text()
    assert "images of patients" not in (run / "report.html").read_text()
    page = (run / "report_with_examples.html").read_text()
    assert "This page contains images of patients" in page
    assert page.count("<img ") == 2 * len(every(example_images(run)))  # each with its map


@pytest.mark.complete
def test_a_plain_report_writes_no_examples(run: Path) -> None:
    assert CliRunner().invoke(app, ["report", str(run)]).exit_code == 0
    assert not (run / "report_with_examples.html").exists()


@pytest.mark.complete
@pytest.mark.usefixtures("all_positive")
def test_without_held_out_data_the_sites_take_turns(run: Path) -> None:
    for name in ("a", "b"):
        shutil.copytree(run / "sites" / "server", run / "sites" / name)
    for path in (run / "sites").iterdir():
        if path.name not in ("a", "b"):
            shutil.rmtree(path)
    sites = [image.site for image in next(iter(example_images(run).values()))["Found"]]
    assert sites == ["a", "b", "a", "b"][: len(sites)]
    assert len(sites) > 1


@pytest.mark.parametrize("env", ["poc", "prod"])
def test_a_run_of_real_sites_has_no_images_here(env: str, run: Path) -> None:
    record = json.loads((run / "run.json").read_text())
    write_json(run / "run.json", record | {"env": env})
    with pytest.raises(ConfigError, match="images are at the sites"):
        example_images(run)


def test_a_run_without_model_or_sites_is_one_error(run: Path) -> None:
    shutil.rmtree(run / "model")
    with pytest.raises(ConfigError, match="model"):
        example_images(run)
    shutil.rmtree(run / "sites")
    with pytest.raises(ConfigError, match=r"no suture\.toml"):
        example_images(run)


def test_a_model_of_text_has_no_images(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "reads_text", True)
    with pytest.raises(ConfigError, match="reads text"):
        example_images(run)


def test_an_unreadable_image_is_passed_over(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise DataError("broken")

    monkeypatch.setattr("suture_results.example_images.decode_image", fail)
    found = example_images(run)
    assert not any(found.values())
    assert "No readable test image" in render_report(run, examples=found)


def test_moved_data_are_named(run: Path) -> None:
    path = run / "sites" / "server" / "suture.toml"
    text = path.read_text()
    path.write_text(
        "\n".join('root = "gone"' if line.startswith("root") else line for line in text.split("\n"))
    )
    with pytest.raises(SutureError, match="gone"):
        example_images(run)


def test_names_are_escaped(run_folder: Path) -> None:
    example = Example('"><script>x', "data:,", "data:,", 0.83, 0.5, present=True)
    page = render_report(run_folder, examples={"Hernia": {"Found": [example]}})
    assert "<script>x" not in page
    assert "Hernia at &#34;&gt;&lt;script&gt;x, probability 0.83" in page


def test_large_images_are_made_smaller() -> None:
    uri = png_uri(np.zeros((300, 300), dtype=np.uint8), SIDE)
    with Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))) as shown:
        assert shown.size == (SIDE, SIDE)
