"""Maps of where each method starts to win: `python benchmarks/phantom_maps.py`.

Draws the federations of custom/suture_papers/studies/phantom_maps.toml, runs every method in each, and
keeps one line for each federation in docs/results/runs/phantom_maps.jsonl. What is done is not repeated.
`--render` writes docs/results/phantom_maps.md from the stored lines.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image as Pillow
from pydantic import Field
from pydantic.dataclasses import dataclass as validated
from scipy import stats
from torch import nn

from suture.core.errors import ConfigError
from suture.core.labels import LabelSet
from suture.core.plain import read_toml
from suture.core.seeds import seed_for
from suture.core.validation import STRICT
from suture.data.readers.hospital import HospitalConfig
from suture.data.split import by_patient
from suture.data.table import Table
from suture.learning.metrics import auroc
from suture.learning.saved_models import models_of
from suture.learning.training import LocalTraining
from suture.methods.base import Method
from suture.methods.vanilla import VanillaFL
from suture.models import ModelSpec
from suture.models.saved import load_model
from suture.simulation.job import Job, with_settings
from suture.simulation.partition import SERVER
from suture.simulation.phantom import FINDINGS, Anatomy, chest
from suture.simulation.phantom_scans import Scanner, findings_of
from suture.simulation.run import run_job
from suture.simulation.sites import Destination, write_site, write_sites
from suture_papers.tables.cells import p_value
from suture_papers.tables.results import ResultStore

ROOT = Path(__file__).resolve().parents[1]
PLAN = ROOT / "custom" / "suture_papers" / "studies" / "phantom_maps.toml"
RESULTS = ROOT / "docs" / "results"
STUDY = "phantom_maps"
DESIGNS = ("fitted", "unseen")


def plan() -> dict[str, Any]:
    """Return the plan of the maps."""
    return read_toml(PLAN)


def federations_done(design: str) -> dict[str, dict[str, Any]]:
    """Return the records of a design's federations by name."""
    store, found = ResultStore(RESULTS / "runs", STUDY), {}
    for number in range(plan()["draws"][design]):
        if (record := store.find(name := f"{design}-{number:03d}")) is not None:
            found[name] = record
    return found


@validated(frozen=True, config=STRICT)
class PhantomFederation:
    """Sites with phantoms, each with a scanner and a list of findings of its own.

    Attributes:
        folder: of the images, which all runs of a federation share.
        sites: their number.
        overlap: chance that a site beyond the first annotates a finding.
        prevalence: of the findings, times that of the demo.
        shift: of the scanners, times that of the demo's.
        images: of each site, all of them for training.
        test: fully labelled images of all scanners, at the server.
        size: pixels of a side.
        contrast: how strongly findings are drawn.
        seed: of lists, scanners and images.
    """

    folder: str = "."
    sites: Annotated[int, Field(ge=2)] = 3
    overlap: Annotated[float, Field(ge=0, le=1)] = 0.5
    prevalence: Annotated[float, Field(gt=0)] = 1.0
    shift: Annotated[float, Field(ge=0)] = 1.0
    images: Annotated[int, Field(ge=20)] = 200
    test: Annotated[int, Field(ge=100)] = 900
    size: int = 32
    contrast: float = 1.0
    seed: int = 1

    synthetic: ClassVar[bool] = True

    def lists(self) -> dict[str, LabelSet]:
        """Return the findings that each site annotates; every finding has a site, every site a finding."""
        rng = np.random.default_rng(seed_for(self.seed, "lists"))
        has = rng.random((self.sites, len(FINDINGS))) < self.overlap
        first = rng.permutation([i % self.sites for i in range(max(self.sites, len(FINDINGS)))])
        for i, site in enumerate(first):
            has[site, i % len(FINDINGS)] = True
        for site in np.flatnonzero(~has.any(axis=1)):
            has[site, rng.integers(len(FINDINGS))] = True
        named = (tuple(name for name, own in zip(FINDINGS, row, strict=True) if own) for row in has)
        return {f"site-{i:02d}": LabelSet(names) for i, names in enumerate(named, 1)}

    def scanners(self) -> list[Scanner]:
        """Return the scanner of each site, as different as those of the demo where `shift` is 1."""
        rng = np.random.default_rng(seed_for(self.seed, "scanners"))
        kinds = (
            Scanner(
                blur=rng.uniform(0, 0.3),
                gamma=rng.uniform(0.88, 1.12),
                gain=rng.uniform(0.92, 1.08),
                offset=rng.uniform(-0.03, 0.03),
                noise=rng.uniform(0.028, 0.04),
            )
            for _ in range(self.sites)
        )
        return [kind.between(self.shift) for kind in kinds]

    def tables(self) -> dict[str, Table]:
        """Draw the images, unless they are there, and return each site's table, and the server's, with every
        label.
        """
        return _tables(self)

    def prepare(self, folder: Path, runs: Path, seed: int, method: Method) -> list[str]:  # noqa: ARG002
        """Write the sites; see `PhantomSites.prepare`."""
        lists, data = self.lists(), {}
        for name, table in self.tables().items():
            if name != SERVER:  # the test images are measured by `figures`, for all methods alike
                own = write_site(folder / name, table, lists[name])
                data[name] = HospitalConfig(root=table.root, table=own)
        return write_sites(Destination(folder, runs, method), data)


