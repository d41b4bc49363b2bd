"""Attack times defence: `SUTURE_DATA=... python benchmarks/attacks/table.py`.

Each run is a line of records.jsonl (or of `--records`) and is not repeated. `--only` names attacks by their
beginning, `--minutes` begins no further run after so many minutes of the processor. At the end, and with
`--render` alone, docs/results/attacks.md is written from the lines; the page of other records is printed.
What the attacks do stands at the top of the files of this folder:

    membership   membership.py    success: share of members found at 1 % false alarms, and [the least ε]
    inversion    inversion.py     success: PSNR in dB, and [that of the mean image]; of features a cosine
    averaging    averaging.py     success: share of the noise that is gone, and [answers that differ]
    labels read  site_labels.py   success: share of labels right after 15 answers; .5 is chance
    all others   liars.py         success: share of the honest AUROC above .5 that is lost; of backdoors the
                                  share of altered images that score as `TARGET`, and [rounds marked]
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import torch

sys.path.append(str(Path(__file__).parents[1]))

import averaging
import inversion
import liars
import membership
import secure
import site_labels
from harness import ROOT, command, interval, table

EPSILONS = ("ε 8", "ε 4", "ε 1")
DEFENCES = ("none", *liars.MERGES, *EPSILONS, secure.DEFENCE, "limits")
BACKDOORS = ("backdoor", "backdoor x10")
LIES = ("flip x10", "scale x10", "labels", "together", "two flip x10", "free rider")
SEEDS = (1, 2, 3)

RECORDS = Path(__file__).with_name("records.jsonl")
PAGE = ROOT / "docs" / "results" / "attacks.md"
RUNS = ROOT / "runs"

Record = dict[str, Any]


class Cell(NamedTuple):
    """One run, or all runs of one defence against membership inference (seed 0)."""

    attack: str
    data: str
    sites: int
    defence: str
    seed: int


BOTH, MASKED, SMALL = ("phantoms", "nih"), secure.DEFENCE, ("small phantoms",)
GRID: tuple[tuple[Sequence[str], Sequence[str], Sequence[int], Sequence[str]], ...] = (
    (("labels read",), ("noise images",), (1,), ("none", MASKED, "limits")),
    (("inversion, feature", "inversion, step"), BOTH, (4,), ("none", MASKED, *EPSILONS)),
    (("inversion, round",), BOTH, (4,), ("none", MASKED, "ε 8")),
    (("membership",), BOTH, (4, 10), ("none", MASKED, "ε 8", "median")),
    (("membership",), BOTH, (4,), ("trimmed",)),
    (("membership",), ("nih",), (4,), EPSILONS[1:]),
    (BACKDOORS, SMALL, (4, 10), ("none", *liars.MERGES)),
    (BACKDOORS, SMALL, (4,), (MASKED,)),
    (("honest",), SMALL, (10,), ("none",)),
    (("honest", *LIES, "free noise"), BOTH, (4, 10), ("none", *liars.MERGES)),
    (("honest", *LIES[:5]), BOTH, (4, 10), (MASKED, "ε 8")),
    (("honest", "flip x10"), BOTH, (4,), EPSILONS[1:]),
    (("averaging, same", "averaging, moved", "averaging, new"), ("noise images",), (1,), [*averaging.LIMITS]),
)
"""What the page shows: attacks, data, numbers of sites, and defences."""


def cells() -> Iterator[Cell]:
    """What is run, once for each seed."""
    for attacks, data, sites, defences in GRID:
        for attack, of, number, defence in itertools.product(attacks, data, sites, defences):
            for seed in (0,) if attack == "membership" else SEEDS:
                yield Cell(attack, of, number, defence, seed)


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
        limits = site_labels.STRICT if cell.defence == "limits" else site_labels.EXACT + "min_count = 0\n"
        limits += site_labels.SECURE if cell.defence == secure.DEFENCE else ""
        asked = site_labels.dense if cell.defence == "limits" else site_labels.bits
        began = time.process_time()
        found = site_labels.right(asked, limits, 15, cell.seed) / site_labels.IMAGES
        return [cell._asdict() | {"success": found, "seconds": time.process_time() - began}]
    name = "none" if cell.attack == "honest" else cell.attack
    return [cell._asdict() | liars.run(liars.Cell(cell.data, cell.sites, name, cell.defence, cell.seed))]


TEXT = """# Attacks and defences

Written by `python benchmarks/attacks/table.py --render` from the runs in records.jsonl beside it; [Protect a
site's updates](../protection.md#choose-a-protection) says what follows. Sites that lie are one of 4 or two of
10 (`two`: two of 4 as well). They, and the honest runs, train a hidden block and a head on the features of a
frozen network; membership a head alone, at sites of about 50 patients; backdoors and inversion small
networks. Defences: the robust merges `clip`, `median` and `trimmed`; `ε`, DP-SGD per patient at every site;
secure aggregation, with real masks; `limits`, a site's default budgets and rules of disclosure (for averaging
also `max_epsilon = 10`).

Each cell: success [what stands beside it] / AUROC of the run; means over three seeds, where no other number
stands in brackets.

| attack | success | beside it |
|---|---|---|
| membership | share of members found at 1 % false alarms | least ε that the attack proves |
| inversion, feature | cosine of what is read to the features of an image | that of the mean features |
| inversion, step and round | PSNR of the images found, dB | that of the mean image |
| averaging | share of the noise that is gone | answers that differ, of 40 |
| labels read | share of labels right after 15 answers; .5 is chance | |
| backdoor | share of altered images that score as the target; .05 is chance | rounds with a mark |
| flip (sign turned), scale, labels (inverted), together (ALIE), free rider (sends what it received), free \
noise (sends noise of the usual norm) \
| share of what the honest AUROC, with the same defence, has above .5 that is lost | rounds with a mark |

