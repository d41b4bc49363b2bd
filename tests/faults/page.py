"""Writes docs/reference/reliability.md from the fault cases: `python tests/faults/page.py FOUND.json`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ledger import CASES

from suture.core.files import atomic_write

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "reliability.md"

TEXT = Path(__file__).parent / "reliability.md"


def largest(found: Sequence[Mapping[str, Any]], key: str) -> str:
    """The largest figure of all tries."""
    values = [one[key] for one in found if one[key] is not None]
    return f"{max(values):.1f} s".replace(".0 s", " s") if values else "–"


def most(found: Sequence[Mapping[str, Any]], key: str) -> str:
    """The largest number of all tries that counted it."""
    values = [one[key] for one in found if one[key] is not None]
    return str(max(values)) if values else "–"


def row(name: str, found: Sequence[Mapping[str, Any]]) -> str:
    """A case as a line of the table."""
    case, models = CASES[name], sorted({str(one["model"]) for one in found})
    model = f"`{models[0][:8]}`" if len(models) == 1 else f"{len(models)} different, each as it must be"
    model = "–" if models == ["None"] else model  # compared by the test, not by its hash
    cells = [
        *(case.fault, case.must, str(len(found))),
        *(most(found, key) for key in ("rounds_lost", "updates_lost")),
        *(largest(found, key) for key in ("detect", "recover")),
        model,
    ]
    return f"| {' | '.join(cells)} |\n"


def main(path: Path) -> None:
    """Writes the page; a case without a try is named as such."""
    found = json.loads(path.read_text())
    rows = [
        row(name, list(found[name].values()))
        if name in found
        else f"| {case.fault} | {case.must} | 0 |||||\n"
        for name, case in CASES.items()
    ]
    text = TEXT.read_text().format(cores=os.cpu_count(), rows="".join(rows))
    atomic_write(PAGE, text.encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
