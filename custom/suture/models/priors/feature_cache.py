"""Features of a frozen network, cached on disk: each input is read once, by whatever runs share the folder.

An entry is one file: the features of all inputs of a party, named by a hash of them and of everything else
that the numbers depend on. It is a NumPy array with a digest of each input and a SHA-256 behind it, written a
batch at a time and then mapped, so memory does not grow with the number of inputs. A new entry takes what it
can from others of the same network: other splits of the same images, or a table that has grown. Features tell
of patients: only the owner of the files may read them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from suture.core.devices import device_name, moved
from suture.core.errors import DataError
from suture.core.files import make_folder, only_maker, replacing
from suture.core.plain import named_regular, open_regular
from suture.models.priors.prior import Prior

LOG = logging.getLogger(__name__)

_CACHE_FORMAT = 3
"""The format of an entry; a new number invalidates every older entry."""

BATCH = 64
"""Inputs at a time; constant, because another number gives other sums. With it features do not depend on what
else is in a batch (a test compares bytes); a party of fewer inputs shares nothing."""

PATIENCE = 30.0
"""Seconds between two messages about progress."""

MOST_BYTES = 16 * 2**30
"""Bytes of the entries of a folder: beyond them, those that were not used for longest are deleted."""

_SUFFIX = ".features"

_Compute = Callable[[Tensor], Tensor]
"""Returns features of the inputs of these numbers, at most `BATCH`."""

_DIGEST = 16
"""Bytes of an input's digest."""


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

    def features(rows: Tensor) -> Tensor:
        return prior.features(moved(images[rows], device))

    shape = (len(images), prior.width)
    how = key("prior", _CACHE_FORMAT, prior.digest, device_name(device), torch.get_num_threads())
    return cached(folder, how, digests({"image": images}), shape, features, site, "the prior")


def cached(
    folder: Path | None,
    how: str,
    of: np.ndarray,
    shape: tuple[int, ...],
    features: _Compute,
    site: str,
    reader: str,
) -> Tensor:
    """Return features from an entry of a cache; one that is missing or damaged is made and written.

    Args:
        folder: made if it does not exist; None caches nothing.
        how: a `key` of all that the numbers depend on but the inputs.
        of: the `digests` of the inputs.
        shape: of the features, float32 ``[n, d]`` or of several views ``[n, k, d]``.
        site, reader: names of the site, and of what computes the features, for messages.

    Returns:
        the features, memory-mapped from a folder. Writing to the tensor does not reach the file.

    Raises:
        DataError: the folder cannot be written (full, read-only); nothing is then left in it.
    """
    if not shape[0]:
        return torch.empty(shape)
    if folder is None:
        return torch.cat([*in_batches(shape[0], torch.arange(shape[0]), features, site, reader)])
    path = folder / f"{how}-{hashlib.sha256(of.data).hexdigest()[:16]}{_SUFFIX}"
    try:
        make_folder(folder.parent, private=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)
        if (found := _read(path, shape, of)) is not None:
            return found
        with only_maker(path):  # another process may be doing just that
            found = _read(path, shape, of)
            if found is None:
                _write(path, shape, of, _with_others(path, shape, of, features, site, reader))
                _limit(path)
                found = _read(path, shape, of)
    except OSError as error:
        size = math.prod(shape) * 4 / 1e6
        raise DataError(
            f"site {site!r}: cannot write {size:.0f} MB of features to {path.parent}: {error}; "
            "make room, as with `suture clean`, or set [storage] cache to another folder"
        ) from error
    if found is None:
        raise DataError(f"site {site!r}: {path} changes while it is read; check the disk of {path.parent}")
    return found


def key(kind: str, *facts: object) -> str:
    """Return the beginning of the names of entries whose numbers depend on these facts."""
    return f"{kind}-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}"


def digests(inputs: Mapping[str, Tensor]) -> np.ndarray:
    """Return a digest of each input: uint8 ``[n, 16]``.

    Args:
        inputs: tensors ``[n, ...]`` on the CPU, perhaps memory-mapped.
    """
    tensors = [(f"{name} {t.dtype} {tuple(t.shape[1:])} ".encode(), t) for name, t in sorted(inputs.items())]
    rows = range(len(tensors[0][1]))
    return digests_of(b"".join(form + t[row].numpy().tobytes() for form, t in tensors) for row in rows)


def digests_of(contents: Iterable[bytes]) -> np.ndarray:
    """Return a digest of each content: uint8 ``[n, 16]``."""
    found = b"".join(hashlib.blake2b(content, digest_size=_DIGEST).digest() for content in contents)
    return np.frombuffer(found, np.uint8).reshape(-1, _DIGEST)


