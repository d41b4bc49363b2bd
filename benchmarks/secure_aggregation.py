"""What secure aggregation costs: `python benchmarks/secure_aggregation.py`.

Federations of 4, 16 and 64 sites in the loop of one process, of 18 images each, with and without it. Of each:
bytes of one site and CPU seconds of all sites and the server together, a round. The models must be equal.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

from harness import machine

from suture import ModelSpec
from suture.federation.plan import Plan
from suture.learning.training import LocalTraining
from suture.methods.base import GlobalModel
from suture.methods.secure_aggregation import SecureAggregation
from suture.methods.surgical import SurgicalAggregation
from suture_synthetic import trial
from suture_synthetic.trial import Trial

CLASSES = ("Fibrosis", "Hernia", "Mass", "Nodule")


def run(
    model: str, sites: int, rounds: int, plan: Callable[..., Plan]
) -> tuple[float, float, float, GlobalModel]:
    """CPU seconds of a round, bytes up and down of a site in it, and the model at the end."""
    members = {f"site-{k:02d}": CLASSES for k in range(sites)}
    method = SurgicalAggregation(local=LocalTraining(lr=1e-2, batch_size=18))
    with (
        patch.object(trial, "SITES", members),
        patch.object(trial, "Plan", plan),
        Trial(method, ModelSpec(model, size=32), "multilabel", rounds=rounds) as federation,
    ):
        began = time.process_time()
        federation.run()
        seconds = (time.process_time() - began) / rounds
        lines = federation.history()
        up, down = (sum(line[way] for line in lines) / sites / rounds for way in ("bytes_up", "bytes_down"))
        return seconds, up, down, federation.server.model


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["cnn"])
    parser.add_argument("--sites", nargs="+", type=int, default=[4, 16, 64])
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    print(machine(), "\n")
    print("| model, numbers | sites | kB up | masked | kB down | masked | CPU s a round | masked |")
    print("|---|---|---|---|---|---|---|---|")
    for model in asked.models:
        for sites in asked.sites:
            plain = run(model, sites, asked.rounds, Plan)
            masked = run(model, sites, asked.rounds, partial(Plan, secure_aggregation=SecureAggregation()))
            one, two = ({**m.shared, **m.head} for m in (plain[3], masked[3]))
            apart = max(float((one[name] - two[name]).abs().max()) for name in one)
            assert apart < 1e-6, apart
            numbers = f"{sum(t.numel() for t in one.values()):,}"
            up = [f"{r[1] / 1e3:,.0f}" for r in (plain, masked)]
            down = [f"{r[2] / 1e3:,.0f}" for r in (plain, masked)]
            seconds = [f"{r[0]:.2f}" for r in (plain, masked)]
            print("|", " | ".join([f"{model}, {numbers}", str(sites), *up, *down, *seconds]), "|", flush=True)


if __name__ == "__main__":
    main()
