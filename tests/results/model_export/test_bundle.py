"""A MONAI bundle, run by a process in which Suture cannot be imported."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pydicom
import pytest
import torch
from PIL import Image
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, generate_uid

from dicom_files import dicom
from suture.core.errors import ConfigError
from suture.core.escaping import as_cell
from suture.core.files import read_json
from suture.core.labels import LabelSet, LabelType
from suture.models import ModelSpec, build
from suture.models.saved import save_model
from suture.protocol.decisions import Calibration, Decisions, DecisionSettings, Operating
from suture_results.decided_predictions import read_decisions, with_decisions
from suture_results.model_export import bundle
from suture_results.model_export.bundle import write_bundle
from suture_results.prediction import open_model

RUN = """
import importlib.util, sys, traceback
try:
    import suture
except ImportError:
    print("without Suture")
from monai.bundle import run, verify_net_in_out
verify_net_in_out("network", "configs/metadata.json", "configs/inference.json", device="cpu")
first, *others = sys.argv[1].split(":")
site = {"site": sys.argv[3]} if sys.argv[3:] else {}
run(config_file="configs/inference.json", dataset_dir=first, output_file=sys.argv[2], **site)
for images in others:  # what each cannot read; in one process, since MONAI takes long to import
    try:
        run(config_file="configs/inference.json", dataset_dir=images, output_file=images + ".csv")
    except Exception:
        traceback.print_exc()
assert not [name for name in sys.modules if name.startswith(("suture.", "suture_papers"))]
"""
LABELS = ("Edema", "Mass", "Hernia")


def point(threshold: float, slope: float = 1.5) -> Operating:
    line = Calibration(slope, -0.25)
    return Operating({"sensitivity": threshold}, line, 0.5)


DECISIONS = Decisions(
    DecisionSettings(),
    {"Edema": point(0.999), "Mass": point(0.001, 0.5)},
    {"north": {"Edema": point(0.001)}},
)


def saved(
    folder: Path,
    name: str = "cnn",
    color: bool = False,
    decided: bool = True,
    kind: LabelType = "multilabel",
    modalities: tuple[str, ...] = (),
) -> Path:
    spec = ModelSpec(name) if name == "lstm" else ModelSpec(name, 32, color, modalities=modalities)
    facts = {"job": "small", "round": 3} | ({"decisions": asdict(DECISIONS)} if decided else {})
    save_model(build(spec, LabelSet(LABELS, kind), 1, pretrained=False), spec, folder / "model", facts)
    return folder / "model"


def run_bundle(bundle: Path, images: Path, out: Path, *site: str, others: tuple[Path, ...] = ()) -> Any:
    stub = bundle.parent / "stub" / "suture"
    stub.mkdir(parents=True, exist_ok=True)
    (stub / "__init__.py").write_text("raise ImportError('blocked')")
    environment = os.environ | {"PYTHONPATH": str(stub.parent)}
    folders = ":".join(map(str, (images, *others)))
    command = [sys.executable, "-c", RUN, folders, str(out), *site]
    return subprocess.run(command, cwd=bundle, env=environment, capture_output=True, text=True, check=False)


def write_images(folder: Path) -> Path:
    """Images of several sizes, depths and kinds; the colour ones are for both models."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    gray = rng.integers(0, 256, (50, 41), dtype=np.uint8)
    Image.fromarray(gray).save(folder / "gray.png")
    Image.fromarray(gray[:32, :32]).save(folder / "exact.png")
    Image.fromarray(gray[:9, :30]).save(folder / "wide.bmp")
    Image.fromarray(rng.integers(0, 2**16, (70, 33), dtype=np.uint16)).save(folder / "deep.png")
    Image.fromarray(rng.integers(0, 2**16, (20, 33), dtype=np.uint16)).save(folder / "deep.tif")
    colour = rng.integers(0, 256, (45, 80, 3), dtype=np.uint8)
    Image.fromarray(colour).save(folder / "colour.png")
    Image.fromarray(colour).save(folder / "colour.jpg")
    Image.fromarray(colour).quantize(16).save(folder / "palette.png", transparency=0)
    for kind in ("MONOCHROME1", "MONOCHROME2"):
        write_dicom(folder / f"{kind}.dcm", kind, rng.integers(0, 4096, (40, 52), dtype=np.uint16))
    write_dicom(folder / "RGB.dcm", "RGB", rng.integers(0, 256, (40, 52, 3), dtype=np.uint8))
    return folder


