"""Attendance: which sites fetch their tasks and are heard. A round does not wait for one that is gone."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable

PATIENCE = 25.0
"""Seconds in which a site fetches a task: it asks every two seconds; a restarted process needs 5 to 15."""

LATE = 4.0
"""Seconds after which a fetch is late."""

MOST_LATE = 3
"""Number of late fetches after which rounds with a grace period no longer wait for a site's fetch; a site's
launcher restarts a job process as often."""

SILENT = 60.0
"""Seconds without a heartbeat after which a site is lost: its job process sends one every ten."""

GRACE = 120.0
"""Seconds in which a lost site may be heard again, before a round with enough updates ends without it."""

WAIT = 120.0
"""Seconds after which the run says whom it waits for; again after twice as long, at least every `LONG`."""

LONG = 600.0


class Attendance:
    """Notes which sites leave their tasks unfetched, and when they fetch again.

    Args:
        notify: is called with the events of a site: ``fetched``, its first task, ``gone`` and ``back``; and
            with ``waiting``.
    """

    def __init__(self, notify: Callable[..., None]) -> None:
        self._notify = notify
        self._offered: dict[str, float] = {}  # since when a site has left what it was offered
        self._seen: set[str] = set()
        self._fetched: dict[str, float] = {}  # when a site fetched its newest task
        self._late: Counter[str] = Counter()
        self._heard: dict[str, float] = {}  # when a site's newest heartbeat came
        self._waiting, self._since, self._told = frozenset[str](), 0.0, 0.0
        self.gone: set[str] = set()

    def offer(self, sites: Iterable[str]) -> None:
        """Note that each of these sites has a task to fetch."""
        self._waiting = frozenset()
        for site in sites:
            # Not renewed: a site that left an earlier task unfetched has been silent since that one.
            self._offered.setdefault(site, time.monotonic())

    def heard(self, site: str) -> None:
        """Note a heartbeat of a site's job process, which sends them while it trains, too."""
        self._heard[site] = time.monotonic()

    def silence(self, site: str) -> float:
        """Return for how many seconds a lost site has been silent; 0 for another one.

        One that was never heard is not lost: it may be starting, or its transport knows no heartbeats.
        """
        silent = time.monotonic() - self._heard[site] if site in self._heard else 0.0
        return silent if silent >= SILENT else 0.0

    def absent(self, site: str) -> bool:
        """Whether a round with enough updates does not wait for a site: it is gone, or has long been lost."""
        return site in self.gone or self.silence(site) >= SILENT + GRACE

    def waits(self, sites: Collection[str]) -> None:
        """Say which sites an exchange waits for, where it has waited long for the same ones."""
        now = time.monotonic()
        if self._waiting != set(sites):
            self._waiting, self._since, self._told = frozenset(sites), now, 0.0
        waited = now - self._since
        if sites and waited >= max(WAIT, self._told + min(self._told, LONG)):
            self._told = waited
            lost = [site for site in sorted(sites) if self.silence(site)]
            self._notify("waiting", sites=sorted(sites), seconds=round(waited), lost=lost)

    def fetched(self, site: str) -> None:
        """Note that a site has fetched its task."""
        if (offered := self._offered.pop(site, None)) is not None:  # a repeated fetch gains no time
            self._fetched[site] = time.monotonic()
            self._late[site] += self._fetched[site] - offered >= LATE
        if site not in self._seen:
            self._seen.add(site)
            self._notify("fetched", site=site)
        if site in self.gone:
            self.gone.discard(site)
            self._notify("back", site=site)

    def awaited(self, site: str, grace: float) -> bool:
        """Whether a round with a grace period waits for a site.

        It waits until the site fetches its task, unless it is gone, and `grace` seconds from then on. A
        killed process that is being restarted would otherwise miss many short rounds.
        """
        if (offered := self._offered.get(site)) is None:
            return time.monotonic() - self._fetched.get(site, -grace) < grace
        expected = site not in self.gone and self._late[site] < MOST_LATE
        return expected and time.monotonic() - offered < PATIENCE

    def close(self, missing: Iterable[str]) -> None:
        """End an exchange.

        Args:
            missing: the sites that did not answer. Those that are lost, or have left their tasks unfetched
                for `PATIENCE` seconds, are gone.
        """
        now = time.monotonic()
        self._offered = {site: self._offered[site] for site in missing if site in self._offered}
        for site in missing:
            left = now - self._offered.get(site, math.inf) >= PATIENCE  # another thread may note a fetch
            if site not in self.gone and (left or self.silence(site)):
                self.gone.add(site)
                self._notify("gone", site=site)
