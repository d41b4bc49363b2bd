"""The command `suture recommend`: which methods to try on one's own data, why, and how."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from suture.cli.common import JobName, Sets, Trust, job_with, plain_table, print_line
from suture.core.errors import ConfigError, DataError, SutureError
from suture.core.printable import number_of

if TYPE_CHECKING:
    from suture.core.labels import LabelType
    from suture.data.config import SiteConfig
    from suture.simulation.job import Job
    from suture_papers.tables.recommendation import Expected, Fit, SiteFacts, Situation

METHODS: dict[str, tuple[str, ...]] = {
    "surgical": ("method=surgical",),
    "partial": ("method=partial",),
    "combined": ("method=combined", "method.distil.last=1"),
    "fedavg": ("method=fedavg", "method.unknown=masked", "method.rows=owners"),
    "fedprox": ("method=fedprox",),
    "individual": ("method=individual",),
    "vanilla": ("method=vanilla",),
}
"""What can be recommended, and its settings; those of `combined` hold for `fedavg` as well."""

ROWS = {"combined": "combined_distil", "fedavg": "fedavg_owners"}
"""The rows of the fit where they are not called as the method."""

SAMPLE = 48
"""Images of a site whose gray levels are measured."""

FAR = 1.0
"""From how many widths of a fitted range on nothing is said of the gain."""


def recommend(job: JobName, settings: Sets = None, trust: Trust = False) -> None:
    """Name two or three methods worth trying on a study or a simulated job, why, and the command."""
    from suture_papers.tables.recommendation import ranked, situation, stored_fit

    chosen = job_with(job, settings, trust)
    with TemporaryDirectory() as folder:
        configs = configs_of(chosen, Path(folder))
        facts, label_type = facts_of(configs)
        refused = _refused(chosen, configs, label_type)
    of, fitted = situation(facts), stored_fit()
    for sentence in reasons(of, facts):
        print_line(sentence)
    beyond = fitted.outside(of)
    for sentence in limits(of, fitted, beyond):
        print_line(sentence)
    fit_of = fitted.expected(of)
    expected = {name: fit_of[row] for name in METHODS if (row := ROWS.get(name, name)) in fit_of}
    among = [name for name in expected if name not in refused]
    for name, why in refused.items():
        print_line(f"not possible here: {name}: {why}")
    withheld = _withheld(of, beyond, label_type)
    if withheld:
        print_line(f"nothing can be told of the gain: {withheld}")
        best = [name for name in ("surgical", "combined") if name not in refused]
    else:
        best = ranked(expected, among)
        _show({name: expected[name] for name in best})
        if not any(expected[name].told and expected[name].gain > 0 for name in best):
            print_line("nothing can be told: each interval of the mean gain includes 0")
    best += [name for name in ("vanilla",) if name not in refused]
    for line in commands(job, chosen, settings or [], best, trust):
        print_line(line)


def configs_of(job: Job, folder: Path) -> dict[str, SiteConfig]:
    """Return the configuration of each site of a study, or of a simulation that is written to `folder`."""
    from suture.data.config import load_site_config
    from suture.simulation.study import StudySites

    if job.simulation is None:
        raise ConfigError(f"{job.name} has no sites on this machine; name the folder of a study")
    if isinstance(job.simulation, StudySites):
        return job.simulation.configs()
    names = job.simulation.prepare(folder / "sites", folder, job.seed, job.method)
    return {name: load_site_config(folder / "sites" / name / "suture.toml") for name in names}


def facts_of(configs: Mapping[str, SiteConfig]) -> tuple[dict[str, SiteFacts], LabelType]:
    """Return what of each site's training data decides, and the type of labels."""
    from suture.data.readers import read_table
    from suture_papers.tables.recommendation import SiteFacts

    found: dict[str, SiteFacts] = {}
    types: dict[LabelType, str] = {}
    for site, config in configs.items():
        table = read_table(config.data).table
        own = table.of("train")
        positives = dict(zip(own.labels, (own.y == 1).sum(axis=0).tolist(), strict=True))
        found[site] = SiteFacts(len(own), positives, None if table.texts else _gray(config, own.images))
        types[table.labels.label_type] = site
    if len(types) > 1:
        raise DataError(f"sites have labels of the types {', '.join(types)}; run suture check")
    return found, next(iter(types))


