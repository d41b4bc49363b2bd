"""The progress of a run: a live display, or plain lines where the output is not a terminal.

A run is followed by the events that are appended to its events.jsonl. Whoever wants to know of a round
follows this file: the server's process writes it, which may be another one (the simulator) or on another
machine (a POC, production), whose events the launcher appends.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from suture.core.entry_points import if_installed
from suture.core.escaping import number_of, printable, printable_lines, printable_values, rich
from suture.core.files import open_regular


@contextmanager
def follow(events: Path, take: Callable[[str], None]) -> Iterator[None]:
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


_MARKS = {
    "accepted": "[green]✓[/]",
    "rejected": "[red]✗[/]",
    "abstained": "[yellow]–[/]",
    "missing": "[red]?[/]",
}

_FIGURES = {
    "loss": ("validation loss", 4),
    "auroc": ("AUROC", 3),
    "server_auroc": ("AUROC at the server", 3),
    "server_balanced_accuracy": ("balanced accuracy at the server", 3),
}
"""The figures of a round's model, each with its name and its digits."""


class Progress:
    """The state of a run as its events describe it; rich renders it as the live display."""

    def __init__(self, title: str, env: str) -> None:
        self.title = f"{title} [{env}]"
        self.round, self.rounds = 0, 0
        self.sites: dict[str, str] = {}
        self.newest: dict[str, str] = {}  # what a site did last, whatever the round
        self.figures = ""
        self.doing = "preparing the sites"
        self.left = ""
        self._done_rounds = 0
        self._since = self._now = time.monotonic()

    def take(self, event: dict[str, Any]) -> str | None:
        """Update the state by an event; return the line that describes the event, or None.

        Events of a server are text of another party: the line holds printable characters alone.
        """
        try:
            return self._take(event)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            return f"an event that cannot be read: {printable(event, 80)}"

    def _take(self, event: dict[str, Any]) -> str | None:
        raw, event = event, printable_values(event)  # which may quote what a site has sent
        kind = event["event"]
        line: str | None = None
        self._now = _seconds(event)
        if kind == "begin":
            line = self._begin(event)
        elif kind == "round":
            self.round, self.sites = int(event["round"]), dict.fromkeys(self.sites, "")
            self.doing = "training"
        elif kind == "answer":
            if event["site"] in self.sites:
                self.sites[event["site"]] = self.newest[event["site"]] = event["status"]
            if event["status"] != "accepted":
                line = f"{event['site']}: {event['status']}, {event['reason']}"
        elif kind == "gone":
            line = f"{event['site']} is gone: if it was started again, `suture resume` brings it back"
            self._silent([event["site"]])
        elif kind == "waiting":
            line = f"waiting for {', '.join(event['sites'])} for {int(event['seconds']) // 60} min"
            if lost := ", ".join(event["lost"]):
                line += f"; not heard from: {lost}"
                self._silent(event["lost"])
        elif kind == "back":
            self.sites |= {event["site"]: ""} if event["site"] in self.sites else {}
            line = f"{event['site']} is back"
        elif kind == "validated":
            line = self._describe_validation(event)
        elif kind == "committed":
            self._done_rounds += 1
            self.doing = "evaluating" if self.round == self.rounds else "training"
            self.left = self._time_left()
            line = f"round {self.round}/{self.rounds}  {event['seconds']:.1f} s{self.left}"
        elif kind in ("unchanged", "rolled_back"):
            line = event["why"]
        elif kind == "note":
            line = printable_lines(str(raw["text"]) if "text" in raw else _note(raw))
        elif kind == "finished":
            self.doing = "finished"
        return line

    def _silent(self, sites: list[str]) -> None:
        silent = dict.fromkeys(self.sites.keys() & set(sites), "not responding")
        self.sites |= silent
        self.newest |= silent

    def _begin(self, event: dict[str, Any]) -> str:
        self.rounds, self.round = int(event["rounds"]), int(event["round"])
        self.sites = dict.fromkeys(map(str, event["sites"]), "")
        self._since, self._done_rounds, self.left = self._now, 0, ""
        counts = {"site": len(self.sites), "label": len(event["labels"]), "round": self.rounds}
        line = ", ".join(number_of(n, what) for what, n in counts.items())
        if self.round:
            line += f", continuing after round {self.round}"
        refused = (f"\n{site} does not take part: {reason}" for site, reason in event["refused"].items())
        return line + "".join(refused)

    def _describe_validation(self, event: dict[str, Any]) -> str | None:
        """Return the figures of a round's model, which the sites measure when they get it for the next."""
        figures = [
            f"{name} {float(event[key]):.{digits}f}{_steps(event.get(f'{key}_step'))}"
            for key, (name, digits) in _FIGURES.items()
            if event.get(key) is not None
        ]
        if not figures:
            return None
        measured = event.get("sites", self.sites)
        by = f"  ({len(measured)} of {len(self.sites)} sites)" if len(measured) < len(self.sites) else ""
        self.figures = f"round {int(event['round'])}: {', '.join(figures)}{by}"
        return self.figures

    def _time_left(self) -> str:
        if not self._done_rounds or self.round >= self.rounds:
            return ""
        each = (self._now - self._since) / self._done_rounds
        seconds = int(each * (self.rounds - self.round))
        return f"  {seconds // 60}:{seconds % 60:02d} left"

    def __rich__(self) -> RenderableType:
        grid = Table.grid(padding=(0, 2))
        grid.add_row(
            Text.from_markup(f"round [b]{self.round}[/]/{self.rounds or '?'}"),
            ProgressBar(total=max(self.rounds, 1), completed=self._done_rounds, width=30),
            Text(f"{self.doing}{self.left}"),
        )
        marks = "   ".join(
            f"{_MARKS.get(status, '[dim]…[/]')} {rich(printable(site, 80))}"
            for site, status in self.sites.items()
        )
        figures = [Text(self.figures)] if self.figures else []
        return Group(Text(self.title, style="bold"), grid, *figures, Text.from_markup(marks, emoji=False))


