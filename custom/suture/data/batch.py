"""Samples and batches: the inputs of a model with their labels, their normalisation and augmentation.

In a batch each image has its own random transform, in one resampling. An abort of the job stops a site
within one step or batch, as a batch moves to the device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import Field
from pydantic.dataclasses import dataclass as validated
from torch import Tensor

from suture.core.errors import Aborted
from suture.core.labels import LabelSet
from suture.core.runtime import generator_for
from suture.core.validation import STRICT

_ABORTED: ContextVar[Callable[[], bool]] = ContextVar("suture_aborted", default=lambda: False)


@contextmanager
def abortable(aborted: Callable[[], bool]) -> Iterator[None]:
    """Let the work of this thread end as soon as `aborted` says so; see `check_abort`."""
    token = _ABORTED.set(aborted)
    try:
        yield
    finally:
        _ABORTED.reset(token)


def check_abort() -> None:
    """End the work of an aborted job.

    `moved` calls this for every batch, whoever trains, evaluates or extracts features;
    only what computes for long without moving a batch has to call it too.

    Raises:
        Aborted: the job was aborted.
    """
    if _ABORTED.get()():
        raise Aborted("the job was aborted")


def moved(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return a tensor on a device; the host does not wait until a GPU has it.

    It would wait for more than 64 KiB of memory that is not pinned.

    Raises:
        Aborted: the job was aborted. Every pass over data moves its batches here.
    """
    check_abort()
    if tensor.device.type != "cpu" or torch.device(device).type in ("cpu", "meta"):
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


FEATURES, ROW = "features", "row"
"""Names of inputs: features ``[n, d]`` that a frozen encoder computed of images or documents, in their place;
and the number of each among the samples of its split ``[n]``, by which its views are found."""


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

    def pin(self) -> Batch:
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


Mean = Annotated[float, Field(ge=-1e3, le=1e3)]


Std = Annotated[float, Field(ge=1e-4, le=1e3)]
"""Normalisation of values in [0, 1]; a smaller standard deviation would leave single precision."""


@validated(frozen=True, config=STRICT)
class Preprocessing:
    """The conversion of pixels to a model's input; it is saved with the model.

    Attributes:
        size: side of the square image.
        color: whether images are in colour; the channel of gray images is repeated where a backbone takes
            three.
        channels: number of channels that the backbone takes.
        mean, std: normalisation of each channel, of values in [0, 1].
    """

    size: Annotated[int, Field(ge=1, le=4096)]
    color: bool
    channels: Annotated[int, Field(ge=1, le=3)]
    mean: tuple[Mean, ...]
    std: tuple[Std, ...]

    def __call__(self, image: Tensor) -> Tensor:
        """Convert uint8 ``[n, 1 or 3, h, w]`` to normalised float ``[n, channels, h, w]``, where they are."""
        x = image.float().div_(255.0)
        if x.shape[1] != self.channels:
            x = x.expand(-1, self.channels, -1, -1)
        mean, std = by_channel(self.mean, x.device), by_channel(self.std, x.device)
        return (x - mean).div_(std)

    def undo(self, image: Tensor) -> Tensor:
        """Convert normalised images back to values in [0, 1]."""
        return image * by_channel(self.std, image.device) + by_channel(self.mean, image.device)


@functools.lru_cache(maxsize=32)
def by_channel(values: tuple[float, ...], device: torch.device) -> Tensor:
    """``[1, channels, 1, 1]``, made once: to copy numbers to a GPU, the host waits until it is idle."""
    return torch.tensor(values, device=device).view(1, -1, 1, 1)


Share = Annotated[float, Field(ge=0, le=1)]


@validated(frozen=True, config=STRICT)
class Augmentation:
    """Random changes of training images; all off by default.

    Attributes:
        rotation: maximum angle in degrees, in either direction.
        flip: chance of a mirror image left to right.
        zoom: maximum relative change of the visible extent, for each axis: 0.5 shows 0.5 to 1.5 times the
            image's side, as Keras' RandomZoom.
        contrast: maximum relative change of contrast around the mean of each channel.
        vertical_flip: chance of a mirror image top to bottom.
        shift: maximum shift, as a share of the image's side, for each axis.
        affine_chance: chance that an image is rotated, zoomed and shifted at all; flips have their own.
        brightness: maximum change of all pixels by the same amount, as a share of their full range (0 to 1
            before normalisation); values are not clipped.
        brightness_chance: chance that an image's brightness changes at all.
        blur_chance: chance of one of three, with equal odds: a median filter of 3 or 5 pixels, a Gaussian
            filter of 3 or 5 pixels, or Gaussian noise of a variance of 5 to 30 where pixels reach 255.
    """

    rotation: Annotated[float, Field(ge=0, le=180)] = 0.0
    flip: Share = 0.0
    zoom: Annotated[float, Field(ge=0, lt=1)] = 0.0
    contrast: Annotated[float, Field(ge=0, lt=1)] = 0.0
    vertical_flip: Share = 0.0
    shift: Share = 0.0
    affine_chance: Share = 1.0
    brightness: Share = 0.0
    brightness_chance: Share = 1.0
    blur_chance: Share = 0.0

    @property
    def active(self) -> bool:
        """Whether any image changes."""
        return self.resamples or self.brightens or any((self.flip, self.contrast, self.blur_chance))

    @property
    def resamples(self) -> bool:
        """Whether pixels move otherwise than by mirroring left to right, which needs no resampling."""
        affine = any((self.rotation, self.zoom, self.shift)) and self.affine_chance > 0
        return affine or self.vertical_flip > 0

    @property
    def brightens(self) -> bool:
        """Whether the brightness of some image changes."""
        return self.brightness > 0 and self.brightness_chance > 0


