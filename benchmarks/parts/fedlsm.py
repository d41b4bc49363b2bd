"""A step of FedLSM against the sum of its parts, and its uncertainty pass against an evaluation.

Of the processor, which other programs on the machine disturb less, and of the clock: the views of a batch are
made in a thread of their own while the networks compute.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
from figures import Figure, Options, Target
from harness import in_turns

from parts.sites import bare_step, random_site
from suture.core.labels import LabelSet, LabelType
from suture.learning.training import LocalRound, LocalTraining, SiteContext, fit, predict
from suture.models import ModelSpec
from suture_papers.fedlsm.fedlsm import FedLSM
from suture_papers.fedlsm.mean_teacher import MeanTeacher, Teaching, subsets

LABELS = tuple(f"Class {i}" for i in range(14))
STEPS, IMAGES = 8, 960
HOW = Teaching(start_round=1)
LOCAL = LocalTraining(lr=1e-3, iterations=STEPS)
CASES: tuple[tuple[str, ModelSpec, LabelType], ...] = (
    ("gray", ModelSpec("resnet_small", size=64), "multilabel"),
    ("colour", ModelSpec("resnet_small", size=64, color=True), "multiclass"),
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
            bare_step(student, adam, image, y)

    return steps


def figures(options: Options) -> list[Figure]:
    """Steps and ranking, gray and in colour."""
    rows = []
    for name, spec, task in CASES:
        site = random_site(spec, LabelSet(LABELS, task), IMAGES, FedLSM().teaching.strong, known=3)
        works = {"steps": partial(steps_of, site), "parts": partial(parts_of, site)}
        found = {key: times.times(1e3 / STEPS) for key, times in in_turns(options.repeats, works).items()}
        step, sums = found["steps"], found["parts"]
        passes = in_turns(
            options.repeats,
            {
                "ranking": partial(partial, subsets, HOW, site, True, 1, 1),
                "evaluation": partial(partial, predict, site, site.samples["train"]),
            },
        )
        ranking, evaluation = passes["ranking"].cpu, passes["evaluation"].cpu
        most, what, parts = (Target("ratio", "≤", 1.15),), f"a step, {name}", "sum of its parts"
        rows += [
            Figure("fedlsm", what, "ms", step.clock, parts, sums.clock, most),
            Figure("fedlsm", what, "ms of CPU", step.cpu, parts, sums.cpu),
            Figure("fedlsm", f"the ranking, {name}", "s of CPU", ranking, "an evaluation", evaluation),
        ]
    return rows
