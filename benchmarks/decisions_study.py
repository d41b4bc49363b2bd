"""Thresholds, calibration and conformal sets at two sites of different prevalence: `decisions_study.py`.

    SUTURE_DATA=DIR python benchmarks/decisions_study.py --seeds 5

NIH ChestX-ray14 (64 px), three frequent findings, patients dealt at random to two sites: at `referral` most
images without any of them are left out, at `screening` most images with one. 40/30/30 % of the patients of
each train, validate and test. Of each seed one run of Surgical Aggregation; the target is a sensitivity.
Prints, over seeds, the sensitivity on test images at each site by the site's own threshold, by that of all
sites and by 0.5, the calibration error before and after, the coverage of the sets, and the bytes that the
counts of scores take.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from machine import machine
from rich.console import Console
from rich.table import Table

from suture.learning.training import LocalTraining
from suture.methods.surgical import SurgicalAggregation
from suture.models import ModelSpec
from suture.protocol.decisions import DecisionSettings
from suture.simulation import StudySites
from suture.simulation.chest import nih_release
from suture.simulation.job import Job
from suture.simulation.run import run_job

FINDINGS = ("Infiltration", "Atelectasis", "Effusion")
KEPT = {"referral": (0.25, 1.0), "screening": (1.0, 0.4)}
"""Share of the images without, and of those with a finding that a site keeps."""


def write_sites(folder: Path, root: Path, seed: int, min_count: int) -> None:
    """Write the study: a table and a suture.toml of each site."""
    listed, images = nih_release(root)
    table, rng = pd.read_csv(listed), np.random.default_rng(seed)
    found = table["Finding Labels"].str.split("|")
    for finding in FINDINGS:
        table[finding] = [int(finding in names) for names in found]
    patients = table["Patient ID"].unique()
    site = dict(zip(patients, rng.integers(2, size=len(patients)), strict=True))
    split = dict(
        zip(
            patients,
            rng.choice(["train", "validation", "test"], len(patients), p=[0.4, 0.3, 0.3]),
            strict=True,
        )
    )
    for number, (name, shares) in enumerate(KEPT.items()):
        own = table[[site[p] == number for p in table["Patient ID"]]]
        ill = own[list(FINDINGS)].any(axis=1).to_numpy()
        own = own[rng.random(len(own)) < np.where(ill, shares[1], shares[0])]
        rows = own.rename(columns={"Image Index": "image", "Patient ID": "patient"})
        rows = rows.assign(split=[split[p] for p in rows["patient"]])
        (folder / name).mkdir(parents=True)
        rows[["image", "patient", "split", *FINDINGS]].to_csv(folder / name / "labels.csv", index=False)
        (folder / name / "suture.toml").write_text(
            f'[data]\ndataset = "hospital"\nroot = "{images}"\ntable = "labels.csv"\n'
            f'[privacy]\nlabel_view = "all"\nmin_count = {min_count}\n'
        )


def one(root: Path, seed: int, rounds: int, settings: DecisionSettings, min_count: int) -> dict[str, Any]:
    """The decisions of one run, and the bytes of the counts."""
    with tempfile.TemporaryDirectory() as temporary:
        study, out = Path(temporary) / "study", Path(temporary) / "run"
        write_sites(study, root, seed, min_count)
        method = SurgicalAggregation(local=LocalTraining(lr=1e-3, epochs=1, batch_size=64))
        model = ModelSpec("cnn", size=64)
        sites = StudySites(str(study))
        job = Job("decisions", "decisions", method, model, rounds, seed, simulation=sites, decision=settings)
        run_job(job, out=out)
        found: dict[str, Any] = json.loads((out / "metrics.json").read_text())["decisions"]
        answers = [*out.glob("sites/*/state/*/answers/calibrate/*.safetensors")]
        found["bytes"] = [path.stat().st_size for path in answers]
    return found


def lines(results: list[dict[str, Any]]) -> Iterator[list[str]]:
    """A line for each site and class: means over the seeds, and the range of the own threshold's figure."""
    for site in KEPT:
        for name in FINDINGS:
            of = [found["measured"][site][name] for found in results if name in found["measured"][site]]
            fitted = [found["sites"][site][name] for found in results if name in found["sites"][site]]
            rates = {
                by: [one[by]["sensitivity"] for one in of if one[by]] for by in ("own", "pooled", "half")
            }
            own = rates["own"]
            yield [
                site,
                name,
                f"{np.mean([point['prevalence'] for point in fitted]):.2f}",
                f"{np.mean(own):.3f} ({min(own):.2f}-{max(own):.2f}, n {len(own)})",
                f"{np.mean(rates['pooled']):.3f}",
                f"{np.mean(rates['half']):.3f}",
                " to ".join(
                    f"{np.mean([one['ece'][k] for one in of if one['ece'][k] is not None]):.3f}"
                    for k in (0, 1)
                ),
                f"{np.mean([one['sets'] for one in of]):.3f}",
            ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--sensitivity", type=float, default=0.85)
    parser.add_argument("--min-count", type=int, default=5)
    asked = parser.parse_args()
    root = Path(os.environ["SUTURE_DATA"]) / "nih_cxr14_64px"
    settings = DecisionSettings(sensitivity=asked.sensitivity)
    results = [one(root, s, asked.rounds, settings, asked.min_count) for s in range(1, asked.seeds + 1)]
    heads = ("site", "class", "prevalence", "own threshold", "all sites", "0.5", "ECE", "coverage")
    table = Table(*heads, box=None)
    for line in lines(results):
        table.add_row(*line)
    console = Console(width=140)
    console.print(
        f"{machine()}\n\nsensitivity on test images, target {asked.sensitivity}; {len(results)} seeds"
    )
    console.print(table)
    console.print(
        "bytes of the counts, a site:", sorted({size for found in results for size in found["bytes"]})
    )


if __name__ == "__main__":
    main()
