"""Adapters of encoders: their layers, first values and merged weights, and settings that cannot be."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from small_models import CNN_16, CNN_32, built_model
from suture.core.errors import ConfigError
from suture.core.validation import parse
from suture.models import ModelSpec, encoder_of, example_of, without_adapters
from suture.models.adapters import Adapters, add_adapters, default_targets, merge_adapters
from suture.models.classifier import ENCODER, Classifier
from world import refused

DINO = (
    '{"arguments": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}, '
    '"mean": [0.5, 0.5, 0.5], "std": [0.2, 0.2, 0.2]}'
)
VIT = ModelSpec("timm:test_vit", size=32)
NETWORKS = {
    "a ViT of timm": VIT,
    "a ConvNeXt of timm": ModelSpec("timm:test_convnext", size=64),
    "a ViT of torchvision": ModelSpec("torchvision:vit_b_32", size=32),
    "a Swin of torchvision": ModelSpec("torchvision:swin_t", size=32),
    "a ViT of transformers": ModelSpec("hf:dinov2", size=28, encoder_config=DINO),
    "a CNN": CNN_32,
    "linear layers": ModelSpec("vectors"),
}


def adapted(spec: ModelSpec, seed: int = 0, **settings: Any) -> tuple[Classifier, ModelSpec]:
    spec = replace(spec, train="adapters", adapters=Adapters(**settings))
    return built_model(spec, seed=seed), spec


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
    plain = built_model(replace(spec, train="head", adapters=None), seed=0)
    with torch.no_grad():
        assert torch.equal(model.eval()(batch), plain.eval()(batch))
    trained = {n: p for n, p in model.named_parameters() if n.startswith(ENCODER) and p.requires_grad}
    (model.train()(batch) * torch.tensor([1.0, 2.0])).square().sum().backward()
    factors = {n: p.grad for n, p in trained.items() if ".lora_A." not in n}
    assert factors
    assert not [n for n, grad in factors.items() if grad is None or not grad.any()]
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trained.values():
            parameter.add_(torch.randn(parameter.shape, generator=noise), alpha=0.02)
        whole, described = without_adapters(model.eval(), spec)
        found, expected = (m(batch).sigmoid() for m in (whole, model))
    assert (found - expected).abs().max() <= 1e-6
    state = plain.state_dict()
    changed = [n for n, tensor in whole.state_dict().items() if not torch.equal(tensor, state[n])]
    assert len(changed) == len(factors)
    assert (described.train, described.adapters) == ("head", None)
    assert list(whole.state_dict()) == list(state)


def layers_of(spec: ModelSpec, **settings: Any) -> set[str]:
    return {n.partition(".lora_A.")[0] for n in adapted(spec, **settings)[0].names if ".lora_A." in n}


@pytest.mark.complete
@pytest.mark.parametrize("name", NETWORKS)
def test_the_listed_targets_are_the_layers_that_get_adapters_by_default(name: str) -> None:
    spec = NETWORKS[name]
    entry = encoder_of(spec)
    listed = default_targets(entry.build(spec, None)[0], example_of(spec, entry))
    assert layers_of(spec, rank=2, targets=tuple(listed)) == (layers := layers_of(spec, rank=2))
    attention = {
        "a ViT of timm": {"attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"},
        "a ViT of torchvision": {"self_attention", "mlp.0", "mlp.3"},
    }
    if ends := attention.get(name):
        assert {end for layer in layers for end in ends if layer.endswith(f".{end}")} == ends
        assert all(layer.endswith(tuple(ends)) for layer in layers)


@pytest.mark.complete
def test_a_target_is_the_end_of_names() -> None:
    """`conv1` is the stem of a ResNet, and the first convolution of each of its eight blocks."""
    spec = ModelSpec("resnet18", size=64)
    assert len(layers_of(spec, rank=2, targets=("conv1",))) == 9
    assert layers_of(spec, rank=2, targets=("layer1.0.conv1",)) == {"backbone.layer1.0.conv1"}


def test_first_values_follow_from_seed_and_name_alone() -> None:
    before = torch.get_rng_state()
    one, _ = adapted(CNN_16, rank=2)
    fewer, _ = adapted(CNN_16, rank=2, targets=("conv3",))
    other, _ = adapted(CNN_16, seed=1, rank=2)
    assert torch.equal(torch.get_rng_state(), before)
    name = "backbone.conv3.lora_A.default.weight"
    first, same, different = (model.state_dict()[name] for model in (one, fewer, other))
    assert torch.equal(first, same)
    assert not torch.equal(first, different)
    assert not one.state_dict()["backbone.conv3.lora_B.default.weight"].any()
    assert [n for n in fewer.names if ".lora_" in n and "conv3" not in n] == []
    head = built_model(replace(CNN_16, hidden=4, train="head"), seed=0)
    block, _ = adapted(replace(CNN_16, hidden=4), rank=2)
    for part in ("hidden.0.weight", "head.weight"):
        assert torch.equal(block.state_dict()[part], head.state_dict()[part]), part


@pytest.mark.parametrize(
    ("spec", "settings", "named"),
    [
        (VIT, {"targets": ("qkv", "norm1")}, ("'norm1'", "qkv")),
        (VIT, {"targets": ("kv",)}, ("'kv'",)),
        (CNN_16, {"rank": 10}, ("rank 10", "conv1", "9")),
        (ModelSpec("lstm"), {}, ("lstm", "model.train='head'")),
        (ModelSpec("lstm"), {"kind": "bias"}, ("lstm",)),
        (replace(CNN_16, norm_momentum=0.1), {"rank": 2}, ("norm_momentum",)),
        (replace(CNN_16, views=2), {"rank": 2}, ("views",)),
    ],
)
def test_settings_that_do_not_fit_the_encoder_are_refused(
    spec: ModelSpec, settings: dict[str, Any], named: tuple[str, ...]
) -> None:
    with refused(*named, by=ConfigError):
        adapted(spec, **settings)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"rank": 0}, "rank"),
        ({"rank": 10**9}, "rank"),
        ({"targets": [""]}, "targets"),
        ({"targets": ["qkv"] * 65}, "targets"),
        ({"kind": "lorra"}, "kind"),
        ({"kind": "bias", "rank": 4}, "rank"),
        ({"kind": "bias", "targets": ["qkv"]}, "targets"),
    ],
)
def test_values_that_cannot_be_are_refused(values: dict[str, Any], named: str) -> None:
    with refused("model.adapters", named, by=ConfigError):
        parse(Adapters, values, "model.adapters")
    for train in ("all", "head"):
        with refused("model.adapters", "model.train='adapters'", by=ConfigError):
            built_model(replace(CNN_16, train=train, adapters=Adapters()))


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
    with refused("suture[adapters]", by=ConfigError):
        adapted(CNN_16)
    model, spec = adapted(CNN_16, kind="bias")
    assert merge_adapters(model.backbone) is model.backbone
    assert without_adapters(model, spec)[1].train == "head"


@pytest.mark.parametrize("kind", ["lora", "ffa-lora", "bias"])
def test_an_encoder_with_tensors_named_like_factors_is_refused(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would be trained, and begin at random values, although they are weights of the encoder."""
    encoder = nn.Sequential(nn.Linear(4, 4))
    encoder.add_module("lora_A", nn.Linear(4, 4))
    with refused("mine", "'lora_A.weight'", by=ConfigError):
        add_adapters(encoder, Adapters(kind=kind), "mine", 1, (torch.zeros(1, 4),))
    nested = nn.Sequential(encoder)
    assert [name for name in nested.state_dict() if ".lora_" in name]
    assert merge_adapters(nested) is nested  # they are no factors
    monkeypatch.setitem(sys.modules, "peft", None)
    assert merge_adapters(nested) is nested
