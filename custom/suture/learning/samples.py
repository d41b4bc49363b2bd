"""From a site's table to tensors: its decoded images or encoded documents with their labels, by split.

An image is decoded once per size, stored, then read through memory mapping. An entry consists of two files.
`<key>.npy` holds the images. `<key>.json` is written last and so marks the entry as complete: it holds the
digest of the other file and the names of the images that could not be read. Several processes may share a
folder: one makes an entry, the others wait for it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from suture.core.errors import FULL, ConfigError, DataError, check_known
from suture.core.files import (
    make_folder,
    named_regular,
    only_maker,
    read_regular,
    replacing,
    sha256_of,
    write_json,
)
from suture.core.labels import LabelSet, canonical
from suture.data.batch import Samples, check_abort, columns
from suture.data.closing import with_ancestors
from suture.data.config import SiteConfig
from suture.data.decoding import Pixels, decode_image, resize_pad
from suture.data.images import ImageSource, read_all
from suture.data.readers import load_reading
from suture.data.reading import Reading
from suture.data.table import SPLITS, Split, Table
from suture.models import ModelSpec, encoder_of
from suture.models.documents import document_inputs

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


SiteSamples = tuple[LabelSet, dict[Split, Samples]]
"""A site's own classes, and its samples of each split."""

TARGET = "Target"
"""The one class of a method in which each site trains a class of its own."""


def load_samples(
    config: SiteConfig,
    spec: ModelSpec,
    site: str,
    only: Split | None = None,
    left_out: Callable[[list[str]], None] = lambda _: None,
    *,
    one_sided: bool = False,
) -> SiteSamples:
    """Load all samples of a site.

    Args:
        config: the configuration of the site.
        spec: the model; it decides the size of the images, or the vocabulary.
        site: name of the site, for messages.
        only: read this split alone.
        left_out: called with a sentence for each kind of rows that are in no split of the result.
        one_sided: add the classes that the site knows through their descendants; see `with_ancestors`.

    Returns:
        the site's own classes, and the samples of each of the three splits. Their inputs are images under
        ``image``, uint8 [n, channels, size, size], memory-mapped; or documents under ``tokens``, int32
        [n, l], padded to the site's longest, with their ``length``, int64 [n], or under ``vector``, float32
        [n, d]. A split without rows has n = 0.

    Raises:
        ConfigError: the data are text and the model reads images, or the reverse.
        SutureError: the table has a fault, or the images cannot be read or cached.
    """
    reading = load_reading(config.data)
    table = with_ancestors(reading.table, config.data) if one_sided else reading.table
    held, read = "image" if table.texts is None else "text", encoder_of(spec).reads
    if held != read:
        raise ConfigError(
            f"site {site!r}: {config.data.table} holds {held}s, but the model {spec.name!r} reads "
            f"{read}s; set model.name to one that fits (`suture list`), or correct [data] dataset"
        )
    # One split after the other, so that each is a stretch of one memory-mapped file rather than a copy.
    split = np.array(table.split)
    order = np.concatenate([np.flatnonzero(split == name) for name in SPLITS if only in (None, name)])
    inputs, table = _inputs(table.rows(order), config, spec, site)
    left_out(_losses(reading, config, spec, wanted=len(order), read=len(table)))
    return table.labels, _by_split(inputs, table)


def annotate(data: SiteSamples) -> SiteSamples:
    """Return the classes that a site annotates, and its samples with these alone."""
    labels, samples = data
    own = LabelSet(labels.annotated, labels.label_type)
    return own, {split: columns(part, labels, own) for split, part in samples.items()}


def _by_split(inputs: dict[str, Tensor], table: Table) -> dict[Split, Samples]:
    """Cut rows that lie in the order of their splits."""
    y = torch.from_numpy(table.y)
    samples: dict[Split, Samples] = {}
    start = 0
    for name in SPLITS:
        stop = start + table.split.count(name)
        rows = slice(start, stop)
        part = {key: tensor[rows] for key, tensor in inputs.items()}
        attributes = () if table.attributes is None else table.attributes[rows]
        samples[name] = Samples(part, y[rows], table.patients[rows], table.images[rows], attributes)
        start = stop
    return samples


