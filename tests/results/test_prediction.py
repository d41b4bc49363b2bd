"""What `predict` computes and writes, also of names that strangers chose, and the decisions beside it."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import shutil
import tarfile
import weakref
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from click.testing import Result
from PIL import Image
from typer.testing import CliRunner

from dicom_files import dicom
from small_models import CNN_16, saved_model
from suture.cli.app import app
from suture.core.errors import ConfigError, DataError, DiskError
from suture.data.decoding import Opened, Pixels
from suture.learning.samples import load_samples
from suture.protocol.decisions import Calibration, Decisions, DecisionSettings, Operating
from suture_results import prediction
from suture_results.decided_predictions import decider, read_decisions, with_decisions
from suture_results.prediction import DIGEST, open_model, predict_to_csv
from suture_results.saved_models import Evaluated, GroupFigures, write_scores
from world import refused, site_config, write_image, write_table


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return saved_model(tmp_path / "model", CNN_16, ("Mass", "=Edema"))


def images(folder: Path, names: list[str]) -> Path:
    folder.mkdir()
    for name in names:
        Image.new("L", (16, 16)).save(folder / name, "PNG")
    return folder


def predict(*words: object) -> Result:
    return CliRunner().invoke(app, ["predict", *map(str, words)])


HOSTILE = {
    "=cmd|' C calc'!A0.png": "'=cmd|' C calc'!A0.png",
    "+1.png": "'+1.png",
    "a\x1b[2Jb.png": r"a\x1b[2Jb.png",
    "a\nb,c.png": r"a\nb,c.png",
    os.fsdecode(b"\xff.png"): r"\udcff.png",
}


def test_what_is_written_of_hostile_names_holds_no_formula_and_no_command(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = images(tmp_path / "in", list(HOSTILE)), tmp_path / "out.csv"
    monkeypatch.chdir(folder)
    assert predict_to_csv(model, Path(), out).shape == (len(HOSTILE), 2)
    assert out.stat().st_mode & 0o777 == 0o600
    text = out.read_text(encoding="utf-8")
    assert all(line.isprintable() for line in text.split("\n"))
    rows = list(csv.reader(io.StringIO(text)))
    assert rows[0] == ["image", "Mass", "'=Edema", DIGEST]
    digest = hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()
    assert {row[-1] for row in rows[1:]} == {f"sha256:{digest[:12]}"}
    assert {row[0] for row in rows[1:]} == set(HOSTILE.values())
    (folder / "b\x1b[2J[red].png").write_bytes(b"no image")
    done = predict(model, folder, "-o", out)
    assert done.exit_code == 1
    for text in (done.output, (tmp_path / "out.left_out.csv").read_text()):
        assert "\x1b[2J" not in text
        assert r"b\x1b[2J[red].png" in text.replace("\n", "")
    y = np.zeros((2, 1), dtype=np.float32)
    patients = ("=1+1", "P\x1b7")
    scores = Evaluated(("=Edema",), ("=Edema",), y, y, y, patients, {}, (), GroupFigures(None, None))
    write_scores(scores, out)
    header, *lines = list(csv.reader(out.open()))
    assert header == ["image", "patient", "'=Edema label", "'=Edema"]
    assert [line[1:] for line in lines] == [["'=1+1", "0", "0.000000"], [r"P\x1b7", "0", "0.000000"]]


def test_a_table_of_predictions_is_that_of_the_data_sets_own_batches(model: Path, tmp_path: Path) -> None:
    """Other sizes, colours, bits and formats are decoded as for training."""
    forms = {
        "a.png": (20, 9),
        "b.tif": (7, 40),
        "c.png": (16, 16),
        "d.bmp": (33, 31, 3),
        "e.png": (12, 12, 4),
    }
    for name, shape in forms.items():
        write_image(tmp_path / "in" / name, 1, shape, "uint16" if name == "c.png" else "uint8")
    rows = [[name, f"P{i}", "test", 1] for i, name in enumerate(reversed(forms))]
    write_table(tmp_path / "list.csv", [["image", "patient", "split", "Mass"], *rows])
    config = site_config(tmp_path, data={"dataset": "hospital", "root": "in", "table": "list.csv"})
    samples = load_samples(config, CNN_16, "a")[1]["test"]
    predict_to_csv(model, tmp_path / "suture.toml", tmp_path / "out.csv", batch=2)
    read = pd.read_csv(tmp_path / "out.csv", index_col="image").drop(columns=DIGEST)
    assert [Path(path).name for path in read.index] == list(samples.names) == list(reversed(forms))
    assert list(read.pop("patient")) == [f"P{i}" for i in range(len(forms))]
    loaded = open_model(model)
    np.testing.assert_allclose(read.to_numpy(), loaded(samples.inputs["image"]).numpy(), atol=1e-6)
    np.testing.assert_allclose(loaded.predict(tmp_path / "in").sort_index(ascending=False), read, atol=1e-6)


@pytest.mark.complete
def test_batches_threads_and_the_way_images_are_given_do_not_matter(model: Path, tmp_path: Path) -> None:
    folder = images(tmp_path / "in", [f"{i:03}.png" for i in range(150)])
    for i, path in enumerate(sorted(folder.iterdir())):
        Image.new("L", (16, 16), i).save(path)
    (folder / "077.png").write_bytes(b"broken")
    with tarfile.open(tmp_path / "in.tgz", "w:gz") as tar:
        for path in sorted(folder.iterdir(), reverse=True):
            tar.add(path, path.name)
    loaded, seen = open_model(model), []
    whole = loaded.predict(folder, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(64, 150), (128, 150), (150, 150)]
    assert list(whole.attrs["failed"]) == [str(folder / "077.png")]
    for other in (
        loaded.predict(folder, batch=1),
        loaded.predict(sorted(folder.iterdir()), batch=1000),
        loaded.predict(tmp_path / "in.tgz").rename(index=lambda name: name.replace("in.tgz", "in")),
    ):
        assert list(other.index) == list(whole.index)
        np.testing.assert_allclose(other.to_numpy(), whole.to_numpy(), atol=1e-6)
    assert len(whole.drop_duplicates()) == 149


class _Counted(np.ndarray):  # type: ignore[type-arg]
    """An array of which there are weak references."""

    __hash__ = object.__hash__


def test_images_are_not_held(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, no more are decoded at a time than are read ahead and computed."""
    folder = images(tmp_path / "in", ["a.png"])
    monkeypatch.setattr(prediction, "_AHEAD", 8)
    alive, most = weakref.WeakSet(), 0
    pixels = Opened.pixels

    def counted(opened: Opened, color: bool) -> Pixels:
        nonlocal most
        image = pixels(opened, color).view(_Counted)
        alive.add(image)
        most = max(most, len(alive))
        return image

    monkeypatch.setattr(Opened, "pixels", counted)
    for i in range(300):
        (folder / f"{i}.png").hardlink_to(folder / "a.png")
    assert len(open_model(model).predict(folder, batch=4)) == 301
    assert 0 < most <= 8 + 4 + 4


