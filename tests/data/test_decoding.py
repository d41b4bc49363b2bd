"""suture.data.decoding: pixels from the formats of radiology, by hand."""

from __future__ import annotations

import io
import struct
from typing import Any

import numpy as np
import pydicom
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pydicom.encaps import encapsulate
from pydicom.uid import MPEG2MPML, JPEGLossless, JPEGLSLossless

from dicom_files import dicom
from suture.core.errors import DataError
from suture.data.decoding import decode_image, needed_bits, open_image, resize_pad

GRAY = np.array([[0, 100], [200, 255]], dtype=np.uint8)


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def test_gray_is_read_as_it_is_and_repeated_for_colour() -> None:
    data = encoded(Image.fromarray(GRAY))
    np.testing.assert_array_equal(decode_image(data, "a", color=False), GRAY)
    np.testing.assert_array_equal(decode_image(data, "a", color=True), np.stack([GRAY] * 3, axis=-1))


def test_sixteen_bits_are_scaled_not_clipped() -> None:
    data = encoded(Image.fromarray(np.array([[0, 257], [25700, 65535]], dtype=np.uint16)))
    np.testing.assert_array_equal(decode_image(data, "a", color=False), [[0, 1], [100, 255]])


def test_one_bit_a_palette_and_transparency() -> None:
    bit = Image.fromarray(np.array([[False, True]]))
    assert decode_image(encoded(bit), "a", color=False).tolist() == [[0, 255]]
    palette = Image.fromarray(np.array([[0, 1]], dtype=np.uint8), mode="P")
    palette.putpalette([10, 20, 30, 200, 200, 200])
    data = encoded(palette, transparency=1)
    assert decode_image(data, "a", color=True).tolist() == [[[10, 20, 30], [200, 200, 200]]]
    clear = Image.new("RGBA", (1, 1), (50, 50, 50, 0))
    assert decode_image(encoded(clear), "a", color=False).tolist() == [[50]]
    assert decode_image(encoded(Image.new("LA", (1, 1), (70, 128))), "a", color=False).tolist() == [[70]]


def test_a_jpeg_is_read() -> None:
    data = encoded(Image.new("RGB", (8, 6), (255, 0, 0)), "JPEG")
    assert decode_image(data, "a", color=True).shape == (6, 8, 3)
    # ITU-R 601-2: 0.299 * 254 (JPEG is not exact).
    assert abs(int(decode_image(data, "a", color=False)[0, 0]) - 76) <= 1


def test_dicom_spans_its_own_range() -> None:
    pixels = np.array([[1000, 1051], [1102, 1255]], dtype=np.uint16)
    assert decode_image(dicom(pixels), "a", color=False).tolist() == [[0, 51], [102, 255]]


def test_dicom_monochrome1_is_inverted() -> None:
    pixels = np.array([[0, 55], [200, 255]], dtype=np.uint8)
    data = dicom(pixels, PhotometricInterpretation="MONOCHROME1")
    assert decode_image(data, "a", color=False).tolist() == [[255, 200], [55, 0]]


def test_dicom_rescale_goes_before_the_window() -> None:
    # 2 * stored - 100 = [-100, 0, 50, 100, 900]; PS3.3 C.11.2.1.2.1 with centre 50.5 and width 101 maps 0 to
    # the lowest and 100 to the highest value, and what lies outside is cut off.
    pixels = np.array([[0, 50, 75, 100, 500]], dtype=np.uint16)
    data = dicom(pixels, RescaleSlope=2, RescaleIntercept=-100, WindowCenter=50.5, WindowWidth=101)
    assert decode_image(data, "a", color=False)[0, [0, 1, 3, 4]].tolist() == [0, 0, 255, 255]
    assert decode_image(data, "a", color=False)[0, 2] in (127, 128)


def test_dicom_of_one_value_is_black() -> None:
    assert decode_image(dicom(np.full((2, 2), 700, np.uint16)), "a", color=False).tolist() == [[0, 0], [0, 0]]