@lru_cache(maxsize=1)
def _tables(of: PhantomFederation) -> dict[str, Table]:
    scanners = of.scanners()
    found: dict[str, Table] = {}
    for name, own in [(f"site-{i:02d}", [one]) for i, one in enumerate(scanners, 1)] + [(SERVER, scanners)]:
        n = of.images if name != SERVER else of.test // len(own)
        root = Path(of.folder).resolve() / name  # a site lists all files of its folder
        root.mkdir(parents=True, exist_ok=True)
        names, patients, labels = [], [], []
        for number, scanner in enumerate(own):
            rng = np.random.default_rng(seed_for(of.seed, "images", name, number))
            person, anatomy, seen = 0, Anatomy.draw(rng), None
            for i in range(n):
                if seen is None or rng.random() < 0.5:
                    person, anatomy, seen = person + 1, Anatomy.draw(rng), None
                seen = findings_of(rng, seen, of.prevalence)
                pixels = scanner.take(chest(anatomy, seen, of.size, of.contrast, rng), rng)
                names.append(f"{name}-{number}-{i:04d}.png")
                Pillow.fromarray(pixels).save(root / names[-1], compress_level=1)
                patients.append(f"{name}-{number}-{person:04d}")
                labels.append([finding in seen for finding in FINDINGS])
        y = np.array(labels, dtype=np.float32)
        parts = (0.0, 0.0, 1.0) if name == SERVER else (1.0, 0.0, 0.0)
        split = by_patient(patients, y, parts, seed=of.seed)
        found[name] = Table(LabelSet(FINDINGS), tuple(names), tuple(patients), y, split, root)
    return found


def federations(plan: Mapping[str, Any], design: str) -> list[dict[str, float]]:
    """Return the parameters of each federation of a design: a Latin hypercube over the ranges.

    A parameter of several ranges is uniform over their union.
    """
    rng, n = np.random.default_rng(seed_for(plan["seed"], design)), int(plan["draws"][design])
    columns: dict[str, NDArray[np.float64]] = {}
    for name, ranges in plan[design].items():
        at = (rng.permutation(n) + rng.random(n)) / n
        whole = all(isinstance(bound, int) for pair in ranges for bound in pair)
        widths = [high - low + (name == "sites") for low, high in ranges]
        edges = np.cumsum([0, *widths]) / sum(widths)
        part = np.minimum(np.searchsorted(edges, at, side="right") - 1, len(ranges) - 1)
        lows = np.array([low for low, _ in ranges], dtype=np.float64)
        values = lows[part] + (at - edges[part]) * sum(widths)
        columns[name] = np.floor(values) if whole else values
    return [{name: round(float(column[i]), 4) for name, column in columns.items()} for i in range(n)]


def job_of(plan: Mapping[str, Any], sites: PhantomFederation, row: str) -> Job:
    """Return the job of a row of the plan in a federation."""
    job = Job(
        name="phantom-maps",
        title="Phantom maps",
        method=VanillaFL(
            local=LocalTraining(lr=plan["learning_rate"], epochs=1, batch_size=plan["batch_size"])
        ),
        model=ModelSpec("cnn", size=plan["size"]),
        rounds=plan["rounds"],
        selection="last",
        seed=sites.seed % 2**31,
        simulation=sites,
    )
    words = (f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in plan["rows"][row]["set"].items())
    return with_settings(job, list(words))