def test_12_bits_in_16_are_predicted_as_they_were_trained_or_said(model: Path, tmp_path: Path) -> None:
    deep = (np.arange(32 * 32).reshape(32, 32) * 4).astype(np.uint16)  # up to 4,092
    for name, values in (("deep", deep), ("same", (deep >> 4).astype(np.uint8))):
        (tmp_path / name).mkdir()
        Image.fromarray(values).save(tmp_path / name / "a.png")
    loaded = open_model(model)
    [note] = loaded.predict(tmp_path / "deep").attrs["notes"]
    assert "4,092" in note
    assert "--bits 12" in note
    scaled, same = loaded.predict(tmp_path / "deep", bits=12), loaded.predict(tmp_path / "same")
    assert scaled.attrs["notes"] == same.attrs["notes"] == []
    np.testing.assert_allclose(scaled.to_numpy(), same.to_numpy(), atol=0.02)
    write_table(tmp_path / "labels.csv", [["image", "patient", "split", "Mass"], ["a.png", "p", "train", 1]])
    site_config(tmp_path, data={"dataset": "hospital", "root": "deep", "table": "labels.csv", "bits": 12})
    described = loaded.predict(tmp_path / "suture.toml")
    assert (described.attrs["notes"], described.to_numpy().tolist()) == ([], scaled.to_numpy().tolist())


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ConfigError("the model")])
def test_a_stopped_prediction_leaves_the_earlier_files(
    error: BaseException, model: Path, tmp_path: Path
) -> None:
    folder, out = images(tmp_path / "in", ["a.png", "b.png"]), tmp_path / "new" / "out.csv"
    predict_to_csv(model, folder, out)
    before = out.read_bytes()

    def stop(done: int, total: int) -> None:
        raise error

    with pytest.raises(type(error)):
        predict_to_csv(model, folder, out, batch=1, progress=stop)
    assert out.read_bytes() == before
    assert [path.name for path in out.parent.iterdir()] == ["out.csv"]


