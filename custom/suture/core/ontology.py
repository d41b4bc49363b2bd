"""How classes include and exclude each other, their codes, and what a study has decided about names.

`Atlas` is that of a site or study. A site names a shipped area (``atlas = "chest"``) or a file, such as the
``labels.toml`` of its study:

    areas = ["chest"]
    exclusive = [["Mild Scoliosis", "Severe Scoliosis"]]

    [parents]
    "Mild Scoliosis" = ["Scoliosis"]
    "Severe Scoliosis" = ["Scoliosis"]

    [exhaustive]
    Scoliosis = [["Mild Scoliosis", "Severe Scoliosis"]]

    [[decisions]]  # written by `suture labels`
    name = "Lesion"
    relation = "same"
    of = "Lung Lesion"
    by = "M. Ruiz"
    on = 2026-11-25

`Relations` are what a label says about other classes. An image that shows a class shows its parents too: a
consolidation is a lung opacity. `implied` closes the known labels of each image under these rules, and
under no others:

- a present class makes all of its ancestors present, an absent one all of its descendants absent;
- in an exhaustive group of children, which the site annotates all of: if all are absent, so is the parent;
  if the parent is present and all but one are absent, the last one is present;
- a present class of an exclusive group makes the others absent;
- a class such as no finding excludes all others that the site annotates, but for stated exceptions.

Codes are of SNOMED CT, ICD-10 (WHO), ICD-10-CM and RadLex. A code is written ``SYSTEM:CODE``; SYSTEM is
DICOM's designator of the coding scheme (PS3.16, section 8).
"""

from __future__ import annotations

import datetime
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tomli_w
from numpy.typing import NDArray
from pydantic import Field

from suture.core.errors import ConfigError, LabelError, check_known, nearest, show_value
from suture.core.files import atomic_write, read_bounded, read_toml
from suture.core.labels import canonical, check_value
from suture.core.validation import LabelName, Section, parse
from suture.core.vocabulary import AREAS, ENTRIES, groups, rows

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
            pairs = _count(pairs, [held[parent] for parent in self.parents.get(name, ())], name)
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
            pairs = _count(pairs, [above[parent] for parent in parents], name)
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


def _count(pairs: int, above: Iterable[Collection[object]], name: str) -> int:
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
            (
                row[name],
                [row[other] for other in sorted(annotated) if not _is_exception(relations, name, other)],
            )
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
            child_present = present[below[parent]].any(axis=0)
            none = np.zeros_like(child_present)
            for children in whole.get(parent, ()):
                none |= absent[children].all(axis=0)
            present[parent] = child_present | (present[parent] & ~none)
            absent[parent] = none | (absent[parent] & ~child_present)
        return present, absent


def _is_exception(relations: Relations, nothing: str, other: str) -> bool:
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


SYSTEMS = {"SCT": "SNOMED CT", "I10": "WHO's ICD-10", "I10C": "ICD-10-CM", "RADLEX": "RadLex"}
"""The coding schemes, by their designators."""

GENERAL = frozenset({"SCT:4147007", "SCT:27925004"})
"""Built-in codes of a shape in any organ, mass and nodule: they describe a finding, and identify no class."""

_MEANING = 64
"""Characters of a code's meaning (PS3.5, 6.2: LO)."""

Stated = Mapping[str, tuple[str, ...]]
"""Codes by the name of their class, at most one of each system."""


@dataclass(frozen=True)
class Code:
    """A coded concept (DICOM PS3.3, section 8).

    Attributes:
        system: its coding scheme, one of `SYSTEMS`.
    """

    system: str
    code: str
    meaning: str

    def __str__(self) -> str:
        return f"{self.system}:{self.code}"


