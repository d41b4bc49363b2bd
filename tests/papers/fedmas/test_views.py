"""The views of MoCo v2, on the batch."""

from __future__ import annotations

import colorsys
from dataclasses import replace

import pytest
import torch

from suture.data.batch import resample
from suture_papers.fedmas import pretraining
from suture_papers.fedmas.pretraining import (
    Views,
    blur,
    color_jitter,
    colours,
    crops,
    gaussian_kernels,
    mixed,
    view,
)

OFF = Views(crop=1.0, flip=0.0)


def chances(monkeypatch: pytest.MonkeyPatch, tone: float = 0.0, gray: float = 0.0) -> None:
    """How likely an image has its colours jittered, and is made gray; constants of MoCo v2."""
    monkeypatch.setattr(pretraining, "TONE_CHANCE", tone)
    monkeypatch.setattr(pretraining, "GRAY_CHANCE", gray)


def images(channels: int = 1, n: int = 6) -> torch.Tensor:
    return torch.rand(n, channels, 16, 16, generator=torch.Generator().manual_seed(0)) * 255


def seeded(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("channels", [1, 3])
def test_the_generator_is_the_only_source_of_randomness(channels: int) -> None:
    torch.manual_seed(0)
    one = view(images(channels), seeded(), Views())
    torch.manual_seed(9)
    assert torch.equal(one, view(images(channels), seeded(), Views()))
    assert not torch.equal(one, view(images(channels), seeded(2), Views()))
    assert one.shape == (6, channels, 16, 16)
    assert 0 <= one.min() < one.max() <= 255


def test_a_crop_is_inside_the_image_and_of_the_area_that_is_asked() -> None:
    maps = crops(500, seeded(), Views())
    sides, centre = maps[:, [0, 1], [0, 1]], maps[:, :, 2]
    assert (sides.abs() + centre.abs() <= 1 + 1e-6).all()
    area, ratio = sides.prod(1).abs(), (sides[:, 0] / sides[:, 1]).abs()
    assert 0.2 - 1e-6 <= area.min() < 0.25
    assert area.max() <= 1
    assert 3 / 4 - 1e-6 <= ratio.min() < ratio.max() <= 4 / 3 + 1e-6
    assert 0.4 < (sides[:, 0] < 0).float().mean() < 0.6
    torch.testing.assert_close(resample(images(), crops(6, seeded(), OFF)), images(), rtol=0, atol=1e-3)


def test_brightness_and_contrast_of_some(monkeypatch: pytest.MonkeyPatch) -> None:
    chances(monkeypatch, tone=0.5)
    x = images(n=40) * 0.2 + 100  # far from both ends, where values are cut
    out = color_jitter(x, seeded(), replace(OFF, tone=0.2))
    same = (out - x).abs().amax((1, 2, 3)) < 1e-3
    assert 0 < same.sum() < len(x)
    assert (out.mean((1, 2, 3)) / x.mean((1, 2, 3))).min() >= 0.8
    spread = (out.std((1, 2, 3)) / x.std((1, 2, 3)))[~same]
    assert spread.min() < 0.9 < 1.1 < spread.max()


def test_gray_has_no_colour_and_off_changes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    x = images(3)
    chances(monkeypatch)
    torch.testing.assert_close(mixed(x, colours(6, seeded(), OFF)), x, rtol=0, atol=0.1)
    chances(monkeypatch, gray=1.0)
    gray = mixed(x, colours(6, seeded(), OFF))
    torch.testing.assert_close(gray[:, 0], gray[:, 2], rtol=0, atol=0.1)
    weights = torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)
    torch.testing.assert_close(gray[:, :1], (x * weights).sum(1, keepdim=True), rtol=0, atol=0.1)


def test_hue_turns_red_towards_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    chances(monkeypatch, tone=1.0)
    red = torch.tensor([200.0, 60.0, 60.0]).view(1, 3, 1, 1).expand(50, 3, 2, 2)
    spec = replace(OFF, tone=0.0)
    out = mixed(red, colours(50, seeded(), spec))[:, :, 0, 0] / 255
    hues = torch.tensor([(colorsys.rgb_to_hsv(*pixel)[0] + 0.5) % 1 - 0.5 for pixel in out.tolist()])
    assert -0.16 < hues.min() < -0.05
    assert 0.05 < hues.max() < 0.16


def test_blur_is_torchvisions() -> None:
    from torchvision.transforms.functional import gaussian_blur

    x, sigma = images(3), torch.linspace(0.3, 1.0, 6)
    weights = gaussian_kernels(sigma, 1.0)
    assert weights.shape == (6, 7)
    out = blur(x, weights)
    inner = (slice(None), slice(3, -3), slice(3, -3))  # borders are continued in another way
    for i in range(6):
        expected = gaussian_blur(x[i], [7, 7], [float(sigma[i])] * 2)
        torch.testing.assert_close(out[i][inner], expected[inner], rtol=0, atol=1e-2)
