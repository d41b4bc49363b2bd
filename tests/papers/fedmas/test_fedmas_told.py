"""What Fed-MAS tells of each class: for a simulation's report, and in no update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_fedmas import CNN, CTX, EVERY, METHOD, bench_of
from torch import Tensor

from rounds import train_round
from suture.federation.site.diagnostics import FILE
from suture.protocol.packing import pack
from suture_papers.fedmas.fedmas import distance


def test_the_divergence_of_each_class_is_told_before_training(tiny: Any) -> None:
    context, task = bench_of(tiny)
    train = context.samples["train"]
    assert context.prior is not None
    context.model.eval()
    with torch.no_grad():
        y = context.model.projector(context.model.features({"image": context.prepare(train.inputs["image"])}))
        each = distance(y, context.prior.features(train.inputs["image"]))
    told: dict[str, Tensor] = {}

    def hear(figures: Mapping[str, Tensor]) -> None:
        told.update(figures)

    train_round(METHOD, replace(context, record=hear), task, CTX)
    assert set(told) == {"images", "divergence"}
    for column in range(len(EVERY)):
        own = train.y[:, column] == 1
        assert told["images"][column] == own.sum()
        mean = float(each[own].mean()) if own.any() else 0.0
        assert float(told["divergence"][column]) == pytest.approx(mean, abs=1e-5)


def test_the_update_is_the_same_whether_anybody_listens(tiny: Any) -> None:
    packed = []
    for tell in (None, lambda _: None):
        context, task = bench_of(tiny)
        update, _ = train_round(METHOD, replace(context, record=tell), task, CTX)
        packed.append(pack(update))
    assert packed[0].header == packed[1].header
    assert packed[0].tensors.keys() == packed[1].tensors.keys()
    assert all(torch.equal(tensor, packed[1].tensors[name]) for name, tensor in packed[0].tensors.items())


@pytest.mark.parametrize("listening", [True, False])
def test_a_site_writes_it_down_where_its_configuration_says_so(listening: bool, tiny: Any) -> None:
    federation = tiny(METHOD, model=replace(CNN, projection=5))
    config = federation.configs["alpha"]
    storage = config.storage.model_copy(update={"diagnostics": listening})
    federation.configs["alpha"] = config.model_copy(update={"storage": storage})
    site = federation.sites()["alpha"]
    context, task = bench_of(tiny)
    site.trainer.__dict__["prior"] = context.prior
    site.answer(task)
    assert (site.folder / FILE).exists() is listening
