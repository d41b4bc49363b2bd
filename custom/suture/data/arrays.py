"""Decoding images that are stored as arrays: NumPy's .npy and NIfTI, of one slice.

What a header announces is checked before memory is allocated for it.
"""

from __future__ import annotations

import gzip
import io
import math

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from suture.data.limits import check_pixels
from suture.data.scaling import scaled

_NPY = b"\x93NUMPY"
_GZIP = b"\x1f\x8b"

_NIFTI = 348
"""Bytes of a header of NIfTI-1, the last four of which are its magic number."""

_MOST_BEFORE = 2**20
"""Bytes of header and extensions of a NIfTI."""


def is_array(data: bytes, name: str) -> bool:
    """Whether `decode_array` is for a file: by its content, or (compressed) by its name."""
    compressed = name.lower().endswith(".nii.gz") and data.startswith(_GZIP)
    return compressed or data.startswith(_NPY) or data[_NIFTI - 4 : _NIFTI] in (b"n+1\0", b"ni1\0")


def decode_array(data: bytes) -> tuple[Image.Image, int]:
    """Decode an array of one gray slice, or (.npy) of a gray or RGB image; return its bits per value too.

    Values of 8 bits are gray levels. Others have no agreed range: that of the image becomes 0..255. A NIfTI
    is turned by its own orientation as radiologists see it, with the right of the patient on the left.

    Raises:
        Exception: the file is damaged, too large or a volume; decoders raise nearly anything.
    """
    values = _npy(data) if data.startswith(_NPY) else _nifti(data)
    bits = 8 * values.dtype.itemsize
    if values.dtype == np.bool_:
        return Image.fromarray(values.astype(np.uint8) * np.uint8(255)), 8
    if values.dtype == np.uint8:
        return Image.fromarray(np.ascontiguousarray(values)), 8
    if values.ndim != 2:
        raise ValueError(f"it is a colour image of {values.dtype}; save it as uint8")
    low, high = float(values.min()), float(values.max())
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError("it has values that are not finite")
    return Image.fromarray(scaled(values, low, high if high > low else low + 1.0)), bits


def _npy(data: bytes) -> NDArray[np.generic]:
    file = io.BytesIO(data)
    read = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }[np.lib.format.read_magic(file)]
    shape, _, dtype = read(file)
    colour = shape[2:] == (3,)
    _check(shape[:2] if colour else shape, dtype)
    values: NDArray[np.generic] = np.load(io.BytesIO(data), allow_pickle=False)
    return values if colour else _slice(values)


def _nifti(data: bytes) -> NDArray[np.generic]:
    try:
        from nibabel.nifti1 import Nifti1Header
        from nibabel.orientations import apply_orientation, io_orientation
    except ImportError:
        raise ValueError('a NIfTI needs another package: pip install "suture[nifti]"') from None
    file = gzip.GzipFile(fileobj=io.BytesIO(data)) if data.startswith(_GZIP) else io.BytesIO(data)
    start = file.read(_NIFTI)
    if start[-4:] != b"n+1\0":
        raise ValueError("it is not a single-file NIfTI-1; save it as one")
    header = Nifti1Header(start, check=False)
    shape, dtype, offset = header.get_data_shape(), header.get_data_dtype(), int(header["vox_offset"])
    _check(shape, dtype)
    if not _NIFTI <= offset <= _MOST_BEFORE:
        raise ValueError(f"its header says that the image begins at byte {offset:,}")
    size = math.prod(shape) * dtype.itemsize
    content = file.read(offset - _NIFTI + size)[offset - _NIFTI :]
    if len(content) < size:
        raise ValueError(f"it ends after {len(content):,} of {size:,} bytes of the image")
    volume = np.frombuffer(content, dtype).reshape((*shape, 1, 1)[:3], order="F")
    slope, shift = (float(header[key]) for key in ("scl_slope", "scl_inter"))
    if math.isfinite(slope) and slope != 0 and (slope, shift) != (1, 0):
        volume = volume * slope  # the shift changes no gray level
    # To right, anterior and superior; a screen begins at the top, and with the patient's right.
    volume = apply_orientation(volume, io_orientation(header.get_best_affine()))[::-1, ::-1, ::-1]
    return _slice(volume).T


def _slice(values: NDArray[np.generic]) -> NDArray[np.generic]:
    """The one slice of an array: its last axes with a length of one are dropped."""
    while values.ndim > 2:
        values = values.squeeze(axis=max(axis for axis, n in enumerate(values.shape) if n == 1))
    return values


def _check(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> None:
    """Refuse what is not one slice of plain numbers within the limits.

    Raises:
        ValueError: it is not.
    """
    if dtype.kind not in "buif" or dtype.itemsize > 8:
        raise ValueError(f"its values are of type {dtype}; save it as integers or floating-point numbers")
    sides = [n for n in shape if n != 1]
    if len(shape) < 2 or len(sides) > 2:
        size = " x ".join(map(str, shape))
        raise ValueError(f"it is an array of {size}, but an image must be one slice; save the slice to use")
    check_pixels(*([*sides, 1, 1][:2]))
