"""Whether a site takes part in a job at all, and what it says of itself before round 1."""

from __future__ import annotations

import json
from pathlib import Path

from suture.core.devices import unusable
from suture.core.errors import ConfigError
from suture.core.files import write_json
from suture.core.labels import LabelSet
from suture.data.config import SiteConfig
from suture.federation.plan import Plan, code_hash
from suture.federation.site.abstain import CodeMismatch, LabelViewRefused
from suture.learning.evaluation import class_counts
from suture.learning.samples import SiteSamples
from suture.models.classifier import Layout
from suture.protocol.messages import Counts, SiteInfo

FIRST_COUNTS = "counts.json"


def refuse(site: str, plan: Plan, config: SiteConfig) -> None:
    """Stops what the site does not take part in. Asked before every task: a server may leave out the first.

    Raises:
        CodeMismatch: the job was made with other code.
        LabelViewRefused: its method shows the site more class names than it permits.
        ConfigError: the site sets something that the method would ignore, or a device that it has not.
    """
    code = code_hash(type(plan.method))
    if plan.code != code:
        raise CodeMismatch(
            f"{site} runs another version of suture ({code}) than the job was made with "
            f"({plan.code}); install the same one"
        )
    if plan.method.label_view == "all" and config.privacy.label_view != "all":
        raise LabelViewRefused(
            f"{site}: {plan.method.title} shows every class name of the federation to each "
            'site; permit it with label_view = "all" under [privacy] in suture.toml'
        )
    training = config.training
    if reason := unusable(training.device):
        raise ConfigError(
            f"{site}: device {training.device!r} cannot be used: {reason}; correct device under "
            "[training] in suture.toml"
        )
    for key, own in (("batch_size", training.batch_size is not None), ("amp", training.amp)):
        if own and plan.method.fixed_steps:
            raise ConfigError(
                f"{site}: the job settles the batches of {plan.method.title} and their precision; remove "
                f"{key} under [training] in suture.toml"
            )


def introduce(plan: Plan, config: SiteConfig, data: SiteSamples, prior: str | None, folder: Path) -> SiteInfo:
    """The site's own classes, its numbers of images and, where the method asks, its counts of labels.

    Args:
        prior: digest of the frozen network that the site holds.
        folder: of the experiment at the site, which remembers what was said.
    """
    labels, samples = data
    asked = labels.label_type in plan.method.egress(Layout({}, {})).counts
    return SiteInfo(
        labels.names,
        {split: len(part) for split, part in samples.items()},
        config.training.threads,
        code_hash(type(plan.method)),
        labels.label_type,
        first_counts(labels, class_counts(labels, samples["train"], config.privacy), folder) if asked else {},
        prior,
        config.privacy.protection,
    )


def first_counts(
    labels: LabelSet, counts: dict[str, Counts | None], folder: Path
) -> dict[str, Counts | None]:
    """The counts as they were first said in this experiment.

    Two counts of data that changed by one patient in between would tell what that patient has. So a class
    that was spoken of keeps its answer, also where that was none, and only a new class is counted.
    """
    path = folder / FIRST_COUNTS
    before = json.loads(path.read_text())["counts"] if path.exists() else {}
    told = {name: before.get(name, counts[name]) for name in labels.names}
    if before.keys() < {*before, *told}:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, {"counts": before | told})
    return {name: None if pair is None else (int(pair[0]), int(pair[1])) for name, pair in told.items()}
