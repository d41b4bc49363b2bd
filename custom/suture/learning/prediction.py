"""Predicting images or documents on disk with a saved model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

from suture.core.environment import unusable
from suture.core.errors import ConfigError, DataError
from suture.core.files import atomic_write, make_folder
from suture.core.spreadsheets import as_cell
from suture.data.decoding import images_to_predict, read_image, resize_pad, within
from suture.data.limits import MOST_TEXT, file_bytes
from suture.data.reading import read_sheet
from suture.learning.losses import probabilities
from suture.models import MODELS, ModelSpec, vocabulary_of
from suture.models.classifier import Classifier, Preprocessing
from suture.models.saved import load_model, load_spec

_BATCH = 64

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Model:
    """A saved model: called on a tensor of images, or put to files.

    Attributes:
        network: in eval mode, on its device.
        spec: what the network is made of and reads.
        prepare: uint8 images to its input.
    """

    network: Classifier
    spec: ModelSpec
    prepare: Preprocessing
    device: str = "cpu"

    @property
    def labels(self) -> tuple[str, ...]:
        """The classes, in the order of the columns."""
        return self.network.labels.names

    @property
    def reads_text(self) -> bool:
        """Whether it reads documents rather than images."""
        return MODELS[self.spec.name].reads == "text"

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Return probabilities ``[n, c]`` of images, uint8 ``[n, 1 or 3, size, size]``.

        Raises:
            DataError: the model reads text, or images of another type, size or number of channels.
        """
        size, channels = self.prepare.size, 3 if self.prepare.color else 1
        wanted = (channels, size, size)
        if self.reads_text or images.dtype != torch.uint8 or tuple(images.shape[1:]) != wanted:
            reads = (
                "text; use predict" if self.reads_text else f"uint8 images [n, {channels}, {size}, {size}]"
            )
            raise DataError(f"got {images.dtype} {list(images.shape)}, and the model reads {reads}")
        return self._probabilities({"image": self.prepare(images)})

    @torch.no_grad()
    def predict(self, source: str | Path | Sequence[str | Path]) -> pd.DataFrame:
        """Return one row of probabilities for each image or document.

        Args:
            source: an image, a folder of images, a CSV with an ``image`` column, or several of these; for a
                model that reads text a .txt file, a folder of them, or a CSV with a ``text`` column (and
                names under ``document``).

        Returns:
            a column for each class, and the names as the index; ``frame.attrs["skipped"]`` lists unreadable
            images.

        Raises:
            DataError: there is no image or document, or none can be read.
        """
        sources = [source] if isinstance(source, (str, Path)) else source
        names: list[str] = []
        skipped: list[str] = []
        rows = []
        for path in map(Path, sources):
            for part, inputs in (
                _documents(path, self.spec) if self.reads_text else _images(path, self.prepare, skipped)
            ):
                names += part
                rows.append(self._probabilities(inputs))
        if not names and not skipped:
            raise DataError(f"{source or 'an empty list'} holds nothing to predict")
        if not names:
            raise DataError(f"none of the {len(skipped)} images of {source} can be read; first {skipped[0]}")
        index = pd.Index(names, name="document" if self.reads_text else "image")
        frame = pd.DataFrame(torch.cat(rows).numpy(), index, list(self.labels))
        frame.attrs["skipped"] = skipped
        return frame

    def _probabilities(self, inputs: Inputs) -> Tensor:
        on_device = {key: tensor.to(self.device) for key, tensor in inputs.items()}
        found = probabilities(self.network(on_device), self.network.labels.label_type).cpu()
        if not bool(torch.isfinite(found).all()):
            raise ConfigError(
                "the model gives no finite probabilities, so its weights (model.safetensors) or its "
                "preprocessing (model.json) are damaged; restore both files, or train it again"
            )
        return found


def open_model(folder: str | Path, device: str = "cpu") -> Model:
    """Open a saved model.

    Args:
        folder: model/ of a run.

    Raises:
        ConfigError: there is no model, or no such device.
    """
    if reason := unusable(device):
        raise ConfigError(f"device {device!r} cannot be used: {reason}")
    folder = Path(folder).expanduser()
    network, prepare = load_model(folder)
    return Model(network.to(device), load_spec(folder), prepare, device)


def predict_to_csv(model_folder: Path, source: Path, out: Path, device: str = "cpu") -> tuple[int, list[str]]:
    """Write a CSV with the column ``image`` or ``document``, and a column of probabilities for each class.

    Names are written by `as_cell`, so that none is a formula or moves the cursor of a terminal.

    Args:
        model_folder, source: as in `open_model` and `Model.predict`.

    Returns:
        the number of predictions, and the names of images that cannot be read.
    """
    frame = open_model(model_folder, device).predict(source).rename(index=as_cell, columns=as_cell)
    make_folder(out.parent)
    atomic_write(out, frame.to_csv(float_format="%.6f", lineterminator="\n").encode())
    return len(frame), frame.attrs["skipped"]


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
        DataError: the path does not exist or has no document, the CSV no column ``text``, a file is no UTF-8,
            or a link leads out of the folder.
    """
    if source.suffix.lower() == ".csv" and source.is_file():
        sheet = read_sheet(source)
        texts = sheet.cells(sheet.position("text", "the documents"))
        named = "document" in sheet.header
        names = sheet.cells(sheet.position("document", "")) if named else map(str, sheet.numbers)
        return list(zip(names, texts, strict=True))
    try:
        there = source.exists()
    except OSError:  # the text itself, too long for a name
        there = False
    paths = within(source, source.rglob("*.txt")) if there and source.is_dir() else [source]
    if not paths or not there:
        raise DataError(
            f"{str(source)[:80]!r} holds no document; give a .txt file, a folder of them or a CSV"
        )
    try:
        return [(str(path), file_bytes(path, MOST_TEXT).decode("utf-8-sig")) for path in paths]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{source} cannot be read as text: {error}") from error
