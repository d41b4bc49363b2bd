"""What a round carries and costs by encoder and by the part that is trained: `python benchmarks/encoders.py`.

`surgical_nih` (set SUTURE_DATA) in the plain loop with one thread, for each encoder with all of the model,
with adapters, and with the head alone, over seeds. The ViT begins with random weights: its row is of bytes.
The first run of a frozen encoder computes the features that the others read; SUTURE_CACHE says where they
stay. AUROC is the mean over classes on the server's labelled test set; seconds of a round are the median of
those after the first.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from machine import machine
from rich.console import Console
from rich.table import Table

from suture.core.files import read_json, read_records
from suture.core.labels import LabelSet
from suture.methods.surgical import SurgicalAggregation
from suture.models import ModelSpec, build
from suture.models.adapters import Adapters
from suture.models.classifier import shared_names
from suture.simulation.job import load_job
from suture.simulation.run import run_job

ENCODERS = {
    "cnn": ModelSpec("cnn"),
    "resnet_small": ModelSpec("resnet_small"),
    "efficientnet_lite0": ModelSpec("efficientnet_lite0", weights="package"),
    "vit_tiny": ModelSpec("timm:vit_tiny_patch16_224"),
}
ADAPTERS = {"efficientnet_lite0": Adapters("bias")}
"""Of encoders that do not take the default ones: Lite0's convolutions pad in their own way."""

MODES = ("all", "adapters", "head")


def travelling(spec: ModelSpec, classes: int) -> int:
    """Numbers of a model of so many classes that a round carries in each direction."""
    model = build(spec, LabelSet(tuple(f"class {i}" for i in range(classes))), 0, pretrained=False)
    state = model.state_dict()
    return sum(state[n].numel() for n in (*shared_names(model, "average"), "head.weight", "head.bias"))


def main() -> None:
    """Prints a row for each encoder and mode."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--encoders", nargs="+", choices=ENCODERS, default=list(ENCODERS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--pretrained", help="for resnet_small: a folder of `suture pretrain`")
    args = parser.parse_args()
    if args.pretrained:
        ENCODERS["resnet_small"] = ModelSpec("resnet_small", weights=args.pretrained)
    job = load_job("surgical_nih")
    assert isinstance(job.method, SurgicalAggregation)
    job = replace(job, method=replace(job.method, local=replace(job.method.local, lr=args.lr)))
    heading = ("encoder", "trains", "numbers", "bytes a round", "s a round", "s a run", "mean AUROC (range)")
    table = Table(*heading, box=None)
    for name in args.encoders:
        for mode in args.modes:
            adapters = ADAPTERS.get(name) if mode == "adapters" else None
            spec = replace(ENCODERS[name], train=mode, adapters=adapters)
            areas, rounds, runs, carried = [], [], [], 0
            for seed in range(1, args.seeds + 1):
                with tempfile.TemporaryDirectory() as folder:
                    start = time.perf_counter()
                    ready = replace(job, model=spec, rounds=args.rounds, seed=seed)
                    out = run_job(ready, out=Path(folder) / "run")
                    runs.append(time.perf_counter() - start)
                    lines = read_records(out / "history.jsonl")
                    carried = lines[-1]["bytes_down"] + lines[-1]["bytes_up"]
                    rounds += [line["seconds"] for line in lines[1:]]
                    areas.append(read_json(out / "metrics.json")["mean_auroc"])
            figures = f"{statistics.mean(areas):.3f} ({min(areas):.3f}-{max(areas):.3f})"
            pace = [f"{statistics.median(rounds):.2f}", f"{statistics.median(runs):.1f}"]
            table.add_row(name, mode, f"{travelling(spec, 14):,}", f"{carried:,}", *pace, figures)
    Console(width=130).print(machine(), table)


if __name__ == "__main__":
    main()