def codes_of(labels: Iterable[str], stated: Stated | None = None) -> dict[str, tuple[Code, ...]]:
    """Return the codes of those classes that have any: the built-in ones, then the stated ones.

    A stated code replaces the built-in one of its system. A class of another name has the built-in codes of
    the one whose code it states. A stated code that is not built in has the name of its class for a meaning.
    """
    known, found = builtin(), {}
    holder = {str(code): codes for codes in known.values() for code in codes}
    for label in labels:
        said = {*(stated or {}).get(label, ())}
        systems = set(map(system_of, said))
        meant = known.get(label) or next((holder[text] for text in sorted(said) if text in holder), ())
        own = [code for code in meant if str(code) in said or code.system not in systems]
        added = sorted(said - {*map(str, own)})
        pairs = (text.split(":") for text in added)
        if codes := (*own, *(Code(system, code, label[:_MEANING].strip()) for system, code in pairs)):
            found[label] = codes
    return found


@cache
def builtin() -> dict[str, tuple[Code, ...]]:
    """Return the codes of the built-in classes, from ``atlas_data/codes.csv``."""
    found: dict[str, tuple[Code, ...]] = {}
    for row in rows("codes"):
        code = Code(row["system"], row["code"], row["meaning"])
        found[row["class"]] = (*found.get(row["class"], ()), code)
    return found


def system_of(code: str) -> str:
    """Return the system of a code."""
    return code.partition(":")[0]


def check_code(text: str) -> str:
    """Check the form of a code, and return it; whether the terminology has such a code is not known here.

    Raises:
        LabelError: it has no known system, not the form of its system, or is one of `GENERAL`.
    """
    system, _, code = text.partition(":")
    if system not in SYSTEMS:
        known = ", ".join(f"{word} ({name})" for word, name in SYSTEMS.items())
        raise LabelError(
            f"{show_value(text)}: codes are written SYSTEM:CODE, such as SCT:36118008; "
            f"the systems are {known}"
        )
    if why := _fault(system, code):
        raise LabelError(f"{show_value(text)} is not a valid code of {SYSTEMS[system]}: {why}")
    if text in GENERAL:
        raise LabelError(f"{text} describes a shape in any organ, not a class; write the code of the finding")
    return text


def check_stated(codes: Stated) -> None:
    """Check that a party gives each class one code of a system, and no code to two classes.

    Raises:
        LabelError: names the class and the code.
    """
    holder: dict[str, str] = {}
    for name, texts in codes.items():
        systems: dict[str, str] = {}
        for text in map(check_code, texts):
            if (other := systems.setdefault(system_of(text), text)) != text:
                raise LabelError(f"{name!r} has two codes of the same system, {other} and {text}; keep one")
            if (first := holder.setdefault(text, name)) != name:
                raise LabelError(f"{first!r} and {name!r} both have the code {text}; correct one of them")


def stated_codes(
    codes: Mapping[str, str | tuple[str, ...]], synonyms: Mapping[str, str] | None = None
) -> dict[str, tuple[str, ...]]:
    """Return the codes of a configuration by canonical names of classes.

    Args:
        codes: one code, or several of different systems, by any spelling of a class.
        synonyms: see `canonical`.

    Raises:
        LabelError: a code has not the form of its system, two spellings are one class, or see `check_stated`.
    """
    found: dict[str, tuple[str, ...]] = {}
    for spelling, texts in codes.items():
        name = canonical(spelling, synonyms)
        if name in found:
            raise LabelError(f"{spelling!r} is {name!r}, which has codes already; write them in one line")
        found[name] = (texts,) if isinstance(texts, str) else tuple(texts)
        for text in found[name]:
            try:
                check_code(text)
            except LabelError as error:
                raise LabelError(f"{spelling!r}: {error}") from None
    check_stated(found)
    return found


def _snomed_fault(code: str) -> str:
    """Why this is no identifier of a concept (SNOMED CT Release File Specifications, section 6)."""
    if not re.fullmatch(r"[1-9][0-9]{5,17}", code):
        return "an identifier has 6 to 18 digits and does not begin with 0"
    if _verhoeff(code):
        return "its check digit, the last one, does not match the others; look for a typing error"
    if code[-3:-1] not in ("00", "10"):
        return (
            "it does not identify a concept: in a concept's code the two digits before the last are 00 or 10"
        )
    return ""


