"""A prior's features of a site's images, cached on disk: they are computed once for all runs.

An entry is one file, named by a hash of everything that its numbers depend on, including the pixels: runs
that share a folder share their entries.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from suture.core.devices import moved
from suture.core.errors import DataError, SutureError
from suture.core.files import only_maker
from suture.models.priors.prior import Prior
from suture.protocol.packing import Packed, load, save

LOG = logging.getLogger(__name__)

FORMAT = 1
"""The format of an entry; a new number invalidates every older entry."""

BATCH = 64
"""Images at a time; constant, because another number gives other sums."""

PATIENCE = 30.0
"""Seconds between two messages about progress."""


def cached_features(
    prior: Prior, images: Tensor, folder: Path | None, device: torch.device | str, site: str
) -> Tensor:
    """Return the prior's features of images without augmentation, from the cache where it has them.

    Args:
        prior: on `device`.
        images: uint8 ``[n, 1 or 3, h, w]``, perhaps memory-mapped.
        folder: of the cache, made if it does not exist; None caches nothing.
        site: name of the site, for messages.

    Returns:
        float32 ``[n, prior.width]``, on the CPU.

    Raises:
        DataError: the folder cannot be written (full, read-only); nothing is then left in it.
    """
    if folder is None:
        return _features(prior, images, device, site)
    path = folder / f"prior-{_key(prior, images, device)}.safetensors"
    return cached(path, (len(images), prior.width), lambda: _features(prior, images, device, site), site)


def cached(path: Path, shape: tuple[int, ...], make: Callable[[], Tensor], site: str) -> Tensor:
    """Return features from an entry of a cache; one that is missing or damaged is made and written.

    Args:
        path: of the entry, in a folder that is made if it does not exist.
        shape: of the features, float32 ``[n, d]`` or of several views ``[n, k, d]``.
        site: name of the site, for messages.

    Raises:
        DataError: the folder cannot be written (full, read-only); nothing is then left in it.
    """
    found = _read(path, shape)
    return _made(path, shape, make, site) if found is None else found


def _key(prior: Prior, images: Tensor, device: torch.device | str) -> str:
    """Return a hash of the prior, the pixels, and what changes the last digits of the features."""
    how = [torch.device(device).type, torch.get_num_threads()]
    facts = [FORMAT, prior.digest, list(images.shape), str(images.dtype), _digest(images), how]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().data).hexdigest()


def _features(prior: Prior, images: Tensor, device: torch.device | str, site: str) -> Tensor:
    def features(rows: slice) -> Tensor:
        return prior.features(moved(images[rows], device))

    return in_batches((len(images), prior.width), features, site, "the prior")


def in_batches(shape: tuple[int, ...], features: Callable[[slice], Tensor], site: str, reader: str) -> Tensor:
    """Return features of that shape, `BATCH` rows at a time, on the CPU; a log line tells of progress."""
    out = torch.empty(shape)
    reported = time.monotonic()
    for start in range(0, len(out), BATCH):
        rows = slice(start, start + BATCH)
        out[rows] = features(rows).cpu()
        if time.monotonic() - reported > PATIENCE:
            reported = time.monotonic()
            done = min(rows.stop, len(out))
            # A warning, because a plain loop shows nothing below that level, and this may take minutes.
            LOG.warning("site %r: %s has read %d of %d images", site, reader, done, len(out))
    return out


def _read(path: Path, shape: tuple[int, ...]) -> Tensor | None:
    """Return the features of an entry; None where it is missing, truncated or damaged."""
    if not path.is_file():
        return None
    try:
        entry = load(path)
        found = entry.tensors["features"]
        if found.shape == shape:
            return found
    except (SutureError, KeyError, OSError):
        pass
    LOG.warning("cache entry %s is damaged; it is made again", path)
    return None


def _made(path: Path, shape: tuple[int, ...], make: Callable[[], Tensor], site: str) -> Tensor:
    """Compute the features and write the entry, unless another process does just that: then wait for it."""
    try:
        with only_maker(path):
            found = _read(path, shape)
            if found is None:
                found = make()
                save(path, Packed({"features": found}, {}))
            return found
    except OSError as error:
        size = math.prod(shape) * 4 / 1e6
        raise DataError(
            f"site {site!r}: cannot write {size:.0f} MB of features to {path.parent}: {error}; "
            "make room, or set [storage] cache to another folder"
        ) from error
