"""Sites whose updates were unlike those of the others, or were rejected: what the history of a run shows.

All marks compare the sites of a round with its median and with the mean of the others. So they say the same
of a few liars among honest sites, and of an honest site among liars.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from suture.protocol.records import Round, SiteRound

OPPOSED = -0.1
"""A cosine below this is marked: that of two unrelated updates is nearer to 0. So is none above half of the
lowest one of its round: one liar of three is a third of every mean, and so honest sites oppose it too.
"""

LONG = 10.0
"""A norm is marked that is more than this many times the median of the round's."""

SHORT = 0.01
"""A norm is marked that is less than this many times the median: a site that sends back what it received."""

_FEWEST = 3
"""Updates of a round that can show which one is unlike the others."""


@dataclass(frozen=True)
class SiteUpdates:
    """The accepted updates of one site.

    Attributes:
        rounds: number of rounds with at least three updates.
        norm: median over these rounds of the norm, in medians of the round.
        cosine, lowest: median and lowest cosine to the mean of the others.
        opposed, long, short: number of rounds in which the cosine and the norm were marked.
        loss: the site's newest validation loss.
    """

    rounds: int
    norm: float | None
    cosine: float | None
    lowest: float | None
    opposed: int
    long: int
    short: int
    loss: float | None

    @property
    def marks(self) -> list[str]:
        """What was so in more than half of the rounds."""
        said = {
            "opposed to the other sites": self.opposed,
            f"over {LONG:g} times as long": self.long,
            "less than a hundredth as long": self.short,
        }
        return [f"{text} in {n} of {self.rounds}" for text, n in said.items() if 2 * n > self.rounds]


def outlying(sent: Mapping[str, SiteRound]) -> dict[str, dict[str, float]]:
    """Return the sites whose update of one round is marked, with the figures that mark it.

    Args:
        sent: the accepted updates of the round.
    """
    if len(sent) < _FEWEST:
        return {}
    usual = _usual(sent)
    limit = min(OPPOSED, min((s.cosine for s in sent.values() if s.cosine is not None), default=0.0) / 2)
    found: dict[str, dict[str, float]] = {}
    for name, site in sent.items():
        if site.cosine is not None and site.cosine < limit:
            found[name] = {"cosine": site.cosine}
        if usual and not SHORT <= (ratio := (site.norm or 0.0) / usual) <= LONG:
            found[name] = found.get(name, {}) | {"norm": ratio}
    return found


def _usual(sent: Mapping[str, SiteRound]) -> float:
    """Return the median norm of the updates of one round."""
    return median(site.norm or 0.0 for site in sent.values())


def site_updates(history: Sequence[Round]) -> dict[str, SiteUpdates]:
    """Return what the updates of each site were like, where rounds had at least three of them."""
    norms: dict[str, list[float]] = {}
    cosines: dict[str, list[float]] = {}
    losses: dict[str, float] = {}
    opposed: Counter[str] = Counter()
    for line in history:
        losses |= {name: s.validation_loss for name, s in line.sites.items() if s.validation_loss is not None}
        sent = {name: s for name, s in line.sites.items() if s.status == "accepted" and s.norm is not None}
        if len(sent) < _FEWEST:
            continue
        odd, usual = outlying(sent), _usual(sent)
        for name, site in sent.items():
            norms.setdefault(name, []).append((site.norm or 0.0) / usual if usual else 1.0)
            opposed[name] += "cosine" in odd.get(name, {})
            if site.cosine is not None:
                cosines.setdefault(name, []).append(site.cosine)
    return {
        name: _of(norms[name], cosines.get(name, []), opposed[name], losses.get(name))
        for name in sorted(norms)
    }


def _of(norms: Sequence[float], cosines: Sequence[float], opposed: int, loss: float | None) -> SiteUpdates:
    return SiteUpdates(
        len(norms),
        median(norms),
        median(cosines) if cosines else None,
        min(cosines, default=None),
        opposed,
        sum(one > LONG for one in norms),
        sum(one < SHORT for one in norms),
        loss,
    )
