"""Decoding one image: PNG, JPEG, TIFF, BMP or DICOM."""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from suture.core.errors import DataError
from suture.data.dicom import decode_dicom
from suture.data.limits import check_pixels
from suture.data.scaling import scaled

Pixels = NDArray[np.uint8]

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".dcm", ".dicom", ".tif", ".tiff", ".bmp"})
"""Suffixes of the files that count as images in a folder."""

FORMATS = ("PNG", "JPEG", "TIFF", "BMP")
"""What Pillow may take a file for, whatever its suffix: it reads others too, EPS by starting Ghostscript."""

_TILE = (322, 323)
"""Tags of the width and the length of a tile (TIFF 6.0, section 15)."""


def decode_image(data: bytes, name: str, color: bool) -> Pixels:
    """Decode an image to uint8, [h, w] or (color) [h, w, 3].

    16-bit images are scaled from their full range; transparency is ignored. A gray image becomes three equal
    channels, a colour image its luminance (ITU-R 601-2), as `color` requires. DICOM: see `decode_dicom`.

    Args:
        data: the bytes of the file.
        name: for the message.
        color: return three channels rather than one.

    Raises:
        DataError: the bytes cannot be read as an image, or it would need more memory than there is.
    """
    if not data:
        raise DataError(f"image {name!r} is an empty file")
    try:
        image = decode_dicom(data) if _is_dicom(data, name) else _pillow(data)
        return np.asarray(image.convert("RGB" if color else "L"))
    except Exception as error:  # decoders of damaged files raise nearly anything
        raise DataError(f"image {name!r} cannot be read: {str(error) or type(error).__name__}") from error


def resize_pad(image: Pixels, size: int) -> Pixels:
    """Fit an image into a square of zeros, centred, with its aspect ratio: [size, size] or [size, size, 3].

    Source: "resize with padding" of Surgical Aggregation (2024). The
    interpolation is bilinear, antialiased where the image shrinks.
    """
    height, width = image.shape[:2]
    if height == width == size:
        return image
    scale = size / max(height, width)
    h, w = max(1, round(height * scale)), max(1, round(width * scale))
    square = np.zeros((size, size, *image.shape[2:]), dtype=np.uint8)
    top, left = (size - h) // 2, (size - w) // 2
    square[top : top + h, left : left + w] = Image.fromarray(image).resize((w, h), Image.Resampling.BILINEAR)
    return square


def _is_dicom(data: bytes, name: str) -> bool:
    return data[128:132] == b"DICM" or name.lower().endswith((".dcm", ".dicom"))


def _pillow(data: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(data), formats=FORMATS)
    check_pixels(*image.size)
    if tags := getattr(image, "tag_v2", None):
        # A tile is unpacked whole, whatever the size of the image.
        check_pixels(*(int(tags.get(tag, 1)) for tag in _TILE))
    if image.mode.startswith("I"):  # 16 bits; Pillow's own conversion to "L" clips at 255
        return Image.fromarray(scaled(np.asarray(image), 0.0, 65535.0))
    if image.mode == "F":
        raise ValueError("floating-point pixels have no agreed range; save it with 8 or 16 bits")
    # A palette may hold transparency, which a direct conversion would not drop.
    return image.convert("RGBA") if image.mode in ("P", "PA") else image
