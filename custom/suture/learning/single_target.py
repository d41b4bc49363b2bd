"""A site's samples as one task of its own, under the row that all sites of such a method share."""

from __future__ import annotations

from dataclasses import replace

from suture.core.errors import ConfigError, unknown
from suture.core.labels import LabelSet, canonical
from suture.learning.samples import SiteSamples

TARGET = "Target"
"""The one row of a method in which each site has a task of its own."""


def single_target(data: SiteSamples, target: str | None, site: str) -> SiteSamples:
    """The samples with the site's one class, as the class `TARGET`; those where it is unknown are left out.

    Args:
        data: the site's own classes and its samples.
        target: the class that the site names in its suture.toml; it may be left out where there is only one.

    Raises:
        ConfigError: several classes and no target, or a target that is none of them.
    """
    labels, samples = data
    if target is None and len(labels) > 1:
        raise ConfigError(
            f"{site} has {len(labels)} classes and the method trains one; name it under [data] in "
            f'suture.toml, say target = "{labels.names[0]}"'
        )
    name = labels.names[0] if target is None else canonical(target)
    if name not in labels.names:
        raise unknown(f"target of {site}", name, labels.names)
    column = labels.index(name)
    kept = {}
    for split, part in samples.items():
        own = replace(part, y=part.y[:, column : column + 1])
        kept[split] = own.rows((~own.y.isnan()).squeeze(1).nonzero().squeeze(1))
    return LabelSet((TARGET,)), kept
