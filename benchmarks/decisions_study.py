"""Thresholds and calibration at two sites of different prevalence: `decisions_study.py`.

    SUTURE_DATA=DIR python benchmarks/decisions_study.py --seeds 5

NIH ChestX-ray14 (64 px), three frequent findings, patients divided at random to two sites: at `referral` most
images without any of them are left out, at `screening` most images with one. 30/30/40 % of the patients of
each train, validate and test. Of each seed one run of Surgical Aggregation; the target is a sensitivity.
Prints, over seeds, the sensitivity on test images at each site by the site's own threshold, by that of all
sites and by 0.5, the calibration error before and after, and the bytes that the counts of scores take. With
`--gamma 2` the images of `screening` come from another scanner, too.
"""

from __future__ import annotations

import os
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from harness import command, ran, show
from PIL import Image
from sklearn.metrics import roc_auc_score

from suture.data.config import load_site_config
from suture.execution.job import Job
from suture.execution.study import StudySites
from suture.learning.calibration import calibrate
from suture.learning.decisions import decide
from suture.learning.training import LocalTraining
from suture.methods.surgical import SurgicalAggregation
from suture.models import ModelSpec
from suture.protocol.decisions import DecisionSettings
from suture_papers.chest_xrays.chest_sites import nih_release
from suture_results.decided_predictions import read_decisions
from suture_results.saved_models import evaluate

FINDINGS = ("Infiltration", "Atelectasis", "Effusion")
SHARES = {"referral": (0.25, 1.0), "screening": (1.0, 0.4)}
"""Share of the images without, and of those with a finding that a site keeps."""


def write_sites(folder: Path, root: Path, seed: int, min_count: int, gamma: float) -> None:
    """Write the study: a table and a suture.toml of each site."""
    listed, images = nih_release(root)
    roots = {"referral": images, "screening": images if gamma == 1 else other_scanner(images, folder, gamma)}
    table, rng = pd.read_csv(listed), np.random.default_rng(seed)
    found = table["Finding Labels"].str.split("|")
    for finding in FINDINGS:
        table[finding] = [int(finding in names) for names in found]
    patients = table["Patient ID"].unique()
    site = dict(zip(patients, rng.integers(2, size=len(patients)), strict=True))
    split = dict(
        zip(
            patients,
            rng.choice(["train", "validation", "test"], len(patients), p=[0.3, 0.3, 0.4]),
            strict=True,
        )
    )
    for number, (name, shares) in enumerate(SHARES.items()):
        own = table[[site[p] == number for p in table["Patient ID"]]]
        ill = own[list(FINDINGS)].any(axis=1).to_numpy()
        own = own[rng.random(len(own)) < np.where(ill, shares[1], shares[0])]
        rows = own.rename(columns={"Image Index": "image", "Patient ID": "patient"})
        rows = rows.assign(split=[split[p] for p in rows["patient"]])
        (folder / name).mkdir(parents=True)
        rows[["image", "patient", "split", *FINDINGS]].to_csv(folder / name / "labels.csv", index=False)
        (folder / name / "suture.toml").write_text(
            f'[data]\ndataset = "hospital"\nroot = "{roots[name]}"\ntable = "labels.csv"\n'
            f'[privacy]\nlabel_view = "all"\nmin_count = {min_count}\n'
        )


def other_scanner(images: Path, folder: Path, gamma: float) -> Path:
    """Write the images of a tar file as a scanner of another gamma would show them; return their folder."""
    out = folder / "other_scanner"
    out.mkdir(parents=True)
    with tarfile.open(images) as archive:
        for member in archive:
            if content := archive.extractfile(member):
                pixels = np.asarray(Image.open(content).convert("L")) / 255
                Image.fromarray(np.uint8(255 * pixels**gamma)).save(out / Path(member.name).name)
    return out


