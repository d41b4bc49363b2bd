"""What the fault cases found; `make faults` keeps it in a file and writes docs/reference/reliability.md."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from suture.core.files import whole_lines, write_json

FILE, REPEATS = "SUTURE_FAULTS", "SUTURE_FAULT_REPEATS"


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    fault: str
    must: str


CASES = {
    "job process of a site": Case(
        "`kill -9` of a site's job process in mid-round, all sites needed",
        "job goes on, at most one update lost, the clean run's bytes",
    ),
    "job process of a site, quorum": Case(
        "the same, two of three sites needed",
        "job goes on, at most one update lost, the bytes of a clean run in which the same sites counted",
    ),
    "job process of a site, short grace": Case(
        "the same in the moment after an answer, with `grace = 1`",
        "back in the next round but one, the bytes as above",
    ),
    "bell": Case(
        "`kill -9` of a site's job process while it waits for its next task, all sites needed",
        "job goes on, no round lost, the clean run's bytes",
    ),
    "load": Case(
        "a hundred rounds while twice as many processes as cores compute",
        "no update and no round lost, nobody noted as gone, the clean run's bytes",
    ),
    "sending": Case(
        "`kill -9` of a site's job process while it sends 28 MB, two of three sites needed",
        "job goes on, at most one update lost, the bytes of a clean run in which the same sites counted",
    ),
    "gone": Case(
        "`kill -9` of a whole site that nobody restarts, two of three sites needed",
        "costs at most two deadlines; the later rounds do not wait for it",
    ),
    "site": Case(
        "`kill -9` of a whole site, then restart and `suture resume`",
        "round closes within deadline + 5 s, the site is back, bytes as above",
    ),
    "job process of the server": Case(
        "`kill -9` of the server's job process, then `suture resume`",
        "from the last committed round, at most 1 round lost, at most 90 s, the clean run's bytes",
    ),
    "server": Case(
        "`kill -9` of the server, then restart and `suture resume`",
        "from the last committed round, at most 1 round lost, at most 90 s, the clean run's bytes",
    ),
    "instants": Case(
        "in one process: kill at a random instant or within a save",
        "at most 1 round lost, the clean run's bytes",
    ),
    "instants, processes": Case(
        "kill of the server's job process at a random instant, then `suture resume`",
        "at most 1 round lost, at most 90 s, the clean run's bytes",
    ),
    "stopped": Case(
        "a site stopped (`SIGSTOP`) until a round no longer waits for it",
        "costs at most two deadlines, back within 30 s, bytes as above",
    ),
    "network": Case(
        "a site's connection delayed by 200 ms, stalled for 30 s, reset five times",
        "no update counted twice, job completes, the clean run's bytes",
    ),
    "secure aggregation": Case(
        "in one process: kill of server, site or both before and after each step of secure aggregation",
        "new keys, the plain model to 1e-6, no key, seed or share in a file",
    ),
    "disk full": Case(
        "in one process: a full or read-only disk at the server, at a site",
        "old model intact; says so; continues",
    ),
    "corrupt": Case(
        "in one process: a truncated or bit-flipped state of the server, of a site",
        "the round before and the best of its time; at the server the clean run's bytes",
    ),
    "hostile": Case(
        "in one process: hostile updates of one site",
        "rejected with site and reason; the bytes without that site",
    ),
    "drop-out": Case(
        "in one process: 10 sites, 10 % and 30 % random drop-out per round", "completes; twice the same bytes"
    ),
}


@dataclass(frozen=True)
class Found:
    """What one try of a case found.

    Attributes:
        updates_lost: that the fault cost.
        rounds_lost: the same; None where the test does not count them.
        detect, recover: seconds from the fault until it was noticed, and until the next commit.
        model: hash of the final model.
    """

    updates_lost: int = 0
    rounds_lost: int | None = 0
    detect: float | None = None
    recover: float | None = None
    model: str | None = None


def rounds_lost(folder: Path, before: int) -> int:
    """Rounds that had begun and had to begin again.

    Args:
        folder: of the run.
        before: lines of its events.jsonl when the fault came, or when the run was continued.
    """
    events = [json.loads(line) for line in whole_lines(folder / "events.jsonl")]
    begun = {e["round"] for e in events[:before] if e["event"] == "round"}
    after = [e["round"] for e in events[before:] if e["event"] == "round"]
    return len(after) - len(set(after) - begun)


class Ledger:
    """The tries so far, by case and number; in memory only where no file is named."""

    def __init__(self) -> None:
        name = os.environ.get(FILE)
        self._path = Path(name).resolve() if name else None
        exists = self._path is not None and self._path.exists()
        self._found: dict[str, dict[str, Any]] = json.loads(self._path.read_text()) if exists else {}  # type: ignore[union-attr]

    def done(self, case: str, attempt: str) -> bool:
        """Whether a try has been made and was good."""
        return attempt in self._found.get(case, {})

    def note(self, case: str, attempt: str, found: Found) -> None:
        """Keeps what a try found."""
        assert case in CASES
        self._found.setdefault(case, {})[attempt] = asdict(found)
        if self._path:
            write_json(self._path, self._found)


def repeats() -> int:
    """How often each case is tried."""
    return int(os.environ.get(REPEATS, "1"))
