"""Adapters: the small part of an encoder that is trained while the rest of it is frozen.

`lora` adds to the weight W of a layer a product of two factors, W + B A, where A has `rank` rows (Hu et al.,
ICLR 2022, arXiv:2106.09685). B begins at zero, so the first round has exactly the encoder's own figures.
There is no alpha: to scale the product acts like the learning rate (their Sec. 4.1).

The server averages factor by factor, and the product of two means is not the mean of the products. `ffa-lora`
freezes A at its initial values (Sun et al., ICLR 2024, arXiv:2403.12313): the product is then linear in B, so
the mean is exact, and noise on B is not multiplied by noise on A. `bias` trains biases and batch norm
(as BitFit, Ben Zaken et al., ACL 2022, arXiv:2106.10199).
"""

from __future__ import annotations

import copy
import difflib
import math
import re
import sys
from fnmatch import fnmatchcase
from typing import Annotated, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass as validated
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from suture.core.entry_points import needed
from suture.core.errors import ConfigError, show_value
from suture.core.runtime import generator_for, seed_torch
from suture.core.validation import STRICT

_IN_PROJ = "in_proj_weight"
"""The weight of queries, keys and values in torch's `MultiheadAttention`, which is in no layer of its own."""

_Inputs = tuple[Tensor, ...]
"""The inputs of an encoder, in their order."""


@validated(frozen=True, config=STRICT)
class Adapters:
    """Which part of an encoder is trained with ``model.train = "adapters"``.

    Attributes:
        kind: ``lora``, of which the server averages the factors; ``ffa-lora``, with a frozen factor, so that
            the mean is exact; or ``bias``: biases, and the scales of batch norm.
        rank: of the factors; at most the smaller side of each layer.
        targets: names of layers, or the ends of them, such as ``["qkv", "attn.proj"]``; ``*`` stands for any
            characters. By default all linear layers, attention included; without any, all plain convolutions.
            `suture list models NAME` shows them.
    """

    kind: Literal["lora", "ffa-lora", "bias"] = "lora"
    rank: Annotated[int, Field(ge=1, le=4096)] = 8
    targets: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=256)], ...], Field(max_length=64)
    ] = ()

    def __post_init__(self) -> None:
        if self.kind == "bias" and (self.targets or self.rank != Adapters.rank):
            raise ConfigError("model.adapters: kind='bias' has no layers of its own; remove rank and targets")


def add_adapters(
    encoder: nn.Module, adapters: Adapters, name: str, seed: int, example: _Inputs
) -> frozenset[str]:
    """Add adapters to an encoder in place; return the names of its tensors that are trained.

    The factor A depends on the seed and its name alone, so all parties have the same; the global random
    numbers do not change.

    Args:
        name: of the encoder, for messages.
        example: inputs, of whatever content.

    Raises:
        ConfigError: peft is not installed; the encoder has factors of its own, no layer for them, or none
            that a target names (the message lists three that it has); or the rank is larger than a layer.
    """
    if own := next((path for path, _ in encoder.named_parameters() if ".lora_" in f".{path}"), None):
        raise ConfigError(
            f"model.train='adapters': {name} has a tensor {show_value(own)}, which is named like a factor. "
            "Merge its adapters into its weights first, or set model.train='head'"
        )
    if adapters.kind == "bias":
        if vectors := _vectors(encoder):
            return vectors
        raise ConfigError(f"model.adapters.kind='bias': {name} has no such tensors; set model.train='head'")
    layers = _find_targets(encoder, adapters, name, example)
    if small := next((layer for layer, most in layers.items() if most < adapters.rank), None):
        raise ConfigError(
            f"model.adapters.rank {adapters.rank} is larger than {small} of {name}, whose limit is "
            f"{layers[small]}; set a smaller rank, or targets without that layer"
        )
    peft = needed("peft", "model.train='adapters'", "adapters")
    fused = [layer for layer in layers if layer.endswith(_IN_PROJ)]
    config = peft.LoraConfig(
        r=adapters.rank,
        lora_alpha=adapters.rank,
        target_modules="|".join(re.escape(layer) for layer in layers if layer not in fused) or None,
        target_parameters=fused or None,
    )
    with seed_torch(seed):
        peft.inject_adapter_in_model(config, encoder)
    factors = {path: tensor for path, tensor in encoder.named_parameters() if ".lora_" in path}
    for path, tensor in factors.items():
        if ".lora_A." in path:
            noise = generator_for(seed, "adapter", path)
            nn.init.kaiming_uniform_(tensor, a=math.sqrt(5), generator=noise)
    return frozenset(path for path in factors if adapters.kind == "lora" or ".lora_B." in path)


