"""Decoding one image: PNG, JPEG, TIFF, BMP, a DICOM as a viewer shows it, .npy or NIfTI of one slice.

What a header announces is checked before a decoder allocates memory for it. What decoders warn of is one
printable line for each image, with its name: Pillow and pydicom quote the file in their warnings, so that a
file could give commands to the terminal.
"""

from __future__ import annotations

import gzip
import io
import logging
import math
import struct
import threading
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pydicom
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from pydicom.dataset import Dataset
from pydicom.encaps import get_frame
from pydicom.filereader import read_dataset, read_preamble
from pydicom.pixels.decoders.base import get_decoder
from pydicom.pixels.processing import apply_modality_lut, apply_voi_lut
from pydicom.uid import UID, DeflatedExplicitVRLittleEndian, RLELossless

from suture.core.errors import DataError
from suture.core.escaping import printable
from suture.data.limits import check_pixels, check_scans
from suture.data.scaling import by_value, scale_gray

LOG = logging.getLogger(__name__)


class _Decoded(threading.local):
    """The image that this thread decodes, if any, and what it was warned of."""

    warned: list[str] | None = None


_decoded = _Decoded()


@contextmanager
def warned_of(name: str) -> Iterator[None]:
    """Log the first warning of a block, and how many follow, as one line with the name of the image."""
    outer, _decoded.warned = _decoded.warned, []
    try:
        yield
    finally:
        found, _decoded.warned = _decoded.warned, outer
        if found:
            more = f" (and {len(found) - 1:,} more)" if len(found) > 1 else ""
            LOG.warning("image %s: %s%s", printable(name), printable(found[0]), more)


def _show(message: Any, *place: Any, **keys: Any) -> None:
    if _decoded.warned is None:
        _elsewhere(message, *place, **keys)
    else:
        _decoded.warned.append(str(message))


# Not `warnings.catch_warnings`, which changes the filters of all threads: images are decoded on several.
_elsewhere = warnings.showwarning

warnings.showwarning = _show


class _Cleaner(logging.Handler):
    """Cleans the records of a library before the handlers of its parents write them."""

    def emit(self, record: logging.LogRecord) -> None:
        record.msg, record.args = printable(record.getMessage()), ()


for _library in ("pydicom", "PIL", "nibabel"):
    logging.getLogger(_library).addHandler(_Cleaner())

MOST_OF_SEGMENT = 2**28
"""Bytes that a segment of run-length encoding may unpack to."""

_NEEDED = (
    "PixelData",
    "PhotometricInterpretation",
    "SamplesPerPixel",
    "Rows",
    "Columns",
    "BitsAllocated",
    "BitsStored",
)
"""Of every image with pixels that are whole numbers (PS3.3 C.7.6.3)."""

_LONGEST_RUN = 64
"""Bytes that one encoded byte can unpack to at most: 128 for the two of a run (PS3.5 G.3)."""


def decode_dicom(data: bytes) -> tuple[Image.Image, int, str]:
    """Decode a single gray or RGB frame; return it with 8 bits a channel, its BitsStored, and its Modality.

    The Modality (PS3.3 C.7.3.1.1.1) is empty where the file states none.

    Modality LUT or rescale slope and intercept (PS3.3 C.11.1), then the first VOI LUT or window (C.11.2),
    then the range of the result onto 0..255, inverted for MONOCHROME1. Colours are
    scaled by BitsStored.

    Raises:
        Exception: the file is damaged, too large or holds no such frame; decoders raise nearly anything.
    """
    file = io.BytesIO(data)
    _check_syntax(file)
    dataset = pydicom.dcmread(file, force=True)
    _check_frame(dataset)
    pixels, bits = dataset.pixel_array, int(dataset.BitsStored)
    modality = str(dataset.get("Modality") or "")
    if pixels.ndim == 3:
        return Image.fromarray(scale_gray(pixels, 0.0, 2.0**bits - 1)), bits, modality
    _check_rescaling(dataset)
    return Image.fromarray(by_value(pixels, lambda values: _apply_window(values, dataset))), bits, modality


IDENTIFIERS = ("AccessionNumber", "SOPInstanceUID", "SeriesInstanceUID", "StudyInstanceUID", "PatientID")
"""Attributes by which a table may name an image, its study or its patient; the patient last."""


def identifiers(data: bytes) -> dict[str, str]:
    """Return the `IDENTIFIERS` that a DICOM file states; none of a file that cannot be read."""
    file = io.BytesIO(data)
    try:
        _check_syntax(file)
        dataset = pydicom.dcmread(file, stop_before_pixels=True, specific_tags=list(IDENTIFIERS))
        return {name: str(dataset[name].value).strip() for name in IDENTIFIERS if name in dataset}
    except Exception:  # noqa: BLE001 - pydicom raises nearly anything
        return {}


