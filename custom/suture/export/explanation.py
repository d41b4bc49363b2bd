"""Where a model looks: class activation maps over images, by MONAI."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from suture.core.errors import ConfigError, DataError, unknown
from suture.core.files import make_folder, replacing
from suture.core.printable import printable
from suture.data.decoding import Pixels, inside_square, open_image, readable, resize_pad
from suture.data.inputs import Input, find_inputs
from suture.learning.prediction import Model, open_model

Map = NDArray[np.float64]

SHEET = 20
"""Images of a contact sheet; more have several sheets."""


@dataclass(frozen=True)
class Explained:
    """An image, and where the model looks for some classes.

    Attributes:
        pixels: the image as the model reads it, without the padding, ``[h, w]`` or ``[h, w, 3]``, uint8.
        probabilities: of each class of `maps`.
        maps: of each class, ``[h, w]``: 0 where nothing speaks for it, 1 where most does.
    """

    pixels: Pixels
    probabilities: dict[str, float]
    maps: dict[str, Map]


class _Logits(nn.Module):
    """A classifier that takes a tensor, as MONAI's maps need it."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.network = model.network

    def forward(self, image: Tensor) -> Tensor:
        found: Tensor = self.network({"image": image})
        return found


def explain(model: Model, pixels: Pixels, classes: tuple[str, ...] = (), most: int = 3) -> Explained:
    """Return Grad-CAM maps of an image (Selvaraju et al., ICCV 2017).

    The map of a class is the positive part of the last feature maps, weighted by the mean gradient of the
    class's logit, and stretched over the image.

    Args:
        pixels: ``[h, w]``, or ``[h, w, 3]`` for a model of colour images; any size.
        classes: to explain; none for the `most` likely.

    Raises:
        ConfigError: the model reads no images.
    """
    _check_images(model)
    from monai.visualize import GradCAM  # seconds to import

    square = torch.from_numpy(resize_pad(pixels, model.prepare.size).copy())
    image = square.permute(2, 0, 1) if model.prepare.color else square[None]
    p = model(image[None])[0]
    chosen = classes or tuple(model.labels[i] for i in p.argsort(descending=True)[:most].tolist())
    cam = GradCAM(_Logits(model).eval(), f"network.{feature_layer(model)}", postprocessing=_relative)
    rows, columns = inside_square(pixels.shape[0], pixels.shape[1], model.prepare.size)
    maps = {}
    for name in chosen:
        found = cam(x=model.prepare(image[None]), class_idx=model.labels.index(name))
        maps[name] = np.asarray(found.detach(), dtype=np.float64)[0, 0, rows, columns]
    shown = {name: float(p[model.labels.index(name)]) for name in chosen}
    return Explained(square.numpy()[rows, columns], shown, maps)


def _check_images(model: Model) -> None:
    if model.reads_text:
        raise ConfigError(f"a model that reads text ({model.spec.name}) looks at no image")


def _check_classes(model: Model, classes: tuple[str, ...]) -> None:
    for name in classes:
        if name not in model.labels:
            raise unknown("class", name, model.labels)


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


def write_explained(rows: Mapping[str, Explained], path: Path, inches: float = 2.6) -> None:
    """Write images as one PNG, each in a row beside its maps.

    Args:
        rows: by the title of the image.
        inches: side of a picture.

    Raises:
        DiskError: it cannot be written.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    columns = 1 + max(len(found.maps) for found in rows.values())
    figure = Figure(figsize=(inches * columns, (inches + 0.2) * len(rows) + 0.6), layout="constrained")
    axes = figure.subplots(len(rows), columns, squeeze=False)
    for row, (title, found) in zip(axes, rows.items(), strict=True):
        _draw(row, title, found, 9 if inches > 2 else 6)
    if columns > 1:
        scale = ScalarMappable(Normalize(0, 1), "magma")
        bar = figure.colorbar(scale, ax=axes[0], shrink=0.5, aspect=40, location="top", ticks=[0, 1])
        bar.ax.set_xticklabels(["nothing", "most"], fontsize=9)
        bar.set_label("speaks for the class", size=9, labelpad=-8)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")


def _draw(row: Any, title: str, found: Explained, size: int) -> None:
    gray = {"cmap": "gray", "vmin": 0, "vmax": 255}
    row[0].imshow(found.pixels, **gray)
    row[0].set_title(title, fontsize=size, parse_math=False)
    for at, (name, map_) in zip(row[1:], found.maps.items(), strict=False):
        at.imshow(found.pixels, **gray)
        at.imshow(map_, cmap="magma", vmin=0, vmax=1, alpha=0.7 * map_)
        at.set_title(f"{name}, {found.probabilities[name]:.2f}", fontsize=size, parse_math=False)
    for at in row:
        at.set_axis_off()


def _read(one: Input, color: bool) -> Pixels:
    opened = open_image(one.read(), one.name, one.bits)
    with readable(one.name):
        return opened.pixels(color)


@dataclass(frozen=True)
class Drawn:
    """What became of the images.

    Attributes:
        failed: why an image has no picture, by its name.
        beyond: how many images were not looked at.
    """

    written: tuple[Path, ...]
    failed: dict[str, str]
    beyond: int


def explain_files(
    folder: Path, sources: Sequence[Path], out: Path, classes: tuple[str, ...] = (), most: int = 20
) -> Drawn:
    """Write a PNG of each image beside its maps, ``001 NAME.png``, and of all: ``contact sheet.png``.

    Args:
        folder: of the saved model.
        sources: as of `suture.data.inputs.find_inputs`.
        classes: see `explain`.
        most: number of images that are drawn.

    Raises:
        ConfigError: the folder holds no model, one that reads text, or one without a class.
        DataError: there is no image, or none can be read.
        DiskError: a picture cannot be written.
    """
    model = open_model(folder)
    _check_images(model)
    _check_classes(model, classes)
    failed: dict[str, str] = {}
    sheet: dict[str, Explained] = {}
    with find_inputs(sources, "image", None, None, None) as inputs:
        found = list(inputs.found.values())
        for number, one in enumerate(found[:most], 1):
            name = printable(Path(one.name).stem, 80)
            try:
                pixels = _read(one, model.prepare.color)
            except (DataError, OSError) as error:
                failed[one.name] = str(error)
                continue
            make_folder(out)
            title = f"{number:03d} {name}"
            sheet[title] = explain(model, pixels, classes)
            write_explained({name: sheet[title]}, out / f"{title}.png")
    if not sheet:
        why = next(iter(failed.values()))
        raise DataError(f"none of the {len(failed)} images can be read; the first: {why}")
    _write_sheets(sheet, out)
    written = tuple(out / f"{title}.png" for title in sheet)
    return Drawn(written, failed, len(found) - len(found[:most]))


def _write_sheets(rows: dict[str, Explained], out: Path) -> None:
    for first in range(0, len(rows), SHEET):
        name = "contact sheet" + (f" {first // SHEET + 1}" if len(rows) > SHEET else "")
        write_explained(dict(list(rows.items())[first : first + SHEET]), out / f"{name}.png", inches=1.3)
