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


@contextmanager
def followed(events: Path, take: Callable[[str], None]) -> Iterator[None]:
    """Call a function, in a thread, with each line that is appended to a file while the block runs.

    Args:
        events: the file, which need not be there yet.
        take: gets each whole line, with its end; it must not raise.
    """
    begun, ending = events.stat().st_size if events.exists() else 0, threading.Event()
    thread = threading.Thread(target=_follow, args=(events, take, begun, ending), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


def _follow(events: Path, take: Callable[[str], None], position: int, ending: threading.Event) -> None:
    last = False
    while not last:
        last = ending.is_set()  # one more look after the end of the run
        try:
            position = _read(events, take, position)
        except FileNotFoundError:
            position = 0  # not there yet, or a run is replaced
        if not last:
            ending.wait(0.1)


def _read(events: Path, take: Callable[[str], None], position: int) -> int:
    """Take the whole lines from a position on; return the position after them."""
    with open_regular(events) as file:
        if position > file.seek(0, 2):
            position = 0  # another run has replaced the one of the folder
        file.seek(position)
        for raw in file:
            if not raw.endswith(b"\n"):
                break
            position += len(raw)
            take(raw.decode(errors="replace"))
    return position
