"""What several parts have: a small hospital on disk, a site of random images, a step in bare PyTorch."""

from __future__ import annotations

import csv
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from suture.core.labels import LabelSet
from suture.data.augmentation import Augmentation
from suture.data.batch import Samples
from suture.data.table import Split
from suture.learning.training import SiteContext
from suture.models import ModelSpec, build

LABELS = ("Edema", "Mass")
"""Of the small hospital."""


def write_site(folder: Path, state: Path) -> None:
    """A hospital of four images: two to train on, one to validate, one to test."""
    (folder / "images").mkdir(parents=True)
    rows = [["image", "patient", "split", *LABELS]]
    for i, split in enumerate(("train", "train", "validation", "test")):
        Image.fromarray(np.full((16, 16), 60 * i, dtype=np.uint8)).save(folder / "images" / f"{i}.png")
        rows.append([f"{i}.png", f"p{i}", split, str(i % 2), str((i + 1) % 2)])
    with (folder / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    (folder / "suture.toml").write_text(
        '[data]\ndataset = "hospital"\nroot = "images"\ntable = "labels.csv"\n'
        f'[privacy]\nmin_count = 0\nmin_loss = 0\n[storage]\nstate = "{state}"\n'
    )


def random_site(
    spec: ModelSpec,
    labels: LabelSet,
    images: int,
    augmentation: Augmentation,
    known: int | None = None,
    device: torch.device | str = "cpu",
    **own: Any,
) -> SiteContext:
    """A site of random images of one class each, to train on and to test; it knows the first classes."""
    g = torch.Generator().manual_seed(0)
    shape = (images, 3 if spec.color else 1, spec.size, spec.size)
    image = torch.randint(0, 256, shape, generator=g, dtype=torch.uint8)
    y = nn.functional.one_hot(torch.randint(0, len(labels), (images,), generator=g), len(labels)).float()
    y[:, known or len(labels) :] = torch.nan
    samples = Samples({"image": image}, y, tuple(map(str, range(images))))
    splits: dict[Split, Samples] = {"train": samples, "test": samples}
    where, model = torch.device(device), build(spec, labels, 1, pretrained=False).to(device)
    return SiteContext("site", model, splits, spec.preprocessing, augmentation, where, **own)


def bare_step(
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    image: Tensor,
    y: Tensor,
    precision: AbstractContextManager[Any] | None = None,
) -> None:
    """A step of training as one would write it by hand."""
    with precision or nullcontext():
        loss = nn.functional.binary_cross_entropy_with_logits(model({"image": image}), y)
    optimiser.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    optimiser.step()
