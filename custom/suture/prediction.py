"""Predictions of a saved model for images on disk."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import torch

from suture.data.decoding import images_to_predict, read_image, resize_pad
from suture.errors import DataError
from suture.files import atomic_write
from suture.losses import probabilities
from suture.models.saved import load_model

_BATCH = 64


@torch.no_grad()
def predict_to_csv(model_folder: Path, images: Path, out: Path, device: str = "cpu") -> tuple[int, list[str]]:
    """Writes ``image`` and one column of probabilities per class.

    Args:
        model_folder: model/ of a run.
        images: an image, a folder of images, or a CSV with an ``image`` column.

    Returns:
        how many images were predicted, and the names of those that could not be read.

    Raises:
        ConfigError: there is no model.
        DataError: there are no images, or none can be read.
    """
    model, prepare = load_model(model_folder)
    model.to(device)
    task = model.labels.task
    paths = images_to_predict(images)
    done: list[str] = []
    skipped: list[str] = []
    rows: list[list[float]] = []
    pending: list[torch.Tensor] = []
    for path in paths:
        try:
            pixels = torch.tensor(resize_pad(read_image(path, prepare.color), prepare.size))
        except DataError:
            skipped.append(str(path))
            continue
        pending.append(pixels.permute(2, 0, 1) if prepare.color else pixels[None])
        done.append(str(path))
        if len(pending) == _BATCH:
            rows += probabilities(model({"image": prepare(torch.stack(pending)).to(device)}), task).tolist()
            pending.clear()
    if pending:
        rows += probabilities(model({"image": prepare(torch.stack(pending)).to(device)}), task).tolist()
    if not done:
        raise DataError(f"none of the {len(paths)} images of {images} can be read; the first is {paths[0]}")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["image", *model.labels.names])
    writer.writerows([name, *(f"{p:.6f}" for p in row)] for name, row in zip(done, rows, strict=True))
    out.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(out, text.getvalue().encode())
    return len(done), skipped
