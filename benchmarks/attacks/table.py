"""Attack times defence: `SUTURE_DATA=... python benchmarks/attacks/table.py --cache FOLDER`.

Each run is a line of records.jsonl (or of `--records`) and is not repeated. `--only` names attacks by their
beginning, `--minutes` begins no further run after so many minutes of the processor. At the end, and with
`--render` alone, docs/results/attacks.md is written from the lines. What the attacks do stands at the top of
the files of this folder:

    membership   membership.py    success: share of members found at 1 % false alarms, and [the least ε]
    inversion    inversion.py     success: PSNR in dB, and [that of the mean image]; of features a cosine
    averaging    averaging.py     success: share of the noise that is gone, and [answers that differ]
    labels read  site_labels.py   success: share of labels right after 15 answers; .5 is chance
    all others   liars.py         success: share of the honest AUROC above .5 that is lost; of backdoors the
                                  share of altered images that score as `TARGET`, and [rounds marked]
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import averaging
import inversion
import liars
import membership
import secure
import site_labels
import torch

DEFENCES = ("none", "clip", "median", "trimmed", "ε 8", "ε 4", "ε 1", secure.DEFENCE, "limits")
EPSILONS = ("ε 8", "ε 4", "ε 1")
MERGES = ("clip", "median", "trimmed")
LIES = ("flip x10", "scale x10", "labels", "together", "two flip x10", "free rider")
SEEDS = (1, 2, 3)

RECORDS = Path(__file__).with_name("records.jsonl")
PAGE = Path(__file__).parents[2] / "docs" / "results" / "attacks.md"

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
    both, masked, lies = ("phantoms", "nih"), secure.DEFENCE, ("honest", *LIES)
    for defence, seed in itertools.product(("none", masked, "limits"), SEEDS):
        yield Cell("labels read", "noise images", 1, defence, seed)
    for data, seed, defence in itertools.product(both, SEEDS, ("none", masked, *EPSILONS)):
        yield Cell("inversion, feature", data, 4, defence, seed)
    for defence, data in itertools.product(("none", "ε 8", masked), both):
        yield Cell("membership", data, 4, defence, 0)
    for seed, defence in itertools.product(SEEDS, ("none", "ε 8", masked)):
        if seed == 1 or defence != masked:
            yield Cell("inversion, step", "phantoms", 4, defence, seed)
    for attack in lies[:2]:
        yield Cell(attack, "phantoms", 4, "ε 8", 1)
    for defence in ("none", "ε 8"):
        yield Cell("inversion, round", "phantoms", 4, defence, 1)
    for defence, seed in itertools.product(("median", "clip", "trimmed"), SEEDS):
        yield Cell("backdoor x10", "small phantoms", 4, defence, seed)
    yield Cell("backdoor", "small phantoms", 4, masked, 1)
    for seed, attack in itertools.product(SEEDS, lies[:2]):
        yield Cell(attack, "phantoms", 4, "ε 8", seed)
    for seed, attack, defence in itertools.product(SEEDS, liars.BACKDOORS[1:], ("none", *MERGES)):
        yield Cell(attack, "small phantoms", 4, defence, seed)
    for data, seed, attack in itertools.product(both, SEEDS, lies[:2]):
        yield Cell(attack, data, 4, "ε 8", seed)
    for attack, defence in itertools.product(lies[:7], ("none", *MERGES)):
        yield Cell(attack, "phantoms", 10, defence, 3)
    for seed, data, attack in itertools.product(SEEDS, both, lies[:6]):
        yield Cell(attack, data, 4, masked, seed)
    for attack, seed in itertools.product(liars.BACKDOORS[1:], SEEDS):
        yield Cell(attack, "small phantoms", 4, masked, seed)
    for seed, data, sites, attack in itertools.product(SEEDS, both, (4, 10), lies[:7]):
        for defence in ("none", *MERGES):
            yield Cell(attack, data, sites, defence, seed)
    for defence in ("ε 1", "ε 4"):
        yield Cell("membership", "nih", 4, defence, 0)
    for attack, data, seed in itertools.product(lies[2:6], both, SEEDS):
        yield Cell(attack, data, 4, "ε 8", seed)
    for seed, data, defence in itertools.product(SEEDS, both, ("none", masked, "ε 8")):
        yield Cell("inversion, step", data, 4, defence, seed)
    for defence, data in itertools.product(("none", "ε 8"), both):
        yield Cell("membership", data, 10, defence, 0)
    for defence, data in itertools.product(("median", "trimmed"), both):
        yield Cell("membership", data, 4, defence, 0)
    for seed, attack in itertools.product(SEEDS, liars.BACKDOORS):
        for defence in ("none", *MERGES) if attack != "none" else ("none",):
            yield Cell("honest" if attack == "none" else attack, "small phantoms", 10, defence, seed)
    for seed, data, defence in itertools.product(SEEDS, both, ("none", "ε 8", masked)):
        yield Cell("inversion, round", data, 4, defence, seed)
    for seed, data, attack, defence in itertools.product(SEEDS, both, lies[:6], (masked, "ε 8")):
        yield Cell(attack, data, 10, defence, seed)
    for data, seed, defence in itertools.product(both, SEEDS, EPSILONS[1:]):
        yield Cell("inversion, step", data, 4, defence, seed)
    for defence, data in itertools.product((masked, "median"), both):
        yield Cell("membership", data, 10, defence, 0)
    for seed, data, sites, defence in itertools.product(SEEDS, both, (4, 10), ("none", *MERGES)):
        yield Cell("free noise", data, sites, defence, seed)
    for seed, data, attack, defence in itertools.product(SEEDS, both, lies[:2], EPSILONS[1:]):
        yield Cell(attack, data, 4, defence, seed)
    for seed, kind, defence in itertools.product(SEEDS, ("same", "moved", "new"), averaging.LIMITS):
        yield Cell(f"averaging, {kind}", "noise images", 1, defence, seed)


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
    merge = "mean" if cell.defence == "none" else cell.defence
    name = "none" if cell.attack == "honest" else cell.attack
    return [cell._asdict() | liars.run(liars.Cell(cell.data, cell.sites, name, merge, cell.seed))]


TEXT = """# Attacks and defences

