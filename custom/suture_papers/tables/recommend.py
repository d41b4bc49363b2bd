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
    beyond = fitted.outside(of)
    withheld = _withheld(of, beyond, label_type)
    fits = of.hidden and label_type == "multilabel"
    for sentence in (*reasons(of, facts), *(limits(of, fitted, beyond) if fits else ())):
        print_line(sentence)
    fit_of = fitted.expected(of)
    expected = {name: fit_of[row] for name in METHODS if (row := ROWS.get(name, name)) in fit_of}
    among = [name for name in expected if name not in refused]
    for name, why in refused.items():
        print_line(f"not possible here: {name}: {why}")
    if withheld:
        print_line(f"no gain is predicted: {withheld}")
        # Where no label is missing, they leave plain averaging as it is.
        best = [name for name in ("surgical", "combined") if of.hidden and name not in refused]
    else:
        best = ranked(expected, among)
        _show({name: expected[name] for name in best})
        if verdict := summary([expected[name] for name in best]):
            print_line(verdict)
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
    yield f"{number_of(of.sites, 'site')}, {len(classes)} {'class' if len(classes) == 1 else 'classes'}."
    yield f"{alone} of {len(classes)} classes {'is' if alone == 1 else 'are'} annotated at one site only."
    if of.hidden:
        yield (
            f"{of.hidden:.1%} of the pairs of training image and class are of a class that the site does not "
            "annotate; plain averaging would train on them as negatives."
        )
    yield f"Positive training images of a class (median): {_count(of.positives)}."
    if of.shift is None:
        yield "Gray levels of sites were not compared (texts, or images that suture check cannot read)."
    else:
        yield f"Spread of the sites' mean gray levels: {of.shift:.2f} standard deviations of a site's images."


def _count(value: float) -> str:
    """Return a number of images, a median with its half."""
    return f"{value:,.1f}".removesuffix(".0")


_NAMES = {
    "hidden": "share of missing labels",
    "single": "share of classes annotated at one site only",
    "log2 sites": "number of sites",
    "log2 (1 + positives)": "positive images of a class (median)",
    "shift": "difference of gray levels",
}


def limits(of: Situation, fitted: Fit, beyond: Mapping[str, float]) -> Iterator[str]:
    """Say which numbers lie outside of the fitted ranges, and how often predictions held there."""
    from suture_papers.tables.recommendation import FEATURES

    for name in beyond:
        i = FEATURES.index(name)
        values = (of.vector[i], fitted.low[i], fitted.high[i])
        if name.startswith("log2"):
            own, low, high = (_count(2**value - ("+" in name)) for value in values)
        else:
            own, low, high = (f"{value:.2f}" for value in values)
        yield f"outside of the fitted range: {_NAMES[name]} {own}, fitted {low} to {high}"
    if beyond and fitted.outside_told:
        held = f"{fitted.outside_right} of {fitted.outside_told} predicted gains"
        yield f"in phantoms outside of the fitted ranges {held} came true: test before you rely on a gain"


def _withheld(of: Situation, beyond: Mapping[str, float], label_type: LabelType) -> str:
    if not of.hidden:
        return "every site annotates every class, so that the methods for missing labels change nothing"
    if label_type != "multilabel":
        return f"the fit is on multilabel data; these labels are {label_type}"
    far = [_NAMES[name] for name, width in beyond.items() if width > FAR]
    return f"too far outside of the fitted range: {', '.join(far)}" if far else ""


def summary(best: Sequence[Expected]) -> str:
    """Say what the intervals of the mean gain leave open; empty where one lies above 0."""
    if any(one.mean[0] > 0 for one in best):
        return ""
    if best and all(one.mean[1] < 0 for one in best):
        return "plain averaging is predicted to be better"
    return "nothing can be told: no interval of the mean gain lies above 0"


def _show(expected: Mapping[str, Expected]) -> None:
    from suture.cli.common import console

    print_line("predicted gain in mean AUROC over plain averaging (vanilla), with 95 % intervals:")
    table = plain_table("method", "gain", "of the mean of such federations", "of one federation")
    for name, one in expected.items():
        bounds = (f"{low:+.3f} to {high:+.3f}" for low, high in (one.mean, one.single))
        table.add_row(name, f"{one.gain:+z.3f}", *bounds)
    console.print(table)


def commands(
    job: str, chosen: Job, settings: Sequence[str], best: Sequence[str], trust: bool = False
) -> Iterator[str]:
    """Return the command lines that try methods on a study, or run each of them on simulated sites.

    `fedavg` is compared on its own: other methods would keep its settings.
    """
    from suture.simulation.study import StudySites

    def line(methods: Sequence[str], *more: str) -> str:
        kept = [word for word in settings if word.partition("=")[0] not in ("method", "method.name")]
        words = [*kept, *(word for name in methods for word in METHODS[name])]
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
