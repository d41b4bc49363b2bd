"""Writes docs/reference/reliability.md from the fault cases: `python tests/faults/page.py FOUND.json`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ledger import CASES, TEXT

from suture.core.files import atomic_write

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "reliability.md"


def largest(found: Sequence[Mapping[str, Any]], key: str) -> str:
    """The largest figure of all tries."""
    values = [one[key] for one in found if one[key] is not None]
    return f"{max(values):.1f} s".replace(".0 s", " s") if values else "–"


def most(found: Sequence[Mapping[str, Any]], key: str) -> str:
    """The largest number of all tries that counted it."""
    values = [one[key] for one in found if one[key] is not None]
    return str(max(values)) if values else "–"


def cells(found: Sequence[Mapping[str, Any]]) -> str:
    """The figures of a case; of one without a try, that there is none."""
    if not found:
        return "0 | – | – | – | – | –"
    models = sorted({str(one["model"]) for one in found})
    model = f"`{models[0][:8]}`" if len(models) == 1 else f"{len(models)} different, each as it must be"
    lost = [most(found, key) for key in ("rounds_lost", "updates_lost")]
    times = [largest(found, key) for key in ("detect", "recover")]
    # A model that the test compares, not its hash, has none.
    return " | ".join([str(len(found)), *lost, *times, "–" if models == ["None"] else model])


def main(path: Path) -> None:
    """Writes the page."""
    found = json.loads(path.read_text())
    filled = {name: cells(list(found.get(name, {}).values())) for name in CASES}
    atomic_write(PAGE, TEXT.read_text().format_map({"cores": os.cpu_count(), **filled}).encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
