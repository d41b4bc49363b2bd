"""What `predict` and `evaluate` write of names that strangers chose."""

from __future__ import annotations

import csv
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from typer.testing import CliRunner

from suture.cli.app import app
from suture.core.errors import DataError
from suture.core.labels import LabelSet
from suture.learning.prediction import documents_to_predict, open_model, predict_to_csv
from suture.learning.saved_models import Evaluated, GroupFigures, write_scores
from suture.models import ModelSpec, build
from suture.models.saved import save_model

HOSTILE = ["=cmd|' C calc'!A0.png", "+1.png", "a\x1b[2Jb.png", "a\nb,c.png", os.fsdecode(b"\xff.png")]
SPEC = ModelSpec(size=16)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    labels = LabelSet(("Mass", "=Edema"))
    save_model(build(SPEC, labels, 1, pretrained=False), SPEC, tmp_path / "model", {})
    return tmp_path / "model"


def images(folder: Path, names: list[str]) -> Path:
    folder.mkdir()
    for name in names:
        Image.new("L", (16, 16)).save(folder / name, "PNG")
    return folder


def test_predictions_of_hostile_names_hold_no_formula_and_no_command(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images(tmp_path / "in", HOSTILE)
    monkeypatch.chdir(tmp_path / "in")
    assert predict_to_csv(model, Path(), tmp_path / "out.csv")[0] == len(HOSTILE)
    text = (tmp_path / "out.csv").read_text(encoding="utf-8")
    assert all(line.isprintable() for line in text.split("\n"))
    with (tmp_path / "out.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["image", "Mass", "'=Edema"]
    assert sorted(row[0] for row in rows[1:]) == sorted(
        ["'=cmd|' C calc'!A0.png", "'+1.png", r"a\x1b[2Jb.png", r"a\nb,c.png", r"\udcff.png"]
    )


def test_predictions_of_ordinary_names_are_read_back_as_they_were(model: Path, tmp_path: Path) -> None:
    folder = images(tmp_path / "ward 7", ["a,b.png", 'c"d.png', "ä;é.png", "e'f-1.png"])
    predict_to_csv(model, folder, tmp_path / "out.csv")
    read = pd.read_csv(tmp_path / "out.csv", index_col="image")
    frame = open_model(model).predict(folder)
    assert list(read.index) == list(frame.index) == sorted(str(path) for path in folder.iterdir())
    np.testing.assert_allclose(read.to_numpy(), frame.to_numpy(), atol=1e-6)


def test_names_of_unreadable_images_do_not_reach_the_terminal_raw(model: Path, tmp_path: Path) -> None:
    folder = images(tmp_path / "in", ["a.png"])
    (folder / "b\x1b[2J[red].png").write_bytes(b"no image")
    done = CliRunner().invoke(app, ["predict", str(model), str(folder), "-o", str(tmp_path / "out.csv")])
    assert done.exit_code == 0
    assert "\x1b[2J" not in done.output
    assert r"b\x1b[2J[red].png" in done.output.replace("\n", "")


def test_scores_of_hostile_patients_hold_no_formula(tmp_path: Path) -> None:
    figures = GroupFigures(None, None)
    y = np.zeros((2, 1), dtype=np.float32)
    done = Evaluated(("=Edema",), ("=Edema",), y, y, ("=1+1", "P\x1b7"), {}, (), figures)
    write_scores(done, tmp_path / "scores.csv")
    lines = (tmp_path / "scores.csv").read_text().splitlines()
    assert lines == ["patient,'=Edema label,'=Edema", "'=1+1,0,0.000000", r"P\x1b7,0,0.000000"]
    write_scores(replace(done, patients=("P-17", "18")), tmp_path / "scores.csv")
    assert list(pd.read_csv(tmp_path / "scores.csv")["patient"]) == ["P-17", "18"]


def test_a_folder_of_documents_is_not_left_by_a_link(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("a name")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "note.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(DataError, match=r"note\.txt leads out of"):
        documents_to_predict(tmp_path / "in")
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(DataError, match=r"pipe\.txt is no regular file"):
        documents_to_predict(tmp_path / "pipe.txt")
