"""The record of a run: run.json, history.jsonl, events.jsonl and metrics.json."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from suture.core.environment import now, versions
from suture.core.files import append_line, atomic_write, whole_lines, write_json
from suture.federation.plan import Plan, Schedule
from suture.models.classifier import Layout
from suture.protocol.egress import declared

log = logging.getLogger(__name__)


class Record:
    """Writes the files of one run folder.

    Args:
        folder: of the run; `run.json` in it may already describe the job.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "run.json"
        self.run: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def update(self, **facts: Any) -> None:
        """Add facts to run.json."""
        self.run |= facts
        write_json(self.folder / "run.json", self.run)

    def event(self, kind: str, **facts: Any) -> None:
        """Append a line to events.jsonl: what happens now, for the progress display.

        Never raises: a round does not fail because of the display.
        """
        try:
            append_line(self.folder / "events.jsonl", {"time": now(), "event": kind, **facts})
        except OSError as error:
            log.warning("%s: %s", self.folder, error)

    def history(self, line: dict[str, Any]) -> None:
        """Append a round to history.jsonl.

        Raises:
            OSError: the disk is full; the file is unchanged.
        """
        append_line(self.folder / "history.jsonl", line)

    def rewind(self, committed: int) -> None:
        """Delete the committed round and later ones: they will be written again.

        An incomplete line, of a process that died while it wrote, is deleted too.
        """
        path = self.folder / "history.jsonl"
        if path.exists():
            lines = [text for text in whole_lines(path) if json.loads(text)["round"] < committed]
            atomic_write(path, "".join(f"{text}\n" for text in lines).encode())

    def reopen(self, committed: int) -> None:
        """Delete the line of a committed round: it will be validated, and written, again."""
        path = self.folder / "history.jsonl"
        lines = whole_lines(path) if path.exists() else []
        wanted = (committed, "committed")
        others = [t for t in lines if (json.loads(t)["round"], json.loads(t)["status"]) != wanted]
        atomic_write(path, "".join(f"{text}\n" for text in others).encode())

    def metrics(self, content: dict[str, Any]) -> None:
        """Write metrics.json."""
        write_json(self.folder / "metrics.json", content)

    def close(self, status: str, error: str | None = None) -> None:
        """Set the final status."""
        self.update(status=status, error=error, finished=now())

    def give_up(self, status: str, error: str) -> None:
        """Set the final status if the disk permits: it may be what has failed."""
        try:
            self.close(status, error)
        except OSError as full:
            log.error("%s could not be written either: %s", self.folder, full)


def describe(record: Record, plan: Plan, schedule: Schedule) -> None:
    """Write what is about to run into run.json."""
    described = plan.to_dict()
    started = record.run.get("started") if record.run.get("status") == "running" else None
    record.update(
        job=schedule.job,
        title=schedule.title,
        env=record.run.get("env", "flare"),
        method={
            "name": plan.method.about.name,
            "title": plan.method.about.title,
            "paper": plan.method.about.paper,
            "hyperparameters": described["hyperparameters"],
            "personal": plan.method.personal,
            "pooled": plan.method.limits.pooled,
        },
        model=described["model"],
        augmentation=described["augmentation"],
        rounds=schedule.rounds,
        seed=plan.seed,
        experiment=plan.experiment,
        code=plan.code,
        versions=versions(),
        egress=declared(plan.method.egress(Layout({}, {})), local=plan.method.keep_local),
        labels=[],
        sites={},
        threads={"server": 1},
        started=started or now(),
        status="running",
        error=None,
        finished=None,
        selected_round=None,
        selection=schedule.selection,
    )
