"""Where a model looks: maps over an image of what speaks for a class, by MONAI."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from suture.core.errors import ConfigError, check_known
from suture.data.decoding import Pixels, inside_square, resize_pad
from suture_results.prediction import Model

Map = NDArray[np.float64]

GRAD_CAM = "grad-cam"

MAPS = {GRAD_CAM: "Grad-CAM", "grad-cam++": "Grad-CAM++", "occlusion": "occlusion sensitivity"}
"""The kinds of maps, and their names in the literature."""

_PATCHES = 8
"""An occluded patch is this part of the side of an image, made odd so that it has a centre."""

_STILL = 1e-4
"""Logits: an occlusion that moves one by less shows the rounding of sums, and not what the model looks at."""


@dataclass(frozen=True)
class Explained:
    """An image, and where the model looks for some classes.

    Attributes:
        pixels: the image as the model reads it, without the padding, ``[h, w]`` or ``[h, w, 3]``, uint8.
        probabilities: of each class of `maps`.
        maps: of each class, ``[h, w]``: 0 where nothing speaks for it, 1 where most does.
        kind: of the maps, one of `MAPS`.
    """

    pixels: Pixels
    probabilities: dict[str, float]
    maps: dict[str, Map]
    kind: str = GRAD_CAM


class _Logits(nn.Module):
    """The logits of some classes of a tensor, as MONAI's maps need them."""

    def __init__(self, model: Model, classes: Sequence[str]) -> None:
        super().__init__()
        self.network = model.network
        self.rows = [model.labels.index(name) for name in classes]

    def forward(self, image: Tensor) -> Tensor:
        found: Tensor = self.network({"image": image})[:, self.rows]
        return found


def explain(
    model: Model, pixels: Pixels, classes: tuple[str, ...] = (), most: int = 3, kind: str = GRAD_CAM
) -> Explained:
    """Return maps of an image.

    - ``grad-cam`` (Selvaraju et al., ICCV 2017): the positive part of the last feature maps, weighted by the
      mean gradient of the class's logit, and stretched over the image.
    - ``grad-cam++`` (Chattopadhay et al., WACV 2018): the same, weighted pixel by pixel, for findings that
      are several times in an image.
    - ``occlusion`` (Zeiler and Fergus, ECCV 2014): by how much the class's logit falls where a patch, an
      eighth of the side, fades to the gray that the model's normalisation makes 0.

    Args:
        pixels: ``[h, w]``, or ``[h, w, 3]`` for a model of colour images; any size.
        classes: to explain; none for the `most` likely.
        kind: one of `MAPS`.

    Raises:
        ConfigError: the model reads no images, or the kind is unknown.
    """
    check_maps(model, classes, kind)
    square = torch.from_numpy(resize_pad(pixels, model.prepare.size).copy())
    image = square.permute(2, 0, 1) if model.prepare.color else square[None]
    p = model(image[None])[0]
    chosen = classes or tuple(model.labels[i] for i in p.argsort(descending=True)[:most].tolist())
    of = _occlude if kind == "occlusion" else _activated
    rows, columns = inside_square(pixels.shape[0], pixels.shape[1], model.prepare.size)
    found = of(model, model.prepare(image[None].to(model.device)), chosen, kind)
    maps = {
        name: np.asarray(map_.cpu(), np.float64)[rows, columns]
        for name, map_ in zip(chosen, found, strict=True)
    }
    shown = {name: float(p[model.labels.index(name)]) for name in chosen}
    return Explained(square.numpy()[rows, columns], shown, maps, kind)


def _activated(model: Model, x: Tensor, classes: Sequence[str], kind: str) -> list[Tensor]:
    """Return the class activation map of each class, ``[size, size]``."""
    from monai.visualize import GradCAM, GradCAMpp  # seconds to import

    make = GradCAM if kind == GRAD_CAM else GradCAMpp
    logits, layer = _Logits(model, classes).eval(), f"network.{feature_layer(model)}"
    cam = make(logits, layer, postprocessing=_relative)
    return [cam(x=x, class_idx=row)[0, 0].detach() for row in range(len(classes))]


@torch.no_grad()
def _occlude(model: Model, x: Tensor, classes: Sequence[str], _: str) -> list[Tensor]:
    """Return by how much the logit of each class falls, ``[size, size]``, where a patch is hidden."""
    from monai.visualize import OcclusionSensitivity  # seconds to import

    logits, side = _Logits(model, classes).eval(), x.shape[-1] // _PATCHES | 1
    hide = OcclusionSensitivity(logits, mask_size=side, verbose=False, activate=False)
    with warnings.catch_warnings():  # MONAI 1.6 indexes by lists, at which torch warns in four places
        warnings.filterwarnings("ignore", "Using a non-tuple sequence", UserWarning)
        hidden = torch.as_tensor(hide(x)[0])[0].to(x.device)
    falls = logits(x)[0][:, None, None] - hidden
    return [_relative(torch.where(fall > _STILL, fall, 0.0)) for fall in falls]


def check_maps(model: Model, classes: tuple[str, ...], kind: str) -> None:
    """Refuse an unknown kind of maps, a model that reads no images, and a class that it does not have.

    Raises:
        ConfigError: says which.
    """
    check_known("map", kind, MAPS)
    if model.reads_text:
        raise ConfigError(f"a model that reads text ({model.spec.name}) has no image maps")
    for name in classes:
        check_known("class", name, model.labels)
    # The last maps of a transformer are those of its patches before any layer, which explain nothing.
    attends = any("Attention" in type(module).__name__ for module in model.network.modules())
    if attends and kind != "occlusion":
        raise ConfigError(
            f"{MAPS[kind]} needs the feature maps of a convolutional network, and {model.spec.name} is a "
            "transformer; choose the map occlusion"
        )


def _relative(activation: Tensor) -> Tensor:
    """Divide a map by its largest value; one that is 0 everywhere stays so."""
    highest = float(activation.detach().max())
    return activation / highest if highest > 0 else activation


def feature_layer(model: Model) -> str:
    """Return the name of the last layer whose output is a map, ``[n, k, h, w]`` of more than one value.

    A layer that runs several times, as an activation that blocks share, has several.
    """
    found: list[str] = []

    def noted(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_: nn.Module, __: Any, out: Any) -> None:
            if isinstance(out, Tensor) and out.dim() == 4 and max(out.shape[2:]) > 1:
                found.append(name)

        return hook

    hooks = [module.register_forward_hook(noted(name)) for name, module in model.network.named_modules()]
    side, channels = model.prepare.size, 3 if model.prepare.color else 1
    model(torch.zeros(1, channels, side, side, dtype=torch.uint8))
    for hook in hooks:
        hook.remove()
    return [name for name in found if found.count(name) == 1][-1]