Written by `python benchmarks/attacks/table.py --render` from the runs in records.jsonl beside it; [Protect a
site's updates](../protection.md#which-protection) says what follows. Sites that lie are one of 4 or two of 10
(`two`: two of 4 as well). They, and the honest runs, train a hidden block and a head on the features of a
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
    text = TEXT + table(("attack", "data", "sites", *DEFENCES), attacks)
    text += "\n## Honest runs\n\nAUROC minus that without a defence, with 95 % intervals, paired by seed.\n\n"
    text += table(("data", "sites", *DEFENCES[1:]), honest)
    text += "\n## Costs\n\nMedian CPU seconds of a run, and kB of an update (averaging: of all answers).\n\n"
    kinds = grouped(records, lambda r: (kind_of(r), r["sites"]))
    costs = [
        [kind, str(sites), *(cost(by.get(d, [])) for d in DEFENCES)] for (kind, sites), by in kinds.items()
    ]
    return text + table(("run", "sites", *DEFENCES), costs)


def grouped(records: list[Record], key: Callable[[Record], Any]) -> dict[Any, dict[str, list[Record]]]:
    """The records of each key by defence, in the order of the keys."""
    found: dict[Any, dict[str, list[Record]]] = {}
    for one in sorted(records, key=key):
        found.setdefault(key(one), {}).setdefault(one["defence"], []).append(one)
    return found


def table(head: Iterable[str], rows: list[list[str]]) -> str:
    """A Markdown table, without the columns that are empty."""
    columns = [c for c in zip(head, *rows, strict=True) if set(c[1:]) != {"–"}]
    lines = [f"| {' | '.join(line)} |" for line in zip(*columns, strict=True)]
    return "\n".join([lines[0], "|---" * len(columns) + "|", *lines[1:]]) + "\n"


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
    text = liars.paired([one[s] for s in seeds], [two[s] for s in seeds])
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


def main() -> None:
    """Run what is missing, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("--cache", type=Path, help="folder of images and features")
    parser.add_argument("--only", nargs="+", default=[""])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--render", action="store_true", help="run nothing")
    asked = parser.parse_args()
    path = asked.records
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if not asked.render:
        if asked.cache is None:
            parser.error("name a folder for images and features: --cache FOLDER")
        torch.set_num_threads(1)
        liars.CACHE = asked.cache
        liars.CACHE.mkdir(parents=True, exist_ok=True)
        run(path, records, asked.only, asked.minutes)
    PAGE.write_text(page(records))


def run(path: Path, records: list[Record], only: list[str], minutes: float) -> None:
    """Run what is missing, and add it to the records."""
    there = {Cell(*(r[name] for name in Cell._fields)) for r in records}
    there |= {c._replace(attack="membership", seed=0) for c in there if c.attack.startswith("membership")}
    for cell in dict.fromkeys(cells()):
        if cell not in there and cell.attack.startswith(tuple(only)) and time.process_time() < 60 * minutes:
            with path.open("a") as file:
                for record in records_of(cell):
                    records.append(record)
                    file.write(json.dumps(record, ensure_ascii=False) + "\n")
            print(*cell, f"{time.process_time():.0f} s in all", flush=True)


if __name__ == "__main__":
    main()
