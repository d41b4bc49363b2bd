"""The event feed: the events of a running job, for whoever requests FLARE's statistics (`show_stats`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from suture.core.files import whole_lines

GROUP = "suture"
"""Group of FLARE's statistics in which the events are."""

EXPERIMENT = "suture_experiment"
"""Key of the experiment's name in a job's meta.json."""

SHARED_WITH = "suture_shared_with"
"""Key of a job's meta.json: the users with whom its submitter shares the experiment."""

_LAST = 100
"""Largest number of events in one reply."""


class EventFeed:
    """Reads the events that the server records of its run.

    Args:
        events: the run's events.jsonl. Events that are already in it belong to an earlier job.
    """

    def __init__(self, events: Path) -> None:
        self._events = events
        self._earlier = len(whole_lines(self._events))

    def recent(self) -> dict[str, Any]:
        """Return the newest events of this job, and the index of the first of them in the file, from 0."""
        lines = whole_lines(self._events)
        first = max(self._earlier, len(lines) - _LAST)
        return {"first": first, "events": [json.loads(line) for line in lines[first:]]}
