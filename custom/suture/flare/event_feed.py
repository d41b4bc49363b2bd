"""What is happening in a running job, told to whoever asks FLARE for its statistics (`show_stats`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from suture.core.files import whole_lines

GROUP = "suture"

EXPERIMENT = "suture_experiment"
"""Where a job's meta.json says which experiment it is."""

_LAST = 100


class EventFeed:
    """Reads back what the server notes of its run.

    Args:
        events: the run's events.jsonl; what is in it already is of an earlier job.
    """

    def __init__(self, events: Path) -> None:
        self._events = events
        self._old = len(whole_lines(self._events))

    def recent(self) -> dict[str, Any]:
        """The newest events of this job, and the number of the first of them within the file, from 0."""
        lines = whole_lines(self._events)
        first = max(self._old, len(lines) - _LAST)
        return {"first": first, "events": [json.loads(line) for line in lines[first:]]}
