"""Batches."""

from __future__ import annotations

import hypothesis.strategies as st
import torch
from hypothesis import given, settings

from suture.data.batch import Samples


def samples(n: int) -> Samples:
    y = torch.zeros(n, 2)
    y[:, 1] = float("nan")
    return Samples({"image": torch.arange(n).view(n, 1, 1, 1)}, y, tuple(str(i) for i in range(n)))


def test_unknown_is_a_mask_and_never_a_number() -> None:
    batch = samples(3).batch(torch.tensor([2, 0]))
    assert batch.known.tolist() == [[True, False], [True, False]]
    assert batch.y.tolist() == [[0, 0], [0, 0]]
    assert batch.inputs["image"].flatten().tolist() == [2, 0]


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 5))
def test_every_row_once_and_no_lone_last_row(n: int, size: int, seed: int) -> None:
    def rows() -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        return [b.inputs["image"].flatten().tolist() for b in samples(n).batches(size, generator)]

    assert sorted(i for batch in rows() for i in batch) == list(range(n))
    assert rows() == rows()
    if n > 1 and size > 1:
        assert min(len(batch) for batch in rows()) > 1
