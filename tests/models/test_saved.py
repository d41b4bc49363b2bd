"""A model on disk."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from suture.core.errors import ConfigError, SutureError
from suture.core.labels import LabelSet
from suture.models import ModelSpec, build
from suture.models.saved import load_model, load_spec, save_model, stated_digest, weights_digest
from suture_results.model_export.signature import check_digest
from suture_results.prediction import predict_to_csv


@pytest.mark.parametrize(
    "spec",
    [
        ModelSpec("cnn", size=32, hidden=8),
        ModelSpec("cnn", size=32, neck=8),
        ModelSpec("cnn", size=32, head="cosine"),
        ModelSpec("cnn", size=32, neck=8, head="anchors", row_init="named"),
        ModelSpec("cnn", size=32, modalities=("CR", "DX")),
    ],
    ids=["hidden", "neck", "cosine", "anchors", "modalities"],
)
def test_round_trip(spec: ModelSpec, tmp_path: Path) -> None:
    model = build(spec, LabelSet(("Edema", "Mass")), 1, pretrained=False).eval()
    save_model(model, spec, tmp_path / "m", {"round": 3})
    again, prepare = load_model(tmp_path / "m")
    assert again.labels.names == ("Edema", "Mass")
    assert prepare == spec.preprocessing
    assert load_spec(tmp_path / "m") == spec
    x = torch.randn(2, 1, 32, 32)
    assert torch.equal(model({"image": x}), again({"image": x}))
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "m").iterdir()}
    assert len(modes) == 1  # whoever may read the description may read the weights


def test_an_exported_model_is_for_other_programs(tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    file.write_bytes(b"a graph")
    with pytest.raises(ConfigError, match=r"model\.onnx is a file; name the model/ folder .*such as ONNX"):
        load_model(file)


def test_a_folder_that_holds_no_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not contain model\.json"):
        load_model(tmp_path)
    run = tmp_path / "run"
    site = run / "sites" / "alpha" / "state" / "experiments" / "run" / "model"
    site.mkdir(parents=True)
    for about, remedy in (
        (
            {"status": "failed", "env": "sim", "command": "suture run demo --env sim", "error": "no GPU"},
            r"no GPU.* continue it: suture run demo --env sim --out \S*run --resume$",
        ),
        ({"status": "interrupted", "env": "local"}, r"suture run JOB --out \S*run --resume$"),
        (
            {"status": "finished", "env": "local", "command": "suture run demo"},
            r"is lost; train it again: suture run demo$",
        ),
        (
            {"status": "running", "env": "poc", "flare_job": "7"},
            r"once the job has ended and `suture results JOB_ID` has fetched it$",
        ),
    ):
        (run / "run.json").write_text(json.dumps(about))
        with pytest.raises(ConfigError, match=remedy):
            load_model(run)
    (site / "model.json").touch()
    with pytest.raises(ConfigError, match=r"run has no model of all sites; name a site's, as .*run/model$"):
        load_model(run)
    spec = ModelSpec("cnn", size=32)
    save_model(build(spec, LabelSet(("Edema",)), 1, pretrained=False), spec, tmp_path, {})
    (tmp_path / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(ConfigError, match="cannot be read as a model"):
        load_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"has no model\.safetensors; restore it from a backup$"):
        load_model(tmp_path)


def saved(folder: Path) -> dict[str, Any]:
    spec = ModelSpec("cnn", size=32)
    save_model(build(spec, LabelSet(("Edema",)), 1, pretrained=False), spec, folder, {})
    description: dict[str, Any] = json.loads((folder / "model.json").read_text())
    return description


def change_weights(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Replace weights, and state their digest."""
    save_file(tensors, folder / "model.safetensors")
    description = json.loads((folder / "model.json").read_text())
    (folder / "model.json").write_text(json.dumps({**description, "digest": weights_digest(folder)}))