def _apply_window(values: NDArray[np.generic], dataset: Dataset) -> NDArray[np.uint8]:
    """Return stored values as the gray levels of a screen."""
    shown = apply_voi_lut(apply_modality_lut(values, dataset), dataset).astype(np.float64, copy=False)
    low, high = float(shown.min()), float(shown.max())
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError("its pixels or its rescaling give values that are not finite")
    if dataset.PhotometricInterpretation == "MONOCHROME1":
        shown = low + high - shown
    return scale_gray(shown, low, max(high, low + 1.0))


def _check_syntax(file: io.BytesIO) -> None:
    """Refuse a file that is compressed as a whole: pydicom would inflate it without a limit."""
    read_preamble(file, force=True)
    meta = read_dataset(file, False, True, stop_when=lambda tag, *_: tag.group > 2)
    file.seek(0)
    if meta.get("TransferSyntaxUID") == DeflatedExplicitVRLittleEndian:
        raise ValueError("the whole file is deflated, so its size is unknown; save it without compression")


def _check_frame(dataset: Dataset) -> None:
    """Refuse what is not one gray or RGB frame within the limits, by the headers alone."""
    if missing := next((name for name in _NEEDED if name not in dataset), None):
        raise ValueError(f"it is not a DICOM image: {missing} is missing")
    photometric, samples = str(dataset.PhotometricInterpretation), int(dataset.SamplesPerPixel)
    frames = int(dataset.get("NumberOfFrames") or 1)
    gray = photometric.startswith("MONOCHROME") and samples == 1
    colour = photometric.startswith(("RGB", "YBR")) and samples == 3
    if frames != 1 or not (gray or colour):
        raise ValueError(
            f"{photometric} with {frames} frames of {samples} samples is not a single gray or RGB frame"
        )
    if int(dataset.BitsAllocated) > 32:
        raise ValueError(f"it has {dataset.BitsAllocated} bits per sample; save it with 32 or fewer")
    check_pixels(int(dataset.Columns), int(dataset.Rows))
    syntax = dataset.file_meta.get("TransferSyntaxUID") if hasattr(dataset, "file_meta") else None
    if syntax is not None and syntax.is_encapsulated:
        # One frame needs no table of offsets, which could lead the decoder to other bytes than these.
        for name in ("ExtendedOffsetTable", "ExtendedOffsetTableLengths"):
            if name in dataset:
                delattr(dataset, name)
        _check_decoder(syntax)
        frame = get_frame(dataset.PixelData, 0, number_of_frames=1)
        if syntax == RLELossless:
            _check_runs(frame)
        else:
            _check_codestream(frame, (int(dataset.Columns), int(dataset.Rows)))


def _check_decoder(syntax: UID) -> None:
    """Refuse a compression that no installed package reads; names one that does."""
    try:
        decoder = get_decoder(syntax)
    except NotImplementedError:
        raise ValueError(
            f"its compression, {syntax.name}, is not read; save it without compression"
        ) from None
    if not decoder.is_available:
        needed = decoder.missing_dependencies[-1].partition(" requires ")[2]
        packages = " ".join(f'"{package}"' for package in needed.split(" and "))
        raise ValueError(f"its compression, {syntax.name}, needs a package: pip install {packages}")


def _check_codestream(frame: bytes, size: tuple[int, int]) -> None:
    """Refuse a JPEG of too many scans, and one, a JPEG-LS or a JPEG 2000 of another size than the header."""
    check_scans(frame)
    found = _jpeg_ls_size(frame)
    if found is None:
        with Image.open(io.BytesIO(frame), formats=("JPEG", "JPEG2000")) as image:
            found = image.size
    if found != size:
        raise ValueError(f"its compressed frame is of {found} pixels, and its header says {size}")


def _jpeg_ls_size(frame: bytes) -> tuple[int, int] | None:
    """Width and height in the frame header of a JPEG-LS (ITU-T T.87, C.2.2); None of another format."""
    at = 2 if frame.startswith(b"\xff\xd8") else len(frame)
    while frame[at : at + 1] == b"\xff" and at + 9 <= len(frame) and frame[at + 1] != 0xDA:  # start of scan
        length, _, height, width = struct.unpack(">HBHH", frame[at + 2 : at + 9])
        if frame[at + 1] == 0xF7:
            return width, height
        at += 2 + length
    return None


