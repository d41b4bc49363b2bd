"""Encoders that timm, torchvision and MONAI know by name; weights come from a file or folder alone."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from suture.core.entry_points import needed
from suture.core.errors import ConfigError, as_word, check_known, show_value, unknown
from suture.models.encoders import Backbone
from suture.models.weights import fill, load_weights, read_weights, within
from suture_encoders.foreign import (
    BUILD_ERRORS,
    bound_network,
    check_backbone,
    check_footprint,
    read_config,
    refusal,
    without_classifier,
)

if TYPE_CHECKING:
    from suture.models import ModelSpec


def timm_encoder(name: str) -> Backbone:
    """Return a network of timm, with the input and the pooling of its own configuration.

    Raises:
        ConfigError: timm is not installed, or has no such network of images.
    """
    timm = needed("timm", f"timm:{name}", "encoders")
    if ":" in name or "/" in name:
        raise ConfigError(
            f"model.name=timm:{as_word(name)}: Suture downloads nothing; name the network alone "
            "(timm:vit_base_patch16_224), and its file or folder as model.weights"
        )
    if not timm.is_model(name):
        raise unknown("network of timm", name, timm.list_models())
    try:
        own = timm.get_pretrained_cfg(name)
    except RuntimeError as error:  # names the tag that it does not know
        raise ConfigError(f"model.name=timm:{as_word(name)}: {as_word(error)}; correct the tag") from error
    channels, size, _ = own.input_size
    return Backbone(
        f"{name} of timm, for {size} px",
        partial(_timm_network, name, own),
        weights=(),
        normalisation=(tuple(own.mean), tuple(own.std)) if len(own.mean) == channels else None,
        size=size,
    )


def _timm_network(name: str, own: Any, spec: ModelSpec, weights: str | None) -> tuple[nn.Module, int]:
    """Build a network for images of the job's size, and resample its positions to them."""
    import timm

    # Only networks that must know the size have this argument.
    size: dict[str, Any] = {"img_size": spec.size} if own.fixed_input_size else {}
    channels, trained = spec.preprocessing.channels, own.input_size[1]
    make = partial(timm.create_model, name, pretrained=False, num_classes=0, in_chans=channels, **size)
    network = bound_network(make, spec)
    if weights:
        _check_normalisation(Path(weights).expanduser() / "config.json", spec)
        head = (own.classifier,) if isinstance(own.classifier, str) else tuple(own.classifier or ())
        tensors = network.state_dict()
        found = within(read_weights(weights), tensors, weights)
        # What timm does to a file: names of other programs, positions of images of another size. It resamples
        # patches, too, which would make one network of another.
        if convert := getattr(sys.modules[type(network).__module__], "checkpoint_filter_fn", None):
            patches = {key: found[key] for key in ("patch_embed.proj.weight",) if key in found}
            with suppress(*BUILD_ERRORS):  # `fill` names the tensor that it does not take
                found = {**convert(found, network), **patches}
        fill(tensors, found, weights, f"{name} of timm", tuple(f"{part}." for part in head))
    return check_backbone(network, spec, trained)


def _check_normalisation(path: Path, spec: ModelSpec) -> None:
    """Refuse weights of a folder that states another normalisation than timm does for the name."""
    if not path.is_file():
        return
    stated = read_config(path).get("pretrained_cfg")
    for name in ("mean", "std"):
        own, other = list(getattr(spec.preprocessing, name)), isinstance(stated, dict) and stated.get(name)
        if other and other != own:
            raise ConfigError(
                f"model.{name}: {path} states {show_value(other)}, and {spec.name} has {own}; set "
                f"model.{name} to what the file states, or the name with its tag"
            )


_OTHER_INPUT = ("googlenet", "inception_v3")
"""Networks of torchvision that normalise images once more in their pretrained form."""