def figures(run: Path, sites: PhantomFederation) -> dict[str, Any]:
    """Return the AUROC of each finding on the test images, its mean, and how batch norm statistics lag.

    ``auroc`` of models that stay at their sites is the mean over the sites that annotate a finding. ``lag``
    is by how much the mean would rise with batch norm statistics of the test images themselves.
    """
    test, models = sites.tables()[SERVER], [load_model(path) for path in models_of(run).values()]
    pixels = np.stack([np.asarray(Pillow.open(test.root / name)) for name in test.images])

    def areas() -> NDArray[np.float64]:
        found = np.full((len(models), len(FINDINGS)), np.nan)
        for i, (model, prepare) in enumerate(models):
            with torch.no_grad():
                scores = model({"image": prepare(torch.from_numpy(pixels)[:, None])}).numpy()
            for c, name in enumerate(FINDINGS):
                if name in model.labels:
                    found[i, c] = auroc(test.y[:, c], scores[:, model.labels.index(name)])
        means: NDArray[np.float64] = np.nanmean(found, axis=0)
        return means

    by_class = areas()
    for model, _ in models:
        for layer in model.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.train()  # statistics of the batch, which is all test images
    lag = round(float(np.nanmean(areas()) - np.nanmean(by_class)), 4)
    shown = [None if np.isnan(area) else round(float(area), 4) for area in by_class]
    return {"auroc": shown, "mean": round(float(np.nanmean(by_class)), 5), "lag": lag}


def taught(sites: PhantomFederation) -> float:
    """Return the share of all positives of the sites' images that lie at sites without the label."""
    lists, hidden, every = sites.lists(), 0.0, 0.0
    for name, table in sites.tables().items():
        if name != SERVER:
            positives = (table.y == 1).sum(axis=0)
            every += positives.sum()
            hidden += positives[[finding not in lists[name].names for finding in FINDINGS]].sum()
    return float(hidden / every)


def without_label(sites: PhantomFederation) -> float:
    """Return the share of pairs of site and finding that are not annotated."""
    return 1 - sum(len(own) for own in sites.lists().values()) / (sites.sites * len(FINDINGS))


def mechanisms(sites: PhantomFederation, method: Method) -> dict[str, float]:
    """Return the share of positives that a method teaches as absent, and of a row's weight that comes from
    sites without its label.
    """
    negative = method.labels.view == "all" and method.labels.unknown == "negative"
    everyone = method.about.name == "partial" or getattr(method, "rows", "all") == "all"
    diluted = (everyone and method.labels.view == "all") or method.about.name == "partial"
    return {
        "taught": round(taught(sites), 4) if negative else 0.0,
        "diluted": round(without_label(sites), 4) if diluted else 0.0,
    }


def site_facts(sites: PhantomFederation) -> dict[str, dict[str, Any]]:
    """Return what a study shows of each site: images, its own findings' positives, and gray levels.

    ``gray``: mean and standard deviation, over images, of an image's mean gray level (0 to 255).
    """
    found, lists = {}, sites.lists()
    for name, table in sites.tables().items():
        if name == SERVER:
            continue
        levels = [float(np.asarray(Pillow.open(table.root / image)).mean()) for image in table.images]
        count = (table.y == 1).sum(axis=0)
        positives = {f: int(count[i]) for i, f in enumerate(FINDINGS) if f in lists[name].names}
        gray = [round(float(np.mean(levels)), 2), round(float(np.std(levels)), 2)]
        found[name] = {"images": len(table), "positives": positives, "gray": gray}
    return found


def federation(plan: Mapping[str, Any], design: str, number: int, images: Path) -> PhantomFederation:
    """Return one federation of a design."""
    at = federations(plan, design)[number]
    return PhantomFederation(
        folder=str(images),
        sites=int(at["sites"]),
        overlap=at["overlap"],
        prevalence=at["prevalence"],
        shift=at["shift"],
        images=int(at["images"]),
        test=plan["test"],
        size=plan["size"],
        contrast=plan["contrast"],
        seed=seed_for(plan["seed"], design, number) % 2**31,
    )