A dash: not run, or the defence is not in the attacker's way, as merges are not in a server's. Without a
merge, ×10 spoils the model (see its AUROC), and with it part of the back door. Where noise leaves a model
far from trained (ten phantom sites, ε 8), larger updates raise AUROC even if they lie: success below 0.

"""


def page(records: list[Record]) -> str:
    """The page of the records."""
    found, attacks, honest = grouped(records, lambda r: (r["attack"], r["data"], r["sites"])), [], []
    for (attack, data, sites), by in found.items():
        fair = found.get(("honest", data, sites), {})
        line = [shown(by.get(d, []), fair.get(d, [])) for d in DEFENCES]
        attacks.append([attack, data, str(sites), *line])
        if attack == "honest" and len(by) > 1:
            line = [difference(by.get(d, []), by["none"]) for d in DEFENCES[1:]]
            honest.append([data, str(sites), *line])
    text = TEXT + markdown(("attack", "data", "sites", *DEFENCES), attacks)
    text += "\n## Honest runs\n\nAUROC minus that without a defence, with 95 % intervals, paired by seed.\n\n"
    text += markdown(("data", "sites", *DEFENCES[1:]), honest)
    text += "\n## Costs\n\nMedian CPU seconds of a run, and kB of an update (averaging: of all answers).\n\n"
    kinds = grouped(records, lambda r: (kind_of(r), r["sites"]))
    costs = [
        [kind, str(sites), *(cost(by.get(d, [])) for d in DEFENCES)] for (kind, sites), by in kinds.items()
    ]
    return text + markdown(("run", "sites", *DEFENCES), costs)


def grouped(records: list[Record], key: Callable[[Record], Any]) -> dict[Any, dict[str, list[Record]]]:
    """The records of each key by defence, in the order of the keys."""
    found: dict[Any, dict[str, list[Record]]] = {}
    for one in sorted(records, key=key):
        found.setdefault(key(one), {}).setdefault(one["defence"], []).append(one)
    return found


def markdown(head: Iterable[str], rows: list[list[str]]) -> str:
    """A table without the columns that are empty."""
    first, *rest = zip(*(c for c in zip(head, *rows, strict=True) if set(c[1:]) != {"–"}), strict=True)
    return "\n".join(table(first, rest)) + "\n"


def kind_of(one: Record) -> str:
    """What a record's run trains."""
    if one["data"] == "small phantoms":
        return "small network"
    attack = str(one["attack"])
    if attack.startswith(("inversion", "averaging", "labels read")):
        return attack
    return "membership" if attack.startswith("membership") else "hidden block and head"


def difference(of: list[Record], plain: list[Record]) -> str:
    """The difference of honest runs."""
    one, two = ({r["seed"]: r["auroc"] for r in part} for part in (of, plain))
    seeds = sorted(one.keys() & two.keys())
    if len(seeds) < 2:
        return "–"
    text = interval([one[s] - two[s] for s in seeds])
    return text + ("" if len(seeds) in (0, len(SEEDS)) else f" ({len(seeds)})")


def shown(of: list[Record], honest: list[Record]) -> str:
    """A cell: success [what stands beside it] / AUROC, means over the seeds; (n) where not three of them."""
    if not of:
        return "–"
    area = mean(r["auroc"] for r in of) if "auroc" in of[0] else None
    if "success" in of[0]:
        text = f"{mean(r['success'] for r in of):z.2f}"
    elif honest and area is not None and of[0]["attack"] != "honest":
        fair = {r["seed"]: r["auroc"] for r in honest}
        lost = [1 - (r["auroc"] - 0.5) / (fair[r["seed"]] - 0.5) for r in of if r["seed"] in fair]
        text = f"{mean(lost):z.2f}" if lost else "?"
    else:
        text = ""
    beside = {"least_epsilon": "ε ≥ {:.1f}", "without": "{:.2g}", "answers": "{:.0f}", "marked": "{:.0%}"}
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
    return f"{median(r['seconds'] for r in of):.1f}" + (f", {median(sizes) / 1000:.0f}" if sizes else "")


def main(
    records: Path = RECORDS,
    cache: Path = RUNS / "attacks",
    only: tuple[str, ...] = ("",),
    minutes: float = 60.0,
    render: bool = False,
) -> None:
    """Run what is missing, add it to the records, and write the page of the records that are kept.

    Args:
        cache: folder of images and features.
        render: run nothing.
    """
    found = [json.loads(text) for text in records.read_text().splitlines()] if records.exists() else []
    there = {Cell(*(r[name] for name in Cell._fields)) for r in found}
    there |= {c._replace(attack="membership", seed=0) for c in there if c.attack.startswith("membership")}
    torch.set_num_threads(1)
    liars.CACHE = cache
    cache.mkdir(parents=True, exist_ok=True)
    for cell in () if render else cells():
        if cell not in there and cell.attack.startswith(tuple(only)) and time.process_time() < 60 * minutes:
            with records.open("a") as file:
                for record in records_of(cell):
                    found.append(record)
                    file.write(json.dumps(record, ensure_ascii=False) + "\n")
            print(*cell, f"{time.process_time():.0f} s in all", flush=True)
    if records == RECORDS:
        PAGE.write_text(page(found))
    else:
        print(page(found))


if __name__ == "__main__":
    command(main, records=RUNS / "attacks.jsonl", only=("labels read", "averaging, same"), minutes=0.2)
