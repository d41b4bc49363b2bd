"""A model for those who have no Suture: a MONAI bundle, ONNX, a program of torch; the same probabilities."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnxruntime as ort
import pandas as pd
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from dicom_files import dicom
from small_models import CNN_16, CNN_32, saved_model
from suture.core.errors import ConfigError, DiskError, SutureError
from suture.core.escaping import as_cell
from suture.core.files import read_json
from suture.models import ModelSpec
from suture.protocol.decisions import Calibration, Decisions, DecisionSettings, Operating
from suture_results.decided_predictions import read_decisions, with_decisions
from suture_results.model_export import bundle
from suture_results.model_export.bundle import write_bundle
from suture_results.model_export.onnx import write_onnx
from suture_results.model_export.program import Program, example_inputs, write_torch
from suture_results.prediction import open_model
from world import refused, write_image

pytestmark = pytest.mark.complete

LABELS = ("Edema", "Mass", "Hernia")


def point(threshold: float, slope: float) -> Operating:
    return Operating({"sensitivity": threshold}, Calibration(slope, -0.25), 0.5)


POOLED = {"Edema": point(0.999, 1.5), "Mass": point(0.001, 0.5)}
DECISIONS = Decisions(DecisionSettings(), POOLED, {"north": {"Edema": point(0.001, 1.5)}})
FACTS = {"job": "small", "round": 3, "decisions": asdict(DECISIONS)}

RUN_BUNDLE = """
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


def run_bundle(bundle: Path, folders: list[Path], out: Path, *site: str) -> Any:
    """In a process in which Suture cannot be imported."""
    stub = bundle.parent / "stub" / "suture"
    stub.mkdir(parents=True)
    (stub / "__init__.py").write_text("raise ImportError('blocked')")
    environment = os.environ | {"PYTHONPATH": str(stub.parent)}
    command = [sys.executable, "-c", RUN_BUNDLE, ":".join(map(str, folders)), str(out), *site]
    return subprocess.run(command, cwd=bundle, env=environment, capture_output=True, text=True, check=False)


def write_images(folder: Path) -> Path:
    """Eleven images of several sizes, depths and kinds; the colour ones are for every model."""
    write_image(folder / "gray.png", 0, (50, 41))
    write_image(folder / "exact.png", 1, (32, 32))
    write_image(folder / "wide.bmp", 2, (9, 30))
    write_image(folder / "deep.png", 3, (70, 33), "uint16")
    write_image(folder / "deep.tif", 4, (20, 33), "uint16")
    write_image(folder / "colour.jpg", 5, (45, 80, 3))
    with Image.open(write_image(folder / "colour.png", 6, (45, 80, 3))) as colour:
        colour.quantize(16).save(folder / "palette.png", transparency=0)
    rng = np.random.default_rng(7)
    deep = {"BitsStored": 12, "HighBit": 11, "RescaleSlope": 2, "RescaleIntercept": -100}
    deep |= {"WindowCenter": 3000, "WindowWidth": 4000}
    for kind in ("MONOCHROME1", "MONOCHROME2"):
        pixels = rng.integers(0, 4096, (40, 52), dtype=np.uint16)
        (folder / f"{kind}.dcm").write_bytes(dicom(pixels, PhotometricInterpretation=kind, **deep))
    colour = {"SamplesPerPixel": 3, "PlanarConfiguration": 0, "PhotometricInterpretation": "RGB"}
    (folder / "RGB.dcm").write_bytes(dicom(rng.integers(0, 256, (40, 52, 3), dtype=np.uint8), **colour))
    return folder


