"""Decoding one DICOM image as a viewer shows it by default.

What a header announces is checked before a decoder allocates memory for it.
"""

from __future__ import annotations

import io
import math
import struct

import numpy as np
import pydicom
from numpy.typing import NDArray
from PIL import Image
from pydicom.dataset import Dataset
from pydicom.encaps import get_frame
from pydicom.filereader import read_dataset, read_preamble
from pydicom.pixels.decoders.base import get_decoder
from pydicom.pixels.processing import apply_modality_lut, apply_voi_lut
from pydicom.uid import UID, DeflatedExplicitVRLittleEndian, RLELossless

from suture.data.limits import check_pixels, check_scans
from suture.data.scaling import by_value, scaled

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
        return Image.fromarray(scaled(pixels, 0.0, 2.0**bits - 1)), bits, modality
    _check_rescaling(dataset)
    return Image.fromarray(by_value(pixels, lambda values: _shown(values, dataset))), bits, modality


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


def _shown(values: NDArray[np.generic], dataset: Dataset) -> NDArray[np.uint8]:
    """Return stored values as the gray levels of a screen."""
    shown = apply_voi_lut(apply_modality_lut(values, dataset), dataset).astype(np.float64, copy=False)
    low, high = float(shown.min()), float(shown.max())
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError("its pixels or its rescaling give values that are not finite")
    if dataset.PhotometricInterpretation == "MONOCHROME1":
        shown = low + high - shown
    return scaled(shown, low, max(high, low + 1.0))


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
        if (end - start) * _LONGEST_RUN > MOST_OF_SEGMENT and _unpacked(frame[start:end]) > MOST_OF_SEGMENT:
            raise ValueError(f"a segment of it unpacks to more than {MOST_OF_SEGMENT:,} bytes")


def _unpacked(segment: bytes) -> int:
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
