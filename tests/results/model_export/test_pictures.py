"""`suture explain`: the pictures, the table of them, and what is left of an earlier call."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from typer.testing import CliRunner

from dicom_files import dicom
from suture.cli.app import app
from suture.core.errors import ConfigError, DataError
from suture.core.labels import LabelSet
from suture.models import ModelSpec, build
from suture.models.saved import save_model
from suture_results.model_export import pictures
from suture_results.model_export.pictures import SHEET, explain_files

LABELS = LabelSet(("Edema", "Mass"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    spec = ModelSpec("resnet_small", size=32, color=True)
    save_model(build(spec, LABELS, 1, pretrained=False), spec, tmp_path / "model", {})
    return tmp_path / "model"


def images(folder: Path) -> Path:
    folder.mkdir()
    rng = np.random.default_rng(1)
    for i in range(3):
        pixels = rng.integers(0, 256, (20, 31, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"image{i}$\\foo$.png")
    return folder


@pytest.mark.complete
def test_the_sheet_of_one_class_has_several_images_in_a_row(model: Path, tmp_path: Path) -> None:
    explain_files(model, [few(tmp_path / "in", 9)], tmp_path / "out", ("Mass",))
    with Image.open(tmp_path / "out" / "contact sheet.png") as sheet:
        assert sheet.width > sheet.height


def test_titles_stay_within_their_pictures() -> None:
    name = "001 1.2.840.113619.2.55.3.604688119.971.1448012345"
    lines = pictures._wrap(name, 18).split("\n")
    assert max(map(len, lines)) <= 18
    assert (lines[0][:3], lines[-1][-8:]) == ("001", name[-8:])
    assert pictures._wrap("Mass, 0.50", 18) == "Mass, 0.50"


@pytest.mark.complete
def test_the_command_draws_and_says_what_it_left_out(model: Path, tmp_path: Path) -> None:
    folder = images(tmp_path / "in")
    (folder / "broken.png").write_bytes(b"no image")
    words = ["explain", str(model), str(folder), "-o", str(tmp_path / "out"), "-n", "3", "--class", "Mass"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1, done.output
    assert str(done.exception).startswith("1 of 3 images cannot be used")
    done = CliRunner().invoke(app, [*words, "--max-failed", "1"])
    assert done.exit_code == 0, done.output
    assert "2 pictures" in done.output
    assert "broken.png" in done.output
    assert "1 more" in done.output
    written = sorted(path.name for path in (tmp_path / "out").glob("[!.]*"))
    assert written == [r"002 image0$\foo$.png", r"003 image1$\foo$.png", "contact sheet.png", "pictures.csv"]
    assert Image.open(tmp_path / "out" / written[0]).format == "PNG"


def test_what_cannot_be_explained_says_so(model: Path, tmp_path: Path) -> None:
    folder = images(tmp_path / "in")
    with pytest.raises(ConfigError, match="unknown class 'Mas'; did you mean 'Mass'"):
        explain_files(model, [folder], tmp_path / "out", ("Mas",))
    spec = ModelSpec("lstm")
    save_model(build(spec, LABELS, 1, pretrained=False), spec, tmp_path / "text", {})
    with pytest.raises(ConfigError, match=r"reads text \(lstm\)"):
        explain_files(tmp_path / "text", [folder], tmp_path / "out")
    for path in folder.iterdir():
        path.write_bytes(b"x")
    with pytest.raises(DataError, match="none of the 3 images can be read"):
        explain_files(model, [folder], tmp_path / "out")


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def few(folder: Path, n: int) -> Path:
    folder.mkdir()
    for i in range(n):
        Image.fromarray(np.full((20, 20), i, dtype=np.uint8)).save(folder / f"{i:02}.png")
    return folder


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures in no time: only their names matter."""
    monkeypatch.setattr(pictures, "write_explained", lambda rows, path, **_: path.write_text(str([*rows])))


