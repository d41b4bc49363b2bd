"""Who knows which label: what the sites said of themselves, and the names they agree on.

The server alone holds this. A site keeps its own spelling of each class; the server translates between that
and the federation's name, so that a site learns nothing of the others' names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from suture.core.errors import FederationError, LabelError
from suture.core.labels import LabelType, canonical, lookalikes
from suture.methods.base import LabelStatistics, LabelView
from suture.protocol.messages import ClassScore, Labels, Metrics, SiteInfo, Update

T = TypeVar("T")


@dataclass(frozen=True)
class Member:
    """A site that takes part.

    Attributes:
        own: its class names as it writes them, in its order.
        names: the federation's name of each of them, in the same order.
        n: images in each split.
        protection: see `SiteInfo`.
    """

    own: Labels
    names: Labels
    n: Mapping[str, int]
    threads: int
    protection: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SiteRegistry:
    """The sites and the union C of their classes.

    Attributes:
        members: by site name.
        labels: every class that a site knows or once knew, sorted.
        label_type: what every site says it is.
        prior: digest of the frozen network that all of them hold, where the method has one.
    """

    members: Mapping[str, Member]
    labels: Labels
    label_type: LabelType = "multilabel"
    prior: str | None = None

    def owners(self) -> dict[str, tuple[str, ...]]:
        """For each class, the sites that know it, in order."""
        return {
            label: tuple(s for s in sorted(self.members) if label in self.members[s].names)
            for label in self.labels
        }

    def rows_for(self, site: str, view: LabelView) -> Labels:
        """The federation's names of the rows that a site is sent: its own, or all."""
        return self.members[site].names if view == "own" else self.labels

    def to_site(self, site: str, labels: Labels) -> Labels:
        """The site's own spelling of federation names."""
        own = dict(zip(self.members[site].names, self.members[site].own, strict=True))
        return tuple(own.get(name, name) for name in labels)

    def from_site(self, site: str, update: Update) -> Update:
        """The update with its rows under the federation's names."""
        return replace(update, labels=tuple(self.named(site, dict.fromkeys(update.labels))))

    def classes_from_site(self, site: str, metrics: Metrics) -> dict[str, ClassScore]:
        """What a site measured of each class, under the federation's names."""
        return self.named(site, metrics.classes)

    def named(self, site: str, values: Mapping[str, T]) -> dict[str, T]:
        """Values by the site's spelling of the classes, by the federation's names."""
        names = dict(zip(self.members[site].own, self.members[site].names, strict=True))
        return {names.get(label, label): value for label, value in values.items()}

    def statistics(self, infos: Mapping[str, SiteInfo]) -> LabelStatistics:
        """What the sites said of their data, under the federation's names."""
        counts = {
            site: self.named(site, {own: infos[site].counts.get(own) for own in m.own})
            for site, m in self.members.items()
        }
        images = {s: m.n.get("train", 0) for s, m in self.members.items()}
        return LabelStatistics(self.labels, images, counts, self.label_type)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for the state and the run record."""
        return {
            "labels": list(self.labels),
            "label_type": self.label_type,
            "prior": self.prior,
            "members": {
                site: {"own": list(m.own), "names": list(m.names), "n": dict(m.n), "threads": m.threads}
                for site, m in self.members.items()
            },
        }


def agree(
    infos: Mapping[str, SiteInfo],
    previous: Labels,
    label_map: Mapping[str, str],
    accept: bool | tuple[str, ...],
    prior: str | None = None,
) -> SiteRegistry:
    """The roster of the sites that introduced themselves.

    Args:
        hellos: by site name.
        previous: classes of the model so far; a class whose last owner left keeps its row.
        label_map: site spelling to federation name.
        accept: look-alike names that are different classes on purpose; True accepts all.
        prior: digest that the run was begun with, where that is known.

    Raises:
        LabelError: two names of a site become one.
        FederationError: names of different sites are nearly the same and nobody said what they are, some
            sites are multilabel and some multiclass, or they hold different priors, or another than the run
            was begun with.
    """
    tasks = {info.label_type: site for site, info in sorted(infos.items())}
    if len(tasks) > 1:
        told = " and ".join(f"{site} is {task}" for task, site in sorted(tasks.items()))
        raise FederationError(f"{told}; one federation has one: set [data] label_type alike")
    held = _one_prior(infos, prior)
    renamed = {canonical(spelling): canonical(name) for spelling, name in label_map.items()}
    members = {}
    for site, info in sorted(infos.items()):
        names = tuple(renamed.get(canonical(label), canonical(label)) for label in info.labels)
        for label, name in zip(info.labels, names, strict=True):
            if names.count(name) > 1:
                raise LabelError(
                    f"{site}: {label!r} and another of its labels are both {name!r}; mend the label map"
                )
        n = {str(split): count for split, count in info.n.items()}
        protection = {str(name): value for name, value in info.protection.items()}
        members[site] = Member(info.labels, names, n, info.threads, protection)
    labels = {n for m in members.values() for n in m.names} | set(previous)
    registry = SiteRegistry(members, tuple(sorted(labels)), next(iter(tasks), "multilabel"), held)
    _refuse_lookalikes(registry, accept)
    return registry


def _one_prior(infos: Mapping[str, SiteInfo], begun: str | None) -> str | None:
    """The digest that all sites hold: numbers that they measure against different networks do not compare."""
    held: dict[str | None, list[str]] = {}
    for site, info in sorted(infos.items()):
        held.setdefault(info.prior, []).append(site)
    told = {digest: f"{', '.join(sites)}: {(digest or 'none')[:12]}" for digest, sites in held.items()}
    if others := "; ".join(text for digest, text in told.items() if begun and digest != begun):
        raise FederationError(
            f"the experiment was begun with the prior {begun:.12}, and not all sites hold it ({others}); "
            "give these the same file, or begin a new experiment"
        )
    if len(held) > 1:
        raise FederationError(
            f"the sites hold different priors ({'; '.join(told.values())}); give all of them the same file"
        )
    return next(iter(held), None)


def _refuse_lookalikes(registry: SiteRegistry, accept: bool | tuple[str, ...]) -> None:
    if accept is True:
        return
    accepted = {canonical(name) for name in accept or ()}
    pairs = [(a, b) for a, b in lookalikes(registry.labels) if not {a, b} & accepted]
    if not pairs:
        return
    owners = registry.owners()
    lines = [f"  {a!r} ({', '.join(owners[a])}) and {b!r} ({', '.join(owners[b])})" for a, b in pairs]
    raise FederationError(
        "these names of different sites are nearly the same:\n"
        + "\n".join(lines)
        + "\nIf they are one class, map one to the other in the job's label_map "
        + f"(for example --set label_map.{pairs[0][0].replace(' ', '_')}={pairs[0][1].replace(' ', '_')}); "
        + f'if they are two, accept them (--accept-labels "{pairs[0][0]}").'
    )