def one(
    root: Path, seed: int, rounds: int, settings: DecisionSettings, min_count: int, gamma: float
) -> dict[str, Any]:
    """One run: how well its test images are decided, with all digits, and the bytes of the counts.

    What sites report lies on the grids of disclosure, in steps of up to .1 here, so the test images are
    predicted again.
    """
    method = SurgicalAggregation(local=LocalTraining(lr=1e-3, epochs=1, batch_size=64))
    with tempfile.TemporaryDirectory() as temporary:
        study = Path(temporary) / "study"
        write_sites(study, root, seed, min_count, gamma)
        job = Job(
            name="decisions",
            title="decisions",
            method=method,
            model=ModelSpec("cnn", size=64),
            rounds=rounds,
            seed=seed,
            simulation=StudySites(str(study)),
            decision=settings,
        )
        with ran(job) as out:
            answers = out.glob("sites/*/state/**/answers/calibrate/*.safetensors")
            return {
                "bytes": [path.stat().st_size for path in answers],
                "sites": {
                    site: measured(out / "model", study / site / "suture.toml", site) for site in SHARES
                },
            }


def measured(model: Path, config: Path, site: str) -> dict[str, dict[str, Any]]:
    """How well a site's test images of each class are decided, and how AUROC is moved by calibration."""
    decisions, found = read_decisions(model, site), {}
    done = evaluate(model, load_site_config(config), "test")
    for name in done.tested:
        column = done.labels.index(name)
        y, p = done.y[:, column].astype(np.float64), done.scores[:, column].astype(np.float64)
        decision = decisions.of(site, name)
        line = decision.fitted and decision.fitted.calibration
        moved = abs(roc_auc_score(y, calibrate(p, line)) - roc_auc_score(y, p)) if line else 0.0
        found[name] = asdict(decide(y, p, decision, decisions.settings.rule)) | {
            "prevalence": float(np.nanmean(y)),
            "moved": moved,
        }
    return found


def lines(results: list[dict[str, Any]]) -> Iterator[list[str]]:
    """A line for each site and class: means over the seeds, and the range of the own threshold's figure."""
    for site in SHARES:
        for name in results[0]["sites"][site]:
            of = [found["sites"][site][name] for found in results]
            rates = {
                by: [one[by]["sensitivity"] for one in of if one[by]] for by in ("own", "pooled", "half")
            }
            own = rates["own"]
            ece = zip(*(one["ece"] for one in of if None not in one["ece"]), strict=True)
            yield [
                site,
                name,
                f"{np.mean([one['prevalence'] for one in of]):.3f}",
                f"{np.mean(own):.3f} ({min(own):.2f}-{max(own):.2f}, n {len(own)})" if own else "none",
                f"{np.mean(rates['pooled']):.3f}",
                f"{np.mean(rates['half']):.3f}",
                " to ".join(f"{np.mean(values):.3f}" for values in ece),
                f"{max(one['moved'] for one in of):.0e}",
            ]


def main(
    seeds: int = 5, rounds: int = 8, sensitivity: float = 0.85, min_count: int = 5, gamma: float = 1.0
) -> None:
    """Print the table.

    Args:
        gamma: of the images at the site `screening`.
    """
    root, settings = (
        Path(os.environ["SUTURE_DATA"]) / "nih_cxr14_64px",
        DecisionSettings(sensitivity=sensitivity),
    )
    results = [one(root, seed, rounds, settings, min_count, gamma) for seed in range(1, seeds + 1)]
    head = (
        "site",
        "class",
        "prevalence",
        "own threshold",
        "all sites",
        "0.5",
        "ECE",
        "AUROC moved",
    )
    sizes = sorted({size for found in results for size in found["bytes"]})
    note = f"sensitivity on test images, target {sensitivity}; {seeds} seeds"
    show(head, lines(results), note, f"bytes of the counts, a site: {sizes}")


if __name__ == "__main__":
    command(main, seeds=1, rounds=1)
