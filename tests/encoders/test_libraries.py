"""Networks that timm, torchvision and MONAI know by name, with weights of a file."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from small_models import built_model
from suture.core.errors import ConfigError
from suture.methods.base import SharingSpec
from suture.models import ModelSpec
from suture.models.classifier import Classifier
from suture.models.saved import load_model, save_model
from suture.models.weights import fill
from suture_encoders import foreign as described
from world import refused


def built(name: str, size: int = 64, weights: Path | None = None, **settings: Any) -> Classifier:
    spec = ModelSpec(name, size=size, weights=str(weights) if weights else None, **settings)
    return built_model(spec, pretrained=True).eval()


def images(size: int = 64, channels: int = 3) -> Tensor:
    return torch.randn(2, channels, size, size, generator=torch.Generator().manual_seed(0))


def timm_network(name: str = "test_vit", **settings: Any) -> Any:
    import timm

    return timm.create_model(name, pretrained=False, **settings)


def torchvision_network(name: str) -> nn.Module:
    import torchvision

    return torchvision.models.get_model(name, weights=None)  # type: ignore[no-any-return]


def perturbed(network: Any) -> Any:
    """The network with other numbers everywhere, so that a tensor that is not read is noticed."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in network.state_dict().items():
            if tensor.is_floating_point():
                noise = torch.rand(tensor.shape, generator=generator) * 0.1
                tensor.add_(noise if "var" in name else noise - 0.05)
    return network.eval()


@pytest.mark.complete
@pytest.mark.parametrize("name", ["test_vit", "test_convnext", "test_resnet", "test_efficientnet"])
def test_features_are_timms_own(name: str, tmp_path: Path) -> None:
    theirs = perturbed(timm_network(name))
    own = theirs.pretrained_cfg
    size = own["input_size"][1]
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    with torch.no_grad():
        expected = theirs.forward_head(theirs.forward_features(images(size)), pre_logits=True)
        for weights in (tmp_path, tmp_path / "model.safetensors"):
            ours = built(f"timm:{name}", size, weights)
            torch.testing.assert_close(ours.backbone(images(size)), expected, rtol=0, atol=1e-6)
    prepare = ModelSpec(f"timm:{name}").preprocessing
    assert (prepare.mean, prepare.std, prepare.channels) == (own["mean"], own["std"], 3)
    assert ours.head.in_features == theirs.num_features


@pytest.mark.complete
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("torchvision:resnet18", {}),
        ("torchvision:mobilenet_v3_small", {}),
        ("torchvision:shufflenet_v2_x0_5", {}),
        ("monai:DenseNet121", {"in_channels": 1, "out_channels": 5}),
        ("monai:resnet18", {"n_input_channels": 1, "num_classes": 5}),
        ("monai:SEResNet50", {"in_channels": 1, "num_classes": 5}),
    ],
)
def test_features_are_those_before_the_classifier_of_the_library(
    name: str, sizes: dict[str, int], tmp_path: Path
) -> None:
    """In double precision: the random numbers of `perturbed` make large ones in single."""
    from monai.networks import nets

    own = name.partition(":")[2]
    theirs = getattr(nets, own)(spatial_dims=2, **sizes) if sizes else torchvision_network(own)
    theirs, prefix = perturbed(theirs), "" if sizes else "module."
    torch.save({"state_dict": {f"{prefix}{k}": t for k, t in theirs.state_dict().items()}}, tmp_path / "w.pt")
    ours, x = built(name, 64, tmp_path / "w.pt"), images(64, 1 if sizes else 3).double()
    last = [module for module in theirs.modules() if isinstance(module, nn.Linear)][-1]
    with torch.no_grad():
        expected = theirs.double()(x)
        torch.testing.assert_close(last(ours.double().backbone(x)), expected)
    assert built(name, 64, color=True)({"image": images()}).shape == (2, 2)


@pytest.mark.complete
def test_a_folder_that_states_another_normalisation_is_refused(tmp_path: Path) -> None:
    network = timm_network()
    save_file(network.state_dict(), tmp_path / "model.safetensors")
    config, other = tmp_path / "config.json", {"mean": [0.1, 0.2, 0.3], "std": [0.5, 0.5, 0.5]}
    config.write_text(json.dumps({"pretrained_cfg": other}))
    with refused("model.mean", "config.json", "[0.1, 0.2, 0.3]", by=ConfigError):
        built("timm:test_vit", 64, tmp_path)
    built("timm:test_vit", 64, tmp_path, mean=(0.1, 0.2, 0.3), std=(0.5, 0.5, 0.5))
    own = {name: list(network.pretrained_cfg[name]) for name in ("mean", "std")}
    config.write_text(json.dumps({"pretrained_cfg": own, "architecture": "test_vit"}))
    built("timm:test_vit", 64, tmp_path)
    config.write_text("[")
    with refused("config.json", by=ConfigError):
        built("timm:test_vit", 64, tmp_path)


