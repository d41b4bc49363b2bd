"""Adapters of encoders: their layers, first values and merged weights, and settings that cannot be."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

from suture.core.errors import ConfigError
from suture.core.labels import LabelSet
from suture.core.validation import parse
from suture.models import ModelSpec, build, encoder_of, example_of, without_adapters
from suture.models.adapters import Adapters, add_adapters, default_targets, merge_adapters
from suture.models.classifier import ENCODER, Classifier

DINO = (
    '{"arguments": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}, '
    '"mean": [0.5, 0.5, 0.5], "std": [0.2, 0.2, 0.2]}'
)
NETWORKS = {
    "a ViT of timm": ModelSpec("timm:test_vit", size=32),
    "a ConvNeXt of timm": ModelSpec("timm:test_convnext", size=64),
    "a ViT of torchvision": ModelSpec("torchvision:vit_b_32", size=32),
    "a Swin of torchvision": ModelSpec("torchvision:swin_t", size=32),
    "a ViT of transformers": ModelSpec("hf:dinov2", size=28, encoder_config=DINO),
    "a CNN": ModelSpec("cnn", size=32),
    "linear layers": ModelSpec("vectors"),
}


def adapted(spec: ModelSpec, seed: int = 0, **settings: Any) -> tuple[Classifier, ModelSpec]:
    spec = ModelSpec(**(vars(spec) | {"train": "adapters", "adapters": Adapters(**settings)}))
    return build(spec, LabelSet(("A", "B")), seed, pretrained=False), spec


def inputs(spec: ModelSpec) -> dict[str, torch.Tensor]:
    noise = torch.Generator().manual_seed(3)
    if spec.name == "vectors":
        return {"vector": torch.randn(3, spec.vector, generator=noise)}
    return {"image": torch.randn(3, spec.preprocessing.channels, spec.size, spec.size, generator=noise)}


@pytest.mark.complete
@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "lora") for name in NETWORKS), ("a CNN", "bias"), ("a ViT of timm", "bias")],
)
def test_every_adapter_has_an_effect_and_merges(name: str, kind: str) -> None:
    """torchvision's Swin reads the weights of its attention without calling the layers."""
    model, spec = adapted(NETWORKS[name], kind=kind, **({"rank": 4} if kind == "lora" else {}))
    batch = inputs(spec)
    plain = build(
        ModelSpec(**(vars(spec) | {"train": "head", "adapters": None})), model.labels, 0, pretrained=False
    )
    with torch.no_grad():
        assert torch.equal(model.eval()(batch), plain.eval()(batch))
    trained = {n: p for n, p in model.named_parameters() if n.startswith(ENCODER) and p.requires_grad}
    (model.train()(batch) * torch.tensor([1.0, 2.0])).square().sum().backward()
    inert = [
        n for n, p in trained.items() if ".lora_A." not in n and not (p.grad is not None and p.grad.any())
    ]
    assert trained
    assert not inert
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trained.values():
            parameter.add_(torch.randn(parameter.shape, generator=noise), alpha=0.02)
        whole, described = without_adapters(model.eval(), spec)
        found, expected = (m(batch).sigmoid() for m in (whole, model))
    assert (found - expected).abs().max() <= 1e-6
    state = plain.state_dict()
    changed = [n for n, tensor in whole.state_dict().items() if not torch.equal(tensor, state[n])]
    assert len(changed) == len([n for n in trained if ".lora_A." not in n])
    assert (described.train, described.adapters) == ("head", None)
    assert list(whole.state_dict()) == list(plain.state_dict())


@pytest.mark.complete
def test_attention_is_adapted_by_default() -> None:
    ends = {
        "timm:test_vit": {"attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"},
        "torchvision:vit_b_32": {"self_attention", "mlp.0", "mlp.3"},
    }
    for name, wanted in ends.items():
        model, _ = adapted(ModelSpec(name, size=32))
        layers = {n.partition(".lora_A.")[0] for n in model.names if ".lora_A." in n}
        assert {end for layer in layers for end in wanted if layer.endswith(f".{end}")} == wanted
        assert all(layer.endswith(tuple(wanted)) for layer in layers)


def test_first_values_follow_from_seed_and_name_alone() -> None:
    before = torch.get_rng_state()
    one, _ = adapted(ModelSpec("cnn", size=16), rank=2)
    fewer, _ = adapted(ModelSpec("cnn", size=16), rank=2, targets=("conv3",))
    other, _ = adapted(ModelSpec("cnn", size=16), seed=1, rank=2)
    assert torch.equal(torch.get_rng_state(), before)
    name = "backbone.conv3.lora_A.default.weight"
    first, same, different = (model.state_dict()[name] for model in (one, fewer, other))
    assert torch.equal(first, same)
    assert not torch.equal(first, different)
    assert not one.state_dict()["backbone.conv3.lora_B.default.weight"].any()
    assert [n for n in fewer.names if ".lora_" in n and "conv3" not in n] == []
    head = build(ModelSpec("cnn", size=16, hidden=4, train="head"), one.labels, 0, pretrained=False)
    block, _ = adapted(ModelSpec("cnn", size=16, hidden=4), rank=2)
    for part in ("hidden.0.weight", "head.weight"):
        assert torch.equal(block.state_dict()[part], head.state_dict()[part]), part


