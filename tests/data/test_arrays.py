"""suture.data.decoding: images as .npy and NIfTI."""

from __future__ import annotations

import gzip
import io
import sys
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from suture.core.errors import DataError
from suture.data.decoding import decode_image, is_array
from suture.data.images import ImageSource

GRAY = np.arange(12, dtype=np.uint8).reshape(3, 4)


def npy(values: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


def nifti(values: np.ndarray, affine: np.ndarray | None = None) -> bytes:
    return bytes(nib.Nifti1Image(values, np.eye(4) if affine is None else affine).to_bytes())


def seen(data: bytes, name: str = "a.npy", color: bool = False) -> list[object]:
    return list(decode_image(data, name, color).tolist())


def test_an_npy_is_read_as_its_values(tmp_path: Path) -> None:
    assert seen(npy(GRAY)) == GRAY.tolist()
    assert seen(npy(GRAY[None, :, :, None])) == GRAY.tolist()
    assert seen(npy(np.asfortranarray(GRAY))) == GRAY.tolist()
    assert seen(npy(GRAY > 5)) == ((GRAY > 5) * 255).tolist()
    rgb = np.stack([GRAY, GRAY + 1, GRAY + 2], -1)
    assert seen(npy(rgb), color=True) == rgb.tolist()


@pytest.mark.parametrize("dtype", ["uint16", "int16", "int32", "float32", "float64", ">i2"])
def test_other_values_span_the_range_of_the_image(dtype: str) -> None:
    values = np.array([[100, 300], [200, 4095]]).astype(dtype)
    assert seen(npy(values)) == [[0, 13], [6, 255]]
    assert seen(npy(np.full((2, 2), 7).astype(dtype))) == [[0, 0], [0, 0]]


def test_a_nifti_is_shown_as_radiologists_do() -> None:
    # To the patient's left and to posterior, as the columns and rows of a DICOM go.
    dicom = nifti(GRAY.T[:, :, None], np.diag([-1.0, -1.0, 1.0, 1.0]))
    assert seen(dicom, "a.nii") == GRAY.tolist()
    assert seen(gzip.compress(dicom, mtime=0), "a.nii.gz") == GRAY.tolist()
    # To the right and to anterior: the same image, stored the other way round.
    assert seen(nifti(GRAY.T[::-1, ::-1, None]), "a.nii") == GRAY.tolist()
    # A coronal slice, of which the last axis goes up.
    assert seen(nifti(GRAY.T[::-1, None, ::-1]), "a.nii") == GRAY.tolist()
    assert seen(nifti(GRAY.T[::-1, ::-1]), "a.nii") == GRAY.tolist()


def test_a_negative_slope_of_a_nifti_inverts_it() -> None:
    image = nib.Nifti1Image(np.array([[0, 100], [50, 200]], np.int16), np.diag([-1.0, -1.0, 1.0, 1.0]))
    image.header.set_slope_inter(-2.0, 5.0)
    data = bytearray(image.to_bytes())
    data[112:120] = np.array([-2.0, 5.0], "<f4").tobytes()
    data[352:360] = np.array([0, 50, 100, 200], "<i2").tobytes()
    assert seen(bytes(data), "a.nii") == [[255, 191], [127, 0]]


@pytest.mark.parametrize(
    ("data", "name", "said"),
    [
        (npy(np.zeros((5, 6, 7))), "a.npy", "an array of 5 x 6 x 7, but an image must be one slice"),
        (nifti(np.zeros((5, 6, 7), np.int16)), "a.nii", "it is an array of 5 x 6 x 7"),
        (npy(np.array([[1.0, np.nan]])), "a.npy", "not finite"),
        (npy(np.zeros(7)), "a.npy", "an array of 7, but an image must be one slice"),
        (npy(np.array([["a"]])), "a.npy", "<U1"),
        (npy(np.array([[{}]], object)), "a.npy", "object"),
        (npy(np.zeros((2, 2, 3))), "a.npy", "colour image of float64; save it as uint8"),
        (npy(np.zeros((0, 4))), "a.npy", "its header says 0 x 4 pixels"),
        (npy(GRAY)[:-1], "a.npy", "cannot be read"),
        (nifti(GRAY)[:-1], "a.nii", "it ends after 11 of 12 bytes"),
        (npy(GRAY)[:9], "a.npy", "cannot be read"),
        (gzip.compress(b"nothing", mtime=0), "a.nii.gz", "NIfTI-1"),
    ],
)
def test_what_is_no_slice_is_refused(data: bytes, name: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        decode_image(data, name, color=False)


def test_headers_of_terabytes_are_refused_before_memory_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    header = {"descr": "<f8", "fortran_order": False, "shape": (10**6, 10**6)}
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, header)
    monkeypatch.setattr(np, "load", None)
    with pytest.raises(DataError, match="its header says 1000000 x 1000000 pixels"):
        decode_image(file.getvalue(), "a.npy", color=False)
    large = bytearray(nifti(GRAY))
    large[40:56] = np.array([2, 32767, 32767, 1, 1, 1, 1, 1], "<i2").tobytes()
    with pytest.raises(DataError, match="its header says 32767 x 32767 pixels"):
        decode_image(gzip.compress(bytes(large)), "a.nii.gz", color=False)
    far = bytearray(nifti(GRAY))
    far[108:112] = np.array([2.0**30], "<f4").tobytes()
    with pytest.raises(DataError, match="begins at byte 1,073,741,824"):
        decode_image(bytes(far), "a.nii", color=False)


def test_a_gzipped_nifti_is_not_unpacked_beyond_its_image() -> None:
    bomb = gzip.compress(nifti(GRAY)) + gzip.compress(bytes(2**20)) * 100
    assert decode_image(bomb, "a.nii.gz", color=False).shape == (4, 3)


def test_the_package_of_nifti_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nibabel.nifti1", None)
    with pytest.raises(DataError, match=r'needs another package: pip install "suture\[nifti\]"'):
        decode_image(nifti(GRAY), "a.nii", color=False)


def test_arrays_are_found_in_a_folder_by_path_and_stem(tmp_path: Path) -> None:
    (tmp_path / "a.nii.gz").write_bytes(gzip.compress(nifti(GRAY)))
    (tmp_path / "b.npy").write_bytes(npy(GRAY))
    (tmp_path / "notes.gz").write_bytes(b"")
    with ImageSource(tmp_path) as source:
        assert source.paths() == ["a.nii.gz", "b.npy"]
        assert source.stems() == {"a": "a.nii.gz", "b": "b.npy"}
        assert source.read("a.nii.gz", False).shape == (4, 3)
    assert not is_array(gzip.compress(b"", mtime=0), "a.csv.gz")
