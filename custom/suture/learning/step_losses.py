"""The losses of local steps, read from the device a few at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from suture.core.errors import SutureError
from suture.protocol.messages import LARGEST


class NonFiniteLoss(SutureError):
    """The loss of a local step stopped being a number."""


READ_EVERY = 32
"""Steps after which their losses are read from the device."""


class StepLosses:
    """The losses of steps, which wait on the device: to read one, the host waits until a GPU has computed it.

    They are read `READ_EVERY` at a time, by `read`, and at the end of the block that this is the context
    manager of; also where a step has failed, because that may follow from an earlier loss that was no number.
    So up to `READ_EVERY` - 1 steps may follow one whose loss is no number.

    Args:
        fault: the text of the error, from the number of the step (from 1) and its loss.

    Attributes:
        steps: whose losses were read.
    """

    def __init__(self, fault: Callable[[int, float], str]) -> None:
        self._fault = fault
        self._waiting: list[Tensor] = []
        self._total, self.steps = 0.0, 0

    def __enter__(self) -> StepLosses:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or issubclass(kind, Exception):
            self.read()

    def add(self, loss: Tensor) -> None:
        """Keep the loss of the next step, a scalar.

        Raises:
            NonFiniteLoss: see `read`.
        """
        self._waiting.append(loss.detach())
        if len(self._waiting) == READ_EVERY:
            self.read()

    def read(self) -> None:
        """Read the losses that wait.

        Raises:
            NonFiniteLoss: one is no number, or larger than any that is sent; names the first such step.
        """
        values: list[float] = torch.stack(self._waiting).tolist() if self._waiting else []
        self._waiting.clear()
        for value in values:
            self.steps += 1
            if not abs(value) <= LARGEST:
                raise NonFiniteLoss(self._fault(self.steps, value))
            self._total += value

    @property
    def mean(self) -> float | None:
        """The mean of the losses that were read, added up in the order of the steps; None without any."""
        return self._total / self.steps if self.steps else None
