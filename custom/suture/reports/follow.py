"""Following a run: the events that are appended to its events.jsonl, as they come.

Whoever wants to know of a round follows this file: the server's process writes it, which may be another one
(the simulator) or on another machine (a POC, production), whose events the launcher appends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from suture.core.plain import open_regular


class _Follower(threading.Thread):
    """Calls a function with each line that is appended to a file from now on.

    Args:
        events: the file, which need not be there yet.
        take: gets each whole line, with its end; it must not raise.
    """

    def __init__(self, events: Path, take: Callable[[str], None]) -> None:
        super().__init__(daemon=True)
        self._events, self._take = events, take
        self._position = events.stat().st_size if events.exists() else 0
        self._ending = threading.Event()

    def run(self) -> None:
        last = False
        while not last:
            last = self._ending.is_set()  # one more look after the end of the run
            try:
                self._read()
            except FileNotFoundError:
                self._position = 0  # not there yet, or a run is replaced
            if not last:
                self._ending.wait(0.1)

    def end(self) -> None:
        """Read what is left and wait for the end of the thread."""
        self._ending.set()
        self.join()

    def _read(self) -> None:
        with open_regular(self._events) as file:
            if self._position > file.seek(0, 2):
                self._position = 0  # another run has replaced the one of the folder
            file.seek(self._position)
            for raw in file:
                if not raw.endswith(b"\n"):
                    return
                self._position += len(raw)
                self._take(raw.decode(errors="replace"))


@contextmanager
def followed(events: Path, take: Callable[[str], None]) -> Iterator[None]:
    """Call a function with each line that is appended to a file while the block runs; see `_Follower`."""
    follower = _Follower(events, take)
    follower.start()
    try:
        yield
    finally:
        follower.end()
