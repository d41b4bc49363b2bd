"""A site of a few images of noise, outside of a federation."""

from __future__ import annotations

from typing import Any

import torch

from suture.core.labels import LabelSet
from suture.data.batch import Augmentation, Samples
from suture.learning.training import SiteContext
from suture.models import ModelSpec, build

TINY = ModelSpec("cnn", size=16)
LABELS = LabelSet(("Edema", "Mass"))


def images_of(n: int, side: int = 16, channels: int = 1) -> torch.Tensor:
    """Images of noise, the same ones each time."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (n, channels, side, side), generator=generator, dtype=torch.uint8)


def samples_of(n: int, side: int = 16) -> Samples:
    """Images of two classes, each of a patient of its own."""
    y = torch.randint(0, 2, (n, 2), generator=torch.Generator().manual_seed(n)).float()
    return Samples({"image": images_of(n, side)}, y, tuple(map(str, range(n))))


def small_site(
    n: int = 9, spec: ModelSpec = TINY, view: Augmentation | None = None, **more: Any
) -> SiteContext:
    """The site `a` with so many images to train on."""
    model = build(spec, LABELS, 1, pretrained=False)
    split = {"train": samples_of(n, spec.size)}
    device = torch.device("cpu")
    return SiteContext("a", model, split, spec.preprocessing, view or Augmentation(), device, **more)
