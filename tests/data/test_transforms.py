"""Augmentation on the batch."""

from __future__ import annotations

import math

import pytest
import torch
from monai.networks.layers import AffineTransform

from suture.data import transforms
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


def maps(spec: Augmentation, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """The linear parts [400, 2, 2] of the maps that `augment` draws, from output to input."""
    drawn: list[torch.Tensor] = []

    def record(images: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
        drawn.append(theta)
        return images

    monkeypatch.setattr(transforms, "resample", record)
    augment(torch.zeros(400, 1, 2, 2), torch.Generator().manual_seed(3), spec)
    assert bool((drawn[0][:, :, 2] == 0).all())  # the centre stays where it is
    return drawn[0][:, :, :2]


def test_rotation_is_rigid_and_fills_its_range(monkeypatch: pytest.MonkeyPatch) -> None:
    theta = maps(Augmentation(rotation=20), monkeypatch)
    torch.testing.assert_close(theta @ theta.mT, torch.eye(2).expand(400, 2, 2))
    degrees = torch.rad2deg(torch.atan2(theta[:, 1, 0], theta[:, 0, 0]))
    assert -20 <= degrees.min() < -18
    assert 18 < degrees.max() <= 20
    assert bool((torch.linalg.det(theta) > 0).all())


def test_zoom_scales_each_axis_on_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    theta = maps(Augmentation(zoom=0.5), monkeypatch)
    scale = 1 / torch.diagonal(theta, dim1=1, dim2=2)
    torch.testing.assert_close(theta, torch.diag_embed(1 / scale))
    assert bool((scale.amin(0) < 0.55).all())
    assert bool((scale.amax(0) > 1.45).all())
    assert scale.min() >= 0.5
    assert scale.max() <= 1.5
    assert abs(torch.corrcoef(scale.T)[0, 1].item()) < 0.2


def test_all_together_is_scale_and_mirror_then_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its columns stay at right angles; about half of the images are mirrored."""
    theta = maps(SURGICAL, monkeypatch)
    torch.testing.assert_close((theta[:, :, 0] * theta[:, :, 1]).sum(1), torch.zeros(400), rtol=0, atol=1e-6)
    assert 150 < int((torch.linalg.det(theta) < 0).sum()) < 250