def _seconds(event: dict[str, Any]) -> float:
    """Return when an event was, also where it is read later; now, if it does not say."""
    try:
        return datetime.fromisoformat(str(event.get("time"))).timestamp()
    except ValueError:
        return time.monotonic()


def _note(event: dict[str, Any]) -> str:
    """Return a note of the server as a sentence; without suture_results, its code and values."""
    code, values = str(event["code"]), dict(event["values"])
    return str(if_installed("sentence")(code, values) or f"{code}: {values}")


def _steps(step: float | None) -> str:
    return "" if step is None else f" in steps of {float(step):g}"


def _printer(progress: Progress, console: Console, live: Live | None) -> Callable[[str], None]:
    """Return the function that prints the line of an event; a live display shows the rounds itself."""

    def take(text: str) -> None:
        try:
            line = progress.take(json.loads(text))
        except (ValueError, RecursionError):
            line = f"an event that cannot be read: {printable(text, 80)}"
        if line and (live is None or not line.startswith("round")):
            console.print(line, highlight=False, markup=False)

    return take


@contextmanager
def following(out: Path, title: str, env: str) -> Iterator[None]:
    """Show the events that are appended to events.jsonl of the run folder OUT while the block runs.

    Args:
        title: of the job.
        env: where it runs; shown behind the title.
    """
    # Bound now, because other code replaces sys.stdout for a moment to silence FLARE.
    console = Console(file=sys.stdout, emoji=False)
    title = printable(title)
    progress = Progress(title, env)
    live = Live(progress, console=console, refresh_per_second=4) if console.is_terminal else None
    if live is None:
        console.print(f"{title} [{env}]", highlight=False, markup=False)
    else:
        live.start()
    try:
        with follow(out / "events.jsonl", _printer(progress, console, live)):
            yield
    finally:
        if live:
            live.stop()