def in_batches(n: int, wanted: Tensor, features: _Compute, site: str, reader: str) -> Iterator[Tensor]:
    """Yield the features of some of n inputs, `BATCH` at a time, on the CPU; a log line tells of progress."""
    reported = time.monotonic()
    for done, rows in enumerate(torch.split(wanted, BATCH)):
        filled = min(n, BATCH) - len(rows)  # the last batch has the size of the others
        yield features(torch.cat([rows, torch.arange(filled)]))[: len(rows)].cpu()
        if time.monotonic() - reported > PATIENCE:
            reported = time.monotonic()
            read = done * BATCH + len(rows)
            # A warning, because a plain loop shows nothing below that level, and this may take minutes.
            LOG.warning("site %r: %s has read %d of %d images", site, reader, read, len(wanted))


def _with_others(
    path: Path, shape: tuple[int, ...], of: np.ndarray, features: _Compute, site: str, reader: str
) -> Iterator[np.ndarray]:
    """Yield an entry's features, `BATCH` at a time: those that another entry has are not computed."""
    n = shape[0]
    entry, row, others = np.full(n, -1), np.zeros(n, int), list[np.ndarray]()
    group = path.name.removesuffix(_SUFFIX).rpartition("-")[0]
    for other in sorted(path.parent.glob(f"{group}-*{_SUFFIX}")) if n >= BATCH else ():
        opened = None if other == path or (entry >= 0).all() else _opened(other)
        if opened is None or len(opened[0]) < BATCH or opened[0].shape[1:] != shape[1:]:
            continue
        where = {digest.tobytes(): k for k, digest in enumerate(opened[1])}
        for k in np.flatnonzero(entry < 0):
            if (at := where.get(of[k].tobytes())) is not None:
                entry[k], row[k] = len(others), at
        others.append(opened[0])
    lacking = torch.from_numpy(np.flatnonzero(entry < 0))
    computed = (one for batch in in_batches(n, lacking, features, site, reader) for one in batch.numpy())
    for start in range(0, n, BATCH):
        batch = slice(start, start + BATCH)
        yield np.stack(
            [
                next(computed) if source < 0 else others[source][at]
                for source, at in zip(entry[batch], row[batch], strict=True)
            ]
        )


def _opened(path: Path) -> tuple[np.ndarray, np.ndarray] | None:
    """Return an entry's features, mapped, and the digests of its inputs; None where it is damaged."""
    try:
        with named_regular(path, own=True) as opened, open_regular(path, own=True) as file:
            found = np.load(opened, mmap_mode="c", allow_pickle=False)
            file.seek(-(len(found) * _DIGEST + 32), os.SEEK_END)
            of = file.read(len(found) * _DIGEST)
            whole = hashlib.sha256(found.data)
            whole.update(of)
            if whole.digest() == file.read() and found.dtype == np.float32:
                return found, np.frombuffer(of, np.uint8).reshape(-1, _DIGEST)
    except (ValueError, OSError, EOFError):
        pass
    LOG.warning("cache entry %s is damaged; it is made again", path)
    return None


def _read(path: Path, shape: tuple[int, ...], of: np.ndarray) -> Tensor | None:
    """Return the features of an entry; None where it is missing, damaged, or of other inputs."""
    if not path.is_file():
        return None
    opened = _opened(path)
    if opened is None:
        return None
    if opened[0].shape != shape or not np.array_equal(opened[1], of):
        LOG.warning("cache entry %s is damaged; it is made again", path)
        return None
    os.utime(path)
    return torch.from_numpy(opened[0])


def _write(path: Path, shape: tuple[int, ...], of: np.ndarray, batches: Iterator[np.ndarray]) -> None:
    """Write an entry, to a file rather than to memory that is mapped: a full disk is then an error."""
    whole = hashlib.sha256()
    with replacing(path, private=True) as temporary, temporary.open("xb") as file:
        described = {"descr": "<f4", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, described)
        for content in itertools.chain(batches, [of]):
            whole.update(content.data)
            file.write(content.data)
        file.write(whole.digest())


def _limit(path: Path) -> None:
    """Delete the entries beside this one that were not used for longest, beyond `MOST_BYTES`."""
    known = {one: one.stat() for one in path.parent.glob(f"*{_SUFFIX}") if one != path}
    kept = path.stat().st_size
    for one, facts in sorted(known.items(), key=lambda pair: pair[1].st_mtime, reverse=True):
        kept += facts.st_size
        if kept > MOST_BYTES:
            LOG.warning("%s is deleted: the cache holds more than %d GB", one, MOST_BYTES / 1e9)
            one.unlink(missing_ok=True)
