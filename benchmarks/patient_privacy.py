"""What DP-SGD per patient costs: `SUTURE_DATA=... python benchmarks/patient_privacy.py`.

Surgical Aggregation of NIH ChestX-ray14 (the sites of `surgical_nih`) with a frozen EfficientNet-Lite0, whose
head alone is trained, at sites of several ε per patient and without. One rule for all: batches of a tenth of
a site's patients, few rounds, and the clip, by Adam. Prints the noise and the AUROC on the test data.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from harness import machine

from suture import ModelSpec, load_job
from suture.core.privacy import PrivacyConfig
from suture.data.augmentation import Augmentation
from suture.learning.training import LocalTraining
from suture.simulation.notebook import run as run_job


def run(
    epsilon: float | None, seed: int, rounds: int, batch: int, lr: float, clip: float
) -> tuple[float, list[float]]:
    """One run; returns the mean AUROC of the selected model, and the noise of each site."""
    public = PrivacyConfig.of_public_data

    def limits(label_view: Any) -> PrivacyConfig:
        return public(label_view).model_copy(
            update={} if epsilon is None else {"epsilon": epsilon, "clip": clip}
        )

    job = load_job("surgical_nih")
    local = LocalTraining(lr=lr, batch_size=batch, epochs=1)
    method = replace(job.method, local=local, batch_norm="frozen")  # type: ignore[type-var]
    model = ModelSpec("efficientnet_lite0", size=64, weights="package", train="head")
    job = replace(job, method=method, model=model, augmentation=Augmentation(), rounds=rounds, seed=seed)
    with tempfile.TemporaryDirectory() as folder, patch.object(PrivacyConfig, "of_public_data", limits):
        run_job(job, out=Path(folder) / "run")
        auroc = float(json.loads((Path(folder) / "run" / "metrics.json").read_text())["mean_auroc"])
        counts = [json.loads(path.read_text()) for path in sorted(Path(folder).rglob("counts.json"))]
    return auroc, [one["multiplier"] for one in counts if one.get("multiplier")]


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epsilons", nargs="+", type=float, default=[1, 4, 8, 0], help="0 is none")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--clip", type=float, default=1.0)
    asked = parser.parse_args()
    print(f"{vars(asked)}; {machine()}\n\n| ε | noise of each site | mean AUROC (range) |\n|---|---|---|")
    for epsilon in asked.epsilons:
        runs = [
            run(epsilon or None, seed, asked.rounds, asked.batch, asked.lr, asked.clip)
            for seed in range(1, asked.seeds + 1)
        ]
        areas = [area for area, _ in runs]
        noise = ", ".join(f"{sigma:.2f}" for sigma in runs[0][1]) or "none"
        figures = f"{statistics.mean(areas):.3f} ({min(areas):.3f}-{max(areas):.3f})"
        print(f"| {epsilon:g} | {noise} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
