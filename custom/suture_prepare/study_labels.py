"""The label lists of all sites of a study, side by side: what is equal, what contains what, what looks alike.

A proposal never merges classes: a person decides, and `suture labels` records who and when.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.table import Table as Grid

from suture.core.errors import ConfigError
from suture.core.escaping import rich
from suture.core.labels import LabelSet, key, lookalikes
from suture.core.ontology import LABELS, Atlas, Relation, study_atlas
from suture.core.vocabulary import AREAS, CANONICAL, SYNONYMS
from suture.data.readers import read_table
from suture.data.table import Table
from suture.execution.study import StudySites

LEAST = 0.8
"""Smallest score of a proposal that two names mean the same."""

NEAR = 0.6
"""Smallest cosine of two names for a proposal by their meaning."""

_INITIALS = 0.8
"""Score of a name that is the initials of another one."""

_COMMON, _COMPARED = 300, 10
"""Most spellings with a letter triple by which others are found, and most that one spelling is compared with:
the time stays within bounds for thousands of names."""

_BLOCK = 1000
"""Spellings that are compared with all others at a time, which bounds the memory."""

_WORDS = """
fillers: a an the of in with de del la el du des les der die das do da dos
not: no not non without absent absence negative normal sin sans ohne kein keine sem
either: or and oder und ou et o y e
other: other others unknown unspecified nos
status: sign signs history sequela sequelae sequels residual residuals
"""
_KINDS = {
    kind: frozenset(words.split()) for kind, _, words in (line.partition(": ") for line in _WORDS.split("\n"))
}
_FILLERS, _NOT, _EITHER, _OTHER, _STATUS = (
    _KINDS[kind] for kind in ("fillers", "not", "either", "other", "status")
)
"""Words of several languages that say nothing of a finding, deny it, join two, leave it open, or name what
is left of it."""

_CHANGE = re.compile(r"\w{3}(ing|ments?|miento|mento|[st]ion|ción|ção|ung)$")
"""End of a noun for what happens to something: the thickening of a fissure is not a fissure."""


@dataclass(frozen=True)
class Proposal:
    """What two names may have to do with each other; a person decides.

    Attributes:
        name, relation, of: as in `suture.core.ontology.Decision`.
        score: 0 to 1.
        by_meaning: whether it is the cosine of an encoder's vectors, not of letters or words.
    """

    name: str
    relation: Relation
    of: str
    score: float
    by_meaning: bool = False


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


def read_tables(study: Path) -> dict[str, Table]:
    """Read the tables of a study's sites, without what an atlas implies.

    Raises:
        ConfigError, DataError: a site cannot be read.
    """
    configs = StudySites(str(study)).configs()
    # Without the atlas, whose file a first decision makes: it adds no class.
    plain = {site: config.data.model_copy(update={"atlas": None}) for site, config in configs.items()}
    return {site: read_table(data).table for site, data in plain.items()}


def study_lists(tables: Mapping[str, Table], atlas: Atlas, encoder: Path | None = None) -> LabelLists:
    """Compare the label lists of a study's sites.

    Raises:
        ConfigError: the decisions make one class of two that a site has, or see `compare_lists`.
    """
    lists = compare_lists({site: table.labels.names for site, table in tables.items()}, atlas, encoder)
    for site, names in lists.sites.items():
        if twice := [name for name, times in Counter(names).items() if times > 1]:
            raise ConfigError(
                f"{site} has two classes that {LABELS} makes one, {twice[0]!r}; they are two: record "
                "--different, or correct the site's table"
            )
    return lists


def compare_lists(
    lists: Mapping[str, Sequence[str]], atlas: Atlas, encoder: Path | None = None
) -> LabelLists:
    """Compare label lists of any spelling under the decisions of an atlas.

    Args:
        encoder: folder of an encoder of text, as of a model ``hf:FOLDER``; names are compared by its vectors,
            too.

    Raises:
        ConfigError: the encoder cannot be read, or is one of images.
    """
    sites = {site: tuple(map(atlas.name, names)) for site, names in lists.items()}
    listed = sorted({name for names in sites.values() for name in names})
    at: dict[str, set[str]] = {}
    for site, names in sites.items():
        for name in names:
            at.setdefault(name, set()).add(site)
    contains: set[tuple[str, str]] = set()
    for relations in (Atlas(areas=AREAS).relations(), atlas.relations()):
        for name in listed:
            above = {*relations.with_ancestors([name])} - {name}
            contains |= {(name, parent) for parent in above.intersection(listed)}
    decided = {frozenset((atlas.name(one.name), atlas.name(one.of))) for one in atlas.decisions}
    settled = decided | {frozenset(pair) for pair in contains}
    found = [
        one
        for one in (*_near(listed, at, encoder), *_alike(listed, at), *_parts(listed))
        if frozenset((one.name, one.of)) not in settled
        and not (one.name in CANONICAL and one.of in CANONICAL)
    ]
    best = {
        frozenset((one.name, one.of)): one for one in found
    }  # a part of a name says more than its letters
    ordered = sorted(best.values(), key=lambda one: (-one.score, one.name, one.of))
    return LabelLists(sites, tuple(sorted(contains)), tuple(ordered))


def atlas_faults(study: Path, classes: Iterable[str]) -> list[str]:
    """Return a sentence for each fault of a study's labels.toml; none where it has no such file.

    Args:
        classes: of all sites.
    """
    try:
        return [f"{study / LABELS}: {text}" for text in misspelt(study_atlas(study), classes)]
    except ConfigError as error:
        return [str(error)]


def misspelt(atlas: Atlas, classes: Iterable[str]) -> list[str]:
    """Return a sentence for each name of the relations that may be a typo: nearly one that is known.

    A name that is known is of a site, of the vocabulary, or in a decision; the name of a parent that no site
    annotates is new, and is none of them.

    Args:
        classes: of all sites.
    """
    groups = (*atlas.exclusive, *(group for some in atlas.exhaustive.values() for group in some))
    named = {*atlas.parents, *atlas.exhaustive}.union(*atlas.parents.values(), *groups)
    known = {*CANONICAL, *map(atlas.name, classes)}
    known.update(atlas.name(name) for one in atlas.decisions for name in (one.name, one.of))
    new = {name for name in map(atlas.name, named) if name not in known}
    return [
        f"no site and no atlas has {wrong!r}; did you mean {right!r}? Correct it, or record that they are "
        f"two classes: --different {f'{right}={wrong}'!r}"
        for pair in lookalikes(known | new)
        for wrong, right in (pair, pair[::-1])
        if wrong in new and right not in new
    ]


def _words(name: str) -> list[str]:
    """Return the words of a name in the singular, as far as that is a matter of an s, without fillers."""
    words = re.findall(r"\w+", key(name))
    return [re.sub(r"(?<=[a-rt-z]{3})s$", "", word) for word in words if word not in _FILLERS]


def _spellings(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return pairs of a name and a spelling of it, by the vocabulary and as it is."""
    given = {*names}
    others = [(name, synonym) for synonym, name in SYNONYMS.items() if name in given]
    return [*((name, name) for name in names), *others]


