"""Batches."""

from __future__ import annotations

from itertools import islice

import hypothesis.strategies as st
import torch
from hypothesis import given

from suture.data.batch import Batch, Samples, endless


def samples(n: int) -> Samples:
    y = torch.zeros(n, 2)
    y[:, 1] = float("nan")
    return Samples({"image": torch.arange(n).view(n, 1, 1, 1)}, y, tuple(str(i) for i in range(n)))


def test_unknown_is_a_mask_and_never_a_number() -> None:
    batch = samples(3).batch(torch.tensor([2, 0]))
    assert batch.known.tolist() == [[True, False], [True, False]]
    assert batch.y.tolist() == [[0, 0], [0, 0]]
    assert batch.inputs["image"].flatten().tolist() == [2, 0]


@given(st.integers(1, 40), st.integers(1, 12))
def test_every_row_once_and_no_lone_last_row(n: int, size: int) -> None:
    rows = [b.inputs["image"].flatten().tolist() for b in samples(n).batches(size)]
    assert [i for batch in rows for i in batch] == list(range(n))
    if n > 1 and size > 1:
        assert min(map(len, rows)) > 1


def drawn(n: int, size: int, seed: int, steps: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [rows.tolist() for rows in islice(endless(n, size, generator), steps)]


@given(st.integers(1, 12), st.integers(1, 30), st.integers(0, 5))
def test_endless_batches_are_full_and_run_across_whole_passes(n: int, size: int, seed: int) -> None:
    """Also where a batch is larger than a pass."""
    batches = drawn(n, size, seed, steps=2 * n)
    assert {len(rows) for rows in batches} == {size}
    row_numbers = [i for rows in batches for i in rows]
    for start in range(0, 2 * n * size, n):  # 2 size passes
        assert sorted(row_numbers[start : start + n]) == list(range(n))
    assert batches == drawn(n, size, seed, steps=2 * n)


def test_every_pass_has_an_order_of_its_own() -> None:
    first, second = drawn(20, 20, 0, steps=2)
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    assert first != drawn(20, 20, 1, steps=1)[0]


def test_nothing_to_draw_from_ends() -> None:
    assert list(endless(0, 4, torch.Generator())) == []


def test_all_of_a_batch_moves() -> None:
    batch = Batch({"image": torch.ones(2, 1)}, torch.ones(2, 3), torch.ones(2, 3) == 1, torch.ones(2, 1))
    moved = batch.to("meta")
    assert moved.weight is not None
    assert moved.weight.shape == (2, 1)
    assert {t.device.type for t in (*moved.inputs.values(), moved.y, moved.known, moved.weight)} == {"meta"}
    assert samples(2).batch(torch.tensor([0])).to("meta").weight is None


def test_rows_keep_all_that_is_known_of_them() -> None:
    whole = Samples(
        {"x": torch.arange(3)}, torch.zeros(3, 1), ("p", "q", "r"), ("a", "b", "c"), ("light", "", "dark")
    )
    part = whole.rows(torch.tensor([2, 0]))
    assert (part.patients, part.names, part.attributes) == (("r", "p"), ("c", "a"), ("dark", "light"))
    assert part.inputs["x"].tolist() == [2, 0]