def write_dicom(path: Path, kind: str, pixels: np.ndarray) -> None:
    meta = FileMetaDataset()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    meta.MediaStorageSOPInstanceUID = generate_uid()
    meta.MediaStorageSOPClassUID = pydicom.uid.DigitalXRayImageStorageForPresentation
    file = FileDataset(path, {}, file_meta=meta, preamble=b"\0" * 128)
    file.Rows, file.Columns = pixels.shape[:2]
    file.PhotometricInterpretation, file.PixelRepresentation = kind, 0
    if kind == "RGB":
        file.SamplesPerPixel, file.PlanarConfiguration = 3, 0
        file.BitsAllocated, file.BitsStored, file.HighBit = 8, 8, 7
    else:
        file.SamplesPerPixel = 1
        file.BitsAllocated, file.BitsStored, file.HighBit = 16, 12, 11
        file.RescaleSlope, file.RescaleIntercept = 2, -100
        file.WindowCenter, file.WindowWidth = 3000, 4000
    file.PixelData = pixels.tobytes()
    file.save_as(path, enforce_file_format=True)


@pytest.mark.complete
@pytest.mark.parametrize(
    ("name", "color", "kind"),
    [("cnn", False, "multilabel"), ("resnet_small", True, "multiclass")],
)
def test_a_process_without_suture_gives_its_probabilities_and_decisions(
    tmp_path: Path, name: str, color: bool, kind: LabelType
) -> None:
    model, images = saved(tmp_path, name, color, kind=kind), write_images(tmp_path / "images")
    bundle, out = write_bundle(model, tmp_path / "bundle"), tmp_path / "p.csv"
    done = run_bundle(bundle, images, out, "north")
    assert done.returncode == 0, done.stderr
    assert "without Suture" in done.stdout
    found = pd.read_csv(out, index_col="image", keep_default_na=False).rename(index=lambda p: Path(p).name)
    expected = open_model(model).predict(images).rename(index=lambda p: Path(p).name)
    expected = with_decisions(expected, read_decisions(model, "north"), "north")
    assert list(found.columns) == list(expected.columns)
    assert sorted(found.index) == sorted(expected.index)
    assert len(found) == 11
    expected = expected.loc[found.index]
    for column in expected:
        if expected[column].dtype.kind == "f" and not expected[column].isna().all():
            assert np.abs(found[column].astype(float) - expected[column]).max() <= 1e-6, column
        else:
            assert found[column].tolist() == expected[column].astype(object).fillna("").tolist(), column
    assert set(found["Edema decision"]) == {"above"}
    assert set(found["Hernia decision"]) == {"not validated"}


@pytest.mark.complete
def test_without_operating_points_it_decides_nothing_and_says_so(tmp_path: Path) -> None:
    bundle = write_bundle(saved(tmp_path, decided=False), tmp_path / "bundle")
    images, out = write_images(tmp_path / "images"), tmp_path / "p.csv"
    array, damaged = (shutil.copytree(images, tmp_path / name) for name in ("with array", "with damage"))
    np.save(array / "array.npy", np.zeros((4, 4)))
    (damaged / "damaged.png").write_bytes(b"no image")
    done = run_bundle(bundle, images, out, others=(array, damaged))
    assert done.returncode == 0, done.stderr
    assert list(pd.read_csv(out)) == ["image", *LABELS]
    assert "no operating points" in (bundle / "docs" / "README.md").read_text()
    assert "array.npy: this bundle does not read arrays" in done.stderr
    assert "damaged.png' cannot be read" in done.stderr


@pytest.mark.complete
def test_what_a_clinician_and_monai_read(tmp_path: Path) -> None:
    bundle = write_bundle(saved(tmp_path), tmp_path / "bundle", "CC-BY-NC-4.0")
    text = (bundle / "docs" / "README.md").read_text()
    assert "Not for clinical use without local validation" in text
    assert "- Edema: north, all sites together" in text
    assert "- Hernia: not validated" in text
    assert (bundle / "LICENSE").read_text() == "CC-BY-NC-4.0\n"
    facts = read_json(bundle / "configs" / "metadata.json")
    # What MONAI's meta_schema_20240725.json requires; a number or text may be no other kind.
    texts = {"schema", "version", "monai_version", "pytorch_version", "numpy_version"}
    texts |= {"task", "description", "authors", "copyright"}
    assert all(isinstance(facts[name], str) for name in texts)
    assert isinstance(facts["required_packages_version"], dict)
    tensors = [*facts["network_data_format"]["inputs"].values()]
    tensors += facts["network_data_format"]["outputs"].values()
    kinds = {"type": str, "format": str, "num_channels": int, "spatial_shape": list, "dtype": str}
    for tensor in tensors:
        assert all(isinstance(tensor[name], kind) for name, kind in (kinds | {"value_range": list}).items())
    outputs = facts["network_data_format"]["outputs"]
    assert outputs["pred"]["channel_def"] == {"0": "Edema", "1": "Mass", "2": "Hernia"}