def run_federation(plan: Mapping[str, Any], design: str, number: int, work: Path) -> dict[str, Any]:
    """Run every row of the plan in one federation, and return its record."""
    sites, began, rows = federation(plan, design, number, work / "images"), time.process_time(), {}
    for row in plan["rows"]:
        started, job = time.process_time(), job_of(plan, sites, row)
        run = run_job(job, "local", work / row, overwrite=True)
        of = {**figures(run, sites), **mechanisms(sites, job.method)}
        rows[row] = {**of, "seconds": round(time.process_time() - started, 2)}
    seconds = round(time.process_time() - began, 1)
    at = federations(plan, design)[number]
    return {"design": design, "at": at, "sites": site_facts(sites), "rows": rows, "seconds": seconds}


def conduct(plan: Mapping[str, Any], store: ResultStore, work: Path) -> None:
    """Do the runs that are missing, in turn of both designs; the plan is stored first.

    Raises:
        ConfigError: the plan has changed since its first run.
    """
    digest = hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()
    registered = store.find("plan")
    if registered is None:
        store.put(
            "plan", registered := {"date": f"{datetime.now():%Y-%m-%d %H:%M}", "digest": digest, "plan": plan}
        )
    if registered["digest"] != digest:
        raise ConfigError(
            f"{PLAN} has changed since its first run; set it back, or delete {store.folder}/{STUDY}.jsonl"
        )
    every = [(design, number) for design in DESIGNS for number in range(plan["draws"][design])]
    for design, number in sorted(every, key=lambda one: (one[1] + 0.5) / plan["draws"][one[0]]):
        if store.find(name := f"{design}-{number:03d}") is not None:
            continue
        shutil.rmtree(work, ignore_errors=True)
        record = run_federation(plan, design, number, work)
        store.put(name, record)
        best = max(plan["rows"], key=lambda row: record["rows"][row]["mean"])
        print(f"{datetime.now():%H:%M:%S} {name}: {best}, {record['seconds']:.1f} s", flush=True)
    shutil.rmtree(work, ignore_errors=True)


PARAMETERS = {
    "sites": "number of sites",
    "overlap": "overlap: chance that a further site annotates a finding",
    "prevalence": "prevalence, times the demo's",
    "shift": "shift of scanners, times the demo's",
    "images": "images of a site",
}


def gain(record: Mapping[str, Any], row: str, control: str) -> float:
    """Return the difference of a row's mean AUROC from the control's."""
    return float(record["rows"][row]["mean"] - record["rows"][control]["mean"])


def _interval(values: Sequence[float]) -> str:
    """Return mean and 95 % t interval; the mean alone of fewer than three values."""
    if len(values) < 3:
        return f"{np.mean(values):+.3f}" if len(values) else "–"
    reach = float(stats.t.ppf(0.975, len(values) - 1)) * float(np.std(values, ddof=1)) / len(values) ** 0.5
    mean, sure = float(np.mean(values)), abs(float(np.mean(values))) > reach
    text = f"{mean:+.3f} ({mean - reach:+.3f} to {mean + reach:+.3f})"
    return f"**{text}**" if sure else text


def by_parameter(records: Sequence[Mapping[str, Any]], at: str, rows: Sequence[str], control: str) -> str:
    """Return a Markdown table: the gain of each row in thirds of a parameter."""
    values = np.array([record["at"][at] for record in records])
    edges = np.quantile(values, [0, 1 / 3, 2 / 3, 1])
    lines = [f"| {PARAMETERS[at]} | n | " + " | ".join(rows) + " |", "|---" * (len(rows) + 2) + "|"]
    third = np.clip(np.searchsorted(edges[1:3], values, side="right"), 0, 2)
    for i in sorted({*third.tolist()}):
        own = [record for record, part in zip(records, third, strict=True) if part == i]
        inside = values[third == i]
        gains = (_interval([gain(record, row, control) for record in own]) for row in rows)
        lines.append(f"| {inside.min():.3g} to {inside.max():.3g} | {len(own)} | " + " | ".join(gains) + " |")
    return "\n".join(lines)


