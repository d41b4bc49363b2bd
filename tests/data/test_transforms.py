"""Augmentation on the batch."""

from __future__ import annotations

import math

import torch
from monai.networks.layers import AffineTransform

from suture.data.transforms import MILD, SURGICAL, Augmentation, augment, resample


def images(n: int = 4) -> torch.Tensor:
    return torch.rand(n, 1, 16, 16, generator=torch.Generator().manual_seed(0))


def run(spec: Augmentation, seed: int = 1) -> torch.Tensor:
    return augment(images(), torch.Generator().manual_seed(seed), spec)


def test_off_is_the_identity_and_nothing_else_is() -> None:
    assert torch.equal(run(Augmentation()), images())
    assert not Augmentation().active
    for spec in (MILD, SURGICAL):
        assert spec.active
        assert run(spec).shape == images().shape
        assert not torch.allclose(run(spec), images())


def test_the_generator_is_the_only_source_of_randomness() -> None:
    torch.manual_seed(0)
    one = run(SURGICAL)
    torch.manual_seed(99)
    assert torch.equal(one, run(SURGICAL))
    assert not torch.equal(one, run(SURGICAL, seed=2))


def test_flip_mirrors_left_to_right() -> None:
    torch.testing.assert_close(run(Augmentation(flip=1.0)), images().flip(-1), rtol=0, atol=1e-6)


def test_contrast_keeps_the_mean_of_each_image() -> None:
    out = run(Augmentation(contrast=0.5))
    torch.testing.assert_close(out.mean((1, 2, 3)), images().mean((1, 2, 3)))
    assert not torch.allclose(out.std((1, 2, 3)), images().std((1, 2, 3)))


def test_same_numbers_as_monai() -> None:
    angle = math.radians(20)
    theta = torch.tensor([[math.cos(angle), -math.sin(angle), 0.1], [math.sin(angle), math.cos(angle), 0.0]])
    theta = theta.expand(4, 2, 3)
    monai = AffineTransform(
        mode="bilinear",
        padding_mode="border",
        align_corners=False,
        reverse_indexing=False,
        normalized=True,
    )
    torch.testing.assert_close(resample(images(), theta), monai(images(), theta, (16, 16)), rtol=0, atol=1e-6)
