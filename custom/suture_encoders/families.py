"""The families of encoders, as the engine finds them by entry point."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING

from torch import nn

from suture.core.errors import ConfigError, as_word, check_known
from suture.models import Description, Family
from suture.models.encoders import Backbone
from suture_encoders import monai_bundle, transformers_folder, xrv_file
from suture_encoders.libraries import MONAI_NETS, monai_encoder, timm_encoder, torchvision_encoder
from suture_encoders.text_folder import TEXT_NETWORKS, tokenise_texts

if TYPE_CHECKING:
    from suture.models import ModelSpec

    Build = Callable[[str, Description, ModelSpec, str | None], tuple[nn.Module, int]]
    """Builds such a network for the images of a specification, and fills it with weights."""


def _describe(
    family: str, names: Collection[str], build: Build, network: str, described: Description
) -> Backbone:
    """Return the encoder of a file or folder, of which its description is known."""
    check_known(f"network of {family}", network, names)
    if (network in TEXT_NETWORKS) != (described.tokeniser is not None):
        raise ConfigError(
            f"model.encoder_config of {as_word(f'{family}:{network}')} describes another network; export the "
            "job again"
        )
    title, size, made = f"{network} of {family}", described.size, partial(build, network, described)
    if network in TEXT_NETWORKS:
        tokenise = partial(tokenise_texts, network, described)
        return Backbone(f"{title}, for text", made, weights=(), reads="text", size=size, tokenise=tokenise)
    return Backbone(title, made, weights=(), normalisation=(described.mean, described.std), size=size)


TIMM = Family(
    "timm:NAME",
    "an image network of timm, such as timm:vit_small_patch14_dinov2 (suture[encoders])",
    named=timm_encoder,
)
TORCHVISION = Family(
    "torchvision:NAME",
    "an image network of torchvision, such as torchvision:convnext_tiny",
    named=torchvision_encoder,
)
MONAI = Family(
    "monai:NAME", "a 2-D classification network of MONAI, such as monai:SEResNet50", named=monai_encoder
)
HF = Family(
    "hf:FOLDER",
    "a folder with an encoder of images or text: transformers, model2vec (suture[encoders])",
    read=transformers_folder.read_folder,
    described=partial(_describe, "hf", transformers_folder.NETWORKS, transformers_folder.build_network),
)
XRV = Family(
    "xrv:FILE",
    "a DenseNet121 of torchxrayvision, as safetensors",
    read=xrv_file.read_file,
    described=partial(_describe, "xrv", ("densenet121",), xrv_file.build_network),
)
BUNDLE = Family(
    "bundle:FOLDER",
    "a 2-D classification network of a MONAI bundle",
    read=monai_bundle.read_bundle,
    described=partial(_describe, "bundle", MONAI_NETS, monai_bundle.build_network),
)