def test_dicom_colour() -> None:
    pixels = np.array([[[10, 20, 30], [255, 255, 255]]], dtype=np.uint8)
    data = dicom(pixels, SamplesPerPixel=3, PlanarConfiguration=0, PhotometricInterpretation="RGB")
    assert decode_image(data, "a", color=True).tolist() == pixels.tolist()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not an image",
        encoded(Image.fromarray(np.arange(10000, dtype=np.uint8).reshape(100, 100)))[:-500],
        encoded(Image.new("F", (2, 2)), "TIFF"),
        dicom(np.zeros((2, 2), np.uint16))[:-6],
        dicom(np.zeros((4, 2), np.uint16), NumberOfFrames=2, Rows=2),
        b"\0" * 128 + b"DICM",
    ],
)
def test_an_unreadable_image_is_named(data: bytes) -> None:
    with pytest.raises(DataError, match="image 'ward/7' "):
        decode_image(data, "ward/7", color=False)


def test_a_file_of_another_format_is_told_what_is_read_and_twice_the_same() -> None:
    """Pillow's own message holds an address in memory, which would be in the list of what was left out."""
    gif = encoded(Image.new("L", (2, 2)), "GIF")
    with pytest.raises(DataError, match=r"PNG, JPEG, TIFF, BMP or DICOM; save it as one of them$"):
        decode_image(gif, "a.png", color=False)


def test_an_empty_file_is_called_so() -> None:
    with pytest.raises(DataError, match=r"'a\.png' is an empty file"):
        decode_image(b"", "a.png", color=False)


def test_a_wide_image_is_padded_above_and_below() -> None:
    image = np.full((2, 4), 9, dtype=np.uint8)
    assert resize_pad(image, 4).tolist() == [[0] * 4, [9] * 4, [9] * 4, [0] * 4]
    assert resize_pad(image, 2).tolist() == [[9, 9], [0, 0]]


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40), st.booleans())
def test_a_resized_image_touches_two_sides_and_keeps_its_value(
    h: int, w: int, size: int, color: bool
) -> None:
    image = np.full((h, w, 3) if color else (h, w), 7, dtype=np.uint8)
    square = resize_pad(image, size)
    assert square.shape == ((size, size, 3) if color else (size, size))
    assert set(np.unique(square)) <= {0, 7}
    filled = square.reshape(size, size, -1).any(axis=2)
    assert filled.any(axis=1).sum() == max(1, round(h * size / max(h, w)))
    assert filled.any(axis=0).sum() == max(1, round(w * size / max(h, w)))


DEEP = np.array([[0, 1024], [2048, 4095]], dtype=np.uint16)


def packed_tiff(values: list[int]) -> bytes:
    """A TIFF of one row of 12-bit values, packed as TIFF 6.0 has it: two of them in three bytes."""
    pairs = zip(values[::2], values[1::2], strict=True)
    strip = b"".join(bytes([a >> 4, (a & 15) << 4 | b >> 8, b & 255]) for a, b in pairs)
    tags = [(256, len(values)), (257, 1), (258, 12), (259, 1), (262, 1), (273, 0), (277, 1), (278, 1)]
    tags.append((279, len(strip)))
    start = 8 + 2 + 12 * len(tags) + 4
    entries = (struct.pack("<HHII", tag, 4, 1, start if tag == 273 else value) for tag, value in tags)
    head = b"II*\0" + struct.pack("<IH", 8, len(tags))
    return head + b"".join(entries) + struct.pack("<I", 0) + strip


@pytest.mark.parametrize("form", ["PNG", "TIFF"])
def test_values_of_fewer_bits_are_scaled_by_their_true_depth(form: str) -> None:
    data = encoded(Image.fromarray(DEEP), form)
    assert decode_image(data, "a", color=False).tolist() == [[0, 4], [8, 16]]
    assert decode_image(data, "a", color=False, bits=12).tolist() == [[0, 64], [128, 255]]
    # Whatever the other values of the image: 2048 is the same gray in all of them.
    darker = encoded(Image.fromarray(DEEP[:, :1].copy()), form)
    assert decode_image(darker, "a", color=False, bits=12).tolist() == [[0], [128]]
    assert decode_image(encoded(Image.fromarray(GRAY), form), "a", False, bits=12).tolist() == GRAY.tolist()


def test_a_value_beyond_the_depth_is_not_cut_off() -> None:
    data = encoded(Image.fromarray(DEEP + np.uint16(1)))
    with pytest.raises(DataError, match=r"value 4,096, .* more than 12 bits; set \[data\] bits = 14"):
        decode_image(data, "a", color=False, bits=12)
    for value, said in ((-5, "-5"), (70000, "70,000")):
        with pytest.raises(DataError, match=f"holds the value {said}; save it with 16 bits"):
            decode_image(encoded(Image.fromarray(np.full((2, 2), value, np.int32)), "TIFF"), "a", False)


