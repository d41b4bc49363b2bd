"""The site registry: which sites take part, which classes each annotates, and the names they agree on.

Only the server holds it. A site keeps its own spelling of each class; the server translates between that
spelling and the federation's name, so that no site learns the names that others use.

Several sites may call a class differently and identify it by one code of a terminology. Names that share a
code are one class, also over further names: if A and B have one code and B and C another one, all three are
one class. A class has at most one code of each system. What comes out does not depend on the order of
sites. The built-in codes recognise the codes that sites state, and contradict none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import combinations
from typing import Any, NamedTuple, TypeVar

from suture.core.errors import FederationError, LabelError
from suture.core.escaping import printable
from suture.core.labels import LabelType, canonical, is_generic, lookalikes
from suture.core.ontology import GENERAL, Stated, builtin, system_of
from suture.core.vocabulary import CANONICAL
from suture.federation.plan import Quorum, needed_sites
from suture.federation.server.collector import list_reasons
from suture.methods.base import LabelStatistics, LabelView, Method
from suture.protocol.egress import OWNED_CLASSES, Layout
from suture.protocol.messages import MOST_CLASSES, Labels, SiteInfo, Update
from suture.protocol.records import SiteRound

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
    for name, code, party in (*said, *_recognise(said)):
        parties.setdefault((name, code), set()).add(party)
    agreed: dict[str, str] = {}
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
        agreed |= dict.fromkeys(names, min(so_far or built_in or names))
    return agreed


def _recognise(stated: Iterable[Statement]) -> list[Statement]:
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
    remaining = [
        Statement(*pair, party)
        for pair, whose in conflict.group.items()
        for party in {*whose} - {without, _TABLE}
    ]
    try:
        one_name(remaining, previous, conflict.lists)
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
    pair, other_pair = min(clashes, key=lambda pairs: pairs[0][0] != pairs[1][0])  # of one name, if any
    (name, code), (other_name, other_code) = pair, other_pair
    if name == other_name:
        text = f"{name!r} is {code} at {_who(group[pair])} and {other_code} at {_who(group[other_pair])}"
    else:
        linked = ", ".join(sorted({c for _, c in group} - {code, other_code}))
        text = (
            f"{name!r}, {code}, {_who(group[pair])}, and {other_name!r}, {other_code}, "
            f"{_who(group[other_pair])}, are different classes by these codes, but the same class by {linked}"
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


_T = TypeVar("_T")

_SHOWN = 20
"""Pairs of names that an error lists."""


@dataclass(frozen=True)
class Member:
    """A site that takes part.

    Attributes:
        own: its class names in its own spelling and order.
        names: the federation's name of each of them, in the same order.
        n: number of images in each split.
        threads: number of its torch threads.
        protection, computed_on: see `SiteInfo`.
        one_sided: the federation's names of the classes of which the site knows positives alone.
    """

    own: Labels
    names: Labels
    n: Mapping[str, int]
    threads: int
    protection: Mapping[str, float] = field(default_factory=dict)
    computed_on: str = ""
    one_sided: Labels = ()

    @property
    def annotated(self) -> Labels:
        """The federation's names of the classes of which it knows positives and negatives."""
        return tuple(name for name in self.names if name not in self.one_sided)

    def only(self, labels: Collection[str]) -> Member:
        """Return the site without the classes that are not among the federation's `labels`."""
        kept = [(own, name) for own, name in zip(self.own, self.names, strict=True) if name in labels]
        own, names = zip(*kept, strict=True)
        return replace(self, own=own, names=names, one_sided=tuple(n for n in self.one_sided if n in labels))


