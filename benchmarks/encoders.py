"""What a round carries and costs by encoder and by the part that is trained: `python benchmarks/encoders.py`.

`surgical_nih` (set SUTURE_DATA) in the plain loop with one thread, for each encoder with all of the model,
with adapters, and with the head alone, over seeds. The ViT begins with random weights: its rows are of costs.
Of several learning rates, that with the largest AUROC on the sites' validation images in a run of seed 0 is
taken, which is not counted. The first run of a frozen encoder computes the features that the others read;
SUTURE_CACHE says where they stay.

Every run is a process of its own. A line of it is added to the file RECORDS, and what is there already is not
run again, so a broken-off benchmark goes on. AUROC is the mean over classes on the server's labelled test
set, with the range over seeds. Images a second are those of steps of 64 images in single precision, without
reading and augmentation (for the head: on stored features), by the time of the processor, which other
programs do not lengthen; seconds of a round are of its training images at that pace on two cores.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from harness import commit, machine
from rich.console import Console
from rich.table import Table

from suture.core.files import read_json, read_records
from suture.core.labels import LabelSet
from suture.data.batch import FEATURES
from suture.methods.sharing import SharingSpec
from suture.methods.surgical import SurgicalAggregation
from suture.models import ModelSpec, build
from suture.models.adapters import Adapters
from suture.models.classifier import Trains
from suture.simulation.job import load_job
from suture.simulation.run import run_job
from suture_papers.chest_xrays.chest_sites import NihSites

ENCODERS = {
    "cnn": ModelSpec("cnn"),
    "resnet_small": ModelSpec("resnet_small"),
    "efficientnet_lite0": ModelSpec("efficientnet_lite0", weights="package"),
    "vit_tiny": ModelSpec("timm:vit_tiny_patch16_224"),
}
ADAPTERS = {"efficientnet_lite0": Adapters("bias")}
"""Of encoders that do not take the default ones: Lite0's convolutions pad in their own way."""

LABELS = LabelSet(tuple(f"class {i}" for i in range(14)))
IMAGES = 8487
"""Training images of the job."""

_STEPS = 5

MODES: tuple[Trains, ...] = ("all", "adapters", "head")


@dataclass(frozen=True)
class Run:
    """The conditions of a run."""

    encoder: str
    mode: Trains
    lr: float
    rounds: int
    seed: int
    images: int | None


def spec_of(run: Run, pretrained: str | None) -> ModelSpec:
    """The model of a run.

    Args:
        pretrained: for resnet_small: a folder of `suture pretrain`.
    """
    adapters = ADAPTERS.get(run.encoder) if run.mode == "adapters" else None
    spec = replace(ENCODERS[run.encoder], train=run.mode, adapters=adapters)
    return replace(spec, weights=pretrained) if run.encoder == "resnet_small" else spec


def measured(run: Run, pretrained: str | None) -> dict[str, float]:
    """Run once, in a process that did nothing before.

    Returns:
        bytes of a round, both ways; AUROC of the test, and of the validation of the selected round; and the
        largest memory of the process, in MB.
    """
    job = load_job("surgical_nih")
    simulation = job.simulation
    assert isinstance(job.method, SurgicalAggregation)
    assert isinstance(simulation, NihSites)
    method = replace(job.method, local=replace(job.method.local, lr=run.lr))
    job = replace(job, method=method, model=spec_of(run, pretrained), rounds=run.rounds, seed=run.seed)
    job = replace(job, simulation=replace(simulation, training_images=run.images))
    with tempfile.TemporaryDirectory() as folder:
        out = run_job(job, out=Path(folder) / "run")
        facts, lines = read_json(out / "run.json"), read_records(out / "history.jsonl")
        auroc = read_json(out / "metrics.json")["mean_auroc"]
    return {
        "bytes": lines[-1]["bytes_down"] + lines[-1]["bytes_up"],
        "auroc": auroc,
        "validation": lines[facts["selected_round"] - 1]["validation"]["auroc"],
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000,
    }