@pytest.mark.parametrize("bits", [None, 10, 14])
def test_a_tiff_says_its_depth_itself(bits: int | None) -> None:
    data = packed_tiff([0, 1024, 2048, 4095])
    assert decode_image(data, "a", color=False, bits=bits).tolist() == [[0, 64, 128, 255]]
    assert open_image(data, "a", bits).bits == 12


def test_dicom_says_its_stored_bits_and_needs_no_depth() -> None:
    data = dicom(DEEP, BitsStored=12, HighBit=11)
    assert open_image(data, "a").bits == 12
    assert decode_image(data, "a", False, bits=16).tolist() == decode_image(data, "a", False).tolist()


@pytest.mark.parametrize(
    ("highest", "bits"), [(0, 8), (255, 8), (256, 10), (1024, 12), (4095, 12), (4096, 14), (16384, 16)]
)
def test_the_depth_that_a_value_needs(highest: int, bits: int) -> None:
    assert needed_bits(highest) == bits


def test_a_dicom_of_another_modality_is_refused_and_files_that_state_none_by_their_format_are_read() -> None:
    chest = ("CR", "DX")
    for stated in chest:
        assert open_image(dicom(GRAY, Modality=stated), "a", modalities=chest).modality == stated
    for stated, said in (
        ("CT", "is of the modality 'CT'"),
        ("", "states no modality"),
        ("dx", "is of the modality 'dx'"),
    ):
        with pytest.raises(
            DataError, match=rf"^image 'a' {said} \(0008,0060\), and the model is for CR, DX$"
        ):
            decode_image(dicom(GRAY, Modality=stated), "a", False, modalities=chest)
    with pytest.raises(DataError, match="states no modality"):
        decode_image(dicom(GRAY), "a", False, modalities=chest)
    assert decode_image(dicom(GRAY, Modality="CT"), "a", False).shape == GRAY.shape
    assert open_image(encoded(Image.fromarray(GRAY)), "a", modalities=chest).modality is None


@pytest.mark.parametrize(("data", "missing"), [(b"junk", "PixelData")])
def test_a_file_that_is_called_dicom_and_holds_no_image_says_what_it_lacks(data: bytes, missing: str) -> None:
    with pytest.raises(
        DataError, match=rf"^image 'a\.dcm' cannot be read: it is not a DICOM image: {missing}"
    ):
        decode_image(data, "a.dcm", color=False)


@pytest.mark.complete
def test_a_dicom_of_jpeg_ls_is_read_and_one_of_another_size_refused() -> None:
    import jpeg_ls

    pixels = (1300 * np.arange(48)).astype(np.uint16).reshape(6, 8)
    frame = jpeg_ls.encode_array(pixels)
    frame = bytes(frame) if not isinstance(frame, bytes) else frame
    data = compressed(frame, JPEGLSLossless, pixels.shape)
    assert np.array_equal(
        decode_image(data, "a.dcm", color=False), decode_image(dicom(pixels), "a.dcm", False)
    )
    with pytest.raises(DataError, match=r"compressed frame is of \(8, 6\) pixels"):
        decode_image(compressed(frame, JPEGLSLossless, (60, 80)), "a.dcm", color=False)


@pytest.mark.parametrize(
    ("syntax", "remedy"), [(JPEGLossless, "pip install "), (MPEG2MPML, "save it without compression")]
)
def test_a_compression_that_is_not_read_is_named_with_the_remedy(syntax: str, remedy: str) -> None:
    with pytest.raises(DataError, match=f"its compression, .*{remedy}"):
        decode_image(compressed(b"\xff\xd8\xff\xd9", syntax, (6, 8)), "a.dcm", color=False)


def compressed(frame: bytes, syntax: str, shape: tuple[int, int]) -> bytes:
    """A DICOM of one gray frame of 16 bits, compressed."""
    dataset = pydicom.dcmread(io.BytesIO(dicom(np.zeros(shape, dtype=np.uint16))))
    dataset.file_meta.TransferSyntaxUID = syntax
    dataset.PixelData = encapsulate([frame])
    dataset["PixelData"].VR = "OB"
    file = io.BytesIO()
    dataset.save_as(file, enforce_file_format=True)
    return file.getvalue()
