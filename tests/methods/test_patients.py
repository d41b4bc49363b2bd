"""Which methods train on each image alone, so that a site can protect each patient, and which say why not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from federated import at_site, random_batch
from suture.data.batch import Batch
from suture.methods import METHODS
from suture.methods.averaging import LocalAveraging
from suture.methods.base import About
from suture.models.classifier import Layout

ALONE = {"individual", "partial", "pfl", "surgical", "vanilla"}


def test_the_methods_that_train_on_each_image_alone() -> None:
    assert {name for name, kind in METHODS.items() if not kind.about.mixes_patients} == ALONE


@pytest.mark.parametrize("name", sorted(METHODS.keys() - ALONE))
def test_every_other_method_says_why(name: str) -> None:
    assert METHODS[name].about.mixes_patients != About("", "", "").mixes_patients


def test_a_method_that_says_nothing_is_refused() -> None:
    assert "does not declare" in About("own", "Own", "nobody").mixes_patients


@pytest.mark.parametrize("label_type", ["multilabel", "multiclass"])
@pytest.mark.parametrize("name", sorted(ALONE))
def test_the_gradient_of_two_images_is_the_mean_of_theirs(name: str, label_type: Any) -> None:
    method: Any = METHODS[name](batch_norm="frozen")
    if label_type not in method.labels.types:
        pytest.skip("the method has no such labels")
    assert type(method).train is LocalAveraging.train  # its whole use of the data is `fit`
    egress = method.egress(Layout({}, {}))
    assert not (egress.counts)
    assert not (egress.scalars)
    assert not (egress.losses)
    assert not (egress.channels)
    assert egress.weight == (1.0, 1.0)
    site, _ = at_site(method, label_type)
    site.model.eval()
    objective = method.objective_at(site)
    classes = len(site.model.labels)
    both = random_batch(2, classes, label_type)
    if label_type == "multiclass":  # a row without a label is no example
        both = replace(both, y=torch.eye(2, classes, dtype=torch.float64))

    def gradient(rows: slice) -> Tensor:
        image = {"image": both.inputs["image"][rows]}
        found = torch.autograd.grad(
            objective(site.model, Batch(image, both.y[rows], both.known[rows])),
            [p for p in site.model.parameters() if p.requires_grad],
            allow_unused=True,
        )
        return torch.cat([g.flatten() for g in found if g is not None])

    one, other = gradient(slice(0, 1)), gradient(slice(1, 2))
    assert torch.allclose(gradient(slice(0, 2)), (one + other) / 2, atol=1e-12)
    assert not torch.allclose(one, other)
