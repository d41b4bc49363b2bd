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
from harness import in_turns
from torch import Tensor

from parts.sites import bare_step, random_site
from suture.core.labels import LabelSet
from suture.data.augmentation import Augmentation
from suture.learning.losses import masked_bce
from suture.learning.training import LocalRound, LocalTraining, SiteContext, fit, on_known, predict
from suture.models import ModelSpec

LABELS = LabelSet(tuple("abcdefghijklmn"))
BATCH = 64
_LEAST = {"training": (Target("ratio", "≥", 0.9),), "evaluation": ()}


def finished(work: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """The work until the device is done with it."""

    def whole() -> None:
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return whole


def of_suture(site: SiteContext) -> dict[str, Callable[[], object]]:
    """An epoch, and an evaluation in the batches that a site chooses by itself."""
    local = LocalTraining(lr=1e-4, batch_size=BATCH)
    return {
        "training": lambda: fit(site, on_known(masked_bce), LocalRound(local, "average", 1, 1)),
        "evaluation": lambda: predict(site, site.samples["test"]),
    }


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
    site = partial(random_site, spec, LABELS, images, Augmentation(), device=device)
    own = site()
    own.model.compute_in(torch.bfloat16)
    works = {"suture": of_suture(own), "bare": of_torch(site())}
    found = in_turns(
        repeats,
        {
            f"{who} {work}": partial(finished, do, device)
            for who, pair in works.items()
            for work, do in pair.items()
        },
    )
    speed = {key: times.per(images).clock for key, times in found.items()}
    return [
        Figure(
            "gpu",
            f"{spec.name}, {spec.size} px, {work}",
            "images/s",
            speed[f"suture {work}"],
            "bare PyTorch",
            speed[f"bare {work}"],
            _LEAST[work],
            more=True,
        )
        for work in works["suture"]
    ]


def figures(options: Options) -> list[Figure]:
    """Two rows, and the GPU's memory.

    Raises:
        RuntimeError: torch sees no CUDA device.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no CUDA device here")
    device = torch.device("cuda")
    rows = measured(
        ModelSpec("densenet121", size=224), device, 512 if options.quick else 4096, options.repeats
    )
    peak = (torch.cuda.max_memory_allocated(device) / 1e6,)
    return [*rows, Figure("gpu", "memory at the peak, of all of these", "MB", peak)]
