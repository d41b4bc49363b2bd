"""DICOM files as bytes."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid


def dicom(pixels: np.ndarray, **tags: Any) -> bytes:
    """Return a file of one frame, gray [h, w] unless the tags say otherwise."""
    meta = FileMetaDataset()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    meta.MediaStorageSOPClassUID = SecondaryCaptureImageStorage
    meta.MediaStorageSOPInstanceUID = generate_uid()
    dataset = FileDataset("", {}, file_meta=meta, preamble=b"\0" * 128)
    bits = pixels.dtype.itemsize * 8
    defaults = {
        "SamplesPerPixel": 1,
        "PhotometricInterpretation": "MONOCHROME2",
        "PixelRepresentation": 0,
        "BitsAllocated": bits,
        "BitsStored": bits,
        "HighBit": bits - 1,
        "Rows": pixels.shape[0],
        "Columns": pixels.shape[1],
    }
    for name, value in (defaults | tags).items():
        setattr(dataset, name, value)
    dataset.PixelData = pixels.tobytes()
    file = io.BytesIO()
    dataset.save_as(file, enforce_file_format=True)
    return file.getvalue()
