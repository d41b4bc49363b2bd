"""What a site remembers of each training image and class between rounds, at the site alone."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from suture.core.errors import ConfigError
from suture.learning.training import SiteContext
from suture.methods.base import KEPT, ROWS

_OF = "images"
"""Name of a checksum of the images that it remembers something of."""

_NONE = torch.tensor(-1)
"""In its place where a state has none; no CRC-32 is negative."""


def remember(site: SiteContext, **tensors: Tensor) -> dict[str, Tensor]:
    """Return tensors ``[n, c]`` of the training images as what `Method.train` keeps."""
    kept = {f"{KEPT}{ROWS}{name}": tensor.T.contiguous() for name, tensor in tensors.items()}
    return kept | {f"{KEPT}{_OF}": _checksum(site)}


def remembered(site: SiteContext, kept: Mapping[str, Tensor], name: str) -> Tensor | None:
    """Return a tensor ``[n, c]`` from `LocalRound.kept`, zeros for a new class; None before there is one.

    Raises:
        ConfigError: it is of other images than the site has now.
    """
    if (rows := kept.get(f"{ROWS}{name}")) is None:
        return None
    if rows.shape[1] != len(site.samples["train"]) or not torch.equal(kept.get(_OF, _NONE), _checksum(site)):
        raise ConfigError(
            f"{site.name} had {rows.shape[1]} training images in earlier rounds and now has "
            f"{len(site.samples['train'])}, or others, or in another order; restore the images and the "
            "table, or begin a new experiment"
        )
    return rows.T


def _checksum(site: SiteContext) -> Tensor:
    """A number that changes with the names of the training images, and with their order."""
    return torch.tensor(zlib.crc32("\0".join(site.samples["train"].names).encode()))