def test_what_cannot_become_a_bundle_says_so_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a MONAI bundle is for images"):
        write_bundle(saved(tmp_path, "lstm"), tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()
    full = tmp_path / "full"
    full.mkdir()
    (full / "a").touch()
    with pytest.raises(ConfigError, match="not an empty folder"):
        write_bundle(saved(tmp_path / "b"), full)


@pytest.mark.complete
@pytest.mark.parametrize("there", [False, True])
def test_a_bundle_that_is_interrupted_is_no_bundle(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> str:
        raise KeyboardInterrupt

    folder, model = tmp_path / "to" / "bundle", saved(tmp_path / "from")
    folder.parent.mkdir()
    if there:
        folder.mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(bundle, "_readme", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_bundle(model, folder)
    assert list(folder.parent.rglob("*")) == ([folder] if there else [])
    assert (write_bundle(model, folder) / "LICENSE").is_file()
    assert not list(folder.parent.rglob("*.tmp"))
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_bundle(model, tmp_path / "link")
    assert (tmp_path / "real" / "LICENSE").is_file()


@pytest.mark.complete
def test_names_in_its_table_are_those_that_suture_writes(tmp_path: Path) -> None:
    script = runpy.run_path(
        str(write_bundle(saved(tmp_path), tmp_path / "bundle") / "scripts" / "inference.py")
    )
    for name in ("ward 7/a.png", "=1+1", "-1", "@a", "\uff1d1", "a\x1b[2J", "a\n=b", "+", "a;=b", ""):
        assert script["cell"](name) == as_cell(name)


@pytest.mark.complete
def test_a_bundle_refuses_a_dicom_of_another_modality_as_the_model_does(tmp_path: Path) -> None:
    bundle = write_bundle(saved(tmp_path, decided=False, modalities=("CR", "DX")), tmp_path / "bundle")
    image = read_json(bundle / "configs" / "metadata.json")["network_data_format"]["inputs"]["image"]
    assert image["modality"] == "CR, DX"
    assert "A DICOM image of another modality than CR, DX" in (bundle / "docs" / "README.md").read_text()
    read = runpy.run_path(str(bundle / "scripts" / "inference.py"))["ReadImage"]
    facts = read_json(bundle / "configs" / "inference.json")["preprocessing"]
    reader = read(facts["size"], facts["color"], modalities=facts["modalities"])
    path, pixels = tmp_path / "a.dcm", np.eye(40, dtype=np.uint8)
    for stated, said in {"CT": "its modality is CT", "": "its modality is not stated"}.items():
        path.write_bytes(dicom(pixels, Modality=stated))
        with pytest.raises(
            ValueError, match=rf"a\.dcm' cannot be read: {said}, and the model is for CR, DX$"
        ):
            reader(str(path))
        assert read(32, False)(str(path)).shape == (1, 32, 32), "a bundle that states none is for any"
    path.write_bytes(dicom(pixels, Modality="DX"))
    assert reader(str(path)).shape == (1, 32, 32)
    plain = write_bundle(saved(tmp_path / "b", decided=False), tmp_path / "plain")
    for file in ("configs/metadata.json", "configs/inference.json"):
        assert "modalit" not in (plain / file).read_text()
    assert "or of the wrong modality" in (plain / "docs" / "README.md").read_text()


@pytest.mark.complete
def test_images_of_another_shape_are_one_line(tmp_path: Path) -> None:
    bundle = write_bundle(saved(tmp_path), tmp_path / "bundle")
    script = runpy.run_path(str(bundle / "scripts" / "inference.py"))
    network = script["Network"](str(bundle / "models" / "model.pt2"))
    assert network(torch.zeros(2, 1, 32, 32)).shape == (2, 3)
    for shape in ((2, 1, 16, 16), (2, 3, 32, 32), (1, 32, 32), (1, 32)):
        with pytest.raises(ValueError, match=rf"reads images \[n, 1, 32, 32\], but got \{list(shape)}$"):
            network(torch.zeros(shape))