def _vectors(encoder: nn.Module) -> frozenset[str]:
    """The names of an encoder's biases, and of the scales of its batch norm."""
    norms = {f"{path}.weight" for path, module in encoder.named_modules() if isinstance(module, _BatchNorm)}
    return frozenset(n for n, _ in encoder.named_parameters() if n.endswith("bias") or n in norms)


def _find_targets(encoder: nn.Module, adapters: Adapters, name: str, example: _Inputs) -> dict[str, int]:
    """The layers that get factors, each with the largest rank that it can have."""
    linear, convolutions = _layers(encoder, example)
    layers = linear | convolutions
    if not layers:
        raise ConfigError(
            f"model.train='adapters': {name} has no linear layer or plain convolution; set model.train='head'"
            + (", or model.adapters.kind='bias'" if _vectors(encoder) else "")
        )
    if not adapters.targets:
        return linear or convolutions
    found: dict[str, int] = {}
    for target in adapters.targets:
        ends = {path: most for path, most in layers.items() if fnmatchcase(f".{path}", f"*.{target}")}
        if not ends:
            short = list(dict.fromkeys(map(_short, layers)))
            near = difflib.get_close_matches(target, short, cutoff=0.3)
            candidates = ", ".join([*dict.fromkeys([*near, *short])][:3])
            raise ConfigError(
                f"model.adapters.targets: {name} has no layer for adapters named {show_value(target)}; write "
                f"for example {candidates}"
            )
        found |= ends
    return found


def default_targets(encoder: nn.Module, example: _Inputs) -> list[str]:
    """Return the layers that get adapters by default, with ``*`` for the numbers of blocks."""
    linear, convolutions = _layers(encoder, example)
    return list(dict.fromkeys(re.sub(r"\d+(?=[^.]*\.)", "*", path) for path in linear or convolutions))


def _layers(encoder: nn.Module, example: _Inputs) -> tuple[dict[str, int], dict[str, int]]:
    """The linear layers and the convolutions that can have factors, each with the largest rank of its weight.

    Some networks read the weight of a layer without calling it (torchvision's Swin), where an adapter would
    have no effect; so an example shows which layers are called.
    """
    linear: dict[str, int] = {}
    convolutions: dict[str, int] = {}
    fused: tuple[str, ...] = ()
    called: set[nn.Module] = set()
    for path, module in encoder.named_modules():
        if isinstance(module, nn.TransformerEncoderLayer):  # a fused kernel reads its weights
            fused = (*fused, f"{path}.")
        if path.startswith(fused):
            continue
        if isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
            linear[f"{path}.{_IN_PROJ}"] = min(module.in_proj_weight.shape)
        elif isinstance(module, nn.Linear):
            linear[path] = min(module.weight.shape)
        elif type(module) is nn.Conv2d and _plain(module):
            convolutions[path] = min(module.out_channels, module.weight[0].numel())
    owners = {
        path: encoder.get_submodule(path.removesuffix(f".{_IN_PROJ}")) for path in linear | convolutions
    }
    hooks = [
        owner.register_forward_pre_hook(lambda module, _: called.add(module)) for owner in owners.values()
    ]
    with torch.no_grad():
        encoder.eval()(*example)
    for hook in hooks:
        hook.remove()
    for layers in (linear, convolutions):
        for path in [path for path in layers if owners[path] not in called]:
            del layers[path]
    return linear, convolutions


def _plain(convolution: nn.Conv2d) -> bool:
    """Whether peft's adapter of a convolution computes what is merged into its weight."""
    plain = convolution.groups == 1 and convolution.padding_mode == "zeros"
    return plain and convolution.dilation == (1, 1)


def _short(path: str) -> str:
    """The end of a layer's name that says what it is."""
    *_, parent, last = ("", *path.split("."))
    return f"{parent}.{last}".lstrip(".") if last.isdigit() or last == _IN_PROJ else last


def merge_adapters(encoder: nn.Module) -> nn.Module:
    """Return an encoder with its factors multiplied and added to the weights; a copy, if it has factors."""
    peft = sys.modules.get("peft.tuners.tuners_utils")  # imported by what makes a layer with factors
    if not peft or not any(isinstance(layer, peft.BaseTunerLayer) for layer in encoder.modules()):
        return encoder
    whole = copy.deepcopy(encoder)
    with torch.no_grad():
        for path, layer in [*whole.named_modules()]:
            if isinstance(layer, peft.BaseTunerLayer):
                layer.merge()
                whole.set_submodule(path, layer.get_base_layer())
    return whole
