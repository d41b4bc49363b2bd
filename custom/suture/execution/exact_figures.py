"""What the sites' limits of disclosure would do with the figures of a study that runs on one machine."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from suture.core.errors import SutureError
from suture.core.escaping import number_of
from suture.core.privacy import PrivacyConfig
from suture.data.batch import Samples
from suture.data.config import SiteConfig
from suture.data.readers import read_table
from suture.data.table import Split, Table
from suture.execution.job import Job
from suture.learning.evaluation import Measurement, class_scores, influences, split_loss, without_withheld
from suture.learning.steps import masked_loss
from suture.methods.base import Method
from suture.models.classifier import Layout
from suture.protocol.egress import MOST_INFLUENCE, influence_without_one, largest_share, step_of

_SPLITS: tuple[Split, ...] = ("validation", "test")


def without_limits(configs: Mapping[str, SiteConfig], job: Job) -> str:
    """Return the sentences that say so, of each site.

    Args:
        configs: of each site, with the limits that it has in a federation.
    """
    opening = "Figures are exact: all sites are on this machine."
    if job.method.about.pooled:
        return opening
    refused = hidden_names(configs, job.method)
    forecasts = {site: forecast(config, reasons=False) for site, config in configs.items()}
    changes = [f"{site} would send of {line}" for site, lines in forecasts.items() for line in lines]
    if not changes:
        return " ".join([opening, *(refused or ["The sites' limits of disclosure would not change any."])])
    sentences = [
        opening,
        *refused,
        f"With the sites' limits of disclosure, as in a federation (or with --limits), {'. '.join(changes)}.",
    ]
    if job.decision:
        sentences.append("Figures of decisions and groups would be limited, too.")
    if any(channel.of_classes for channel in job.method.egress(Layout({}, {})).going("up")):
        sentences.append(
            "The model may differ, because there tensors of classes with few images are withheld."
        )
    return " ".join(sentences)


def hidden_names(configs: Mapping[str, SiteConfig], method: Method) -> list[str]:
    """Return the sentence, if any, on sites that would refuse a method because it shows them every class."""
    sites = [site for site, config in configs.items() if config.privacy.label_view == "own"]
    if method.labels.view != "all" or not sites:
        return []
    return [
        f"In a federation (or with --limits) {', '.join(sites)} would refuse {method.about.title}, because "
        "it shows every class name to each site ([privacy] label_view)."
    ]


def forecast(config: SiteConfig, *, reasons: bool = True) -> list[str]:
    """Return, of validation and test, what a site's limits would withhold in a federation and why, and the
    steps of what it would send; nothing of data that cannot be read.
    """
    limits, lines = config.privacy, []
    if not (limits.min_count or limits.min_loss or limits.round_counts > 1):
        return []
    try:
        table = read_table(config.data).table
    except SutureError:  # which the site's own check reports
        return []
    for split in _SPLITS:
        part = table.of(split)
        if not len(part):
            continue
        names, (_, patients) = part.labels.names, np.unique(np.asarray(part.patients), return_inverse=True)
        influence_of = influences(names, part.y, patients, part.labels.label_type, limits)
        rounded: dict[float, list[str]] = {}
        for name, influence in sorted(influence_of.items(), key=lambda pair: pair[1]):
            if limits.min_count and (step := step_of(influence)) is not None:
                rounded.setdefault(step, []).append(name)
        figures = [f"AUROC in steps of {step:g} ({', '.join(of)})" for step, of in rounded.items()]
        withheld = [
            f"{name} ({_why_withheld(y, patients, limits)})" if reasons else name
            for name, y in zip(names, part.y.T, strict=True)
            if limits.min_count and name not in influence_of
        ]
        figures += [f"no AUROC of {', '.join(withheld)}"] if withheld else []
        if limits.min_loss:
            figures.append("no loss" if _loss_is_withheld(part, limits) else "a rounded loss")
        if limits.round_counts > 1:
            figures.append(f"counts in multiples of {limits.round_counts}")
        lines.append(f"{split}: {'; '.join(figures)}")
    return lines


def _why_withheld(y: NDArray[np.float32], patients: NDArray[np.intp], limits: PrivacyConfig) -> str:
    kinds = {"positive": y == 1, "negative": y == 0}
    for kind, of in kinds.items():
        if not of.any():
            return f"no {kind}"
    for kind, of in kinds.items():
        if (n := int(of.sum())) < limits.min_count:
            return f"{number_of(n, kind)}, fewer than min_count = {limits.min_count}"
    if influence_without_one(patients, y) > MOST_INFLUENCE:
        kind, of = max(kinds.items(), key=lambda pair: largest_share(patients, pair[1]))
        most = int(np.bincount(patients, of).max())
        return f"one patient has {most} of the {int(of.sum())} {kind}s, and moves it by over half its range"
    return "the number of a smaller class would follow from it"


def _loss_is_withheld(part: Table, limits: PrivacyConfig) -> bool:
    """Whether the loss of a split stays at the site, whatever the model."""
    how = Measurement(masked_loss, part.labels, limits, seed=0)
    samples, logits = Samples({}, torch.from_numpy(part.y), part.patients), torch.zeros(part.y.shape)
    scores = class_scores(samples, logits, part.labels, part.labels.names, limits)
    visible = without_withheld(samples, scores, part.labels)
    return split_loss(visible, logits, how, test=True)[0] is None
