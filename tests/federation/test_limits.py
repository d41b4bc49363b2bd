"""A federation of sites with default limits: the same training, coarser figures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from suture.core.privacy import PrivacyConfig
from suture.learning.training import LocalTraining
from suture.methods.surgical import SurgicalAggregation
from suture.protocol.egress import BOUND, may_be
from suture.protocol.records import read_history

pytestmark = pytest.mark.complete


LABELS = {"alpha": ("Mass", "Nodule"), "beta": ("Nodule", "Hernia")}


def test_limits_change_figures_and_no_byte_of_the_training(tiny: Any) -> None:
    method = SurgicalAggregation(local=LocalTraining(lr=1e-2, batch_size=16))
    federation = tiny(method, LABELS, n=150, rounds=3, selection="last")
    exact = federation.run("exact")
    limits = PrivacyConfig(label_view="all")
    for name, config in federation.configs.items():
        federation.configs[name] = config.model_copy(update={"privacy": limits})
    limited = federation.run("limited")
    folders = exact.record.folder, limited.record.folder
    models = [load_file(folder / "model" / "model.safetensors") for folder in folders]
    assert all(torch.equal(tensor, models[1][name]) for name, tensor in models[0].items())
    for before, after in zip(*map(read_history, folders), strict=True):
        for site in LABELS:
            loss, own = before.sites[site].validation_loss, after.sites[site].validation_loss
            assert loss is not None
            assert own is not None
            assert may_be(own, BOUND / 30)
            assert not may_be(loss, BOUND / 30)
            assert abs(loss - own) <= 0.1