@pytest.mark.complete
@pytest.mark.usefixtures("quick")
def test_a_call_with_fewer_images_leaves_no_picture_of_the_former_and_every_other_file(
    model: Path, tmp_path: Path
) -> None:
    many, out = few(tmp_path / "many", SHEET + 2), tmp_path / "out"
    assert len(explain_files(model, [many], out, most=99).written) == SHEET + 2
    assert {"contact sheet 1.png", "contact sheet 2.png"} < content(out).keys()
    own = {"contact sheet 7.png": b"own", "001 mine.png": b"own", "notes.txt": b"own"}
    for name, text in own.items():
        (out / name).write_bytes(text)
    explain_files(model, [many / "03.png"], out)
    left = content(out)
    assert left.keys() == {"001 03.png", "contact sheet.png", "pictures.csv", ".pictures.json", *own}
    assert own.items() <= left.items()


@pytest.mark.usefixtures("quick")
def test_a_call_that_fails_changes_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many, out = few(tmp_path / "many", 4), tmp_path / "out"
    explain_files(model, [many], out)
    before = content(out)
    drawn = pictures.explain

    def interrupted(*given: object, **named: object) -> object:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return drawn(*given, **named)

    calls = iter(range(9))
    monkeypatch.setattr(pictures, "explain", interrupted)
    with pytest.raises(KeyboardInterrupt):
        explain_files(model, [many], out, ("Mass",))
    assert content(out) == before


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", ["pictures.csv", "001 00.png", "contact sheet.png"])
@pytest.mark.parametrize("link", [False, True])
def test_a_file_of_the_user_is_not_replaced(name: str, link: bool, model: Path, tmp_path: Path) -> None:
    """Nor one that was changed since, nor what a link leads to."""
    many, out = few(tmp_path / "many", 2), tmp_path / "out"
    out.mkdir()
    mine = tmp_path / "mine" if link else out / name
    mine.write_text("mine")
    if link:
        (out / name).symlink_to(mine)
    for _ in range(2):
        before = content(out)
        with pytest.raises(
            ConfigError, match=f"{name} was not written by suture explain, or was changed since; choose an"
        ):
            explain_files(model, [many], out)
        assert content(out) == before
        assert mine.read_text() == "mine"
        (out / name).unlink()
        explain_files(model, [many], out)
        mine.write_text("mine")  # of what the call has written, where it is no link
        if link:
            (out / name).unlink()
            (out / name).symlink_to(mine)


@pytest.mark.usefixtures("quick")
def test_a_planted_list_deletes_nothing(model: Path, tmp_path: Path) -> None:
    """Not what it names beyond its folder, or by another digest, or by a name of no picture, or as a link."""
    many, out = few(tmp_path / "many", 1), tmp_path / "out"
    out.mkdir()
    (tmp_path / "keep.png").write_text("mine")
    (out / "002 link.png").symlink_to(tmp_path / "keep.png")
    names = ["002 other.png", "notes.txt"]
    for name in names:
        (out / name).write_text("mine")
    digest = hashlib.sha256(b"mine").hexdigest()
    listed = [[name, digest] for name in ("../keep.png", "002 ../../keep.png", "002 link.png", "notes.txt")]
    listed += [["002 other.png", "0" * 64], ["001 00.png", "0" * 64]]
    inode = out.stat().st_ino
    for text in (
        json.dumps({"files": listed, "inode": inode}),
        '{"files": [1]}',
        '{"files": {"a": 1}}',
        "[",
        '{"files": 1}',
    ):
        (out / ".pictures.json").write_text(text)
        explained = explain_files(model, [many], out)
        assert all((out / name).read_text() == "mine" for name in names)
        assert (out / "002 link.png").is_symlink()
        assert (tmp_path / "keep.png").read_text() == "mine"
        if "other" in text:
            assert any("002 other.png was changed since" in note for note in explained.notes)
        for name in ("001 00.png", "contact sheet.png", "pictures.csv"):
            (out / name).unlink()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("inode", [{}, {"inode": 1}, {"inode": None}])
