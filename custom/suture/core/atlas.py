"""The atlas of a site or study: how classes include and exclude each other, and decisions about names.

A site names a shipped area (``atlas = "chest"``) or a file, such as the ``labels.toml`` of its study:

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
"""

from __future__ import annotations

import datetime
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Literal

import tomli_w
from pydantic import Field

from suture.core.errors import ConfigError, LabelError, check_known, nearest
from suture.core.files import atomic_write
from suture.core.labels import canonical
from suture.core.names import check_value
from suture.core.plain import read_bounded, read_toml
from suture.core.relations import Relations
from suture.core.validation import LabelName, Section, parse
from suture.core.vocabulary import AREAS, ENTRIES, groups

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
        for child, parent in (*pairs, *self.decided("child")):
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

    def decided(self, relation: Relation) -> list[tuple[str, str]]:
        """Return the pairs of canonical names, `name` and `of`, about which this is the last decision."""
        last: dict[frozenset[str], tuple[Relation, tuple[str, str]]] = {}
        for one in self.decisions:
            pair = canonical(one.name), canonical(one.of)
            last[frozenset(pair)] = (one.relation, pair)
        return [pair for how, pair in last.values() if how == relation]

    def name(self, spelling: str) -> str:
        """Return the name of a class by the decisions; the canonical one where there is none."""
        same, name = dict(self.decided("same")), canonical(spelling)
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
