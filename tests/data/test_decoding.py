"""suture.data.decoding: pixels from the formats of radiology, by hand."""

from __future__ import annotations

import gzip
import io
import logging
import struct
import subprocess
import sys
import tarfile
import warnings
import zlib
from itertools import product
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps
from pydicom.encaps import encapsulate
from pydicom.uid import MPEG2MPML, JPEGLossless, JPEGLSLossless

from dicom_files import dicom, stored
from suture.core.errors import DataError
from suture.data import decoding
from suture.data.decoding import decode_image, is_array, needed_bits, open_image, resize_pad, warned_of
from suture.data.images import ImageSource
from suture_results.inspection import inspect
from suture_results.model_export.bundle_files.inference import ReadImage
from world import refused

GRAY = np.array([[0, 100], [200, 255]], dtype=np.uint8)
DEEP = np.array([[0, 1024], [2048, 4095]], dtype=np.uint16)
RAMP = np.arange(12, dtype=np.uint8).reshape(3, 4)
RGB = np.stack([RAMP, RAMP + 1, RAMP + 2], -1)
LEFT_POSTERIOR = np.diag([-1.0, -1.0, 1.0, 1.0])
"""The columns and rows of a NIfTI go as those of a DICOM."""


def encoded(image: Image.Image | np.ndarray, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(file, form, **options)
    return file.getvalue()


def palette() -> bytes:
    image = Image.fromarray(np.array([[0, 1]], dtype=np.uint8), mode="P")
    image.putpalette([10, 20, 30, 200, 200, 200])
    return encoded(image, transparency=1)


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


def npy(values: Any, dtype: Any = None) -> bytes:
    file = io.BytesIO()
    np.save(file, np.asarray(values, dtype))
    return file.getvalue()


def nifti(values: np.ndarray, affine: np.ndarray | None = None) -> bytes:
    return bytes(nib.Nifti1Image(values, np.eye(4) if affine is None else affine).to_bytes())


def inverted_nifti() -> bytes:
    """Of a slope of -2, beside the values 0, 50, 100 and 200."""
    data = bytearray(nifti(np.array([[0, 100], [50, 200]], np.int16), LEFT_POSTERIOR))
    data[112:120] = np.array([-2.0, 5.0], "<f4").tobytes()
    data[352:360] = np.array([0, 50, 100, 200], "<i2").tobytes()
    return bytes(data)


SPAN, COLOUR = [[100, 300], [200, 4095]], {"SamplesPerPixel": 3, "PhotometricInterpretation": "RGB"}

READ: dict[str, tuple[bytes, str, bool, object]] = {
    "gray": (encoded(GRAY), "a", False, GRAY.tolist()),
    "gray as colour": (encoded(GRAY), "a", True, np.stack([GRAY] * 3, axis=-1).tolist()),
    "16 bits, scaled and not clipped": (
        encoded(np.array([[0, 257], [25700, 65535]], dtype=np.uint16)), "a", False, [[0, 1], [100, 255]],
    ),
    "1 bit": (encoded(np.array([[False, True]])), "a", False, [[0, 255]]),
    "palette": (palette(), "a", True, [[[10, 20, 30], [200, 200, 200]]]),
    "transparent": (encoded(Image.new("RGBA", (1, 1), (50, 50, 50, 0))), "a", False, [[50]]),
    "gray with transparency": (encoded(Image.new("LA", (1, 1), (70, 128))), "a", False, [[70]]),
    "DICOM": (
        dicom(np.array([[1000, 1051], [1102, 1255]], np.uint16)), "a", False, [[0, 51], [102, 255]],
    ),
    "DICOM, inverted": (
        dicom(np.array([[0, 55], [200, 255]], np.uint8), PhotometricInterpretation="MONOCHROME1"),
        "a", False, [[255, 200], [55, 0]],
    ),
    "DICOM of one value": (dicom(np.full((2, 2), 700, np.uint16)), "a", False, [[0, 0], [0, 0]]),
    "DICOM in colour": (dicom(RGB, PlanarConfiguration=0, **COLOUR), "a", True, RGB.tolist()),
    "npy": (npy(RAMP), "a.npy", False, RAMP.tolist()),
    "npy of more axes": (npy(RAMP[None, :, :, None]), "a.npy", False, RAMP.tolist()),
    "npy of Fortran": (npy(np.asfortranarray(RAMP)), "a.npy", False, RAMP.tolist()),
    "npy of truths": (npy(RAMP > 5), "a.npy", False, ((RAMP > 5) * 255).tolist()),
    "npy in colour": (npy(RGB), "a.npy", True, RGB.tolist()),
    **{
        f"npy of {dtype}": (npy(SPAN, dtype), "a.npy", False, [[0, 13], [6, 255]])
        for dtype in ("uint16", "int16", "float32", ">i2")
    },
    "npy of one value": (npy([[7, 7]], "int32"), "a.npy", False, [[0, 0]]),
    "NIfTI to the left and posterior": (
        nifti(RAMP.T[:, :, None], LEFT_POSTERIOR), "a.nii", False, RAMP.tolist(),
    ),
    "NIfTI, packed": (
        gzip.compress(nifti(RAMP.T[:, :, None], LEFT_POSTERIOR)), "a.nii.gz", False, RAMP.tolist(),
    ),
    "NIfTI to the right and anterior": (nifti(RAMP.T[::-1, ::-1, None]), "a.nii", False, RAMP.tolist()),
    "NIfTI of two axes": (nifti(RAMP.T[::-1, ::-1]), "a.nii", False, RAMP.tolist()),
    "coronal NIfTI, of which the last axis goes up": (
        nifti(RAMP.T[::-1, None, ::-1]), "a.nii", False, RAMP.tolist(),
    ),
    "inverted NIfTI": (inverted_nifti(), "a.nii", False, [[255, 191], [127, 0]]),
    "NIfTI before a bomb": (
        gzip.compress(nifti(RAMP.T[::-1, ::-1])) + gzip.compress(bytes(2**20)) * 100, "a.nii.gz", False,
        RAMP.tolist(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", READ)
def test_an_image_is_read_as_its_values(kind: str) -> None:
    data, name, color, expected = READ[kind]
    assert decode_image(data, name, color).tolist() == expected


def test_a_jpeg_is_read() -> None:
    data = encoded(Image.new("RGB", (8, 6), (255, 0, 0)), "JPEG")
    assert decode_image(data, "a", color=True).shape == (6, 8, 3)
    # ITU-R 601-2: 0.299 * 254 (JPEG is not exact).
    assert abs(int(decode_image(data, "a", color=False)[0, 0]) - 76) <= 1


def test_dicom_rescale_goes_before_the_window() -> None:
    # 2 * stored - 100 = [-100, 0, 50, 100, 900]; PS3.3 C.11.2.1.2.1 with centre 50.5 and width 101 maps 0 to
    # the lowest and 100 to the highest value, and what lies outside is cut off.
    pixels = np.array([[0, 50, 75, 100, 500]], dtype=np.uint16)
    data = dicom(pixels, RescaleSlope=2, RescaleIntercept=-100, WindowCenter=50.5, WindowWidth=101)
    assert decode_image(data, "a", color=False)[0, [0, 1, 3, 4]].tolist() == [0, 0, 255, 255]
    assert decode_image(data, "a", color=False)[0, 2] in (127, 128)


def large_npy() -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        file, {"descr": "<f8", "fortran_order": False, "shape": (10**6, 10**6)}
    )
    return file.getvalue()


def changed_nifti(start: int, values: list[float], kind: str) -> bytes:
    data, part = bytearray(nifti(RAMP)), np.array(values, kind).tobytes()
    data[start : start + len(part)] = part
    return bytes(data)


REFUSED: list[tuple[bytes, str, list[str]]] = [
    (b"", "ward/7.png", []),
    (b"not an image", "ward/7", []),
    (encoded(np.arange(10000, dtype=np.uint8).reshape(100, 100))[:-500], "ward/7", []),
    (encoded(Image.new("F", (2, 2)), "TIFF"), "ward/7", []),
    (encoded(Image.new("L", (2, 2)), "GIF"), "a.png", ["PNG, JPEG, TIFF, BMP or DICOM"]),
    (encoded(np.full((2, 2), -5, np.int32), "TIFF"), "a", ["-5", "16"]),
    (encoded(np.full((2, 2), 70_000, np.int32), "TIFF"), "a", ["70,000", "16"]),
    (dicom(np.zeros((2, 2), np.uint16))[:-6], "ward/7", []),
    (dicom(np.zeros((4, 2), np.uint16), NumberOfFrames=2, Rows=2), "ward/7", ["2 frames"]),
    (b"\0" * 128 + b"DICM", "ward/7", []),
    (b"junk", "a.dcm", ["PixelData"]),
    (stored(encapsulate([b"\xff\xd8\xff\xd9"]), JPEGLossless, bits=16), "a.dcm", ["pip install "]),
    (stored(encapsulate([b"\xff\xd8\xff\xd9"]), MPEG2MPML, bits=16), "a.dcm", ["compression"]),
    (npy(np.zeros((5, 6, 7))), "a.npy", ["5 x 6 x 7"]),
    (npy(np.zeros(7)), "a.npy", ["of 7,"]),
    (npy([[1.0, np.nan]]), "a.npy", ["finite"]),
    (npy([["a"]]), "a.npy", ["<U1"]),
    (npy([[{}]], object), "a.npy", ["object"]),
    (npy(np.zeros((2, 2, 3))), "a.npy", ["float64", "uint8"]),
    (npy(np.zeros((0, 4))), "a.npy", ["0 x 4"]),
    (npy(RAMP)[:-1], "a.npy", []),
    (npy(RAMP)[:9], "a.npy", []),
    (nifti(np.zeros((5, 6, 7), np.int16)), "a.nii", ["5 x 6 x 7"]),
    (nifti(RAMP)[:-1], "a.nii", ["11 of 12"]),
    (gzip.compress(b"nothing", mtime=0), "a.nii.gz", ["NIfTI-1"]),
    (gzip.compress(changed_nifti(40, [2, 32767, 32767], "<i2")), "a.nii.gz", ["32767 x 32767"]),
    (changed_nifti(108, [2.0**30], "<f4"), "a.nii", ["1,073,741,824"]),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_an_unreadable_image_is_named_and_twice_the_same(case: int) -> None:
    """Pillow's own message holds an address in memory, which would be in the list of what was left out."""
    data, name, named = REFUSED[case]
    said = set()
    for _ in range(2):
        with pytest.raises(DataError) as caught:
            decode_image(data, name, color=False)
        said.add(str(caught.value))
    (text,) = said
    assert [word for word in (f"image {name!r}", *named) if word not in text] == []
    assert "0x" not in text


def test_headers_of_terabytes_are_refused_before_memory_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "load", None)
    with refused("1000000 x 1000000", by=DataError):
        decode_image(large_npy(), "a.npy", color=False)


def test_the_package_of_nifti_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nibabel.nifti1", None)
    with refused("suture[nifti]", by=DataError):
        decode_image(nifti(RAMP), "a.nii", color=False)


def test_arrays_are_found_in_a_folder_by_path_and_stem(tmp_path: Path) -> None:
    (tmp_path / "a.nii.gz").write_bytes(gzip.compress(nifti(RAMP)))
    (tmp_path / "b.npy").write_bytes(npy(RAMP))
    (tmp_path / "notes.gz").write_bytes(b"")
    with ImageSource(tmp_path) as source:
        assert source.paths() == ["a.nii.gz", "b.npy"]
        assert source.stems() == {"a": "a.nii.gz", "b": "b.npy"}
        assert source.read("a.nii.gz", False).shape == (4, 3)
    assert not is_array(gzip.compress(b"", mtime=0), "a.csv.gz")
    assert [open_image(npy(RAMP, kind), "a.npy").bits for kind in ("?", "u1", "i2")] == [8, 8, 16]


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


# How many bits are stored


@pytest.mark.parametrize("form", ["PNG", "TIFF"])
def test_values_of_fewer_bits_are_scaled_by_their_true_depth(form: str) -> None:
    data = encoded(DEEP, form)
    assert decode_image(data, "a", color=False).tolist() == [[0, 4], [8, 16]]
    assert decode_image(data, "a", color=False, bits=12).tolist() == [[0, 64], [128, 255]]
    # Whatever the other values of the image: 2048 is the same gray in all of them.
    darker = encoded(DEEP[:, :1].copy(), form)
    assert decode_image(darker, "a", color=False, bits=12).tolist() == [[0], [128]]
    assert decode_image(encoded(GRAY, form), "a", False, bits=12).tolist() == GRAY.tolist()
    with refused("4,096", "12", "bits = 14", by=DataError):  # not cut off
        decode_image(encoded(DEEP + np.uint16(1), form), "a", color=False, bits=12)


@pytest.mark.parametrize("bits", [None, 10, 14])
def test_a_tiff_and_a_dicom_say_their_depth_themselves(bits: int | None) -> None:
    data = packed_tiff([0, 1024, 2048, 4095])
    assert decode_image(data, "a", color=False, bits=bits).tolist() == [[0, 64, 128, 255]]
    assert open_image(data, "a", bits).bits == 12
    data = dicom(DEEP, BitsStored=12, HighBit=11)
    assert open_image(data, "a").bits == 12
    assert decode_image(data, "a", False, bits=bits).tolist() == decode_image(data, "a", False).tolist()


@pytest.mark.parametrize(
    ("highest", "bits"), [(0, 8), (255, 8), (256, 10), (1024, 12), (4095, 12), (4096, 14), (16384, 16)]
)
def test_the_depth_that_a_value_needs(highest: int, bits: int) -> None:
    assert needed_bits(highest) == bits


def test_a_dicom_of_another_modality_is_refused_and_files_that_state_none_by_their_format_are_read() -> None:
    chest = ("CR", "DX")
    for stated in chest:
        assert open_image(dicom(GRAY, Modality=stated), "a", modalities=chest).modality == stated
    for tags in ({"Modality": "CT"}, {"Modality": "dx"}, {"Modality": ""}, {}):
        with refused("'a'", tags.get("Modality", ""), "CR, DX", by=DataError):
            decode_image(dicom(GRAY, **tags), "a", False, modalities=chest)
    assert decode_image(dicom(GRAY, Modality="CT"), "a", False).shape == GRAY.shape
    assert open_image(encoded(GRAY), "a", modalities=chest).modality is None


@pytest.mark.complete
def test_a_dicom_of_jpeg_ls_is_read_and_one_of_another_size_refused() -> None:
    import jpeg_ls

    pixels = (1300 * np.arange(48)).astype(np.uint16).reshape(6, 8)
    frame = encapsulate([bytes(jpeg_ls.encode_array(pixels))])
    read = decode_image(stored(frame, JPEGLSLossless, (6, 8), 16), "a.dcm", color=False)
    assert np.array_equal(read, decode_image(dicom(pixels), "a.dcm", False))
    with refused("'a.dcm'", "(8, 6)", by=DataError):
        decode_image(stored(frame, JPEGLSLossless, (60, 80), 16), "a.dcm", color=False)


# Which side is up

SHAPE = (24, 40)
WHAT = ("colour JPEG", "PNG", "16-bit PNG", "palette PNG", "TIFF", "16-bit TIFF", "XMP", "profile")


def turned_pixels(what: str) -> Image.Image:
    rows, columns = np.indices(SHAPE)
    gray = (rows * 4 + columns * 2).astype(np.uint8)
    if "16-bit" in what:
        return Image.fromarray(gray.astype(np.uint16) * 256)
    if "colour" in what:
        return Image.fromarray(np.stack([gray, gray[::-1], gray[:, ::-1]], -1))
    return Image.fromarray(gray).convert("P") if "palette" in what else Image.fromarray(gray)


def turned(what: str, orientation: int) -> bytes:
    """An image whose orientation is in its EXIF, in its XMP, or in a text as ImageMagick writes it."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = turned_pixels(what)
    if what == "XMP":
        return encoded(image, "JPEG", xmp=f'<x tiff:Orientation="{orientation}"/>'.encode())
    if what == "profile":
        blob = exif.tobytes()
        text = b"Raw profile type exif\0\0" + zlib.compress(f"\nexif\n{len(blob)}\n{blob.hex()}".encode())
        return with_chunk(encoded(image), b"zTXt", text)
    return encoded(image, what.rpartition(" ")[2], exif=exif)


def with_chunk(data: bytes, kind: bytes, content: bytes) -> bytes:
    """A PNG with one more chunk after its header."""
    crc = struct.pack(">I", zlib.crc32(kind + content))
    return data[:33] + struct.pack(">I", len(content)) + kind + content + crc + data[33:]


def bundled(path: Path, color: bool) -> np.ndarray:
    """The image as an exported bundle reads it."""
    read = ReadImage(40, color)(str(path)).numpy()
    return read.transpose(1, 2, 0) if color else read[0]


@pytest.mark.parametrize(("what", "orientation"), [*product(["JPEG"], range(1, 9)), *product(WHAT, (3, 6))])
def test_an_image_is_read_as_pillow_turns_it(what: str, orientation: int, tmp_path: Path) -> None:
    data, color = turned(what, orientation), "colour" in what
    with Image.open(io.BytesIO(data)) as image:
        upright = ImageOps.exif_transpose(image)
        wanted = np.asarray(upright if "16-bit" in what else upright.convert("RGB" if color else "L"))
    if "16-bit" in what:
        wanted = np.rint(wanted / 65535 * 255).astype(np.uint8)
    name = "a.tif" if "TIFF" in what else "a.png"
    assert wanted.shape[:2] == (SHAPE if orientation < 5 else SHAPE[::-1])
    assert np.array_equal(decode_image(data, name, color), wanted)
    facts = inspect(data, name, color)
    assert (facts.height, facts.width) == wanted.shape[:2]
    (tmp_path / name).write_bytes(data)
    with tarfile.open(tmp_path / "t.tar", "w") as tar:
        tar.add(tmp_path / name, name)
    with ImageSource(tmp_path / "t.tar") as source:
        assert np.array_equal(source.read(name, color), wanted)
    assert np.array_equal(bundled(tmp_path / name, color), resize_pad(wanted, 40))


@pytest.mark.parametrize("exif", [b"", b"II*\0", b"XX*\0\x08\0\0\0", b"II*\0\xff\xff\xff\xff", b"\0" * 500])
def test_an_image_with_damaged_exif_is_read_as_it_is_stored(exif: bytes, tmp_path: Path) -> None:
    jpeg = encoded(turned_pixels("JPEG"), "JPEG", exif=b"Exif\0\0" + exif)
    for data in (with_chunk(encoded(turned_pixels("PNG")), b"eXIf", exif), jpeg):
        assert decode_image(data, "a", False).shape == SHAPE
        (tmp_path / "a.png").write_bytes(data)
        assert bundled(tmp_path / "a.png", False).shape == (40, 40)
    for none in (0, 9):
        assert decode_image(turned("JPEG", none), "a", False).shape == SHAPE


# What decoders warn of is one printable line for each image

PREDICTED = """
import sys
from pathlib import Path
from suture.data.decoding import open_image
from suture.data.images import ImageSource, read_all
with ImageSource(Path(sys.argv[1])) as source:
    names = source.paths()
    for row, found in read_all(source, names, open_image):
        print(names[row], type(found).__name__)
"""


@pytest.mark.complete
def test_no_warning_gives_commands_to_a_terminal(tmp_path: Path) -> None:
    """pydicom quotes the modality and the character set that it does not believe."""
    tags = {"RescaleIntercept": 0, "RescaleSlope": 1, "Modality": "QQQQ", "SpecificCharacterSet": "ISO_IR 99"}
    data = dicom(np.arange(64, dtype=np.uint8).reshape(8, 8), **tags)
    data = data.replace(b"ISO_IR 99 ", b"\x1b[31mred\n\r").replace(b"QQQQ", b"\x1b[2J")
    (tmp_path / "a\x1b]0;x\n.dcm").write_bytes(data)
    (tmp_path / "b.png").write_bytes(encoded(Image.new("L", (8, 8)), exif=b"XX*\0\x1b[2J"))
    command = [sys.executable, "-W", "always", "-c", PREDICTED, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = done.stderr.splitlines()
    assert all(line.isprintable() for line in lines), done.stderr
    told = [line.partition(":")[0] for line in lines]
    assert sorted(told) == ["image a\\x1b]0;x\\n.dcm", "image b.png"], done.stderr
    assert "orientation" in done.stderr


def test_the_warnings_of_an_image_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with warned_of("outer"):
        decoding._show("before", UserWarning, "file", 1)
        with warned_of("a\n.png"):
            for i in range(1000):
                decoding._show(f"\x1b[{i}m", UserWarning, "file", i)
    assert caplog.messages == ["image a\\n.png: \\x1b[0m (and 999 more)", "image outer: before"]


def test_a_warning_of_no_image_is_shown_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[object] = []
    monkeypatch.setattr(decoding, "_elsewhere", lambda *place, **_: shown.append(place[0]))
    monkeypatch.setattr(warnings, "showwarning", decoding._show)
    warnings.showwarning("text", UserWarning, "file", 1)
    assert shown == ["text"]


@pytest.mark.parametrize("library", ["PIL.TiffImagePlugin", "pydicom.pixels.decoders"])
def test_a_log_of_a_library_is_printable(library: str) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logging.getLogger().addHandler(handler)
    try:
        logging.getLogger(library).warning("odd %s", "\x1b[2J\nfinished")
    finally:
        logging.getLogger().removeHandler(handler)
    assert stream.getvalue() == "odd \\x1b[2J\\nfinished\n"
