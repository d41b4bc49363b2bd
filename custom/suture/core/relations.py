"""What a label says about other classes: parents, exhaustive groups and exclusive groups.

An image that shows a class shows its parents too: a consolidation is a lung opacity. `implied` closes the
known labels of each image under these rules, and under no others:

- a present class makes all of its ancestors present, an absent one all of its descendants absent;
- in an exhaustive group of children, which the site annotates all of: if all are absent, so is the parent;
  if the parent is present and all but one are absent, the last one is present;
- a present class of an exclusive group makes the others absent;
- a class such as no finding excludes all others that the site annotates, but for stated exceptions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from suture.core.errors import LabelError

Settle = Literal["refuse", "child wins", "leave out"]
"""What becomes of contradictory labels of an image: they are faults, the labels of children replace those of
parents, or all labels of the image become unknown."""


_MOST_RELATED, _MOST_PAIRS = 10_000, 2_000_000
"""Related classes, as many as a federation may have; and pairs of a class and one above it, by each parent: a
chain of 2,000 classes has as many."""


@dataclass(frozen=True)
class Relations:
    """How classes include and exclude each other.

    Attributes:
        parents: the direct parents of a class.
        exhaustive: a parent and some of its children, one of which is present wherever the parent is.
        exclusive: classes of which an image shows at most one.
        nothing: classes that mean the absence of all others of a site's own list, each with the classes that
            it says nothing of, nor of what is below these. Not the reverse: a list need not be complete.

    Raises:
        LabelError: classes are their own ancestors, or they or their ancestors are too many; a group has a
            class twice or is not of the parent's children; or a class could never be present.
    """

    parents: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    exhaustive: tuple[tuple[str, tuple[str, ...]], ...] = ()
    exclusive: tuple[tuple[str, ...], ...] = ()
    nothing: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            order = self.order
        except CycleError as error:
            path = " < ".join(map(repr, reversed(error.args[1])))
            raise LabelError(
                f"{path}: a class cannot be its own ancestor; remove one of these parents"
            ) from None
        if len(order) > _MOST_RELATED:
            raise LabelError(f"{len(order):,} classes are related; leave out all but {_MOST_RELATED:,}")
        _ = self.ancestors
        for group in (*(children for _, children in self.exhaustive), *self.exclusive):
            if len({*group}) < max(len(group), 1):
                raise LabelError(f"the group {', '.join(map(repr, group))} is empty or has a class twice")
        for parent, children in self.exhaustive:
            for child in children:
                if parent not in self.parents.get(child, ()):
                    raise LabelError(
                        f"{child!r} is in an exhaustive group of {parent!r}, which is not among its parents; "
                        "add the parent, or remove it from the group"
                    )
        self._check_satisfiable(order)

    def _check_satisfiable(self, order: Sequence[str]) -> None:
        """Refuse a class two of whose ancestors, itself included, exclude each other."""
        groups: dict[str, list[int]] = {}
        for number, group in enumerate(self.exclusive):
            for name in group:
                groups.setdefault(name, []).append(number)
        held: dict[str, dict[int, str]] = {}
        pairs = 0
        for name in order:
            pairs = _counted(pairs, [held[parent] for parent in self.parents.get(name, ())], name)
            found = held[name] = dict.fromkeys(groups.get(name, ()), name)
            for number, other in (pair for p in self.parents.get(name, ()) for pair in held[p].items()):
                if found.setdefault(number, other) != other:
                    raise LabelError(
                        f"{name!r} could never be present: {other!r} and {found[number]!r}, which both "
                        "include it, exclude each other; correct the parents or the exclusive group"
                    )

    @cached_property
    def order(self) -> tuple[str, ...]:
        """All classes that are related, parents before children."""
        related = {name for _, group in self.exhaustive for name in group}.union(*self.exclusive)
        graph = {name: self.parents.get(name, ()) for name in sorted(related | {*self.parents})}
        return tuple(TopologicalSorter(graph).static_order())

    @cached_property
    def ancestors(self) -> dict[str, frozenset[str]]:
        """All classes above each related class."""
        above: dict[str, frozenset[str]] = {}
        pairs = 0
        for name in self.order:
            parents = self.parents.get(name, ())
            pairs = _counted(pairs, [above[parent] for parent in parents], name)
            above[name] = frozenset(parents).union(*(above[parent] for parent in parents))
        return above

    def with_ancestors(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the names and all of their ancestors: parents before children, unrelated ones at the end."""
        found = set(names)
        for name in reversed(self.order):
            if name in found:
                found.update(self.parents.get(name, ()))
        related = tuple(name for name in self.order if name in found)
        return (*related, *sorted(found.difference(related)))