@pytest.mark.complete
def test_what_cannot_be_read_is_listed_and_limited(model: Path, tmp_path: Path) -> None:
    folder, out = images(tmp_path / "in", [f"{i}.png" for i in range(9)]), tmp_path / "out.csv"
    (folder / "README").write_text("x")
    assert predict(model, folder, "-o", out).exit_code == 0
    for i in range(7):
        (folder / f"{i}.png").write_bytes(b"broken")
    done = predict(model, folder, "-o", out)
    assert done.exit_code == 1
    assert "7 of 9" in str(done.exception)
    assert sum(f"{i}.png" in done.output for i in range(7)) == 5  # enough for a terminal
    listed = pd.read_csv(tmp_path / "out.left_out.csv")
    assert list(listed["image"]) == [str(folder / f"{i}.png") for i in range(7)] + [str(folder / "README")]
    assert listed["reason"].notna().all()
    assert len(pd.read_csv(out)) == 2
    assert predict(model, folder, "-o", out, "--max-failed", 6).exit_code == 1
    assert predict(model, folder, "-o", out, "--max-failed", 7).exit_code == 0
    for i in (7, 8):
        (folder / f"{i}.png").write_bytes(b"broken")
    with refused("9 images", "0.png", by=DataError):
        predict_to_csv(model, folder, out)
    assert len(pd.read_csv(tmp_path / "out.left_out.csv")) == 10
    shutil.rmtree(folder)
    assert predict(model, images(folder, ["a.png"]), "-o", out).exit_code == 0
    assert not (tmp_path / "out.left_out.csv").exists()


def test_a_table_is_put_to_the_command_with_its_column_and_root(model: Path, tmp_path: Path) -> None:
    folder = images(tmp_path / "in", ["ä.png", "b.png"])
    table = write_table(
        tmp_path / "list.csv", [["Datei", "Größe"], ["b.png", 1], ["ä.png", 2]], ";", "cp1252"
    )
    for name, words in {
        "a": (table, "--root", folder, "--batch", 1),
        "b": (table, "--root", folder, "--column", "Datei"),
        "c": (folder / "b.png", folder / "ä.png"),
    }.items():
        assert predict(model, *words, "-o", tmp_path / f"{name}.csv").exit_code == 0
    texts = [(tmp_path / f"{name}.csv").read_bytes() for name in "abc"]
    assert texts[0] == texts[1] == texts[2]
    assert list(pd.read_csv(tmp_path / "a.csv")["image"]) == [str(folder / "b.png"), str(folder / "ä.png")]


def test_an_output_that_cannot_be_written_is_known_before_anything_is_computed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = images(tmp_path / "in", ["a.png"])
    monkeypatch.setattr(prediction.Model, "frame", lambda *_: pytest.fail("it was computed"))
    for out in (tmp_path / "out.parquet", tmp_path / "in"):
        with refused(out, ".csv", by=ConfigError):
            predict_to_csv(model, folder, out)
    (tmp_path / "file").touch()
    with refused("file", by=DiskError):
        predict_to_csv(model, folder, tmp_path / "file" / "out.csv")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with refused("out.csv", by=DiskError):
        predict_to_csv(model, folder, tmp_path / "out.csv")


def test_a_dicom_of_another_modality_has_no_probability(model: Path, tmp_path: Path) -> None:
    folder, out = images(tmp_path / "in", ["a.png"]), tmp_path / "out.csv"
    for name, modality in {"ct.dcm": "CT", "dx.dcm": "DX", "none.dcm": "", "ultrasound": "US"}.items():
        (folder / name).write_bytes(dicom(np.eye(16, dtype=np.uint8), Modality=modality))
    assert predict(model, folder, "-o", out).exit_code == 0, "a model that states none is for any"
    assert len(pd.read_csv(out)) == 5
    chest = saved_model(tmp_path / "chest", replace(CNN_16, modalities=("CR", "DX")))
    assert predict(chest, folder, "-o", out).exit_code == 1
    assert [Path(name).name for name in pd.read_csv(out)["image"]] == ["a.png", "dx.dcm"]
    listed = pd.read_csv(tmp_path / "out.left_out.csv", index_col="image")["reason"]
    assert [Path(name).name for name in listed.index] == ["ct.dcm", "none.dcm", "ultrasound"]
    assert "'CT'" in listed.iloc[0]
    with refused("'CT'", "CR, DX", by=DataError):
        predict_to_csv(chest, folder / "ct.dcm", out)


