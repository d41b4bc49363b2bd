"""The command `suture recommend`: what of a study decides between methods, which can run, how to try them.

In 19 federations of real data no advice fitted to sites, overlap and positives was better than always
`surgical` (difference of regrets .001, 95 % -.009 to .010), so none is given: it names what is possible.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from suture.cli.common import JobName, Json, Sets, Trust, emit, job_with, print_line
from suture.core.errors import ConfigError, DataError, SutureError
from suture.core.escaping import number_of

if TYPE_CHECKING:
    from suture.core.labels import LabelSet
    from suture.data.config import SiteConfig
    from suture.execution.job import Job

METHODS: dict[str, tuple[str, ...]] = {
    "surgical": ("method=surgical",),
    "combined": ("method=combined", "method.distil.last=1"),
    "vanilla": ("method=vanilla",),
}
"""Two methods for missing labels, and the control, with their settings."""


@dataclass(frozen=True)
class SiteFacts:
    """What of a site's training data decides.

    Attributes:
        images: their number.
        positives: of each class that the site annotates.
    """

    images: int
    positives: Mapping[str, int]


@dataclass(frozen=True)
class Recommendation:
    """What to try on a study.

    Attributes:
        start: the method to begin with.
        reasons: what decides, in sentences.
        sites: what of each site decides.
        refused: why a federation of these sites would refuse a method, or the setting that would allow it.
        commands: which try what is possible.
    """

    start: str
    reasons: tuple[str, ...]
    sites: Mapping[str, SiteFacts]
    refused: Mapping[str, str]
    commands: tuple[str, ...]


def recommend(job: JobName, settings: Sets = None, trust: Trust = False, as_json: Json = False) -> None:
    """Say what of a study or a simulated job decides, and print the commands that try what can run."""
    found = advise(job, settings or [], trust=trust)
    if as_json:
        emit("recommend", found)
        return
    names: dict[str, list[str]] = {}
    for name, why in found.refused.items():
        names.setdefault(why, []).append(name)
    refused = "; ".join(f"{', '.join(of)} ({why})" for why, of in names.items())
    not_here = [f"Not possible in a federation of these sites: {refused}"] if refused else []
    for line in (f"Start with {found.start}.", *found.reasons, *not_here, *found.commands):
        print_line(line)


def advise(job: str, settings: Sequence[str], *, trust: bool = False) -> Recommendation:
    """Return what to try on a study or a simulated job; arguments as of `recommend`."""
    chosen = job_with(job, [*settings], trust)
    with TemporaryDirectory() as folder:
        configs = configs_of(chosen, Path(folder))
        facts, labels = facts_of(configs, chosen.label_map)
        refused = _refused(chosen, configs, labels)
    missing, why = share_of_missing_labels(facts), [*reasons(facts)]
    if not missing:
        why.append("Every site annotates every class: the methods for missing labels change nothing.")
    # Where no label is missing, they leave plain averaging as it is.
    possible = [name for name in METHODS if name not in refused and (missing or name == "vanilla")]
    lines = commands(job, chosen, settings, possible, trust)
    return Recommendation((possible or ["individual"])[0], tuple(why), facts, refused, tuple(lines))


def configs_of(job: Job, folder: Path) -> dict[str, SiteConfig]:
    """Return the configuration of each site of a study, or of a simulation that is written to `folder`."""
    from suture.data.config import load_site_config
    from suture.execution.study import StudySites

    if job.simulation is None:
        raise ConfigError(f"{job.name} has no sites on this machine; name the folder of a study")
    if isinstance(job.simulation, StudySites):
        return job.simulation.configs()
    names = job.simulation.prepare(folder / "sites", folder, job.seed, job.method)
    return {name: load_site_config(folder / "sites" / name / "suture.toml") for name in names}


def facts_of(
    configs: Mapping[str, SiteConfig], label_map: Mapping[str, str] | None = None
) -> tuple[dict[str, SiteFacts], dict[str, LabelSet]]:
    """Return what of each site's training data decides, and its labels.

    Args:
        label_map: of the job, into which the decisions of labels.toml have gone.

    Raises:
        DataError: there are fewer than two sites, no training images, no classes, or labels of two types.
    """
    from suture.core.labels import canonical
    from suture.data.readers import read_table

    names = {canonical(own): canonical(name) for own, name in (label_map or {}).items()}
    facts: dict[str, SiteFacts] = {}
    labels: dict[str, LabelSet] = {}
    for site, config in configs.items():
        table = read_table(config.data).table
        training = table.of("train")
        called = [names.get(name, name) for name in training.labels]
        positives = dict(zip(called, (training.y == 1).sum(axis=0).tolist(), strict=True))
        facts[site] = SiteFacts(len(training), positives)
        labels[site] = table.labels
    if len(types := {own.label_type for own in labels.values()}) > 1:
        raise DataError(f"sites have labels of the types {', '.join(sorted(types))}; run suture check")
    classes, images = _owners(facts), sum(site.images for site in facts.values())
    if len(facts) < 2 or not classes or not images:
        lacking = "second site" if len(facts) < 2 else "classes" if not classes else "training images"
        raise DataError(f"no {lacking} (sites: {', '.join(facts) or 'none'}); nothing can be recommended")
    return facts, labels


def _owners(facts: Mapping[str, SiteFacts]) -> dict[str, list[SiteFacts]]:
    """Return the sites that annotate each class."""
    owners: dict[str, list[SiteFacts]] = {}
    for site in facts.values():
        for label in site.positives:
            owners.setdefault(label, []).append(site)
    return owners


def share_of_missing_labels(facts: Mapping[str, SiteFacts]) -> float:
    """Return the share of pairs of training image and class without a label; exactly 0 where all have one."""
    owners = _owners(facts)
    pairs = len(owners) * sum(site.images for site in facts.values())
    return (pairs - sum(site.images for sites in owners.values() for site in sites)) / pairs


def _refused(job: Job, configs: Mapping[str, SiteConfig], labels: Mapping[str, LabelSet]) -> dict[str, str]:
    """Return the methods that a site or the labels refuse, and why, or the setting that helps."""
    from suture.execution.job import with_settings
    from suture.execution.study import StudySites
    from suture_results.refusals import refusals

    if not isinstance(job.simulation, StudySites):
        return {}
    closed = [site for site, config in configs.items() if config.privacy.label_view != "all"]
    allowed = {
        site: config.model_copy(update={"privacy": config.privacy.model_copy(update={"label_view": "all"})})
        for site, config in configs.items()
    }
    refused: dict[str, str] = {}
    for name, words in METHODS.items():
        try:
            tried = with_settings(job, list(words))
            reason = next(refusals(allowed, labels, tried), None)
            if not reason and closed and tried.method.labels.view == "all":
                reason = f'[privacy] label_view = "all" of {", ".join(closed)} allows it'
        except SutureError as error:
            reason = str(error)
        if reason:
            refused[name] = reason
    return refused


def reasons(facts: Mapping[str, SiteFacts]) -> Iterator[str]:
    """Say in a user's words what decides."""
    owners = _owners(facts)
    alone = sum(len(sites) == 1 for sites in owners.values())
    positives = [sum(site.positives[label] for site in sites) for label, sites in owners.items()]
    yield f"{number_of(len(facts), 'site')}, {len(owners)} {'class' if len(owners) == 1 else 'classes'}."
    yield f"{alone} of {len(owners)} classes {'is' if alone == 1 else 'are'} annotated at one site only."
    if missing := share_of_missing_labels(facts):
        yield (
            f"{missing:.1%} of the pairs of training image and class are of a class that the site does not "
            "annotate; plain averaging would train on them as negatives."
        )
    yield f"Positive training images of a class (median): {f'{median(positives):,.1f}'.removesuffix('.0')}."


def commands(
    job: str, chosen: Job, settings: Sequence[str], methods: Sequence[str], trust: bool = False
) -> Iterator[str]:
    """Return the command that compares methods on a study, or one for each of them on simulated sites."""
    from suture.execution.study import StudySites

    def line(names: Sequence[str], *more: str) -> str:
        kept = [word for word in settings if word.partition("=")[0] not in ("method", "method.name")]
        words = [*kept, *(word for name in names for word in METHODS[name])]
        sets = (part for word in words for part in ("--set", word))
        return shlex.join(["suture", "run", job, "--env", "local", *sets, *(["--trust"] * trust), *more])

    if isinstance(chosen.simulation, StudySites):
        # Each site alone is added by --compare.
        own = [name for name in methods if name == "combined"]
        yield line(own, "--compare", ",".join(methods) or "individual", "--seeds", "3")
    else:
        yield from (line([name]) for name in methods)