def _counted(pairs: int, above: Iterable[Collection[object]], name: str) -> int:
    """Add what a class takes over from its parents, before it does."""
    pairs += sum(len(one) + 1 for one in above)
    if pairs > _MOST_PAIRS:
        raise LabelError(
            f"{name!r} and other classes have more than {_MOST_PAIRS:,} ancestors in all; remove parents"
        )
    return pairs


@dataclass(frozen=True)
class Closed:
    """Labels with what they imply.

    Attributes:
        labels: [n, c] as float32; rows with a contradiction as they were, or unknown with "leave out".
        contradictions: the rows that no choice has settled, by what contradicts each other in them.
        settled: the rows that "child wins" or "leave out" has settled.
    """

    labels: NDArray[np.float32]
    contradictions: Mapping[str, tuple[int, ...]]
    settled: tuple[int, ...] = ()


def implied(
    labels: NDArray[np.float32],
    names: Sequence[str],
    relations: Relations,
    own: Collection[str] | None = None,
    settle: Settle = "refuse",
) -> Closed:
    """Return the labels of images with all that the rules of this module imply.

    What is known stays known. Presence is stated of any class of `names`; absence only of those that the site
    annotates, and of the parent of an exhaustive group that it annotates. Without exhaustive groups this is
    all that holds in every way to fill in the unknown labels; with them it is part of that, because to find
    all would take exponential time.

    Args:
        labels: [n, c]: 1 present, 0 absent, NaN unknown.
        names: the c classes.
        own: those that the site annotates; by default all of `names`.
        settle: what becomes of contradictions. "child wins" settles those of parents and children, not those
            of exclusive groups.
    """
    annotated = {*(names if own is None else own)}
    rules = _Rules(relations, names, annotated)
    present, absent = rules.close(*rules.stated(labels))
    torn: NDArray[np.bool_] = np.any(present & absent, axis=0)
    settled = np.zeros_like(torn)
    if settle == "child wins" and torn.any():
        present[:, torn], absent[:, torn] = rules.close(*rules.children_win(*rules.stated(labels[torn])))
        settled = torn & ~np.any(present & absent, axis=0)
    torn = torn & ~settled
    contradictions = _contradictions(labels, names, (present & absent)[rules.columns], torn)

    may_be_absent = np.array([name in annotated or name in rules.whole for name in names], dtype=np.bool_)
    closed = np.full_like(labels, np.nan)
    closed[absent[rules.columns].T & (may_be_absent | (labels == 0))] = 0
    closed[present[rules.columns].T] = 1
    closed[torn] = np.nan if settle == "leave out" else labels[torn]
    if settle == "leave out":
        return Closed(closed, {}, tuple(np.flatnonzero(torn).tolist()))
    return Closed(closed, contradictions, tuple(np.flatnonzero(settled).tolist()))


