"""Predictions of a saved model for images or documents on disk."""

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
    """Writes ``image``, or ``document``, and one column of probabilities per class.

    Args:
        model_folder: model/ of a run.
        source: an image, a folder of images, or a CSV with an ``image`` column; for a model that reads text a
            .txt file, a folder of them, or a CSV with a ``text`` column (and ``document``, their names).

    Returns:
        how many were predicted, and the names of those that could not be read.

    Raises:
        ConfigError: there is no model.
        DataError: there is nothing to predict, or none of it can be read.
    """
    model, prepare = load_model(model_folder)
    model.to(device)
    spec, task = load_spec(model_folder), model.labels.label_type
    text = MODELS[spec.name].reads == "text"
    done: list[str] = []
    skipped: list[str] = []
    rows: list[list[float]] = []
    for names, inputs in _documents(source, spec) if text else _images(source, prepare, skipped):
        done += names
        on_device = {key: tensor.to(device) for key, tensor in inputs.items()}
        rows += probabilities(model(on_device), task).tolist()
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
    """Batches of images and their names; the unreadable ones are added to `skipped`."""
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
    """Batches of documents and their names."""
    named = documents_to_predict(source)
    vocabulary = vocabulary_of(spec)
    for start in range(0, len(named), _BATCH):
        part = named[start : start + _BATCH]
        tokens, length = vocabulary.encode([text for _, text in part], spec.longest)
        yield [name for name, _ in part], {"tokens": tokens, "length": length}


def documents_to_predict(source: Path) -> list[tuple[str, str]]:
    """Name and text of the documents that a person means by a path.

    Raises:
        DataError: there is no such path, no document in it, no column ``text``, or no UTF-8 text.
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
