"""suture.data.inspection: what the file of an image holds."""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hospitals import image, table
from suture.core.errors import DataError
from suture.data.inspection import SAMPLE, ImageFacts, depth_warnings, inspect, sample, size_notes
from suture_prepare.discovery import discover


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def facts(highest: int | None, brightest: int = 200, bits: int = 16) -> ImageFacts:
    return ImageFacts(b"", b"", 1, 1, bits, highest, colour=False, mean=0.0, brightest=brightest)


def test_the_same_pixels_in_another_file_have_the_same_digest() -> None:
    picture = Image.fromarray(np.arange(12, dtype=np.uint8).reshape(3, 4))
    a, b = inspect(png(picture), "a", False), inspect(png(picture.convert("RGB")), "b", False)
    assert (a.width, a.height, a.bits, a.highest, a.brightest, a.mean) == (4, 3, 8, None, 11, 5.5)
    assert a.pixels == b.pixels
    assert a.file != b.file
    turned = inspect(png(picture.transpose(Image.Transpose.TRANSPOSE)), "c", False)
    assert turned.pixels != a.pixels


def test_colour_is_more_than_three_equal_channels() -> None:
    assert not inspect(png(Image.new("RGB", (2, 2), (7, 7, 7))), "a", False).colour
    assert inspect(png(Image.new("RGB", (2, 2), (7, 8, 7))), "a", False).colour
    with pytest.raises(DataError, match=r"'a' cannot be read"):
        inspect(b"no image", "a", False)


@pytest.mark.parametrize(
    ("found", "bits", "said"),
    [
        (
            [facts(4000), facts(100)],
            None,
            "2 images store 16 bits and have no value above 4,000: .*= 12",
        ),
        ([facts(16000)], None, "bits = 14, .* 4 times too dark"),
        ([facts(None, bits=8)], 12, "bits = 12 has no effect"),
        ([facts(None, 20, 8)], None, "brighter than 20 of 255"),
    ],
)
def test_a_wrong_depth_is_told_with_the_line_to_write(
    found: list[ImageFacts], bits: int | None, said: str
) -> None:
    [warning] = depth_warnings(found, bits)
    assert re.search(said, warning)


def test_a_right_depth_is_no_warning() -> None:
    assert depth_warnings([facts(4000)], 12) == []
    assert depth_warnings([facts(900)], 12) == [], "the site says so"
    assert depth_warnings([facts(40000)], None) == []
    assert depth_warnings([facts(None, 200, 12)], None) == []
    assert depth_warnings([], None) == []


def test_init_writes_the_depth_of_a_bounded_look_with_its_reason(tmp_path: Path) -> None:
    rows = [["image", "patient", "Mass"]]
    for i in range(100):
        image(tmp_path / "images" / f"{i:03}.png", i, 4095)
        rows.append([f"{i:03}.png", f"p{i}", str(i % 2)])
    table(tmp_path / "labels.csv", rows)
    found = discover(tmp_path)
    assert found.data["bits"] == 12
    looked = len(range(0, 100, 4))
    assert looked <= SAMPLE
    assert found.reasons["bits"].startswith(f"of {looked} images looked at, {looked} store 16 bits")
    assert sample(tmp_path / "images", {f"{i:03}.png" for i in range(100)}).depth is not None


@pytest.mark.parametrize("top", [255, 65535])
def test_other_images_need_no_depth(tmp_path: Path, top: int) -> None:
    image(tmp_path / "a.png", 1, top)
    (tmp_path / "b.png").write_bytes(b"damaged")
    assert sample(tmp_path, {"a.png", "b.png"}).depth is None


def test_sizes_that_a_model_sees_little_of_are_told_with_the_most_extreme() -> None:
    usual = [("a", 64, 64), ("b", 32, 30), ("c", 3000, 750)]
    assert size_notes(usual, 64) == []
    assert size_notes([], 64) == []
    small, narrow = size_notes([*usual, ("d", 31, 31), ("e", 16, 9), ("f", 900, 30), ("g", 30, 301)], 64)
    assert small.startswith("2 images enlarged more than 2 times to the 64 pixels")
    assert small.endswith("The smallest: e, 16 × 9")
    assert narrow.startswith("2 images more than 4 times as long as wide")
    assert "The narrowest: f, 900 × 30, " in narrow
    assert " 2 pixels" in narrow
