"""`suture check` sees that no loss will be sent, by which a round could be selected."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from hospitals import image, table
from suture.cli.app import app
from suture.core.errors import SutureError

pytestmark = pytest.mark.complete


def suture(*words: str) -> str:
    """Run a command; an error of the user is raised."""
    result = CliRunner().invoke(app, list(words))
    if isinstance(result.exception, SutureError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_a_site_whose_classes_are_all_withheld_sends_no_loss(tmp_path: Path) -> None:
    """Enough images, and too few positive ones: the run ends before its first round."""
    rows = [["image", "patient", "split", "Mass"]]
    for i in range(80):
        image(tmp_path / "a" / f"{i}.png", i)
        split = "train" if i < 40 else "validation"
        rows.append([f"{i}.png", f"p{i}", split, str(int(i < 10 or 40 <= i < 43))])
    table(tmp_path / "a" / "t.csv", rows)
    study = tmp_path / "study"
    suture("init", str(study), f"--site=alpha={tmp_path / 'a'}", "--yes")
    said = " ".join(suture("check", str(study)).split())
    assert "in a federation no round can be selected" in said
    assert "alpha: 0 validation images of a class with at least" in said
    suture("run", str(study), "--env", "local", "--rounds", "1", "--out", str(tmp_path / "exact"))
    as_federated = ("run", str(study), "--env", "local", "--limits", "--rounds", "1")
    with pytest.raises(SutureError, match="alpha: 40 validation images"):
        suture(*as_federated, "--out", str(tmp_path / "r"))
    last = ("--set", "selection=last", "--out", str(tmp_path / "r"), "--resume")
    assert "model of round 1" in suture(*as_federated, *last), "as the error has said"
    config = study / "alpha" / "suture.toml"
    config.write_text(config.read_text().replace("min_count = 5", "min_count = 3"))
    suture(*as_federated, "--out", str(tmp_path / "r2"))
