"""A step of FedLSM against the sum of its parts, and its uncertainty pass against an evaluation.

Of the processor, which other programs on the machine disturb less, and of the clock: the views of a batch are
made in a thread of their own while the networks compute.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
from figures import Figure, Options, Target, in_turns

from suture.core.labels import LabelSet, LabelType
from suture.data.batch import Samples
from suture.learning.training import LocalRound, LocalTraining, SiteContext, fit, predict
from suture.methods.fedlsm.fedlsm import FedLSM
from suture.methods.fedlsm.mean_teacher import MeanTeacher, Teaching, subsets
from suture.models import ModelSpec, build

LABELS = tuple(f"Class {i}" for i in range(14))
STEPS, IMAGES = 8, 960
HOW = Teaching(start_round=1)
LOCAL = LocalTraining(lr=1e-3, iterations=STEPS)
CASES: tuple[tuple[str, ModelSpec, LabelType], ...] = (
    ("gray", ModelSpec("resnet_small", size=64), "multilabel"),
    ("colour", ModelSpec("resnet_small", size=64, color=True), "multiclass"),
)


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


def steps_of(site: SiteContext) -> Callable[[], object]:
    """Steps as FedLSM takes them, the ranking left out."""
    round_ = LocalRound(LOCAL, "average", 1, 1)
    teacher = MeanTeacher(HOW, site, round_, torch.ones(14))
    return partial(
        fit, site, teacher.objective, round_, batches=teacher.batches, after_step=teacher.follow_student
    )


def parts_of(site: SiteContext) -> Callable[[], object]:
    """As many passes of the teacher and whole steps of the student, on 64 images each."""
    teacher = copy.deepcopy(site.model).eval()
    student = site.model.train()
    adam = torch.optim.Adam(student.parameters(), lr=1e-3)
    image, y = site.prepare(site.samples["train"].inputs["image"][:64]), torch.zeros(64, 14)

    def steps() -> None:
        for _ in range(STEPS):
            with torch.no_grad():
                teacher({"image": image})
            loss = torch.nn.functional.binary_cross_entropy_with_logits(student({"image": image}), y)
            adam.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            adam.step()

    return steps


def figures(options: Options) -> list[Figure]:
    """Steps and ranking, gray and in colour."""
    rows = []
    for name, spec, task in CASES:
        site = site_of(spec, task)
        steps = in_turns(
            2 if options.quick else 9, {"steps": partial(steps_of, site), "parts": partial(parts_of, site)}
        )
        ms = {
            key: ([s / STEPS * 1e3 for s in t.clock], [s / STEPS * 1e3 for s in t.cpu])
            for key, t in steps.items()
        }
        for i, (of, targets) in enumerate((("", (Target("ratio", "≤", 1.15),)), (" of CPU", ()))):
            row = (
                f"a step, {name}",
                f"ms{of}",
                tuple(ms["steps"][i]),
                "sum of its parts",
                tuple(ms["parts"][i]),
            )
            rows.append(Figure("fedlsm", *row, targets))
        passes = in_turns(
            options.repeats,
            {
                "ranking": lambda site=site: partial(subsets, HOW, site, True, 1, 1),  # type: ignore[misc]
                "evaluation": lambda site=site: partial(predict, site, site.samples["train"]),  # type: ignore[misc]
            },
        )
        cpu = {key: tuple(times.cpu) for key, times in passes.items()}
        rows.append(
            Figure(
                "fedlsm",
                f"the ranking, {name}",
                "s of CPU",
                cpu["ranking"],
                "an evaluation",
                cpu["evaluation"],
            )
        )
    return rows
