"""DICOM files as bytes."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import UID, ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid


def dicom(pixels: np.ndarray, **tags: Any) -> bytes:
    """Return a file of one frame, gray [h, w] unless the tags say otherwise."""
    bits = pixels.dtype.itemsize * 8
    return stored(pixels.tobytes(), ExplicitVRLittleEndian, pixels.shape[:2], bits, **tags)


def stored(content: bytes, syntax: UID, shape: tuple[int, int] = (8, 8), bits: int = 8, **tags: Any) -> bytes:
    """Return a file whose frame is these bytes, in any transfer syntax."""
    meta = FileMetaDataset()
    meta.TransferSyntaxUID = syntax
    meta.MediaStorageSOPClassUID = SecondaryCaptureImageStorage
    meta.MediaStorageSOPInstanceUID = generate_uid()
    dataset = FileDataset("", {}, file_meta=meta, preamble=b"\0" * 128)
    defaults = {
        "SamplesPerPixel": 1,
        "PhotometricInterpretation": "MONOCHROME2",
        "PixelRepresentation": 0,
        "BitsAllocated": bits,
        "BitsStored": bits,
        "HighBit": bits - 1,
        "Rows": shape[0],
        "Columns": shape[1],
    }
    for name, value in (defaults | tags).items():
        setattr(dataset, name, value)
    dataset.PixelData = content
    if syntax != ExplicitVRLittleEndian:
        dataset["PixelData"].VR = "OB"
    file = io.BytesIO()
    dataset.save_as(file, enforce_file_format=True)
    return file.getvalue()