@pytest.mark.complete
def test_positions_of_another_size_are_those_that_timm_resamples(tmp_path: Path) -> None:
    from timm.layers import resample_abs_pos_embed

    theirs = perturbed(timm_network())
    torch.save(theirs.state_dict(), tmp_path / "vit.pth")
    ours = built("timm:test_vit", 64, tmp_path / "vit.pth").backbone
    assert torch.equal(ours.pos_embed, resample_abs_pos_embed(theirs.pos_embed, [4, 4]))
    assert torch.equal(ours.blocks[0].mlp.fc1.weight, theirs.blocks[0].mlp.fc1.weight)


@pytest.mark.complete
def test_positions_of_torchvisions_transformer_are_interpolated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torchvision

    theirs = torchvision.models.VisionTransformer(64, 16, 1, 1, 8, 8).eval()
    monkeypatch.setattr(torchvision.models, "get_model", lambda *_, **__: copy.deepcopy(theirs))
    state, key = theirs.state_dict(), "encoder.pos_embedding"
    table = torch.cat([state[key][:, :1], state[key][:, 1:2].expand(-1, 49, -1)], dim=1)
    torch.save(state | {key: table}, tmp_path / "large.pth")
    ours = built("torchvision:vit_b_16", 64, tmp_path / "large.pth").backbone
    theirs.encoder.pos_embedding.data = table[:, :17]
    with torch.no_grad():
        torch.testing.assert_close(theirs.heads(ours(images())), theirs(images()))
    for shape in ((8,), (2, 5, 8), (1, 0, 8), (1, 1, 8), (1, 7, 8), (1, 5, 8, 1)):
        torch.save(state | {key: torch.ones(shape)}, tmp_path / "odd.pth")
        with refused(f"{key} is {list(shape)}", "[1, 17, 8]", by=ConfigError):
            built("torchvision:vit_b_16", 64, tmp_path / "odd.pth")


@pytest.mark.complete
def test_a_swin_transformer_shares_no_table_of_indices() -> None:
    model = built("torchvision:swin_t")
    assert all(t.is_floating_point() for t in model.state_dict().values())
    assert not model.norm_names
    assert SharingSpec("frozen").shared(model) == SharingSpec("average").shared(model)


