"""Maps of where a model looks, by hand; and `suture explain`: pictures, their table, and earlier calls'."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch import nn

from dicom_files import dicom
from small_models import EDEMA_MASS, saved_model
from suture.core.errors import ConfigError, DataError
from suture.core.labels import LabelSet
from suture.data.batch import Preprocessing
from suture.models import ModelSpec
from suture.models.classifier import Classifier
from suture_results.model_export import pictures
from suture_results.model_export.explanation import MAPS, explain, feature_layer
from suture_results.model_export.pictures import SHEET, explain_files
from suture_results.prediction import Model, open_model
from world import refused, suture, write_image

LABELS = LabelSet(EDEMA_MASS)


def by_hand() -> Model:
    """Two feature maps, x and 1 - x; Mass is their means with the weights 2 and -1, Edema with -1 and 3."""
    conv = nn.Conv2d(1, 2, 1)
    network = Classifier(nn.Sequential(conv, nn.AdaptiveAvgPool2d(1), nn.Flatten()), 2, LABELS)
    network.load_state_dict(
        {
            "backbone.0.weight": torch.tensor([1.0, -1.0]).view(2, 1, 1, 1),
            "backbone.0.bias": torch.tensor([0.0, 1.0]),
            "head.weight": torch.tensor([[-1.0, 3.0], [2.0, -1.0]]),
            "head.bias": torch.zeros(2),
        }
    )
    prepare = Preprocessing(size=4, color=False, channels=1, mean=(0.0,), std=(1.0,))
    return Model(network.eval(), ModelSpec("cnn", size=16), prepare)


def test_the_map_of_a_class_by_hand() -> None:
    pixels = np.zeros((4, 4), dtype=np.uint8)
    pixels[0, :3] = 255, 204, 51  # x = 1, .8, .2, and 0 elsewhere
    model = by_hand()
    assert feature_layer(model) == "backbone.0"
    found = explain(model, pixels, ("Mass", "Edema"))
    # Mass: the positive part of 2x - (1 - x) = 3x - 1, of which 2 is the most.
    mass = np.zeros((4, 4))
    mass[0, :2] = 1, 0.7
    assert found.maps["Mass"] == pytest.approx(mass, abs=1e-6)
    # Edema: 3(1 - x) - x = 3 - 4x, of which 3 is the most.
    edema = np.ones((4, 4))
    edema[0, :3] = 0, 0, 2.2 / 3
    assert found.maps["Edema"] == pytest.approx(edema, abs=1e-6)
    logit = torch.tensor(2 * 0.125 - 0.875)
    assert found.probabilities["Mass"] == pytest.approx(float(torch.sigmoid(logit)), abs=1e-6)
    assert not model.network.training
    # Nothing speaks for Mass; and the padding is no part of a map.
    assert explain(model, np.zeros((4, 4), dtype=np.uint8), ("Mass",)).maps["Mass"].max() == 0
    tall = explain(model, np.full((8, 4), 255, dtype=np.uint8))
    assert {tall.pixels.shape, *(map_.shape for map_ in tall.maps.values())} == {(4, 2)}


def test_a_map_depends_on_the_row_of_its_class(tmp_path: Path) -> None:
    """The first sanity check of Adebayo et al. (NeurIPS 2018): other weights, another map."""
    opened = open_model(saved_model(tmp_path, COLOUR))
    pixels = np.random.default_rng(2).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    before = explain(opened, pixels, ("Mass",)).maps["Mass"]
    with torch.no_grad():
        drawn = torch.randn(opened.network.head.in_features, generator=torch.Generator().manual_seed(3))
        opened.network.head.weight[1] = drawn
    assert np.abs(explain(opened, pixels, ("Mass",)).maps["Mass"] - before).max() > 0.1


SIDE = 48
LESION, DECOY = (slice(6, 14), slice(30, 38)), (slice(30, 38), slice(8, 16))


def of_colours() -> Model:
    """Red speaks for Mass and green for Edema, each by how much of the image has it; blue for neither."""
    conv = nn.Conv2d(3, 2, 3, padding=1, bias=False)
    network = Classifier(nn.Sequential(conv, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()), 2, LABELS)
    with torch.no_grad():
        conv.weight.zero_()
        conv.weight[0, 0, 1, 1] = conv.weight[1, 1, 1, 1] = 1
        network.head.weight.copy_(torch.tensor([[0.0, 20.0], [20.0, 0.0]]))
        network.head.bias.fill_(-1)
    prepare = Preprocessing(size=SIDE, color=True, channels=3, mean=(0.0,) * 3, std=(1.0,) * 3)
    return Model(network.eval(), ModelSpec("cnn", size=SIDE, color=True), prepare)


def with_lesions() -> np.ndarray:
    """A red lesion, a green one, and a blue square that is larger and brighter than both."""
    pixels = np.random.default_rng(4).integers(0, 20, (SIDE, SIDE, 3), dtype=np.uint8)
    pixels[*LESION, 0] = pixels[*DECOY, 1] = 200
    pixels[28:46, 26:46, 2] = 255
    return pixels


@pytest.mark.parametrize("kind", list(MAPS))
def test_each_map_peaks_where_a_planted_lesion_decides(kind: str) -> None:
    found = explain(of_colours(), with_lesions(), ("Mass", "Edema"), kind=kind)
    assert found.kind == kind
    for name, at in (("Mass", LESION), ("Edema", DECOY)):
        map_ = found.maps[name]
        assert map_.shape == (SIDE, SIDE)
        assert map_.max() == pytest.approx(1)
        assert map_.min() >= 0
        inside = np.zeros_like(map_, dtype=bool)
        inside[at] = True
        assert inside[np.unravel_index(map_.argmax(), map_.shape)], name
        assert map_[inside].mean() > 5 * map_[~inside].mean()


@pytest.mark.complete
def test_an_occlusion_is_of_its_class_alone_and_empty_where_no_logit_moves() -> None:
    both = explain(of_colours(), with_lesions(), EDEMA_MASS, kind="occlusion")
    for name in LABELS.names:
        alone = explain(of_colours(), with_lesions(), (name,), kind="occlusion")
        assert np.array_equal(alone.maps[name], both.maps[name])
    blue = np.zeros((SIDE, SIDE, 3), dtype=np.uint8)
    blue[10:20, 10:20, 2] = 255
    assert explain(of_colours(), blue, ("Mass",), kind="occlusion").maps["Mass"].max() == 0


COLOUR = ModelSpec("resnet_small", size=32, color=True)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return saved_model(tmp_path / "model", COLOUR)


def few(folder: Path, n: int) -> Path:
    folder.mkdir(exist_ok=True)
    for i in range(n):
        write_image(folder / f"{i:02}.png", i, (20, 31, 3))
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures in no time: only their names matter."""
    monkeypatch.setattr(pictures, "write_explained", lambda rows, path, **_: path.write_text(str([*rows])))


