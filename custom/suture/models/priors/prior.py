"""A frozen network whose features of an image are the same for every party."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from suture.core.errors import ConfigError
from suture.models.classifier import Classifier, Preprocessing, by_channel

LUMA = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in a gray image (ITU-R BT.601, as in Pillow)."""


class PriorWidth(ConfigError):
    """A site's prior and the model's projection have different widths."""


@dataclasses.dataclass(frozen=True, eq=False)
class Prior:
    """A network from images to features that is never trained.

    It is not a module, so its tensors are never among those of a model that holds it, and never sent.

    Attributes:
        network: images ``[n, channels, size, size]`` to ``[n, width]``.
        width: number of features.
        preprocessing: of the network's pretraining.
        digest: of the tensors and the preprocessing; equal digests mean equal priors.
        description: as text.
    """

    network: nn.Module
    width: int
    preprocessing: Preprocessing
    digest: str
    description: str

    @torch.no_grad()  # not inference mode: a loss against these features keeps them for its backward pass
    def features(self, images: Tensor, half: torch.dtype | None = None) -> Tensor:
        """Return float32 features ``[n, width]``.

        Args:
            half: short type in which the network computes; None for single precision.
            images: ``[n, 1 or 3, h, w]`` of any size, uint8 or (after augmentation, say) float in [0, 1].
                Gray ones are repeated where the network takes three channels, others made gray where it
                takes one.
        """
        self.network.eval()  # a model that holds it may have been put into training mode
        x = images.float() if images.dtype == torch.uint8 else images.float() * 255
        if x.shape[1] > self.preprocessing.channels:
            x = (x * by_channel(LUMA, x.device)).sum(1, keepdim=True)
        side = (self.preprocessing.size,) * 2
        if x.shape[-2:] != side:
            # Without antialiasing a reduced image would be a sample of its pixels, with all their noise.
            x = F.interpolate(x, side, mode="bilinear", antialias=True)
        x = self.preprocessing(x)
        with torch.autocast(x.device.type, half, enabled=half is not None):
            out: Tensor = self.network(x)
        return out.float()

    def to(self, device: torch.device | str) -> Prior:
        """Return the prior on another device; its network is moved, as modules are."""
        return dataclasses.replace(self, network=self.network.to(device))


def check_width(prior: Prior, model: Classifier, site: str) -> None:
    """Check that a prior is as wide as the model's projection.

    Raises:
        PriorWidth: naming the site and the remedy.
    """
    if model.projected != prior.width:
        raise PriorWidth(
            f"{site}: the prior {prior.description!r} has {prior.width} features, but the model has "
            f"{model.projected}; set model.projection={prior.width}"
        )


def freeze(kind: str, network: nn.Module, width: int, preprocessing: Preprocessing, text: str) -> Prior:
    """Return a network as a prior: in eval mode, without gradients of its parameters.

    Args:
        kind: the architecture.
    """
    network.eval().requires_grad_(False)
    return Prior(network, width, preprocessing, digest_of(kind, network.state_dict(), preprocessing), text)


def digest_of(kind: str, tensors: Mapping[str, Tensor], preprocessing: Preprocessing) -> str:
    """Return the SHA-256 of kind, preprocessing, and names, types, shapes and bytes of the sorted tensors."""
    facts = [kind, dataclasses.asdict(preprocessing)]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\0{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        # As plain bytes: numpy does not know every type of torch.
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
