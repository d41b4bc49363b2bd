"""Encoders of images in a file or folder: transformers, torchxrayvision, MONAI bundles."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from sentence_folder import changed
from small_models import built_model
from suture.core.errors import ConfigError
from suture.models import ModelSpec, check_portable, encoder_of, self_contained
from suture.models.classifier import Classifier
from suture.models.saved import load_model, load_spec, save_model
from suture_encoders.transformers_folder import resample
from world import refused

SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "vit": ("ViT", {**SMALL, "intermediate_size": 32}, {"add_pooling_layer": False}),
    "dinov2": ("Dinov2", SMALL, {}),
    "dinov2_with_registers": ("Dinov2WithRegisters", SMALL, {}),
    "convnext": ("ConvNext", STAGES, {}),
    "convnextv2": ("ConvNextV2", STAGES, {}),
    "swin": ("Swin", {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4}, {}),
    "resnet": (
        "ResNet",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
        {},
    ),
}


def made(kind: str) -> Any:
    import transformers

    torch.manual_seed(0)
    name, settings, more = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(**settings)
    return getattr(transformers, f"{name}Model")(config, **more).eval()


def folder_of(path: Path, network: Any) -> Path:
    """A folder that transformers has saved, with its preprocessing."""
    network.save_pretrained(path)
    found = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.2, 0.1], "size": {"height": 32, "width": 32}}
    (path / "preprocessor_config.json").write_text(json.dumps(found))
    return path


def built(name: str, size: int = 32, **settings: Any) -> Classifier:
    return built_model(ModelSpec(name, size=size, **settings), pretrained=True).eval()


def images(size: int = 32, channels: int = 3) -> Tensor:
    return torch.randn(2, channels, size, size, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def features_of(network: Any, size: int = 32, **more: Any) -> Tensor:
    out = network(pixel_values=images(size), **more)
    vit = type(network).__name__ == "ViTModel"
    return out.last_hidden_state[:, 0] if vit else out.pooler_output.flatten(1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", KINDS)
def test_features_are_those_of_transformers_and_sites_need_no_folder(kind: str, tmp_path: Path) -> None:
    theirs = made(kind)
    folder = folder_of(tmp_path / "encoder", theirs)
    spec = ModelSpec(f"hf:{folder}", size=32)
    plan = self_contained(spec)
    assert plan.name == f"hf:{kind}"
    assert str(tmp_path) not in str(plan.encoder_config)
    check_portable(plan, "a job")
    ours = built_model(spec, pretrained=True).eval()
    with torch.no_grad():
        torch.testing.assert_close(ours.backbone(images()), features_of(theirs), rtol=0, atol=1e-6)
        if kind in ("vit", "dinov2"):  # positions of another size
            more = {"interpolate_pos_encoding": True} if kind == "vit" else {}
            larger = built(f"hf:{folder}", 56).backbone(images(56))
            torch.testing.assert_close(larger, features_of(theirs, 56, **more), rtol=0, atol=1e-6)
    assert spec.preprocessing.mean == (0.5, 0.4, 0.3)
    save_model(ours, spec, tmp_path / "model", {})
    folder.rename(tmp_path / "elsewhere")
    opened, prepare = load_model(tmp_path / "model")
    assert prepare == plan.preprocessing
    assert load_spec(tmp_path / "model").weights is None
    with torch.no_grad():
        assert torch.equal(opened({"image": images()}), ours({"image": images()}))
    if kind == "vit":
        with refused("hf:", by=ConfigError):  # a job of another party names no folder here
            check_portable(ModelSpec(f"hf:{tmp_path / 'elsewhere'}"), "a job")


def test_positions_are_interpolated_between_squares_alone() -> None:
    table = torch.arange(17.0 * 3).reshape(1, 17, 3)
    assert resample(table, 17) is table
    assert resample(table, 12) is table
    larger = resample(table, 65)
    assert larger.shape == (1, 65, 3)
    assert torch.equal(larger[:, 0], table[:, 0])
    assert resample(torch.ones(1, 17, 3), 5).allclose(torch.ones(1, 5, 3))


def test_the_encoder_of_a_classifier_and_an_older_file_are_read(tmp_path: Path) -> None:
    """The part `vit.` of a model for classification, without its head, from a file of torch."""
    import transformers

    whole = transformers.ViTForImageClassification(transformers.ViTConfig(**KINDS["vit"][1])).eval()
    folder, expected = folder_of(tmp_path / "encoder", whole), features_of(whole.vit)
    with torch.no_grad():
        torch.testing.assert_close(built(f"hf:{folder}").backbone(images()), expected, rtol=0, atol=1e-6)
        torch.save(whole.state_dict(), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
        torch.testing.assert_close(built(f"hf:{folder}").backbone(images()), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("file", "values", "named"),
    [
        ("config.json", {"auto_map": {"AutoModel": "own.Model"}}, "auto_map"),
        ("config.json", {"model_type": "llama"}, "'llama'"),
        ("config.json", {"num_hidden_layers": 10**6}, "num_hidden_layers"),
        ("config.json", {"num_hidden_layers": 3}, "layer.2."),
        ("config.json", {"num_hidden_layers": 1}, "layer.1."),
        ("config.json", {"hidden_size": 24}, "Dinov2Model"),
        ("config.json", {"hidden_act": "relux"}, "relux"),
        ("config.json", {"num_attention_heads": "two"}, "num_attention_heads"),
        ("config.json", {"hidden_size": 65_536, "num_hidden_layers": 200}, "GB"),
        ("config.json", {"num_channels": 10**12}, "1000000000000"),
        ("config.json", {"num_channels": True}, "channels"),
        ("config.json", {"num_channels": float("inf")}, "config.json"),
        ("preprocessor_config.json", {"rescale_factor": 1.0}, "255"),
        ("preprocessor_config.json", {"image_mean": None}, "mean"),
        ("preprocessor_config.json", {"image_std": [0.2]}, "std"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused(
    file: str, values: dict[str, Any], named: str, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path / "encoder", made("dinov2"))
    changed(folder / file, **values)
    with refused(named, by=ConfigError):
        built(f"hf:{folder}")


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for family in ("hf:", "hf: ", "xrv:", "bundle:", "timm:", "torchvision:", "monai:"):
        with refused(family, by=ConfigError):  # an empty path would be the working directory
            ModelSpec(family)
    with refused("hf:microsoft/rad-dino", by=ConfigError):
        built("hf:microsoft/rad-dino")
    folder = folder_of(tmp_path / "encoder", made("vit"))
    with refused("model.size 36", "8 px", "--set model.size=32", by=ConfigError):
        built(f"hf:{folder}", 36)
    (folder / "model.safetensors").unlink()
    with refused("encoder", by=ConfigError):
        built(f"hf:{folder}")
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "transformers", None)
        with refused("suture[encoders]", by=ConfigError):
            built(f"hf:{folder}")
    (folder / "preprocessor_config.json").unlink()
    with refused("preprocessor_config.json", by=ConfigError):
        built(f"hf:{folder}")


def described(name: str, arguments: dict[str, Any], size: int = 32) -> ModelSpec:
    """As a job of another party has it."""
    config = json.dumps({"arguments": arguments, "mean": [0.5] * 3, "std": [0.2] * 3})
    return ModelSpec(name, size=size, encoder_config=config)


ONE_HEAD = {"hidden_size": 8, "num_attention_heads": 1, "patch_size": 1}
WINDOW = {"embed_dim": 8, "depths": [1], "num_heads": [1]}


@pytest.mark.parametrize(
    ("name", "size", "arguments"),
    [
        ("swin", 512, {"window_size": 300, **WINDOW}),
        ("swin", 1024, {"window_size": 150, **WINDOW}),
        ("vit", 512, ONE_HEAD),
        ("dinov2", 512, ONE_HEAD),
        ("convnext", 512, {**STAGES, "hidden_sizes": [65_536, 8], "patch_size": 1}),
        ("resnet", 512, {"embedding_size": 65_536, "hidden_sizes": [8], "depths": [1]}),
    ],
)
def test_a_network_that_needs_too_much_memory_is_refused_before_it_is_made(
    name: str, size: int, arguments: dict[str, Any]
) -> None:
    with refused("GB", by=ConfigError):
        built_model(described(f"hf:{name}", arguments, size))


def test_a_description_of_no_network_is_refused() -> None:
    for name, near in {
        "hf:dinov3": "'dinov2'",
        "hf:llama": "dinov2",
        "xrv:densenet169": "'densenet121'",
        "bundle:resnet19": "'resnet1",
    }.items():
        with refused(name.partition(":")[2], near, by=ConfigError):
            encoder_of(described(name, {}))
    for config in ("", "[]", '{"arguments": {"a": {"b": 1}}, "mean": [0], "std": [1]}', "{"):
        with refused("model.encoder_config", by=ConfigError):
            encoder_of(ModelSpec("hf:vit", encoder_config=config))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.full((1, 17, 16), torch.nan),
        torch.full((1, 17, 16), 1e300, dtype=torch.float64),
        torch.ones(1, 17, 16, device="meta"),
        torch.ones(1, 17, 16).to_sparse(),
        torch.ones(1, 17, 16) * 1j,
        torch.ones(1, 17, 16).to(torch.float8_e5m2),
        torch.ones(1, 1, 1).expand(1, 17, 10**9),
        torch.ones(1, 0, 16),
        torch.ones(1, 1, 16),
        torch.ones(2, 10, 16),
        torch.ones(16),
    ],
)
def test_positions_that_are_no_numbers_are_refused(tensor: Tensor, tmp_path: Path) -> None:
    network = made("vit")
    folder = folder_of(tmp_path / "encoder", network)
    torch.save(
        network.state_dict() | {"embeddings.position_embeddings": tensor}, folder / "pytorch_model.bin"
    )
    (folder / "model.safetensors").unlink()
    with refused("position_embeddings", by=ConfigError):
        built(f"hf:{folder}")


@pytest.mark.complete
def test_an_xrv_file_reads_gray_images_in_its_own_range(tmp_path: Path) -> None:
    import torchvision

    path = tmp_path / "xrv.safetensors"
    theirs = torchvision.models.densenet121(weights=None).eval()
    theirs.features.conv0 = nn.Conv2d(1, 64, 7, stride=2, padding=3, bias=False)
    theirs.classifier = nn.Linear(1024, 18)
    state = {name: tensor.contiguous() for name, tensor in theirs.state_dict().items()}
    metadata = {"range": "[-1024, 1024]", "labels": '["Mass", "Edema"]', "size": "224"}
    save_file(state | {"op_threshs": torch.full((18,), 0.5)}, path, metadata)
    spec = ModelSpec(f"xrv:{path}", size=64)
    pixels = torch.randint(0, 256, (2, 1, 64, 64), dtype=torch.uint8)
    torch.testing.assert_close(spec.preprocessing(pixels), (pixels / 255 * 2 - 1) * 1024)
    with torch.no_grad():
        x = spec.preprocessing(pixels).double()
        features = torch.relu(theirs.double().features(x)).mean((2, 3))
        torch.testing.assert_close(built(f"xrv:{path}", 64).double().backbone(x), features)
    with refused("model.color", "densenet121", by=ConfigError):
        built(f"xrv:{path}", 64, color=True)


@pytest.mark.complete
def test_a_file_that_is_not_xrv_s_is_answered_with_the_line_that_writes_one(tmp_path: Path) -> None:
    torch.save(nn.Linear(1, 1), tmp_path / "whole.pt")
    save_file({"a": torch.ones(1)}, tmp_path / "plain.safetensors")
    save_file({"a": torch.ones(1)}, tmp_path / "none.safetensors", {"range": "[1, 1]"})
    for name in ("whole.pt", "plain.safetensors", "none.safetensors", "absent"):
        with refused("python -c 'import json, torchxrayvision", by=ConfigError):
            built(f"xrv:{tmp_path / name}", 64)
    save_file({"a": torch.ones(1)}, tmp_path / "other.safetensors", {"range": "[-1024, 1024]"})
    with refused("features.conv0.weight", by=ConfigError):
        built(f"xrv:{tmp_path / 'other.safetensors'}", 64)


def bundle(path: Path, value_range: Any = (0, 1), **network: Any) -> Any:
    """A MONAI bundle with a small DenseNet."""
    from monai.networks import nets

    torch.manual_seed(0)
    small = {"init_features": 8, "growth_rate": 4, "block_config": [2, 2]}
    theirs = nets.DenseNet121(2, 1, 3, **small).eval()
    for name in ("configs", "models"):
        (path / name).mkdir(parents=True)
    torch.save(theirs.state_dict(), path / "models" / "model.pt")
    defined = {"_target_": "monai.networks.nets.DenseNet121", "spatial_dims": 2, "in_channels": 1}
    defined |= {"out_channels": 3, **small, **network}
    (path / "configs" / "inference.json").write_text(json.dumps({"network_def": defined}))
    image = {"num_channels": 1, "spatial_shape": [64, 64], "value_range": value_range}
    metadata = {"network_data_format": {"inputs": {"image": image}}}
    (path / "configs" / "metadata.json").write_text(json.dumps(metadata))
    return theirs


def test_a_bundle_gives_network_weights_and_range(tmp_path: Path) -> None:
    theirs = bundle(tmp_path, (0, 255), pretrained=True)
    spec = ModelSpec(f"bundle:{tmp_path}", size=64)
    ours, plan = built(f"bundle:{tmp_path}", 64), self_contained(spec)
    assert (plan.name, encoder_of(plan).size) == ("bundle:DenseNet121", 64)
    pixels = torch.randint(0, 256, (2, 1, 64, 64), dtype=torch.uint8)
    x = spec.preprocessing(pixels)
    torch.testing.assert_close(x, pixels.float())
    with torch.no_grad():
        found = theirs.class_layers.out(ours.backbone(x))
        torch.testing.assert_close(found, theirs(x), rtol=1e-5, atol=1e-5)
    assert len(ours.norm_names) > 0


@pytest.mark.parametrize(
    ("network", "named"),
    [
        ({"in_channels": "$len(@labels)"}, "in_channels='$len(@labels)'"),
        ({"out_channels": "@classes"}, "out_channels='@classes'"),
        ({"_target_": "os.system"}, "'system'"),
        ({"_disabled_": False}, "_disabled_"),
        ({"act": ["relu", {"inplace": True}]}, "arguments.act"),
        ({"block_config": [10**6]}, "block_config"),
        ({"unheard": 1}, "unheard"),
        ({"in_channels": 10**12}, "1000000000000"),
        ({"in_channels": 2.0}, "2.0"),
        ({"init_features": 65_536}, "GB"),
        ({"growth_rate": 8}, "DenseNet121"),
    ],
)
def test_a_bundle_whose_network_cannot_be_built_is_refused(
    network: dict[str, Any], named: str, tmp_path: Path
) -> None:
    bundle(tmp_path, **network)
    with refused(named, by=ConfigError):
        built(f"bundle:{tmp_path}", 64)


def test_a_bundle_without_network_or_range_is_refused(tmp_path: Path) -> None:
    with refused("absent", by=ConfigError):
        built(f"bundle:{tmp_path / 'absent'}")
    bundle(tmp_path / "flat", (1, 1))
    with refused("metadata.json", "value_range", by=ConfigError):
        built(f"bundle:{tmp_path / 'flat'}")
    bundle(tmp_path / "none")
    (tmp_path / "none" / "configs" / "inference.json").write_text("{}")
    with refused("inference.json", by=ConfigError):
        built(f"bundle:{tmp_path / 'none'}")