@pytest.mark.parametrize("decided", [True, False])
def test_a_process_without_suture_gives_a_bundles_probabilities_and_decisions(
    decided: bool, tmp_path: Path
) -> None:
    if decided:
        model = saved_model(tmp_path / "model", CNN_32, LABELS, **FACTS)
    else:
        model = saved_model(tmp_path / "model", ModelSpec("resnet_small", 32, True), LABELS, "multiclass")
    images, out, site = write_images(tmp_path / "images"), tmp_path / "p.csv", ["north"] * decided
    array, damaged = (shutil.copytree(images, tmp_path / name) for name in ("array", "damage"))
    np.save(array / "array.npy", np.zeros((4, 4)))
    (damaged / "damaged.png").write_bytes(b"no image")
    folders = [images] if decided else [images, array, damaged]
    done = run_bundle(write_bundle(model, tmp_path / "bundle"), folders, out, *site)
    assert done.returncode == 0, done.stderr
    assert "without Suture" in done.stdout
    assert decided or ("array.npy" in done.stderr and "damaged.png" in done.stderr)
    found = pd.read_csv(out, index_col="image", keep_default_na=False).rename(index=lambda p: Path(p).name)
    expected = open_model(model).predict(images).rename(index=lambda p: Path(p).name)
    if decided:
        expected = with_decisions(expected, read_decisions(model, "north"), "north")
        assert set(found["Edema decision"]) == {"above"}
        assert set(found["Hernia decision"]) == {"not validated"}
    assert list(found.columns) == list(expected.columns)
    assert sorted(found.index) == sorted(expected.index)
    assert len(found) == 11
    expected = expected.loc[found.index]
    for column in expected:
        if expected[column].dtype.kind == "f" and not expected[column].isna().all():
            assert np.abs(found[column].astype(float) - expected[column]).max() <= 1e-6, column
        else:
            assert found[column].tolist() == expected[column].astype(object).fillna("").tolist(), column


@pytest.fixture(scope="module")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundled")
    model = saved_model(folder / "model", ModelSpec("cnn", 32, modalities=("CR", "DX")), LABELS, **FACTS)
    return write_bundle(model, folder / "bundle", "CC-BY-NC-4.0")


def test_what_a_clinician_and_monai_read_of_a_bundle(bundled: Path) -> None:
    text = (bundled / "docs" / "README.md").read_text()
    assert "- Edema: north, all sites together" in text
    assert "- Hernia: not validated" in text
    assert "CR, DX" in text
    assert (bundled / "LICENSE").read_text() == "CC-BY-NC-4.0\n"
    facts = read_json(bundled / "configs" / "metadata.json")
    # What MONAI's meta_schema_20240725.json requires; a number or text may be no other kind.
    texts = {"schema", "version", "monai_version", "pytorch_version", "numpy_version"}
    texts |= {"task", "description", "authors", "copyright"}
    assert all(isinstance(facts[name], str) for name in texts)
    assert isinstance(facts["required_packages_version"], dict)
    inputs, outputs = (facts["network_data_format"][which] for which in ("inputs", "outputs"))
    kinds = {"type": str, "format": str, "num_channels": int, "spatial_shape": list, "dtype": str}
    kinds |= {"value_range": list}
    for tensor in (*inputs.values(), *outputs.values()):
        assert all(isinstance(tensor[name], kind) for name, kind in kinds.items())
    assert inputs["image"]["modality"] == "CR, DX"
    assert outputs["pred"]["channel_def"] == dict(zip("012", LABELS, strict=True))


def test_a_bundles_script_reads_images_and_writes_names_as_suture_does(bundled: Path, tmp_path: Path) -> None:
    script = runpy.run_path(str(bundled / "scripts" / "inference.py"))
    for name in ("ward 7/a.png", "=1+1", "-1", "@a", "\uff1d1", "a\x1b[2J", "a\n=b", "+", "a;=b", ""):
        assert script["cell"](name) == as_cell(name)
    network = script["Network"](str(bundled / "models" / "model.pt2"))
    assert network(torch.zeros(2, 1, 32, 32)).shape == (2, 3)
    for shape in ((2, 1, 16, 16), (2, 3, 32, 32), (1, 32, 32), (1, 32)):
        with refused(list(shape), by=ValueError):
            network(torch.zeros(shape))
    facts = read_json(bundled / "configs" / "inference.json")["preprocessing"]
    reader = script["ReadImage"](facts["size"], facts["color"], modalities=facts["modalities"])
    path, pixels = tmp_path / "a.dcm", np.eye(40, dtype=np.uint8)
    for stated in ("CT", ""):
        path.write_bytes(dicom(pixels, Modality=stated))
        with refused("a.dcm", stated, "CR, DX", by=ValueError):
            reader(str(path))
        assert script["ReadImage"](32, False)(str(path)).shape == (1, 32, 32), (
            "one that states none is for any"
        )
    path.write_bytes(dicom(pixels, Modality="DX"))
    assert reader(str(path)).shape == (1, 32, 32)


