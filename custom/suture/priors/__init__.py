"""The registry of priors: frozen networks that every site has the same copy of, and none trains or sends."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from pydantic.dataclasses import dataclass

from suture.errors import ConfigError, unknown
from suture.messages import STRICT
from suture.models import LITE
from suture.models.classifier import Preprocessing
from suture.models.efficientnet import efficientnet_lite0
from suture.priors.clip import clip_vitb32
from suture.priors.moco import FILE, moco_resnet50
from suture.priors.prior import Prior, digest_of, freeze
from suture.priors.saved import read_prior
from suture.seeds import seeded

__all__ = ["PRIORS", "Prior", "PriorSpec", "digest_of", "load_prior"]


@dataclasses.dataclass(frozen=True)
class Entry:
    """An entry of the registry.

    Attributes:
        text: for people.
        load: reads it, from `PriorSpec.path` where it needs one.
        needs: what the path names; None for a prior that comes with a package.
    """

    text: str
    load: Callable[[Path], Prior]
    needs: str | None = None


def _efficientnet_lite0(_path: Path) -> Prior:
    mean, std = LITE
    preprocessing = Preprocessing(224, True, 3, mean, std)
    network, width = efficientnet_lite0(preprocessing.size, "package")
    return freeze(
        "efficientnet_lite0", network, width, preprocessing, "EfficientNet-Lite0, ImageNet with labels"
    )


PRIORS: dict[str, Entry] = {
    "phantoms": Entry(
        "small CNN, MoCo v2 on the demo's phantoms; inside this package",
        lambda _path: read_prior(Path(__file__).parent, "phantoms"),
    ),
    "moco_resnet50": Entry("ResNet-50, MoCo v2 on ImageNet, 800 epochs", moco_resnet50, f"the file {FILE}"),
    "clip_vitb32": Entry(
        "image encoder of CLIP ViT-B/32", clip_vitb32, "a file with its tensors visual.* (docs/priors.md)"
    ),
    "efficientnet_lite0": Entry(
        "EfficientNet-Lite0 with the ImageNet weights of its package (suture[lite])", _efficientnet_lite0
    ),
    "checkpoint": Entry(
        "what `suture pretrain` wrote", lambda path: read_prior(path), "the folder that it wrote"
    ),
}


@dataclass(frozen=True, config=STRICT)
class PriorSpec:
    """Which prior.

    Attributes:
        name: a name of the registry.
        path: of its file or folder, at every party; none for those that come with a package.
    """

    name: str = "phantoms"
    path: str | None = None

    def __post_init__(self) -> None:
        if self.name not in PRIORS:
            raise unknown("prior", self.name, PRIORS)


def load_prior(spec: PriorSpec) -> Prior:
    """The prior of a specification, on the CPU; no global state changes.

    Raises:
        ConfigError: its file is missing or does not fit, its package is not installed, or it takes no path.
    """
    entry = PRIORS[spec.name]
    if entry.needs and spec.path is None:
        raise ConfigError(f"prior.path is missing: {spec.name} is read from {entry.needs}")
    if spec.path is not None and not entry.needs:
        raise ConfigError(f"prior.path: {spec.name} comes with a package; remove it, or set prior.name")
    with seeded(0):  # a network draws its first weights, which are then replaced, from the global generator
        return entry.load(Path(spec.path or "").expanduser())
