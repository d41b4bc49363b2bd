"""A model as ONNX and as a program of torch: the same probabilities, without Suture."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import cast

import numpy as np
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn

from suture.core.errors import ConfigError, DiskError, SutureError
from suture.core.labels import LabelSet, LabelType
from suture.models import ModelSpec, build
from suture.models.saved import save_model
from suture_results.model_export.onnx import write_onnx
from suture_results.model_export.program import Program, example_inputs, write_torch
from suture_results.prediction import open_model

pytestmark = pytest.mark.complete

LABELS = ("Edema", "Mass", "Nodule")

READER = """
import json, sys
sys.modules["suture"] = None  # importing it is an error
import numpy as np
image = np.load(sys.argv[2])
if sys.argv[1].endswith(".onnx"):
    import onnxruntime
    session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
    found = session.run(["probabilities"], {"image": image})[0]
    print(session.get_modelmeta().custom_metadata_map["labels"], file=sys.stderr)
else:
    import torch
    with torch.no_grad():
        found = torch.export.load(sys.argv[1]).module()(torch.from_numpy(image)).numpy()
np.save(sys.argv[3], found)
"""


def saved(folder: Path, spec: ModelSpec, label_type: LabelType = "multilabel") -> Path:
    model = build(spec, LabelSet(LABELS, label_type), 1, pretrained=False)
    save_model(model, spec, folder, {"round": 3, "job": "test"})
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("model") / "model", ModelSpec("cnn", size=32))


@pytest.fixture(scope="module")
def files(small: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The small model in both forms, whose export takes a second of the CPU."""
    folder = tmp_path_factory.mktemp("files")
    return {"onnx": write_onnx(small, folder), "torch": write_torch(open_model(small), folder)}


SPECS = {
    "gray": ModelSpec("cnn", size=32),
    "colour, cosine head": ModelSpec("resnet_small", size=32, color=True, head="cosine"),
    "colour": ModelSpec("densenet121", size=64, color=True, mean=(0.1, 0.2, 0.3), std=(0.5, 0.4, 0.3)),
    "vectors": ModelSpec("vectors", vector=384),
    "a transformer of timm": ModelSpec("timm:test_vit", size=64),
    "gray for a network of three channels, neck": ModelSpec("timm:test_resnet", size=64, neck=16),
    "a transformer of transformers": ModelSpec(
        "hf:dinov2",
        size=28,
        encoder_config='{"arguments": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}, '
        '"mean": [0.5, 0.5, 0.5], "std": [0.2, 0.2, 0.2]}',
    ),
}


@pytest.mark.parametrize("name", SPECS)
def test_onnx_gives_the_probabilities_of_the_model(tmp_path: Path, name: str) -> None:
    folder = saved(tmp_path / "model", SPECS[name], "multiclass" if name == "gray" else "multilabel")
    model, path = open_model(folder), write_onnx(folder, tmp_path / "out")
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for n in (1, 3, 8):
        inputs = example_inputs(model, n, seed=50 + n)
        found = session.run(None, {session.get_inputs()[0].name: inputs[0].numpy()})[0]
        with torch.no_grad():  # images as `suture predict` takes them; it makes vectors from texts
            expected = model(inputs[0]) if name != "vectors" else Program(model)(*inputs)
        assert np.abs(found - expected.numpy()).max() <= 1e-5
    assert [one.name for one in session.get_outputs()] == ["probabilities"]
    facts = session.get_modelmeta().custom_metadata_map
    assert json.loads(facts["labels"]) == list(LABELS)
    assert facts["digest"] == model.digest


@pytest.mark.parametrize("to", ["onnx", "torch"])
def test_a_process_without_suture_gives_its_probabilities(
    small: Path, files: dict[str, Path], tmp_path: Path, to: str
) -> None:
    model, path = open_model(small), files[to]
    images = example_inputs(model, 4)[0]
    np.save(tmp_path / "in.npy", images.numpy())
    words = [sys.executable, "-c", READER, path, tmp_path / "in.npy", tmp_path / "out.npy"]
    subprocess.run(words, check=True, cwd=tmp_path)
    assert np.abs(np.load(tmp_path / "out.npy") - model(images).numpy()).max() <= 1e-6
    # After an export, predicting goes on as before it.
    assert torch.isfinite(model(images)).all()


