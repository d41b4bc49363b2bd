"""What several parts have: a small hospital on disk, a site of random images, a step in bare PyTorch."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from suture.core.labels import LabelSet
from suture.data.batch import Augmentation, Samples
from suture.data.table import Split
from suture.learning.training import SiteContext
from suture.models import ModelSpec, build

LABELS = ("Edema", "Mass")
"""Of the small hospital."""


def hospital(
    folder: Path,
    pixels: NDArray[np.uint8],
    rows: Iterable[Sequence[object]],
    labels: Sequence[str],
    limits: str,
) -> Path:
    """Write a hospital; return its suture.toml.

    Args:
        pixels: of the images, ``[n, h, w]``, each of a patient of its own.
        rows: of each image its split, and its labels.
        limits: what stands in the suture.toml below [privacy].
    """
    (folder / "images").mkdir(parents=True)
    with (folder / "labels.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["image", "patient", "split", *labels])
        for i, (image, row) in enumerate(zip(pixels, rows, strict=True)):
            Image.fromarray(image).save(folder / "images" / f"{i}.png")
            table.writerow([f"{i}.png", f"p{i}", *row])
    return described(folder, limits)


def described(folder: Path, limits: str) -> Path:
    """Write the suture.toml of such a hospital, with what stands below [privacy]."""
    places = f'root = "{folder / "images"}"\ntable = "{folder / "labels.csv"}"\n'
    config = folder / "suture.toml"
    config.write_text(f'[data]\ndataset = "hospital"\n{places}[privacy]\n{limits}')
    return config


def write_site(folder: Path, state: Path | None = None) -> Path:
    """A hospital of four images, two to train on, one to validate, one to test."""
    splits = ("train", "train", "validation", "test")
    pixels = np.stack([np.full((16, 16), 60 * i % 256, np.uint8) for i in range(len(splits))])
    rows = [(split, i % 2, (i + 1) % 2) for i, split in enumerate(splits)]
    limits = f'min_count = 0\nmin_loss = 0\n[storage]\nstate = "{state or folder / "state"}"\n'
    return hospital(folder, pixels, rows, LABELS, limits)


def random_site(
    spec: ModelSpec,
    labels: LabelSet,
    images: int,
) -> SiteContext:
    """A site of random images of one class each, to train on and to test."""
    g = torch.Generator().manual_seed(0)
    shape = (images, 3 if spec.color else 1, spec.size, spec.size)
    image = torch.randint(0, 256, shape, generator=g, dtype=torch.uint8)
    y = nn.functional.one_hot(torch.randint(0, len(labels), (images,), generator=g), len(labels)).float()
    samples = Samples({"image": image}, y, tuple(map(str, range(images))))
    splits: dict[Split, Samples] = {"train": samples, "test": samples}
    cpu, model = torch.device("cpu"), build(spec, labels, 1, pretrained=False)
    return SiteContext("site", model, splits, spec.preprocessing, Augmentation(), cpu)


def travelled(tensors: list[Tensor], sites: int) -> list[Tensor]:
    """The tensors alone of a round: copied to each site and back, and their mean in float64."""
    total = [tensor.double().zero_() for tensor in tensors]
    for _ in range(sites):
        for to, tensor in zip(total, tensors, strict=True):
            to += tensor.clone().clone()
    return [(to / sites).float() for to in total]


def bare_step(model: nn.Module, optimiser: torch.optim.Optimizer, image: Tensor, y: Tensor) -> None:
    """A step of training as one would write it by hand."""
    loss = nn.functional.binary_cross_entropy_with_logits(model({"image": image}), y)
    optimiser.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    optimiser.step()