def test_a_list_of_another_folder_deletes_nothing(inode: dict[str, Any], model: Path, tmp_path: Path) -> None:
    many, out = few(tmp_path / "many", 1), tmp_path / "out"
    out.mkdir()
    (out / "002 mine.png").write_text("mine")
    listed = [["002 mine.png", hashlib.sha256(b"mine").hexdigest()]]
    (out / ".pictures.json").write_text(json.dumps({"files": listed, **inode}))
    explain_files(model, [many], out)
    assert (out / "002 mine.png").read_text() == "mine"
    copy = Path(shutil.copytree(out, tmp_path / "copy"))
    before = content(copy)
    with pytest.raises(ConfigError, match="was not written by suture explain"):
        explain_files(model, [many], copy)
    assert content(copy) == before


@pytest.mark.filterwarnings("ignore:Glyph")
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", ["\u6f22" * 80, "\u0928\u093f" * 41, "x" * 250, "\U0001f9e0" * 60], ids=len)
def test_an_image_with_a_long_name_has_a_picture(name: str, model: Path, tmp_path: Path) -> None:
    path = few(tmp_path / "one", 1) / "00.png"
    path.rename(path.with_name(f"{name}.png"))
    (picture,) = explain_files(model, [path.parent], tmp_path / "out").written
    assert picture.is_file()
    assert len(picture.name.encode()) < 160
    assert name.startswith(picture.stem[4:].rstrip("…"))


@pytest.mark.complete
@pytest.mark.parametrize("kind", ["grad-cam++", "occlusion"])
def test_the_table_and_the_pictures_name_the_map(
    kind: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    save = pictures.write_explained

    def noted(rows: dict[str, pictures.Explained], path: Path, inches: float = 2.6) -> None:
        written.extend(found.kind for found in rows.values())
        save(rows, path, inches)

    monkeypatch.setattr(pictures, "write_explained", noted)
    folder, out = images(tmp_path / "in"), tmp_path / "out"
    done = CliRunner().invoke(
        app, ["explain", str(model), str(folder), "-o", str(out), "--map", kind, "-n", "1"]
    )
    assert done.exit_code == 0, done.output
    table = pd.read_csv(out / "pictures.csv")
    assert set(table["map"]) == {pictures.MAPS[kind]}
    assert set(table["class"]) == set(LABELS.names)
    assert written == [kind, kind]
    as_before = tmp_path / "as before"
    explain_files(model, [folder], as_before, most=1)
    assert (as_before / "contact sheet.png").read_bytes() != (out / "contact sheet.png").read_bytes()


def test_an_unknown_map_is_one_line_and_makes_no_folder(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="unknown map 'oclusion'; did you mean 'occlusion'"):
        explain_files(model, [images(tmp_path / "in")], out, kind="oclusion")
    assert not out.exists()


@pytest.mark.complete
def test_images_of_another_modality_or_of_an_odd_size_are_told(tmp_path: Path) -> None:
    spec = ModelSpec("cnn", size=32, modalities=("DX",))
    save_model(build(spec, LABELS, 1, pretrained=False), spec, tmp_path / "model", {})
    folder = few(tmp_path / "in", 0)
    for name, modality, side in (("ct", "CT", 32), ("small", "DX", 8)):
        (folder / f"{name}.dcm").write_bytes(dicom(np.eye(side, dtype=np.uint8), Modality=modality))
    done = explain_files(tmp_path / "model", [folder], tmp_path / "out")
    assert [path.name for path in done.written] == ["002 small.png"]
    [reason] = done.failed.values()
    assert reason.endswith("is of the modality 'CT' (0008,0060), and the model is for DX")
    [note] = done.notes
    assert note.endswith("small.dcm, 8 × 8")