def _verhoeff(digits: str) -> int:
    """Return the checksum of a number with its check digit; 0 where it fits (Verhoeff 1969)."""
    permutation = (1, 5, 7, 6, 2, 8, 3, 0, 9, 4)
    total = 0
    for place, digit in enumerate(map(int, reversed(digits))):
        for _ in range(place % 8):
            digit = permutation[digit]
        # The product of two elements of the dihedral group D5: rotations are 0 to 4, reflections 5 to 9.
        turned = total - digit if total > 4 else total + digit
        total = turned % 5 + 5 * ((total > 4) != (digit > 4))
    return total


_FORMS = {
    "I10": (
        r"[A-Z][0-9]{2}(\.[0-9]{1,2})?",
        "write a capital letter and two digits, optionally a point and one or two digits: J93.9",
    ),
    "I10C": (
        r"[A-Z][0-9][0-9A-Z](\.[0-9A-Z]{1,4})?",
        "write three capital letters or digits, optionally a point and one to four more: J93.83",
    ),
    "RADLEX": (r"RID[1-9][0-9]{0,8}", "write RID and a number: RID5352"),
}
"""The form of the codes of the other systems, and what to write."""


def _fault(system: str, code: str) -> str:
    """Why a code has not the form of its system; an empty text where it has."""
    if system == "SCT":
        return _snomed_fault(code)
    form, remedy = _FORMS[system]
    return "" if re.fullmatch(form, code) else remedy


LABELS = "labels.toml"
"""File of the atlas in the folder of a study."""

Relation = Literal["same", "different", "child"]

Group = Annotated[tuple[LabelName, ...], Field(min_length=1)]


class Decision(Section):
    """What a person has decided about two names; a later decision about the same two replaces an earlier one.

    Attributes:
        name, of: the two names.
        relation: ``same``: `name` is another name of `of`; ``different``: they are two classes, although
            they look alike; ``child``: an image that shows `name` shows `of`.
        by: who decided.
        on: the day.
    """

    name: LabelName
    relation: Relation
    of: LabelName
    by: str
    on: datetime.date


class Atlas(Section):
    """What a ``labels.toml`` holds.

    Attributes:
        areas: shipped relations that hold here, such as ``chest``.
        parents: further direct parents of classes.
        exhaustive: for a parent, groups of its children, one of which is present wherever it is.
        exclusive: groups of classes of which an image shows at most one.
        decisions: about names, oldest first.
    """

    areas: tuple[str, ...] = ()
    parents: dict[LabelName, Group] = Field(default_factory=dict)
    exhaustive: dict[LabelName, tuple[Group, ...]] = Field(default_factory=dict)
    exclusive: tuple[Group, ...] = ()
    decisions: tuple[Decision, ...] = ()

    def relations(self) -> Relations:
        """Return the relations by canonical names: shipped, own and decided ones.

        Raises:
            ConfigError: there is no such area.
            LabelError: they cannot hold together; see `Relations`.
        """
        for area in self.areas:
            check_known("area of the atlas", area, AREAS)
        shipped = {name: entry.parents for name, entry in ENTRIES.items() if entry.area in self.areas}
        stated = [*shipped.items(), *self.parents.items()]
        pairs = [(child, parent) for child, above in stated for parent in above]
        parents: dict[str, tuple[str, ...]] = {}
        for child, parent in (*pairs, *self.list_decisions("child")):
            name = self.name(child)
            parents[name] = tuple(dict.fromkeys((*parents.get(name, ()), self.name(parent))))
        whole = [(parent, group) for parent, group in groups("exhaustive") if self._has(group)]
        whole += [(parent, group) for parent, some in self.exhaustive.items() for group in some]
        apart = [group for _, group in groups("exclusive") if self._has(group)]
        nothing = [(name, other) for name, other in groups("nothing") if self._has((name, *other))]
        return Relations(
            parents,
            tuple((self.name(parent), tuple(map(self.name, group))) for parent, group in whole),
            tuple(tuple(map(self.name, group)) for group in (*apart, *self.exclusive)),
            {self.name(name): tuple(map(self.name, other)) for name, other in nothing},
        )

    def _has(self, group: Iterable[str]) -> bool:
        """Whether the areas have the classes of a shipped group."""
        return all(ENTRIES[name].area in self.areas for name in group)

    def list_decisions(self, relation: Relation) -> list[tuple[str, str]]:
        """Return the pairs of canonical names, `name` and `of`, about which this is the last decision."""
        last: dict[frozenset[str], tuple[Relation, tuple[str, str]]] = {}
        for one in self.decisions:
            pair = canonical(one.name), canonical(one.of)
            last[frozenset(pair)] = (one.relation, pair)
        return [pair for how, pair in last.values() if how == relation]

    def name(self, spelling: str) -> str:
        """Return the name of a class by the decisions; the canonical one where there is none."""
        same, name = dict(self.list_decisions("same")), canonical(spelling)
        for _ in same:  # A is B and B is C: A is C
            name = same.get(name, name)
        return name


