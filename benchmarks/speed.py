"""The figures of speed, each beside its anchor of the same run: `make bench`.

Every part is a process of its own. Prints one table, and writes it, with all samples, to `--out`. A cell of a
figure is the median (range) of `n` samples; a ratio is that of pairs, which were measured one after the other
where the part allows it. Ends with 1, and names the parts, if some failed or had no anchor; a target that was
not reached is said in its row alone.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from figures import HEAD, Figure, Options, cells
from harness import ROOT, apart, command, machine, table

from suture.core.files import write_json
from suture.core.processes import keep_memory

Part = Literal["rounds", "demo", "training", "backbones", "scale", "poc"]
PARTS: tuple[Part, ...] = get_args(Part)
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


def main(
    quick: bool,
    only: tuple[Part, ...] = PARTS,
    out: Path = ROOT / "runs" / "speed.json",
) -> None:
    """Run the parts one after the other; write what is there after each.

    Args:
        out: all samples; the table lies beside it, in .md.
    """
    found: dict[str, Any] = {"machine": machine(), "quick": quick, "parts": {}}
    figures: list[Figure] = []
    out.parent.mkdir(parents=True, exist_ok=True)
    for part in only:
        found["parts"][part], own = run(part, Options(quick))
        figures += own
        print(*(f"{name} {value}" for name, value in found["parts"][part].items()), sep=", ", file=sys.stderr)
        write_json(out, {**found, "figures": [asdict(figure) for figure in figures]})
    rows, parts = map(cells, figures), table(PART_HEAD, (one.values() for one in found["parts"].values()))
    page = ["# Speed", found["machine"], "\n".join(table(HEAD, rows)), "\n".join(parts)]
    out.with_suffix(".md").write_text("\n\n".join(page) + "\n")
    print(*page[1:], sep="\n\n")
    if lost := dict.fromkeys(figure.part for figure in figures if figure.missing):
        print(f"not measured, or not whole: {', '.join(lost)}", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    command(main)
