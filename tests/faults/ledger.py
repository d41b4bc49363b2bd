"""What the fault cases found; `make faults` keeps it in a file and writes docs/reference/reliability.md."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from suture.core.files import whole_lines, write_json

TEXT = Path(__file__).parent / "reliability.md"
"""The page, with the name of its case in the place of the figures of each row."""

CASES = re.findall(r"^\| .* \| \{(.+)\} \|$", TEXT.read_text(), re.MULTILINE)

FILE, REPEATS = "SUTURE_FAULTS", "SUTURE_FAULT_REPEATS"


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
