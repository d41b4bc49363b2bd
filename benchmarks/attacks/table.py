"""Attack times defence: `SUTURE_DATA=... python benchmarks/attacks/table.py --out FOLDER`.

Each run is a line of FOLDER/records.jsonl and is not repeated; the table is printed at the end, and with
`--print` alone. `--only` names attacks by their beginning, `--minutes` begins no further run after so many
minutes of the processor. What the attacks do stands at the top of the files of this folder:

    membership   membership.py    success: share of members found at 1 % false alarms, and [the least ε]
    inversion    inversion.py     success: PSNR in dB, and [that of the mean image]; of features a cosine
    averaging    averaging.py     success: share of the noise that is gone, and [answers that differ]
    labels read  site_labels.py   success: share of labels right after 15 answers; .5 is chance
    all others   liars.py         success: share of the honest AUROC above .5 that is lost; of backdoors the
                                  share of altered images that score as `TARGET`, and [rounds marked]

Defences: the robust merges `clip`, `median` and `trimmed`; `ε`, DP-SGD per patient at every site; `limits`, a
site's default budgets and rules of disclosure (for averaging also max_epsilon = 10). A dash: not run, or the
defence is not in the attacker's way, as merges are not in a server's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import averaging
import inversion
import liars
import membership
import site_labels
import torch

DEFENCES = ("none", "clip", "median", "trimmed", "ε 8", "ε 4", "ε 1", "limits")
EPSILONS = ("ε 8", "ε 4", "ε 1")
MERGES = ("clip", "median", "trimmed")
LIES = ("flip x10", "scale x10", "labels", "together", "two flip x10", "free rider", "free noise")
SEEDS = (1, 2, 3)

Record = dict[str, Any]


class Cell(NamedTuple):
    """One run, or all runs of one defence against membership inference (seed 0)."""

    attack: str
    data: str
    sites: int
    defence: str
    seed: int


def cells() -> Iterator[Cell]:
    """What is run, the most telling first."""
    both = ("phantoms", "nih")
    for kind, data, seed in itertools.product(("feature", "step", "round"), both, SEEDS):
        for defence in ("none", *EPSILONS):
            yield Cell(f"inversion, {kind}", data, 1, defence, seed)
    for kind, defence, seed in itertools.product(("same", "moved", "new"), averaging.LIMITS, SEEDS):
        yield Cell(f"averaging, {kind}", "noise images", 1, defence, seed)
    for defence, seed in itertools.product(("none", "limits"), SEEDS):
        yield Cell("labels read", "noise images", 1, defence, seed)
    for sites, defences in (
        (4, ("none", "ε 8", "ε 1", "median", "clip", "trimmed", "ε 4")),
        (10, ("none", "ε 8")),
    ):
        for defence, data in itertools.product(defences, both):
            yield Cell("membership", data, sites, defence, 0)
    for seed, data, sites in itertools.product(SEEDS, both, (4, 10)):
        for attack, defence in itertools.product(("honest", *LIES), ("none", *MERGES)):
            yield Cell(attack, data, sites, defence, seed)
    for seed, attack, defence in itertools.product(SEEDS, liars.BACKDOORS[1:], ("none", *MERGES)):
        yield Cell(attack, "small phantoms", 4, defence, seed)
    for attack, defence in itertools.product(liars.BACKDOORS[1:], ("none", *MERGES)):
        yield Cell(attack, "small phantoms", 10, defence, 1)
    for seed, data, attack, defence in itertools.product(SEEDS, both, ("honest", "flip x10"), EPSILONS):
        yield Cell(attack, data, 4, defence, seed)


def records_of(cell: Cell) -> list[Record]:
    """Run a cell."""
    attack, _, kind = cell.attack.partition(", ")
    if attack == "membership":
        return membership.attack(cell.data, cell.sites, cell.defence, list(SEEDS))
    if attack == "inversion":
        if kind == "feature":
            return [cell._asdict() | inversion.feature(cell.data, cell.defence, cell.seed)]
        return [cell._asdict() | inversion.inverted(cell.data, kind, cell.defence, cell.seed)]
    if attack == "averaging":
        return [cell._asdict() | averaging.averaged(kind, cell.defence, cell.seed)]
    if attack == "labels read":
        limits = site_labels.STRICT if cell.defence == "limits" else site_labels.FORMER + "min_count = 0\n"
        asked = site_labels.dense if cell.defence == "limits" else site_labels.bits
        began = time.process_time()
        found = site_labels.right(asked, limits, 15, cell.seed) / site_labels.IMAGES
        return [cell._asdict() | {"success": found, "seconds": time.process_time() - began}]
    merge = "mean" if cell.defence == "none" else cell.defence
    name = "none" if cell.attack == "honest" else cell.attack
    return [cell._asdict() | liars.run(liars.Cell(cell.data, cell.sites, name, merge, cell.seed))]


def table(records: list[Record]) -> None:
    """Print the table."""
    found: dict[tuple[str, str, int], dict[str, list[Record]]] = {}
    for one in records:
        rows = found.setdefault((one["attack"], one["data"], one["sites"]), {})
        rows.setdefault(one["defence"], []).append(one)
    print(f"| attack | data | sites |{''.join(f' {d} |' for d in DEFENCES)}\n{'|---' * (3 + len(DEFENCES))}|")
    for (attack, data, sites), by in sorted(found.items()):
        honest = found.get(("honest", data, sites), {})
        line = [shown(by.get(d, []), honest.get(d, [])) for d in DEFENCES]
        print(f"| {attack} | {data} | {sites} | {' | '.join(line)} |")
    print("\nseconds of the processor and kB of an update, of a run\n")
    print(f"| attack | sites |{''.join(f' {d} |' for d in DEFENCES)}\n{'|---' * (2 + len(DEFENCES))}|")
    kinds = {(a.partition(", ")[0] if a[:4] == "memb" else a, s) for a, _, s in found}
    for kind, sites in sorted(kinds):
        of = [r for r in records if r["attack"].startswith(kind) and r["sites"] == sites]
        line = [cost([r for r in of if r["defence"] == d]) for d in DEFENCES]
        print(f"| {kind} | {sites} | {' | '.join(line)} |")


def shown(of: list[Record], honest: list[Record]) -> str:
    """A cell: success [what stands beside it] / AUROC, means over the seeds; (n) where not three of them."""
    if not of:
        return "–"
    area = mean(r["auroc"] for r in of) if "auroc" in of[0] else None
    if "success" in of[0]:
        text = f"{mean(r['success'] for r in of):.2f}"
    elif honest and area is not None and of[0]["attack"] != "honest":
        fair = {r["seed"]: r["auroc"] for r in honest}
        lost = [1 - (r["auroc"] - 0.5) / (fair[r["seed"]] - 0.5) for r in of if r["seed"] in fair]
        text = f"{mean(lost):.2f}" if lost else "?"
    else:
        text = ""
    beside = {"least_epsilon": "ε ≥ {:.1f}", "without": "{:.0f}", "answers": "{:.0f}", "marked": "{:.0%}"}
    known = [key for key in beside if all(key in r for r in of) and of[0]["attack"] != "honest"]
    text += "".join(f" [{beside[key].format(mean(r[key] for r in of))}]" for key in known)
    text += f" / {area:.2f}" if area is not None else ""
    seeds = len({r["seed"] for r in of})
    return text.strip(" /") + ("" if seeds == len(SEEDS) else f" ({seeds})")


def cost(of: list[Record]) -> str:
    """Seconds and kB of an update."""
    if not of:
        return "–"
    sizes = [r["bytes"] for r in of if "bytes" in r]
    return f"{mean(r['seconds'] for r in of):.1f}" + (f", {mean(sizes) / 1000:.0f}" if sizes else "")


def main() -> None:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", default=[""])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--print", action="store_true", dest="only_print")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    liars.CACHE = asked.out / "cache"
    liars.CACHE.mkdir(parents=True, exist_ok=True)
    path = asked.out / "records.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    there = {Cell(*(r[name] for name in Cell._fields)) for r in records}
    there |= {
        Cell("membership", c.data, c.sites, c.defence, 0) for c in there if c.attack.startswith("membership")
    }
    for cell in cells():
        wanted = cell not in there and cell.attack.startswith(tuple(asked.only))
        if wanted and not asked.only_print and time.process_time() < 60 * asked.minutes:
            with path.open("a") as file:
                for record in records_of(cell):
                    records.append(record)
                    file.write(json.dumps(record, ensure_ascii=False) + "\n")
            print(*cell, flush=True)
    table(records)


if __name__ == "__main__":
    main()