SURGICAL = Augmentation(rotation=72.0, flip=0.5, zoom=0.5, contrast=0.75)
"""Surgical Aggregation 2024, Sec. 3.4.3: rotation, flip, zoom and contrast, with the program's ranges
(layers of Keras)."""

MILD = Augmentation(rotation=10.0, zoom=0.1, contrast=0.3)
"""For chest images whose sides carry meaning."""

WEAK = Augmentation(flip=0.5)
"""FedLSM (Deng et al. 2023, Sec. 3.2), the weak view: a horizontal flip."""

STRONG = Augmentation(
    rotation=15.0,
    flip=0.5,
    vertical_flip=0.5,
    zoom=0.1,
    shift=0.1,
    affine_chance=0.85,
    brightness=0.2,
    brightness_chance=0.75,
    blur_chance=0.7,
)
"""FedLSM (Deng et al. 2023, Sec. 3.2), the strong view: flips, rotation, shift and scale, with one of median
blur, Gaussian blur and Gaussian noise; the ranges are those of the authors' program, where 0.9 to 1.1 is the
scale itself rather than the extent."""

_KERNELS = (3, 5)
"""Sides of the median and Gaussian filters, in pixels."""

_NOISE_VARIANCE = (5.0, 30.0)
"""Of Gaussian noise, on a scale of pixels up to 255."""

_BLOCK = 2**16
"""Pixels that the median filter compares at a time: those of large images, all at once, leave the cache."""

_NETWORKS = {
    3: ((0, 2), (0, 1), (1, 2)),
    5: ((0, 3), (1, 4), (0, 2), (1, 3), (0, 1), (2, 4), (1, 2), (3, 4), (2, 3)),
}
"""The fewest comparisons that sort as many values (Knuth, The Art of Computer Programming 3, Sec. 5.3.4)."""

Source = torch.Generator | Sequence[torch.Generator]
"""Of randomness, on the CPU: one for a batch, or one for each image, whose change then is its own alone."""


def augment(images: Tensor, source: Source, spec: Augmentation, *, std: Sequence[float] = (1.0,)) -> Tensor:
    """Changes each image of a batch at random.

    Args:
        images: float ``[n, c, h, w]``, normalised.
        source: the only one of randomness; a GPU gets what it draws without being awaited.
        std: the standard deviation that the normalisation divided by, of each channel or one for all: a
            change of pixels in [0, 1] by d, of brightness or as noise, is one of d / std here.

    Returns:
        ``[n, c, h, w]``.
    """
    n = images.shape[0]
    angle = spread(n, source, math.radians(spec.rotation))
    zoom = torch.stack([1 + spread(n, source, spec.zoom), 1 + spread(n, source, spec.zoom)])
    mirror = choose(n, source, spec.flip)
    contrast = (1 + spread(n, source, spec.contrast)).view(-1, 1, 1, 1)
    # The draws above are made for every spec. Those below are made only where a field needs them, so that
    # specs without these fields, and the batches after this one, draw the same numbers as before.
    if spec.resamples:
        images = resample(images, affine_maps(angle, zoom, mirror, source, spec))
    elif spec.flip:
        rows = mirror.nonzero().flatten().to(images.device, non_blocking=True)
        images = images.index_copy(0, rows, images.index_select(0, rows).flip(-1))
    else:
        images = images.clone()
    # From here on the images change in place: large tensors cost more to allocate than to compute.
    if spec.contrast:
        # Of each channel: normalised ones have offsets of their own, a common mean would tint gray images.
        mean = images.mean(dim=(2, 3), keepdim=True)
        images.sub_(mean).mul_(contrast.to(images.device, non_blocking=True)).add_(mean)
    scale = torch.tensor(tuple(std), dtype=images.dtype).view(1, -1, 1, 1)
    unit = 1 / scale.to(images.device, non_blocking=True)  # how far apart black and white are
    if spec.brightens:
        change = spread(n, source, spec.brightness) * choose(n, source, spec.brightness_chance)
        images += change.view(-1, 1, 1, 1).to(unit, non_blocking=True) * unit
    if spec.blur_chance:
        _blur_some(images, source, spec.blur_chance, unit)
    return images


