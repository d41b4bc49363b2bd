"""The record of a run: run.json, history.jsonl, events.jsonl and metrics.json.

`SiteLedgers` has the newest digest that each site has stated of its ledger, over all experiments. The server
sends it with each task, so that a site whose ledger was rolled back, with its states or without,
finds a digest that the ledger lacks (`suture.federation.site.ledger`). A digest is salted and says nothing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from suture.core.errors import ConfigError
from suture.core.files import (
    append_line,
    atomic_write,
    hold,
    make_folder,
    read_json,
    read_records,
    read_regular,
    replacing,
    write_json,
)
from suture.core.labels import LabelType
from suture.core.runtime import now, versions
from suture.federation.plan import Plan, Schedule
from suture.models.classifier import Layout
from suture.protocol.egress import list_declared
from suture.protocol.messages import Digest
from suture.protocol.records import Note, Round, read_history

log = logging.getLogger(__name__)

LEDGERS = "ledgers.json"
"""File of the digests in the server's state folder."""

_WAIT = 60.0
"""Seconds to wait for another job of the server that writes the file."""

_DIGESTS = TypeAdapter(dict[str, Digest])


@dataclass(frozen=True)
class SiteLedgers:
    """The newest digest of each site's ledger; jobs that run at the same time share the file.

    It is not synchronised to the disk: after a power failure it may hold older digests, which sites still
    have.
    """

    path: Path

    def read(self) -> dict[str, str]:
        """Return the digests by site; none where the file cannot be read, with a warning."""
        try:
            return _DIGESTS.validate_json(read_regular(self.path))
        except FileNotFoundError:
            return {}
        except (OSError, ValidationError):
            log.warning(
                "%s is damaged: if a site rolled its ledger back meanwhile, the server cannot detect it",
                self.path,
            )
            return {}

    def note(self, stated: Mapping[str, str]) -> None:
        """Keep the digests that sites have stated with their answers.

        Raises:
            DiskError: the file cannot be written.
            InUse: another job holds it for too long.
        """
        if not stated:
            return
        with hold(self.path.with_name(f".{self.path.name}.lock"), _WAIT, f".{self.path.name}.*.tmp"):
            everything = self.read() | dict(stated)
            with replacing(self.path, durable=False, private=True) as temporary:
                temporary.write_text(json.dumps(everything, sort_keys=True))


SERVER_LOCK = ".server.lock"
"""The lock of a run folder: one job process at a time is its server."""

SERVER_TAKEOVER = 60.0
"""Seconds to wait for the lock: the job process of a server that was just killed may still be running."""


