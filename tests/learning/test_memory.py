"""The memory of a step, counted by hand; and its one line where it does not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from suture.core.errors import ConfigError
from suture.core.labels import LabelSet
from suture.data.batch import MILD, Batch, Samples
from suture.learning.training import SiteContext, activation_bytes, check_memory
from suture.models import ModelSpec
from suture.models.classifier import Classifier

EACH = 16 * 16 * 4 + 8 * 4
"""Of an image: itself, which the first layer keeps, and 8 features, which ReLU and the head both keep."""

WEIGHTS = 4 * (256 * 8 + 8 + 8 * 2 + 2)


def context() -> SiteContext:
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(256, 8), nn.ReLU())
    model = Classifier(backbone, 8, LabelSet(("Edema", "Mass")))
    samples = Samples(
        {"image": torch.zeros(3, 1, 16, 16, dtype=torch.uint8)}, torch.zeros(3, 2), ("a", "b", "c")
    )
    prepare = ModelSpec("cnn", size=16).preprocessing
    return SiteContext("alpha", model, {"train": samples}, prepare, MILD, torch.device("cpu"))


def total(model: Classifier, batch: Batch) -> Tensor:
    return model(batch.inputs).sum()  # type: ignore[no-any-return]


def test_what_a_layer_keeps_is_counted_once() -> None:
    assert activation_bytes(context(), total) == EACH


def test_counting_leaves_the_model_as_it_was() -> None:
    site = context()
    site.model.backbone.append(nn.BatchNorm1d(8))
    before = {name: t.clone() for name, t in site.model.state_dict().items()}
    random = torch.get_rng_state()
    assert activation_bytes(site, total) > EACH
    assert all(torch.equal(t, before[name]) for name, t in site.model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize(("optimiser", "copies"), [("adam", 4), ("sgd", 3)])
def test_a_batch_fits_to_the_byte(optimiser: str, copies: int) -> None:
    needed = copies * WEIGHTS + 10 * EACH
    check_memory(context(), total, optimiser, 10, needed)
    with pytest.raises(ConfigError, match=r"alpha: a step of 10 images needs .*; set batch_size below 10 "):
        check_memory(context(), total, optimiser, 10, needed - 1)
    with pytest.raises(ConfigError, match="take a smaller model or another device"):
        check_memory(context(), total, optimiser, 10, copies * WEIGHTS - 1)


def test_a_cpu_is_not_checked() -> None:
    check_memory(replace(context(), samples={}), total, "adam", 10**12)


def test_without_images_nothing_is_counted() -> None:
    """The step itself then says what the site lacks."""
    site = context()
    none = Samples({"image": torch.zeros(0, 1, 16, 16, dtype=torch.uint8)}, torch.zeros(0, 2), ())
    check_memory(replace(site, samples={"train": none}), total, "adam", 10, 0)