@dataclass(frozen=True)
class SiteRegistry:
    """The sites and the union C of their classes.

    Attributes:
        members: by site name.
        labels: every class that a site annotates or once annotated, sorted.
        label_type: of all sites.
        prior: digest of the frozen network that all sites hold, where the method has one.
        codes: those that sites state of a class or once stated, sorted.
    """

    members: Mapping[str, Member]
    labels: Labels
    label_type: LabelType = "multilabel"
    prior: str | None = None
    codes: Stated = field(default_factory=dict)

    @property
    def names(self) -> dict[str, str]:
        """The federation's name of each class, by the canonical name that a site has for it."""
        pairs = (zip(m.own, m.names, strict=True) for m in self.members.values())
        return {canonical(own): name for of in pairs for own, name in of}

    def owners(self) -> dict[str, tuple[str, ...]]:
        """Return for each class the sites that annotate it, sorted."""
        owners: dict[str, list[str]] = {name: [] for name in self.labels}
        for site, member in sorted(self.members.items()):
            for name in owners.keys() & set(member.annotated):
                owners[name].append(site)
        return {name: tuple(sites) for name, sites in owners.items()}

    def senders(self, method: Method) -> dict[str, int]:
        """Return the number of sites that send a row of each class; nothing where rows stay at the sites."""
        trained = Counter(name for m in self.members.values() for name in m.names)
        return senders(method, {name: trained[name] for name in self.labels}, len(self.members))

    def sent_by(self, site: str, method: Method) -> Labels:
        """Return the federation's names of the rows that a site sends; none where rows stay at the sites."""
        trained = {name: int(name in self.members[site].names) for name in self.labels}
        return tuple(name for name, number in senders(method, trained, sites=1).items() if number)

    def rows_for(self, site: str, view: LabelView) -> Labels:
        """Return the federation's names of the rows that a site receives: its own, or all.

        The order of the site's columns does not count: sums would round otherwise. Its own rows are in the
        order of its spelling, since that of the federation's names would tell of names that it must not see.
        """
        if view != "own":
            return self.labels
        spelling = dict(zip(self.members[site].names, self.members[site].own, strict=True))
        return tuple(sorted(spelling.keys() & {*self.labels}, key=spelling.__getitem__))

    def to_site(self, site: str, labels: Labels) -> Labels:
        """Translate the federation's names into the site's spelling."""
        own = dict(zip(self.members[site].names, self.members[site].own, strict=True))
        return tuple(own.get(name, name) for name in labels)

    def from_site(self, site: str, update: Update) -> Update:
        """Return the update with the federation's names for its rows."""
        return replace(update, labels=tuple(self.rename_keys(site, dict.fromkeys(update.labels))))

    def rename_keys(self, site: str, values: Mapping[str, _T]) -> dict[str, _T]:
        """Return values by the federation's names, given by the site's spelling of the classes."""
        names = dict(zip(self.members[site].own, self.members[site].names, strict=True))
        return {names.get(label, label): value for label, value in values.items()}

    def statistics(self, infos: Mapping[str, SiteInfo]) -> LabelStatistics:
        """Return the label statistics of the sites, under the federation's names."""
        counts = {
            site: self.rename_keys(site, {own: infos[site].counts.get(own) for own in m.own})
            for site, m in self.members.items()
        }
        images = {s: m.n.get("train", 0) for s, m in self.members.items()}
        return LabelStatistics(self.labels, images, counts, self.label_type)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for the state."""
        values: dict[str, Any] = {"labels": list(self.labels), "label_type": self.label_type}
        values |= {"prior": self.prior, "codes": {name: list(codes) for name, codes in self.codes.items()}}
        values["members"] = {
            site: {"own": list(m.own), "names": list(m.names), "n": dict(m.n), "threads": m.threads}
            for site, m in self.members.items()
        }
        return values


def senders(method: Method, trained: Mapping[str, int], sites: int) -> dict[str, int]:
    """Return the number of sites that send a row of each class; nothing where rows stay at the sites.

    Args:
        trained: the number of sites that train each class.
        sites: of all.
    """
    if method.sharing.personal != "nothing":
        return {}
    own = method.labels.view == "own" or method.egress(Layout({}, {})).class_weight == OWNED_CLASSES
    return {name: number if own else sites for name, number in trained.items()}


@dataclass(frozen=True)
class Agreement:
    """What the sites have to agree with.

    Attributes:
        labels: classes of the model so far; a class whose last owner has left keeps its row.
        label_map: a site's spelling to the federation's name.
        accept: look-alike names that are different classes on purpose; True accepts all.
        label_type, prior: of the experiment so far, None where there is none.
        codes: of its classes, that sites have stated.
        owners: the sites of each of its classes.
    """

    labels: Labels = ()
    label_map: Mapping[str, str] = field(default_factory=dict)
    accept: bool | tuple[str, ...] = False
    label_type: LabelType | None = None
    prior: str | None = None
    codes: Stated = field(default_factory=dict)
    owners: Mapping[str, Collection[str]] = field(default_factory=dict)


def admit(
    infos: Mapping[str, SiteInfo], agreed: Agreement, lines: dict[str, SiteRound], min_sites: Quorum | None
) -> SiteRegistry:
    """Return the registry of the sites that can take part: they have training images, and fit the others.

    Args:
        infos: site info of the sites that answered the handshake.
        lines: one for each requested site; those of sites that are refused get the reason.
        min_sites: see `Schedule`.

    Raises:
        FederationError: there are too few sites; says why each one is missing. See also `agree`.
    """

    def able(refused: Mapping[str, str]) -> dict[str, SiteInfo]:
        for site, reason in refused.items():
            lines[site] = replace(lines[site], status="rejected", reason=reason)
        return {site: info for site, info in infos.items() if site not in refused}

    enough = needed_sites(min_sites, len(lines))
    empty = [site for site, info in infos.items() if not info.n.get("train")]
    infos = able(dict.fromkeys(empty, "it has no training images"))
    if len(infos) < enough:
        missing = {s: line.reason for s, line in lines.items() if s not in infos}
        raise FederationError(f"the federation cannot start; {list_reasons(missing)}")
    unfit = misfits(infos, agreed)
    # Where the others are too few, `agree` raises and says what all sites have.
    return agree(able(unfit) if len(infos) - len(unfit) >= enough else infos, agreed)


def misfits(infos: Mapping[str, SiteInfo], agreed: Agreement) -> dict[str, str]:
    """Return the sites that do not fit the others or the experiment, each with the reason.

    What cannot be attributed to one site is left to `agree`, which stops the run.
    """
    refused = _contradicting(infos, agreed)
    fit = {site: info for site, info in sorted(infos.items()) if site not in refused}
    try:
        names = _names(fit, agreed)
    except ClassConflict:  # of no one site; `agree` raises it
        names = _map_names(fit, agreed.label_map)
    members: dict[str, Member] = {}
    for site, info in fit.items():
        try:
            members[site] = _member(site, info, names)
        except LabelError as error:
            refused[site] = printable(str(error))
    usual = agreed.label_type or _usual(info.label_type for info in infos.values())
    refused |= {
        s: f"its labels are {i.label_type}, those of the federation {usual}; set [data] label_type to match"
        for s, i in infos.items()
        if usual and i.label_type != usual
    }
    held = agreed.prior or _usual(info.prior for info in infos.values())
    refused |= {
        s: f"its prior is {i.prior or 'none':.12}, the federation's is {held:.12}; give it the same file"
        for s, i in infos.items()
        if held and i.prior != held
    }
    members = {site: member for site, member in members.items() if site not in refused}
    while members and len({n for m in members.values() for n in m.names}.union(agreed.labels)) > MOST_CLASSES:
        most = max(members, key=lambda site: len(members[site].names))
        refused[most] = (
            f"with its {len(members.pop(most).names)} classes the federation would exceed {MOST_CLASSES}"
        )
    return refused | _misspelt(members, agreed) | _list_unsaid(members, agreed)


def _list_unsaid(members: Mapping[str, Member], agreed: Agreement) -> dict[str, str]:
    """Return the sites that bring a name which says nothing, as "Label", and is another site's so far."""
    names = {name for name in agreed.owners if shared_generic({name: ("", "")}, agreed.accept)}
    return {
        site: (
            f"its class {name!r} does not say which finding is meant, and another site has a class of this "
            f'name; write under [data.synonyms]: "{name}" = "NAME OF THE FINDING"'
        )
        for site, member in members.items()
        for name in names.intersection(member.names)
        if site not in agreed.owners[name]
    }


