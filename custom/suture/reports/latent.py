"""What a model's last features look like for images of different sources (Kulkarni et al. 2024, Fig. 4b)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from suture.core.errors import DataError
from suture.core.seeds import generator_for
from suture.data.config import SiteConfig
from suture.data.table import Split
from suture.learning.samples import load_samples
from suture.models.saved import load_model, load_spec
from suture.reports.plots import embed, plot_latent

_BATCH = 256


@torch.no_grad()
def latent(
    model_folder: Path,
    configs: Mapping[str, SiteConfig],
    split: Split,
    images: int = 500,
    seed: int = 1,
    device: str = "cpu",
) -> bytes:
    """The features of some images of each source in two dimensions by t-SNE, as SVG.

    Args:
        configs: the data of each source by its name.
        images: at most so many of each, drawn at random.

    Raises:
        ConfigError: there is no model.
        DataError: the data cannot be read, or a source has no image in the split.
    """
    model, prepare = load_model(model_folder)
    spec = load_spec(model_folder)
    model.to(device)
    features: list[Tensor] = []
    sources: list[str] = []
    for name, config in configs.items():
        _, samples = load_samples(config, spec, name, only=split)
        part = samples[split]
        if not len(part):
            raise DataError(f"{name}: {config.data.table} has no {split} images; choose another --split")
        order = torch.randperm(len(part), generator=generator_for(seed, "latent", name))[:images]
        for start in range(0, len(order), _BATCH):
            rows = order[start : start + _BATCH]
            pixels = prepare(part.batch(rows).inputs["image"].to(device))
            features.append(model.features({"image": pixels}).cpu())
        sources += [name] * len(order)
    return plot_latent(embed(torch.cat(features).numpy(), seed), sources)
