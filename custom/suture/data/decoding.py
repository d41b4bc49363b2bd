"""Decoding one image: DICOM, and PNG, JPEG and the other formats that Pillow reads."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pydicom
from numpy.typing import NDArray
from PIL import Image
from pydicom.pixels.processing import apply_modality_lut, apply_voi_lut

from suture.core.errors import DataError
from suture.data.reading import read_sheet

Pixels = NDArray[np.uint8]

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".dcm", ".dicom", ".tif", ".tiff", ".bmp"})
"""Suffixes of the files that count as images in a folder."""


def decode_image(data: bytes, name: str, color: bool) -> Pixels:
    """Decode an image to uint8, [h, w] or (color) [h, w, 3].

    16-bit images are scaled from their full range; transparency is ignored. A gray image becomes three equal
    channels, a colour image its luminance (ITU-R 601-2), as `color` requires. DICOM: see `_dicom`.

    Args:
        data: the bytes of the file.
        name: for the message.
        color: return three channels rather than one.

    Raises:
        DataError: the bytes cannot be read as an image.
    """
    if not data:
        raise DataError(f"image {name!r} is an empty file")
    try:
        image = _dicom(data) if _is_dicom(data, name) else _pillow(data)
        return np.asarray(image.convert("RGB" if color else "L"))
    except MemoryError:
        raise
    except Exception as error:  # decoders of damaged files raise nearly anything
        raise DataError(f"image {name!r} cannot be read: {error}") from error


def read_image(path: Path, color: bool) -> Pixels:
    """Read the image of a file; see `decode_image`."""
    try:
        return decode_image(path.read_bytes(), str(path), color)
    except OSError as error:
        raise DataError(f"image {path} cannot be read: {error.strerror}") from error


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


def images_to_predict(path: Path, column: str = "image") -> list[Path]:
    """Return the images of a path: all of a folder, those that a CSV's column names, or the file itself.

    Names in a CSV are relative to its folder.

    Raises:
        DataError: there is no such path, no image in it, or no such column.
    """
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES)
        if not found:
            raise DataError(f"{path} holds no image ({', '.join(sorted(SUFFIXES))})")
        return found
    if not path.is_file():
        raise DataError(f"{path} does not exist; give an image, a folder of images or a CSV")
    if path.suffix.lower() != ".csv":
        return [path]
    sheet = read_sheet(path)
    return [path.parent / name for name in sheet.column(column, "--column")]


def _is_dicom(data: bytes, name: str) -> bool:
    return data[128:132] == b"DICM" or name.lower().endswith((".dcm", ".dicom"))


def _pillow(data: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(data))
    if image.mode.startswith("I"):  # 16 bits; Pillow's own conversion to "L" clips at 255
        return _scaled(np.asarray(image), 0.0, 65535.0)
    if image.mode == "F":
        raise ValueError("floating-point pixels have no agreed range; save it with 8 or 16 bits")
    # A palette may hold transparency, which a direct conversion would not drop.
    return image.convert("RGBA") if image.mode in ("P", "PA") else image


def _dicom(data: bytes) -> Image.Image:
    """Decode a single frame as a viewer shows it by default.

    Modality LUT or rescale slope and intercept (PS3.3 C.11.1), then the first VOI LUT or window (C.11.2),
    then the range of the result onto 0..255, inverted for MONOCHROME1.
    """
    dataset = pydicom.dcmread(io.BytesIO(data), force=True)
    photometric = str(dataset.PhotometricInterpretation)
    pixels = dataset.pixel_array
    if photometric.startswith(("RGB", "YBR")) and pixels.ndim == 3:
        return _scaled(pixels, 0.0, 2.0 ** int(dataset.BitsStored) - 1)
    if not photometric.startswith("MONOCHROME") or pixels.ndim != 2:
        raise ValueError(f"{photometric} of shape {pixels.shape} is not a single gray or RGB frame")
    shown = apply_voi_lut(apply_modality_lut(pixels, dataset), dataset).astype(np.float64)
    low, high = float(shown.min()), float(shown.max())
    if photometric == "MONOCHROME1":
        shown = low + high - shown
    return _scaled(shown, low, max(high, low + 1.0))


def _scaled(values: NDArray[np.generic], low: float, high: float) -> Image.Image:
    scaled = (values.astype(np.float64) - low) * (255.0 / (high - low))
    return Image.fromarray(np.clip(np.rint(scaled), 0, 255).astype(np.uint8))