def _contradicting(infos: Mapping[str, SiteInfo], agreed: Agreement) -> dict[str, str]:
    """Return the sites whose codes contradict several others, the built-in ones or the experiment's."""
    refused: dict[str, str] = {}
    while True:
        try:
            _names({site: info for site, info in infos.items() if site not in refused}, agreed)
            return refused
        except ClassConflict as conflict:
            if (site := culprit(conflict, agreed.labels)) is None:
                return refused
            refused[site] = printable(str(conflict))


def _map_names(infos: Mapping[str, SiteInfo], label_map: Mapping[str, str]) -> dict[str, str]:
    """Return the name of each class by its canonical name, as the job's label map says."""
    own = {canonical(label) for info in infos.values() for label in info.labels}
    mapped = {canonical(spelling): canonical(name) for spelling, name in label_map.items()}
    return {name: mapped.get(name, name) for name in own}


def _list_statements(infos: Mapping[str, SiteInfo], names: Mapping[str, str]) -> list[Statement]:
    """Return what the sites state, by the given names of the classes."""
    return [
        Statement(names[canonical(label)], code, site)
        for site, info in infos.items()
        for label, codes in info.codes.items()
        for code in codes
    ]


def _names(infos: Mapping[str, SiteInfo], agreed: Agreement) -> dict[str, str]:
    """Return the federation's name of each class by its canonical name: by the label map, then by codes.

    Raises:
        ClassConflict: the codes contradict each other.
    """
    mapped = _map_names(infos, agreed.label_map)
    said = [*_list_statements(infos, mapped), *statements(agreed.codes, EXPERIMENT)]
    lists = [{mapped[canonical(label)] for label in info.labels} for info in infos.values()]
    classes = one_name(said, agreed.labels, lists)
    return {own: classes.get(name, name) for own, name in mapped.items()}


