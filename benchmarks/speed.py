"""The figures of speed, each beside its anchor of the same run: `make bench`.

Every part is a process of its own. Prints one table, and writes it, with all samples, to `--out`. A cell of a
figure is the median (range) of `n` samples; a ratio is that of pairs, which were measured one after the other
where the part allows it. Ends with 1, and names the parts, if some failed or had no anchor; a target that was
not reached is said in its row alone.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from figures import HEAD, Figure, cells, compared, markdown, rich_table
from machine import ROOT, machine
from measuring import Options, apart
from rich.console import Console

from suture.core.allocator import keep_memory
from suture.core.files import write_json

PARTS = ("rounds", "demo", "training", "backbones", "fedlsm", "fedmas", "pmfl", "scale", "poc", "gpu")
PART_HEAD = ("part", "seconds", "load at its start", "and end", "torch threads")


def measured(part: str, options: Options) -> tuple[list[Figure], int]:
    """The figures of a part, and the torch threads of the process that it runs in."""
    torch.set_num_threads(1)
    keep_memory()  # as in the processes that Suture starts
    figures: list[Figure] = importlib.import_module(f"parts.{part}").figures(options)
    return figures, torch.get_num_threads()


def run(part: str, options: Options) -> tuple[dict[str, Any], list[Figure]]:
    """What is to be known of a part's run, and its figures; one without samples says why it failed."""
    load, began, threads = os.getloadavg()[0], time.monotonic(), 0
    try:
        figures, threads = apart(measured, part, options)
    except Exception as error:  # noqa: BLE001  whatever it is, the other parts are still measured
        print(f"{part} failed: {error}", file=sys.stderr)
        cause = str(error).splitlines()[0] if str(error) else ""
        figures = [Figure(part, "all", "", (), missing=f"{type(error).__name__}: {cause}")]
    facts = (part, round(time.monotonic() - began), round(load, 1), round(os.getloadavg()[0], 1), threads)
    return dict(zip(PART_HEAD, facts, strict=True)), figures


def here() -> list[str]:
    """The parts that this machine can run."""
    return [part for part in PARTS if part != "gpu" or torch.cuda.is_available()]


def read(file: Path, quick: bool) -> tuple[str, list[Figure]]:
    """The machine and the figures of another run, of the same settings."""
    try:
        known = json.loads(file.read_text())
        figures = [Figure.of(values) for values in known["figures"]]
        other, head = bool(known["quick"]), str(known["machine"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(
            f"{file} holds no figures of an earlier run: {type(error).__name__} {error}"
        ) from error
    if other != quick:
        raise SystemExit(
            f"{file} was measured {'with' if other else 'without'} --quick, and is no measure here"
        )
    return head, figures


def tables(found: Mapping[str, Any], figures: Sequence[Figure], before: Sequence[Figure] | None) -> list[Any]:
    """Head and rows of the table of figures and of that of the parts, and notes."""
    head, rows, gone = list(HEAD), [cells(figure) for figure in figures], list[str]()
    if before is not None:
        column, gone = compared(figures, [figure for figure in before if figure.part in found["parts"]])
        head, rows = [*head, "of before"], [[*row, cell] for row, cell in zip(rows, column, strict=True)]
    parts = [[str(value) for value in part.values()] for part in found["parts"].values()]
    return [(head, rows), (PART_HEAD, parts), [f"only in the other run: {name}" for name in gone]]


def main() -> None:
    """Run the parts one after the other; write what is there after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=here(), metavar="PART", help=", ".join(PARTS)
    )
    parser.add_argument(
        "--quick", action="store_true", help="the smallest settings: a few minutes, to try it"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "speed.json", help="and .md beside it")
    parser.add_argument(
        "--against", type=Path, metavar="FILE", help="the --out of another run, to compare with"
    )
    parser.add_argument("--flwr", type=Path, default=ROOT / ".venv-flwr" / "bin" / "python", metavar="PYTHON")
    chosen = parser.parse_args()
    other = read(chosen.against, chosen.quick) if chosen.against else None
    found: dict[str, Any] = {"machine": machine(), "quick": chosen.quick, "parts": {}}
    figures: list[Figure] = []
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    for part in chosen.only:
        found["parts"][part], own = run(part, Options(chosen.quick, chosen.flwr))
        figures += own
        print(*(f"{name} {value}" for name, value in found["parts"][part].items()), sep=", ", file=sys.stderr)
        write_json(chosen.out, {**found, "figures": [asdict(figure) for figure in figures]})
    of_figures, of_parts, notes = tables(found, figures, other and other[1])
    if "gpu" not in here():
        notes.append("the part gpu is left out: torch sees no CUDA device here")
    notes = [found["machine"], *([f"before: {other[0]}"] if other else []), *notes]
    console = Console(width=None if sys.stdout.isatty() else 170)
    console.print(rich_table(*of_figures), rich_table(*of_parts), *notes, sep="\n")
    text = "\n\n".join(["# Speed", *notes[:1], markdown(*of_figures), markdown(*of_parts), *notes[1:]])
    chosen.out.with_suffix(".md").write_text(text + "\n")
    if parts := dict.fromkeys(figure.part for figure in figures if figure.missing):
        print(f"not measured, or not whole: {', '.join(parts)}", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