def torchvision_encoder(name: str) -> Backbone:
    """Return a network of torchvision's that classifies images.

    Raises:
        ConfigError: there is none of that name.
    """
    from torchvision import models

    names = [one for one in models.list_models(module=models) if one not in _OTHER_INPUT]
    check_known("network of torchvision", name, names)
    own = models.get_model_weights(name).DEFAULT.transforms()
    return Backbone(
        f"{name} of torchvision, for {own.crop_size[0]} px",
        partial(_torchvision_network, name, own.crop_size[0]),
        weights=(),
        normalisation=(tuple(own.mean), tuple(own.std)),
        size=own.crop_size[0],
    )


def _torchvision_network(
    name: str, trained: int, spec: ModelSpec, weights: str | None
) -> tuple[nn.Module, int]:
    """Build a network for images of the job's size, and resample its positions to them."""
    from torchvision import models
    from torchvision.models.vision_transformer import interpolate_embeddings

    size = {"image_size": spec.size} if name.startswith("vit_") else {}
    try:
        # Some cannot be made without memory; the largest, regnet_y_128gf, has 645 million parameters.
        network = models.get_model(name, weights=None, **size)
        check_footprint(network, spec)
    except BUILD_ERRORS as error:
        raise refusal(spec, trained, error) from error
    head = without_classifier(network, f"torchvision:{name}")
    if weights:
        found = within(read_weights(weights), network.state_dict(), weights)
        with suppress(*BUILD_ERRORS):  # there are no positions, or `fill` says what is wrong with them
            found = interpolate_embeddings(spec.size, network.patch_size, found)
        fill(network.state_dict(), found, weights, f"{name} of torchvision", (f"{head}.",))
    return check_backbone(network, spec, trained)


MONAI_NETS: dict[str, dict[str, Any]] = {
    **{f"DenseNet{n}": {"spatial_dims": 2, "out_channels": 1} for n in (121, 169, 201, 264)},
    **{f"resnet{n}": {"spatial_dims": 2, "num_classes": 1} for n in (10, 18, 34, 50, 101, 152, 200)},
    **{f"SEResNet{n}": {"spatial_dims": 2, "num_classes": 1} for n in (50, 101, 152)},
    **{f"SEResNext{n}": {"spatial_dims": 2, "num_classes": 1} for n in (50, 101)},
    "SENet154": {"spatial_dims": 2, "num_classes": 1},
    "EfficientNetBN": {"spatial_dims": 2, "num_classes": 1, "model_name": "efficientnet-b0"},
}
"""The networks of MONAI that classify images of two dimensions, with the arguments that make them do so."""

MONAI_CHANNELS = ("in_channels", "n_input_channels")
"""How MONAI calls the number of channels of an image: most networks, and its ResNets."""


def monai_encoder(name: str) -> Backbone:
    """Return a network of MONAI, which is built for the images of the job, gray or in colour.

    Raises:
        ConfigError: it is none that classifies images of two dimensions.
    """
    check_known("2-D network of MONAI", name, MONAI_NETS)
    return Backbone(f"{name} of MONAI", partial(_monai_network, name), weights=())


def _monai_network(name: str, spec: ModelSpec, weights: str | None) -> tuple[nn.Module, int]:
    channels = MONAI_CHANNELS[name.startswith("resnet")]
    network = bound_network(lambda: monai_network(name, {channels: spec.preprocessing.channels}), spec)
    return filled_monai(network, name, spec, weights, None)


def monai_network(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    """Build a network of MONAI.

    Args:
        arguments: plain values, in place of those of `MONAI_NETS`.
    """
    from monai.networks import nets  # costs seconds

    # Not pretrained by MONAI, which would download.
    network: nn.Module = getattr(nets, name)(**{**MONAI_NETS[name], **arguments, "pretrained": False})
    return network


def filled_monai(
    network: nn.Module, name: str, spec: ModelSpec, weights: str | None, size: int | None
) -> tuple[nn.Module, int]:
    """Return a network of MONAI without its classifier, with weights in MONAI's own names; and its width.

    Args:
        size: side of the images of its pretraining, in pixels.

    Raises:
        ConfigError: the weights do not fit.
    """
    head = without_classifier(network, spec.name)
    if weights:
        load_weights(network, weights, f"{name} of MONAI", (f"{head}.",))
    return check_backbone(network, spec, size)
