"""Samples and batches: the inputs of a model with their labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from suture.core.devices import moved
from suture.core.labels import LabelSet
from suture.core.seeds import generator_for

FEATURES, ROW = "features", "row"
"""Names of inputs: features ``[n, d]`` that a frozen encoder computed of images or documents, in their place;
and the number of each among the samples of its split ``[n]``, by which its views are found."""


def viewed(inputs: Mapping[str, Tensor]) -> str:
    """Return the name of the input that methods have views of: the image, or its features."""
    return FEATURES if FEATURES in inputs else "image"


@dataclass(frozen=True)
class Batch:
    """Inputs (images or tokens) with their labels.

    Attributes:
        inputs: named tensors, first axis n. Images: ``{"image": [n, channels, h, w]}``.
        y: labels [n, c], 1 or 0; 0 where unknown (never NaN, because NaN * 0 is NaN).
        known: boolean mask [n, c]; False means "no information", not "absent".
        weight: weight of each entry in the loss, [n, c] or [n, 1], where a method sets it itself.
    """

    inputs: Mapping[str, Tensor]
    y: Tensor
    known: Tensor
    weight: Tensor | None = None

    def __len__(self) -> int:
        return int(self.y.shape[0])

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device; the host does not wait for a GPU to have it."""
        return self._each(partial(moved, device=device))

    def pinned(self) -> Batch:
        """The same batch in memory from which a GPU copies while the host goes on; needs CUDA."""
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        weight = None if self.weight is None else change(self.weight)
        inputs = {name: change(tensor) for name, tensor in self.inputs.items()}
        return Batch(inputs, change(self.y), change(self.known), weight)


@dataclass(frozen=True)
class Samples:
    """A split held in memory (or memory-mapped), ready to be cut into batches.

    Attributes:
        inputs: named tensors, first axis n; images as uint8 [n, channels, h, w].
        y: float32 labels [n, c], NaN where unknown.
        patients: patient identifier of each row.
        names: name of the image or document of each row, to find it in another table.
        attributes: the value of each row by which figures are broken down, empty where unknown; no values at
            all where the site names no such column.
        taught: float32 [n, c], what training takes for unknown entries: 0 where a method teaches them as
            absent, a probability where the site knows positives alone, NaN for nothing; None for none at all.
            Metrics do not count them.
    """

    inputs: Mapping[str, Tensor]
    y: Tensor
    patients: tuple[str, ...]
    names: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    taught: Tensor | None = None

    def __len__(self) -> int:
        return int(self.y.shape[0])

    @cached_property
    def patient_numbers(self) -> NDArray[np.intp]:
        """The patient of each row as a number from 0, ``[n]``."""
        return np.unique(np.asarray(self.patients), return_inverse=True)[1]

    def rows(self, where: Tensor) -> Samples:
        """The samples of the given rows [m], in that order."""
        picked = where.tolist()
        return Samples(
            {key: values[where] for key, values in self.inputs.items()},
            self.y[where],
            tuple(self.patients[i] for i in picked),
            tuple(self.names[i] for i in picked) if self.names else (),
            tuple(self.attributes[i] for i in picked) if self.attributes else (),
            None if self.taught is None else self.taught[where],
        )

    def targets(self, rows: Tensor | slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Return the labels of the given rows, ``[m, c]``, 0 where unknown, and the mask of known ones."""
        y = self.y[rows]
        if self.taught is not None:
            y = torch.where(torch.isnan(y), self.taught[rows], y)
        return torch.nan_to_num(y, nan=0.0), ~torch.isnan(y)

    def batch(self, rows: Tensor) -> Batch:
        """The batch of the given rows [m]: NaN becomes y = 0 with known = False."""
        # A tenth of the time of indexing with brackets, which goes pixel by pixel.
        return Batch({k: v.index_select(0, rows) for k, v in self.inputs.items()}, *self.targets(rows))

    def batches(self, size: int) -> Iterator[Batch]:
        """Iterate over all rows once, in their order, in `parts` of `size`."""
        return map(self.batch, parts(torch.arange(len(self)), size))


def parts(rows: Tensor, size: int) -> Iterator[Tensor]:
    """The rows, `size` at a time.

    A last batch of a single row joins the batch before it: batch norm has no variance of one value.
    """
    return iter(rows.tensor_split(list(range(size, len(rows) - 1, size))) if len(rows) else ())


def endless(n: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield row numbers ``[size]`` without end, in one shuffled pass over `n` rows after another."""
    rest = torch.empty(0, dtype=torch.long)
    while n:
        passes = -(-(size - len(rest)) // n)
        rest = torch.cat([rest, *(torch.randperm(n, generator=generator) for _ in range(passes))])
        yield rest[:size]
        rest = rest[size:]


IN_A_ROW = 4
"""Images of a class that `class_aware` draws before it goes on to the next class."""


def class_aware(
    y: Tensor, names: Sequence[str], size: int, generator: torch.Generator, steps: int | None = None
) -> Iterator[Tensor]:
    """Yield the row numbers of batches in which every class is drawn equally often.

    Classes come in shuffled cycles; of each, `IN_A_ROW` images are drawn from a shuffled cycle of its own. An
    epoch draws as many images as the largest class has, times the classes (Kang et al., Decoupling
    Representation and Classifier, ICLR 2020, class-balanced sampling), and is cut into `parts`. Only classes
    with a positive image count; an image of several classes belongs to each. The order of the columns does
    not matter: classes have their names' seeds and turns.

    Args:
        y: labels ``[n, c]``, NaN where unknown.
        names: of the classes ``[c]``.
        steps: number of batches, all of `size`, in place of an epoch.
    """
    columns = sorted(zip(names, y.T, strict=True), key=lambda of: of[0])
    positive = {name: column.eq(1).nonzero().squeeze(1) for name, column in columns}
    positive = {name: rows for name, rows in positive.items() if len(rows)}
    if not positive:
        return iter(())
    epoch = max(map(len, positive.values())) * len(positive)
    number = epoch if steps is None else steps * size
    seed = int(torch.randint(2**62, (), generator=generator))
    turns = next(endless(len(positive), -(-number // IN_A_ROW), generator))
    drawn = torch.empty(len(turns), IN_A_ROW, dtype=torch.long)
    for which, (name, of) in enumerate(positive.items()):
        own = turns == which
        places = next(endless(len(of), int(own.sum()) * IN_A_ROW, generator_for(seed, name)))
        drawn[own] = of[places].view(-1, IN_A_ROW)
    rows = drawn.flatten()[:number]
    return parts(rows, size) if steps is None else iter(rows.view(-1, size))


def columns(samples: Samples, own: LabelSet, wanted: LabelSet, *, absent: bool = False) -> Samples:
    """Return the samples with one label column for each wanted class, NaN for the classes of other sites.

    Args:
        absent: teach a class that the site does not annotate as absent; unknown labels of its own classes
            stay unknown.
    """
    before = samples.taught
    y = torch.full((len(samples), len(wanted)), torch.nan)
    taught = torch.full(y.shape, 0.0 if absent else torch.nan)
    for column, position in enumerate(own.align(wanted)):
        if position >= 0:
            y[:, column] = samples.y[:, position]
            taught[:, column] = torch.nan if before is None else before[:, position]
    return replace(samples, y=y, taught=taught if absent or before is not None else None)
