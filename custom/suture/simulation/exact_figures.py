"""What the sites' limits of disclosure would do with the figures of a study that runs on one machine."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from suture.core.errors import SutureError
from suture.core.privacy import PrivacyConfig
from suture.data.batch import Samples
from suture.data.config import SiteConfig
from suture.data.readers import read_table
from suture.data.table import Split, Table
from suture.learning.evaluation import Measurement, class_scores, influences, split_loss, without_withheld
from suture.learning.losses import masked_loss
from suture.models.classifier import Layout
from suture.protocol.disclosure import step_of
from suture.simulation.job import Job

_SPLITS: tuple[Split, ...] = ("validation", "test")


def without_limits(configs: Mapping[str, SiteConfig], job: Job) -> str:
    """Return the sentences that say so, of each site.

    Args:
        configs: of each site, with the limits that it has in a federation.
    """
    here = "Figures are exact: all sites are on this machine."
    if job.method.about.pooled:
        return here
    changes = [f"{site} {change}" for site, config in configs.items() if (change := _change(config))]
    if not changes:
        return f"{here} The sites' limits of disclosure would not change any."
    sentences = [
        here,
        f"With the sites' limits of disclosure, as in a federation (or with --limits), {'; '.join(changes)}.",
    ]
    if job.decision:
        sentences.append("Figures of decisions and groups would be limited, too.")
    if any(channel.of_classes for channel in job.method.egress(Layout({}, {})).going("up")):
        sentences.append(
            "The model may differ, because there tensors of classes with few images are withheld."
        )
    return " ".join(sentences)


def _change(config: SiteConfig) -> str:
    """What the limits of a site withhold and round; empty where nothing."""
    limits = config.privacy
    try:
        table = read_table(config.data).table
    except SutureError:  # which the site itself reports
        return "cannot be read"
    said = [f"rounds counts to multiples of {limits.round_counts}"] if limits.round_counts > 1 else []
    parts = {split: part for split in _SPLITS if len(part := table.of(split))}
    of = {split: what for split, part in parts.items() if (what := _of_split(part, limits))}
    if len({*of.values()}) == 1 and of.keys() == parts.keys():
        return " and ".join([*said, *of.values()][::-1])
    return " and ".join([*(f"{what} in {split}" for split, what in of.items()), *said])


def _of_split(part: Table, limits: PrivacyConfig) -> str:
    """What the limits withhold and round of the figures of one split."""
    label_type, names = part.labels.label_type, part.labels.names
    _, patients = np.unique(np.asarray(part.patients), return_inverse=True)
    shown = influences(names, part.y, patients, label_type, limits)
    withheld = [name for name in names if limits.min_count and name not in shown]
    if limits.min_loss and _loss_is_withheld(part, limits):
        withheld.insert(0, "its loss")
    steps = sorted({step for moved in shown.values() if (step := step_of(moved)) is not None})
    said = [f"withholds {', '.join(withheld)}"] if withheld else []
    if limits.min_count and steps:
        between = f"{steps[0]:g}" if len(steps) == 1 else f"{steps[0]:g} to {steps[-1]:g}"
        said.append(f"rounds AUROC to steps of {between}")
    elif limits.min_loss and "its loss" not in withheld:
        said.append("rounds its loss")
    return " and ".join(said)


def _loss_is_withheld(part: Table, limits: PrivacyConfig) -> bool:
    """Whether the loss of a split stays at the site, whatever the model."""
    how = Measurement(masked_loss, part.labels, limits, seed=0)
    samples, logits = Samples({}, torch.from_numpy(part.y), part.patients), torch.zeros(part.y.shape)
    scores = class_scores(samples, logits, part.labels, part.labels.names, limits)
    visible = without_withheld(samples, scores, part.labels)
    return split_loss(visible, logits, how, test=True) is None
