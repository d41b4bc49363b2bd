"""Decoded images on disk: an image is decoded once per size, then read through memory mapping.

An entry consists of two files. `<key>.npy` holds the images. `<key>.json` is written last and so marks the
entry as complete: it holds the digest of the other file and the names of the images that could not be read.
Several processes may share a folder: one makes an entry, the others wait for it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from suture.core.abort import check_abort
from suture.core.errors import FULL, DataError
from suture.core.files import make_folder, only_maker, replacing, write_json
from suture.core.plain import named_regular, read_regular, sha256_of
from suture.data.decoding import Pixels, decode_image, resize_pad
from suture.data.images import ImageSource, read_all
from suture.data.table import Table

LOG = logging.getLogger(__name__)

_FORMAT = 3
"""The version of the format of an entry; a new number invalidates every older entry."""


_Fault = tuple[str, str]
"""The name of an image that cannot be read, and why; empty where the cache does not hold that."""


@dataclass(frozen=True)
class _Entry:
    """The files of a table's decoded images.

    Attributes:
        images: the .npy file.
        seal: the .json file.
        channels: 1 or 3.
        size: pixels of a side.
    """

    images: Path
    seal: Path
    channels: int
    size: int

    def shape(self, n: int) -> tuple[int, int, int, int]:
        return (n, self.channels, self.size, self.size)


def decode(
    table: Table, size: int, color: bool, cache_dir: Path, max_faults: float = 0.05, site: str = "this site"
) -> tuple[Tensor, Table]:
    """Return the decoded images of a table, from the cache where it has them.

    Args:
        table: the rows whose images are decoded.
        size: pixels of a side; see `suture.data.decoding.resize_pad`.
        color: three channels rather than one.
        cache_dir: the folder of the cache; it is made if it does not exist.
        max_faults: the share of unreadable images that is tolerated.
        site: name of the site, for messages.

    Returns:
        uint8 [n, channels, size, size], memory-mapped; and the n rows whose images could be read. Writing to
        the tensor does not reach the file.

    Raises:
        DataError: more unreadable images than tolerated, a root that cannot be read, an entry of another
            user, or a cache folder that cannot be written (full, read-only); nothing is then left in it.
    """
    if not len(table):
        raise DataError(f"site {site!r}: the table of {table.root} has no images to decode")
    with ImageSource(table.root, table.follow_links) as source:
        key = [_FORMAT, str(table.root), table.images, source.stamp(table.images), size, color, table.bits]
        key += [table.modalities] if table.modalities else []
        name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
        entry = _Entry(cache_dir / f"{name}.npy", cache_dir / f"{name}.json", 3 if color else 1, size)
        unreadable = _seal(entry, len(table))
        if unreadable is None:
            unreadable = _build(entry, table, source, max_faults, site)
    _tolerate([(name, "") for name in unreadable], table, max_faults, site)
    if unreadable:
        LOG.warning("site %r: %d images left out: %s", site, len(unreadable), ", ".join(unreadable))
    lost = set(unreadable)
    readable = table.rows(np.array([image not in lost for image in table.images], dtype=np.bool_))
    # Copy-on-write, because torch has no read-only tensors.
    with named_regular(entry.images, own=True) as opened:
        images: NDArray[np.uint8] = np.load(opened, mmap_mode="c")
    return torch.from_numpy(images), readable


def _seal(entry: _Entry, n: int) -> list[str] | None:
    """Return the unreadable images of a complete entry; None where it is missing, truncated or damaged."""
    try:
        seal = json.loads(read_regular(entry.seal, own=True))
        unreadable: list[str] = seal["unreadable"]
        whole = sha256_of(entry.images, own=True) == seal["sha256"]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        LOG.warning("cache entry %s cannot be read (%s); it is made again", entry.seal, error)
        return None
    if not whole or seal["n"] != n:
        LOG.warning("cache entry %s is damaged; it is made again", entry.images)
        return None
    return unreadable


def _tolerate(faults: Sequence[_Fault], table: Table, max_faults: float, site: str) -> None:
    if len(faults) > max_faults * len(table) or len(faults) == len(table):
        name, why = faults[0]
        part = f"; if {table.root} contains only part of the data set, set [data] partial = true"
        raise DataError(
            f"site {site!r}: {len(faults):,} of {len(table):,} images cannot be used, more than the "
            f"{max_faults:.0%} tolerated ([privacy] max_faults); the first is {name!r}"
            + (f": {why}" if why else "")
            + ("" if table.modalities and why else part)
        )


def _build(entry: _Entry, table: Table, source: ImageSource, max_faults: float, site: str) -> list[str]:
    """Make a complete entry or none; return the names of the unreadable images.

    Nothing that is there is deleted, because another process may be reading it.
    """
    try:
        make_folder(entry.images.parent, private=True)
        with only_maker(entry.images):
            unreadable = _seal(entry, len(table))  # another process may have made it in the meantime
            if unreadable is not None:
                return unreadable
            with replacing(entry.images, private=True) as temporary:
                with temporary.open("xb+") as file:
                    faults = _write(file, entry, table, source)
                digest = sha256_of(temporary)
                _tolerate(faults, table, max_faults, site)
            unreadable = [name for name, _ in faults]
            try:
                seal = {"n": len(table), "sha256": digest, "unreadable": unreadable}
                write_json(entry.seal, seal, private=True)
            finally:
                if not entry.seal.exists():  # a full disk; and so nobody reads the images
                    entry.images.unlink()
            return unreadable
    except OSError as error:
        gigabytes = len(table) * entry.channels * entry.size**2 / 1e9
        raise DataError(
            f"site {site!r}: cannot write {gigabytes:.2f} GB of decoded images to {entry.images.parent}: "
            f"{'the disk is full' if error.errno in FULL else error}; make room, or set [storage] cache to "
            "another folder"
        ) from error


def _write(file: BinaryIO, entry: _Entry, table: Table, source: ImageSource) -> list[_Fault]:
    """Write the .npy: each image at its row, in any order; then close the gaps of unreadable images.

    A writable memory map would be simpler, but on a full disk it ends the process instead of raising.
    """
    start = _header(file, entry.shape(len(table)))
    length = entry.channels * entry.size**2
    faults: dict[int, DataError] = {}

    def fitted(data: bytes, name: str) -> Pixels:
        color = entry.channels == 3
        return resize_pad(decode_image(data, name, color, table.bits, table.modalities), entry.size)

    for row, image in read_all(source, table.images, fitted):
        check_abort()
        if isinstance(image, DataError):
            LOG.info("unreadable: %s", image)
            faults[row] = image
            continue
        file.seek(start + row * length)
        file.write(image.reshape(entry.size, entry.size, -1).transpose(2, 0, 1).tobytes())
    readable = [row for row in range(len(table)) if row not in faults]
    for new, old in enumerate(readable):
        if new != old:
            file.seek(start + old * length)
            image_bytes = file.read(length)
            file.seek(start + new * length)
            file.write(image_bytes)
    file.truncate(start + len(readable) * length)
    _header(file, entry.shape(len(readable)))
    return [(table.images[row], str(faults[row])) for row in sorted(faults)]


def _header(file: BinaryIO, shape: tuple[int, ...]) -> int:
    """Write the .npy header; return its length, which numpy pads to be the same for any first axis."""
    file.seek(0)
    np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return file.tell()
