"""What a site remembers of each training image and class between rounds, at the site alone."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from suture.core.errors import ConfigError
from suture.learning.training import SiteContext
from suture.protocol.egress import CLASSES, VARIABLE, Channel

_OF = "images"
"""Name of a checksum of the images that it remembers something of."""


def memory(**dtypes: str) -> tuple[Channel, ...]:
    """Declare tensors of each training image and class, of the given types, which `remember` keeps."""
    of_images = (Channel(name, "site", (CLASSES, VARIABLE), dtype) for name, dtype in dtypes.items())
    return (*of_images, Channel(_OF, "site", (), "torch.int64"))


def remember(site: SiteContext, **tensors: Tensor) -> dict[str, Tensor]:
    """Return tensors ``[n, c]`` of the training images as what `Method.train` keeps."""
    kept = {name: tensor.T.contiguous() for name, tensor in tensors.items()}
    return kept | {_OF: _checksum(site)}


def recall(site: SiteContext, kept: Mapping[str, Tensor], name: str) -> Tensor | None:
    """Return a tensor ``[n, c]`` from `LocalRound.kept`, zeros for a new class; None before there is one.

    Raises:
        ConfigError: it is of other images than the site has now.
    """
    if (rows := kept.get(name)) is None:
        return None
    if rows.shape[1] != len(site.samples["train"]) or not torch.equal(kept[_OF], _checksum(site)):
        raise ConfigError(
            f"{site.name} had {rows.shape[1]} training images in earlier rounds and now has "
            f"{len(site.samples['train'])}, or others, or in another order. Restore the images and the "
            "table, or begin a new experiment"
        )
    return rows.T


def _checksum(site: SiteContext) -> Tensor:
    """A number that changes with the names of the training images, and with their order."""
    return torch.tensor(zlib.crc32("\0".join(site.samples["train"].names).encode()))
