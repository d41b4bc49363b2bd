"""A site's samples, ready for training: its table, its decoded images or its documents, cut into splits."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from suture.core.errors import ConfigError
from suture.core.labels import LabelSet
from suture.data.batch import Samples, columns
from suture.data.config import SiteConfig
from suture.data.image_cache import decode
from suture.data.readers import load_table
from suture.data.table import SPLITS, Split, Table
from suture.learning.attribute import with_attributes
from suture.models import MODELS, ModelSpec, vocabulary_of

SiteSamples = tuple[LabelSet, dict[Split, Samples]]
"""A site's own classes, and its samples of each split."""


def load_samples(config: SiteConfig, spec: ModelSpec, site: str, only: Split | None = None) -> SiteSamples:
    """All that a site trains and evaluates on.

    Args:
        config: the site's own.
        spec: the model that they are for: the size of its images, or its vocabulary.
        site: its name, for messages.
        only: read this split alone.

    Returns:
        the site's own classes; and for each of the three splits labels, patients and inputs: the images as
        uint8 [n, channels, size, size] (memory-mapped) under ``image``; or the documents under ``tokens`` as
        int32 [n, l], padded to the site's longest, and their ``length`` as int64 [n]. A split without rows
        has n = 0.

    Raises:
        ConfigError: the data are text and the model reads images, or the other way round.
        SutureError: the table has a fault, or the images cannot be read or cached.
    """
    table = load_table(config.data)
    _check_kind(table, config, spec, site)
    # One split after the other, so that each is a stretch of one memory-mapped file rather than a copy.
    split = np.array(table.split)
    order = np.concatenate([np.flatnonzero(split == name) for name in SPLITS if only in (None, name)])
    inputs, table = _inputs(table.rows(order), config, spec, site)
    y = torch.from_numpy(table.y)
    samples: dict[Split, Samples] = {}
    start = 0
    for name in SPLITS:
        stop = start + table.split.count(name)
        rows = slice(start, stop)
        part = {key: tensor[rows] for key, tensor in inputs.items()}
        samples[name] = Samples(part, y[rows], table.patients[rows], table.images[rows])
        start = stop
    return table.labels, with_attributes(samples, config.data)


def _check_kind(table: Table, config: SiteConfig, spec: ModelSpec, site: str) -> None:
    held, read = "image" if table.texts is None else "text", MODELS[spec.name].reads
    if held != read:
        raise ConfigError(
            f"site {site!r}: {config.data.table} holds {held}s and the model {spec.name!r} reads {read}s; "
            "set model.name to one that fits (`suture list`), or correct [data] dataset"
        )


def _inputs(table: Table, config: SiteConfig, spec: ModelSpec, site: str) -> tuple[dict[str, Tensor], Table]:
    """What a model reads of each row, and the rows of which it can be read."""
    if table.texts is not None:
        tokens, length = vocabulary_of(spec).encode(table.texts, spec.longest)
        return {"tokens": tokens, "length": length}, table
    images, kept = decode(
        table, spec.size, config.data.color, config.storage.cache, config.privacy.max_faults, site
    )
    return {"image": images}, kept


def pooled(sites: Mapping[str, SiteSamples], *, absent: bool = False) -> SiteSamples:
    """The samples of several sites as if one party held them: every class of any site, NaN where unknown.

    The images are copied into memory; documents are padded to the longest of all sites.

    Args:
        sites: by name, which goes before the patients' so that those of two sites stay apart.
        absent: what a site does not annotate is taught as absent.
    """
    names = sorted({name for labels, _ in sites.values() for name in labels})
    tasks = {labels.label_type for labels, _ in sites.values()}
    union = LabelSet(tuple(names), min(tasks))
    samples: dict[Split, Samples] = {}
    for split in SPLITS:
        parts = [columns(own[split], labels, union, absent=absent) for labels, own in sites.values()]
        patients = [f"{site}/{p}" for site, (_, own) in sites.items() for p in own[split].patients]
        inputs = {key: _joined([part.inputs[key] for part in parts]) for key in parts[0].inputs}
        attributes = tuple(a for part in parts for a in part.attributes or ("",) * len(part))
        y = torch.cat([part.y for part in parts])
        foreign = torch.cat([part.absent for part in parts if part.absent is not None]) if absent else None
        samples[split] = Samples(inputs, y, tuple(patients), attributes=attributes, absent=foreign)
    return union, samples


def _joined(tensors: list[Tensor]) -> Tensor:
    """Rows one after the other; tokens are first padded with 0 to the widest."""
    if tensors[0].dim() == 2:
        widest = max(tensor.shape[1] for tensor in tensors)
        tensors = [pad(tensor, (0, widest - tensor.shape[1])) for tensor in tensors]
    return torch.cat(tensors)
