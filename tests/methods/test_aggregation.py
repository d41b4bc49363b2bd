"""The weighted mean: the papers' numbers, and what must hold for any update."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from suture.methods import averaging
from suture.methods.averaging import WeightedMean
from suture.methods.base import GlobalModel, Phase, RoundContext
from suture.methods.partial import PartialLoss
from suture.protocol.messages import Update, ones

C = ("A", "B", "C")
FIRST = RoundContext(1, Phase("main", 1), 0)


def update(labels: tuple[str, ...], kernel: list[list[float]], bias: list[float], shared: float) -> Update:
    """An update whose head is a paper's kernel (inputs x classes) turned into rows."""
    head = {"weight": torch.tensor(kernel).T.contiguous(), "bias": torch.tensor(bias)}
    return Update(1, labels, {"w": torch.tensor([shared])}, head, ones(labels))


def start() -> WeightedMean:
    head = {"weight": torch.full((3, 3), 7.0), "bias": torch.full((3,), 7.0)}
    return WeightedMean(C, {"w": torch.tensor([0.0])}, head)


ONE = update(("A", "B"), [[1, 2], [3, 4], [0, 1]], [0.1, 0.2], 10)
TWO = update(("B", "C"), [[5, 6], [7, 8], [2, 3]], [0.4, 0.8], 30)


def test_surgical_example_of_two_clients() -> None:
    mean = start()
    mean.add(ONE)
    mean.add(TWO)
    expected = torch.tensor([[1, 3.5, 6], [3, 5.5, 8], [0, 1.5, 3]])
    torch.testing.assert_close(mean.head()["weight"].T, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(mean.head()["bias"], torch.tensor([0.1, 0.3, 0.8]), rtol=0, atol=1e-6)
    assert mean.shared()["w"].item() == 20.0  # 1/K, whatever the sites' sizes


def test_with_partial_loss_the_sites_that_do_not_know_a_class_return_its_row_as_it_was() -> None:
    previous = GlobalModel(
        C, {"w": torch.tensor([0.0])}, {k: torch.full_like(v, 7) for k, v in start().head().items()}
    )
    after = PartialLoss().aggregate(previous, [ONE, TWO, replace(TWO, labels=("A", "C"))], FIRST)
    a, b, c = after.head["bias"].tolist()  # A: .1, .4 and 7; B: .2, .4 and 7; C: .8, .8 and 7
    assert [round(x, 5) for x in (a, b, c)] == [2.5, 2.53333, 2.86667]


def test_batch_norm_of_two_sites_is_averaged_like_any_tensor() -> None:
    mean = WeightedMean(("A",), {"bn": torch.zeros(2)}, {})
    for values in ([1.0, 2.0], [5.0, 6.0]):
        mean.add(Update(1, (), {"bn": torch.tensor(values)}, {}, ones(())))
    assert mean.shared()["bn"].tolist() == [3.0, 4.0]


def test_class_weights_decide_row_by_row() -> None:
    """FedLSM's proxies: q1=[30,10,0], q2=[10,30,40]."""
    head1 = {"weight": torch.tensor([[1.0, 0], [2, 2], [9, 9]])}
    head2 = {"weight": torch.tensor([[5.0, 4], [6, 6], [3, 1]])}
    mean = WeightedMean(C, {}, {"weight": torch.zeros(3, 2)})
    mean.add(Update(1, C, {}, head1, torch.tensor([30.0, 10, 0], dtype=torch.float64)))
    mean.add(Update(1, C, {}, head2, torch.tensor([10.0, 30, 40], dtype=torch.float64)))
    assert mean.head()["weight"].tolist() == [[2, 1], [5, 5], [3, 1]]


def test_class_nobody_sent_keeps_its_row_and_nothing_sent_keeps_everything() -> None:
    mean = start()
    assert mean.shared()["w"].item() == 0.0
    mean.add(ONE)
    assert mean.head()["weight"][2].tolist() == [7.0, 7.0, 7.0]
    assert bool(torch.isfinite(mean.head()["weight"]).all())


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=8))
def test_single_owner_row_is_unchanged_bit_by_bit(values: list[float]) -> None:
    row = torch.tensor([values])
    mean = WeightedMean(("A", "B"), {}, {"weight": torch.zeros(2, len(values))})
    mean.add(Update(1, ("B",), {}, {"weight": row}, ones(("B",))))
    mean.add(Update(1, ("A",), {}, {"weight": row * 2}, ones(("A",))))
    assert torch.equal(mean.head()["weight"][1], row[0])


@given(st.integers(1, 6), st.integers(0, 2**31))
def test_mean_lies_between_the_smallest_and_the_largest(sites: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(4, generator=generator) for _ in range(sites)]
    mean = WeightedMean((), {"w": torch.zeros(4)}, {})
    for tensor in tensors:
        mean.add(Update(1, (), {"w": tensor}, {}, ones(())))
    stacked, got = torch.stack(tensors), mean.shared()["w"]
    assert bool((got >= stacked.min(0).values - 1e-6).all() and (got <= stacked.max(0).values + 1e-6).all())


@given(
    st.lists(st.floats(0, 100, width=32), min_size=1, max_size=7),
    st.integers(0, 300),
    st.integers(1, 9),
    st.integers(0, 2**31),
)
def test_how_many_updates_wait_to_be_added_together_changes_no_bit(
    weights: list[float], waiting: int, read_after: int, seed: int
) -> None:
    """Nor does a mean that was read before the last of them came, or twice."""
    generator = torch.Generator().manual_seed(seed)
    previous = {"w": torch.randn(3, 5, generator=generator), "none": torch.zeros(0), "one": torch.zeros(())}
    sent = [{k: torch.randn(t.shape, generator=generator) for k, t in previous.items()} for _ in weights]
    sums = {k: torch.zeros(t.shape, dtype=torch.float64) for k, t in previous.items()}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(averaging, "_WAITING", waiting)
        patched.setattr(averaging, "_BLOCK", 8)
        mean = WeightedMean((), previous, {})
        for number, (weight, shared) in enumerate(zip(weights, sent, strict=True), 1):
            mean.add(Update(1, (), shared, {}, ones(()), weight=weight))
            for name, total in sums.items():
                for block, part in zip(total.view(-1).split(8), shared[name].view(-1).split(8), strict=True):
                    block.add_(part.double(), alpha=weight)
            if number == read_after:
                mean.shared()
        found = [mean.shared() for _ in range(2)]
    total_weight = sum(weights)
    for name, total in sums.items():
        expected = (total / total_weight).float() if total_weight > 0 else previous[name]
        assert all(torch.equal(one[name], expected) for one in found)
