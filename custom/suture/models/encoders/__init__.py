"""Encoders of other libraries, by name (``timm:resnet50``) or from a file or folder (``hf:FOLDER``).

A name is ``FAMILY:NAME``. Nothing is downloaded, and nothing that a file holds is run: a file or folder gives
tensors and a configuration of plain values, from which the library's own classes are built.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from suture.core.errors import unknown
from suture.models.encoders.backbone import Backbone
from suture.models.encoders.libraries import monai_encoder, timm_encoder, torchvision_encoder

BY_NAME: dict[str, Callable[[str], Backbone]] = {
    "timm": timm_encoder,
    "torchvision": torchvision_encoder,
    "monai": monai_encoder,
}
"""The families whose libraries know their networks by name."""


FAMILIES = {
    "timm:NAME": "an image network of timm, such as timm:vit_small_patch14_dinov2 (suture[encoders])",
    "torchvision:NAME": "an image network of torchvision, such as torchvision:convnext_tiny",
    "monai:NAME": "a 2-D classification network of MONAI, such as monai:SEResNet50",
}
"""What `suture list` says of each."""


def family_of(name: str) -> str:
    """Return the family of a name ``FAMILY:NAME``; empty for a name of the registry.

    Raises:
        ConfigError: there is no such family (names the nearest).
    """
    family, colon, _ = name.partition(":")
    if colon and family not in BY_NAME:
        raise unknown("family of models", family, BY_NAME)
    return family if colon else ""


@lru_cache(maxsize=64)
def family_encoder(name: str) -> Backbone:
    """Return the encoder of a name ``FAMILY:NAME``.

    Raises:
        ConfigError: there is no such network (names the nearest), or its library is not installed.
    """
    family, _, network = name.partition(":")
    return BY_NAME[family](network)