def test_weights_of_another_digest_are_refused(tmp_path: Path) -> None:
    """A byte of a weight is changed: the file is as readable and as finite as before."""
    spec = ModelSpec("cnn", size=32)
    save_model(build(spec, LabelSet(("Edema",)), 1, pretrained=False), spec, tmp_path, {})
    weights = tmp_path / "model.safetensors"
    stated = json.loads((tmp_path / "model.json").read_text())["digest"]
    assert stated == stated_digest(tmp_path) == hashlib.sha256(weights.read_bytes()).hexdigest()
    data = bytearray(weights.read_bytes())
    data[-4] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ConfigError, match="restore both from a backup"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("part", "change", "says"),
    [
        ("preprocessing", {"std": [0]}, r"preprocessing\.std\.0"),
        ("preprocessing", {"std": [1e-30]}, r"preprocessing\.std\.0"),
        ("preprocessing", {"mean": [1e30]}, r"preprocessing\.mean\.0"),
        ("preprocessing", {"std": []}, r"preprocessing\.std has 0 values for 1 channels"),
        ("preprocessing", {"size": 30_000}, r"preprocessing\.size"),
        ("preprocessing", {"size": 16}, r"preprocessing\.size is 16, .* 32"),
        ("preprocessing", {"channels": 10**30}, "64 bits"),
        ("model", {"size": 30_000}, r"model\.size"),
        ("model", {"hidden": 10**9}, r"model\.hidden"),
        ("model", {"projection": 10**9}, r"model\.projection"),
        ("model", {"hidden": 8}, "is missing"),
        ("model", {"hidden": 4096, "projection": 4096}, "a larger network than model.safetensors"),
        ("", {"coherent": "max", "below": {"Edema": ["Edema"] * 2}}, "'Edema' is a class twice"),
        ("model", {"name": "lstm", "vocabulary": "/dev/zero"}, "needs the words themselves"),
        ("", {"labels": "abc"}, "labels"),
        ("", {"labels": [{}]}, "labels"),
        ("", {"labels": []}, "labels"),
        pytest.param("", {"labels": ["a"] * 10_001}, "labels", id="too many labels"),
        ("", {"labels": ["Edema", "Edema"]}, "appears twice"),
        ("", {"label_type": 3}, "label_type"),
        ("", {"digest": None}, "digest"),
        ("", {"model": None}, "model"),
        ("", {"preprocessing": [1]}, "preprocessing"),
    ],
    ids=str,
)
def test_a_damaged_description_is_refused(
    part: str, change: dict[str, Any], says: str, tmp_path: Path
) -> None:
    description = saved(tmp_path)
    (description[part] if part else description).update(change)
    (tmp_path / "model.json").write_text(json.dumps(description))
    with pytest.raises(ConfigError, match=says) as caught:
        load_model(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("text", ["[]", "3", "{}", "[" * 100_000, '{"labels": NaN}'])
def test_a_description_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "model.json").write_text(text)
    for read in (load_model, load_spec):
        with pytest.raises(ConfigError, match=r"model\.json"):
            read(tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t * float("nan"), "head.bias is not finite"),
        (lambda t: t.half(), r"head.bias is \(1,\) torch.float16 instead of \(1,\) torch.float32"),
        (lambda t: t.repeat(2), r"head.bias is \(2,\)"),
    ],
)
def test_weights_that_are_not_the_models_are_refused(
    change: Callable[[torch.Tensor], torch.Tensor], says: str, tmp_path: Path
) -> None:
    saved(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change_weights(tmp_path, {**tensors, "head.bias": change(tensors["head.bias"])})
    with pytest.raises(ConfigError, match=says):
        load_model(tmp_path)


def test_a_model_without_a_finite_prediction_writes_no_table(tmp_path: Path) -> None:
    """Its weights are finite, and their sums are not."""
    saved(tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    huge = {name: t.sign() * 3e38 if "weight" in name else t for name, t in tensors.items()}
    change_weights(tmp_path / "m", huge)
    Image.new("L", (32, 32), 90).save(tmp_path / "a.png")
    with pytest.raises(ConfigError, match="no finite probabilities"):
        predict_to_csv(tmp_path / "m", tmp_path / "a.png", tmp_path / "out.csv")
    assert not (tmp_path / "out.csv").exists()


def test_weights_of_any_size_are_not_hashed(tmp_path: Path) -> None:
    spec = ModelSpec("cnn", size=32)
    save_model(build(spec, LabelSet(("Edema",)), 1, pretrained=False), spec, tmp_path, {})
    os.truncate(tmp_path / "model.safetensors", 1 << 42)
    for read in (load_model, weights_digest, check_digest):
        with pytest.raises(SutureError, match=r"model\.safetensors has 4,398,046,511,104 bytes"):
            read(tmp_path)