@pytest.mark.complete
def test_a_target_is_the_end_of_names() -> None:
    """`conv1` is the stem of a ResNet, and the first convolution of each of its eight blocks."""
    model, _ = adapted(ModelSpec("resnet18", size=64), rank=2, targets=("conv1",))
    assert len([n for n in model.names if ".lora_A." in n]) == 9
    model, _ = adapted(ModelSpec("resnet18", size=64), rank=2, targets=("layer1.0.conv1",))
    assert [n for n in model.names if ".lora_A." in n] == ["backbone.layer1.0.conv1.lora_A.default.weight"]


@pytest.mark.complete
@pytest.mark.parametrize("name", NETWORKS)
def test_the_listed_targets_are_the_layers_that_get_adapters_by_default(name: str) -> None:
    spec = NETWORKS[name]
    entry = encoder_of(spec)
    listed = default_targets(entry.build(spec, None)[0], example_of(spec, entry))
    assert adapted(spec, rank=2, targets=tuple(listed))[0].names == adapted(spec, rank=2)[0].names


@pytest.mark.parametrize(
    ("spec", "settings", "told"),
    [
        (ModelSpec("timm:test_vit", size=32), {"targets": ("qvk",)}, "named 'qvk'.*example qkv, proj, fc1"),
        (ModelSpec("timm:test_vit", size=32), {"targets": ("qkv", "norm1")}, "named 'norm1'.*example"),
        (ModelSpec("timm:test_vit", size=32), {"targets": ("kv",)}, "named 'kv'"),
        (ModelSpec("cnn", size=16), {"rank": 10}, "rank 10 is larger than conv1 of cnn, whose limit is 9"),
        (ModelSpec("lstm"), {}, "lstm has no linear layer or plain convolution; set model.train='head'$"),
        (ModelSpec("lstm"), {"kind": "bias"}, "lstm has no such tensors"),
    ],
)
def test_settings_that_do_not_fit_the_encoder(spec: ModelSpec, settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        adapted(spec, **settings)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"rank": 0}, "must be at least 1"),
        ({"rank": 10**9}, "rank"),
        ({"targets": [""]}, "targets"),
        ({"targets": ["qkv"] * 65}, "targets"),
        ({"kind": "lorra"}, "'lora', 'ffa-lora' or 'bias'"),
        ({"kind": "bias", "rank": 4}, "remove rank and targets"),
        ({"kind": "bias", "targets": ["qkv"]}, "remove rank and targets"),
    ],
)
def test_values_that_cannot_be(values: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse(Adapters, values, "model.adapters")


@pytest.mark.parametrize("train", ["all", "head"])
def test_adapters_of_another_mode_are_refused(train: Any) -> None:
    spec = ModelSpec("cnn", size=16, train=train, adapters=Adapters())
    with pytest.raises(ConfigError, match=r"model\.adapters needs model.train='adapters'"):
        build(spec, LabelSet(("A",)), 0, pretrained=False)


@pytest.mark.parametrize("settings", [{"norm_momentum": 0.1}, {"views": 2}])
def test_settings_without_effect_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        adapted(ModelSpec("cnn", size=16, **settings), rank=2)


def test_convolutions_whose_adapter_would_differ_are_left_out() -> None:
    """peft's factors of a convolution have neither groups nor padding other than zeros."""
    network = nn.Sequential(
        nn.Conv2d(4, 4, 3, padding=1),
        nn.Conv2d(4, 4, 3, padding=1, groups=4),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(4, 4, 3, padding=2, dilation=2),
        nn.TransformerEncoderLayer(8, 2, 8, batch_first=True),
    )
    names = add_adapters(network, Adapters(rank=2), "a network", 0, (torch.zeros(1, 4, 8, 8)[0],))
    assert {name.partition(".")[0] for name in names} == {"0"}


def test_the_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r'needs peft.*pip install "suture\[adapters\]"'):
        adapted(ModelSpec("cnn", size=16))
    model, spec = adapted(ModelSpec("cnn", size=16), kind="bias")
    assert merge_adapters(model.backbone) is model.backbone
    assert without_adapters(model, spec)[1].train == "head"


def test_an_encoders_own_tensors_of_such_names_are_no_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = nn.Sequential()
    encoder.add_module("block", nn.Sequential())
    encoder.block.add_module("lora_A", nn.Linear(4, 4))
    assert [name for name in encoder.state_dict() if ".lora_" in name]
    assert merge_adapters(encoder) is encoder
    monkeypatch.setitem(sys.modules, "peft", None)
    assert merge_adapters(encoder) is encoder


@pytest.mark.parametrize("kind", ["lora", "ffa-lora", "bias"])
def test_an_encoder_with_tensors_named_like_factors_is_refused(kind: Any) -> None:
    """They would be trained, and begin at random values, although they are weights of the encoder."""
    encoder = nn.Sequential(nn.Linear(4, 4))
    encoder.add_module("lora_A", nn.Linear(4, 4))
    with pytest.raises(
        ConfigError, match=r"mine has a tensor 'lora_A\.weight', which is named like a factor"
    ):
        add_adapters(encoder, Adapters(kind=kind), "mine", 1, (torch.zeros(1, 4),))
