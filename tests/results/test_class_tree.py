"""Classes as a tree of lines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from example_run import history_records, metrics_record, run_record, write_run
from suture.core.ontology import Relations
from suture_results.class_tree import Node, class_tree, related_classes
from suture_results.report import write_report


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


@pytest.mark.complete
def test_a_chain_of_thousands_is_no_recursion() -> None:
    parents = {str(i): (str(i - 1),) for i in range(1, 1500)}
    assert class_tree(["1499"], Relations(parents))[-1].depth == 1499


def test_classes_that_nothing_relates_are_left_out() -> None:
    nodes = related_classes(["B", "Alone"], Relations({"B": ("A",)}))
    assert nodes == [Node("A", "", 0), Node("B", "A", 1)]
    assert related_classes(["B", "Alone"], Relations()) == []


def test_a_report_has_the_tree_with_figures_where_the_run_has_an_atlas(tmp_path: Path) -> None:
    parents = {"Consolidation": ["Lung Opacity"], "Edema": ["Lung Opacity"], "Fracture": ["Injury <b>"]}
    plain = write_run(tmp_path, run_record(), history_records(), metrics_record())
    assert "Classes as a tree" not in write_report(plain).read_text()
    run = write_run(tmp_path, run_record() | {"parents": parents}, history_records(), metrics_record())
    text = write_report(run).read_text()
    _, _, section = text.partition('<h2 id="classes-as-a-tree">')
    section = " ".join(section.partition("</section>")[0].split())
    rows = [
        re.sub("<[^>]*>", " ", row).split() for row in section.partition("<tbody>")[2].split("</tr>")[:-1]
    ]
    assert [(" ".join(row[:2]).rstrip(" ,"), next(w for w in row if w[0] == "0")) for row in rows[2:]] == [
        ("Lung Opacity", "0.716"),
        ("Consolidation", "0.743"),
        ("Edema", "0.862"),
    ]
    assert rows[0] == ["Injury", "&lt;b&gt;"]
    assert rows[1][0] == "Fracture"


def test_a_running_run_has_no_tree_yet(tmp_path: Path) -> None:
    record = run_record() | {"parents": {"Edema": ["Lung Opacity"]}, "status": "running"}
    run = write_run(tmp_path, record, history_records(), metrics_record())
    assert "Classes as a tree" not in write_report(run).read_text()