def _check_runs(frame: bytes) -> None:
    """Refuse a run-length encoded frame of which a segment unpacks to more than `MOST_OF_SEGMENT` bytes.

    A segment that is short enough cannot; only a longer one is walked through, run by run.
    """
    number, *offsets = struct.unpack("<16L", frame[:64])
    ends = [*offsets[1:number], len(frame)]
    for start, end in zip(offsets[:number], ends, strict=False):
        if (end - start) * _LONGEST_RUN > MOST_OF_SEGMENT and _unpacked_size(
            frame[start:end]
        ) > MOST_OF_SEGMENT:
            raise ValueError(f"a segment of it unpacks to more than {MOST_OF_SEGMENT:,} bytes")


def _unpacked_size(segment: bytes) -> int:
    """Return the number of bytes that a run-length encoded segment unpacks to (PS3.5 G.3.2)."""
    total = position = 0
    while position < len(segment):
        header = segment[position]
        total += 257 - header if header > 128 else (header + 1) * (header < 128)
        position += 2 if header > 128 else 1 + (header + 1) * (header < 128)
    return total


def _check_rescaling(dataset: Dataset) -> None:
    """Refuse a slope, intercept or window that leaves nothing of the image to see."""
    for name in ("RescaleSlope", "RescaleIntercept", "WindowCenter", "WindowWidth"):
        value = dataset.get(name)
        first = value[0] if isinstance(value, (list, pydicom.multival.MultiValue)) and value else value
        if first is not None and first != "" and not math.isfinite(float(first)):
            raise ValueError(f"its {name} is {first}, which is not finite")
    if dataset.get("RescaleSlope") is not None and float(dataset.RescaleSlope) == 0:
        raise ValueError("its RescaleSlope is 0, which makes all pixels equal")


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
        return Image.fromarray(values.astype(np.uint8) * np.uint8(255)), bits
    if values.dtype == np.uint8:
        return Image.fromarray(np.ascontiguousarray(values)), bits
    if values.ndim != 2:
        raise ValueError(f"it is a colour image of {values.dtype}; save it as uint8")
    low, high = float(values.min()), float(values.max())
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError("it has values that are not finite")
    return Image.fromarray(scale_gray(values, low, high if high > low else low + 1.0)), bits


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


Pixels = NDArray[np.uint8]

SUFFIXES = (
    *(".png", ".jpg", ".jpeg", ".dcm", ".dicom", ".tif", ".tiff", ".bmp"),
    *(".npy", ".nii", ".nii.gz"),
)
"""Suffixes of the files that count as images in a folder."""

_FORMATS = ("PNG", "JPEG", "TIFF", "BMP")
"""What Pillow may take a file for, whatever its suffix: it reads others too, EPS by starting Ghostscript."""

_TILE = (322, 323)
"""Tags of the width and the length of a tile (TIFF 6.0, section 15)."""

_BITS_PER_SAMPLE = 258
"""Tag of the depth (TIFF 6.0, section 8). MaxSampleValue is not for display, and differs by image."""


@dataclass(frozen=True)
class Opened:
    """An image with 8 bits a channel, and what its file stores.

    Attributes:
        image: as a model sees it, upright by its EXIF, before it becomes gray or RGB.
        bits: of a stored value, as the file says.
        highest: the largest stored value of an image that is scaled by its depth; None of any other.
        modality: of a DICOM image, empty where it states none; None of any other.
    """

    image: Image.Image
    bits: int
    highest: int | None = None
    modality: str | None = None

    def pixels(self, color: bool) -> Pixels:
        """The image as uint8, [h, w] or (color) [h, w, 3]."""
        return np.asarray(self.image.convert("RGB" if color else "L"))


def decode_image(
    data: bytes, name: str, color: bool, bits: int | None = None, modalities: Collection[str] = ()
) -> Pixels:
    """Decode an image to uint8, [h, w] or (color) [h, w, 3].

    Gray images of more than 8 bits are scaled from the full range of their depth; transparency is ignored. A
    gray image becomes three equal channels, a colour image its luminance (ITU-R 601-2), as `color` requires.
    DICOM: see `decode_dicom`, NumPy and NIfTI: `decode_array`.

    Args:
        data: the bytes of the file.
        name: for the message.
        color: return three channels rather than one.
        bits: the true depth of images that are stored with 16 bits; None for all 16. It must be the same for
            all images of a site, since it decides how bright they are. A TIFF whose tags say fewer bits has
            those.
        modalities: those that a DICOM image may be of; none for any.

    Raises:
        DataError: the bytes cannot be read as an image, it would need more memory than there is, a value has
            more bits than the depth, or a DICOM image is of another modality.
    """
    opened = open_image(data, name, bits, modalities)
    with readable(name):
        return opened.pixels(color)