def excerpt(atlas: Atlas, own: Iterable[str]) -> Atlas:
    """Return the part of an atlas that concerns a site, without the names of any class but these.

    Args:
        own: the site's classes, whose spelling the part has. It also names their ancestors.
    """
    relations, called = atlas.relations(), {atlas.name(name): canonical(name) for name in own}
    names = relations.with_ancestors(called)

    def spelt(group: Iterable[str]) -> tuple[str, ...]:
        return tuple(called.get(name, name) for name in group if name in names)

    exhaustive: dict[str, tuple[Group, ...]] = {}
    for parent, group in relations.exhaustive:
        if called.keys() >= {*group}:
            (name,) = spelt([parent])
            exhaustive[name] = (*exhaustive.get(name, ()), spelt(group))
    above = zip(spelt(names), (spelt(relations.parents.get(name, ())) for name in names), strict=True)
    apart = map(spelt, relations.exclusive)
    return Atlas(
        areas=atlas.areas,
        parents={name: parents for name, parents in above if parents},
        exhaustive=exhaustive,
        exclusive=tuple(group for group in apart if len(group) > 1),
    )


def read_atlas(where: str | Path) -> Atlas:
    """Read an atlas, whose relations can hold: a shipped area, or a file.

    Raises:
        ConfigError: there is no such area or file, or the file has a fault.
    """
    if where in AREAS:
        return Atlas(areas=(str(where),))
    path = Path(where)
    try:
        atlas = parse(Atlas, read_toml(path), str(path))
        atlas.relations()
    except OSError as error:
        areas = nearest(path.name, AREAS)
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}; name such a file, or an area of the atlas ({areas})"
        ) from error
    except LabelError as error:
        raise ConfigError(f"{path}: {error}") from error
    return atlas


def study_atlas(study: Path) -> Atlas:
    """Return the atlas in the folder of a study; an empty one where it has none.

    Raises:
        ConfigError: see `read_atlas`.
    """
    return read_atlas(study / LABELS) if (study / LABELS).exists() else Atlas()


def write_excerpt(path: Path, atlas: Atlas, own: Iterable[str]) -> None:
    """Write the `excerpt` for a site.

    Raises:
        DiskError: it cannot be written.
    """
    atomic_write(path, tomli_w.dumps(excerpt(atlas, own).model_dump(exclude_defaults=True)).encode())


def record(study: Path, decisions: Sequence[Decision]) -> None:
    """Add decisions to the end of the study's file, which stays as it is otherwise.

    Raises:
        ConfigError: the file would have a fault; then nothing is written.
        DiskError: it cannot be written.
    """
    path = study / LABELS
    text = read_bounded(path).decode("utf-8-sig").rstrip("\n") + "\n\n" if path.exists() else ""
    text += "\n".join(f"[[decisions]]\n{tomli_w.dumps(one.model_dump())}" for one in decisions)
    try:
        for one in decisions:
            check_value(one.by)
            if canonical(one.name) == canonical(one.of):
                raise LabelError(f"{one.name!r} and {one.of!r} are spellings of one name: nothing to decide")
        parse(Atlas, tomllib.loads(text), str(path)).relations()
    except (LabelError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    atomic_write(path, text.encode())
