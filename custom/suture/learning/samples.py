"""From a site's table to tensors: its decoded images or encoded documents with their labels, by split."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from suture.core.errors import ConfigError, check_known
from suture.core.labels import LabelSet, canonical
from suture.data.batch import Samples, columns
from suture.data.closing import with_ancestors
from suture.data.config import SiteConfig
from suture.data.image_cache import decode
from suture.data.readers import load_reading
from suture.data.reading import Reading
from suture.data.table import SPLITS, Split, Table
from suture.models import ModelSpec, encoder_of
from suture.models.documents import document_inputs

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


def annotated(data: SiteSamples) -> SiteSamples:
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
    found = []
    if absent:
        found.append(f"left out {absent:,} of {rows:,} rows, without {lost}")
    if wanted > read:
        other = " or are of another modality" if spec.modalities else ""
        found.append(
            f"left out {wanted - read:,} of {wanted:,} images that cannot be read{other}; `suture data "
            "check` of its suture.toml lists them"
        )
    return found


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


def pooled(sites: Mapping[str, SiteSamples], *, absent: bool = False) -> SiteSamples:
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
        inputs = {key: _joined([part.inputs[key] for part in parts]) for key in parts[0].inputs}
        attributes = tuple(a for part in parts for a in part.attributes or ("",) * len(part))
        y = torch.cat([part.y for part in parts])
        foreign = torch.cat([part.taught for part in parts if part.taught is not None]) if absent else None
        samples[split] = Samples(inputs, y, tuple(patients), attributes=attributes, taught=foreign)
    return union, samples


def _joined(tensors: list[Tensor]) -> Tensor:
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
