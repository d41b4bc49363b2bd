"""Augmentation on the batch."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from suture.data import batch as augmentation
from suture.data.batch import MILD, STRONG, SURGICAL, Augmentation, augment, resample


def images(n: int = 4) -> torch.Tensor:
    return torch.rand(n, 1, 16, 16, generator=torch.Generator().manual_seed(0))


def run(spec: Augmentation, seed: int = 1) -> torch.Tensor:
    return augment(images(), torch.Generator().manual_seed(seed), spec)


@pytest.mark.parametrize(
    "off",
    [
        Augmentation(),
        Augmentation(rotation=90, zoom=0.5, shift=0.5, affine_chance=0),
        Augmentation(brightness=0.5, brightness_chance=0),
    ],
)
def test_off_is_the_identity(off: Augmentation) -> None:
    assert not off.active
    assert torch.equal(run(off), images())


def test_each_field_alone_is_active() -> None:
    fields = ({"vertical_flip": 0.1}, {"shift": 0.1}, {"brightness": 0.1}, {"blur_chance": 0.1})
    assert all(Augmentation(**field).active for field in fields)
    for spec in (MILD, SURGICAL, STRONG):
        assert spec.active
        assert run(spec).shape == images().shape
        assert not torch.allclose(run(spec), images())


@pytest.mark.parametrize(
    ("spec", "axes"),
    [
        (Augmentation(flip=1.0), (-1,)),
        (Augmentation(vertical_flip=1.0), (-2,)),
        (Augmentation(flip=1.0, vertical_flip=1.0), (-1, -2)),
    ],
)
def test_flips_mirror_left_to_right_and_top_to_bottom(spec: Augmentation, axes: tuple[int, ...]) -> None:
    torch.testing.assert_close(run(spec), images().flip(axes), rtol=0, atol=1e-6)


def test_contrast_keeps_the_mean_of_each_image() -> None:
    out = run(Augmentation(contrast=0.5))
    torch.testing.assert_close(out.mean((1, 2, 3)), images().mean((1, 2, 3)))
    assert not torch.allclose(out.std((1, 2, 3)), images().std((1, 2, 3)))


@given(
    contrast=st.floats(0.05, 0.95),
    mean=st.lists(st.floats(0, 1), min_size=3, max_size=3),
    std=st.lists(st.floats(0.1, 1), min_size=3, max_size=3),
    seed=st.integers(0, 99),
)
def test_contrast_before_normalisation_is_contrast_after_it(
    contrast: float, mean: list[float], std: list[float], seed: int
) -> None:
    pixels = torch.rand(4, 3, 6, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    offset, unit = (torch.tensor(x, dtype=torch.float64).view(-1, 1, 1) for x in (mean, std))

    def changed(x: torch.Tensor) -> torch.Tensor:
        return augment(x, torch.Generator().manual_seed(seed), Augmentation(contrast=contrast))

    torch.testing.assert_close(changed((pixels - offset) / unit), (changed(pixels) - offset) / unit)


@pytest.mark.complete
def test_same_numbers_as_monai() -> None:
    from monai.networks.layers import AffineTransform  # here, since it takes every worker seconds

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

    monkeypatch.setattr(augmentation, "resample", record)
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


def test_zoom_draws_the_extent_of_each_axis_on_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """From output to input an image's side maps to 0.5 to 1.5 sides, half of the images to less than one."""
    theta = maps(Augmentation(zoom=0.5), monkeypatch)
    extent = torch.diagonal(theta, dim1=1, dim2=2)
    torch.testing.assert_close(theta, torch.diag_embed(extent))
    assert bool((extent.amin(0) < 0.55).all())
    assert bool((extent.amax(0) > 1.45).all())
    assert extent.min() >= 0.5
    assert extent.max() <= 1.5
    torch.testing.assert_close(extent.mean(0), torch.ones(2), rtol=0, atol=0.05)
    assert abs(torch.corrcoef(extent.T)[0, 1].item()) < 0.2


def test_an_extent_of_half_a_side_shows_the_middle_twice_as_large() -> None:
    one, still, up = torch.ones(1), torch.zeros(1), torch.zeros(1, dtype=torch.bool)
    theta = augmentation.affine_maps(
        still, torch.stack([one, one / 2]), up, torch.Generator(), Augmentation(zoom=0.5)
    )
    ramp = torch.arange(8.0).view(1, 1, 1, 8)
    torch.testing.assert_close(resample(ramp, theta)[0, 0, 0], 3.5 + (torch.arange(8.0) - 3.5) / 2)


