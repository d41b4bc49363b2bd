"""What `predict` and `evaluate` write of names that strangers chose."""

from __future__ import annotations

import csv
import hashlib
import io
import os
import shutil
import tarfile
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from click.testing import Result
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from dicom_files import dicom
from suture.cli.app import app
from suture.core.errors import ConfigError, DataError, DiskError
from suture.core.labels import LabelSet
from suture.data.config import load_site_config
from suture.data.decoding import Opened, Pixels
from suture.learning.samples import load_samples
from suture.models import ModelSpec, build
from suture.models.saved import save_model
from suture_results import commands as research
from suture_results import prediction
from suture_results.prediction import DIGEST, open_model, predict_to_csv
from suture_results.saved_models import Evaluated, GroupFigures, write_scores

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
    assert predict_to_csv(model, Path(), tmp_path / "out.csv").shape == (len(HOSTILE), 2)
    assert (tmp_path / "out.csv").stat().st_mode & 0o777 == 0o600
    text = (tmp_path / "out.csv").read_text(encoding="utf-8")
    assert all(line.isprintable() for line in text.split("\n"))
    with (tmp_path / "out.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["image", "Mass", "'=Edema", DIGEST]
    digest = hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()
    assert {row[-1] for row in rows[1:]} == {f"sha256:{digest[:12]}"}
    assert sorted(row[0] for row in rows[1:]) == sorted(
        ["'=cmd|' C calc'!A0.png", "'+1.png", r"a\x1b[2Jb.png", r"a\nb,c.png", r"\udcff.png"]
    )


def test_predictions_of_ordinary_names_are_read_back_as_they_were(model: Path, tmp_path: Path) -> None:
    folder = images(tmp_path / "ward 7", ["a,b.png", 'c"d.png', "ä;é.png", "e'f-1.png"])
    predict_to_csv(model, folder, tmp_path / "out.csv")
    read = pd.read_csv(tmp_path / "out.csv", index_col="image")
    frame = open_model(model).predict(folder)
    assert list(read.index) == list(frame.index) == sorted(str(path) for path in folder.iterdir())
    np.testing.assert_allclose(read.iloc[:, :2].to_numpy(), frame.to_numpy(), atol=1e-6)
    assert frame.attrs["model"].startswith(read[DIGEST].iloc[0].removeprefix("sha256:"))


def test_names_of_unreadable_images_do_not_reach_the_terminal_or_a_spreadsheet_raw(
    model: Path, tmp_path: Path
) -> None:
    folder = images(tmp_path / "in", ["a.png"])
    (folder / "b\x1b[2J[red].png").write_bytes(b"no image")
    done = CliRunner().invoke(app, ["predict", str(model), str(folder), "-o", str(tmp_path / "out.csv")])
    assert done.exit_code == 1
    listed = (tmp_path / "out.left_out.csv").read_text()
    for text in (done.output, listed):
        assert "\x1b[2J" not in text
        assert r"b\x1b[2J[red].png" in text.replace("\n", "")


def test_scores_of_hostile_patients_hold_no_formula(tmp_path: Path) -> None:
    figures = GroupFigures(None, None)
    y = np.zeros((2, 1), dtype=np.float32)
    done = Evaluated(("=Edema",), ("=Edema",), y, y, y, ("=1+1", "P\x1b7"), {}, (), figures)
    write_scores(done, tmp_path / "scores.csv")
    lines = (tmp_path / "scores.csv").read_text().splitlines()
    assert lines == [
        "image,patient,'=Edema label,'=Edema",
        lines[1].partition(",")[0] + ",'=1+1,0,0.000000",
        lines[2].partition(",")[0] + r",P\x1b7,0,0.000000",
    ]
    write_scores(replace(done, patients=("P-17", "18")), tmp_path / "scores.csv")
    assert list(pd.read_csv(tmp_path / "scores.csv")["patient"]) == ["P-17", "18"]


def test_a_table_of_predictions_is_that_of_the_data_sets_own_batches(model: Path, tmp_path: Path) -> None:
    """Other sizes, colours, bits and formats are decoded as for training."""
    rng = np.random.default_rng(1)
    (tmp_path / "in").mkdir()
    forms = {
        "a.png": (20, 9),
        "b.tif": (7, 40),
        "c.png": (16, 16),
        "d.bmp": (33, 31, 3),
        "e.png": (12, 12, 4),
    }
    for name, shape in forms.items():
        top, kind = (65536, np.uint16) if name == "c.png" else (256, np.uint8)
        Image.fromarray(rng.integers(0, top, shape).astype(kind)).save(tmp_path / "in" / name)
    rows = [f"{name},P{i},test,1" for i, name in enumerate(reversed(forms))]
    (tmp_path / "list.csv").write_text("\n".join(["image,patient,split,Mass", *rows]))
    (tmp_path / "suture.toml").write_text('[data]\ndataset = "hospital"\nroot = "in"\ntable = "list.csv"\n')
    config = load_site_config(tmp_path / "suture.toml")
    samples = load_samples(config, SPEC, "a")[1]["test"]
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
    silent = loaded.predict(tmp_path / "deep")
    assert "no value above 4,092" in silent.attrs["notes"][0]
    assert "--bits 12 scales them" in silent.attrs["notes"][0]
    scaled, same = loaded.predict(tmp_path / "deep", bits=12), loaded.predict(tmp_path / "same")
    assert scaled.attrs["notes"] == same.attrs["notes"] == []
    np.testing.assert_allclose(scaled.to_numpy(), same.to_numpy(), atol=0.02)
    (tmp_path / "labels.csv").write_text("image,patient,split,Mass\na.png,p,train,1\n")
    site = tmp_path / "suture.toml"
    site.write_text('[data]\ndataset = "hospital"\nroot = "deep"\ntable = "labels.csv"\nbits = 12\n')
    described = loaded.predict(site)
    assert (described.attrs["notes"], described.to_numpy().tolist()) == ([], scaled.to_numpy().tolist())


class _Counted(np.ndarray):  # type: ignore[type-arg]
    """An array of which there are weak references."""

    __hash__ = object.__hash__


@pytest.mark.parametrize("error", [KeyboardInterrupt, ConfigError("the model")])
def test_a_stopped_prediction_leaves_the_earlier_files(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    folder, out = images(tmp_path / "in", ["a.png", "b.png"]), tmp_path / "new" / "out.csv"
    predict_to_csv(model, folder, out)
    before = out.read_bytes()

    def stop(done: int, total: int) -> None:
        raise error

    with pytest.raises(type(error) if isinstance(error, Exception) else error):
        predict_to_csv(model, folder, out, batch=1, progress=stop)
    assert out.read_bytes() == before
    assert [path.name for path in out.parent.iterdir()] == ["out.csv"]


def run(*words: object) -> Result:
    return CliRunner().invoke(app, ["predict", *map(str, words)])


@pytest.mark.complete
def test_what_cannot_be_read_is_listed_and_limited(model: Path, tmp_path: Path) -> None:
    folder, out = images(tmp_path / "in", [f"{i}.png" for i in range(9)]), tmp_path / "out.csv"
    (folder / "README").write_text("x")
    assert run(model, folder, "-o", out).exit_code == 0
    for i in range(7):
        (folder / f"{i}.png").write_bytes(b"broken")
    done = run(model, folder, "-o", out)
    assert done.exit_code == 1
    assert str(done.exception).startswith("7 of 9 images cannot be used; ")
    assert done.output.count("left out: ") == 5
    assert "not images: 1 other file, such as" in done.output
    listed = pd.read_csv(tmp_path / "out.left_out.csv")
    assert list(listed["image"]) == [str(folder / f"{i}.png") for i in range(7)] + [str(folder / "README")]
    assert listed["reason"].str.contains("cannot be read|not an image").all()
    assert len(pd.read_csv(out)) == 2
    assert run(model, folder, "-o", out, "--max-failed", 6).exit_code == 1
    assert run(model, folder, "-o", out, "--max-failed", 7).exit_code == 0
    for i in (7, 8):
        (folder / f"{i}.png").write_bytes(b"broken")
    with pytest.raises(DataError, match=r"none of the 9 images can be read; the first: .*0\.png"):
        predict_to_csv(model, folder, out)
    assert len(pd.read_csv(tmp_path / "out.left_out.csv")) == 10
    shutil.rmtree(folder)
    assert run(model, images(folder, ["a.png"]), "-o", out).exit_code == 0
    assert not (tmp_path / "out.left_out.csv").exists()


def test_a_table_is_put_to_the_command_with_its_column_and_root(model: Path, tmp_path: Path) -> None:
    folder = images(tmp_path / "in", ["ä.png", "b.png"])
    (tmp_path / "list.csv").write_bytes("Datei;Größe\nb.png;1\nä.png;2\n".encode("cp1252"))
    done = run(model, tmp_path / "list.csv", "--root", folder, "-o", tmp_path / "a.csv", "--batch", 1)
    assert done.exit_code == 0, done.output
    assert list(pd.read_csv(tmp_path / "a.csv")["image"]) == [str(folder / "b.png"), str(folder / "ä.png")]
    again = run(model, tmp_path / "list.csv", "--root", folder, "--column", "Datei", "-o", tmp_path / "b.csv")
    assert again.exit_code == 0
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()
    assert run(model, folder / "b.png", folder / "ä.png", "-o", tmp_path / "c.csv").exit_code == 0
    assert (tmp_path / "c.csv").read_bytes() == (tmp_path / "a.csv").read_bytes()


def test_an_output_that_cannot_be_written_is_known_before_anything_is_computed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = images(tmp_path / "in", ["a.png"])
    monkeypatch.setattr(prediction.Model, "frame", lambda *_: pytest.fail("it was computed"))
    for out in (tmp_path / "out.parquet", tmp_path / "out", tmp_path / "in"):
        with pytest.raises(ConfigError, match=r"ends in \.csv"):
            predict_to_csv(model, folder, out)
    (tmp_path / "file").touch()
    with pytest.raises(DiskError, match=r"file: File exists"):
        predict_to_csv(model, folder, tmp_path / "file" / "out.csv")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(DiskError, match=r"out\.csv: Permission denied; make it writable"):
        predict_to_csv(model, folder, tmp_path / "out.csv")


def test_progress_is_for_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with research._progress() as progress:
        assert progress is None
    shown = io.StringIO()
    monkeypatch.setattr(research, "console", Console(file=shown, force_terminal=True, width=80))
    with research._progress() as progress:
        assert progress is not None
        progress(3, 10)
    assert "3/10" in shown.getvalue()


def test_a_dicom_of_another_modality_has_no_probability(model: Path, tmp_path: Path) -> None:
    folder, out = images(tmp_path / "in", ["a.png"]), tmp_path / "out.csv"
    for name, modality in {"ct.dcm": "CT", "dx.dcm": "DX", "none.dcm": "", "ultrasound": "US"}.items():
        pixels = np.random.default_rng(1).integers(0, 255, (16, 16), dtype=np.uint8)
        (folder / name).write_bytes(dicom(pixels, Modality=modality))
    assert run(model, folder, "-o", out).exit_code == 0, "a model that states none is for any"
    assert len(pd.read_csv(out)) == 5
    chest = replace(SPEC, modalities=("CR", "DX"))
    save_model(build(chest, LabelSet(("Mass",)), 1, pretrained=False), chest, tmp_path / "chest", {})
    done = run(tmp_path / "chest", folder, "-o", out)
    assert done.exit_code == 1
    assert [Path(name).name for name in pd.read_csv(out)["image"]] == ["a.png", "dx.dcm"]
    listed = pd.read_csv(tmp_path / "out.left_out.csv", index_col="image")["reason"]
    assert [Path(name).name for name in listed.index] == ["ct.dcm", "none.dcm", "ultrasound"]
    assert listed.iloc[0].endswith("is of the modality 'CT' (0008,0060), and the model is for CR, DX")
    with pytest.raises(DataError, match=r"none of the 1 images can be read; the first: .*'CT'"):
        predict_to_csv(tmp_path / "chest", folder / "ct.dcm", out)


def test_an_image_that_is_much_too_small_or_narrow_is_predicted_and_told(model: Path, tmp_path: Path) -> None:
    folder, out = images(tmp_path / "in", ["a.png"]), tmp_path / "out.csv"
    assert "pixels" not in run(model, folder, "-o", out).output
    Image.new("L", (7, 5)).save(folder / "thumb.png")
    Image.new("L", (200, 40)).save(folder / "strip.png")
    done = run(model, folder, "-o", out)
    assert done.exit_code == 0
    text = done.output.replace("\n", "")
    assert "1 image enlarged more than 2 times to the 16 pixels" in text
    assert "thumb.png, 7 × 5" in text
    assert "strip.png, 200 × 40, " in text
    assert len(pd.read_csv(out)) == 3