class Shifted(nn.Module):
    """What a wrong graph does: it gives a little more than the model."""

    def __init__(self, right: nn.Module) -> None:
        super().__init__()
        self.right = right

    def forward(self, *inputs: Tensor) -> Tensor:
        return cast(Tensor, self.right(*inputs)) + 2e-5


@pytest.mark.parametrize("to", ["onnx", "torch"])
def test_a_wrong_graph_is_refused(
    small: Path, tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = torch.export.export
    monkeypatch.setattr(torch.export, "export", lambda module, *a, **k: right(Shifted(module), *a, **k))
    with pytest.raises(SutureError, match=r"not written: for 1 random inputs .* differ by 2\.0e-05"):
        write_onnx(small, tmp_path) if to == "onnx" else write_torch(open_model(small), tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("model.")]


@pytest.mark.complete
def test_torch_does_not_write_itself_to_a_disk_that_may_be_full(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writer would end the process."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(DiskError, match=r"model\.pt2: No space left"):
        write_torch(open_model(small), tmp_path)


def test_operating_points_and_modalities_travel_in_the_file(tmp_path: Path) -> None:
    spec = ModelSpec("cnn", size=16, modalities=("MG",))
    points = {"settings": {}, "pooled": {"Mass": {"thresholds": {"sensitivity": 0.25}}}}
    model = build(spec, LabelSet(LABELS, "multilabel"), 1, pretrained=False)
    save_model(model, spec, tmp_path / "model", {"decisions": points})
    session = ort.InferenceSession(str(write_onnx(tmp_path / "model", tmp_path)))
    facts = session.get_modelmeta().custom_metadata_map
    assert json.loads(facts["decisions"]) == points
    assert json.loads(facts["modalities"]) == ["MG"]


@pytest.mark.parametrize("opset", [7, 99])
def test_an_opset_that_torch_lacks_is_refused(small: Path, tmp_path: Path, opset: int) -> None:
    with pytest.raises(ConfigError, match=rf"opset {opset} cannot be written; torch writes 18 to 23"):
        write_onnx(small, tmp_path, opset)


def test_an_opset_that_the_runtime_lacks_is_refused(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("opset 23 is under development")

    monkeypatch.setattr(ort, "InferenceSession", refuse)
    with pytest.raises(ConfigError, match=r"cannot load the file \(opset 23; leave it out.*development"):
        write_onnx(small, tmp_path, 23)
    assert not (tmp_path / "model.onnx").exists()


def test_a_model_of_words_is_refused_by_name(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", ModelSpec("lstm"))
    out = tmp_path / "out"
    for write in (lambda: write_onnx(folder, out), lambda: write_torch(open_model(folder), out)):
        with pytest.raises(ConfigError, match=r"reads words \(lstm\) cannot be exported"):
            write()
        assert not out.exists()


def test_a_missing_package_is_named(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ConfigError, match=r'pip install "suture\[onnx\]"'):
        write_onnx(small, tmp_path)


def test_arrays_of_another_shape_are_refused_and_never_computed(files: dict[str, Path]) -> None:
    session = ort.InferenceSession(str(files["onnx"]), providers=["CPUExecutionProvider"])
    program = torch.export.load(files["torch"]).module()
    for shape in ((2, 1, 16, 16), (2, 3, 32, 32), (1, 32, 32)):
        array = np.zeros(shape, dtype=np.uint8)
        with pytest.raises(ort.capi.onnxruntime_pybind11_state.InvalidArgument, match="Expected: "):
            session.run(None, {"image": array})
        with pytest.raises(AssertionError, match="Guard failed: inputs_0") as caught:
            program(torch.from_numpy(array))
        assert "\n" not in str(caught.value), shape
