"""How many images are computed at a time where nothing is trained."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from suture.core.devices import out_of_memory

_MOST = 256
"""Images, or documents, of a batch of an evaluation."""

_PIXELS = 2**20
"""Of a batch on the CPU: 256 images of 64 px. The largest activation of a DenseNet121 or a ResNet-18 has 16
values a pixel, 64 MiB in all; larger batches are not faster (`benchmarks/parts/backbones.py`)."""

_Result = TypeVar("_Result")

log = logging.getLogger(__name__)


def evaluation_batch(inputs: Mapping[str, Tensor], device: torch.device | str, most: int = _MOST) -> int:
    """Return how many inputs are computed at a time: `most`, and on the CPU no more than `_PIXELS` of images.

    It depends on nothing that is measured, because the last bits of a result depend on the batch.

    Args:
        inputs: as of a batch; images ``[n, channels, h, w]``.
    """
    image = inputs.get("image")
    if image is None or torch.device(device).type != "cpu":
        return most
    return max(1, min(most, _PIXELS // image.shape[2:].numel()))


def that_fits(compute: Callable[[int], _Result], size: int) -> _Result:
    """Return the result in batches of `size`, or of half as long as the memory of the device is too small.

    Raises:
        Exception: of `compute`; that memory is full, where it is too small even for batches of one.
    """
    while True:
        try:
            return compute(size)
        except (RuntimeError, MemoryError, OSError) as error:
            if size <= 1 or not out_of_memory(error):
                raise
        # Outside the handler, because its traceback holds the tensors that filled the memory.
        size //= 2
        log.warning("the memory of the device is full; computing in batches of %d", size)
