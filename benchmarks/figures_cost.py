"""What default limits cost an honest run: `python benchmarks/figures_cost.py JOB --set KEY=VALUE`.

Runs a job twice for each seed as a plain loop, at sites with exact figures and at sites with default limits
under [privacy]. The training is the same; the figures decide which round is selected. Prints the selected
rounds, the AUROC of their models on the server's test data, the bytes that the sites sent, and the seconds.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from harness import machine

from suture.core.privacy import PrivacyConfig
from suture.simulation.notebook import run as run_job


def run(name: str, seed: int, settings: list[tuple[str, str, str]], exact: bool) -> dict[str, float]:
    """One run; returns the selected round, AUROC, megabytes sent by the sites, and seconds."""

    def limits(label_view: Any, **_: Any) -> PrivacyConfig:
        own: dict[str, Any] = {"min_count": 0, "min_loss": 0} if exact else {}
        return PrivacyConfig(label_view=label_view, **own)

    with tempfile.TemporaryDirectory() as folder, patch("suture.simulation.sites.PrivacyConfig", limits):
        out, began = Path(folder) / "run", time.monotonic()
        run_job(name, out=out, seed=seed, settings={k: json.loads(v) for k, _, v in settings})
        seconds = time.monotonic() - began
        metrics = json.loads((out / "metrics.json").read_text())
        lines = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    return {
        "round": metrics["selected_round"],
        "AUROC": metrics["mean_auroc"],
        "MB": sum(line["bytes_up"] for line in lines) / 1e6,
        "s": seconds,
    }


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--set", dest="settings", nargs="*", default=[], help="settings of the job")
    asked = parser.parse_args()
    print(f"{asked.job} {asked.settings}; {machine()}\n")
    print("| seed | figures | round | AUROC | MB | s |\n|---|---|---|---|---|---|")
    for seed in asked.seeds:
        for exact in (True, False):
            found = run(asked.job, seed, [s.partition("=") for s in asked.settings], exact)
            cells = f"{found['round']} | {found['AUROC']:.4f} | {found['MB']:.3f} | {found['s']:.1f}"
            print(f"| {seed} | {'exact' if exact else 'default limits'} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
