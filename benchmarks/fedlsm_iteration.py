"""A step of FedLSM against the sum of its parts, and its uncertainty pass against an evaluation.

python benchmarks/fedlsm_iteration.py

Of the processor, which other programs on the machine disturb less, and of the clock: the views of a batch are
made in a thread of their own while the networks compute.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from machine import machine
from rich.console import Console
from rich.table import Table

from suture.core.allocator import keep_memory
from suture.core.labels import LabelSet, LabelType
from suture.data.batch import Samples
from suture.learning.training import LocalRound, LocalTraining, SiteContext, fit, predict
from suture.methods.fedlsm.fedlsm import FedLSM
from suture.methods.fedlsm.mean_teacher import MeanTeacher, Teaching, subsets
from suture.models import ModelSpec, build

LABELS = tuple(f"Class {i}" for i in range(14))
STEPS, REPEATS, IMAGES = 8, 9, 960
HOW = Teaching(start_round=1)
LOCAL = LocalTraining(lr=1e-3, iterations=STEPS)


def site_of(spec: ModelSpec, task: LabelType) -> SiteContext:
    """A site of random images that knows the first three classes."""
    g = torch.Generator().manual_seed(0)
    channels = 3 if spec.color else 1
    image = torch.randint(0, 256, (IMAGES, channels, spec.size, spec.size), generator=g, dtype=torch.uint8)
    y = torch.nn.functional.one_hot(torch.randint(0, 14, (IMAGES,), generator=g), 14).float()
    y[:, 3:] = torch.nan
    samples = Samples({"image": image}, y, tuple(map(str, range(IMAGES))))
    model = build(spec, LabelSet(LABELS, task), 1, pretrained=False)
    return SiteContext(
        "site", model, {"train": samples}, spec.preprocessing, FedLSM().teaching.strong, torch.device("cpu")
    )


Seconds = npt.NDArray[np.float64]


def now() -> Seconds:
    """Seconds of the processor, of all threads, and of the clock."""
    return np.array([time.process_time(), time.perf_counter()])


def steps_of(site: SiteContext) -> Seconds:
    """Seconds of a step as FedLSM takes it, the ranking left out; as `now`."""
    round_ = LocalRound(LOCAL, "average", 1, 1)
    teacher = MeanTeacher(HOW, site, round_, torch.ones(14))
    began = now()
    fit(site, teacher.objective, round_, batches=teacher.batches, after_step=teacher.follow_student)
    spent: Seconds = (now() - began) / STEPS
    return spent


def parts_of(site: SiteContext) -> Seconds:
    """Seconds of a pass of the teacher and a whole step of the student, on 64 images each; as `now`."""
    teacher = copy.deepcopy(site.model).eval()
    student = site.model.train()
    adam = torch.optim.Adam(student.parameters(), lr=1e-3)
    image, y = site.prepare(site.samples["train"].inputs["image"][:64]), torch.zeros(64, 14)
    began = now()
    for _ in range(STEPS):
        with torch.no_grad():
            teacher({"image": image})
        loss = torch.nn.functional.binary_cross_entropy_with_logits(student({"image": image}), y)
        adam.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        adam.step()
    spent: Seconds = (now() - began) / STEPS
    return spent


def seconds(work: Callable[[], object]) -> float:
    """Of one call."""
    began = time.process_time()
    work()
    return time.process_time() - began


def main() -> None:
    """Alternates whole and parts, and prints medians of their ratios."""
    torch.set_num_threads(1)
    keep_memory()  # as in the processes that Suture starts
    table = Table(
        "model", "seconds of", "step ms", "parts ms", "ratio", "range", "ranking / evaluation", box=None
    )
    for spec, task in (
        (ModelSpec("resnet_small", size=64), "multilabel"),
        (ModelSpec("resnet_small", size=64, color=True), "multiclass"),
    ):
        site = site_of(spec, task)  # type: ignore[arg-type]
        times = [(steps_of(site), parts_of(site)) for _ in range(REPEATS + 1)][1:]
        passes = [
            seconds(lambda site=site: subsets(HOW, site, True, 1, 1))  # type: ignore[misc]
            / seconds(lambda site=site: predict(site, site.samples["train"]))  # type: ignore[misc]
            for _ in range(4)
        ][1:]
        for i, of in enumerate(("the processor", "the clock")):
            ratios = [float(step[i] / parts[i]) for step, parts in times]
            table.add_row(
                f"{spec.name}, {'colour' if spec.color else 'gray'}",
                of,
                *(
                    f"{1000 * statistics.median(float(t[i]) for t in part):.0f}"
                    for part in zip(*times, strict=True)
                ),
                f"{statistics.median(ratios):.2f}",
                f"{min(ratios):.2f}-{max(ratios):.2f}",
                "" if i else f"{statistics.median(passes):.2f}",
            )
    console = Console()
    console.print(machine())
    console.print(table)


if __name__ == "__main__":
    main()
