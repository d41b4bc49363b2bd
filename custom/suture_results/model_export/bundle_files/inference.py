"""Reading images, computing probabilities and deciding, as Suture does; needs no Suture."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from pydicom.pixels.processing import apply_modality_lut, apply_voi_lut
from torch import Tensor, nn

FORMATS = ("PNG", "JPEG", "TIFF", "BMP")
DICOM = (".dcm", ".dicom")
SUFFIXES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp", *DICOM)
_UNREADABLE = (".npy", ".nii", ".nii.gz")
MOST_PIXELS = 40_000_000
_FORMULA = re.compile("(^|[;\t\r\n][ \"]*)('*[=+\\-@\uff1d\uff0b\uff0d\uff20])")
JOINERS = "\u200c\u200d"
_BITS_PER_SAMPLE = 258  # tag of TIFF 6.0, section 8

Gray = NDArray[np.uint8]


class Network(nn.Module):
    """The exported program: whole gray levels 0 to 255, ``[n, channels, size, size]``, to probabilities."""

    def __init__(self, path: str) -> None:
        super().__init__()
        loaded = torch.export.load(path)
        self.shape, self.program = list(loaded.example_inputs[0][0].shape[1:]), loaded.module()

    def train(self, mode: bool = True) -> Network:
        """Refuse training: the program holds the network as it predicts."""
        if mode:
            raise ValueError("this program is for inference only; it cannot be trained")
        return self

    def forward(self, images: Tensor) -> Tensor:
        """Return probabilities ``[n, classes]``."""
        if list(images.shape[1:]) != self.shape:
            wanted = ", ".join(map(str, self.shape))
            raise ValueError(f"the network reads images [n, {wanted}], but got {list(images.shape)}")
        if bool((images < 0).any()) or bool((images > 255).any()):
            raise ValueError("the network reads gray levels from 0 to 255")
        found: Tensor = self.program(images.round().to(torch.uint8))
        return found


class ReadImage:
    """A transform from the path of an image to its gray levels, float32 ``[1 or 3, size, size]``.

    Args:
        size: of the square into which an image is fitted, in pixels.
        color: three channels rather than one.
        bits: the true depth of PNG and TIFF files that are stored with 16 bits.
        modalities: those that a DICOM image may be of; none for any.
    """

    def __init__(self, size: int, color: bool, bits: int = 16, modalities: Sequence[str] = ()) -> None:
        self.size, self.color, self.bits, self.modalities = size, color, bits, modalities

    def __call__(self, path: str) -> Tensor:
        try:
            image = _dicom(path, self.modalities) if _is_dicom(path) else _picture(path, self.bits)
            pixels = _fitted(np.asarray(image.convert("RGB" if self.color else "L")), self.size)
        except Exception as error:  # decoders of damaged files raise nearly anything
            raise ValueError(f"image {path!r} cannot be read: {error}") from error
        tensor = torch.from_numpy(pixels.astype(np.float32))
        return tensor.permute(2, 0, 1) if self.color else tensor[None]


class Decide:
    """A transform from probabilities ``[n, classes]`` to the rows of the table.

    Args:
        labels: the classes, in order.
        path: of the operating points.
        site: whose thresholds decide, ``all`` for those of all sites together; None decides nothing.
    """

    def __init__(self, labels: Sequence[str], path: str, site: str | None) -> None:
        self.labels = labels
        self.points: dict[str, Any] | None = None
        if site is None:
            return
        if not Path(path).is_file():
            raise ValueError("this bundle has no operating points, so it cannot decide; set site to null")
        site = str(site)  # a command line makes a number of "7"
        sites = json.loads(Path(path).read_text(encoding="utf-8"))["sites"]
        if site not in sites:
            raise ValueError(f"no operating points of the site {site!r}; choose one of {', '.join(sites)}")
        self.points = sites[site]

    def __call__(self, probabilities: Tensor) -> list[dict[str, str]]:
        if not bool(torch.isfinite(probabilities).all()):
            raise ValueError("the network's probabilities are not finite; models/model.pt2 is damaged")
        return [self._row(values) for values in probabilities.cpu().numpy()]

    def _row(self, values: NDArray[np.float32]) -> dict[str, str]:
        row: dict[str, str] = {}
        for label, p in zip(self.labels, values, strict=True):
            row[label] = f"{p:.9f}"
            if self.points is not None:
                row |= _decided(label, p, self.points.get(label, {}))
        return row


def find_images(folder: str) -> list[str]:
    """Return the paths of the images in a folder and those below it, sorted."""
    paths = sorted(str(path) for path in Path(folder).rglob("*") if path.is_file())
    for path in paths:
        if path.lower().endswith(_UNREADABLE):
            raise ValueError(
                f"{path}: this bundle does not read arrays; save it as PNG or DICOM, or remove it"
            )
    found = [path for path in paths if path.lower().endswith(SUFFIXES)]
    if not found:
        raise ValueError(f"{folder} contains no image ({', '.join(SUFFIXES)}); set dataset_dir")
    return found


def predict(
    paths: Sequence[str],
    batches: Iterable[Tensor],
    network: nn.Module,
    inferer: Any,
    decide: Decide,
    out: str,
) -> None:
    """Write a CSV with a row for each image."""
    device = next(network.parameters()).device
    network.eval()
    with torch.no_grad():
        rows = [row for batch in batches for row in decide(inferer(batch.to(device), network))]
    with Path(out).open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["image", *map(cell, rows[0])])
        writer.writerows([cell(path), *row.values()] for path, row in zip(paths, rows, strict=True))


def cell(text: str) -> str:
    """Return a text that a spreadsheet does not take for a formula, and a terminal not for a command."""
    shown = "".join(
        c if c.isprintable() or c in JOINERS else c.encode("unicode_escape").decode() for c in text
    )
    return _FORMULA.sub(r"\1'\2", shown)


def _decided(label: str, p: np.float32, point: dict[str, Any]) -> dict[str, str]:
    line, threshold = point.get("calibration"), point.get("threshold")
    better = "" if line is None else f"{_calibrated(float(p), line):.9f}"
    decision = "not validated" if threshold is None else "above" if p >= threshold else "below"
    whose = point.get("of", "")
    return {f"{label} calibrated": better, f"{label} decision": decision, f"{label} threshold": whose}


def _calibrated(p: float, line: dict[str, Any]) -> float:
    tiny = float(np.finfo(np.float64).eps)
    p = min(max(p, tiny), 1 - tiny)
    score = math.log(p / (1 - p))
    return 0.5 * (1 + math.tanh((line["slope"] * score + line["intercept"]) / 2))


def _picture(path: str, bits: int) -> Image.Image:
    # By its bytes: of a path Pillow 13 maps the file into memory, and misreads a TIFF that is to be turned.
    image = Image.open(io.BytesIO(Path(path).read_bytes()), formats=FORMATS)
    _check_size(*image.size)
    _turn(image)
    if image.mode == "F":
        raise ValueError("floating-point pixels have no agreed range; save it with 8 or 16 bits")
    if image.mode.startswith("I"):
        tags = getattr(image, "tag_v2", None) or {}
        stored = min(16, int(np.min(tags.get(_BITS_PER_SAMPLE, 16))))
        depth, values = stored if stored < 16 else bits, np.asarray(image)
        if int(values.min()) < 0 or int(values.max()) >= 2**depth:
            raise ValueError(f"it holds the value {int(values.max())}, beyond {depth} bits; set bits")
        return Image.fromarray(_scaled(values, 0.0, 2.0**depth - 1))
    # A palette may hold transparency, which a direct conversion would not drop.
    return image.convert("RGBA") if image.mode in ("P", "PA") else image


def _turn(image: Image.Image) -> None:
    """Turn an image upright by the orientation in its EXIF or XMP; Pillow turns those of TIFF as it loads."""
    image.load()
    with suppress(Exception):  # without an EXIF that can be read, the pixels are as they are stored
        ImageOps.exif_transpose(image, in_place=True)


def _is_dicom(path: str) -> bool:
    with Path(path).open("rb") as file:
        return file.read(132)[128:] == b"DICM" or path.lower().endswith(DICOM)


def _dicom(path: str, modalities: Sequence[str]) -> Image.Image:
    """Modality LUT (PS3.3 C.11.1), VOI LUT or window (C.11.2), then the range onto 0 to 255."""
    dataset = pydicom.dcmread(path, force=True)
    if modalities and (modality := dataset.get("Modality") or "not stated") not in modalities:
        raise ValueError(f"its modality is {modality}, and the model is for {', '.join(modalities)}")
    kind, samples = str(dataset.PhotometricInterpretation), int(dataset.SamplesPerPixel)
    gray = kind.startswith("MONOCHROME") and samples == 1
    colour = kind.startswith(("RGB", "YBR")) and samples == 3
    if int(dataset.get("NumberOfFrames") or 1) != 1 or not (gray or colour):
        raise ValueError("it is not a single gray or RGB frame")
    _check_size(int(dataset.Columns), int(dataset.Rows))
    pixels = dataset.pixel_array
    if colour:
        return Image.fromarray(_scaled(pixels, 0.0, 2.0 ** int(dataset.BitsStored) - 1))
    slope = dataset.get("RescaleSlope")
    if slope is not None and float(slope) == 0:
        raise ValueError("its RescaleSlope is 0, which makes all pixels equal")
    shown = apply_voi_lut(apply_modality_lut(pixels, dataset), dataset).astype(np.float64, copy=False)
    low, high = float(shown.min()), float(shown.max())
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError("its pixels or its rescaling give values that are not finite")
    if kind == "MONOCHROME1":
        shown = low + high - shown
    return Image.fromarray(_scaled(shown, low, max(high, low + 1.0)))


def _check_size(width: int, height: int) -> None:
    if not 0 < width * height <= MOST_PIXELS:
        raise ValueError(f"it has {width} x {height} pixels; the limit is {MOST_PIXELS:,}")


def _scaled(values: NDArray[Any], low: float, high: float) -> Gray:
    levels = (values.astype(np.float64) - low) * (255.0 / (high - low))
    return np.clip(np.rint(levels), 0, 255).astype(np.uint8)


def _fitted(image: Gray, size: int) -> Gray:
    """Fit an image into a square of zeros, centred, with its aspect ratio."""
    height, width = image.shape[:2]
    if height == width == size:
        return image
    scale = size / max(height, width)
    h, w = max(1, round(height * scale)), max(1, round(width * scale))
    square = np.zeros((size, size, *image.shape[2:]), dtype=np.uint8)
    top, left = (size - h) // 2, (size - w) // 2
    square[top : top + h, left : left + w] = Image.fromarray(image).resize((w, h), Image.Resampling.BILINEAR)
    return square
