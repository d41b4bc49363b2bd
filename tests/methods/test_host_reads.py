"""How often a local step waits for the device: never, but for what `NEEDED` lists; and that it runs on one.

Two rounds of a whole federation, in which one site computes on a simulated device, with two epochs of one
step a round. What lies between the two is what a step costs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from rounds import configured, conformant
from simulated_device import NAME, OPERATIONS, WAITS, Simulated, live_bytes
from suture.core.labels import LabelType
from suture.data.batch import MILD, STRONG, SURGICAL, Augmentation, augment
from suture.federation.site.site import Site
from suture.methods import METHODS
from suture.methods.base import Method
from suture.methods.fedavg import FedAvg
from suture.methods.retraining import Retraining
from suture_papers.combined import Combined
from suture_papers.drift.fedprox import Proximal
from suture_papers.drift.moon import Contrastive
from suture_papers.fedlsm.fedlsm import FedLSM
from suture_papers.fedlsm.mean_teacher import Teaching
from suture_papers.metafl.metafl import MetaFL
from suture_papers.missing_labels.condist import Distillation
from suture_papers.missing_labels.fixmatch import FixMatch, PseudoLabels
from suture_synthetic import trial
from suture_synthetic.method_checks import subject_of

ROUNDS = 2
SITE = "alpha"
SITES = {name: trial.SITES[name] for name in (SITE, "gamma")}
"""Two, so that each has classes that it does not know."""

EACH_EPOCH = "learning/steps.py: StepLosses.read"

NEEDED = {
    # The received model decides which images are distilled, and their mean is over these alone.
    ("condist", "multiclass"): {"missing_labels/condist.py: Distillation.begin.<locals>.value": 1},
    # Which images of a batch have a label, at a site where some have none.
    ("fedvls", "multiclass"): {"missing_labels/fedvls.py: suppress": 1},
}
"""How often a step of a method waits, and where."""

OTHERS: dict[str, Method] = {
    "softmax": FedAvg(
        softmax="balanced",
        retrain=Retraining(rounds=1),
        local=replace(FedAvg().local, optimiser="sgd", clip=1.0),
    ),
    "program": FedLSM(teaching=Teaching(loss="program", entropy="program", labels="program")),
    "images": FixMatch(pseudo_labels=PseudoLabels(keep="images", among="unknown")),
    "second order": MetaFL(batches=2, order=2),
    "terms": Combined(
        proximal=Proximal(),
        contrastive=Contrastive(),
        distil=Distillation(distance="dice"),
        pseudo_labels=PseudoLabels(),
    ),
}
"""Settings of methods that have code of their own."""


@pytest.fixture(autouse=True)
def two_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one step an epoch each."""
    monkeypatch.setattr(trial, "SITES", SITES)
    monkeypatch.setattr(trial, "SIZES", {"train": 8, "validation": 6, "test": 0})


def waits(method: Method, label_type: LabelType) -> tuple[list[Counter[str]], Counter[str]]:
    """Where and how often the host waits between the steps of a site's optimiser in one task, and in all."""
    steps, between = list[Counter[str]](), list[Counter[str]]()

    def count(optimiser: Any, *_: Any) -> None:
        if any(p.device.type == NAME for group in optimiser.param_groups for p in group["params"]):
            steps.append(Counter(WAITS))
            if len(steps) > 1:
                between.append(steps[-1] - steps[-2])

    def answered(site: Site, task: Any) -> Any:
        steps.clear()
        return answer(site, task)

    answer, hook = Site.answer, register_optimizer_step_post_hook(count)
    try:
        with (
            patch.object(Site, "answer", answered),
            Simulated(),
            subject_of(method).trial(label_type, rounds=ROUNDS) as federation,
        ):
            federation.sites[SITE] = configured(federation.sites[SITE], training={"device": NAME})
            WAITS.clear()
            federation.run()
    finally:
        hook.remove()
    return between, Counter(WAITS)


def waits_a_step(method: Method, label_type: LabelType) -> dict[str, float]:
    """Where and how often a step waits."""
    between, _ = waits(lasting(method, 2), label_type)
    steps = len(between)
    if not between:  # meta-learning takes its steps by hand
        one, two = (waits(lasting(method, n), label_type)[1] for n in (1, 2))
        between, steps = [two - one], ROUNDS
    found = sum(between, Counter[str]())
    return {where: n / steps for where, n in found.items() if where != EACH_EPOCH}