def _near(names: Sequence[str], at: Mapping[str, set[str]], encoder: Path | None) -> Iterator[Proposal]:
    """Propose for each name that the vocabulary lacks the other sites' one with the nearest meaning."""
    if encoder is None:
        return
    texts = _spellings(names)
    vectors = _vectors(encoder, [spelling.lower() for _, spelling in texts])
    for row, name in enumerate(names):
        if name in CANONICAL:
            continue
        cosines = vectors @ vectors[row]
        for i in np.argsort(-cosines, kind="stable").tolist():
            of = texts[i][0]
            if cosines[i] < NEAR:
                break
            if of != name and at[name].isdisjoint(at[of]):
                yield Proposal(name, "same", of, round(float(cosines[i]), 2), by_meaning=True)
                break


def _vectors(folder: Path, texts: Sequence[str]) -> NDArray[np.float32]:
    """Return vectors of length 1, [n, d], of the encoder of text in a folder."""
    import torch  # only names that are compared by meaning need it

    from suture.models import ModelSpec, build, encoder_of
    from suture.models.documents import document_inputs

    spec = ModelSpec(f"hf:{str(folder).removeprefix('hf:')}")  # as a job names it, or the folder alone
    if encoder_of(spec).reads != "text":
        raise ConfigError(f"{folder} holds an encoder of images; name the folder of an encoder of text")
    network = build(spec, LabelSet(("any",)), 0, pretrained=True).eval()
    with torch.no_grad():
        found = torch.nn.functional.normalize(network.encode(document_inputs(spec, texts)), dim=1)
    return found.numpy()


