"""A saved model on data that its training never saw."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from suture.core.errors import ConfigError, DataError
from suture.data.config import load_site_config
from suture.learning.training import LocalTraining
from suture.methods.surgical import SurgicalAggregation
from suture_results.saved_models import as_metrics, evaluate, write_scores

pytestmark = pytest.mark.complete


@pytest.fixture
def model(tiny: Any) -> Path:
    """A global model of Fibrosis, Hernia, Mass and Nodule."""
    return tiny(SurgicalAggregation(local=LocalTraining(lr=1e-2, batch_size=8))).run().record.folder / "model"  # type: ignore[no-any-return]


def test_classes_are_matched_by_name_and_the_mean_is_over_those_of_the_data(
    hospital: Any, model: Path, tmp_path: Path
) -> None:
    config = load_site_config(hospital(tmp_path / "other", ("Mass", "Hernia"), 50, seed=9))
    done = evaluate(model, config, "test")
    assert done.labels == ("Fibrosis", "Hernia", "Mass", "Nodule")
    assert done.tested == ("Hernia", "Mass")
    assert done.y.shape == done.scores.shape == (10, 4)
    assert np.isnan(done.y[:, 0]).all()
    assert done.unlearned == ()
    values = [score.auroc for score in done.classes.values()]
    assert done.mean == pytest.approx(np.mean([v for v in values if v is not None]))
    assert done.spread == pytest.approx(np.std([v for v in values if v is not None]))
    assert as_metrics(done)["n"] == 10
    known = ~np.isnan(done.y)
    right = np.where(done.y == 1, done.scores, 1 - done.scores)[known]
    assert done.loss == pytest.approx(-np.log(right).mean(), rel=1e-5)
    assert as_metrics(done)["loss"] == done.loss
    low, high = as_metrics(done)["mean_interval"]
    assert low <= done.mean <= high


def test_a_class_that_the_model_has_not_learned_leaves_the_mean_undefined(
    hospital: Any, tiny: Any, tmp_path: Path
) -> None:
    narrow = tiny(SurgicalAggregation(), {"alpha": ("Mass",)}).run().record.folder / "model"
    config = load_site_config(hospital(tmp_path / "other", ("Mass", "Hernia"), 50, seed=9))
    done = evaluate(narrow, config, "test")
    assert done.unlearned == ("Hernia",)
    assert done.mean is None
    assert done.interval is None
    foreign = load_site_config(hospital(tmp_path / "foreign", ("Nodule",), 50, seed=9))
    with pytest.raises(DataError, match=r"none of the model's classes: Mass"):
        evaluate(narrow, foreign, "test")


def test_only_the_images_of_the_split_are_read(hospital: Any, model: Path, tmp_path: Path) -> None:
    path = hospital(tmp_path / "other", ("Mass",), 50, seed=9)
    for i in range(50):
        if i % 5 != 4:
            (tmp_path / "other" / "images" / f"{i:03d}.png").unlink()
    assert len(evaluate(model, load_site_config(path), "test").patients) == 10


def test_scores_on_disk(hospital: Any, model: Path, tmp_path: Path) -> None:
    config = load_site_config(hospital(tmp_path / "other", ("Mass",), 25, seed=9))
    done = evaluate(model, config, "validation")
    write_scores(done, tmp_path / "out" / "scores.csv")
    with (tmp_path / "out" / "scores.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 5
    assert rows[0]["Hernia label"] == ""
    assert rows[0]["Mass label"] in ("0", "1")
    assert 0 < float(rows[0]["Hernia"]) < 1


def test_the_command(hospital: Any, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from typer.testing import CliRunner

    from suture.cli import app

    path = hospital(tmp_path / "other", ("Mass", "Nodule"), 25, seed=9)
    out = tmp_path / "metrics.json"
    result = CliRunner().invoke(app, ["evaluate", str(model), str(path), "-o", str(out)])
    assert result.exit_code == 0, result.output
    assert "5 images" in result.output
    assert json.loads(out.read_text())["unlearned"] == []
    with pytest.raises(ConfigError, match=r"does not contain model\.json"):
        evaluate(tmp_path, load_site_config(path), "test")
