"""A site's samples, ready for training: its table, its decoded images, cut into splits."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from suture.config import SiteConfig
from suture.data import load_table
from suture.data.attribute import with_attributes
from suture.data.batch import Samples, columns
from suture.data.cache import decode
from suture.data.table import SPLITS, Split
from suture.labels import LabelSet

SiteSamples = tuple[LabelSet, dict[Split, Samples]]
"""A site's own classes, and its samples of each split."""


def load_samples(config: SiteConfig, size: int, site: str, only: Split | None = None) -> SiteSamples:
    """All that a site trains and evaluates on.

    Args:
        config: the site's own.
        size: pixels of a side, the model's.
        site: its name, for messages.
        only: read the images of this split alone.

    Returns:
        the site's own classes; and for each of the three splits the images as uint8
        [n, channels, size, size] (memory-mapped) under ``image``, labels and patients. A split without rows
        has n = 0.

    Raises:
        SutureError: the table has a fault, or the images cannot be read or cached.
    """
    table = load_table(config.data)
    # One split after the other, so that each is a stretch of one memory-mapped file rather than a copy.
    split = np.array(table.split)
    order = np.concatenate([np.flatnonzero(split == name) for name in SPLITS if only in (None, name)])
    images, table = decode(
        table.rows(order), size, config.data.color, config.storage.cache, config.privacy.max_faults, site
    )
    y = torch.from_numpy(table.y)
    samples: dict[Split, Samples] = {}
    start = 0
    for name in SPLITS:
        stop = start + table.split.count(name)
        rows = slice(start, stop)
        samples[name] = Samples({"image": images[rows]}, y[rows], table.patients[rows], table.images[rows])
        start = stop
    return table.labels, with_attributes(samples, config.data)


def pooled(sites: Mapping[str, SiteSamples]) -> SiteSamples:
    """The samples of several sites as if one party held them: every class of any site, NaN where unknown.

    The images are copied into memory.

    Args:
        sites: by name, which goes before the patients' so that those of two sites stay apart.
    """
    names = sorted({name for labels, _ in sites.values() for name in labels})
    tasks = {labels.task for labels, _ in sites.values()}
    union = LabelSet(tuple(names), min(tasks))
    samples: dict[Split, Samples] = {}
    for split in SPLITS:
        parts = [columns(own[split], labels, union) for labels, own in sites.values()]
        patients = [f"{site}/{p}" for site, (_, own) in sites.items() for p in own[split].patients]
        inputs = {key: torch.cat([part.inputs[key] for part in parts]) for key in parts[0].inputs}
        attributes = tuple(a for part in parts for a in part.attributes or ("",) * len(part))
        y = torch.cat([part.y for part in parts])
        samples[split] = Samples(inputs, y, tuple(patients), attributes=attributes)
    return union, samples
