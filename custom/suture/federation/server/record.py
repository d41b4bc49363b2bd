"""What a run writes down: run.json, history.jsonl, events.jsonl and metrics.json."""

from __future__ import annotations

import json
import logging
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from suture import __version__
from suture.core.files import append_line, atomic_write, whole_lines, write_json

log = logging.getLogger(__name__)


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class Record:
    """Writes the files of one run folder.

    Args:
        folder: DIR of the run; `run.json` in it may already name the job.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "run.json"
        self.run: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def update(self, **facts: Any) -> None:
        """Adds facts to run.json."""
        self.run |= facts
        write_json(self.folder / "run.json", self.run)

    def event(self, kind: str, **facts: Any) -> None:
        """Appends a line to events.jsonl: what is happening right now, for the progress display.

        Never raises: a round does not fail for want of a display.
        """
        try:
            append_line(self.folder / "events.jsonl", {"time": now(), "event": kind, **facts})
        except OSError as error:
            log.warning("%s: %s", self.folder, error)

    def history(self, line: dict[str, Any]) -> None:
        """Appends a round to history.jsonl.

        Raises:
            OSError: the disk is full; the file has the rounds that it had.
        """
        append_line(self.folder / "history.jsonl", line)

    def rewind(self, committed: int) -> None:
        """Drops the rounds after the last one whose successor was committed: they will be written again.

        A line that was being written when the process died has no end, and goes too.
        """
        path = self.folder / "history.jsonl"
        if path.exists():
            lines = [text for text in whole_lines(path) if json.loads(text)["round"] < committed]
            atomic_write(path, "".join(f"{text}\n" for text in lines).encode())

    def metrics(self, content: dict[str, Any]) -> None:
        """Writes metrics.json."""
        write_json(self.folder / "metrics.json", content)

    def close(self, status: str, error: str | None = None) -> None:
        """Sets the final status."""
        self.update(status=status, error=error, finished=now())

    def give_up(self, status: str, error: str) -> None:
        """As `close`, as far as the disk permits: it may be what has failed."""
        try:
            self.close(status, error)
        except OSError as full:
            log.error("%s could not be written either: %s", self.folder, full)


def versions() -> dict[str, str]:
    """Versions of what a number may depend on."""
    packages = ("nvflare", "torch", "torchvision", "monai", "numpy", "pandas", "scikit-learn")
    found = {name: version(name) for name in packages}
    return {
        "suture": __version__,
        "python": platform.python_version(),
        **found,
        "torch build": torch.__version__,
    }
