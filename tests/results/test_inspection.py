"""suture_results.inspection: what the file of an image holds."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hospitals import image, site
from suture.core.errors import DataError
from suture_prepare.discovery import discover
from suture_results.inspection import SAMPLE, ImageFacts, depth_warnings, inspect, sample, size_notes
from world import refused


def encoded(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def facts(highest: int | None, brightest: int = 200, bits: int = 16) -> ImageFacts:
    return ImageFacts(b"", b"", 1, 1, bits, highest, colour=False, mean=0.0, brightest=brightest)


def test_the_same_pixels_in_another_file_have_the_same_digest() -> None:
    picture = Image.fromarray(np.arange(12, dtype=np.uint8).reshape(3, 4))
    a, b = inspect(encoded(picture), "a", False), inspect(encoded(picture.convert("RGB")), "b", False)
    assert (a.width, a.height, a.bits, a.highest, a.brightest, a.mean) == (4, 3, 8, None, 11, 5.5)
    assert a.pixels == b.pixels
    assert a.file != b.file
    turned = inspect(encoded(picture.transpose(Image.Transpose.TRANSPOSE)), "c", False)
    assert turned.pixels != a.pixels


def test_colour_is_more_than_three_equal_channels() -> None:
    assert not inspect(encoded(Image.new("RGB", (2, 2), (7, 7, 7))), "a", False).colour
    green = inspect(encoded(Image.new("RGB", (2, 3), (7, 8, 7))), "a", True)
    assert (green.colour, green.width, green.height) == (True, 2, 3)
    with refused("'a'", by=DataError):
        inspect(b"no image", "a", False)


@pytest.mark.parametrize(
    ("found", "bits", "named"),
    [
        ([facts(4000), facts(100)], None, ["2 images", "16 bits", "4,000", "bits = 12"]),
        ([facts(16000)], None, ["bits = 14", "4 times"]),
        ([facts(None, bits=8)], 12, ["bits = 12"]),
        ([facts(None, 20, 8)], None, ["20 of 255"]),
        ([facts(4000)], 12, []),
        ([facts(900)], 12, []),  # the site says so
        ([facts(40000)], None, []),
        ([facts(None, 200, 12)], None, []),
        ([], None, []),
    ],
)
def test_a_wrong_depth_is_told_with_the_line_to_write(
    found: list[ImageFacts], bits: int | None, named: list[str]
) -> None:
    warnings = depth_warnings(found, bits)
    assert len(warnings) == bool(named)
    assert [word for word in named if word not in warnings[0]] == []


def test_init_writes_the_depth_of_a_bounded_look(tmp_path: Path) -> None:
    rows = [[f"{i:03}.png", f"p{i}", i % 2] for i in range(100)]
    found = discover(site(tmp_path, ["image", "patient", "Mass"], *rows, top=4095))
    assert found.data["bits"] == 12
    looked = len(range(0, 100, 4))
    assert looked <= SAMPLE
    assert f"{looked} store 16 bits" in found.reasons["bits"]
    for top in (255, 65535):
        image(tmp_path / "b" / "a.png", 1, top)
        (tmp_path / "b" / "b.png").write_bytes(b"damaged")
        assert sample(tmp_path / "b", {"a.png", "b.png"}).depth is None


def test_sizes_that_a_model_sees_little_of_are_told_with_the_most_extreme() -> None:
    usual = [("a", 64, 64), ("b", 32, 30), ("c", 3000, 750)]
    assert size_notes(usual, 64) == size_notes([], 64) == []
    small, narrow = size_notes([*usual, ("d", 31, 31), ("e", 16, 9), ("f", 900, 30), ("g", 30, 301)], 64)
    assert all(named in small for named in ("2 images", "64 pixels", "e, 16 × 9"))
    assert all(named in narrow for named in ("2 images", "f, 900 × 30", " 2 pixels"))