def _usual(values: Iterable[_T]) -> _T | None:
    """Return the value of more than half of the sites, and of two or more; None where there is none."""
    counts = Counter(values)
    value, n = counts.most_common(1)[0] if counts else (None, 0)
    return value if n >= 2 and 2 * n > counts.total() else None


def _misspelt(members: Mapping[str, Member], agreed: Agreement) -> dict[str, str]:
    """Return the sites with a class name that is nearly one of the experiment, or of several other sites.

    A site that alone is nearly the same as several others in names of one site each is refused too.
    """
    registry = _registry(members, agreed.labels)
    owners = registry.owners()
    pair_of_site: dict[str, tuple[str, str]] = {}
    open_: list[tuple[set[str], tuple[str, str]]] = []
    for pair in _list_unaccepted(registry, agreed.accept):
        new = [name for name in pair if name not in agreed.labels and len(owners[name]) < 2]
        sites = {owners[name][0] for name in new}
        if len(sites) == 1:
            pair_of_site.setdefault(sites.pop(), pair)
        elif sites:
            open_.append((sites, pair))
    common = set.intersection(*(sites for sites, _ in open_)) if len(open_) > 1 else set()
    if len(common) == 1:
        pair_of_site.setdefault(common.pop(), open_[0][1])
    return {
        site: (
            f"its class names: {a!r} and {b!r} are nearly the same; map one to the other in the job's "
            "label_map, or accept both as different (--accept-labels)"
        )
        for site, (a, b) in pair_of_site.items()
    }


def _registry(members: Mapping[str, Member], previous: Labels) -> SiteRegistry:
    """Return the registry of the classes that a site annotates, or that the experiment has.

    A class of which all sites know positives alone would be learned as present everywhere: it is left out.
    """
    labels = {name for member in members.values() for name in member.annotated}.union(previous)
    kept = {
        site: member if labels.issuperset(member.names) else member.only(labels)
        for site, member in members.items()
    }
    return SiteRegistry(kept, tuple(sorted(labels)))


def agree(infos: Mapping[str, SiteInfo], agreed: Agreement) -> SiteRegistry:
    """Return the registry of the sites, with one name for each class.

    Raises:
        LabelError: two names of a site become one.
        ClassConflict: see `one_name`.
        FederationError: there are too many classes, names are nearly the same and neither mapped nor
            accepted, some sites are multilabel and others multiclass, or the sites hold different priors, or
            not the one that the experiment began with.
    """
    label_type = one_label_type({site: info.label_type for site, info in infos.items()})
    prior = _one_prior(infos, agreed.prior)
    names = _names(infos, agreed)
    members = {site: _member(site, info, names) for site, info in sorted(infos.items())}
    stated_codes: dict[str, set[str]] = {}
    for name, code, _ in (*_list_statements(infos, names), *statements(agreed.codes, EXPERIMENT)):
        stated_codes.setdefault(name, set()).add(code)
    codes = {name: tuple(sorted(of)) for name, of in sorted(stated_codes.items())}
    registry = replace(_registry(members, agreed.labels), label_type=label_type, prior=prior, codes=codes)
    if len(registry.labels) > MOST_CLASSES:
        raise FederationError(
            f"the sites have {len(registry.labels)} classes together; at most {MOST_CLASSES} are possible"
        )
    _refuse_lookalikes(registry, agreed.accept)
    _refuse_shared_generic(registry, agreed.accept)
    return registry


def one_label_type(types: Mapping[str, LabelType]) -> LabelType:
    """Return the type that the labels of all sites have.

    Raises:
        FederationError: there are two.
    """
    sites = {label_type: site for site, label_type in sorted(types.items())}
    if len(sites) > 1:
        both = " and ".join(f"{site} is {label_type}" for label_type, site in sorted(sites.items()))
        raise FederationError(f"{both}; set [data] label_type to the same value everywhere")
    return next(iter(sites), "multilabel")


