"""Images are read upright, as EXIF says, wherever they are read from."""

from __future__ import annotations

import io
import struct
import tarfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps

from suture.data.decoding import decode_image
from suture.data.images import ImageSource
from suture.data.inspection import inspect
from suture_results.model_export.bundle_files.inference import ReadImage

SHAPE = (24, 40)
WHAT = ("JPEG", "colour JPEG", "PNG", "16-bit PNG", "palette PNG", "TIFF", "16-bit TIFF", "XMP", "profile")


def pixels(what: str) -> Image.Image:
    rows, columns = np.indices(SHAPE)
    gray = (rows * 4 + columns * 2).astype(np.uint8)
    if "16-bit" in what:
        return Image.fromarray(gray.astype(np.uint16) * 256)
    if "colour" in what:
        return Image.fromarray(np.stack([gray, gray[::-1], gray[:, ::-1]], -1))
    return Image.fromarray(gray).convert("P") if "palette" in what else Image.fromarray(gray)


def encoded(what: str, orientation: int) -> bytes:
    """An image whose orientation is in its EXIF, in its XMP, or in a text as ImageMagick writes it."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    file, image = io.BytesIO(), pixels(what)
    if what == "XMP":
        image.save(file, "JPEG", xmp=f'<x tiff:Orientation="{orientation}"/>'.encode())
    elif what == "profile":
        image.save(file, "PNG")
        blob = exif.tobytes()
        text = b"Raw profile type exif\0\0" + zlib.compress(f"\nexif\n{len(blob)}\n{blob.hex()}".encode())
        return with_chunk(file.getvalue(), b"zTXt", text)
    else:
        image.save(file, what.rpartition(" ")[2], exif=exif)
    return file.getvalue()


def with_chunk(data: bytes, kind: bytes, content: bytes) -> bytes:
    """A PNG with one more chunk after its header."""
    crc = struct.pack(">I", zlib.crc32(kind + content))
    return data[:33] + struct.pack(">I", len(content)) + kind + content + crc + data[33:]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("what", WHAT)
def test_an_image_is_read_as_pillow_turns_it(what: str, orientation: int, tmp_path: Path) -> None:
    data, color = encoded(what, orientation), "colour" in what
    with Image.open(io.BytesIO(data)) as image:
        turned = ImageOps.exif_transpose(image)
        upright = np.asarray(turned if "16-bit" in what else turned.convert("RGB" if color else "L"))
    wanted = np.rint(upright / 65535 * 255).astype(np.uint8) if "16-bit" in what else upright
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
    assert np.array_equal(bundled(tmp_path / name, color), fitted(wanted))


def bundled(path: Path, color: bool) -> NDArray[np.float32]:
    read = ReadImage(40, color)(str(path)).numpy()
    return read.transpose(1, 2, 0) if color else read[0]


def fitted(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    from suture.data.decoding import resize_pad

    return resize_pad(image, 40)


@pytest.mark.parametrize("orientation", [0, 9, 255])
def test_an_orientation_that_is_none_turns_nothing(orientation: int) -> None:
    assert decode_image(encoded("JPEG", orientation), "a", False).shape == SHAPE


@pytest.mark.parametrize("exif", [b"", b"II*\0", b"XX*\0\x08\0\0\0", b"II*\0\xff\xff\xff\xff", b"\0" * 500])
def test_an_image_with_damaged_exif_is_read_as_it_is_stored(exif: bytes, tmp_path: Path) -> None:
    plain, jpeg = io.BytesIO(), io.BytesIO()
    pixels("PNG").save(plain, "PNG")
    pixels("JPEG").save(jpeg, "JPEG", exif=b"Exif\0\0" + exif)
    for data in (with_chunk(plain.getvalue(), b"eXIf", exif), jpeg.getvalue()):
        assert decode_image(data, "a", False).shape == SHAPE
        (tmp_path / "a.png").write_bytes(data)
        assert bundled(tmp_path / "a.png", False).shape == (40, 40)