@pytest.mark.complete
def test_a_saved_encoder_opens_without_its_weights(tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    save_file(timm_network().state_dict(), file)
    spec = ModelSpec("timm:test_vit", size=64, weights=str(file))
    model = built_model(spec, pretrained=True).eval()
    save_model(model, spec, tmp_path / "model", {})
    file.unlink()
    opened, prepare = load_model(tmp_path / "model")
    assert prepare == spec.preprocessing
    with torch.no_grad():
        assert torch.equal(opened({"image": images()}), model({"image": images()}))
    first, again = (built("timm:test_vit").state_dict() for _ in range(2))
    assert all(torch.equal(first[name], tensor) for name, tensor in again.items())


@pytest.mark.complete
@pytest.mark.parametrize(
    ("name", "size", "named"),
    [
        ("timm:vit_tini_patch16_224", 64, "'vit_tiny_patch16_224'"),
        ("timm:resnet18.a9_in1k", 64, "a9_in1k"),
        ("timm:hf-hub:timm/resnet18", 64, "model.weights"),
        ("torchvision:resnet19", 64, "'resnet18'"),
        ("torchvision:inception_v3", 64, "'inception_v3'"),
        ("torchvision:squeezenet1_0", 64, "squeezenet1_0"),
        ("monai:UNet", 64, "'UNet'"),
        ("timm:test_vit", 70, "model.size 70"),
        ("timm:vit_7b_patch16_dinov3", 64, "6,716,030,976"),
        ("timm:vit_tiny_patch16_224", 4096, "model.size 4096"),
        ("torchvision:vgg11", 4096, "9.1 GB"),
        ("monai:resnet18", 4096, "model.size 4096"),
        ("torchvision:maxvit_t", 64, "model.size 64"),
        ("torchvision:vit_b_32", 70, "model.size 70"),
    ],
)
def test_a_name_or_size_that_cannot_be_is_refused(name: str, size: int, named: str) -> None:
    with refused(named, by=ConfigError):
        built(name, size)


def test_an_unknown_family_and_a_missing_package_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with refused("'tim'", "'timm'", by=ConfigError):
        ModelSpec("tim:resnet18")
    monkeypatch.setitem(sys.modules, "timm", None)
    with refused("suture[encoders]", by=ConfigError):
        built("timm:test_vit2")


OTHERS: dict[str, tuple[str, Callable[[], Any], tuple[str, ...]]] = {
    "deeper": (
        "torchvision:resnet18",
        lambda: torchvision_network("resnet34").state_dict(),
        ("resnet18", "layer1.2"),
    ),
    "wider": (
        "timm:test_vit",
        lambda: timm_network(embed_dim=32).state_dict(),
        ("cls_token", "[1, 1, 32]", "[1, 1, 64]"),
    ),
    "patches": (
        "timm:test_vit",
        lambda: timm_network(patch_size=8).state_dict(),
        ("patch_embed.proj.weight", "[64, 3, 8, 8]"),
    ),
    "twice": (
        "torchvision:resnet18",
        lambda: {
            f"{who}.{k}": t for who in "ab" for k, t in torchvision_network("resnet18").state_dict().items()
        },
        ("a., b.",),
    ),
    "whole": ("torchvision:resnet18", lambda: torchvision_network("resnet18"), ("torchvision.models",)),
}


@pytest.mark.complete
@pytest.mark.parametrize("case", OTHERS)
def test_a_file_of_another_network_is_refused(case: str, tmp_path: Path) -> None:
    name, make, named = OTHERS[case]
    torch.save(make(), tmp_path / "a.pth")
    with refused("a.pth", *named, by=ConfigError):
        built(name, 64, tmp_path / "a.pth")
    (tmp_path / "empty").mkdir()
    for nothing in ("empty", "absent"):
        with refused(nothing, by=ConfigError):
            built(name, 64, tmp_path / nothing)


UNUSABLE: dict[str, Callable[[Tensor], Tensor]] = {
    "sparse": lambda tensor: tensor.to_sparse(),
    "meta": lambda tensor: tensor.to("meta"),
    "complex": lambda tensor: tensor.to(torch.complex64),
    "quantized": lambda tensor: torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8),
    "nested": lambda tensor: torch.nested.nested_tensor([tensor, tensor]),
    "repeated": lambda tensor: tensor.sum().expand(10**12),
    "nan": lambda tensor: tensor * torch.nan,
    "too large": lambda tensor: tensor.double() + 1e300,
    "more dimensions": lambda tensor: tensor.reshape(-1, 1, 1, 1),
    "no dimension": lambda tensor: tensor.sum(),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", UNUSABLE)
def test_a_tensor_that_cannot_be_copied_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    norm, state = nn.LayerNorm(64).state_dict(), timm_network().state_dict()
    with refused("a.pth", "weight", by=ConfigError):
        fill(norm, norm | {"weight": UNUSABLE[kind](norm["weight"])}, "a.pth", "a norm")
    torch.save(state | {"pos_embed": UNUSABLE[kind](state["pos_embed"])}, tmp_path / "a.pth")
    with refused("a.pth", "pos_embed", by=ConfigError):  # which timm resamples before
        built("timm:test_vit", 64, tmp_path / "a.pth")


def test_what_the_network_does_not_take_may_be_not_finite(tmp_path: Path) -> None:
    state = timm_network().state_dict()
    torch.save(state | {"head.bias": torch.full((5,), torch.nan)}, tmp_path / "a.pth")
    assert built("timm:test_vit", 64, tmp_path / "a.pth")({"image": images()}).isfinite().all()


@pytest.mark.complete
def test_a_network_that_cannot_train_on_one_image_can_be_a_frozen_encoder() -> None:
    """Batch norm of a pooled image has one value for each channel, which training refuses."""
    with refused("model.train='head'", by=ConfigError):
        built("timm:resnest14d")
    assert built("timm:resnest14d", train="head").features({"image": images()}).shape == (2, 2048)


@pytest.mark.complete
@pytest.mark.parametrize("name", ["regnet_y_400mf", "swin_t"])
def test_a_network_that_cannot_be_built_without_memory_is_measured(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert built(f"torchvision:{name}")({"image": images()}).shape == (2, 2)
    monkeypatch.setattr(described, "MOST_BYTES", 120_000_000 if name == "swin_t" else 20_000_000)
    with refused("GB", by=ConfigError):
        built(f"torchvision:{name}", 1024)