def lasting(method: Any, n: int) -> Any:
    """The method with as many epochs a round, or steps where it counts those."""
    length = "iterations" if method.local.iterations else "epochs"
    retrain = getattr(method, "retrain", None)
    longer = replace(method, local=replace(method.local, **{length: n}))
    return replace(longer, retrain=replace(retrain, epochs=n)) if retrain else longer


def label_types(method: Method) -> tuple[LabelType, ...]:
    return subject_of(method).label_types


NEEDED["terms", "multiclass"] = NEEDED["condist", "multiclass"]  # it distils, too
EVERY = {**{name: conformant(name) for name in METHODS}, **OTHERS, "balanced": FedAvg(softmax="balanced")}


@pytest.mark.complete
@pytest.mark.parametrize(
    ("name", "label_type"), [(name, kind) for name in EVERY for kind in label_types(EVERY[name])]
)
def test_a_step_waits_for_nothing(name: str, label_type: LabelType) -> None:
    assert waits_a_step(EVERY[name], label_type) == NEEDED.get((name, label_type), {})


@pytest.mark.complete
def test_fedvls_looks_for_labels_only_where_some_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "SITES", dict.fromkeys(("alpha", "beta"), trial.CLASSES))
    assert waits_a_step(conformant("fedvls"), "multiclass") == {}


@pytest.mark.parametrize("spec", [SURGICAL, MILD, STRONG, Augmentation(flip=0.5)])
def test_views_wait_for_nothing(spec: Augmentation) -> None:
    with Simulated():
        images = torch.rand(16, 1, 8, 8, device=NAME)
        WAITS.clear()
        seen = augment(images, torch.Generator().manual_seed(1), spec)
        assert seen.device.type == NAME
    assert not WAITS


@pytest.mark.complete
@pytest.mark.parametrize("name", ["surgical", "fedmas", "fedlsm"])
def test_between_tasks_sites_leave_the_device_to_others(name: str) -> None:
    """Otherwise the memory would be full of the models, priors and gradients of sites that do nothing."""
    with Simulated(), subject_of(conformant(name)).trial("multilabel", rounds=ROUNDS) as federation:
        before = live_bytes()
        for site in SITES:
            federation.sites[site] = configured(federation.sites[site], training={"device": NAME})
        OPERATIONS.clear()
        WAITS.clear()
        federation.run()
        assert OPERATIONS
        assert live_bytes() - before < 1000
        assert not [where for where in WAITS if "stored_parameters" in where], "it is not stored"


@pytest.mark.complete
def test_what_a_method_leaves_on_the_device_is_stored_and_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU its author would not have noticed."""
    kind: Any = METHODS["surgical"]
    train = kind.train

    def leaves(method: Any, site: Any, *given: Any) -> Any:
        update, keep = train(method, site, *given)
        head = {name: rows.to(site.device) for name, rows in update.head.items()}
        return replace(update, head=head), {**keep, "head.weight/mine": torch.ones(1, device=site.device)}

    monkeypatch.setattr(kind, "train", leaves)
    assert waits(lasting(conformant("surgical"), 2), "multilabel")[0]


# In mixed precision, with CUDA's autocast


SCALED = {"fedavg", "fedlsm", "creff"}
"""Methods with both halves: fp16 meets every dtype that bf16 does, and it alone has a scaler of losses. They
train on labels alone, on those of a teacher too, and with gradients beside the loss.
"""

CASES = [
    (name, kind, half)
    for name, method in EVERY.items()
    if not method.about.fixed_batches
    for half in (("fp16", "bf16") if name in SCALED else ("fp16",))
    for kind in label_types(method)
]


@pytest.mark.complete
@pytest.mark.parametrize(("name", "label_type", "half"), CASES)
def test_a_round_trains_in_mixed_precision(
    name: str, label_type: LabelType, half: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raised(folder: Any, site: Any, task: Any, error: Exception) -> None:
        raise error

    monkeypatch.setattr("suture.federation.site.site.record_error", raised)  # no abstention
    with Simulated(), subject_of(lasting(EVERY[name], 2)).trial(label_type) as federation:
        own = {"device": NAME, "amp": True, "half": half}
        federation.sites[SITE] = configured(federation.sites[SITE], training=own)
        federation.run()