def test_an_image_that_is_much_too_small_or_narrow_is_predicted_and_told(model: Path, tmp_path: Path) -> None:
    folder, out = images(tmp_path / "in", ["a.png"]), tmp_path / "out.csv"
    assert " × " not in predict(model, folder, "-o", out).output
    Image.new("L", (7, 5)).save(folder / "thumb.png")
    Image.new("L", (200, 40)).save(folder / "strip.png")
    done = predict(model, folder, "-o", out)
    assert done.exit_code == 0
    text = done.output.replace("\n", "")
    assert "thumb.png, 7 × 5" in text
    assert "strip.png, 200 × 40, " in text
    assert len(pd.read_csv(out)) == 3


def point(threshold: float | None, calibration: Calibration | None = None) -> Operating:
    thresholds: Any = {} if threshold is None else {"sensitivity": threshold}
    return Operating(thresholds, calibration, 0.5)


DECISIONS = Decisions(
    DecisionSettings(),
    {"Edema": point(0.5, Calibration(1.0, 0.0)), "Mass": point(0.4)},
    {"north": {"Edema": point(0.2, Calibration(2.0, 0.0)), "Mass": point(None)}},
)
FRAME = pd.DataFrame(
    {"Edema": [0.3, 0.6], "Mass": [0.3, 0.4], "Hernia": [0.1, 0.9]}, index=["a.png", "b.png"]
)


def test_a_site_decides_by_its_own_threshold_where_it_has_one() -> None:
    found = with_decisions(FRAME, DECISIONS, "north")
    decided = {name: found[f"{name} decision"].tolist() for name in FRAME}
    assert decided == {
        "Edema": ["above", "above"],
        "Mass": ["below", "above"],
        "Hernia": ["not validated", "not validated"],
    }
    assert [found[f"{name} threshold"].iloc[0] for name in FRAME] == ["north", "all sites", ""]
    odds = (0.3 / 0.7) ** 2
    assert found["Edema calibrated"].iloc[0] == pytest.approx(odds / (1 + odds))
    assert np.isnan(found["Mass calibrated"]).all()
    assert found[list(FRAME)].equals(FRAME)
    pooled = with_decisions(FRAME, DECISIONS)
    assert pooled["Edema decision"].tolist() == ["below", "above"]
    assert set(pooled["Edema threshold"]) == {"all sites"}


def test_another_prevalence_corrects_what_is_calibrated_and_moves_no_rate() -> None:
    # Fitted at a prevalence of 1/2; at 1/10 the odds are a ninth: .3/.7/9 = 1/21.
    stated = {"Edema": 0.1}
    plain, found = with_decisions(FRAME, DECISIONS), with_decisions(FRAME, DECISIONS, prevalence=stated)
    assert found["Edema calibrated"].tolist() == pytest.approx([1 / 22, 1 / 7])
    assert found["Edema decision"].equals(plain["Edema decision"])
    # By cost: a miss costs 7 false alarms, so 1/8 is where they are equal; 1/22 lies below, and 1/7 above.
    by_cost = replace(DECISIONS, settings=DecisionSettings(rule="cost", cost=7))
    with_rule = replace(by_cost, pooled={"Edema": Operating({"cost": 0.2}, Calibration(1.0, 0.0), 0.5)})
    assert with_decisions(FRAME, with_rule)["Edema decision"].tolist() == ["above", "above"]
    moved = with_decisions(FRAME, with_rule, prevalence=stated)
    assert moved["Edema decision"].tolist() == ["below", "above"]
    assert set(moved["Edema threshold"]) == {"stated prevalence"}


def test_what_cannot_decide_or_correct_is_refused(tmp_path: Path) -> None:
    def write(**facts: Any) -> None:
        (tmp_path / "model.json").write_text(json.dumps({"labels": list(FRAME)} | facts))

    write()
    with refused(tmp_path, by=ConfigError):
        read_decisions(tmp_path)
    write(decisions=asdict(DECISIONS) | {"format": 2})
    with refused("decisions", by=ConfigError):
        read_decisions(tmp_path)
    write(decisions=asdict(DECISIONS))
    assert read_decisions(tmp_path, "north") == DECISIONS
    for site, stated, named in (
        ("nord", {}, ("'nord'", "'north'")),
        (None, {"Edema": 0.1}, ("--decide",)),
        ("all", {"Oedema": 0.1}, ("'Oedema'", "'Edema'")),
        ("all", {"Edema": 1.0}, ("Edema", "1")),
        ("all", {"Edema": float("nan")}, ("Edema",)),
        ("all", {"Mass": 0.1}, ("Mass",)),  # it is not calibrated
    ):
        with refused(*named, by=ConfigError):
            decider(tmp_path, site, stated)
