"""Features of a frozen network, cached on disk: they are computed once for all runs.

An entry is one file, named by a hash of everything that its numbers depend on, including the pixels: runs
that share a folder share their entries. It is a NumPy array with its SHA-256 behind it, written a batch at a
time and then mapped, so memory does not grow with the number of images.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from suture.core.devices import device_name, moved
from suture.core.errors import DataError
from suture.core.files import only_maker, replacing
from suture.core.plain import named_regular, open_regular
from suture.models.priors.prior import Prior

LOG = logging.getLogger(__name__)

FORMAT = 2
"""The format of an entry; a new number invalidates every older entry."""

BATCH = 64
"""Images at a time; constant, because another number gives other sums."""

PATIENCE = 30.0
"""Seconds between two messages about progress."""

MOST_BYTES = 64 * 2**30
"""Bytes of the entries of a folder: beyond them, those that were not used for longest are deleted."""

SUFFIX = ".features"

Compute = Callable[[slice], Tensor]
"""Returns features of some rows, at most `BATCH`."""


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

    def features(rows: slice) -> Tensor:
        return prior.features(moved(images[rows], device))

    shape = (len(images), prior.width)
    if folder is None:
        return torch.cat([torch.empty(0, prior.width), *in_batches(shape, features, site, "the prior")])
    path = folder / f"prior-{_key(prior, images, device)}{SUFFIX}"
    return cached(path, shape, features, site, "the prior")


def cached(path: Path, shape: tuple[int, ...], features: Compute, site: str, reader: str) -> Tensor:
    """Return features from an entry of a cache; one that is missing or damaged is made and written.

    Args:
        path: of the entry, in a folder that is made if it does not exist.
        shape: of the features, float32 ``[n, d]`` or of several views ``[n, k, d]``.
        site, reader: names of the site, and of what computes the features, for messages.

    Returns:
        the features, memory-mapped. Writing to the tensor does not reach the file.

    Raises:
        DataError: the folder cannot be written (full, read-only); nothing is then left in it.
    """
    if not shape[0]:
        return torch.empty(shape)
    found = _read(path, shape)
    if found is not None:
        return found
    try:
        with only_maker(path):  # another process may be doing just that
            found = _read(path, shape)
            if found is None:
                _write(path, shape, in_batches(shape, features, site, reader))
                _limit(path)
                found = _read(path, shape)
    except OSError as error:
        size = math.prod(shape) * 4 / 1e6
        raise DataError(
            f"site {site!r}: cannot write {size:.0f} MB of features to {path.parent}: {error}; "
            "make room, or set [storage] cache to another folder"
        ) from error
    if found is None:
        raise DataError(f"site {site!r}: {path} changes while it is read; check the disk of {path.parent}")
    return found


def _key(prior: Prior, images: Tensor, device: torch.device | str) -> str:
    """Return a hash of the prior, the pixels, and what changes the last digits of the features."""
    how = [device_name(device), torch.get_num_threads()]
    facts = [FORMAT, prior.digest, list(images.shape), str(images.dtype), _digest(images), how]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().data).hexdigest()


def in_batches(shape: tuple[int, ...], features: Compute, site: str, reader: str) -> Iterator[Tensor]:
    """Yield features of that shape, `BATCH` rows at a time, on the CPU; a log line tells of progress."""
    reported = time.monotonic()
    for start in range(0, shape[0], BATCH):
        rows = slice(start, start + BATCH)
        yield features(rows).cpu()
        if time.monotonic() - reported > PATIENCE:
            reported = time.monotonic()
            done = min(rows.stop, shape[0])
            # A warning, because a plain loop shows nothing below that level, and this may take minutes.
            LOG.warning("site %r: %s has read %d of %d images", site, reader, done, shape[0])


def _read(path: Path, shape: tuple[int, ...]) -> Tensor | None:
    """Return the features of an entry; None where it is missing, truncated or damaged."""
    if not path.is_file():
        return None
    try:
        with named_regular(path) as opened, open_regular(path) as file:
            found = np.load(opened, mmap_mode="c", allow_pickle=False)
            file.seek(-32, os.SEEK_END)
            whole = hashlib.sha256(found.data).digest() == file.read()
        if whole and (found.shape, found.dtype) == (shape, np.float32):
            os.utime(path)
            return torch.from_numpy(found)
    except (ValueError, OSError, EOFError):
        pass
    LOG.warning("cache entry %s is damaged; it is made again", path)
    return None


def _write(path: Path, shape: tuple[int, ...], batches: Iterator[Tensor]) -> None:
    """Write an entry, to a file rather than to memory that is mapped: a full disk is then an error."""
    whole = hashlib.sha256()
    with replacing(path) as temporary, temporary.open("xb") as file:
        temporary.chmod(0o600)
        described = {"descr": "<f4", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, described)
        for batch in batches:
            content = batch.contiguous().numpy().data
            whole.update(content)
            file.write(content)
        file.write(whole.digest())


def _limit(path: Path) -> None:
    """Delete the entries beside this one that were not used for longest, beyond `MOST_BYTES`."""
    others = [one for kind in (SUFFIX, ".safetensors") for one in path.parent.glob(f"*{kind}") if one != path]
    known = {one: one.stat() for one in others}
    kept = path.stat().st_size
    for one, facts in sorted(known.items(), key=lambda pair: pair[1].st_mtime, reverse=True):
        kept += facts.st_size
        if kept > MOST_BYTES:
            LOG.warning("%s is deleted: the cache holds more than %d GB", one, MOST_BYTES / 1e9)
            one.unlink(missing_ok=True)