class _Rules:
    """The rules on arrays [classes, images], whose rows are the names and their ancestors, parents first.

    Attributes:
        columns: the row of each name.
        whole: the parents of the exhaustive groups that the site annotates.
    """

    def __init__(self, relations: Relations, names: Sequence[str], annotated: Collection[str]) -> None:
        order = relations.with_ancestors(names)
        row = {name: i for i, name in enumerate(order)}
        self.columns = [row[name] for name in names]
        self.edges = [
            (i, row[parent]) for name, i in row.items() for parent in relations.parents.get(name, ())
        ]
        groups = [(parent, group) for parent, group in relations.exhaustive if {*group} <= {*annotated}]
        self.whole = {parent for parent, _ in groups}
        self.exhaustive = [(row[parent], [row[name] for name in group]) for parent, group in groups]
        exclusive = ([row[name] for name in group if name in row] for group in relations.exclusive)
        self.exclusive = [group for group in exclusive if len(group) > 1]
        self.nothing = [
            (row[name], [row[other] for other in sorted(annotated) if not _excepted(relations, name, other)])
            for name in relations.nothing
            if name in annotated
        ]
        self.size = len(order)

    def stated(self, labels: NDArray[np.float32]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return where labels [n, c] are present, and where absent."""
        present, absent = np.zeros((2, self.size, len(labels)), dtype=np.bool_)
        present[self.columns], absent[self.columns] = (labels == 1).T, (labels == 0).T
        return present, absent

    def close(
        self, present: NDArray[np.bool_], absent: NDArray[np.bool_]
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Apply the rules, in place, until they say nothing new."""
        before, known = -1, 0
        while known != before:
            for child, parent in reversed(self.edges):
                present[parent] |= present[child]
            for child, parent in self.edges:
                absent[child] |= absent[parent]
            for parent, children in self.exhaustive:
                gone = absent[children].sum(axis=0)
                absent[parent] |= gone == len(children)
                last = present[parent] & (gone == len(children) - 1)
                present[children] |= last & ~absent[children]
            for group in self.exclusive:
                others = present[group].sum(axis=0) - present[group]
                absent[group] |= others > 0
            for nothing, all_others in self.nothing:
                absent[nothing] |= present[all_others].any(axis=0)
                absent[all_others] |= present[nothing]
            before, known = known, int(present.sum()) + int(absent.sum())
        return present, absent

    def children_win(
        self, present: NDArray[np.bool_], absent: NDArray[np.bool_]
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Replace labels of parents, in place and from below, where those of their children differ."""
        whole: dict[int, list[list[int]]] = {}
        for parent, children in self.exhaustive:
            whole.setdefault(parent, []).append(children)
        below: dict[int, list[int]] = {}
        for child, parent in self.edges:
            below.setdefault(parent, []).append(child)
        for parent in sorted(below, reverse=True):
            shown = present[below[parent]].any(axis=0)
            none = np.zeros_like(shown)
            for children in whole.get(parent, ()):
                none |= absent[children].all(axis=0)
            present[parent] = shown | (present[parent] & ~none)
            absent[parent] = none | (absent[parent] & ~shown)
        return present, absent


def _excepted(relations: Relations, nothing: str, other: str) -> bool:
    """Whether a class says nothing of another one."""
    above = relations.ancestors.get(other, frozenset())
    return other == nothing or not {other, *above}.isdisjoint(relations.nothing[nothing])


_LISTED = 3
"""Labels of a contradiction that are named."""


def _contradictions(
    labels: NDArray[np.float32], names: Sequence[str], both: NDArray[np.bool_], torn: NDArray[np.bool_]
) -> dict[str, tuple[int, ...]]:
    """Return the rows with a contradiction by the labels that are part of it.

    Args:
        both: [c, n], where a class would be both present and absent.
    """
    found: dict[str, list[int]] = {}
    for row in np.flatnonzero(torn).tolist():
        part = np.flatnonzero(both[:, row] & ~np.isnan(labels[row])).tolist()
        of = " and ".join(f"{names[i]!r} = {labels[row, i]:.0f}" for i in part[:_LISTED])
        found.setdefault(of if len(part) > 1 else f"{of} and what the other labels imply", []).append(row)
    return {of: tuple(rows) for of, rows in found.items()}
