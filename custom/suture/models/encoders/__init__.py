"""Encoders of other libraries, by name (``timm:resnet50``) or from a file or folder (``hf:FOLDER``).

A name is ``FAMILY:NAME``. Nothing is downloaded, and nothing that a file holds is run: a file or folder gives
tensors and a configuration of plain values, from which the library's own classes are built.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from suture.core.errors import ConfigError, as_word, check_known, unknown
from suture.models.encoders import monai_bundle, transformers_folder, xrv_file
from suture.models.encoders.backbone import Backbone
from suture.models.encoders.described import Description
from suture.models.encoders.libraries import MONAI_NETS, monai_encoder, timm_encoder, torchvision_encoder
from suture.models.encoders.text_folder import TEXT_NETWORKS, tokenised

if TYPE_CHECKING:
    from suture.models import ModelSpec

_BY_NAME: dict[str, Callable[[str], Backbone]] = {
    "timm": timm_encoder,
    "torchvision": torchvision_encoder,
    "monai": monai_encoder,
}
"""The families whose libraries know their networks by name."""


Read = Callable[[Path], tuple[str, Description]]
"""Returns the name of the network of a path, and its description."""

Build = Callable[[str, Description, "ModelSpec", str | None], tuple[nn.Module, int]]
"""Builds such a network for the images of a specification, and fills it with weights."""

STORED: dict[str, tuple[Collection[str], Read, Build]] = {
    "hf": (transformers_folder.NETWORKS, transformers_folder.read_folder, transformers_folder.build_network),
    "xrv": (("densenet121",), xrv_file.read_file, xrv_file.build_network),
    "bundle": (MONAI_NETS, monai_bundle.read_bundle, monai_bundle.build_network),
}
"""The families whose encoders come from a file or folder, with the names of their networks."""

FAMILIES = {
    "timm:NAME": "an image network of timm, such as timm:vit_small_patch14_dinov2 (suture[encoders])",
    "torchvision:NAME": "an image network of torchvision, such as torchvision:convnext_tiny",
    "monai:NAME": "a 2-D classification network of MONAI, such as monai:SEResNet50",
    "hf:FOLDER": "a folder with an encoder of images or text: transformers, model2vec (suture[encoders])",
    "xrv:FILE": "a DenseNet121 of torchxrayvision, as safetensors",
    "bundle:FOLDER": "a 2-D classification network of a MONAI bundle",
}
"""What `suture list` says of each."""


def family_of(name: str) -> str:
    """Return the family of a name ``FAMILY:NAME``; empty for a name of the registry.

    Raises:
        ConfigError: there is no such family (names the nearest), or nothing follows it.
    """
    family, colon, network = name.partition(":")
    if colon and family not in (*_BY_NAME, *STORED):
        raise unknown("family of models", family, (*_BY_NAME, *STORED))
    if colon and not network.strip():
        form = next(form for form in FAMILIES if form.startswith(f"{family}:"))
        raise ConfigError(f"model.name={name} names no encoder; write {form}")
    return family if colon else ""


@lru_cache(maxsize=64)
def family_encoder(name: str, config: str | None) -> Backbone:
    """Return the encoder of a name ``FAMILY:NAME``.

    Args:
        config: description of an encoder that comes from a file or folder; see `Description`.

    Raises:
        ConfigError: there is no such network (names the nearest), its library is not installed, or its
            description is missing or faulty.
    """
    family, _, network = name.partition(":")
    if family in _BY_NAME:
        return _BY_NAME[family](network)
    names, _, build = STORED[family]
    check_known(f"network of {family}", network, names)
    described = Description.read(config or "", f"model.encoder_config of {as_word(name)}")
    if (network in TEXT_NETWORKS) != (described.tokeniser is not None):
        raise ConfigError(
            f"model.encoder_config of {as_word(name)} describes another network; export the job again"
        )
    title, size, made = f"{network} of {family}", described.size, partial(build, network, described)
    if network in TEXT_NETWORKS:
        tokenise = partial(tokenised, network, described)
        return Backbone(f"{title}, for text", made, weights=(), reads="text", size=size, tokenise=tokenise)
    return Backbone(title, made, weights=(), normalisation=(described.mean, described.std), size=size)
