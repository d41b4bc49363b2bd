"""The label lists of all sites of a study, side by side: what is equal, what contains what, what looks alike.

A proposal never merges classes: a person decides, and `suture labels` records who and when.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import combinations
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table as Grid

from suture.core.atlas import Atlas, Relation, study_atlas
from suture.core.labels import key
from suture.core.targets import rich
from suture.core.vocabulary import AREAS, CANONICAL, SYNONYMS
from suture.data.readers import read_table
from suture.simulation.study import StudySites

LEAST = 0.8
"""Smallest score of a proposal that two names mean the same."""

_INITIALS = 0.8
"""Score of a name that is the initials of another one."""

_COMMON, _COMPARED = 300, 10
"""Most names with a letter triple by which names are found, and most that one name is compared with: the time
stays within bounds for thousands of names."""

_ALIKE = 0.4
"""Share of common letter triples (Dice) from which two names are compared letter by letter."""

_WORDS = """
fillers: a an the of in with de del la el du des les der die das do da dos
not: no not non without absent absence negative normal sin sans ohne kein keine sem
either: or and oder und ou et o y e
other: other others unknown unspecified nos
"""
_KINDS = {
    kind: frozenset(words.split()) for kind, _, words in (line.partition(": ") for line in _WORDS.split("\n"))
}
_FILLERS, _NOT, _EITHER, _OTHER = (_KINDS[kind] for kind in ("fillers", "not", "either", "other"))
"""Words of several languages that say nothing of a finding, deny it, join two, or leave it open."""


@dataclass(frozen=True)
class Proposal:
    """What two names may have to do with each other; a person decides.

    Attributes:
        name, relation, of: as in `suture.core.atlas.Decision`.
        score: 0 to 1.
    """

    name: str
    relation: Relation
    of: str
    score: float


@dataclass(frozen=True)
class LabelLists:
    """The lists of a study.

    Attributes:
        sites: the classes of each site, by the names that the vocabulary and decisions give them.
        contains: pairs of listed classes, child and ancestor, by the built-in or the study's relations.
        proposals: highest score first.
    """

    sites: Mapping[str, tuple[str, ...]]
    contains: tuple[tuple[str, str], ...]
    proposals: tuple[Proposal, ...]


def study_lists(study: Path) -> LabelLists:
    """Read and compare the label lists of a study.

    Raises:
        ConfigError, DataError: a site or the labels.toml cannot be read.
    """
    configs = StudySites(str(study)).configs()
    return compare_lists(
        # Without the atlas, whose file a first decision makes: it adds no class.
        {
            site: read_table(config.data.model_copy(update={"atlas": None})).table.labels.names
            for site, config in configs.items()
        },
        study_atlas(study),
    )


def compare_lists(lists: Mapping[str, Sequence[str]], atlas: Atlas) -> LabelLists:
    """Compare label lists of any spelling under the decisions of an atlas."""
    sites = {site: tuple(map(atlas.name, names)) for site, names in lists.items()}
    listed = sorted({name for names in sites.values() for name in names})
    contains: set[tuple[str, str]] = set()
    for relations in (Atlas(areas=AREAS).relations(), atlas.relations()):
        for name in listed:
            above = {*relations.with_ancestors([name])} - {name}
            contains |= {(name, parent) for parent in above.intersection(listed)}
    decided = {frozenset((atlas.name(one.name), atlas.name(one.of))) for one in atlas.decisions}
    settled = decided | {frozenset(pair) for pair in contains}
    together = {frozenset(pair) for names in sites.values() for pair in combinations(names, 2)}
    found = [
        one
        for one in (*_alike(listed, together), *_parts(listed))
        if frozenset((one.name, one.of)) not in settled
        and not (one.name in CANONICAL and one.of in CANONICAL)
    ]
    best = {
        frozenset((one.name, one.of)): one for one in found
    }  # a part of a name says more than its letters
    ordered = sorted(best.values(), key=lambda one: (-one.score, one.name, one.of))
    return LabelLists(sites, tuple(sorted(contains)), tuple(ordered))


def _words(name: str) -> list[str]:
    """Return the words of a name in the singular, as far as that is a matter of an s, without fillers."""
    words = re.findall(r"\w+", key(name))
    return [re.sub(r"(?<=[a-rt-z]{3})s$", "", word) for word in words if word not in _FILLERS]


def _alike(names: Sequence[str], together: set[frozenset[str]]) -> Iterator[Proposal]:
    """Propose that names mean the same whose letters are alike, or of which one is the other's initials.

    Names are compared by all of their spellings. Two classes of one site are different ones.
    """
    spellings: dict[str, set[str]] = {name: {name} for name in names}
    for synonym, name in SYNONYMS.items():
        spellings.get(name, set()).add(synonym)
    texts = [
        (name, " ".join(order)) for name in names for one in spellings[name] for order in _orders(_words(one))
    ]
    by_triple: dict[str, list[int]] = {}
    triples = [{f" {text} "[i : i + 3] for i in range(len(text))} for _, text in texts]
    for i, own in enumerate(triples):
        for triple in own:
            by_triple.setdefault(triple, []).append(i)
    score: dict[tuple[str, str], float] = {}
    for i, own in enumerate(triples):
        rare = (by_triple[triple] for triple in own if len(by_triple[triple]) <= _COMMON)
        shared = Counter(j for some in rare for j in some if j < i)
        for j, _ in shared.most_common(_COMPARED):
            common = len(own & triples[j])
            first, second = sorted((texts[i][0], texts[j][0]))
            if first != second and 2 * common >= _ALIKE * (len(own) + len(triples[j])):
                ratio = SequenceMatcher(None, texts[i][1], texts[j][1], autojunk=False).ratio()
                score[first, second] = max(score.get((first, second), 0.0), ratio)
    initials = {"".join(word[0] for word in _words(name)): name for name in names if len(_words(name)) > 2}
    for name in names:
        if (long := initials.get(key(name), name)) != name:
            score[name, long] = max(score.get((name, long), 0.0), _INITIALS)
    for (first, second), value in score.items():
        negated = [bool(_NOT.intersection(_words(name))) for name in (first, second)]
        if value >= LEAST and frozenset((first, second)) not in together and negated[0] == negated[1]:
            name, of = (first, second) if second in CANONICAL or first not in CANONICAL else (second, first)
            yield Proposal(name, "same", of, round(value, 2))


def _orders(words: list[str]) -> Iterable[tuple[str, ...]]:
    """Return the words in their own and in alphabetical order."""
    return {tuple(words), tuple(sorted(words))}


def _parts(names: Sequence[str]) -> Iterator[Proposal]:
    """Propose a parent whose words are all in the name of the child, but for "A or B", which contains A."""
    words = {name: {*_words(name)} for name in names}
    for long in names:
        if words[long] & (_NOT | _OTHER):
            continue
        for short in names:
            own = words[short]
            if own and own < words[long] and not own <= _EITHER | _NOT | _OTHER:
                child, parent = (short, long) if words[long] & _EITHER else (long, short)
                yield Proposal(child, "child", parent, round(len(own) / len(words[long]), 2))


def render_lists(lists: LabelLists) -> RenderableType:
    """Render classes by sites, what contains what, and the proposals."""
    grid = Grid(title="Classes of each site", title_justify="left", box=None)
    grid.add_column("class")
    for site in lists.sites:
        grid.add_column(rich(site), justify="center")
    grid.add_column("sites", justify="right")
    times = Counter(name for names in lists.sites.values() for name in names)
    for name in sorted(times, key=lambda name: (-times[name], name)):
        marks = ("x" if name in names else "" for names in lists.sites.values())
        grid.add_row(rich(name), *marks, str(times[name]))
    parts: list[RenderableType] = [grid]
    below: dict[str, list[str]] = {}
    for child, parent in lists.contains:
        below.setdefault(parent, []).append(child)
    if below:
        parts.append("[bold]contained, at sites that set \\[data] atlas[/]")
        parts += [
            f"{rich(parent)}: {rich(', '.join(children))}" for parent, children in sorted(below.items())
        ]
    if lists.proposals:
        proposed = Grid(title="Proposals: decide each", title_justify="left", box=None)
        for head in ("score", "class", "may be", "of"):
            proposed.add_column(head)
        for one in lists.proposals:
            what = "the same as" if one.relation == "same" else "a kind of"
            proposed.add_row(f"{one.score:.2f}", rich(one.name), what, rich(one.of))
        parts.append(proposed)
    return Group(*parts)