def _member(site: str, info: SiteInfo, named: Mapping[str, str]) -> Member:
    """Return a site with the federation's names of its classes, given by their canonical names."""
    called = {label: named[canonical(label)] for label in info.labels}
    annotated = {name for label, name in called.items() if label not in info.one_sided}
    # An ancestor that is a class of the site under another name is no further class.
    own = tuple(n for n in info.labels if n not in info.one_sided or called[n] not in annotated)
    names = tuple(called[label] for label in own)
    times = Counter(names)
    for label, name in zip(own, names, strict=True):
        if times[name] > 1:
            raise LabelError(
                f"{site}: {label!r} and another of its labels both mean {name!r}; correct the label "
                "map, or [data] codes"
            )
    n = {str(split): count for split, count in info.n.items()}
    protection = {str(name): value for name, value in info.protection.items()}
    one_sided = tuple(name for name in names if name not in annotated)
    return Member(own, names, n, info.threads, protection, info.computed_on, one_sided)


def _one_prior(infos: Mapping[str, SiteInfo], first: str | None) -> str | None:
    """Return the digest that all sites hold: what they measure against different networks is incomparable."""
    holders: dict[str | None, list[str]] = {}
    for site, info in sorted(infos.items()):
        holders.setdefault(info.prior, []).append(site)
    listed = {digest: f"{', '.join(sites)}: {(digest or 'none')[:12]}" for digest, sites in holders.items()}
    if others := "; ".join(text for digest, text in listed.items() if first and digest != first):
        raise FederationError(
            f"the experiment was begun with the prior {first:.12}, which some sites lack ({others}); "
            "give these the same file, or begin a new experiment"
        )
    if len(holders) > 1:
        raise FederationError(
            f"the sites have different priors ({'; '.join(listed.values())}); give all of them the same file"
        )
    return next(iter(holders), None)


def _refuse_lookalikes(registry: SiteRegistry, accept: bool | tuple[str, ...]) -> None:
    pairs = _list_unaccepted(registry, accept)
    if not pairs:
        return
    at = {name: f"{name!r} ({', '.join(sites)})" for name, sites in registry.owners().items()}
    lines = [f"  {at[a]} and {at[b]}" for a, b in pairs[:_SHOWN]]
    if len(pairs) > _SHOWN:
        lines.append(f"  and {len(pairs) - _SHOWN} more pairs")
    spelling, name = sorted(pairs[0], key=lambda one: one in CANONICAL)  # the usual name stays
    raise FederationError(
        "these names of different sites are nearly the same:\n"
        + "\n".join(lines)
        + "\nIf they are one class, map one to the other in the job's label_map "
        + f"(for example --set label_map.{spelling.replace(' ', '_')}={name.replace(' ', '_')}); "
        + f'if they are different classes, accept them (--accept-labels "{spelling}"). '
        + "`suture labels` records such decisions for a study."
    )


def _refuse_shared_generic(registry: SiteRegistry, accept: bool | tuple[str, ...]) -> None:
    unsaid = {name: sites for name, sites in registry.owners().items() if name not in registry.codes}
    for name, sites in shared_generic(unsaid, accept).items():
        raise FederationError(
            f"{', '.join(sites)} each have a class {name!r}, which does not say which finding is meant. "
            f'Name it at each site under [data.synonyms]: "{name}" = "NAME OF THE FINDING". If it is '
            f'the same class at all of them, accept it (--accept-labels "{name}")'
        )


def shared_generic(
    owners: Mapping[str, Iterable[str]], accept: bool | tuple[str, ...]
) -> dict[str, tuple[str, ...]]:
    """Return the sites of each class that several have under a name that says nothing, and nobody accepted.

    Args:
        owners: the sites of each class.
        accept: see `Agreement`.
    """
    if accept is True:
        return {}
    accepted = {canonical(name) for name in accept or ()}
    found = {name: tuple(sites) for name, sites in owners.items() if is_generic(name)}
    return {name: sites for name, sites in found.items() if len(sites) > 1 and name not in accepted}


def _list_unaccepted(registry: SiteRegistry, accept: bool | tuple[str, ...]) -> list[tuple[str, str]]:
    """Return the pairs of names that are nearly the same and not accepted as two classes."""
    if accept is True:
        return []
    accepted = {canonical(name) for name in accept or ()}
    return [(a, b) for a, b in _lookalikes(registry.labels) if not {a, b} & accepted]


@lru_cache(maxsize=1)  # asked by `misfits` and by `agree`
def _lookalikes(labels: Labels) -> list[tuple[str, str]]:
    return lookalikes(labels)
