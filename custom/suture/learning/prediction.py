"""Predicting images or documents on disk with a saved model."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from suture.core.errors import DataError
from suture.core.files import atomic_write
from suture.data.decoding import images_to_predict, read_image, resize_pad
from suture.data.reading import read_sheet
from suture.learning.losses import probabilities
from suture.models import MODELS, ModelSpec, vocabulary_of
from suture.models.classifier import Preprocessing
from suture.models.saved import load_model, load_spec

_BATCH = 64

Inputs = dict[str, Tensor]


@torch.no_grad()
def predict_to_csv(model_folder: Path, source: Path, out: Path, device: str = "cpu") -> tuple[int, list[str]]:
    """Write a CSV with the column ``image`` or ``document``, and a column of probabilities for each class.

    Args:
        model_folder: model/ of a run.
        source: an image, a folder of images, or a CSV with an ``image`` column; for a model that reads text a
            .txt file, a folder of them, or a CSV with a ``text`` column (and names under ``document``).

    Returns:
        the number of predictions, and the names of images that cannot be read.

    Raises:
        ConfigError: there is no model.
        DataError: there is no image or document, or none can be read.
    """
    model, prepare = load_model(model_folder)
    model.to(device)
    spec, label_type = load_spec(model_folder), model.labels.label_type
    text = MODELS[spec.name].reads == "text"
    done: list[str] = []
    skipped: list[str] = []
    rows: list[list[float]] = []
    for names, inputs in _documents(source, spec) if text else _images(source, prepare, skipped):
        done += names
        on_device = {key: tensor.to(device) for key, tensor in inputs.items()}
        rows += probabilities(model(on_device), label_type).tolist()
    if not done:
        raise DataError(f"none of the {len(skipped)} images of {source} can be read; first {skipped[0]}")
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow(["document" if text else "image", *model.labels.names])
    writer.writerows([name, *(f"{p:.6f}" for p in row)] for name, row in zip(done, rows, strict=True))
    out.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(out, written.getvalue().encode())
    return len(done), skipped


def _images(
    source: Path, prepare: Preprocessing, skipped: list[str]
) -> Iterator[tuple[Sequence[str], Inputs]]:
    """Yield batches of images and their names; names of unreadable images are added to `skipped`."""
    paths = images_to_predict(source)
    for start in range(0, len(paths), _BATCH):
        names, pixels = [], []
        for path in paths[start : start + _BATCH]:
            try:
                image = torch.tensor(resize_pad(read_image(path, prepare.color), prepare.size))
            except DataError:
                skipped.append(str(path))
                continue
            names.append(str(path))
            pixels.append(image.permute(2, 0, 1) if prepare.color else image[None])
        if names:
            yield names, {"image": prepare(torch.stack(pixels))}


def _documents(source: Path, spec: ModelSpec) -> Iterator[tuple[Sequence[str], Inputs]]:
    """Yield batches of documents and their names."""
    named = documents_to_predict(source)
    vocabulary = vocabulary_of(spec)
    for start in range(0, len(named), _BATCH):
        part = named[start : start + _BATCH]
        tokens, length = vocabulary.encode([text for _, text in part], spec.longest)
        yield [name for name, _ in part], {"tokens": tokens, "length": length}


def documents_to_predict(source: Path) -> list[tuple[str, str]]:
    """Return name and text of each document of a path: a .txt file, a folder of them, or a CSV.

    Raises:
        DataError: the path does not exist or has no document, the CSV no column ``text``, or a file no UTF-8.
    """
    if source.suffix.lower() == ".csv" and source.is_file():
        sheet = read_sheet(source)
        texts = sheet.cells(sheet.position("text", "the documents"))
        named = "document" in sheet.header
        names = sheet.cells(sheet.position("document", "")) if named else map(str, sheet.numbers)
        return list(zip(names, texts, strict=True))
    paths = sorted(source.rglob("*.txt")) if source.is_dir() else [source]
    if not paths or not source.exists():
        raise DataError(f"{source} holds no document; give a .txt file, a folder of them or a CSV")
    try:
        return [(str(path), path.read_text(encoding="utf-8-sig")) for path in paths]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{source} cannot be read as text: {error}") from error
