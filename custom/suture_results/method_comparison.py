"""Methods compared on one's own study: same rounds, local training, seeds and splits, and paired intervals.

Every model is measured on the test images of every site, and every figure is a mean over the same pairs of a
site and a class: those that each method has learned there. The intervals are of a bootstrap that draws the
patients of each site, and the seeds, the same for all methods; so an easy draw cancels out of a difference.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from suture.core.errors import ConfigError, DataError
from suture.core.escaping import as_csv, number_of
from suture.core.files import atomic_write, read_json, write_json
from suture.core.runtime import seed_for
from suture.data.config import CONFIG, SiteConfig, write_site_config
from suture.data.readers import read_table
from suture.data.readers.image_list import ImageListConfig
from suture.execution.exact_figures import hidden_names
from suture.execution.job import Job, settings_of, with_settings
from suture.execution.progress import follow
from suture.execution.run import run_job
from suture.execution.sites import this_machine
from suture.execution.study import StudySites
from suture.learning.metrics import Floats, patient_draws, weighted_auroc
from suture_results.comparison import holm
from suture_results.comparison_page import Difference, verdict, write_comparison
from suture_results.formatting import area, interval
from suture_results.refusals import refusals
from suture_results.report import ALONE
from suture_results.saved_models import GLOBAL, Evaluated, evaluate, models_of

DRAWS = 1000

Unit = tuple[str, str, str]
"""Part of the data (a fold, or all), site and class."""


@dataclass(frozen=True)
class MethodFigures:
    """A method in a comparison.

    Attributes:
        title: of the method.
        mean: mean AUROC over units and seeds, and its 95 % interval.
        difference: from the sites alone, and its paired interval; None for the sites alone.
        p: of no difference, by the same draws, after Holm's correction over the methods; None with it.
        seeds: the mean of each seed.
        gains: the difference from the sites alone with each seed.
    """

    title: str
    mean: tuple[float, float, float]
    difference: tuple[float, float, float] | None
    p: float | None
    seeds: list[float]
    gains: list[float]


@dataclass(frozen=True)
class Compared:
    """What a comparison has found.

    Attributes:
        methods: figures by name, the sites alone first.
        sites: AUROC of each method for each site and class, over seeds and folds.
        images: number of test images of each site.
        counts: how many of them have each class and lack it, over folds.
        missing: pairs of a site and a class that are in no figure, as a method has not learned the class or
            the test images have no positive or no negative.
        page: comparison.html.
    """

    methods: dict[str, MethodFigures]
    sites: dict[str, dict[str, dict[str, float]]]
    images: dict[str, int]
    counts: dict[str, dict[str, tuple[int, int]]]
    missing: list[str]
    page: Path

    def lines(self) -> list[Difference]:
        """Return the methods as lines of a table or page, without the sites alone."""
        return [
            Difference(
                one.title,
                *one.difference,
                one.p,
                (f"{area(one.mean[0])} ({interval(one.mean[1:])})", " ".join(f"{g:+.3f}" for g in one.gains)),
            )
            for one in self.methods.values()
            if one.difference is not None and one.p is not None
        ]

    @property
    def verdict(self) -> str:
        """What the comparison has found, in a sentence."""
        return verdict("Mean AUROC against each site alone", self.lines())


def compare_methods(
    job: Job,
    methods: Sequence[str],
    out: Path,
    *,
    seeds: int = 1,
    folds: int | None = None,
    workers: int | None = None,
    report: Callable[[str], None] = lambda _: None,
    progress: Callable[[int, int, str], None] = lambda *_: None,
) -> Compared:
    """Train each method with each seed on the study of a job, and compare the models; runs that are there are
    kept, and an interrupted one continues.

    Args:
        methods: names; `ALONE` is added.
        out: folder of the runs, of comparison.json and of comparison.html.
        seeds: number of seeds, from that of the job on.
        folds: parts of each site's patients, each of which is the test data once; None keeps the splits.
        workers: as for `run_job`.
        report: receives a line for each thing to know beforehand.
        progress: receives the rounds that are done, those of all runs, and the name of the run.

    Raises:
        ConfigError: a site refuses a method, or a method the data; nothing has been trained.
        FederationError: a run failed.
    """
    if not isinstance(job.simulation, StudySites):
        raise ConfigError(f"{job.name} is not a study of your own; give the folder of a study")
    names = list(dict.fromkeys([ALONE, *methods]))
    jobs = {name: with_settings(job, [f"method={name}"]) for name in names}
    configs = job.simulation.configs()
    _refuse(jobs, job.simulation.here())
    settings = {"settings": {key: str(value) for key, value in settings_of(job).items()}, "folds": folds}
    if (out / "of.json").is_file() and read_json(out / "of.json") != settings:
        raise ConfigError(f"{out} holds the comparison of another job; choose another --out")
    write_json(out / "of.json", settings)
    for chosen in () if job.simulation.limits else jobs.values():
        for said in hidden_names(configs, chosen.method):
            report(said)
    parts: dict[str, StudySites] = {"all": job.simulation}
    if folds is not None:
        divided = {str(k + 1): _fold(configs, out / "folds" / str(k + 1), k, folds) for k in range(folds)}
        parts = {part: replace(sites, limits=job.simulation.limits) for part, sites in divided.items()}
    found: dict[tuple[str, int, str, str], Evaluated] = {}
    runs = list(product(parts, jobs, range(job.seed, job.seed + seeds)))
    for number, (part, name, seed) in enumerate(runs):
        folder, sites = out / "runs" / f"{name}-{part}-{seed}", parts[part]
        title = f"{name}, seed {seed}" + (f", fold {part} of {folds}" if folds else "")

        def show(done: int, before: int = number * job.rounds, title: str = title) -> None:
            progress(before + done, len(runs) * job.rounds, title)

        show(0)
        _train(replace(jobs[name], simulation=sites, seed=seed), folder, workers, show)
        models = models_of(folder)
        for site, config in sites.configs().items():
            model = models.get(site) or models[GLOBAL]
            found[name, seed, part, site] = evaluate(model, config, "test", this_machine().device)
    titles = {name: chosen.method.about.title for name, chosen in jobs.items()}
    return _write(_figures(found, titles, out), job, seeds, folds)


def _refuse(jobs: Mapping[str, Job], configs: Mapping[str, SiteConfig]) -> None:
    """Raise, with every reason, where a site refuses a method, or a method the labels."""
    labels = {site: read_table(config.data).table.labels for site, config in configs.items()}
    reasons = dict.fromkeys(text for job in jobs.values() for text in refusals(configs, labels, job))
    if reasons:
        raise ConfigError("nothing was trained:\n" + "\n".join(reasons))


def _fold(configs: Mapping[str, SiteConfig], folder: Path, k: int, folds: int) -> StudySites:
    """Write the sites of a fold: the k-th part of each site's patients is for test, the next for validation.

    Raises:
        ConfigError: there are fewer than three folds, or a site has fewer patients, or its splits are fixed.
    """
    if folds < 3:
        raise ConfigError(f"--folds {folds}: one part is for test and one for validation; give 3 or more")
    for site, config in configs.items():
        if not isinstance(config.data, ImageListConfig):
            raise ConfigError(f"{site}: the splits of [data] dataset = {config.data.dataset!r} are fixed")
        table = read_table(config.data).table
        used = sorted({p for p, split in zip(table.patients, table.split, strict=True) if split})
        if len(used) < folds:
            raise ConfigError(f"{site} has {len(used)} patients, fewer than {folds} folds")
        order = np.random.default_rng(seed_for("folds", site)).permutation(len(used))
        names = {0: "test", 1: "validation"}
        part = {p: names.get((int(i) - k) % folds, "train") for p, i in zip(used, order, strict=True)}
        rows = [(p, part.get(p, "")) for p in sorted({*table.patients})]
        cells = as_csv(("patient", "split"), rows).encode()
        atomic_write(folder / site / "splits.csv", cells, private=True)
        fields = {"split": "file", "split_file": folder / site / "splits.csv", "split_column": "split"}
        data = config.data.model_copy(update=fields)
        write_site_config(folder / site / CONFIG, config.model_copy(update={"data": data}))
    return StudySites(str(folder))


def _train(job: Job, folder: Path, workers: int | None, show: Callable[[int], None]) -> None:
    def take(line: str) -> None:
        event = json.loads(line)
        if event["event"] == "committed":
            show(event["round"])

    begun = (folder / "run.json").is_file()
    if not begun or read_json(folder / "run.json").get("status") != "finished":
        with follow(folder / "events.jsonl", take):
            run_job(job, "local", folder, resume=begun, workers=workers)


def _figures(
    found: Mapping[tuple[str, int, str, str], Evaluated], titles: Mapping[str, str], out: Path
) -> Compared:
    seeds = list(dict.fromkeys(seed for _, seed, _, _ in found))
    places = list(dict.fromkeys((part, site) for _, _, part, site in found))
    rng = np.random.default_rng(0)
    chosen = rng.integers(0, len(seeds), (DRAWS + 1, len(seeds)))
    chosen[0] = range(len(seeds))  # the first draw is the data as they are
    areas: dict[Unit, dict[str, Floats]] = {}  # [seeds, draws] of each method
    missing: dict[str, None] = {}
    images = dict.fromkeys((site for _, site in places), 0)
    counts: dict[str, dict[str, tuple[int, int]]] = {site: {} for site in images}
    for part, site in places:
        models = {name: [found[name, seed, part, site] for seed in seeds] for name in titles}
        first = next(iter(models.values()))[0]
        images[site] += len(first.patients)
        cluster = np.unique(np.asarray(first.patients), return_inverse=True)[1]
        drawn = [np.ones((1, int(cluster.max()) + 1))]
        drawn += patient_draws(rng, DRAWS, int(cluster.max()) + 1, len(cluster))
        weights = np.concatenate(drawn)[:, cluster]
        every = [one for of in models.values() for one in of]
        for label in dict.fromkeys(name for one in every for name in (*one.columns, *one.unlearned)):
            known = all(label in one.columns for one in every)
            y = first.y[:, first.columns[label]] if known else np.empty(0, dtype=np.float32)
            if not ((y == 1).any() and (y == 0).any()):
                missing[f"{label} at {site}"] = None
                continue
            before, rows = counts[site].get(label, (0, 0)), ~np.isnan(y)
            counts[site][label] = before[0] + int((y == 1).sum()), before[1] + int((y == 0).sum())
            areas[part, site, label] = {
                name: np.array([_areas(weights, rows, y, one, label) for one in of])
                for name, of in models.items()
            }
    if not areas:
        raise DataError("no class has a positive and a negative test image that every method has learned")
    means = {name: np.nanmean([one[name] for one in areas.values()], axis=0) for name in titles}
    drawn_means = {name: np.take_along_axis(of, chosen.T, axis=0).mean(axis=0) for name, of in means.items()}
    tested = {name: of - drawn_means[ALONE] for name, of in drawn_means.items() if name != ALONE}
    adjusted = dict(zip(tested, holm([_p_of(draws[1:]) for draws in tested.values()]), strict=True))
    methods = {
        name: MethodFigures(
            titles[name],
            _with_bounds(of),
            _with_bounds(tested[name]) if name in tested else None,
            adjusted.get(name),
            means[name][:, 0].tolist(),
            (means[name] - means[ALONE])[:, 0].tolist(),
        )
        for name, of in drawn_means.items()
    }
    sites: dict[str, dict[str, dict[str, float]]] = {}
    for site, label in dict.fromkeys((site, label) for _, site, label in areas):
        of = [one for (_, s, n), one in areas.items() if (s, n) == (site, label)]
        reached = {name: float(np.mean([one[name][:, 0] for one in of])) for name in titles}
        sites.setdefault(site, {})[label] = reached
    return Compared(methods, sites, images, counts, list(missing), out / "comparison.html")


def _areas(
    weights: Floats, rows: NDArray[np.bool_], y: NDArray[np.float32], model: Evaluated, label: str
) -> Floats:
    """Return the AUROC of a class in each draw, ``[draws]``, on the rows whose label is known."""
    scores = model.scores[rows, model.columns[label]].astype(np.float64)
    return weighted_auroc(weights[:, rows], y[rows] == 1, scores)


def _with_bounds(values: Floats) -> tuple[float, float, float]:
    """Return the first value, and the 95 % interval of the others."""
    low, high = np.nanquantile(values[1:], [0.025, 0.975])
    return float(values[0]), float(low), float(high)


def _p_of(draws: Floats) -> float:
    """Return the two-sided p of no difference, by the share of draws beyond it, as their interval is."""
    draws = draws[~np.isnan(draws)]
    beyond = min(int((draws <= 0).sum()), int((draws >= 0).sum()))
    return min(1.0, 2 * (beyond + 1) / (len(draws) + 1))


def _write(done: Compared, job: Job, seeds: int, folds: int | None) -> Compared:
    """Write comparison.json and comparison.html."""
    facts = {"job": job.name, "title": job.title, "rounds": job.rounds, "seeds": seeds, "folds": folds}
    found = {**asdict(done), "page": done.page.name}
    write_json(done.page.with_suffix(".json"), {**facts, "verdict": done.verdict, **found})
    pairs = sum(map(len, done.sites.values()))
    how = f"Each method was trained for {number_of(job.rounds, 'round')} with {number_of(seeds, 'seed')}, on "
    how += f"{folds} folds of each site's patients." if folds else "the same splits."
    note = f"Of the mean AUROC over {number_of(pairs, 'pair')} of a site and a class, from each site alone."
    if seeds == 1:
        note += " One seed says nothing about repeated training; use more."
    titles = {name: "Alone" if name == ALONE else one.title for name, one in done.methods.items()}
    heads = ("Mean AUROC (95 % CI)", "Difference with each seed")
    shown = {"sites": done.sites, "images": done.images, "counts": done.counts, "missing": done.missing}
    top = {"title": f"{job.title}: methods compared", "verdict": done.verdict, "how": how, "note": note}
    write_comparison(done.page, done.lines(), what="Method", heads=heads, titles=titles, **top, **shown)
    return done
