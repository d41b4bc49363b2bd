"""Fed-MAS without one of its parts, and in its warm-up."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_fedmas import CNN, CTX, EVERY, METHOD, bench_of, literal_round, of_one_class, precise

from rounds import context_of, train_round
from suture.federation.server.global_model import initial
from suture.learning.training import LocalTraining, validation_loss
from suture.methods.base import Phase, loss_of
from suture.methods.fedavg import FedAvg
from suture.protocol.messages import TaskData
from suture_papers.fedmas.fedmas import FedMAS, distance

PHANTOMS = FedMAS(local=LocalTraining(lr=1e-2, batch_size=8))


def test_without_distillation_it_is_balanced_softmax_with_rescue_factors(tiny: Any) -> None:
    benches = [bench_of(tiny) for _ in range(3)]
    (_, task), (one, two, three) = benches[0], (precise(of_one_class(context)) for context, _ in benches)
    alone, _ = train_round(replace(METHOD, distillation=0.0), one, task, CTX)
    balanced = FedAvg(local=METHOD.local, softmax="balanced", class_weights="none")
    plain, _ = train_round(balanced, two, task, CTX)
    for name, tensor in {**plain.shared, **plain.head}.items():
        if not name.startswith("projector."):
            torch.testing.assert_close(alone.shared.get(name, alone.head.get(name)), tensor)
    for name, tensor in one.model.projector.named_parameters():
        assert torch.equal(tensor, task.shared[f"projector.{name}"])
    assert alone.weight == pytest.approx(literal_round(three, CTX.seed, distillation=0.0)[1], rel=1e-6)


def test_the_best_epoch_of_the_warm_up_is_kept(tiny: Any) -> None:
    """Of three epochs, steps too long, not the last is best; the rescue factor is of all three."""
    received = replace(CTX, phase=Phase("warm-up", 1, "head", 20.0, 3, keep_best=True))
    context, task = bench_of(tiny)
    kept, _ = train_round(METHOD, context, task, received)
    losses, ends = [], []
    for epochs in (1, 2, 3):
        context, task = bench_of(tiny)
        phase = replace(received.phase, epochs=epochs, keep_best=False)
        ends.append(train_round(METHOD, context, task, replace(received, phase=phase))[0])
        losses.append(validation_loss(context, loss_of(METHOD.loss, "multilabel")))
    best = losses.index(min(losses))
    assert best < 2
    assert all(torch.equal(tensor, ends[best].head[name]) for name, tensor in kept.head.items())
    assert not torch.equal(kept.head["head.weight"], ends[2].head["head.weight"])
    assert kept.weight == ends[2].weight


@pytest.mark.complete
def test_without_a_projector_the_backbones_own_features_are_compared(tiny: Any) -> None:
    federation = tiny(PHANTOMS, model=CNN)
    done = federation.run().model
    assert not any(name.startswith("projector.") for name in done.shared)
    line = json.loads((federation.folder / "run" / "history.jsonl").read_text().splitlines()[0])
    site = federation.sites("again")["alpha"]
    begun = initial(site.plan, EVERY)
    task = TaskData("train", 1, 0, labels=EVERY, shared=dict(begun.shared), head=dict(begun.head))
    context = context_of(site, task)
    assert context.prior is not None
    image = context.samples["train"].inputs["image"]
    context.model.eval()
    with torch.no_grad():
        each = distance(
            context.model.features({"image": context.prepare(image)}), context.prior.features(image)
        )
    heard: dict[str, torch.Tensor] = {}
    update, _ = train_round(PHANTOMS, replace(context, record=heard.update), task, replace(CTX, seed=1))
    means = [float(each[context.samples["train"].y[:, k] == 1].mean()) for k in (2, 3)]  # Mass and Nodule
    assert heard["divergence"].tolist() == pytest.approx([0, 0, *means], abs=1e-5)
    assert line["sites"]["alpha"]["weight"] == pytest.approx(update.weight, rel=1e-4)
