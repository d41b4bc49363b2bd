"""Attendance: which sites fetch their tasks. A round does not wait for a site that is gone."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable

PATIENCE = 25.0
"""Seconds in which a site fetches a task: it asks every two seconds; a restarted process needs 5 to 15."""

LATE = 4.0
"""Seconds after which a fetch is late."""

MOST_LATE = 3
"""Number of late fetches after which rounds with a grace period no longer wait for a site's fetch; a site's
launcher restarts a job process as often."""


class Attendance:
    """Notes which sites leave their tasks unfetched, and when they fetch again.

    Args:
        notify: is called with the events of a site: ``fetched``, its first task, ``gone`` and ``back``.
    """

    def __init__(self, notify: Callable[..., None]) -> None:
        self._notify = notify
        self._offered: dict[str, float] = {}  # since when a site has left what it was offered
        self._seen: set[str] = set()
        self._fetched: dict[str, float] = {}  # when a site fetched its newest task
        self._late: Counter[str] = Counter()
        self.gone: set[str] = set()

    def offer(self, sites: Iterable[str]) -> None:
        """Note that each of these sites has a task to fetch."""
        for site in sites:
            self._offered.setdefault(site, time.monotonic())

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
            missing: the sites that did not answer. Those that have left their tasks unfetched for `PATIENCE`
                seconds are gone.
        """
        self._offered = {site: self._offered[site] for site in missing if site in self._offered}
        for site, since in list(self._offered.items()):  # another thread may note a fetch
            if site not in self.gone and time.monotonic() - since >= PATIENCE:
                self.gone.add(site)
                self._notify("gone", site=site)
