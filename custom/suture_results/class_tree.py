"""Classes as a tree: each below its parents."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from suture.core.ontology import Relations


@dataclass(frozen=True)
class Node:
    """A line of the tree.

    Attributes:
        name: a class.
        parent: below which it stands; empty at the top.
        depth: number of lines above it that lead to it.
        again: whether it stands below another parent already, where its children are.
    """

    name: str
    parent: str
    depth: int
    again: bool = False


def related_classes(names: Iterable[str], relations: Relations) -> list[Node]:
    """Return the lines of `class_tree` without classes that have neither parents nor children."""
    nodes = class_tree(names, relations)
    above = {node.parent for node in nodes if node.depth}
    return [node for node in nodes if node.depth or node.name in above]


def class_tree(names: Iterable[str], relations: Relations) -> list[Node]:
    """Return the lines of classes and all of their ancestors: trees first, then classes without relations."""
    shown = relations.with_ancestors(names)
    below: dict[str, list[str]] = {}
    for name in shown:
        for parent in relations.parents.get(name, ()):
            below.setdefault(parent, []).append(name)
    tops = sorted((n for n in shown if not relations.parents.get(n)), key=lambda n: (n not in below, n))
    nodes, seen = list[Node](), set[str]()
    waiting = [Node(name, "", 0) for name in reversed(tops)]
    while waiting:
        node = waiting.pop()
        nodes.append(Node(node.name, node.parent, node.depth, node.name in seen))
        if node.name not in seen:
            children = sorted(below.get(node.name, ()), reverse=True)
            waiting += [Node(child, node.name, node.depth + 1) for child in children]
        seen.add(node.name)
    return nodes
