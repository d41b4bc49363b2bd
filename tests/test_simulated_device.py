"""The simulated device itself: what waits for it, what does not, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from simulated_device import NAME, WAITS, Simulated

VALUES, ROWS = [3.0, 1.0, 2.0], torch.tensor([2, 0])

WAIT = (
    lambda x: x.tolist(),
    lambda x: bool((x > 0).any()),
    lambda x: (x > 1).nonzero(),
    lambda x: x[x > 1],
    lambda x: x.unique(),
    lambda x: torch.equal(x, x),
    lambda x: x.repeat_interleave(x.long()),
    lambda x: x[ROWS],
    Tensor.cpu,
    lambda x: torch.zeros(3).copy_(x),
    lambda x: ROWS.to(x),
    lambda x: x.new_tensor([1.0, 2.0]),
    lambda x: torch.tensor([1.0], device=x.device),
)
DO_NOT = (
    lambda x: x * 2 + torch.tensor(1.0),  # a single number may be of the CPU
    lambda x: torch.where(x > 1, x, 0.0),
    lambda x: x[ROWS.to(x.device, non_blocking=True)],
    lambda x: x.argsort().cumsum(0),
    lambda x: x.new_zeros(()) + torch.arange(3, device=x.device),
)
MIXED = (
    lambda x: x + torch.zeros(3),
    lambda x: torch.stack([x, torch.zeros(3)]),
    lambda x: x.index_select(0, ROWS),
    lambda x: torch.zeros(3)[x.argsort()],
)


def test_what_waits_what_does_not_and_what_mixes_tensors_of_both() -> None:
    with Simulated():
        x = torch.tensor(VALUES, device=NAME)
        for number, read in enumerate(WAIT):
            WAITS.clear()
            read(x)
            assert WAITS.total() == 1, number
        for number, compute in enumerate(DO_NOT):
            WAITS.clear()
            found = compute(x)
            assert not WAITS, number
            assert found.device.type == NAME
            assert found.tolist() == compute(x.cpu()).tolist()
        for mix in MIXED:
            with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
                mix(x)
        with pytest.raises(RuntimeError, match="numpy"):
            x.numpy()


def test_a_large_copy_waits_unless_its_memory_is_pinned_and_stays_as_it_is() -> None:
    with Simulated():
        for numbers, pinned, waits in ((2**14, False, 0), (2**14 + 1, False, 1), (2**20, True, 0)):
            source = torch.ones(numbers)
            source = source.pin_memory() if pinned else source
            WAITS.clear()
            assert source.to(NAME, non_blocking=True).device.type == NAME
            assert WAITS.total() == waits
        there = torch.ones(3).pin_memory().to(NAME, non_blocking=True)  # what is released may be copied
        there.tolist()
        source = torch.ones(3).pin_memory()
        there = source.to(NAME, non_blocking=True)
        source.add_(1)
        with pytest.raises(RuntimeError, match="pinned memory was changed while it was copied"):
            there.tolist()


def test_autocast_is_that_of_cuda() -> None:
    with Simulated(), torch.autocast(NAME, torch.float16):
        x = torch.ones(3, 3, device=NAME)
        half = x @ x
        found = [y.dtype for y in (half, half.softmax(1), half.sum(), half.exp(), half.relu(), half + x)]
        assert found == [torch.float16, *[torch.float32] * 3, torch.float16, torch.float32]
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            torch.nn.functional.binary_cross_entropy(x, x)