def test_all_together_is_scale_and_mirror_then_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its columns stay at right angles; about half of the images are mirrored."""
    theta = maps(SURGICAL, monkeypatch)
    torch.testing.assert_close((theta[:, :, 0] * theta[:, :, 1]).sum(1), torch.zeros(400), rtol=0, atol=1e-6)
    assert 150 < int((torch.linalg.det(theta) < 0).sum()) < 250


# Four pixels of each: without a zoom, from before vertical flips, shifts, brightness and blurs were added;
# with one, by MONAI's resampling of maps multiplied out of rotation, mirror and extent.
BEFORE = {
    "surgical": (
        SURGICAL,
        [0.3880653381347656, 0.45761948823928833, 0.08825206756591797, 0.26258522272109985],
    ),
    "mild": (MILD, [0.8441107273101807, 0.6730456948280334, 1.008995771408081, 0.5971943140029907]),
    "flip": (
        Augmentation(flip=0.5),
        [0.819780170917511, 0.9105243682861328, 0.10224586725234985, 0.607594907283783],
    ),
    "contrast": (
        Augmentation(contrast=0.5),
        [0.8445877432823181, 0.9486443996429443, 1.0901366472244263, 0.17458099126815796],
    ),
}


@pytest.mark.parametrize("name", BEFORE)
def test_a_seed_keeps_giving_the_same_images_and_draws_no_more(name: str) -> None:
    spec, values = BEFORE[name]
    generator = torch.Generator().manual_seed(1)
    out = augment(images(), generator, spec)
    got = out[[0, 1, 2, 3], 0, [3, 5, 8, 12], [2, 9, 7, 14]]
    torch.testing.assert_close(got, torch.tensor(values), rtol=0, atol=1e-6)
    assert torch.rand(1, generator=generator).item() == 0.31379687786102295


def ramps(n: int) -> torch.Tensor:
    """Each pixel's place [n, 2, 32, 32] in pixels: x, then y."""
    y, x = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    return torch.stack([x, y]).expand(n, 2, 32, 32)


def test_shift_moves_a_bright_pixel_within_its_range() -> None:
    image = torch.zeros(200, 1, 32, 32)
    image[:, 0, 16, 16] = 1.0
    out = augment(image, torch.Generator().manual_seed(1), Augmentation(shift=0.25))
    torch.testing.assert_close(out.sum((1, 2, 3)), torch.ones(200))  # bilinear, and far from the border
    moves = (out * ramps(200)).sum((2, 3)) - 16
    assert bool((moves.amax(0) > 7.5).all())
    assert bool((moves.amin(0) < -7.5).all())
    assert moves.abs().max() <= 8.001
    assert abs(torch.corrcoef(moves.T)[0, 1].item()) < 0.2


def test_shift_is_in_pixels_of_the_output_whatever_the_zoom_and_rotation() -> None:
    """The centre of the image comes to lie at most that far from the centre of the output."""
    image = torch.zeros(200, 1, 33, 33)
    image[:, 0, 14:19, 14:19] = 1.0
    out = augment(image, torch.Generator().manual_seed(1), Augmentation(rotation=180, zoom=0.4, shift=0.2))
    y, x = torch.meshgrid(torch.arange(33.0) - 16, torch.arange(33.0) - 16, indexing="ij")
    centre = (out * torch.stack([x, y])).sum((2, 3)) / out.sum((2, 3))
    assert 6.3 < centre.abs().max() < 6.9  # a fifth of 33