def draw(distribution: Callable[..., Tensor], shape: Sequence[int], source: Source) -> Tensor:
    """Random numbers ``[n, ...]``, such as of `torch.rand`."""
    if isinstance(source, torch.Generator):
        return distribution(shape, generator=source)
    each = [distribution((1, *shape[1:]), generator=one) for one in source]
    return torch.cat(each) if each else torch.empty(tuple(shape))


def spread(n: int, source: Source, limit: float) -> Tensor:
    """``[n]`` numbers, uniform between -limit and limit."""
    return (draw(torch.rand, (n,), source) * 2 - 1) * limit


def choose(n: int, source: Source, chance: float) -> Tensor:
    """bool ``[n]``: true with that chance."""
    return draw(torch.rand, (n,), source) < chance


def affine_maps(angle: Tensor, zoom: Tensor, mirror: Tensor, source: Source, spec: Augmentation) -> Tensor:
    """The map of each image: rotated, then zoomed and mirrored, then shifted.

    Args:
        angle: ``[n]``, in radians.
        zoom: ``[2, n]``, the extent that is seen along y and x, in sides of the image.
        mirror: bool ``[n]``, left to right.

    Returns:
        ``[n, 2, 3]`` for `resample`.
    """
    n = len(angle)
    upright, moves = torch.ones(n), torch.zeros(n, 2, 1)
    if spec.vertical_flip:
        upright = torch.where(choose(n, source, spec.vertical_flip), -1.0, 1.0)
    if spec.shift:
        # A side is 2 long in the coordinates of `resample`.
        moves = 2 * torch.stack([spread(n, source, spec.shift) for _ in range(2)], dim=1).unsqueeze(2)
    if spec.affine_chance < 1:
        moved = choose(n, source, spec.affine_chance)
        angle, zoom, moves = angle * moved, torch.where(moved, zoom, 1.0), moves * moved.view(-1, 1, 1)
    cos, sin, side = torch.cos(angle), torch.sin(angle), torch.where(mirror, -1.0, 1.0)
    zoom_y, zoom_x = zoom
    linear = torch.stack(
        [
            torch.stack([cos * side * zoom_x, -sin * upright * zoom_y], dim=1),
            torch.stack([sin * side * zoom_x, cos * upright * zoom_y], dim=1),
        ],
        dim=1,
    )
    # From output to input: what moves the image in the output is taken off before all else.
    return torch.cat([linear, -(linear @ moves)], dim=2)


def resample(images: Tensor, theta: Tensor) -> Tensor:
    """Each image through its own affine map, bilinear, its border continued outwards.

    The same numbers as MONAI's `AffineTransform`, without the seconds that importing it costs each process.

    Args:
        images: ``[n, c, h, w]``.
        theta: ``[n, 2, 3]``, from output to input in coordinates of -1 to 1, there or on the CPU.
    """
    theta = theta.to(images, non_blocking=True)
    height, width = images.shape[-2:]
    # `F.affine_grid` is a product of matrices for each image; this is one sum, in a fraction of the time.
    y = ((2 * torch.arange(height, device=theta.device) + 1) / height - 1).view(-1, 1)
    x = ((2 * torch.arange(width, device=theta.device) + 1) / width - 1).view(1, -1)
    a, b, c = theta.view(-1, 2, 1, 1, 3).unbind(dim=4)
    grid = (a * x + (b * y + c)).permute(0, 2, 3, 1)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)


def _blur_some(images: Tensor, source: Source, chance: float, unit: Tensor) -> None:
    """Apply a median filter, a Gaussian filter or noise, with equal odds, to some of the images, in place.

    Args:
        unit: ``[1, 1 or c, 1, 1]``, the pixels' full range in `images`.
    """
    n = images.shape[0]
    some = choose(n, source, chance)
    kind = torch.where(some, draw(functools.partial(torch.randint, 6), (n,), source), -1)

    def drawn(*kinds: int) -> Tensor:
        return torch.isin(kind, torch.tensor(kinds)).nonzero().flatten()

    filters = [(blur, side) for blur in (_median_blur, gaussian_blur) for side in _KERNELS]
    for index, (blur, side) in enumerate(filters):
        rows = drawn(index).to(images.device, non_blocking=True)
        if len(rows):
            images.index_copy_(0, rows, blur(images.index_select(0, rows), side))
    noisy = drawn(4, 5)  # a third of the odds, as either filter has with its two sides
    own = source if isinstance(source, torch.Generator) else [source[row] for row in noisy.tolist()]
    grain = noise(torch.Size((len(noisy), *images.shape[1:])), own)
    images.index_add_(
        0, noisy.to(images.device, non_blocking=True), moved(grain, unit.device).to(unit) * unit
    )


