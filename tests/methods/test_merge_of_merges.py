"""Means of sub-trees, with their weights for each class, have the mean of all sites as their mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hypothesis_profiles import examples
from suture.methods import METHODS
from suture.methods.averaging import WeightedMean
from suture.methods.base import GlobalModel, Phase, RoundContext, with_channels
from suture.protocol.messages import Labels, Update, ones

CLASSES: Labels = ("Edema", "Hernia", "Mass", "Nodule", "Pneumonia")
WIDTH = 3
WEIGHTS = st.sampled_from([0.0, 0.0, 0.25, 1.0, 3.0, 1e6])


@dataclass(frozen=True)
class Tree:
    """Sites under a relay: either updates, or relays."""

    sites: Sequence[Update | Tree]


@st.composite
def updates(draw: st.DrawFn) -> Update:
    """A site that sends the rows of some classes, each with a weight of its own, perhaps 0 (no owner)."""
    labels = tuple(draw(st.lists(st.sampled_from(CLASSES), unique=True)))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scale = draw(st.sampled_from([1e-6, 1.0, 1e6]))
    rows = scale * torch.randn(len(labels), WIDTH, generator=g, dtype=torch.float64)
    weights = torch.tensor(draw(st.lists(WEIGHTS, min_size=len(labels), max_size=len(labels)))).double()
    shared = {"w": scale * torch.randn(WIDTH, generator=g, dtype=torch.float64)}
    return Update(1, labels, shared, {"head": rows}, weights, draw(WEIGHTS))


TREES = st.recursive(
    updates(), lambda inner: st.builds(Tree, st.lists(inner, min_size=1, max_size=4)), max_leaves=12
)


def leaves(node: Update | Tree) -> list[Update]:
    return [node] if isinstance(node, Update) else [one for part in node.sites for one in leaves(part)]


SHARED = {"w": torch.full((WIDTH,), 7.0, dtype=torch.float64)}


def mean_of(found: Sequence[Update], shared: Mapping[str, Tensor] = SHARED) -> WeightedMean:
    head = {"head": torch.full((len(CLASSES), WIDTH), 9.0, dtype=torch.float64)}
    mean = WeightedMean(CLASSES, shared, head)
    for one in found:
        mean.add(one)
    return mean


def merged(node: Update | Tree, shared: Mapping[str, Tensor] = SHARED) -> Update:
    """What a relay passes on: its mean, and the sums of its weights; of no class that no site of it has."""
    if isinstance(node, Update):
        return node
    below = [merged(part, shared) for part in node.sites]
    mean = mean_of(below, shared)
    held = {name for one in below for name in one.labels}
    where = [i for i, name in enumerate(CLASSES) if name in held]
    labels = tuple(CLASSES[i] for i in where)
    return Update(
        1, labels, mean.shared(), {"head": mean.head()["head"][where]}, mean.class_weights[where], mean.weight
    )


@pytest.mark.complete
@examples(300)
@given(st.lists(TREES, min_size=1, max_size=4))
def test_a_merge_of_merges_is_the_merge(nodes: list[Update | Tree]) -> None:
    sites = [one for node in nodes for one in leaves(node)]
    flat, tree = mean_of(sites), mean_of([merged(node) for node in nodes])
    assert tree.weight == flat.weight
    assert torch.equal(tree.class_weights, flat.class_weights)
    size = max(
        float(t.abs().max()) for one in sites for t in (*one.shared.values(), *one.head.values()) if t.numel()
    )
    for one, other in ((flat.shared(), tree.shared()), (flat.head(), tree.head())):
        for name, tensor in one.items():
            assert float((tensor - other[name]).abs().max()) <= 1e-12 * max(size, 1.0)


def test_by_hand_with_a_class_that_only_one_sub_tree_has() -> None:
    def site(label: str, value: float, weight: float) -> Update:
        row = {"head": torch.full((1, WIDTH), value, dtype=torch.float64)}
        shared = {"w": torch.full((WIDTH,), value, dtype=torch.float64)}
        return Update(1, (label,), shared, row, torch.tensor([weight], dtype=torch.float64), weight)

    left = Tree([site("Mass", 1.0, 1.0), site("Mass", 4.0, 2.0), site("Edema", 6.0, 0.0)])
    right = Tree([site("Mass", 9.0, 3.0), site("Nodule", 5.0, 2.0)])
    assert merged(left).class_weights.tolist() == [0.0, 3.0]  # Edema's row has no owner
    tree = mean_of([merged(left), merged(right)])
    rows = dict(zip(CLASSES, tree.head()["head"][:, 0].tolist(), strict=True))
    # Mass: (1 + 8 + 27) / 6; Nodule of one sub-tree: 5; the others keep the row that they had.
    assert rows == {"Edema": 9.0, "Hernia": 9.0, "Mass": 6.0, "Nodule": 5.0, "Pneumonia": 9.0}
    assert tree.shared()["w"][0].item() == (1 + 8 + 27 + 10) / 8


OF_CLASS_TENSORS = {"fedalign", "fedmlp", "creff", "afl"}
"""Their means, or sums, of tensors of classes have weights of their own, which `merged` does not pass on."""


@pytest.mark.parametrize("name", sorted(METHODS.keys() - OF_CLASS_TENSORS))
def test_the_server_of_a_method_makes_the_same_model_of_branches_as_of_sites(name: str) -> None:
    method = METHODS[name]()
    head = {"head": torch.full((5, WIDTH), 9.0, dtype=torch.float64)}
    begun = with_channels(GlobalModel(CLASSES, SHARED, head), method)
    exchanged, _ = method.sharing.parts(SHARED, begun.head)

    def site(labels: Labels, weight: float) -> Update:
        g = torch.Generator().manual_seed(int(weight))
        rows = torch.randn(len(labels), WIDTH, generator=g, dtype=torch.float64)
        sent = {key: torch.randn(t.shape, generator=g, dtype=t.dtype) for key, t in exchanged.items()}
        return Update(1, labels, sent, {"head": rows}, weight * ones(labels), weight)

    one, two = Tree([site(CLASSES[:2], 1), site(CLASSES[1:4], 3)]), Tree([site(CLASSES[:3], 2)])
    ctx = RoundContext(1, Phase("main", 1), 0)
    flat = method.aggregate(begun, leaves(Tree([one, two])), ctx)
    tree = method.aggregate(begun, [merged(one, exchanged), merged(two, exchanged)], ctx)
    assert not torch.equal(flat.shared["w"], begun.shared["w"])
    for group in ("shared", "head", "channels"):
        found, other = getattr(flat, group), getattr(tree, group)
        for key, tensor in found.items():
            torch.testing.assert_close(other[key], tensor, rtol=0, atol=1e-12)


def test_a_mean_of_means_without_the_weights_is_another_number() -> None:
    """Why a relay has to pass its weights on: the sites of a large sub-tree would count less."""
    one, three = (torch.full((WIDTH,), v, dtype=torch.float64) for v in (0.0, 1.0))
    none = torch.zeros(0, dtype=torch.float64)
    rows = {"head": torch.zeros(0, WIDTH, dtype=torch.float64)}
    sites = [Update(1, (), {"w": w}, rows, none, 1.0) for w in (one, one, one, three)]
    flat = mean_of(sites).shared()["w"][0].item()
    unweighted = torch.stack([mean_of(sites[:3]).shared()["w"], sites[3].shared["w"]]).mean(0)[0].item()
    assert (flat, unweighted) == (0.25, 0.5)
