"""Batch norm by module type."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from suture.core.errors import ConfigError
from suture.core.labels import LabelSet
from suture.methods.base import SharingSpec
from suture.models import ModelSpec, build
from suture.models.classifier import train_mode

LABELS = LabelSet(("Edema", "Mass"))


@pytest.mark.complete
def test_densenet_has_121_batch_norms_and_none_is_called_bn() -> None:
    model = build(ModelSpec("densenet121", size=32), LABELS, 1, pretrained=False)
    names = [n for n, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)]
    assert len(names) == 121
    assert not any("bn" in n for n in names)
    assert len(model.norm_names) == 4 * 121
    assert len(model.counters) == 121


def test_frozen_leaves_124_trainable_tensors() -> None:
    """120 convolutions and the four arrays of two dense layers, as in the paper's program."""
    model = build(ModelSpec("densenet121", size=32, hidden=256, dropout=0.3), LABELS, 1, pretrained=False)
    train_mode(model, "frozen")
    assert sum(p.requires_grad for p in model.parameters()) == 124
    assert len(SharingSpec("frozen").shared(model)) == 122


def test_what_crosses_under_each_policy() -> None:
    model = build(ModelSpec("cnn", size=32), LABELS, 1, pretrained=False)
    average, local = SharingSpec("average").shared(model), SharingSpec("local").shared(model)
    assert set(average) - set(local) == model.norm_names
    assert local == SharingSpec("frozen").shared(model)
    assert not set(average) & model.counters
    assert not any(name.startswith("head.") for name in average)


def test_frozen_norm_rests_while_the_rest_trains() -> None:
    model = build(ModelSpec("cnn", size=32), LABELS, 1, pretrained=False)
    before = {k: t.clone() for k, t in model.state_dict().items()}
    train_mode(model, "frozen")
    model({"image": torch.randn(4, 1, 32, 32)}).sum().backward()
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p -= 0.1 * p.grad
    after = model.state_dict()
    assert all(torch.equal(after[k], before[k]) for k in model.norm_names)
    assert not torch.equal(after["backbone.conv1.weight"], before["backbone.conv1.weight"])


def test_running_statistics_move_as_far_as_they_are_told() -> None:
    """From a mean of 0, a batch whose mean is m makes it .25 m; the network's own momentum is .1."""
    quick = build(ModelSpec("cnn", size=32, norm_momentum=0.25), LABELS, 1, pretrained=False)
    own = build(ModelSpec("cnn", size=32), LABELS, 1, pretrained=False)
    name = "backbone.norm1.running_mean"
    for model in (quick, own):
        model.train()
        model.backbone(torch.rand(8, 1, 32, 32, generator=torch.Generator().manual_seed(1)))
    moved, usual = quick.state_dict()[name], own.state_dict()[name]
    assert torch.allclose(moved / 0.25, usual / 0.1)
    assert usual.abs().max() > 0


def test_a_model_without_batch_norm_has_no_momentum_of_it() -> None:
    with pytest.raises(ConfigError, match=r"model\.norm_momentum.*remove it"):
        build(ModelSpec("lstm", norm_momentum=0.1), LABELS, 1, pretrained=False)
