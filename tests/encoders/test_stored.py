"""Encoders of a file or folder: transformers, torchxrayvision, MONAI bundles."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from suture.core.errors import ConfigError
from suture.core.labels import LabelSet
from suture.models import ModelSpec, build, check_portable, encoder_of, self_contained
from suture.models.classifier import Classifier
from suture.models.saved import load_model, load_spec, save_model
from suture_encoders.transformers_folder import resample

LABELS = LabelSet(("Edema", "Mass"))
SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}


def folder_of(path: Path, network: nn.Module, **preprocessing: Any) -> Path:
    """A folder that transformers has saved, with its preprocessing."""
    network.save_pretrained(path)
    found = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.2, 0.1], "size": {"height": 32, "width": 32}}
    (path / "preprocessor_config.json").write_text(json.dumps(found | preprocessing))
    return path


def made(kind: str) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    if kind == "vit":
        config = transformers.ViTConfig(**SMALL, intermediate_size=32)
        return transformers.ViTModel(config, add_pooling_layer=False).eval()
    if kind == "dinov2":
        return transformers.Dinov2Model(transformers.Dinov2Config(**SMALL)).eval()
    if kind == "dinov2_with_registers":
        return transformers.Dinov2WithRegistersModel(transformers.Dinov2WithRegistersConfig(**SMALL)).eval()
    if kind == "convnext":
        return transformers.ConvNextModel(transformers.ConvNextConfig(**STAGES)).eval()
    if kind == "convnextv2":
        return transformers.ConvNextV2Model(transformers.ConvNextV2Config(**STAGES)).eval()
    if kind == "swin":
        config = transformers.SwinConfig(embed_dim=8, depths=[1, 1], num_heads=[1, 2], window_size=4)
        return transformers.SwinModel(config).eval()
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"
    )
    return transformers.ResNetModel(config).eval()


def built(name: str, size: int = 32, **settings: Any) -> Classifier:
    return build(ModelSpec(name, size=size, **settings), LABELS, 1, pretrained=True).eval()


def images(size: int = 32, channels: int = 3) -> Tensor:
    return torch.randn(2, channels, size, size, generator=torch.Generator().manual_seed(0))


KINDS = ("vit", "dinov2", "dinov2_with_registers", "convnext", "convnextv2", "swin", "resnet")


@pytest.mark.parametrize("kind", KINDS)
def test_features_are_those_of_transformers_and_sites_need_no_folder(kind: str, tmp_path: Path) -> None:
    theirs = made(kind)
    folder = folder_of(tmp_path / "encoder", theirs)
    spec = ModelSpec(f"hf:{folder}", size=32)
    plan = self_contained(spec)
    assert plan.name == f"hf:{kind}"
    assert str(tmp_path) not in str(plan.encoder_config)
    check_portable(plan, "a job")
    ours = build(spec, LABELS, 1, pretrained=True).eval()
    with torch.no_grad():
        out = theirs(pixel_values=images())
        expected = out.last_hidden_state[:, 0] if kind == "vit" else out.pooler_output.flatten(1)
        torch.testing.assert_close(ours.backbone(images()), expected, rtol=0, atol=1e-6)
    assert spec.preprocessing.mean == (0.5, 0.4, 0.3)
    save_model(ours, spec, tmp_path / "model", {})
    folder.rename(tmp_path / "elsewhere")
    opened, prepare = load_model(tmp_path / "model")
    assert prepare == plan.preprocessing
    assert load_spec(tmp_path / "model").weights is None
    with torch.no_grad():
        assert torch.equal(opened({"image": images()}), ours({"image": images()}))


@pytest.mark.parametrize("kind", ["dinov2", "vit"])
def test_positions_of_another_size_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    theirs = made(kind)
    folder = folder_of(tmp_path / "encoder", theirs)
    ours = built(f"hf:{folder}", 56)
    extra = {"interpolate_pos_encoding": True} if kind == "vit" else {}
    with torch.no_grad():
        out = theirs(pixel_values=images(56), **extra)
        expected = out.last_hidden_state[:, 0] if kind == "vit" else out.pooler_output
        torch.testing.assert_close(ours.backbone(images(56)), expected, rtol=0, atol=1e-6)


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

    config = transformers.ViTConfig(**SMALL, intermediate_size=32)
    whole = transformers.ViTForImageClassification(config).eval()
    folder = folder_of(tmp_path / "encoder", whole)
    with torch.no_grad():
        expected = whole.vit(pixel_values=images()).last_hidden_state[:, 0]
        torch.testing.assert_close(built(f"hf:{folder}").backbone(images()), expected, rtol=0, atol=1e-6)
        torch.save(whole.state_dict(), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
        torch.testing.assert_close(built(f"hf:{folder}").backbone(images()), expected, rtol=0, atol=1e-6)


def changed(folder: Path, name: str, **values: Any) -> None:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("file", "values", "said"),
    [
        ("config.json", {"auto_map": {"AutoModel": "own.Model"}}, r"has auto_map.*does not run"),
        ("config.json", {"model_type": "llama"}, r"unknown model_type .*'llama'; known: .*dinov2"),
        ("config.json", {"num_hidden_layers": 10**6}, r"num_hidden_layers"),
        ("config.json", {"num_hidden_layers": 3}, r"layer.*\.2\..* is missing"),
        ("config.json", {"num_hidden_layers": 1}, r"it has .*layer.*1\..*, too"),
        ("config.json", {"hidden_size": 24}, r"Dinov2Model of the configuration.*16.* instead of .*24"),
        ("config.json", {"hidden_act": "relux"}, r"cannot be built.*relux"),
        ("config.json", {"num_attention_heads": 0}, r"cannot be built"),
        ("config.json", {"num_attention_heads": "two"}, r"cannot be built.*num_attention_heads"),
        (
            "config.json",
            {"hidden_size": 65_536, "num_hidden_layers": 200},
            r"parameters needs .* GB .* at most",
        ),
        ("config.json", {"num_channels": 10**12}, r"config\.json: the number of channels is 1000000000000"),
        ("config.json", {"num_channels": "x"}, r"config\.json: the number of channels is 'x'; it must be 1"),
        ("config.json", {"num_channels": True}, r"config\.json: the number of channels is true"),
        ("config.json", {"num_channels": None}, r"config\.json: the number of channels is None"),
        ("config.json", {"num_channels": float("inf")}, r"config\.json"),
        ("preprocessor_config.json", {"rescale_factor": 1.0}, r"another number than 255"),
        ("preprocessor_config.json", {"image_mean": None}, r"mean"),
        ("preprocessor_config.json", {"image_std": [0.2]}, r"mean has 3 values and std 1"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused_in_one_line(
    file: str, values: dict[str, Any], said: str, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path / "encoder", made("dinov2"))
    changed(folder, file, **values)
    with pytest.raises(ConfigError, match=said) as caught:
        built(f"hf:{folder}")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["hf:", "hf: ", "xrv:", "bundle:", "timm:", "torchvision:", "monai:"])
def test_a_family_alone_names_no_encoder(name: str) -> None:
    """An empty path would be the working directory."""
    with pytest.raises(ConfigError, match=rf"{name} names no encoder; write {name.strip()}[A-Z]+$"):
        ModelSpec(name)


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"hf:microsoft/rad-dino: there is no such folder.*downloads nothing"
    ):
        built("hf:microsoft/rad-dino")
    folder = folder_of(tmp_path / "encoder", made("vit"))
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json is missing"):
        built(f"hf:{folder}")
    folder_of(tmp_path / "encoder", made("vit"))
    with pytest.raises(ConfigError, match=r"model\.size 36: hf:vit, pretrained at 32 px, .*patches of 8 px"):
        built(f"hf:{folder}", 36)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"contains no file of weights"):
        built(f"hf:{folder}")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=re.escape('pip install "suture[encoders]"')):
        built(f"hf:{folder}")


def test_another_party_s_job_names_no_folder_here(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "encoder", made("vit"))
    with pytest.raises(ConfigError, match=r"a job needs the encoder's configuration, not the name of a file"):
        check_portable(ModelSpec(f"hf:{folder}"), "a job")
    for config in ("", "[]", '{"arguments": {"a": {"b": 1}}, "mean": [0], "std": [1]}', "{"):
        with pytest.raises(ConfigError, match=r"model\.encoder_config of hf:vit"):
            encoder_of(ModelSpec("hf:vit", encoder_config=config))


@pytest.mark.parametrize(
    ("name", "size", "arguments"),
    [
        ("swin", 512, {"window_size": 300, "embed_dim": 8, "depths": [1], "num_heads": [1]}),
        ("swin", 1024, {"window_size": 150, "embed_dim": 8, "depths": [1], "num_heads": [1]}),
        ("vit", 512, {"hidden_size": 8, "num_attention_heads": 1, "patch_size": 1}),
        ("dinov2", 512, {"hidden_size": 8, "num_attention_heads": 1, "patch_size": 1}),
        ("convnext", 512, {**STAGES, "hidden_sizes": [65_536, 8], "patch_size": 1}),
        ("resnet", 512, {"embedding_size": 65_536, "hidden_sizes": [8], "depths": [1]}),
    ],
)
def test_a_network_that_needs_too_much_memory_is_refused_before_it_is_made(
    name: str, size: int, arguments: dict[str, Any]
) -> None:
    config = json.dumps({"arguments": arguments, "mean": [0.5] * 3, "std": [0.2] * 3})
    spec = ModelSpec(f"hf:{name}", size=size, encoder_config=config)
    with pytest.raises(ConfigError, match=r"parameters needs [\d,.]+ GB .*; at most 8\.6 GB can be used"):
        build(spec, LABELS, 1, pretrained=False)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("hf:dinov3", r"unknown network of hf 'dinov3'; did you mean 'dinov2'"),
        ("hf:llama", r"unknown network of hf 'llama'; known: .*dinov2"),
        ("xrv:densenet169", r"unknown network of xrv 'densenet169'; did you mean 'densenet121'"),
        ("bundle:UNet", r"unknown network of bundle 'UNet'; known"),
        ("bundle:resnet19", r"did you mean 'resnet1"),
    ],
)
def test_a_network_that_is_not_known_is_refused_with_the_nearest(name: str, said: str) -> None:
    config = json.dumps({"arguments": {}, "mean": [0.5], "std": [0.2]})
    with pytest.raises(ConfigError, match=said):
        encoder_of(ModelSpec(name, encoder_config=config))


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (torch.full((1, 17, 16), torch.nan), r"position_embeddings is not finite"),
        (torch.full((1, 17, 16), 1e300, dtype=torch.float64), r"position_embeddings is not finite"),
        (torch.ones(1, 17, 16, device="meta"), r"position_embeddings .*no dense table"),
        (torch.ones(1, 17, 16).to_sparse(), r"position_embeddings .*no dense table"),
        (torch.ones(1, 17, 16) * 1j, r"position_embeddings .*no dense table"),
        (torch.ones(1, 17, 16).to(torch.float8_e5m2), r"position_embeddings .*float8.*no dense table"),
        (torch.ones(1, 1, 1).expand(1, 17, 10**9), r"position_embeddings .*no dense table"),
        (torch.ones(1, 0, 16), r"position_embeddings is \[1, 0, 16\]"),
        (torch.ones(1, 1, 16), r"position_embeddings is \[1, 1, 16\]"),
        (torch.ones(2, 10, 16), r"position_embeddings is \[2, 10, 16\]"),
        (torch.ones(16), r"position_embeddings is \[16\]"),
    ],
)
def test_positions_that_are_no_numbers_are_refused(tensor: Tensor, said: str, tmp_path: Path) -> None:
    network = made("vit")
    folder = folder_of(tmp_path / "encoder", network)
    state = network.state_dict() | {"embeddings.position_embeddings": tensor}
    torch.save(state, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=said) as caught:
        built(f"hf:{folder}")
    assert len(str(caught.value).splitlines()) == 1


def xrv_file(path: Path, **metadata: str) -> torch.nn.Module:
    """A file as the conversion line writes it."""
    import torchvision

    torch.manual_seed(0)
    theirs = torchvision.models.densenet121(weights=None)
    theirs.features.conv0 = nn.Conv2d(1, 64, 7, stride=2, padding=3, bias=False)
    theirs.classifier = nn.Linear(1024, 18)
    state = {name: tensor.contiguous() for name, tensor in theirs.state_dict().items()}
    save_file(state | {"op_threshs": torch.full((18,), 0.5)}, path, metadata)
    return theirs.eval()


@pytest.mark.complete
def test_an_xrv_file_reads_gray_images_in_its_own_range(tmp_path: Path) -> None:
    path = tmp_path / "xrv.safetensors"
    theirs = xrv_file(path, range="[-1024, 1024]", labels='["Mass", "Edema"]', size="224")
    spec = ModelSpec(f"xrv:{path}", size=64)
    ours = build(spec, LABELS, 1, pretrained=True).eval()
    pixels = torch.randint(0, 256, (2, 1, 64, 64), dtype=torch.uint8)
    torch.testing.assert_close(spec.preprocessing(pixels), (pixels / 255 * 2 - 1) * 1024)
    with torch.no_grad():
        x = spec.preprocessing(pixels).double()
        features = torch.relu(theirs.double().features(x)).mean((2, 3))
        torch.testing.assert_close(ours.double().backbone(x), features)
    with pytest.raises(ConfigError, match=r"model\.color: xrv:densenet121 takes gray images of one channel"):
        built(f"xrv:{path}", 64, color=True)


@pytest.mark.complete
def test_a_file_that_is_not_xrv_s_is_answered_with_the_line_that_writes_one(tmp_path: Path) -> None:
    import torchvision

    torch.save(torchvision.models.densenet121(weights=None), tmp_path / "whole.pt")
    save_file({"a": torch.ones(1)}, tmp_path / "plain.safetensors")
    save_file({"a": torch.ones(1)}, tmp_path / "none.safetensors", {"range": "[1, 1]"})
    for name in ("whole.pt", "plain.safetensors", "none.safetensors", "absent"):
        with pytest.raises(ConfigError, match=r"python -c 'import json, torchxrayvision") as caught:
            built(f"xrv:{tmp_path / name}", 64)
        assert len(str(caught.value).splitlines()) == 1
    save_file({"a": torch.ones(1)}, tmp_path / "other.safetensors", {"range": "[-1024, 1024]"})
    with pytest.raises(ConfigError, match=r"does not contain xrv's densenet121: features\.conv0\.weight"):
        built(f"xrv:{tmp_path / 'other.safetensors'}", 64)


def bundle(path: Path, value_range: Any = (0, 1), **network: Any) -> nn.Module:
    """A MONAI bundle with a small DenseNet."""
    from monai.networks import nets

    torch.manual_seed(0)
    theirs = nets.DenseNet121(2, 1, 3, init_features=8, growth_rate=4, block_config=(2, 2)).eval()
    (path / "configs").mkdir(parents=True)
    (path / "models").mkdir()
    torch.save(theirs.state_dict(), path / "models" / "model.pt")
    defined = {"_target_": "monai.networks.nets.DenseNet121", "spatial_dims": 2, "in_channels": 1}
    defined |= {"out_channels": 3, "init_features": 8, "growth_rate": 4, "block_config": [2, 2], **network}
    (path / "configs" / "inference.json").write_text(json.dumps({"network_def": defined}))
    image = {"num_channels": 1, "spatial_shape": [64, 64], "value_range": value_range}
    metadata = {"network_data_format": {"inputs": {"image": image}}}
    (path / "configs" / "metadata.json").write_text(json.dumps(metadata))
    return theirs


def test_a_bundle_gives_network_weights_and_range(tmp_path: Path) -> None:
    theirs = bundle(tmp_path / "bundle", (0, 255), pretrained=True)
    spec = ModelSpec(f"bundle:{tmp_path / 'bundle'}", size=64)
    ours = build(spec, LABELS, 1, pretrained=True).eval()
    plan = self_contained(spec)
    assert (plan.name, encoder_of(plan).size) == ("bundle:DenseNet121", 64)
    pixels = torch.randint(0, 256, (2, 1, 64, 64), dtype=torch.uint8)
    x = spec.preprocessing(pixels)
    torch.testing.assert_close(x, pixels.float())
    with torch.no_grad():
        last = theirs.class_layers.out
        torch.testing.assert_close(last(ours.backbone(x)), theirs(x), rtol=1e-5, atol=1e-5)
    assert len(ours.norm_names) > 0


@pytest.mark.parametrize(
    ("network", "said"),
    [
        ({"in_channels": "$len(@labels)"}, r"in_channels='\$len\(@labels\)' is an expression"),
        ({"out_channels": "@classes"}, r"out_channels='@classes' is an expression"),
        ({"_target_": "os.system"}, r"unknown 2-D network of MONAI .*'system'"),
        ({"_disabled_": False}, r"_disabled_=false is an expression"),
        ({"act": ["relu", {"inplace": True}]}, r"arguments\.act"),
        ({"block_config": [10**6]}, r"block_config is 1000000|block_config"),
        ({"unheard": 1}, r"cannot be built.*unheard"),
        ({"in_channels": 10**12}, r"inference\.json: the number of channels is 1000000000000"),
        ({"in_channels": "x"}, r"inference\.json: the number of channels is 'x'"),
        ({"in_channels": True}, r"inference\.json: the number of channels is true"),
        ({"in_channels": 2.0}, r"inference\.json: the number of channels is 2\.0"),
        ({"init_features": 65_536}, r"needs [\d,.]+ GB"),
        ({"growth_rate": 8}, r"model\.pt|bundle does not contain DenseNet121 of MONAI"),
    ],
)
def test_a_bundle_whose_network_cannot_be_built_is_refused(
    network: dict[str, Any], said: str, tmp_path: Path
) -> None:
    bundle(tmp_path / "bundle", **network)
    with pytest.raises(ConfigError, match=said) as caught:
        built(f"bundle:{tmp_path / 'bundle'}", 64)
    assert len(str(caught.value).splitlines()) == 1


def test_a_bundle_without_network_or_range_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no such folder"):
        built(f"bundle:{tmp_path / 'absent'}")
    bundle(tmp_path / "flat", (1, 1))
    with pytest.raises(ConfigError, match=r"metadata\.json does not state value_range"):
        built(f"bundle:{tmp_path / 'flat'}")
    bundle(tmp_path / "none")
    (tmp_path / "none" / "configs" / "inference.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"none of inference\.json, .* defines a network"):
        built(f"bundle:{tmp_path / 'none'}")
