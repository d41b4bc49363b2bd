"""Classes that several sites call differently and identify by the same code of a terminology.

Names that share a code are one class, also over further names: if A and B have one code and B and C another
one, all three are one class. A class has at most one code of each system. What comes out does not depend on
the order of sites. The built-in codes recognise the codes that sites state, and contradict none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import combinations
from typing import NamedTuple

from suture.core.codes import GENERAL, Stated, builtin, system_of
from suture.core.errors import FederationError
from suture.core.vocabulary import CANONICAL

_TABLE = "Suture's table"
"""Who states the codes of the built-in classes."""

EXPERIMENT = "the experiment so far"
"""Who states the codes that sites stated in earlier jobs."""

_CORRECT = "correct the [data] codes of one of them, or remove them"


class Statement(NamedTuple):
    """That a class has a code.

    Attributes:
        name: of the class.
        code: with its system.
        party: a site, `_TABLE` or `EXPERIMENT`.
    """

    name: str
    code: str
    party: str


Group = Mapping[tuple[str, str], Collection[str]]
"""The parties that state each pair of a name and a code."""


class ClassConflict(FederationError):
    """Codes that contradict each other.

    Args:
        text: names the classes, the codes and the parties.
        group: what was stated.
        lists: as of `one_name`.
    """

    def __init__(self, text: str, group: Group, lists: Collection[Collection[str]] = ()) -> None:
        super().__init__(text)
        self.group = group
        self.lists = lists


def statements(stated: Stated, party: str) -> list[Statement]:
    """Return what a party states."""
    return [Statement(name, code, party) for name, codes in stated.items() for code in codes]


def one_name(
    stated: Iterable[Statement], previous: Collection[str] = (), lists: Collection[Collection[str]] = ()
) -> dict[str, str]:
    """Return the name of the class of each name with a stated code.

    It is the name that the experiment has for the class so far, else the vocabulary's, else the first in
    alphabetical order.

    Args:
        previous: the classes that the experiment has.
        lists: the names that each site lists, which are different classes there.

    Raises:
        ClassConflict: a class would have two codes of one system, two names of the vocabulary, two of
            `previous`, or two of one site.
    """
    said = list(stated)
    parties: dict[tuple[str, str], set[str]] = {}
    for name, code, party in (*said, *_recognised(said)):
        parties.setdefault((name, code), set()).add(party)
    found: dict[str, str] = {}
    for group in _groups(parties):
        names = {name for name, _ in group}
        so_far, built_in = names.intersection(previous), names.intersection(CANONICAL)
        if len(so_far) > 1:
            raise _two_names(group, so_far, "of this experiment", "begin a new experiment")
        if len(built_in) > 1:
            raise _two_names(
                group, built_in, "of the vocabulary", "map one to the other in label_map of the job"
            )
        if own := next((own for one in lists if len(own := names.intersection(one)) > 1), set[str]()):
            raise ClassConflict(str(_two_names(group, own, "of one site", _CORRECT)), group, lists)
        found |= dict.fromkeys(names, min(so_far or built_in or names))
    return found


def _recognised(stated: Iterable[Statement]) -> list[Statement]:
    """Return what stated codes mean by `_TABLE`: who states one states the code of its built-in class."""
    holder = {
        str(code): name for name, codes in builtin().items() for code in codes if str(code) not in GENERAL
    }
    return [
        Statement(holder[code], code, who)
        for _, code, party in stated
        if code in holder
        for who in (party, _TABLE)
    ]


def culprit(conflict: ClassConflict, previous: Collection[str] = ()) -> str | None:
    """Return the site without which there were no conflict; None where that is true of several, or of none.

    Args:
        previous: as of `one_name`.
    """
    sites = [{*whose} - {_TABLE} for whose in conflict.group.values()]
    alone = {min(whose) for whose in sites if len(whose) == 1} - {EXPERIMENT}
    able = [site for site in sorted(alone) if _fits(conflict, site, previous)]
    return able[0] if len(able) == 1 else None


def _fits(conflict: ClassConflict, without: str, previous: Collection[str]) -> bool:
    said = [
        Statement(*pair, party)
        for pair, whose in conflict.group.items()
        for party in {*whose} - {without, _TABLE}
    ]
    try:
        one_name(said, previous, conflict.lists)
    except ClassConflict:
        return False
    return True


def _groups(parties: Group) -> list[Group]:
    """Return the pairs that are about one class, each of the classes once.

    Raises:
        ClassConflict: a class has two codes of one system.
    """
    by_name: dict[str, dict[tuple[str, str], Collection[str]]] = {}
    by_code: dict[str, dict[tuple[str, str], Collection[str]]] = {}
    for pair in sorted(parties):
        name, code = pair
        group = by_name.get(name, {}) | by_code.get(code, {}) | {pair: parties[pair]}
        _check_systems(group)
        for name, code in group:
            by_name[name] = by_code[code] = group
    return list({id(group): group for group in by_name.values()}.values())


def _check_systems(group: Group) -> None:
    """Refuse a class that has two codes of one system."""
    codes = {code for _, code in group}
    if len(codes) == len({*map(system_of, codes)}):
        return
    clashes = [
        (one, other)
        for one, other in combinations(sorted(group), 2)
        if one[1] != other[1] and system_of(one[1]) == system_of(other[1])
    ]
    one, other = min(clashes, key=lambda pairs: pairs[0][0] != pairs[1][0])  # of one name, if there are any
    (name, code), (other_name, other_code) = one, other
    if name == other_name:
        text = f"{name!r} is {code} at {_who(group[one])} and {other_code} at {_who(group[other])}"
    else:
        linked = ", ".join(sorted({c for _, c in group} - {code, other_code}))
        text = (
            f"{name!r} ({code}, {_who(group[one])}) and {other_name!r} ({other_code}, "
            f"{_who(group[other])}) are different classes by these codes, but the same class by {linked}"
        )
    raise ClassConflict(f"{text}; {_CORRECT}", group)


def _two_names(group: Group, names: set[str], of: str, remedy: str) -> ClassConflict:
    """Return the refusal of two names that must not become one."""
    both = sorted(names)[:2]
    sides = [{party for pair, whose in group.items() if pair[0] == name for party in whose} for name in both]
    first, second = (f"{name!r} ({_who(side)})" for name, side in zip(both, sides, strict=True))
    by = ", ".join(sorted({code for _, code in group}))
    return ClassConflict(
        f"{first} and {second} are the same class by {by}, but different classes {of}; {_CORRECT}, or "
        f"{remedy}",
        group,
    )


def _who(parties: Collection[str]) -> str:
    return ", ".join(sorted(parties))
