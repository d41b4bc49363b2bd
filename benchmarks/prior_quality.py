"""What a prior's features say of images that it has not seen: a linear probe, and the nearest neighbour.

python benchmarks/prior_quality.py SITES --prior efficientnet_lite0@96 checkpoint:DIR ...

SITES is a folder of `suture data simulate`. Both classifiers get the features of the sites' training images;
the probe's penalty is chosen on the server's validation images, and figures are balanced accuracies on its
test images; the probe's on validation images is there to choose a prior by. `untrained:BACKBONE` is a network
before any training, the mean of three seeds.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from harness import command, show
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

from suture.core.runtime import seed_torch
from suture.data.config import load_site_config
from suture.learning.samples import load_samples, pool
from suture.models import MODELS, ModelSpec
from suture.models.priors import Prior, PriorSpec, cached_features, freeze, load_prior

PENALTIES = (0.001, 0.01, 0.1, 1.0)
SEEDS = (1, 2, 3)
DRAWN = ("untrained:resnet_small",)

Part = tuple[Tensor, NDArray[np.intp]]
"""Images and the class of each."""


def parts_of(folder: Path, size: int, most: int) -> dict[str, Part]:
    """The sites' training images, and what the server holds, at most some of each class, drawn at random."""
    configs = {p.parent.name: load_site_config(p) for p in sorted(folder.glob("*/suture.toml"))}
    read = ModelSpec("resnet_small", size)
    found = {name: load_samples(config, read, name) for name, config in configs.items()}
    labels = {labels.names for labels, _ in found.values()}
    if len(labels) != 1:
        raise SystemExit(f"{folder}: the sites know different classes; a probe needs the same ones")
    server = found.pop("server")[1]
    whole = pool(found)[1]
    # `pooled` sorts the classes.
    order = torch.tensor(np.argsort(np.array(labels.pop())))
    parts = {"train": whole["train"], "validation": server["validation"], "test": server["test"]}
    out = {}
    for name, part in parts.items():
        classes = (part.y if name == "train" else part.y[:, order]).argmax(1).numpy()
        mixed = np.random.default_rng(0).permutation(len(classes))
        kept = np.concatenate([mixed[classes[mixed] == k][:most] for k in range(len(order))])
        out[name] = part.inputs["image"][torch.from_numpy(kept)], classes[kept]
    return out


def untrained(backbone: str, size: int, images: Tensor, seed: int) -> Prior:
    """A network as it begins, batch norm's statistics taken from some images."""
    model = ModelSpec(backbone, size, color=images.shape[1] == 3)
    spec = model.preprocessing
    with seed_torch(seed):
        network, width = MODELS[backbone].build(model, None)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None  # the mean over all batches
    with torch.no_grad():
        drawn = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))[:1024]
        for batch in torch.split(images[drawn], 128):
            network.train()(spec(batch))
    return freeze(backbone, network, width, spec, f"{backbone} before training")


def figures(prior: Prior, parts: dict[str, Part], cache: Path | None) -> tuple[float, ...]:
    """Balanced accuracy of the probe (also on validation images) and of the nearest neighbour; the features'
    milliseconds of an image."""
    began = time.process_time()
    z = {name: cached_features(prior, images, cache, "cpu", name) for name, (images, _) in parts.items()}
    spent = 1000 * (time.process_time() - began) / sum(map(len, z.values()))
    y = {name: classes for name, (_, classes) in parts.items()}
    scaler = StandardScaler().fit(z["train"].numpy())
    x = {name: scaler.transform(features.numpy()) for name, features in z.items()}
    probes = [LogisticRegression(C=c, class_weight="balanced", max_iter=300) for c in PENALTIES]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        for probe in probes:
            probe.fit(x["train"], y["train"])
    reached = [balanced_accuracy_score(y["validation"], p.predict(x["validation"])) for p in probes]
    best = probes[int(np.argmax(reached))]
    near = F.normalize(z["test"], dim=1) @ F.normalize(z["train"], dim=1).T
    guess = y["train"][near.argmax(dim=1).numpy()]
    return (
        max(reached),
        balanced_accuracy_score(y["test"], best.predict(x["test"])),
        balanced_accuracy_score(y["test"], guess),
        spent,
    )


def priors_of(word: str, size: int, images: Tensor) -> list[Prior]:
    """The priors of a word NAME[:PATH][@SIZE]."""
    word, _, side = word.partition("@")
    name, _, path = word.partition(":")
    if name == "untrained":
        return [untrained(path, int(side or size), images, seed) for seed in SEEDS]
    return [load_prior(PriorSpec(name, path or None, int(side) if side else None))]


def main(
    sites: Path, prior: tuple[str, ...] = DRAWN, size: int = 64, most: int = 250, cache: Path | None = None
) -> None:
    """Measures each prior in turn.

    Args:
        size: of the images, in pixels.
        most: images of a class in each part.
        cache: folder that keeps the features.
    """
    torch.set_num_threads(1)
    parts = parts_of(sites, size, most)

    def rows() -> Iterator[list[object]]:
        for word in prior:
            priors = priors_of(word, size, parts["train"][0])
            found = [figures(one, parts, cache) for one in priors]
            *shares, spent = (statistics.mean(values) for values in zip(*found, strict=True))
            side = priors[0].preprocessing.size
            yield [word, side, *(f"{share:.3f}" for share in shares), f"{spent:.1f}"]

    head = ("prior", "reads, px", "probe, validation", "linear probe", "nearest neighbour", "CPU ms an image")
    show(head, rows(), f"{ {name: len(classes) for name, (_, classes) in parts.items()} }")


if __name__ == "__main__":
    command(main, most=20)
