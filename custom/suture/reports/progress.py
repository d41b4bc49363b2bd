"""What a run is doing right now: a live display, or plain lines where the output is not a terminal."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_MARKS = {
    "accepted": "[green]✓[/]",
    "rejected": "[red]✗[/]",
    "abstained": "[yellow]–[/]",
    "missing": "[red]?[/]",
}


class Progress:
    """Follows the events of a run."""

    def __init__(self, title: str, env: str) -> None:
        self.title = f"{title} [{env}]"
        self.round, self.rounds = 0, 0
        self.sites: dict[str, str] = {}
        self.loss: float | None = None
        self.auroc: float | None = None
        self.doing = "preparing the sites"
        self._done_rounds = 0
        self._since = time.monotonic()

    def take(self, event: dict[str, Any]) -> str | None:
        """Notes an event; returns the plain line that tells of it, if it is worth one."""
        kind = event["event"]
        line: str | None = None
        if kind == "begin":
            self.rounds, self.round = event["rounds"], event["round"]
            self.sites = dict.fromkeys(event["sites"], "")
            self._since, self._done_rounds = time.monotonic(), 0
            line = f"{len(self.sites)} sites, {len(event['labels'])} labels, {self.rounds} rounds"
            if self.round:
                line += f", continuing after round {self.round}"
            for site, reason in event["refused"].items():
                line += f"\n{site} does not take part: {reason}"
        elif kind == "round":
            self.round, self.sites = event["round"], dict.fromkeys(self.sites, "")
            self.doing = "training"
        elif kind == "answer":
            if event["site"] in self.sites:
                self.sites[event["site"]] = event["status"]
            if event["status"] != "accepted":
                line = f"{event['site']}: {event['status']}, {event['reason']}"
        elif kind == "validated":
            self.loss, self.auroc = event["loss"], event["auroc"]
        elif kind == "committed":
            self._done_rounds += 1
            self.doing = "evaluating" if self.round == self.rounds else "training"
            line = (
                f"round {self.round}/{self.rounds}  {event['seconds']:.1f} s{self._figures()}{self._left()}"
            )
        elif kind == "unchanged":
            line = event["why"]
        elif kind == "note":
            line = event["text"]
        elif kind == "finished":
            self.doing = "finished"
        return line

    def _figures(self) -> str:
        loss = "" if self.loss is None else f"  validation loss {self.loss:.4f}"
        return loss + ("" if self.auroc is None else f"  AUROC {self.auroc:.3f}")

    def _left(self) -> str:
        if not self._done_rounds or self.round >= self.rounds:
            return ""
        each = (time.monotonic() - self._since) / self._done_rounds
        seconds = int(each * (self.rounds - self.round))
        return f"  {seconds // 60}:{seconds % 60:02d} left"

    def __rich__(self) -> RenderableType:
        grid = Table.grid(padding=(0, 2))
        grid.add_row(
            Text.from_markup(f"round [b]{self.round}[/]/{self.rounds or '?'}"),
            ProgressBar(total=max(self.rounds, 1), completed=self._done_rounds, width=30),
            Text(self.doing + self._figures() + self._left()),
        )
        marks = "   ".join(f"{_MARKS.get(status, '[dim]…[/]')} {site}" for site, status in self.sites.items())
        return Group(Text(self.title, style="bold"), grid, Text.from_markup(marks))


@contextmanager
def following(out: Path, title: str, env: str) -> Iterator[None]:
    """Shows the events that a run appends to DIR/events.jsonl while the block runs."""
    # Bound now: FLARE's own printing is silenced elsewhere by exchanging sys.stdout for a moment.
    console = Console(file=sys.stdout)
    progress = Progress(title, env)
    path = out / "events.jsonl"
    start = path.stat().st_size if path.exists() else 0
    stop = threading.Event()
    live = Live(progress, console=console, refresh_per_second=4) if console.is_terminal else None

    def follow() -> None:
        position = start
        while True:
            last = stop.is_set()
            if path.exists():
                with path.open() as file:
                    file.seek(position)
                    for text in iter(file.readline, ""):
                        if not text.endswith("\n"):
                            break
                        position += len(text.encode())
                        line = progress.take(json.loads(text))
                        if line and (live is None or "round" not in line[:5]):
                            console.print(line, highlight=False, markup=False)
            if last:
                return
            stop.wait(0.1)

    thread = threading.Thread(target=follow, daemon=True)
    if live is None:
        console.print(f"{title} [{env}]", highlight=False, markup=False)
    else:
        live.start()
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        if live:
            live.stop()