def _gray(config: SiteConfig, images: Sequence[str]) -> tuple[float, float] | None:
    """Return mean and standard deviation of the mean gray levels of some images; None of fewer than two."""
    import numpy as np

    from suture.data.images import ImageSource
    from suture.data.inspection import inspect

    levels = []
    with ImageSource(config.data.root, config.data.follow_links) as source:
        for name in sorted(images)[:: -(-len(images) // SAMPLE)]:
            try:
                facts = inspect(source.raw(name), name, config.data.color, config.data.bits)
            except DataError:
                continue  # `check` names it
            levels.append(facts.mean)
    return (float(np.mean(levels)), float(np.std(levels))) if len(levels) > 1 else None


def _refused(job: Job, configs: Mapping[str, SiteConfig], label_type: LabelType) -> dict[str, str]:
    """Return the methods that a site or the labels refuse, and the first reason."""
    from suture.data.quality import Findings
    from suture.simulation.job import with_settings
    from suture.simulation.study import StudySites
    from suture.simulation.study_check import refusals

    if not isinstance(job.simulation, StudySites):
        return {}
    findings = {site: Findings(label_type=label_type) for site in configs}
    found: dict[str, str] = {}
    for name, words in METHODS.items():
        try:
            reason = next(refusals(configs, findings, with_settings(job, list(words))), None)
        except SutureError as error:
            reason = str(error)
        if reason:
            found[name] = reason
    return found


def reasons(of: Situation, facts: Mapping[str, SiteFacts]) -> Iterator[str]:
    """Say in a user's words what decides."""
    classes = {label for site in facts.values() for label in site.positives}
    alone = round(of.single * len(classes))
    yield f"{number_of(of.sites, 'site')}, {len(classes)} classes."
    yield f"{alone} of {len(classes)} classes {'is' if alone == 1 else 'are'} annotated at one site only."
    yield (
        f"{of.hidden:.0%} of the pairs of training image and class have no label; plain averaging would "
        "teach them as absent."
    )
    yield f"A class has {of.positives:,.0f} positive training images (median over classes)."
    if of.shift is None:
        yield "How much the sites' images differ was not measured; the mean of the fit stands for it."
    else:
        yield f"Mean gray levels of the sites differ by {of.shift:.2f} standard deviations of an image."


_NAMES = {
    "hidden": "the share of missing labels",
    "single": "the share of classes of one site",
    "log2 sites": "the number of sites",
    "log2 (1 + positives)": "the number of positives of a class",
    "shift": "the difference of gray levels",
}


def limits(of: Situation, fitted: Fit, beyond: Mapping[str, float]) -> Iterator[str]:
    """Say which numbers lie outside of the fit."""
    from suture_papers.tables.recommendation import FEATURES

    for name in beyond:
        i = FEATURES.index(name)
        low, high, own = fitted.low[i], fitted.high[i], of.vector[i]
        if name.startswith("log2"):
            low, high, own = (2**value - ("+" in name) for value in (low, high, own))
        yield (
            f"outside of what was measured: {_NAMES[name]} is {own:.3g}, in the fit {low:.3g} to {high:.3g}; "
            "intervals are wider"
        )
    if beyond and fitted.outside_told:
        yield (
            f"of {number_of(fitted.outside_told, 'gain')} told of phantoms outside of the fit "
            f"{fitted.outside_right} were found: try the methods before you rely on these figures"
        )


def _withheld(of: Situation, beyond: Mapping[str, float], label_type: LabelType) -> str:
    if label_type != "multilabel":
        return "the fit is of several labels an image, and here each image has one"
    if of.hidden < 1e-9:
        return "every site annotates every class"
    far = [_NAMES[name] for name, width in beyond.items() if width > FAR]
    return f"too far outside of what was measured: {', '.join(far)}" if far else ""


def _show(expected: Mapping[str, Expected]) -> None:
    from suture.cli.common import console

    table = plain_table("method", "mean AUROC over plain averaging", "mean of such federations", "in one")
    for name, one in expected.items():
        bounds = (f"{low:+.3f} to {high:+.3f}" for low, high in (one.mean, one.single))
        table.add_row(name, f"{one.gain:+.3f}", *bounds)
    console.print(table)


def commands(
    job: str, chosen: Job, settings: Sequence[str], best: Sequence[str], trust: bool = False
) -> Iterator[str]:
    """Return the command lines that try methods on a study, or run each of them on simulated sites.

    `fedavg` is compared on its own: other methods would keep its settings.
    """
    from suture.simulation.study import StudySites

    def line(methods: Sequence[str], *more: str) -> str:
        words = [*settings, *(word for name in methods for word in METHODS[name])]
        flags = ["--trust", *more] if trust else more
        sets = (part for word in words for part in ("--set", word))
        return shlex.join(["suture", "run", job, "--env", "local", *sets, *flags])

    if not isinstance(chosen.simulation, StudySites):
        yield from (line([name]) for name in best)
        return
    control = [name for name in best if name == "vanilla"]
    names = [name for name in best if name not in ("fedavg", "individual", "vanilla")]
    if names or "fedavg" not in best:  # each site alone is added by --compare
        compared = ",".join([*names, *control]) or "individual"
        yield line([name for name in names if name == "combined"], "--compare", compared, "--seeds", "3")
    if "fedavg" in best:
        out = ("--out", "runs/fedavg-comparison") if names else ()
        yield line(["fedavg"], "--compare", ",".join(["fedavg", *control]), "--seeds", "3", *out)
