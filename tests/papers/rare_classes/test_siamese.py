"""One augmentation for all images of a draw."""

from __future__ import annotations

import pytest
import torch

from suture_papers.rare_classes import creff
from suture_papers.rare_classes.creff import colour, crop, cut, flip, rotate, siamese, zoom


def test_all_images_are_changed_alike_and_each_kind_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(0)
    image = torch.randn(1, 3, 16, 16, generator=g)
    images = image.expand(4, -1, -1, -1)
    for kind in creff._KINDS:
        monkeypatch.setattr(creff, "_KINDS", (kind,))
        changed = siamese(images, torch.Generator().manual_seed(3))
        assert changed.shape == images.shape
        for one in changed[1:]:
            assert torch.equal(one, changed[0])
        assert torch.equal(changed, siamese(images, torch.Generator().manual_seed(3)))
        assert kind is flip or not torch.equal(changed, images)


def test_the_odds_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    kinds = [lambda x, *_, name=kind.__name__: drawn.append(name) or x for kind in creff._KINDS]
    monkeypatch.setattr(creff, "_KINDS", kinds)
    g = torch.Generator().manual_seed(0)
    for _ in range(600):
        siamese(torch.zeros(1, 1, 2, 2), g)
    counts = [drawn.count(name) for name in ("colour", "crop", "cut", "flip", "zoom", "rotate")]
    assert sum(counts) == 600
    assert min(counts) > 70


def test_colour_by_hand() -> None:
    image = torch.tensor([1.0, 3.0]).view(1, 2, 1, 1)
    assert colour(image, 1.0, 0.5, 0.5).flatten().tolist() == [1.5, 3.5]
    assert colour(image, 0.0, 0.5, 0.5).flatten().tolist() == [0.5, 2.5]
    assert colour(image, 0.5, 0.0, 0.5).flatten().tolist() == [2, 2]  # no saturation: the mean of channels
    assert colour(image, 0.5, 1.0, 0.5).flatten().tolist() == [0, 4]
    assert colour(image, 0.5, 0.5, 1.0).flatten().tolist() == [0.5, 3.5]  # contrast 1.5 around 2


def test_a_crop_moves_by_an_eighth_of_the_side_at_most() -> None:
    image = torch.arange(64.0).view(1, 1, 8, 8) + 1
    assert torch.equal(crop(image, 0.5, 0.5, 0.0), image)
    up_left, down_right = crop(image, 0.0, 0.0, 0.0), crop(image, 0.999, 0.999, 0.0)
    assert torch.equal(up_left[..., 1:, 1:], image[..., :-1, :-1])
    assert torch.equal(down_right[..., :-1, :-1], image[..., 1:, 1:])
    assert not up_left[..., 0, :].any()
    assert not down_right[..., -1].any()


def test_a_hole_has_half_the_side() -> None:
    image = torch.ones(2, 1, 8, 8)
    holed = cut(image, 0.5, 0.5, 0.0)
    assert int((holed == 0).sum()) == 2 * 16
    assert not holed[..., 2:6, 2:6].any()
    assert int((cut(image, 0.0, 0.0, 0.0) == 0).sum()) == 2 * 4  # half of each side is beyond the border
    assert image.all()


def test_a_mirror_in_half_of_the_draws() -> None:
    image = torch.tensor([1.0, 2.0, 3.0]).view(1, 1, 1, 3)
    assert flip(image, 0.4).flatten().tolist() == [3, 2, 1]
    assert flip(image, 0.6).flatten().tolist() == [1, 2, 3]


def test_zoom_and_rotation_leave_the_image_in_the_middle_of_their_range() -> None:
    image = torch.randn(2, 1, 9, 9, generator=torch.Generator().manual_seed(0))
    middle = (1 - 1 / 1.2) / (1.2 - 1 / 1.2)
    for same in (zoom(image, middle, middle, 0.0), rotate(image, 0.5)):
        torch.testing.assert_close(same, image)
    # 15 degrees move the corners and not the centre.
    for turned in (rotate(image, 0.0), rotate(image, 1.0)):
        torch.testing.assert_close(turned[..., 4, 4], image[..., 4, 4])
        assert not torch.allclose(turned[..., 0, 0], image[..., 0, 0])
    closer = zoom(image, 0.0, 0.0, 0.0)
    torch.testing.assert_close(closer[..., 4, 4], image[..., 4, 4])
    # Of a line in the middle column, 1 / 1.2 of the width is seen: what is beyond x = .83 is out of sight.
    ramp = torch.arange(9.0).view(1, 1, 1, 9).expand(1, 1, 9, 9)
    assert zoom(ramp, 0.0, 0.0, 0.0)[0, 0, 4, 0].item() == pytest.approx(4 - 4 / 1.2)
    assert zoom(ramp, 1.0, 1.0, 0.0)[0, 0, 4, 1].item() == pytest.approx(max(4 - 3 * 1.2, 0))
