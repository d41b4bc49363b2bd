"""The events of a run at a server, kept up to date in a file here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from suture.federation.server.record import Record


class Tail:
    """Appends to a run folder's events.jsonl what is new; the progress display reads it there.

    Args:
        folder: of the run, on this machine.
    """

    def __init__(self, folder: Path) -> None:
        self._record = Record(folder)
        self._path = folder / "events.jsonl"
        self._next: int | None = None
        self._said = ""

    def take(self, first: int, events: Sequence[dict[str, Any]]) -> None:
        """Adds the events that are not here yet.

        Args:
            first: number of the first of them among the server's.
        """
        start = first if self._next is None else self._next
        self._next = max(start, first + len(events))
        with self._path.open("a") as file:
            file.writelines(json.dumps(event) + "\n" for event in events[max(0, start - first) :])

    def finish(self, everything: Sequence[dict[str, Any]]) -> None:
        """Adds what came after the last `take`; `everything` is the server's whole file."""
        begun = [number for number, event in enumerate(everything) if event["event"] == "begin"]
        first = self._next if self._next is not None else (begun[-1] if begun else len(everything))
        self.take(first, everything[first:])

    def say(self, text: str) -> None:
        """A line for the reader, unless it was the last one too."""
        if text and text != self._said:
            self._record.event("note", text=text)
            self._said = text
