"""Robust merges: numbers to check by hand, what a liar cannot do, and which methods take one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from rounds import conformant
from suture.core.errors import ConfigError
from suture.federation.plan import check_fits
from suture.methods import METHODS
from suture.methods.base import GlobalModel, Phase, RoundContext
from suture.methods.surgical import SurgicalAggregation
from suture.privacy import robust
from suture.privacy.robust import Merged, RobustMerge, robustly_merged
from suture.protocol.messages import Update, ones
from world import refused

FIRST = RoundContext(1, Phase("main", 1), 0)
KINDS = ("median", "trimmed", "clip", "centered", "krum")
C = ("A", "B")


def model(shared: Sequence[float] = (0.0, 0.0), row: float = 0.0, **more: Any) -> GlobalModel:
    return GlobalModel(C, {"w": torch.tensor(shared)}, {"head.bias": torch.full((2,), row)}, **more)


def update(shared: Sequence[float], labels: tuple[str, ...] = (), row: float = 0.0, **more: Any) -> Update:
    head = {"head.bias": torch.full((len(labels),), row)}
    return Update(1, labels, {"w": torch.tensor(shared)}, head, ones(labels), **more)


def merged(kind: Any, updates: Iterable[Update], liars: int = 1, **more: Any) -> Merged:
    asked = {"previous": model(), "before": None, "radii": {}, **more}
    return robustly_merged(RobustMerge(kind, liars), updates=updates, **asked)


def after(kind: Any, updates: Iterable[Update], liars: int = 1, **more: Any) -> GlobalModel:
    found = merged(kind, updates, liars, **more)
    return SurgicalAggregation().aggregate(more.get("previous", model()), found.updates, FIRST)


def shared(kind: Any, values: Sequence[Sequence[float]], liars: int = 1, **more: Any) -> list[float]:
    found: list[float] = after(kind, [update(one) for one in values], liars, **more).shared["w"].tolist()
    return [round(value, 5) for value in found]


# By hand


def test_the_median_is_that_of_each_number_and_the_trimmed_mean_leaves_out_both_ends() -> None:
    assert shared("median", [[1, 30], [2, 10], [300, 20]]) == [2, 20]
    assert shared("median", [[1, 30], [2, 10], [300, 20], [4, 22]]) == [3, 21]
    five = [[1, 0], [2, 0], [3, 0], [4, 0], [-99, 0]]
    assert shared("trimmed", five) == [2, 0]
    assert shared("trimmed", [*five, [50, 0], [60, 0]], 2) == [3, 0]


def test_clip_shortens_what_is_longer_than_the_median_norm() -> None:
    # Norms 5, 5 and 50 from x = (0, 0): the third is a tenth of itself.
    assert shared("clip", [[3, 4], [5, 0], [0, -50]]) == [round(8 / 3, 5), round(-1 / 3, 5)]
    assert merged("clip", [update([3, 4]), update([5, 0]), update([0, -50])]).kept == [1, 1, 0.1]


def test_the_radius_at_most_doubles_and_at_least_halves_from_round_to_round() -> None:
    three = [update([4, 0]), update([4, 0]), update([4, 0])]
    assert merged("clip", three, radii={"": 1.0}).radii[""] == 2
    assert merged("clip", three, radii={"": 100.0}).radii[""] == 50
    assert merged("clip", three, radii={"": 3.0}).radii[""] == 4
    assert merged("clip", three, radii={}).radii[""] == 4


def test_centered_clipping_begins_at_the_last_change() -> None:
    # x = (1, 0) and v = (1, 0): the centre is (2, 0), from which the norms are 1, 1 and 8.
    found = shared("centered", [[3, 0], [2, 1], [2, -8]], previous=model([1.0, 0.0]), before=model())
    assert found == [round(2 + 1 / 3, 5), 0]


def test_krum_takes_the_mean_of_those_near_one_another() -> None:
    sent = [[1, 0], [2, 0], [3, 0], [2, 1], [50, 0]]
    assert shared("krum", sent) == [2, 0.25]
    assert merged("krum", [update(one) for one in sent]).kept == [1, 1, 1, 1, 0]
    # n - f - 2 = 2 nearest: squares of 10, 5, 4, 4 and 8. By the one nearest, or the three, the last one is
    # the farthest from the others (1, 1, 0, 0, 4; 19, 9, 8, 8, 24), and not the first.
    assert merged("krum", [update([x, 0]) for x in (0, 1, 3, 3, 5)]).kept == [0, 1, 1, 1, 1]


def test_every_site_counts_once_whatever_weight_it_announces() -> None:
    sent = [update([1, 0]), update([2, 0]), update([9, 0], weight=1e9), update([7, 7], weight=0.0)]
    assert after("median", sent).shared["w"].tolist() == [2, 0]
    assert merged("clip", sent).kept[3] is None


def test_a_row_is_merged_over_its_owners_and_by_the_plain_mean_where_they_are_too_few() -> None:
    sent = [update([0, 0], ("A", "B"), 1.0), update([0, 0], ("B", "A"), 2.0), update([0, 0], ("A",), 99.0)]
    assert merged("median", sent).plain == ("B",)
    assert after("median", sent).head["head.bias"].tolist() == [2, 1.5]
    # A class that nobody sends keeps its row.
    alone = [update([0, 0], ("A",), 1.0)] * 3
    assert after("clip", alone, previous=model(row=7.0)).head["head.bias"].tolist() == [1, 7]


def test_with_partial_loss_the_other_sites_still_return_the_row_as_it_was() -> None:
    sent = [update([0, 0], ("A",), row) for row in (1.0, 2.0, 99.0)] + [update([0, 0], ("B",), 8.0)]
    found = merged("median", sent)
    rows = METHODS["partial"]().aggregate(model(), found.updates, FIRST).head["head.bias"].tolist()
    assert rows == [1.5, 2]  # (3 * 2 + 0) / 4 and (8 + 3 * 0) / 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_variance_of_batch_norm_stays_between_those_of_the_sites(kind: str) -> None:
    """Centered clipping begins at 2x - b, which may lie below 0."""
    was = model([1.0, 1.0], buffers=frozenset({"w"}))
    values = [[1e-3, 3], [2e-3, 1], [3e-3, 2], [2e-3, 1e9], [1e-3, 2]]
    found = shared(kind, values, previous=was, before=model([9.0, 9.0]))
    assert 0.001 <= found[0] <= 0.003
    assert 1 <= found[1] <= 3


def some(seed: int, sites: int, spread: float = 1.0) -> list[Update]:
    g = torch.Generator().manual_seed(seed)
    return [
        Update(
            1,
            C,
            {"w": spread * torch.randn(3, 5, generator=g), "v": spread * torch.randn(4, generator=g)},
            {"head.weight": spread * torch.randn(2, 3, generator=g)},
            ones(C),
        )
        for _ in range(sites)
    ]


def zeros() -> GlobalModel:
    return GlobalModel(C, {"w": torch.zeros(3, 5), "v": torch.zeros(4)}, {"head.weight": torch.zeros(2, 3)})


def tensors(found: GlobalModel | Update) -> dict[str, Tensor]:
    return {**found.shared, **found.head}


@given(
    st.sampled_from(["median", "trimmed"]), st.integers(1, 2), st.integers(0, 2**31), st.floats(-1e30, 1e30)
)
def test_liars_move_no_number_beyond_those_of_the_honest(
    kind: str, liars: int, seed: int, lie: float
) -> None:
    honest, lying = some(seed, liars + 1), some(seed + 1, liars)
    for one in lying:  # together, in the same direction
        for tensor in tensors(one).values():
            tensor.fill_(lie)
    found = tensors(after(kind, [*lying, *honest], liars, previous=zeros()))
    for name, value in found.items():
        sent = torch.stack([tensors(one)[name] for one in honest])
        assert bool((value >= sent.amin(0) - 1e-6).all() and (value <= sent.amax(0) + 1e-6).all())


@given(st.sampled_from(["clip", "centered"]), st.integers(0, 2**31), st.floats(0, 1e15), st.integers(1, 2))
def test_liars_move_a_clipped_mean_by_their_share_of_the_radius(
    kind: str, seed: int, lie: float, liars: int
) -> None:
    honest = some(seed, 2 * liars + 2)
    lying = some(seed, liars, lie)
    largest = max(math.hypot(*(float(t.norm()) for t in one.shared.values())) for one in honest)
    found = merged(kind, [*honest, *lying], liars, previous=zeros())
    assert found.radii[""] <= largest * (1 + 1e-9)
    length = math.hypot(*(float(t.norm()) for t in next(iter(found.updates)).shared.values()))
    assert length <= largest * (1 + 1e-6)


@given(st.integers(0, 2**31), st.floats(30, 1e15), st.integers(1, 2))
def test_krum_leaves_out_liars_who_are_far_even_if_they_agree(seed: int, lie: float, liars: int) -> None:
    honest = some(seed, liars + 3)
    groups = {name: getattr(honest[0], name) for name in ("shared", "head")}
    far = replace(honest[0], **{g: {n: t + lie for n, t in of.items()} for g, of in groups.items()})
    found = merged("krum", [*honest, *[far] * liars], liars, previous=zeros())
    assert list(found.kept) == [1.0] * len(honest) + [0.0] * liars


@given(st.sampled_from(KINDS), st.integers(0, 2**31), st.integers(8, 200))
def test_the_memory_changes_no_number(kind: str, seed: int, memory: int) -> None:
    updates = some(seed, 5)
    before = replace(zeros(), shared={"w": torch.ones(3, 5), "v": torch.ones(4)})
    whole = tensors(after(kind, updates, previous=zeros(), before=before))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(robust, "MEMORY", memory)
        parts = tensors(after(kind, updates, previous=zeros(), before=before))
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, rtol=1e-6, atol=1e-6)


class Read:
    """Updates that are made as they are read, and how many numbers of theirs are held at a time at most."""

    def __init__(self, sites: int, numbers: int) -> None:
        self.sites, self.numbers, self.walks = sites, numbers, 0

    def __iter__(self) -> Iterator[Update]:
        self.walks += 1
        return (update([float(site)] * self.numbers) for site in range(self.sites))


@pytest.mark.parametrize(
    ("memory", "walks"), [(8 * 5 * 100, 1 + 1 + 1), (8 * 5 * 25, 1 + 4 + 1), (1, 1 + 100 + 2)]
)
def test_the_updates_are_read_once_for_each_part_that_fits_the_memory(
    memory: int, walks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(robust, "MEMORY", memory)
    updates = Read(5, 100)
    found = merged("median", updates, previous=model([0.0] * 100))
    assert next(iter(found.updates)).shared["w"].tolist() == [2.0] * 100
    assert updates.walks == walks  # the first looks at their weights, the last are for the rows


# Which methods

NONE = {"central", "central_full", "individual", "afl", "metafl", "pmfl", "fl", "creff", "fedalign", "fedmlp"}
"""Methods that pool or keep their models, or have a mean of their own."""


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_method_takes_a_robust_merge_which_of_equal_updates_is_the_mean_or_says_why_not(name: str) -> None:
    method = conformant(name)
    check_fits(None, method)
    if name in NONE:
        with refused("surgical", by=ConfigError):
            check_fits(RobustMerge(), method)
        return
    check_fits(RobustMerge(), method)
    before, one = zeros(), some(1, 1)[0]
    own = one if method.sharing.personal == "nothing" else replace(one, head={})
    mean = method.aggregate(before, [own] * 5, FIRST)
    for kind in KINDS:
        found = robustly_merged(RobustMerge(kind), before, None, [own] * 5, {})  # type: ignore[arg-type]
        for key, value in tensors(method.aggregate(before, found.updates, FIRST)).items():
            torch.testing.assert_close(value, tensors(mean)[key], rtol=1e-6, atol=1e-6)