def test_affine_chance_leaves_the_others_as_they_are() -> None:
    batch = torch.rand(400, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    spec = Augmentation(rotation=90, zoom=0.2, shift=0.2, affine_chance=0.75)
    out = augment(batch, torch.Generator().manual_seed(1), spec)
    same = (out - batch).abs().amax((1, 2, 3)) < 1e-5
    assert 60 < int(same.sum()) < 140
    flipped = augment(
        batch, torch.Generator().manual_seed(1), Augmentation(rotation=90, flip=1, affine_chance=0)
    )
    torch.testing.assert_close(flipped, batch.flip(-1), rtol=0, atol=1e-5)


def test_brightness_adds_a_constant_of_its_range_to_some_images() -> None:
    batch = torch.rand(400, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    spec = Augmentation(brightness=0.2, brightness_chance=0.75)
    change = augment(batch, torch.Generator().manual_seed(1), spec) - batch
    added = change.mean((1, 2, 3))
    torch.testing.assert_close(change, added.view(-1, 1, 1, 1).expand_as(change), rtol=0, atol=1e-6)
    assert -0.2001 < added.min() < -0.19
    assert 0.19 < added.max() < 0.2001
    assert 60 < int((added == 0).sum()) < 140


def test_changes_of_pixels_are_scaled_as_the_normalisation_scales_them() -> None:
    """Augmenting normalised colours is augmenting pixels, then normalising."""
    pixels = torch.rand(40, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    mean, std = torch.tensor([0.4, 0.5, 0.6]).view(-1, 1, 1), torch.tensor([0.1, 0.2, 0.4]).view(-1, 1, 1)
    plain = augment(pixels, torch.Generator().manual_seed(1), STRONG)
    normalised = augment((pixels - mean) / std, torch.Generator().manual_seed(1), STRONG, std=(0.1, 0.2, 0.4))
    torch.testing.assert_close(normalised, (plain - mean) / std, rtol=0, atol=1e-3)
    assert not torch.allclose(plain, pixels)


def blurred(batch: torch.Tensor, kinds: list[int], monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """The batch with each image's blur given: medians of 3 and 5, Gaussians of 3 and 5, noise, noise."""
    with monkeypatch.context() as patch:
        patch.setattr(torch, "randint", lambda *_, **__: torch.tensor(kinds))
        return augment(batch, torch.Generator().manual_seed(1), Augmentation(blur_chance=1.0))


def test_median_is_that_of_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a window holds the same value many times."""
    few = torch.randint(3, (2, 1, 40, 40), generator=torch.Generator().manual_seed(0)) / 2
    for batch in (images(2), few):
        out = blurred(batch, [0, 1], monkeypatch)
        for row, side in ((0, 3), (1, 5)):
            expected = batch[row, 0].unfold(0, side, 1).unfold(1, side, 1).flatten(2).median(-1).values
            edge = side // 2
            inner = out[row, 0, edge:-edge, edge:-edge]
            torch.testing.assert_close(inner, expected, rtol=0, atol=1e-4)


def test_gaussian_is_that_of_opencv_within_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.transforms.functional import gaussian_blur as torchvision_blur

    out = blurred(images(2), [2, 3], monkeypatch)
    for row, side, sigma in ((0, 3, 0.8), (1, 5, 1.1)):
        expected = torchvision_blur(images(2)[row], [side, side], [sigma, sigma])
        torch.testing.assert_close(out[row, :, 2:-2, 2:-2], expected[:, 2:-2, 2:-2], rtol=0, atol=1e-6)


def test_filters_keep_a_flat_image_to_its_border(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = torch.full((4, 1, 6, 6), 0.3)
    torch.testing.assert_close(blurred(flat, [0, 1, 2, 3], monkeypatch), flat)


def test_noise_has_a_variance_of_each_images_own(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = torch.zeros(60, 1, 64, 64)
    out = blurred(flat, [4, 5] * 30, monkeypatch) * 255
    variance = out.var((1, 2, 3))
    assert 4.5 < variance.min() < 8
    assert 27 < variance.max() < 33
    assert out.mean((1, 2, 3)).abs().max() < 0.5


def test_blurs_are_drawn_by_equal_odds() -> None:
    """A flat image with one bright pixel tells them apart: gone, spread, or with noise all over."""
    image = torch.zeros(600, 1, 8, 8)
    image[:, 0, 4, 4] = 1.0
    out = augment(image, torch.Generator().manual_seed(1), Augmentation(blur_chance=0.5)).flatten(1)
    same = (out == image.flatten(1)).all(1)
    gone = (out == 0).all(1)
    noisy = ~same & (out != 0).all(1)
    spread = ~(same | gone | noisy)
    assert 250 < int(same.sum()) < 350
    for kind in (gone, noisy, spread):
        assert 70 < int(kind.sum()) < 130


def test_every_image_changes_in_its_own_way_by_the_generator_alone() -> None:
    batch = images(1).expand(8, 1, 16, 16).clone()
    out = augment(batch, torch.Generator().manual_seed(1), STRONG)
    assert torch.equal(batch, images(1).expand(8, 1, 16, 16)), "the batch given stays as it is"
    assert all(not torch.allclose(out[i], out[j]) for i in range(8) for j in range(i))
    torch.manual_seed(99)
    assert torch.equal(out, augment(batch, torch.Generator().manual_seed(1), STRONG))
    assert not torch.equal(out, augment(batch, torch.Generator().manual_seed(2), STRONG))


SHARES = st.floats(0, 1)
SPECS = st.builds(
    Augmentation,
    rotation=st.floats(0, 180),
    flip=SHARES,
    zoom=st.floats(0, 0.99),
    contrast=st.floats(0, 0.99),
    vertical_flip=SHARES,
    shift=SHARES,
    affine_chance=SHARES,
    brightness=SHARES,
    brightness_chance=SHARES,
    blur_chance=SHARES,
)


@given(
    spec=SPECS,
    n=st.integers(1, 5),
    channels=st.sampled_from([1, 3]),
    side=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_any_spec_keeps_the_shape_and_finite_numbers(
    spec: Augmentation, n: int, channels: int, side: int, seed: int
) -> None:
    batch = torch.rand(n, channels, side, side, generator=torch.Generator().manual_seed(seed))
    out = augment(batch, torch.Generator().manual_seed(seed), spec, std=(0.2,) * channels)
    assert out.shape == batch.shape
    assert out.dtype == batch.dtype
    assert bool(out.isfinite().all())
    if not spec.active:
        assert torch.equal(out, batch)
