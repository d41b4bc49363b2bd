"""A site on a GPU against bare PyTorch: an epoch of training, and an evaluation, of DenseNet121 at 224 px.

Both have bf16 and the images as uint8 in the memory of the host, in the same batches. Bare PyTorch has them
pinned beforehand; it copies each batch without waiting and normalises it on the GPU. Neither augments. Times
are by the clock, until the GPU is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from figures import Figure, Options, Target
from torch import Tensor

from parts.backbones import LABELS, beside_bare, of_suture
from parts.sites import bare_step, random_site
from suture.data.batch import Augmentation
from suture.learning.training import SiteContext
from suture.models import ModelSpec

BATCH = 64


def finished(work: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """The work until the device is done with it."""

    def whole() -> None:
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return whole


def of_torch(site: SiteContext) -> dict[str, Callable[[], object]]:
    """The same by hand."""
    model, samples, device = site.model, site.samples["train"], site.device
    away, autocast = device.type == "cuda", partial(torch.autocast, device.type, torch.bfloat16)
    images, y = samples.inputs["image"], samples.y
    if away:
        images, y = images.pin_memory(), y.pin_memory()
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-4)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for part in zip(torch.split(images, BATCH), torch.split(y, BATCH), strict=True):
            image, targets = (tensor.to(device, non_blocking=away) for tensor in part)
            yield site.prepare(image), targets

    def train() -> None:
        model.train()
        for image, targets in batches():
            bare_step(model, optimiser, image, targets, autocast())

    @torch.no_grad()
    def evaluate() -> None:
        model.eval()
        found = []
        for image, _ in batches():
            with autocast():
                found.append(model({"image": image}))
        torch.cat(found).float().cpu()

    return {"training": train, "evaluation": evaluate}


def measured(spec: ModelSpec, device: torch.device, images: int, repeats: int) -> list[Figure]:
    """Images a second of each work."""
    ours, theirs = (random_site(spec, LABELS, images, Augmentation(), device=device) for _ in range(2))
    ours.model.compute_in(torch.bfloat16)
    own, bare = (
        {name: finished(work, device) for name, work in works.items()}
        for works in (of_suture(ours, BATCH), of_torch(theirs))
    )
    least = {"training": (Target("ratio", "≥", 0.9),)}
    return beside_bare("gpu", f"{spec.name}, {spec.size} px", "images/s", images, repeats, own, bare, least)


def figures(options: Options) -> list[Figure]:
    """Two rows, and the GPU's memory.

    Raises:
        RuntimeError: torch sees no CUDA device.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no CUDA device here")
    device, images = torch.device("cuda"), 512 if options.quick else 4096
    rows = measured(ModelSpec("densenet121", size=224), device, images, options.repeats)
    peak = (torch.cuda.max_memory_allocated(device) / 1e6,)
    return [*rows, Figure("gpu", "memory at the peak, of all of these", "MB", peak)]
