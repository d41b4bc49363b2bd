"""A site's samples, ready for training: its table, its decoded images, cut into splits."""

from __future__ import annotations

import numpy as np
import torch

from suture.config import SiteConfig
from suture.data import load_table
from suture.data.batch import Samples
from suture.data.cache import decode
from suture.data.table import SPLITS, Split
from suture.labels import LabelSet


def load_samples(config: SiteConfig, size: int, site: str) -> tuple[LabelSet, dict[Split, Samples]]:
    """All that a site trains and evaluates on.

    Args:
        config: the site's own.
        size: pixels of a side, the model's.
        site: its name, for messages.

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
    order = np.concatenate([np.flatnonzero(split == name) for name in SPLITS])
    images, table = decode(
        table.rows(order), size, config.data.color, config.storage.cache, config.privacy.max_faults, site
    )
    y = torch.from_numpy(table.y)
    samples: dict[Split, Samples] = {}
    start = 0
    for name in SPLITS:
        stop = start + table.split.count(name)
        samples[name] = Samples({"image": images[start:stop]}, y[start:stop], table.patients[start:stop])
        start = stop
    return table.labels, samples