def pace(run: Run, pretrained: str | None) -> dict[str, float]:
    """Time the steps of a model; returns training images a second of a processor."""
    torch.set_num_threads(1)
    spec = spec_of(run, pretrained)
    model = build(spec, LABELS, 0, pretrained=False).train()
    image = torch.rand(64, spec.preprocessing.channels, spec.size, spec.size)
    inputs = {FEATURES: torch.rand(64, model.encoding)} if spec.reads_features else {"image": image}
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.Adam(parameters)
    seconds = []
    for _ in range(_STEPS):
        start = time.process_time()
        optimiser.zero_grad()
        model(inputs).square().mean().backward()
        optimiser.step()
        seconds.append(time.process_time() - start)
    return {"images": 64 / min(seconds)}


Measure = Callable[[Run, str | None], dict[str, float]]


def recorded(measure: Measure, run: Run, records: Path, pretrained: str | None) -> dict[str, float]:
    """Return what is recorded of a run; measure it, if it is not."""
    conditions = {"what": measure.__name__, **asdict(run)}
    for line in records.read_text().splitlines() if records.exists() else ():
        found = json.loads(line)
        if found["conditions"] == conditions:
            return dict(found["measured"])
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        result = pool.submit(measure, run, pretrained).result()
    with records.open("a") as file:
        print(json.dumps({"conditions": conditions, "measured": result, "code": commit()}), file=file)
    return result


def travelling(spec: ModelSpec) -> int:
    """Numbers of a model that a round carries in each direction."""
    model = build(spec, LABELS, 0, pretrained=False)
    state = model.state_dict()
    return sum(state[n].numel() for n in (*SharingSpec("average").shared(model), "head.weight", "head.bias"))


def row(cell: Run, rates: Sequence[float], seeds: int, records: Path, pretrained: str | None) -> list[str]:
    """The line of a cell: at the best of the learning rates, over seeds from 1."""
    tried = [replace(cell, lr=rate) for rate in rates]
    if len(tried) > 1:
        tried.sort(key=lambda run: -recorded(measured, run, records, pretrained)["validation"])
    runs = [replace(tried[0], seed=seed) for seed in range(1, seeds + 1)]
    found = [recorded(measured, run, records, pretrained) for run in runs]
    speed = recorded(pace, replace(cell, lr=0, rounds=0, images=None), records, pretrained)["images"]
    areas = [one["auroc"] for one in found]
    return [
        cell.encoder,
        cell.mode,
        f"{travelling(spec_of(cell, pretrained)):,}",
        f"{found[0]['bytes']:,}",
        f"{speed:,.0f}",
        f"{IMAGES / speed / 2:.2g}",
        f"{max(one['memory'] for one in found):,.0f}",
        f"{tried[0].lr:g}",
        f"{statistics.mean(areas):.3f} ({min(areas):.3f}-{max(areas):.3f}), {seeds} seeds",
    ]


def main() -> None:
    """Prints a row for each encoder and mode."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--encoders", nargs="+", choices=ENCODERS, default=list(ENCODERS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--lr", nargs="+", type=float, default=[1e-3], help="the rates to choose from")
    parser.add_argument("--images", type=int, help="at most so many training images, where costs are enough")
    parser.add_argument("--pretrained", help="for resnet_small: a folder of `suture pretrain`")
    parser.add_argument("--records", type=Path, default=Path("encoders.jsonl"))
    args = parser.parse_args()
    heading = ("encoder", "trains", "numbers", "bytes a round", "images/s", "s a round", "peak MB")
    table = Table(*heading, "lr", "mean AUROC (range)", box=None)
    for name in args.encoders:
        for mode in args.modes:
            cell = Run(name, mode, args.lr[0], args.rounds, 0, args.images)
            table.add_row(*row(cell, args.lr, args.seeds, args.records, args.pretrained))
    Console(width=160).print(machine(), table)


if __name__ == "__main__":
    main()