@pytest.mark.complete
def test_the_command_draws_the_map_that_is_asked_for_and_tells_what_it_left_out(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[str] = []
    save = pictures.write_explained

    def noted(rows: dict[str, pictures.Explained], path: Path, inches: float = 2.6) -> None:
        drawn.extend(found.kind for found in rows.values())
        save(rows, path, inches)

    monkeypatch.setattr(pictures, "write_explained", noted)
    folder, out = few(tmp_path / "in", 3), tmp_path / "out"
    (folder / "00.png").rename(folder / "00$\\foo$.png")
    (folder / "000.png").write_bytes(b"no image")
    words = ["explain", model, folder, "-o", out, "-n", 2, "--map", "occlusion"]
    with refused("1 of 2", by=DataError):
        suture(*words)
    said = suture(*words, "--max-failed", 1)
    assert "000.png" in said
    assert "2 more" in said
    table = pd.read_csv(out / "pictures.csv")
    assert set(table["map"]) == {MAPS["occlusion"]}
    assert set(table["class"]) == set(EDEMA_MASS)
    assert set(drawn) == {"occlusion"}
    assert {path.name for path in out.glob("[!.]*")} == {
        "001 00$\\foo$.png",
        "contact sheet.png",
        "pictures.csv",
    }
    assert Image.open(out / "001 00$\\foo$.png").format == "PNG"
    explain_files(model, [few(tmp_path / "nine", 9)], tmp_path / "plain", ("Mass",))
    with Image.open(tmp_path / "plain" / "contact sheet.png") as sheet:  # several images in a row
        assert sheet.width > sheet.height
    assert drawn[-1] == "grad-cam"


def test_titles_stay_within_their_pictures() -> None:
    name = "001 1.2.840.113619.2.55.3.604688119.971.1448012345"
    lines = pictures._wrap(name, 18).split("\n")
    assert max(map(len, lines)) <= 18
    assert (lines[0][:3], lines[-1][-8:]) == ("001", name[-8:])
    assert pictures._wrap("Mass, 0.50", 18) == "Mass, 0.50"


def test_what_cannot_be_explained_is_refused_and_makes_no_folder(model: Path, tmp_path: Path) -> None:
    folder, out = few(tmp_path / "in", 3), tmp_path / "out"
    with refused("'Mas'", "'Mass'", by=ConfigError):
        explain_files(model, [folder], out, ("Mas",))
    with refused("'oclusion'", "'occlusion'", by=ConfigError):
        explain_files(model, [folder], out, kind="oclusion")
    with refused("lstm", by=ConfigError):
        explain_files(saved_model(tmp_path / "text", ModelSpec("lstm")), [folder], out)
    for path in folder.iterdir():
        path.write_bytes(b"x")
    with refused("3 images", "00.png", by=DataError):
        explain_files(model, [folder], out)
    assert not out.exists()


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
    before, drawn, calls = content(out), pictures.explain, iter(range(9))

    def interrupted(*given: object, **named: object) -> object:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return drawn(*given, **named)

    monkeypatch.setattr(pictures, "explain", interrupted)
    with pytest.raises(KeyboardInterrupt):
        explain_files(model, [many], out, ("Mass",))
    assert content(out) == before


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize("name", ["pictures.csv", "001 00.png", "contact sheet.png"])
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
        with refused(name, by=ConfigError):
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
    mine = [tmp_path / "keep.png", out / "002 other.png", out / "notes.txt"]
    for path in mine:
        path.write_text("mine")
    (out / "002 link.png").symlink_to(tmp_path / "keep.png")
    digest = hashlib.sha256(b"mine").hexdigest()
    listed = [[name, digest] for name in ("../keep.png", "002 ../../keep.png", "002 link.png", "notes.txt")]
    listed += [["002 other.png", "0" * 64], ["001 00.png", "0" * 64]]
    planted = json.dumps({"files": listed, "inode": out.stat().st_ino})
    for text in (planted, '{"files": [1]}', '{"files": {"a": 1}}', "[", '{"files": 1}'):
        (out / ".pictures.json").write_text(text)
        explained = explain_files(model, [many], out)
        assert all(path.read_text() == "mine" for path in mine)
        assert (out / "002 link.png").is_symlink()
        assert text != planted or any("002 other.png" in note for note in explained.notes)
        for name in ("001 00.png", "contact sheet.png", "pictures.csv"):
            (out / name).unlink()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("inode", [{}, {"inode": 1}, {"inode": None}])
def test_a_list_of_another_folder_deletes_nothing(
    inode: dict[str, object], model: Path, tmp_path: Path
) -> None:
    many, out = few(tmp_path / "many", 1), tmp_path / "out"
    out.mkdir()
    (out / "002 mine.png").write_text("mine")
    listed = [["002 mine.png", hashlib.sha256(b"mine").hexdigest()]]
    (out / ".pictures.json").write_text(json.dumps({"files": listed, **inode}))
    explain_files(model, [many], out)
    assert (out / "002 mine.png").read_text() == "mine"
    copy = Path(shutil.copytree(out, tmp_path / "copy"))
    before = content(copy)
    with refused("copy", by=ConfigError):
        explain_files(model, [many], copy)
    assert content(copy) == before


@pytest.mark.filterwarnings("ignore:Glyph")
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", ["\u6f22" * 80, "\u0928\u093f" * 41, "x" * 250, "\U0001f9e0" * 60], ids=len)
def test_an_image_with_a_long_name_has_a_picture(name: str, model: Path, tmp_path: Path) -> None:
    path = write_image(tmp_path / "one" / f"{name}.png")
    (picture,) = explain_files(model, [path.parent], tmp_path / "out").written
    assert picture.is_file()
    assert len(picture.name.encode()) < 160
    assert name.startswith(picture.stem[4:].rstrip("…"))


@pytest.mark.usefixtures("quick")
def test_images_of_another_modality_or_of_an_odd_size_are_told(tmp_path: Path) -> None:
    folder = few(tmp_path / "in", 0)
    for name, modality, side in (("ct", "CT", 32), ("small", "DX", 8)):
        (folder / f"{name}.dcm").write_bytes(dicom(np.eye(side, dtype=np.uint8), Modality=modality))
    model = saved_model(tmp_path / "model", ModelSpec("cnn", size=32, modalities=("DX",)))
    done = explain_files(model, [folder], tmp_path / "out")
    assert [path.name for path in done.written] == ["002 small.png"]
    [reason] = done.failed.values()
    assert "'CT'" in reason
    [note] = done.notes
    assert note.endswith("small.dcm, 8 × 8")
