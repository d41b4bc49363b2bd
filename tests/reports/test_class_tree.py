"""Classes as a tree of lines."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from suture.core.relations import Relations
from suture.reports.class_tree import Node, class_tree


def test_trees_come_first_and_a_class_with_two_parents_shows_its_children_once() -> None:
    parents = {"B": ("A",), "C": ("A", "X"), "D": ("C",)}
    assert class_tree(["D", "B", "Alone"], Relations(parents)) == [
        Node("A", "", 0),
        Node("B", "A", 1),
        Node("C", "A", 1),
        Node("D", "C", 2),
        Node("X", "", 0),
        Node("C", "X", 1, again=True),
        Node("Alone", "", 0),
    ]


@given(st.lists(st.sets(st.integers(0, 8), max_size=3), min_size=1, max_size=9), st.sets(st.integers(0, 8)))
def test_every_class_and_ancestor_is_a_line_below_each_of_its_parents(
    above: list[set[int]], chosen: set[int]
) -> None:
    parents = {
        str(i): tuple(str(p) for p in sorted(some) if p < i)
        for i, some in enumerate(above)
        if min(some | {i}) < i
    }
    relations = Relations(parents)
    nodes = class_tree(map(str, chosen), relations)
    shown = relations.with_ancestors(map(str, chosen))
    lines = {(node.name, node.parent) for node in nodes}
    assert lines == {(name, parent) for name in shown for parent in parents.get(name) or ("",)}
    assert len(lines) == len(nodes)
    assert {node.name for node in nodes if not node.again} == {*shown}
    for node, before in zip(nodes[1:], nodes, strict=False):
        assert node.depth <= before.depth + 1


def test_a_chain_of_thousands_is_no_recursion() -> None:
    parents = {str(i): (str(i - 1),) for i in range(1, 3000)}
    assert class_tree(["2999"], Relations(parents))[-1].depth == 2999
