"""The registry of priors: frozen networks that every site has the same copy of, and none trains or sends."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from suture.core.errors import ConfigError, unknown
from suture.core.seeds import seeded
from suture.core.validation import STRICT
from suture.models import LITE
from suture.models.classifier import Preprocessing
from suture.models.efficientnet import efficientnet_lite0
from suture.models.priors.clip import clip_vitb32
from suture.models.priors.moco import FILE, moco_resnet50
from suture.models.priors.prior import Prior, check_width, digest_of, freeze
from suture.models.priors.saved import read_prior

__all__ = ["PRIORS", "Prior", "PriorSpec", "check_width", "digest_of", "load_prior"]


@dataclasses.dataclass(frozen=True)
class Entry:
    """An entry of the registry.

    Attributes:
        text: for people.
        load: reads it, from `PriorSpec.path` where it needs one, for images of `PriorSpec.size`.
        width: number of its features; None where its folder says so.
        size: side of the images of its training, likewise.
        licence: of its weights, for people.
        needs: what the path names; None for a prior that comes with a package.
    """

    text: str
    load: Callable[[Path, int | None], Prior]
    width: int | None
    size: int | None
    licence: str
    needs: str | None = None

    def __str__(self) -> str:
        """A line for `suture list`."""
        width = f"{self.width} features of {self.size} px" if self.width else "its backbone's features"
        needs = f"; needs {self.needs}" if self.needs else ""
        return f"{self.text}: {width}{needs}; weights: {self.licence}"


def _efficientnet_lite0(_path: Path, size: int | None) -> Prior:
    mean, std = LITE
    preprocessing = Preprocessing(size or 224, True, 3, mean, std)
    network, width = efficientnet_lite0(preprocessing.size, "package")
    return freeze(
        "efficientnet_lite0", network, width, preprocessing, "EfficientNet-Lite0, ImageNet with labels"
    )


PRIORS: dict[str, Entry] = {
    "phantoms": Entry(
        "small CNN, MoCo v2 on the demo's phantoms; inside this package",
        lambda _path, size: read_prior(Path(__file__).parent, size, "phantoms"),
        128,
        64,
        "Apache-2.0",
    ),
    "moco_resnet50": Entry(
        "ResNet-50, MoCo v2 on ImageNet, 800 epochs",
        moco_resnet50,
        2048,
        224,
        "CC BY-NC 4.0, no commercial use",
        f"the file {FILE}",
    ),
    "clip_vitb32": Entry(
        "image encoder of CLIP ViT-B/32",
        clip_vitb32,
        512,
        224,
        "see docs/priors.md",
        "a file with its tensors visual.* (docs/priors.md)",
    ),
    "efficientnet_lite0": Entry(
        "EfficientNet-Lite0 with the ImageNet weights of its package (suture[lite])",
        _efficientnet_lite0,
        1280,
        224,
        "Apache-2.0",
    ),
    "checkpoint": Entry(
        "what `suture pretrain` wrote",
        read_prior,
        None,
        None,
        "as --licence said",
        "the folder that it wrote",
    ),
}


@dataclass(frozen=True, config=STRICT)
class PriorSpec:
    """Which prior.

    Attributes:
        name: a name of the registry.
        path: of its file or folder, at every party; none for those that come with a package.
        size: side at which it reads images, in pixels; None for that of its training.
    """

    name: str = "phantoms"
    path: str | None = None
    size: Annotated[int, Field(ge=32, le=1024)] | None = None

    def __post_init__(self) -> None:
        if self.name not in PRIORS:
            raise unknown("prior", self.name, PRIORS)


def load_prior(spec: PriorSpec) -> Prior:
    """The prior of a specification, on the CPU; no global state changes.

    Raises:
        ConfigError: its file is missing or does not fit, its package is not installed, or it takes no path or
            no other size.
    """
    entry = PRIORS[spec.name]
    if entry.needs and spec.path is None:
        raise ConfigError(f"prior.path is missing: {spec.name} is read from {entry.needs}")
    if spec.path is not None and not entry.needs:
        raise ConfigError(f"prior.path: {spec.name} comes with a package; remove it, or set prior.name")
    with seeded(0):  # a network draws its first weights, which are then replaced, from the global generator
        return entry.load(Path(spec.path or "").expanduser(), spec.size)