def mechanism_table(records: Sequence[Mapping[str, Any]], rows: Mapping[str, Any], control: str) -> str:
    """Return a Markdown table of what methods do, and how their gain goes with what the control does."""
    lines = [
        "| method | best in | positives taught as absent | weight of rows from sites without the label | "
        "AUROC gained with batch norm statistics of the test images | rank correlation of gain with "
        "positives taught as absent | with shift |",
        "|---|---|---|---|---|---|---|",
    ]
    best = [max(rows, key=lambda row: record["rows"][row]["mean"]) for record in records]
    for row in rows:
        means = [
            f"{np.mean([r['rows'][row][key] for r in records]):.3f}" for key in ("taught", "diluted", "lag")
        ]
        gains = [gain(record, row, control) for record in records]
        with_ = [[r["rows"][control]["taught"] for r in records], [r["at"]["shift"] for r in records]]
        found = (
            ["–", "–"] if row == control or len(records) < 4 else [_correlation(gains, one) for one in with_]
        )
        cells = [rows[row]["name"], f"{best.count(row)} of {len(best)}", *means, *found]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _correlation(gains: Sequence[float], other: Sequence[float]) -> str:
    found = stats.spearmanr(gains, other)
    return f"{found.statistic:+.2f} (p {p_value(float(found.pvalue))})"


def draw(records: Sequence[Mapping[str, Any]], rows: Mapping[str, Any], control: str, out: Path) -> None:
    """Draw the gain of each row by the share of positives that the control teaches as absent."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(rows) - 1, figsize=(13, 2.8), sharey=True, layout="constrained")
    x = np.array([record["rows"][control]["taught"] for record in records])
    for panel, row in zip(panels, [row for row in rows if row != control], strict=True):
        y = np.array([gain(record, row, control) for record in records])
        panel.scatter(x, y, s=9, color="#2a6f97")
        slope = stats.linregress(x, y)
        panel.plot(
            [x.min(), x.max()], slope.intercept + slope.slope * np.array([x.min(), x.max()]), color="k"
        )
        panel.axhline(0, color="#999", linewidth=0.8)
        panel.set_title(rows[row]["name"], fontsize=8)
        panel.set_xlabel("positives taught as absent", fontsize=8)
    panels[0].set_ylabel("mean AUROC over the control", fontsize=8)
    figure.savefig(out, metadata={"Date": None})
    plt.close(figure)


def render(plan: Mapping[str, Any], results: Path) -> None:
    """Write phantom_maps.md and phantom_maps.svg from the federations that are done."""
    rows, control = plan["rows"], plan["control"]
    others = [row for row in rows if row != control]
    parts = [
        "# Phantom maps: where a method starts to win",
        plan["question"],
        "Gain: mean AUROC over that of the control, FL that counts missing labels as negative, on the same "
        f"{plan['test']} test images; 95 % t interval over federations, bold where it excludes 0. Neither "
        "intervals nor p are corrected for their number: of gains of 0, one in twenty is bold. FedAvg, "
        "Combined and FedProx weight positives by negatives / positives, the others do not. One run of "
        f"each method in a federation: {plan['rounds']} rounds, a small CNN from scratch, {plan['size']} px. "
        "The plan is custom/suture_papers/studies/phantom_maps.toml; `python benchmarks/phantom_maps.py` "
        "does the runs that are missing and writes this page.",
    ]
    for design in DESIGNS:
        records = list(federations_done(design).values())
        parts.append(f"## {design}: {len(records)} of {plan['draws'][design]} planned federations are done")
        if len(records) > 2:
            parts.append(mechanism_table(records, rows, control))
            parts += [by_parameter(records, at, others, control) for at in PARAMETERS]
    every = [record for design in DESIGNS for record in federations_done(design).values()]
    if len(every) > 2:
        draw(every, rows, control, results / f"{STUDY}.svg")
        parts.append(f"![Gain by the share of positives that the control teaches as absent]({STUDY}.svg)")
    (results / f"{STUDY}.md").write_text("\n\n".join(parts) + "\n")


def main() -> None:
    """Do what is missing, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / STUDY, help="folder of the runs")
    parser.add_argument("--render", action="store_true", help="only write the page")
    given = parser.parse_args()
    if not given.render:
        torch.set_num_threads(1)
        os.environ["SUTURE_CACHE"] = str(given.work / "cache")
        logging.getLogger("suture").setLevel(logging.ERROR)
        conduct(plan(), ResultStore(RESULTS / "runs", STUDY), given.work)
    render(plan(), RESULTS)


if __name__ == "__main__":
    main()
