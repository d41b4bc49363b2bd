"""The order of an image's values changes nothing but speed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn

from suture.core.labels import LabelSet
from suture.data.batch import Augmentation, Samples
from suture.learning.losses import masked_bce
from suture.learning.training import LocalRound, LocalTraining, SiteContext, fit, on_known
from suture.models import MODELS, ModelSpec, build
from suture.models.encoders import channels_last
from suture.protocol.packing import Packed, load, save


def test_the_network_is_given_its_images_channels_last_and_computes_the_same() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3))
    seen: list[torch.Tensor] = []
    ordered = channels_last(copy.deepcopy(plain))
    ordered[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    images = torch.randn(3, 1, 8, 8)
    torch.testing.assert_close(ordered(images), plain(images))
    assert seen[0].stride() == (64, 1, 8, 1)
    assert all(tensor.is_contiguous() for tensor in ordered.state_dict().values())
    assert ordered.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.complete
@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
@pytest.mark.parametrize("name", sorted(name for name, entry in MODELS.items() if entry.reads == "image"))
def test_what_is_sent_and_saved_after_training_is_in_the_ordinary_order(
    name: str, optimiser: Literal["adam", "sgd"], tmp_path: Path
) -> None:
    spec = ModelSpec(name, size=64)
    model = build(spec, LabelSet(("Edema", "Mass")), 1, pretrained=False)
    image = torch.randint(0, 256, (4, 1, 64, 64), dtype=torch.uint8)
    samples = Samples({"image": image}, torch.tensor([[0.0, 1.0], [1.0, 0.0]] * 2), tuple("abcd"))
    device = torch.device("cpu")
    site = SiteContext("site", model, {"train": samples}, spec.preprocessing, Augmentation(), device)
    local = LocalTraining(lr=1e-3, batch_size=4, optimiser=optimiser)
    fitted = fit(site, on_known(masked_bce), LocalRound(local, "average", 1, 1))
    for tensors in (model.state_dict(), dict(fitted.optimiser_state)):
        assert all(tensor.is_contiguous() for tensor in tensors.values())
        save(tmp_path / "state.safetensors", Packed(tensors, {}))
        returned = load(tmp_path / "state.safetensors").tensors
        assert all(torch.equal(returned[key], tensor) for key, tensor in tensors.items())
