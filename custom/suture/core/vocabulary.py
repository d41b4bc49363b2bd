"""The built-in vocabulary: names of classes, synonyms and relations, from the tables of ``atlas_data/``.

``classes.csv`` has the canonical names with their direct parents and the published lists that have them,
``synonyms.csv`` other spellings, ``acronyms.csv`` words that stay in capitals, ``groups.csv`` exhaustive and
exclusive groups, ``codes.csv`` codes (see `suture.core.ontology`), ``sources.csv`` where all of it is from.

A synonym is listed only where both names mean the same in the data sets that use them. HAM10000's ``akiec``
covers actinic keratosis and intraepithelial carcinoma, so it is a class of its own. A parent is listed only
where it holds in every data set: CheXpert has pneumonia below consolidation, which is not so of an
interstitial one, hence here it is below lung opacity alone.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from importlib import resources


def rows(name: str) -> list[dict[str, str]]:
    """Return the rows of a table of the atlas, by their columns."""
    text = (resources.files("suture.core") / "atlas_data" / f"{name}.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


@dataclass(frozen=True)
class Entry:
    """A class of the vocabulary.

    Attributes:
        area: such as ``chest``: a study takes the relations of whole areas.
        parents: the classes that an image shows whenever it shows this one, direct ones only.
        lists: published data sets that have it, by their words in ``sources.csv``.
    """

    area: str
    parents: tuple[str, ...]
    lists: tuple[str, ...]


def _words(cell: str) -> tuple[str, ...]:
    return tuple(filter(None, cell.split(";")))


ENTRIES: dict[str, Entry] = {
    row["class"]: Entry(row["area"], _words(row["parents"]), _words(row["lists"])) for row in rows("classes")
}

CANONICAL: tuple[str, ...] = tuple(ENTRIES)

SYNONYMS: dict[str, str] = {row["synonym"]: row["class"] for row in rows("synonyms")}

AREAS: tuple[str, ...] = tuple(dict.fromkeys(entry.area for entry in ENTRIES.values()))


def read_word_list(source: str) -> tuple[str, ...]:
    """Return the classes of a published data set, in the order of the vocabulary."""
    return tuple(name for name, entry in ENTRIES.items() if source in entry.lists)


@cache
def groups(kind: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the ``exhaustive`` groups, each with its parent; the ``exclusive`` ones, each with none; or the
    classes that exclude all others (``nothing``), each with those that it says nothing of.
    """
    return tuple((row["parent"], _words(row["classes"])) for row in rows("groups") if row["kind"] == kind)