class Record:
    """Writes the files of one run folder.

    Args:
        folder: of the run; `run.json` in it may already describe the job.

    Attributes:
        listen: is called with each event, after it was written; it must not raise.

    Raises:
        DataError: run.json is damaged.
        DiskError: the folder cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.listen: Callable[[Mapping[str, Any]], None] = lambda _event: None
        make_folder(folder)
        path = folder / "run.json"
        self.run: dict[str, Any] = read_json(path) if path.exists() else {}

    def update(self, **facts: Any) -> None:
        """Add facts to run.json."""
        self.run |= facts
        write_json(self.folder / "run.json", self.run)

    def note(self, notes: Iterable[Note]) -> None:
        """Add notes for the reader of the report, unless they are there already."""
        known = self.run.get("notes", [])
        if new := [plain for note in notes if (plain := asdict(note)) not in known]:
            self.update(notes=[*known, *new])
            for plain in new:
                self.event("note", **plain)

    def event(self, kind: str, **facts: Any) -> None:
        """Append a line to events.jsonl: what happens now, for the progress display.

        Never raises: a round does not fail because of the display.
        """
        event = {"time": now(), "event": kind, **facts}
        try:
            append_line(self.folder / "events.jsonl", event)
        except OSError as error:
            log.warning("%s: %s", self.folder, error)
        self.listen(event)

    def history(self, line: Round) -> None:
        """Append a round to history.jsonl.

        Raises:
            DiskError: the disk is full; the file is unchanged.
        """
        append_line(self.folder / "history.jsonl", asdict(line))

    def note_validation(self, line: Round) -> None:
        """Append the round whose validation losses have arrived, and say so.

        Raises:
            DiskError: see `history`.
        """
        self.history(line)
        sites = sorted(site for site, one in line.sites.items() if one.validation_loss is not None)
        figures = {name: value for name, value in asdict(line.validation).items() if name != "unmeasured"}
        self.event("validated", round=line.round, sites=sites, **figures)

    def rewind(self, committed: int) -> None:
        """Delete the committed round and later ones: they will be written again.

        An incomplete line, of a process that died while it wrote, is deleted too.

        Raises:
            DataError: another line is damaged; names it.
        """
        if (self.folder / "history.jsonl").exists():
            read_history(self.folder)
            self._keep(lambda line: line["round"] < committed)

    def check_unbegun(self) -> None:
        """Refuse to begin a run whose rounds are here and whose states are not: its record would be lost.

        Raises:
            ConfigError: it is one.
        """
        path = self.folder / "history.jsonl"
        if path.exists() and any(line.get("status") == "committed" for line in read_records(path)):
            raise ConfigError(
                f"{self.folder} has the rounds of a run whose states were removed, as by `suture clean`; "
                "restore them from a backup, or begin a new experiment"
            )

    def reopen(self, committed: int) -> None:
        """Delete the line of a committed round: it will be validated, and written, again."""
        self._keep(lambda line: (line["round"], line["status"]) != (committed, "committed"))

    def _keep(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        path = self.folder / "history.jsonl"
        lines = [line for line in read_records(path) if wanted(line)]
        atomic_write(path, "".join(f"{json.dumps(line)}\n" for line in lines).encode())

    def metrics(self, content: dict[str, Any]) -> None:
        """Write metrics.json."""
        write_json(self.folder / "metrics.json", content)

    def close(self, status: str, error: str | None = None) -> None:
        """Set the final status."""
        self.update(status=status, error=error, finished=now())

    def give_up(self, status: str, error: str) -> None:
        """Set the final status if the disk permits: it may be what has failed.

        On one that is full, "failed" is written over the status of a run under way, which takes no room.
        """
        try:
            self.close(status, error)
        except OSError as full:
            log.error("run.json has no reason: %s", full)
            before, after = b'"status": "running"', b'"status": "failed" '
            with suppress(OSError), (self.folder / "run.json").open("r+b") as file:
                if (at := file.read().find(before)) >= 0:
                    file.seek(at)
                    file.write(after)


def what_leaves(plan: Plan, layout: Layout, label_type: LabelType | None = None) -> list[dict[str, str]]:
    """The fields that may leave a site, as far as it is known.

    Args:
        layout: lengths that depend on the model are left out of an empty one.
        label_type: of the federation; once it is known, label counts are listed only where they are sent.
    """
    egress = plan.egress(layout)
    fields = list_declared(egress)
    uncounted = label_type is not None and label_type not in egress.counts
    return [field for field in fields if not (uncounted and field["field"] == "counts")]


def describe(record: Record, plan: Plan, schedule: Schedule, **facts: Any) -> None:
    """Write what is about to run into run.json, with further facts."""
    described, about = plan.to_dict(), plan.method.about
    method: dict[str, Any] = {"name": about.name, "title": about.title, "paper": about.paper}
    method |= {"hyperparameters": described["hyperparameters"]}
    method |= {
        "personal": plan.method.sharing.personal,
        "pooled": about.pooled,
        "pseudo": plan.method.labels.pseudo,
    }
    started = record.run.get("started") if record.run.get("status") == "running" else None
    run: dict[str, Any] = {"job": schedule.name, "title": schedule.title, "method": method}
    run |= {key: described[key] for key in ("model", "augmentation")} | {"rounds": schedule.rounds}
    run |= {key: described[key] for key in ("seed", "experiment", "code", "transport")}
    run |= {"versions": versions(), "egress": what_leaves(plan, Layout({}, {}))}
    run |= {"labels": [], "sites": {}, "threads": {"server": 1}, "computed_on": {}}
    run |= {"started": started or now(), "status": "running", "error": None, "finished": None}
    run |= {"selected_round": None, "selection": schedule.selection, "left_out": [], "notes": []}
    run |= {"secure_aggregation": asdict(plan.secure_aggregation)} if plan.secure_aggregation else {}
    run |= {"robust": asdict(schedule.robust)} if schedule.robust else {}
    record.update(**run | {"env": record.run.get("env", "flare")} | facts)