def test_a_bundle_is_of_images_and_in_a_folder_of_its_own(tmp_path: Path) -> None:
    with refused("model", by=ConfigError):
        write_bundle(saved_model(tmp_path / "model", ModelSpec("lstm")), tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()
    (tmp_path / "full" / "a").mkdir(parents=True)
    with refused("full", by=ConfigError):
        write_bundle(saved_model(tmp_path / "b"), tmp_path / "full")


@pytest.mark.parametrize("there", [False, True])
def test_a_bundle_that_is_interrupted_is_no_bundle(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> str:
        raise KeyboardInterrupt

    folder, model = tmp_path / "to" / "bundle", saved_model(tmp_path / "from")
    (folder if there else folder.parent).mkdir(parents=True)
    with monkeypatch.context() as patched:
        patched.setattr(bundle, "_readme", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_bundle(model, folder)
    assert list(folder.parent.rglob("*")) == [folder] * there
    (tmp_path / "link").symlink_to(folder.parent if not there else folder)
    assert (write_bundle(model, tmp_path / "link") / "LICENSE").is_file()
    assert (tmp_path / "link").is_symlink()
    assert not list(tmp_path.rglob("*.tmp"))


POINTS = {"settings": {}, "pooled": {"Mass": {"thresholds": {"sensitivity": 0.25}}}}
DINO = (
    '{"arguments": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}, '
    '"mean": [0.5, 0.5, 0.5], "std": [0.2, 0.2, 0.2]}'
)
NORMALISED = {"mean": (0.1, 0.2, 0.3), "std": (0.5, 0.4, 0.3)}
SPECS: dict[str, tuple[ModelSpec, dict[str, Any]]] = {
    "gray": (ModelSpec("cnn", size=32, modalities=("MG",)), {"decisions": POINTS}),
    "colour, cosine head": (
        ModelSpec("resnet_small", size=32, color=True, head="cosine", **NORMALISED),
        {"coherent": "noisy-or", "below": {"Edema": ("Mass", "Hernia")}},
    ),
    "largest": (CNN_16, {"coherent": "max", "below": {"Edema": ("Mass",)}}),
    "vectors": (ModelSpec("vectors", vector=384), {}),
    "gray for three channels, neck": (ModelSpec("timm:test_resnet", size=64, neck=16), {}),
    "a transformer": (ModelSpec("hf:dinov2", size=28, encoder_config=DINO), {}),
}


@pytest.mark.parametrize("name", SPECS)
def test_onnx_gives_the_probabilities_of_the_model(name: str, tmp_path: Path) -> None:
    spec, told = SPECS[name]
    folder = saved_model(
        tmp_path / "model", spec, LABELS, "multiclass" if name == "gray" else "multilabel", **told
    )
    model, path = open_model(folder), write_onnx(folder, tmp_path / "out")
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for n in (1, 8):
        inputs = example_inputs(model, n, seed=50 + n)
        found = session.run(None, {session.get_inputs()[0].name: inputs[0].numpy()})[0]
        with torch.no_grad():  # images as `suture predict` takes them; it makes vectors from texts
            expected = model(inputs[0]) if name != "vectors" else Program(model)(*inputs)
        assert np.abs(found - expected.numpy()).max() <= 1e-5
    assert [one.name for one in session.get_outputs()] == ["probabilities"]
    facts = session.get_modelmeta().custom_metadata_map
    assert json.loads(facts["labels"]) == list(LABELS)
    assert facts["digest"] == model.digest
    if name == "gray":
        assert [json.loads(facts[key]) for key in ("decisions", "modalities")] == [POINTS, ["MG"]]


READER = """
import json, sys
sys.modules["suture"] = None  # importing it is an error
import numpy as np
image = np.load(sys.argv[2])
if sys.argv[1].endswith(".onnx"):
    import onnxruntime
    session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
    found = session.run(["probabilities"], {"image": image})[0]
else:
    import torch
    with torch.no_grad():
        found = torch.export.load(sys.argv[1]).module()(torch.from_numpy(image)).numpy()
np.save(sys.argv[3], found)
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("model") / "model", CNN_32, LABELS)


@pytest.fixture(scope="module")
def files(small: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The small model in both forms, whose export takes a second of the CPU."""
    folder = tmp_path_factory.mktemp("files")
    return {"onnx": write_onnx(small, folder), "torch": write_torch(open_model(small), folder)}


@pytest.mark.parametrize("to", ["onnx", "torch"])
def test_a_process_without_suture_gives_its_probabilities(
    to: str, small: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    model = open_model(small)
    images = example_inputs(model, 4)[0]
    np.save(tmp_path / "in.npy", images.numpy())
    words = [sys.executable, "-c", READER, files[to], tmp_path / "in.npy", tmp_path / "out.npy"]
    subprocess.run(words, check=True, cwd=tmp_path)
    # After an export, predicting goes on as before it.
    assert np.abs(np.load(tmp_path / "out.npy") - model(images).numpy()).max() <= 1e-6


def test_arrays_of_another_shape_are_never_computed(files: dict[str, Path]) -> None:
    session = ort.InferenceSession(str(files["onnx"]), providers=["CPUExecutionProvider"])
    program = torch.export.load(files["torch"]).module()
    for shape in ((2, 1, 16, 16), (2, 3, 32, 32), (1, 32, 32)):
        array = np.zeros(shape, dtype=np.uint8)
        with refused("Expected: ", by=ort.capi.onnxruntime_pybind11_state.InvalidArgument):
            session.run(None, {"image": array})
        with refused("inputs_0", by=AssertionError):
            program(torch.from_numpy(array))


class Shifted(nn.Module):
    """What a wrong graph does: it gives a little more than the model."""

    def __init__(self, right: nn.Module) -> None:
        super().__init__()
        self.right = right

    def forward(self, *inputs: Tensor) -> Tensor:
        return cast(Tensor, self.right(*inputs)) + 2e-5


@pytest.mark.parametrize("to", ["onnx", "torch"])
def test_a_wrong_graph_is_not_written(
    to: str, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = torch.export.export
    monkeypatch.setattr(torch.export, "export", lambda module, *a, **k: right(Shifted(module), *a, **k))
    with refused("2.0e-05"):
        write_onnx(small, tmp_path) if to == "onnx" else write_torch(open_model(small), tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("model.")]


def test_torch_does_not_write_itself_to_a_disk_that_may_be_full(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writer would end the process."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with refused("model.pt2", by=DiskError):
        write_torch(open_model(small), tmp_path)


def test_what_cannot_be_exported_is_refused(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, out = saved_model(tmp_path / "words", ModelSpec("lstm")), tmp_path / "out"
    for write in (lambda: write_onnx(words, out), lambda: write_torch(open_model(words), out)):
        with refused("lstm", by=ConfigError):
            write()
    for opset in (7, 99):
        with refused(f"opset {opset}", by=ConfigError):
            write_onnx(small, out, opset)

    def under_development(*_: object, **__: object) -> None:
        raise RuntimeError("opset 23 is under development")

    with monkeypatch.context() as patched:
        patched.setattr(ort, "InferenceSession", under_development)
        with refused("opset 23", by=ConfigError):
            write_onnx(small, out, 23)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with refused("suture[onnx]", by=SutureError):
        write_onnx(small, out)
    assert not (out / "model.onnx").exists()