def open_image(data: bytes, name: str, bits: int | None = None, modalities: Collection[str] = ()) -> Opened:
    """Open an image, and say what its file stores; arguments and errors as in `decode_image`."""
    if not data:
        raise DataError(f"image {name!r} is an empty file")
    with readable(name):
        if is_array(data, name):
            opened = Opened(*decode_array(data))
        elif _is_dicom(data, name):
            image, stored, modality = decode_dicom(data)
            opened = Opened(image, stored, modality=modality)
        else:
            opened = _pillow(data, bits)
        opened.image.load()
    if other_modality(opened.modality, modalities):
        stated = f"is of the modality {opened.modality!r}" if opened.modality else "states no modality"
        raise DataError(f"image {name!r} {stated} (0008,0060), and the model is for {', '.join(modalities)}")
    return opened


def other_modality(modality: str | None, modalities: Collection[str]) -> bool:
    """Whether an image is a DICOM of a modality, or of none, that a model is not for."""
    return bool(modalities) and modality is not None and modality not in modalities


@contextmanager
def readable(name: str) -> Iterator[None]:
    """Raise any error within as the `DataError` of the image of that name, and log warnings as its own."""
    try:
        with warned_of(name):
            yield
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
    rows, columns = inside_square(height, width, size)
    h, w = rows.stop - rows.start, columns.stop - columns.start
    square = np.zeros((size, size, *image.shape[2:]), dtype=np.uint8)
    square[rows, columns] = Image.fromarray(image).resize((w, h), Image.Resampling.BILINEAR)
    return square


def inside_square(height: int, width: int, size: int) -> tuple[slice, slice]:
    """Return the rows and columns where an image lies in the square that `resize_pad` fits it into."""
    scale = size / max(height, width)
    h, w = max(1, round(height * scale)), max(1, round(width * scale))
    top, left = (size - h) // 2, (size - w) // 2
    return slice(top, top + h), slice(left, left + w)


def _is_dicom(data: bytes, name: str) -> bool:
    return data[128:132] == b"DICM" or name.lower().endswith((".dcm", ".dicom"))


def _pillow(data: bytes, bits: int | None) -> Opened:
    try:
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
    except UnidentifiedImageError:  # its text is the address of the object in memory
        raise ValueError("it is not a PNG, JPEG, TIFF, BMP or DICOM; save it as one of them") from None
    check_pixels(*image.size)
    if image.format == "BMP" and image.info.get("compression"):  # which Pillow unpacks in a loop of Python
        raise ValueError("it is a compressed BMP; save it as PNG")
    tags = getattr(image, "tag_v2", None) or {}
    # A tile is unpacked whole, whatever the size of the image.
    check_pixels(*(int(tags.get(tag, 1)) for tag in _TILE))
    check_scans(data)
    _turn(image)
    if image.mode.startswith("I"):  # Pillow's own conversion to "L" clips at 255
        return _scale(np.asarray(image), min(16, int(np.min(tags.get(_BITS_PER_SAMPLE, 16)))), bits)
    if image.mode == "F":
        raise ValueError("floating-point pixels have no agreed range; save it with 8 or 16 bits")
    # A palette may hold transparency, which a direct conversion would not drop.
    return Opened(image.convert("RGBA") if image.mode in ("P", "PA") else image, 8)


def _turn(image: Image.Image) -> None:
    """Turn an image upright by the orientation in its EXIF or XMP; Pillow turns those of TIFF as it loads."""
    image.load()
    try:
        ImageOps.exif_transpose(image, in_place=True)
    except Exception as error:  # noqa: BLE001 - the pixels are as good as without
        warnings.warn(f"its EXIF is damaged; any orientation in it is ignored ({error})", stacklevel=2)


def _scale(values: NDArray[np.integer[Any]], stored: int, bits: int | None) -> Opened:
    """Scale gray values from the range of their depth; one that lies outside of it would be cut off."""
    depth = stored if stored < 16 else bits or 16
    lowest, highest = int(values.min()), int(values.max())
    if lowest < 0 or highest >= 2**16:
        raise ValueError(f"it holds the value {lowest if lowest < 0 else highest:,}; save it with 16 bits")
    if highest >= 2**depth:
        raise ValueError(
            f"it holds the value {highest:,}, which has more than {depth} bits; set [data] bits = "
            f"{needed_bits(highest)}, or remove the key"
        )
    return Opened(Image.fromarray(scale_gray(values, 0.0, 2.0**depth - 1)), stored, highest)


def needed_bits(highest: int) -> int:
    """Return the smallest usual depth whose range has a value; detectors have 10, 12, 14 or 16 bits."""
    return next((bits for bits in (8, 10, 12, 14) if highest < 2**bits), 16)