def noise(shape: torch.Size, source: Source) -> Tensor:
    """Gaussian noise for pixels in [0, 1]: ``[n, c, h, w]``, with a variance drawn for each image."""
    low, high = _NOISE_VARIANCE
    variance = low + (high - low) * draw(torch.rand, (shape[0], 1, 1, 1), source)
    return draw(torch.randn, shape, source) * variance.sqrt() / 255


def pad(images: Tensor, side: int) -> Tensor:
    """The border continued outwards, as far as a filter of side * side pixels looks."""
    return F.pad(images, [side // 2] * 4, mode="replicate")


def gaussian_blur(images: Tensor, side: int) -> Tensor:
    """Gaussian filter of side * side pixels, as wide as OpenCV makes it for that side."""
    sigma = 0.3 * ((side - 1) * 0.5 - 1) + 0.8
    line = [math.exp(-0.5 * ((i - side // 2) / sigma) ** 2) for i in range(side)]
    out = pad(images, side)
    for axis in (-1, -2):
        length = out.shape[axis] - side + 1
        views = (out.narrow(axis, i, length) for i in range(side))
        weighted = (view * (weight / sum(line)) for view, weight in zip(views, line, strict=True))
        out = functools.reduce(torch.Tensor.add_, weighted)
    return out


def _median_blur(images: Tensor, side: int) -> Tensor:
    """Median filter of side * side pixels, to 1/32767 of the images' range.

    Whole images are compared at a time, which takes a quarter or less of the time of `torch.median` over
    unfolded windows.
    """
    most = images.abs().max().clamp(min=1e-6)
    scale = most.new_full((), 32767) / most  # not read: a GPU would be waited for
    # As whole numbers of 16 bits: comparing those takes a third of the time, and the median is one of them.
    planes = (pad(images, side) * scale).round_().to(torch.int16).flatten(0, 1)
    # A GPU has no such cache, and waits for the host to launch the comparisons of each block.
    together = _BLOCK // planes[0].numel() if planes.device.type == "cpu" else len(planes)
    blocks = torch.split(planes, max(1, together))
    return torch.cat([_medians(b, side) for b in blocks]).view_as(images).to(images.dtype) / scale


def _medians(planes: Tensor, side: int) -> Tensor:
    """The median of every window of side * side values, ``[n, h, w]`` to ``[n, h - side + 1, w - side + 1]``.

    The columns of a window are sorted, which windows side by side share, then its rows. What then stands in
    row i and column j (from 1) is the greatest of i * j values, and the least of as many to the other end.
    Among more than half of the window, and one more, neither is the median.
    """
    height, width = (length - side + 1 for length in planes.shape[-2:])
    most = side * side // 2 + 1
    candidates = []
    for i, across in enumerate(_sort_channels([planes.narrow(-2, k, height) for k in range(side)]), 1):
        row = _sort_channels([across.narrow(-1, k, width) for k in range(side)])
        counts = (max(i * j, (side + 1 - i) * (side + 1 - j)) for j in range(1, side + 1))
        candidates += [value for value, count in zip(row, counts, strict=True) if count <= most]
    return _median(candidates)


def _sort_channels(values: Sequence[Tensor]) -> list[Tensor]:
    """Three or five tensors, sorted pixel by pixel."""
    out = list(values)
    for low, high in _NETWORKS[len(out)]:
        _order(out, low, high)
    return out


def _median(values: Sequence[Tensor]) -> Tensor:
    """The median of an odd number of tensors, pixel by pixel.

    The least and the greatest of any k + 2 among 2k + 1 values are never their median: dropping both, then
    taking in the next value, leaves the median in the end.
    """
    start = len(values) // 2 + 2
    held, waiting = list(values[:start]), list(values[start:])
    while len(held) > 1:
        half, last = len(held) // 2, len(held) - 1
        # Pairs first: the least is then in the lower half, the greatest in the upper one.
        pairs = [(i, last - i) for i in range(half)]
        pairs += [(0, i) for i in range(1, len(held) - half)] + [(i, last) for i in range(half, last)]
        for low, high in pairs:
            _order(held, low, high)
        held = held[1:last] + waiting[:1]
        waiting = waiting[1:]
    return held[0]


def _order(values: list[Tensor], low: int, high: int) -> None:
    """Puts the lesser value of each pixel into the one tensor, the greater into the other."""
    a, b = values[low], values[high]
    values[low], values[high] = torch.minimum(a, b), torch.maximum(a, b)