def _alike(names: Sequence[str], at: Mapping[str, set[str]]) -> Iterator[Proposal]:
    """Propose that names mean the same whose letters are alike, or of which one is the other's initials.

    Names are compared by all of their spellings. Two classes of one site are different ones.
    """
    texts = [(name, _words(spelling)) for name, spelling in _spellings(names)]
    score: dict[tuple[str, str], float] = {}
    for i, j in _with_common_triples([words for _, words in texts]):
        pair = texts[i][0], texts[j][0]
        if pair[0] != pair[1] and (alike := _likeness(texts[i][1], texts[j][1])) >= LEAST:
            score[pair] = max(score.get(pair, 0.0), alike)
    initials = {"".join(word[0] for word in _words(name)): name for name in names if len(_words(name)) > 2}
    for name in names:
        if (long := initials.get(key(name), name)) != name:
            score[name, long] = max(score.get((name, long), 0.0), _INITIALS)
    for (first, second), value in score.items():
        negated = [bool(_NOT.intersection(_words(name))) for name in (first, second)]
        if value >= LEAST and at[first].isdisjoint(at[second]) and negated[0] == negated[1]:
            name, of = (first, second) if second in CANONICAL or first not in CANONICAL else (second, first)
            yield Proposal(name, "same", of, round(value, 2))


def _with_common_triples(texts: Sequence[Sequence[str]]) -> Iterator[tuple[int, int]]:
    """Yield pairs i < j of texts: those with the most letter triples in common, without frequent triples."""
    from scipy.sparse import csr_array  # a tenth of a second's import that only many names need

    triples = [{f" {word} "[i : i + 3] for word in words for i in range(len(word))} for words in texts]
    times = Counter(triple for own in triples for triple in own)
    column = {triple: i for i, triple in enumerate(t for t, n in times.items() if n <= _COMMON)}
    kept = [
        (i, column[triple]) for i, own in enumerate(triples) for triple in sorted(own) if triple in column
    ]
    rows, columns = np.array(kept, dtype=np.intp).reshape(-1, 2).T
    has = csr_array((np.ones(len(kept), np.int32), (rows, columns)), (len(texts), len(column)))
    pairs: set[tuple[int, int]] = set()
    for start in range(0, len(texts), _BLOCK):
        shared = csr_array(has[start : start + _BLOCK] @ has.T)
        shared.sort_indices()  # equal numbers are taken in the order of the texts
        for row, (first, last) in enumerate(pairwise(shared.indptr.tolist()), start):
            best = np.argsort(-shared.data[first:last], kind="stable")[: _COMPARED + 1]
            found = shared.indices[first:last][best].tolist()
            pairs |= {(min(row, other), max(row, other)) for other in found if other != row}
    yield from sorted(pairs)


def _likeness(first: Sequence[str], second: Sequence[str]) -> float:
    """Return how alike two names are: by the letters of the words that they do not share, in [0, 1]."""
    a, b = (" ".join(w for w in own if w not in other) for own, other in ((first, second), (second, first)))
    if not (a and b):
        return float(a == b)
    if 2 * min(len(a), len(b)) < LEAST * (len(a) + len(b)):
        return 0.0
    return SequenceMatcher(None, a, b, autojunk=False).ratio()


def _parts(names: Sequence[str]) -> Iterator[Proposal]:
    """Propose a parent whose words are all in the name of the child, but for "A or B", which contains A.

    Not where the child's noun says what has happened to the parent, or what is left of it.
    """
    words = {name: {*_words(name)} for name in names}
    times = Counter(word for own in words.values() for word in own)
    by_rarest: dict[str, list[str]] = {}
    for name, own in words.items():
        if own and not own <= _EITHER | _NOT | _OTHER:
            by_rarest.setdefault(min(own, key=lambda word: (times[word], word)), []).append(name)
    for long, own in words.items():
        if own & (_NOT | _OTHER):
            continue
        noun = _noun(long)
        for short in sorted(name for word in own for name in by_rarest.get(word, ()) if words[name] < own):
            if noun not in words[short] and (noun in _STATUS or _CHANGE.search(noun)):
                continue
            child, parent = (short, long) if own & _EITHER else (long, short)
            yield Proposal(child, "child", parent, round(len(words[short]) / len(own), 2))


def _noun(name: str) -> str:
    """Return the noun of a name: its last word, in English, or the last one before "of"."""
    words: list[str] = re.findall(r"\w+", key(name))
    before = next((i for i, word in enumerate(words) if i and word in _FILLERS), len(words))
    return words[before - 1]


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
        parts.append("[bold]Parents and their children, at sites that set \\[data] atlas[/]")
        parts += [
            f"{rich(parent)}: {rich(', '.join(children))}" for parent, children in sorted(below.items())
        ]
    if lists.proposals:
        proposed = Grid(title="Proposals: decide each", title_justify="left", box=None)
        for head in ("score", "class", "may be", "of"):
            proposed.add_column(head)
        for one in lists.proposals:
            what = "the same as" if one.relation == "same" else "a kind of"
            what += " (meaning)" if one.by_meaning else ""
            proposed.add_row(f"{one.score:.2f}", rich(one.name), what, rich(one.of))
        parts.append(proposed)
    return Group(*parts)
