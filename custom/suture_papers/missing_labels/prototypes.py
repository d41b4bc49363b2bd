"""Prototypes: a class as the mean features of images without it and with it; and how sure a model is of it.

Sun et al., FedMLP, MICCAI 2024; the formulas stand in `fedmlp.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from suture.data.batch import Batch
from suture.learning.training import SiteContext, evaluation_batch, ready_inputs
from suture.methods.averaging import WeightedMean, own_rows
from suture.models.classifier import Layout
from suture.protocol.egress import CLASSES, NUM_SAMPLES, SCALE_OF_MODEL, Channel, Egress, near
from suture.protocol.messages import Labels, Update

PROTOTYPES, DEGREE = "prototypes", "learning_degree"
"""Channels: P ``[c, 2, d]`` and d ``[c]``."""

OF_PROTOTYPES, OF_DEGREE = "prototype_images", "degree_images"
"""Channels up: the images behind P_c0 and P_c1 ``[c, 2]``, and behind d_c ``[c]``."""

_SURE = (0.3, 0.7)
"""Probabilities below and above which an image counts for d."""

WHY = {
    PROTOTYPES: (
        "mean features of the site's images without and with each of its classes, by which other sites tag "
        "their images. A mean over few images reveals their features"
    ),
    DEGREE: "for each class that the site does not annotate, the share of images of which the model is sure",
    OF_PROTOTYPES: (
        "number of images of each prototype, its weight. Below `min_count` images with a class, or without "
        "it, counts and prototypes of the class are 0"
    ),
    OF_DEGREE: "the number of training images for each class that the site does not annotate, likewise",
}


def declare(egress: Egress, layout: Layout) -> Egress:
    """The declaration with what a site sends of prototypes, and P and d, which the server keeps."""
    means, each = (CLASSES, 2, layout.features), (CLASSES,)
    up = (
        Channel(PROTOTYPES, "up", means, range=SCALE_OF_MODEL, rows="own", why=WHY[PROTOTYPES]),
        Channel(DEGREE, "up", each, range=(0.0, 1.0), rows="others", why=WHY[DEGREE]),
        Channel(OF_PROTOTYPES, "up", (CLASSES, 2), range=NUM_SAMPLES, rows="own", why=WHY[OF_PROTOTYPES]),
        Channel(OF_DEGREE, "up", each, range=NUM_SAMPLES, rows="others", why=WHY[OF_DEGREE]),
    )
    down = (Channel(PROTOTYPES, "down", means), Channel(DEGREE, "down", each))
    return replace(egress, channels=(*egress.channels, *up, *down))


def nothing(site: SiteContext) -> dict[str, Tensor]:
    """What a site sends of no images."""
    classes, width = len(site.model.labels), site.model.head.in_features
    return {
        PROTOTYPES: torch.zeros(classes, 2, width),
        DEGREE: torch.zeros(classes),
        OF_PROTOTYPES: torch.zeros(classes, 2),
        OF_DEGREE: torch.zeros(classes),
    }


@torch.no_grad()
def measure(site: SiteContext) -> dict[str, Tensor]:
    """The prototypes of the site's labels and the learning degree of all other classes, with their counts.

    Below `SiteContext.min_count` images with a class, or without it, it says nothing of the class: where the
    labels are complete, either number follows from the other.
    """
    n, classes = len(site.samples["train"]), len(site.model.labels)
    sums = nothing(site)[PROTOTYPES].double().to(site.device)  # read once, after the last batch
    counts, sure = sums.new_zeros(classes, 2), sums.new_zeros(classes)
    for batch, f in features(site):
        of = torch.stack([batch.known & (batch.y == y) for y in (0, 1)], dim=2).double()
        sums += torch.einsum("ncy,nd->cyd", of, f.double())
        counts += of.sum(dim=0)
        p = torch.sigmoid(site.model.head(f))
        sure += ((p < _SURE[0]) | (p > _SURE[1])).sum(dim=0)
    sums, counts, sure = sums.cpu(), counts.float().cpu(), sure.float().cpu()
    own, step = own_rows(site).bool(), site.round_counts
    told = (own & (counts.amin(dim=1) >= site.min_count)).unsqueeze(1)
    images = torch.where(told, near(counts, step).clamp(max=n), 0.0)
    others = torch.where(own | torch.tensor(n < site.min_count), 0.0, float(n))
    means = torch.where(images.unsqueeze(2) > 0, sums / counts.clamp(min=1).unsqueeze(2), 0.0)
    return {
        PROTOTYPES: means.float(),
        DEGREE: torch.where(others > 0, sure / n, 0.0),
        OF_PROTOTYPES: images,
        OF_DEGREE: others,
    }


@torch.no_grad()
def features(site: SiteContext) -> Iterator[tuple[Batch, Tensor]]:
    """Batches of the training images as they are, with their features ``[n, d]`` in eval mode."""
    site.model.eval()
    train = site.samples["train"]
    for batch in train.batches(site.batch_size or evaluation_batch(train.inputs, site.device)):
        ready = ready_inputs(site, batch)
        yield ready, site.model.features(ready.inputs)


def similarity(site: SiteContext, prototypes: Tensor) -> Tensor:
    """s = cos(f, P_c0) - cos(f, P_c1) of each training image, ``[n, c]``."""
    absent, present = F.normalize(prototypes, dim=2).unbind(dim=1)
    return along(site, absent - present)


def along(site: SiteContext, directions: Tensor) -> Tensor:
    """f / |f| . v_c of each training image, ``[n, c]``, on the CPU; the directions are ``[c, d]``."""
    v = directions.to(site.device).T
    return torch.cat([F.normalize(f, dim=1) @ v.to(f) for _, f in features(site)]).cpu()


class Merged:
    """The means over sites of P_c0, P_c1 and d_c, each by the images behind it, one update at a time.

    Args:
        previous: what no image is behind stays as it was.
    """

    def __init__(self, labels: Labels, previous: Mapping[str, Tensor]) -> None:
        self._means = [WeightedMean(labels, {}, part) for part in _parts(previous)]

    def add(self, update: Update) -> None:
        """Add what one site sent."""
        sent = update.channels
        images = (*sent[OF_PROTOTYPES].unbind(dim=1), sent[OF_DEGREE])
        for mean, part, n in zip(self._means, _parts(sent), images, strict=True):
            mean.add_rows(update.labels, part, n)

    def tensors(self) -> dict[str, Tensor]:
        """P and d."""
        absent, present, degree = (mean.head()[""] for mean in self._means)
        return {PROTOTYPES: torch.stack([absent, present], dim=1), DEGREE: degree}


def _parts(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """P_c0, P_c1 and d_c: what has a number of images of its own, as rows of classes."""
    return [{"": part} for part in (*tensors[PROTOTYPES].unbind(dim=1), tensors[DEGREE])]
