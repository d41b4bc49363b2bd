"""Predicting images or documents on disk with a saved model."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from html import escape
from itertools import compress, islice
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from suture.core.errors import ConfigError, DataError, DiskError
from suture.core.escaping import as_cell, number_of
from suture.core.files import make_folder, read_regular, replacing
from suture.core.processes import usable_cores
from suture.core.runtime import repeatable, unusable
from suture.data.batch import Preprocessing, moved
from suture.data.decoding import needed_bits, open_image, readable, resize_pad
from suture.learning.steps import probabilities
from suture.learning.training import evaluation_batch, retry_in_smaller_batches
from suture.models import ModelSpec, encoder_of
from suture.models.classifier import Classifier
from suture.models.documents import document_inputs, strange
from suture.models.saved import load_model, load_spec, weights_digest
from suture_results.decided_predictions import blank_decisions
from suture_results.inputs import Input, Kind, find_inputs
from suture_results.inspection import size_notes

BATCH = 64
"""Images or documents that are computed at a time; on the CPU fewer large images, see `evaluation_batch`."""

_AHEAD = 64
"""Images or documents that are read before they are needed."""

DIGEST = "model digest"
"""The last column of a CSV: the first digits of the SHA-256 of the weights, as model.json states it."""

_Value = Tensor | str
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class _Seen:
    """What images that were read are like.

    Attributes:
        highest: the largest value of each image of 16 bits whose true depth nobody has said.
        sizes: name, width and height of each image.
    """

    highest: list[int] = field(default_factory=list)
    sizes: list[tuple[str, int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Model:
    """A saved model: called on a tensor of images, or put to files.

    Attributes:
        network: in eval mode, on its device.
        spec: what the network is made of and reads.
        prepare: uint8 images to its input.
        digest: SHA-256 of its weights, in hexadecimal digits.
    """

    network: Classifier
    spec: ModelSpec
    prepare: Preprocessing
    device: str = "cpu"
    digest: str = ""

    def _repr_html_(self) -> str:
        """What a notebook shows: the backbone and the classes."""
        classes = "".join(f"<li>{escape(name)}</li>" for name in self.labels)
        return f"<p><b>{escape(self.spec.name)}</b> on {escape(self.device)}, for</p><ul>{classes}</ul>"

    @property
    def labels(self) -> tuple[str, ...]:
        """The classes, in the order of the columns."""
        return self.network.labels.names

    @property
    def reads_text(self) -> bool:
        """Whether it reads documents rather than images."""
        return encoder_of(self.spec).reads == "text"

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
            raise DataError(f"got {images.dtype} {list(images.shape)}, but the model reads {reads}")
        return self._probabilities({"image": self.prepare(images)})

    def predict(
        self,
        source: str | Path | Sequence[str | Path],
        *,
        column: str | None = None,
        root: str | Path | None = None,
        bits: int | None = None,
        batch: int | None = None,
        progress: Progress | None = None,
    ) -> pd.DataFrame:
        """Return one row of probabilities for each image or document.

        Args:
            source: an image, a folder or archive of images, a table that names them, a suture.toml, or
                several of these; for a model that reads text .txt files in place of images, or a table of
                texts (and of their names under ``document``).
            column: of a table, as in `find_inputs`.
            root: of a table's images, as in `find_inputs`.
            bits: the true depth of images that are stored with 16 bits; a suture.toml has its own.
            batch: images or documents that are computed at a time; None: as many as is fast. It is halved
                where the memory of the device is too small.
            progress: called with the number of those that are done, and of all.

        Returns:
            a column for each class, and the paths as the index. ``frame.attrs`` has, by path, ``failed``, why
            an input cannot be read, ``others``, why another file of a folder is none, and ``patients``, where
            the source names them; ``notes``, what was taken for granted, and ``model``, the SHA-256 of the
            weights.

        Raises:
            DataError: there is no image or document, or none can be read.
            ConfigError: `column` or `root` without a table, a faulty suture.toml, or a `batch` below 1.
        """
        frame = self.frame(source, column, root, bits, batch, progress)
        if frame.empty:
            raise _none_read(frame)
        return frame

    @torch.no_grad()
    def frame(
        self,
        source: str | Path | Sequence[str | Path],
        column: str | None,
        root: str | Path | None,
        bits: int | None,
        batch: int | None,
        progress: Progress | None,
    ) -> pd.DataFrame:
        """Return what `predict` returns, also where no input can be read: the frame has no row then."""
        if batch is not None and batch < 1:
            raise ConfigError(f"batch={batch}: write 1 or more")
        given = [source] if isinstance(source, (str, Path)) else source
        sources = [Path(one).expanduser() for one in given]
        if not sources:
            raise DataError("the list of images is empty")
        base = None if root is None else Path(root).expanduser()
        kind: Kind = "text" if self.reads_text else "image"
        with find_inputs(sources, kind, column, base, bits) as inputs:
            found = list(inputs.found.values())
            # Of 100,000 images this is a few megabytes; it is the images that must not be held.
            scores = np.full((len(found), len(self.labels)), np.nan, dtype=np.float32)
            seen = _Seen()
            failed = self._fill(scores, found, seen, batch or self._batch(), progress)
        # Of objects, because the name of a file may be no text of Unicode.
        kind_name = "document" if self.reads_text else "image"
        index = pd.Index([one.name for one in found], dtype=object, name=kind_name)
        frame = pd.DataFrame(scores, index, list(self.labels))[~index.isin(failed)]
        notes = [*inputs.notes, *_too_dark(seen.highest), *size_notes(seen.sizes, self.prepare.size)]
        frame.attrs |= {"failed": failed, "others": inputs.others, "notes": notes, "model": self.digest}
        frame.attrs["patients"] = {one.name: one.patient for one in found if one.patient}
        return frame

    def _fill(
        self,
        scores: NDArray[np.float32],
        found: Sequence[Input],
        seen: _Seen,
        size: int,
        progress: Progress | None,
    ) -> dict[str, str]:
        """Write the probabilities of each input into its row; return why some have none, by name."""
        failed: dict[str, str] = {}
        order = sorted(range(len(found)), key=lambda row: found[row].at)
        done = 0
        with closing(_convert([found[row] for row in order], partial(self._value, seen))) as values:
            results = zip(order, values, strict=True)
            while part := list(islice(results, size)):
                read = {row: value for row, value in part if not isinstance(value, DataError)}
                failed |= {found[row].name: str(value) for row, value in part if isinstance(value, DataError)}
                for row in self._strange(read):
                    failed[found[row].name] = f"{found[row].name} has no word that the model knows"
                    del read[row]
                if read:
                    in_batches = partial(self._in_batches, list(read.values()))
                    scores[list(read)] = retry_in_smaller_batches(in_batches, len(read)).numpy()
                done += len(part)
                if progress is not None:
                    progress(done, len(found))
        return failed

    def _value(self, seen: _Seen, one: Input, data: bytes | DataError | None) -> _Value | DataError:
        """Return an image as the data set's own batches hold it, uint8 [1 or 3, h, w], or a text."""
        data = _bytes(one) if data is None else data
        if isinstance(data, DataError):
            return data
        try:
            if self.reads_text:
                return data.decode("utf-8-sig")
            opened = open_image(data, one.name, one.bits, self.spec.modalities)
            if one.bits is None and opened.bits == 16 and opened.highest is not None:
                seen.highest.append(opened.highest)
            seen.sizes.append((one.name, *opened.image.size))
            with readable(one.name):
                pixels = opened.pixels(self.prepare.color)
            image = torch.from_numpy(resize_pad(pixels, self.prepare.size).copy())
            return image.permute(2, 0, 1) if self.prepare.color else image[None]
        except UnicodeDecodeError as error:
            return DataError(f"{one.name} cannot be read as text: {error}")
        except DataError as error:
            return error
        except MemoryError:
            return DataError(f"{one.name} needs more memory than is available")

    def _strange(self, read: Mapping[int, _Value]) -> list[int]:
        """Return the rows of documents without a word that the model knows."""
        texts = [value for value in read.values() if isinstance(value, str)]
        return list(compress(read, strange(self.spec, texts))) if texts else []

    def _batch(self) -> int:
        side = self.prepare.size
        inputs = {} if self.reads_text else {"image": torch.empty(0, 1, side, side)}
        return evaluation_batch(inputs, self.device, BATCH)

    def _in_batches(self, values: Sequence[_Value], size: int) -> Tensor:
        parts = (values[start : start + size] for start in range(0, len(values), size))
        return torch.cat([self._probabilities(self._inputs(part)) for part in parts])

    def _inputs(self, values: Sequence[_Value]) -> dict[str, Tensor]:
        """Return images, or texts, as a batch of the network."""
        if self.reads_text:
            texts = [value for value in values if isinstance(value, str)]
            return document_inputs(self.spec, texts)
        return {"image": self.prepare(torch.stack([v for v in values if isinstance(v, Tensor)]))}

    def _probabilities(self, inputs: dict[str, Tensor]) -> Tensor:
        on_device = {key: moved(tensor, self.device) for key, tensor in inputs.items()}
        with repeatable(self.device):
            found = probabilities(self.network(on_device), self.network.labels.label_type).cpu()
        if not bool(torch.isfinite(found).all()):
            raise ConfigError(
                "the model gives no finite probabilities, so its weights or its preprocessing are damaged. "
                "Restore model.safetensors and model.json, or train it again"
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
    return Model(network.to(device), load_spec(folder), prepare, device, weights_digest(folder))


def predict_to_csv(
    model_folder: Path,
    source: Path | Sequence[Path],
    out: Path,
    device: str = "cpu",
    *,
    column: str | None = None,
    root: Path | None = None,
    bits: int | None = None,
    batch: int | None = None,
    progress: Progress | None = None,
    decided: Callable[[pd.DataFrame], pd.DataFrame] = blank_decisions,
) -> pd.DataFrame:
    """Write a CSV with the column ``image`` or ``document``, ``patient`` where the source names patients, one
    for each class, and `DIGEST`.

    What was left out, and why, is written beside it (`left_out`). Names are written by `as_cell`.

    Args:
        model_folder, device: as in `open_model`.
        source, column, root, bits, batch, progress: as in `Model.predict`.
        decided: adds decisions to the predictions that are written; see `decider`.

    Returns:
        as `Model.predict`.

    Raises:
        ConfigError: `out` is no name of a CSV.
        DiskError: it cannot be written; no file of its name is then new.
        SutureError: as `Model.predict`.
    """
    _check_output(out)
    frame = open_model(model_folder, device).frame(source, column, root, bits, batch, progress)
    _write_left_out(frame, left_out(out))
    if frame.empty:
        raise _none_read(frame)
    with replacing(out, private=True) as temporary:
        safe = decided(frame).rename(index=as_cell, columns=as_cell)
        if patients := frame.attrs["patients"]:
            safe.insert(0, "patient", [as_cell(patients.get(name, "")) for name in frame.index])
        safe[DIGEST] = f"sha256:{frame.attrs['model'][:12]}"
        safe.to_csv(temporary, float_format="%.6f", lineterminator="\n", encoding="utf-8")
    return frame


def _check_output(out: Path) -> None:
    """Make the folder of a CSV, and check before hours of work that it can be written.

    Raises:
        ConfigError, DiskError: as `predict_to_csv`.
    """
    if out.suffix.lower() != ".csv" or out.is_dir():
        raise ConfigError(f"{out}: predictions are written as CSV; give a file name that ends in .csv")
    make_folder(out.parent)
    if not os.access(out.parent, os.W_OK):
        raise DiskError(errno.EACCES, os.strerror(errno.EACCES), str(out))


def _write_left_out(frame: pd.DataFrame, path: Path) -> None:
    """Write a CSV of what has no prediction, and why; where there is none, delete that of an earlier call."""
    reasons = frame.attrs["failed"] | frame.attrs["others"]
    rows = [(as_cell(name), as_cell(why)) for name, why in reasons.items()]
    columns = [str(frame.index.name), "reason"]
    if not rows:
        with suppress(OSError, ValueError):
            if read_regular(path).decode().partition("\n")[0] == ",".join(columns):  # one of ours
                path.unlink()
        return
    with replacing(path, private=True) as temporary:
        table = pd.DataFrame(rows, columns=columns)
        table.to_csv(temporary, index=False, lineterminator="\n", encoding="utf-8")


def left_out(out: Path) -> Path:
    """The CSV beside that of the predictions which says what has none, and why."""
    return out.with_suffix(".left_out.csv")


def _none_read(frame: pd.DataFrame) -> DataError:
    """Return the error of a frame without a row."""
    failed = frame.attrs["failed"]
    first = next(iter(failed.values()))
    return DataError(f"none of the {len(failed)} {frame.index.name}s can be read; the first: {first}")


def _convert(
    found: Sequence[Input], value: Callable[[Input, bytes | DataError | None], _Value | DataError]
) -> Generator[_Value | DataError, None, None]:
    """Read and convert inputs on a few threads, in their order and a little ahead of their use.

    The bytes of an archive are read here, one after the other: a thread that came late would lead it back.
    """
    pool = ThreadPoolExecutor(min(4, usable_cores()))
    waiting: deque[Future[_Value | DataError]] = deque()
    try:
        for one in found:
            waiting.append(pool.submit(value, one, _bytes(one) if one.at[0] else None))
            if len(waiting) == _AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _too_dark(highest: Sequence[int]) -> list[str]:
    """Say that images of 16 bits are predicted darker than they are."""
    if not highest or (needed := needed_bits(max(highest))) == 16:
        return []
    return [
        (
            f"{number_of(len(highest), 'image')} with 16 bits and no value above {max(highest):,}: the "
            f"model sees them {2 ** (16 - needed)} times too dark, unless it was trained on images read "
            f"this way; --bits {needed} scales them"
        )
    ]


def _bytes(one: Input) -> bytes | DataError:
    try:
        return one.read()
    except DataError as error:
        return error
    except OSError as error:
        return DataError(f"{one.name} cannot be read: {error.strerror or error}")
