"""Networks that timm, torchvision and MONAI know by name, with weights of a file."""

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
from suture.methods.base import SharingSpec
from suture.models import ModelSpec, build
from suture.models import encoders as described
from suture.models.classifier import Classifier
from suture.models.saved import load_model, save_model
from suture.models.weights import fill

LABELS = LabelSet(("Edema", "Mass"))


def built(name: str, size: int, weights: Path | str | None = None, **settings: Any) -> Classifier:
    spec = ModelSpec(name, size=size, weights=str(weights) if weights else None, **settings)
    return build(spec, LABELS, 1, pretrained=True).eval()


def images(size: int, channels: int = 3) -> Tensor:
    return torch.randn(2, channels, size, size, generator=torch.Generator().manual_seed(0))


def perturbed(network: nn.Module) -> nn.Module:
    """The network with other numbers everywhere, so that a tensor that is not read is noticed."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in network.state_dict().items():
            if tensor.is_floating_point():
                noise = torch.rand(tensor.shape, generator=generator) * 0.1
                tensor.add_(noise if "var" in name else noise - 0.05)
    return network.eval()


def assert_alike(ours: nn.Module, theirs: nn.Module, x: Tensor) -> None:
    """In double precision: the random numbers of `perturbed` make large ones in single."""
    with torch.no_grad():
        torch.testing.assert_close(ours.double()(x.double()), theirs.double()(x.double()))


@pytest.mark.complete
@pytest.mark.parametrize("name", ["test_vit", "test_convnext", "test_resnet", "test_efficientnet"])
def test_features_are_timms_own(name: str, tmp_path: Path) -> None:
    import timm

    theirs = perturbed(timm.create_model(name, pretrained=False))
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
def test_a_folder_that_states_another_normalisation_is_refused(tmp_path: Path) -> None:
    import timm

    network = timm.create_model("test_vit", pretrained=False)
    save_file(network.state_dict(), tmp_path / "model.safetensors")
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"pretrained_cfg": {"mean": [0.1, 0.2, 0.3], "std": [0.5, 0.5, 0.5]}}))
    with pytest.raises(
        ConfigError, match=r"model\.mean: .*config\.json states \[0\.1, 0\.2, 0\.3\], and timm"
    ):
        built("timm:test_vit", 64, tmp_path)
    built("timm:test_vit", 64, tmp_path, mean=(0.1, 0.2, 0.3), std=(0.5, 0.5, 0.5))
    own = {name: list(network.pretrained_cfg[name]) for name in ("mean", "std")}
    config.write_text(json.dumps({"pretrained_cfg": own, "architecture": "test_vit"}))
    built("timm:test_vit", 64, tmp_path)
    config.write_text("[")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        built("timm:test_vit", 64, tmp_path)


@pytest.mark.complete
def test_positions_of_another_size_are_those_that_timm_resamples(tmp_path: Path) -> None:
    import timm
    from timm.layers import resample_abs_pos_embed

    theirs = perturbed(timm.create_model("test_vit", pretrained=False))
    torch.save(theirs.state_dict(), tmp_path / "vit.pth")
    ours = built("timm:test_vit", 64, tmp_path / "vit.pth").backbone
    expected = resample_abs_pos_embed(theirs.pos_embed, [4, 4])
    assert torch.equal(ours.pos_embed, expected)
    assert torch.equal(ours.blocks[0].mlp.fc1.weight, theirs.blocks[0].mlp.fc1.weight)


@pytest.mark.complete
def test_positions_of_torchvisions_transformer_are_interpolated(tmp_path: Path) -> None:
    import torchvision

    theirs = torchvision.models.vit_b_32(weights=None, image_size=64)
    state = theirs.state_dict()
    constant = state["encoder.pos_embedding"][:, 1:2].expand(-1, 49, -1)
    table = torch.cat([state["encoder.pos_embedding"][:, :1], constant], dim=1)
    torch.save(state | {"encoder.pos_embedding": table}, tmp_path / "large.pth")
    ours = built("torchvision:vit_b_32", 64, tmp_path / "large.pth").backbone
    theirs.encoder.pos_embedding.data = table[:, :5]
    with torch.no_grad():
        torch.testing.assert_close(theirs.eval().heads(ours(images(64))), theirs(images(64)))
    torch.save(state | {"encoder.pos_embedding": table[:, :7]}, tmp_path / "odd.pth")
    with pytest.raises(
        ConfigError, match=r"encoder\.pos_embedding is \[1, 7, 768\] instead of \[1, 5, 768\]"
    ):
        built("torchvision:vit_b_32", 64, tmp_path / "odd.pth")


@pytest.mark.complete
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "shufflenet_v2_x0_5"])
def test_features_are_torchvisions_own(name: str, tmp_path: Path) -> None:
    import torchvision

    theirs = perturbed(torchvision.models.get_model(name, weights=None))
    torch.save({"state_dict": {f"module.{k}": t for k, t in theirs.state_dict().items()}}, tmp_path / "w.pt")
    ours = built(f"torchvision:{name}", 64, tmp_path / "w.pt")
    last = [module for module in theirs.modules() if isinstance(module, nn.Linear)][-1]
    assert_alike(nn.Sequential(ours.backbone, last), theirs, images(64))


@pytest.mark.complete
def test_a_swin_transformer_shares_no_table_of_indices() -> None:
    model = built("torchvision:swin_t", 64)
    assert all(t.is_floating_point() for t in model.state_dict().values())
    assert not model.norm_names
    assert SharingSpec("frozen").shared(model) == SharingSpec("average").shared(model)


@pytest.mark.complete
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("DenseNet121", {"in_channels": 1, "out_channels": 5}),
        ("resnet18", {"n_input_channels": 1, "num_classes": 5}),
        ("SEResNet50", {"in_channels": 1, "num_classes": 5}),
    ],
)
def test_features_are_monais_own(name: str, sizes: dict[str, int], tmp_path: Path) -> None:
    from monai.networks import nets

    theirs = perturbed(getattr(nets, name)(spatial_dims=2, **sizes))
    torch.save(theirs.state_dict(), tmp_path / "model.pt")
    ours = built(f"monai:{name}", 64, tmp_path / "model.pt")
    last = [module for module in theirs.modules() if isinstance(module, nn.Linear)][-1]
    assert_alike(nn.Sequential(ours.backbone, last), theirs, images(64, 1))
    assert built(f"monai:{name}", 64, color=True)({"image": images(64)}).shape == (2, 2)


@pytest.mark.complete
def test_a_saved_encoder_opens_without_its_weights(tmp_path: Path) -> None:
    import timm

    save_file(timm.create_model("test_vit", pretrained=False).state_dict(), tmp_path / "w.safetensors")
    spec = ModelSpec("timm:test_vit", size=64, weights=str(tmp_path / "w.safetensors"))
    model = build(spec, LABELS, 1, pretrained=True).eval()
    save_model(model, spec, tmp_path / "model", {})
    (tmp_path / "w.safetensors").unlink()
    opened, prepare = load_model(tmp_path / "model")
    assert prepare == spec.preprocessing
    x = {"image": images(64)}
    with torch.no_grad():
        assert torch.equal(opened(x), model(x))


def test_the_same_seed_gives_the_same_tensors() -> None:
    first, again = (built("timm:test_vit", 64).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], tensor) for name, tensor in again.items())


@pytest.mark.complete
@pytest.mark.parametrize(
    ("name", "size", "said"),
    [
        ("timm:vit_tini_patch16_224", 64, r"did you mean 'vit_tiny_patch16_224'"),
        ("timm:resnet18.a9_in1k", 64, r"a9_in1k.*correct the tag"),
        ("timm:hf-hub:timm/resnet18", 64, r"Suture downloads nothing.*model\.weights"),
        ("timm:timm/resnet18", 64, r"Suture downloads nothing"),
        ("torchvision:resnet19", 64, r"did you mean 'resnet18'"),
        ("torchvision:inception_v3", 64, r"unknown network of torchvision"),
        ("torchvision:squeezenet1_0", 64, r"no linear classifier"),
        ("monai:UNet", 64, r"unknown 2-D network of MONAI"),
        (
            "timm:test_vit",
            70,
            r"cannot be built for an image of model\.size 70: .*divisible by patch size",
        ),
        (
            "timm:vit_7b_patch16_dinov3",
            64,
            r"with 6,716,030,976 parameters needs [\d.]+ GB .* at most 8\.6 GB",
        ),
        ("timm:vit_tiny_patch16_224", 4096, r"parameters needs [\d.]+ GB for an image of model\.size 4096"),
        (
            "torchvision:vgg11",
            4096,
            r"with 132,863,336 parameters needs 9\.1 GB for an image of model\.size 4096; at most 8\.6 GB",
        ),
        ("torchvision:vit_b_32", 4096, r"needs [\d.]+ GB for an image of model\.size 4096"),
        ("monai:resnet18", 4096, r"needs [\d.]+ GB for an image of model\.size 4096"),
        ("torchvision:maxvit_t", 64, r"model\.size 64: torchvision:maxvit_t, .*does not take"),
        (
            "torchvision:vit_b_32",
            70,
            r"model\.size 70: torchvision:vit_b_32, pretrained at 224 px, does not take",
        ),
        ("torchvision:resnet18", 32, r"model\.size 32: torchvision:resnet18, pretrained at 224 px, does not"),
    ],
)
def test_a_name_or_size_that_cannot_be_is_refused_in_one_line(name: str, size: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        built(name, size)
    assert len(str(caught.value).splitlines()) == 1


def test_an_unknown_family_and_a_missing_package_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"unknown family of models 'tim'; did you mean 'timm'"):
        ModelSpec("tim:resnet18")
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ConfigError, match=re.escape('pip install "suture[encoders]"')):
        built("timm:test_vit2", 64)


def other(case: str, path: Path) -> tuple[str, Path, str]:
    """Write a file that does not fit; return the model, the file, and what is said of it."""
    import timm
    import torchvision

    tv, vit = torchvision.models, "timm:test_vit"
    if case == "deeper":
        torch.save(tv.resnet34(weights=None).state_dict(), path / "a.pth")
        return "torchvision:resnet18", path / "a.pth", r"another network than resnet18.*it has layer1\.2"
    if case == "wider":
        torch.save(timm.create_model("test_vit", pretrained=False, embed_dim=32).state_dict(), path / "a.pth")
        return vit, path / "a.pth", r"a\.pth does not.*cls_token is \[1, 1, 32\] instead of \[1, 1, 64\]"
    if case == "patches":
        torch.save(timm.create_model("test_vit", pretrained=False, patch_size=8).state_dict(), path / "a.pth")
        return vit, path / "a.pth", r"patch_embed\.proj\.weight is \[64, 3, 8, 8\]"
    if case == "twice":
        state = tv.resnet18(weights=None).state_dict()
        torch.save(
            {f"{who}.{k}": t for who in ("student", "teacher") for k, t in state.items()}, path / "a.pth"
        )
        return "torchvision:resnet18", path / "a.pth", r"several networks: student\., teacher\."
    if case == "whole":
        torch.save(tv.resnet18(weights=None), path / "a.pth")
        return "torchvision:resnet18", path / "a.pth", r"which could run any program"
    if case == "empty":
        return vit, path, r"contains no file of weights"
    return vit, path / "absent", r"absent do not exist; name a file or a folder"


@pytest.mark.complete
@pytest.mark.parametrize("case", ["deeper", "wider", "patches", "twice", "whole", "empty", "absent"])
def test_a_file_of_another_network_is_refused(case: str, tmp_path: Path) -> None:
    name, path, said = other(case, tmp_path)
    with pytest.raises(ConfigError, match=said) as caught:
        built(name, 64, path)
    assert len(str(caught.value).splitlines()) == 1


UNUSABLE = {
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
    import timm

    norm = nn.LayerNorm(64).state_dict()
    with pytest.raises(ConfigError, match=r"a\.pth.*weight"):
        fill(norm, norm | {"weight": UNUSABLE[kind](norm["weight"])}, "a.pth", "a norm")
    state = timm.create_model("test_vit", pretrained=False).state_dict()
    torch.save(state | {"pos_embed": UNUSABLE[kind](state["pos_embed"])}, tmp_path / "a.pth")
    with pytest.raises(ConfigError, match=r"a\.pth.*pos_embed") as caught:  # which timm resamples before
        built("timm:test_vit", 64, tmp_path / "a.pth")
    assert len(str(caught.value).splitlines()) == 1


def test_what_the_network_does_not_take_may_be_not_finite(tmp_path: Path) -> None:
    import timm

    state = timm.create_model("test_vit", pretrained=False).state_dict()
    torch.save(state | {"head.bias": torch.full((5,), torch.nan)}, tmp_path / "a.pth")
    model = built("timm:test_vit", 64, tmp_path / "a.pth")
    assert model({"image": images(64)}).isfinite().all()


@pytest.mark.parametrize("shape", [(8,), (2, 5, 8), (1, 0, 8), (1, 1, 8), (1, 5, 8, 1)])
def test_positions_of_torchvision_that_cannot_be_are_refused(
    shape: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torchvision

    small = torchvision.models.VisionTransformer(64, 16, 1, 1, 8, 8)
    monkeypatch.setattr(torchvision.models, "get_model", lambda *_args, **_settings: small)
    torch.save(small.state_dict() | {"encoder.pos_embedding": torch.ones(shape)}, tmp_path / "a.pth")
    with pytest.raises(ConfigError, match=r"encoder\.pos_embedding is \[.* instead of \[1, 17, 8\]"):
        built("torchvision:vit_b_16", 64, tmp_path / "a.pth")


@pytest.mark.complete
def test_a_network_that_cannot_train_on_one_image_can_be_a_frozen_encoder() -> None:
    """Batch norm of a pooled image has one value for each channel, which training refuses."""
    with pytest.raises(ConfigError, match=r"resnest14d.*or model\.train='head'"):
        built("timm:resnest14d", 64)
    model = built("timm:resnest14d", 64, train="head")
    assert model.features({"image": images(64)}).shape == (2, 2048)


@pytest.mark.complete
@pytest.mark.parametrize("name", ["regnet_y_400mf", "swin_t", "shufflenet_v2_x0_5"])
def test_a_network_that_cannot_be_built_without_memory_is_measured(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert built(f"torchvision:{name}", 64)({"image": images(64)}).shape == (2, 2)
    monkeypatch.setattr(described, "MOST_BYTES", 20_000_000 if name != "swin_t" else 120_000_000)
    with pytest.raises(ConfigError, match="choose a smaller one"):
        built(f"torchvision:{name}", 1024)
