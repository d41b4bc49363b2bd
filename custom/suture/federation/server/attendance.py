"""Attendance: which sites fetch their tasks. A round does not wait for a site that is gone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

PATIENCE = 10.0
"""Seconds in which a site that works fetches a task: sites ask every two seconds at least."""


class Attendance:
    """Notes which sites leave their tasks unfetched, and when they fetch again.

    Args:
        notify: is called with the events of a site: ``fetched``, its first task, ``gone`` and ``back``.
    """

    def __init__(self, notify: Callable[..., None]) -> None:
        self._notify = notify
        self._offered: dict[str, float] = {}  # since when a site has left what it was offered
        self._seen: set[str] = set()
        self.gone: set[str] = set()

    def offer(self, sites: Iterable[str]) -> None:
        """Note that each of these sites has a task to fetch."""
        for site in sites:
            self._offered.setdefault(site, time.monotonic())

    def fetched(self, site: str) -> None:
        """Note that a site has fetched its task."""
        self._offered.pop(site, None)
        if site not in self._seen:
            self._seen.add(site)
            self._notify("fetched", site=site)
        if site in self.gone:
            self.gone.discard(site)
            self._notify("back", site=site)

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