def _losses(reading: Reading, config: SiteConfig, spec: ModelSpec, wanted: int, read: int) -> list[str]:
    """Return a sentence for each kind of rows that are left out: without an image, unreadable.

    None names an image, whose name may tell of a patient.

    Args:
        wanted, read: number of rows of the splits that are read, and of those of them that could be.
    """
    absent, rows = reading.absent, len(reading.table) + reading.absent
    texts = reading.table.texts is not None
    lost = f"a text in {config.data.table}" if texts else f"an image in {config.data.root}"
    remarks = []
    if absent:
        remarks.append(f"left out {absent:,} of {rows:,} rows, without {lost}")
    if wanted > read:
        other = " or are of another modality" if spec.modalities else ""
        remarks.append(
            f"left out {wanted - read:,} of {wanted:,} images that cannot be read{other}; `suture data "
            "check` of its suture.toml lists them"
        )
    return remarks


def _inputs(table: Table, config: SiteConfig, spec: ModelSpec, site: str) -> tuple[dict[str, Tensor], Table]:
    """Return the inputs of the model, and the rows whose inputs could be read."""
    if table.texts is not None:
        return document_inputs(spec, table.texts, config.storage.feature_folder, site), table
    images, readable = decode(
        replace(table, modalities=spec.modalities),
        spec.size,
        config.data.color,
        config.storage.cache,
        config.privacy.max_faults,
        site,
    )
    return {"image": images}, readable


def pool(sites: Mapping[str, SiteSamples], *, absent: bool = False) -> SiteSamples:
    """Pool the samples of several sites: the classes of all sites, with NaN where a label is unknown.

    The images are copied into memory; documents are padded to the longest of all sites.

    Args:
        sites: samples by name of the site; the name is put before each patient, so that patients of two sites
            stay distinct.
        absent: teach the classes that a site does not annotate as absent there.
    """
    names = sorted({name for labels, _ in sites.values() for name in labels})
    label_types = {labels.label_type for labels, _ in sites.values()}
    union = LabelSet(tuple(names), min(label_types))
    samples: dict[Split, Samples] = {}
    for split in SPLITS:
        parts = [columns(own[split], labels, union, absent=absent) for labels, own in sites.values()]
        patients = [f"{site}/{p}" for site, (_, own) in sites.items() for p in own[split].patients]
        inputs = {key: _join([part.inputs[key] for part in parts]) for key in parts[0].inputs}
        attributes = tuple(a for part in parts for a in part.attributes or ("",) * len(part))
        y = torch.cat([part.y for part in parts])
        foreign = torch.cat([part.taught for part in parts if part.taught is not None]) if absent else None
        samples[split] = Samples(inputs, y, tuple(patients), attributes=attributes, taught=foreign)
    return union, samples


def _join(tensors: list[Tensor]) -> Tensor:
    """Rows one after the other; tokens are first padded with 0 to the widest."""
    if tensors[0].dim() == 2:
        widest = max(tensor.shape[1] for tensor in tensors)
        tensors = [pad(tensor, (0, widest - tensor.shape[1])) for tensor in tensors]
    return torch.cat(tensors)


def single_target(data: SiteSamples, target: str | None, site: str) -> SiteSamples:
    """Reduce the samples of a site to its one class, renamed `TARGET`; rows where it is unknown are left out.

    Args:
        data: the site's own classes and its samples.
        target: the class that the site names in its suture.toml; it may be left out where there is only one.
        site: name of the site, for messages.

    Raises:
        ConfigError: several classes and no target, or a target that is none of them.
    """
    labels, samples = data
    if target is None and len(labels) > 1:
        raise ConfigError(
            f"{site} has {len(labels)} classes, but the method trains one; name it under [data] in "
            f'suture.toml, say target = "{labels.names[0]}"'
        )
    name = labels.names[0] if target is None else canonical(target)
    check_known(f"target of {site}", name, labels.names)
    column = labels.index(name)
    single = {}
    for split, part in samples.items():
        own = replace(part, y=part.y[:, column : column + 1])
        single[split] = own.rows((~own.y.isnan()).squeeze(1).nonzero().squeeze(1))
    return LabelSet((TARGET,)), single
