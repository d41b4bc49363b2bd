"""Positive training images of each class at each site of FedLSM's jobs: `python benchmarks/fedlsm_counts.py`.

Beside the counts that the paper prints (Deng et al., MICCAI 2023, Tables 5 and 6), those of the partitions
that this package makes of the same data sets with the presets `paper`, from labels alone: SUTURE_DATA has all
of NIH (nih_metadata) and four fifths of ISIC 2018 (ham10000_112px). Writes docs/results/fedlsm_counts.md.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

from suture.core.files import atomic_write
from suture.data.readers import load_table
from suture.data.table import Table
from suture_papers.chest_xrays.nih import NihConfig
from suture_papers.partition import class_lists, partition_table
from suture_papers.skin_lesions.isic import IsicConfig

ROOT = Path(__file__).resolve().parents[1]
SEED = 1337
"""Of the split and of the parts, as in the jobs."""

Counts = dict[str, dict[str, int]]
"""By class, and by client (A, B, ...)."""


def counts(table: Table, clients: int) -> Counts:
    """Return the positive training images that each site of a partition knows of."""
    lists = class_lists("round_robin", table.labels, clients)
    parts = partition_table(table, lists, SEED, test=False, held_out=("validation", "test"))
    sites = [part for name, part in parts.items() if name.startswith("site-")]
    found: Counts = {name: {} for name in table.labels}
    for client, part in zip("ABCDEFGH", sites, strict=False):
        for name in part.labels:
            found[name][client] = int((part.y[:, part.labels.index(name)] == 1).sum())
    return found


def page(printed: Counts, own: Counts, clients: str) -> str:
    """Return a table: a line for each class, with the printed count in brackets."""
    lines = ["| class | " + " | ".join(clients) + " |", "|---" * (len(clients) + 1) + "|"]
    for name, expected in printed.items():
        found = own[name]
        if found.keys() != expected.keys():
            raise SystemExit(f"{name}: {sorted(found)} know it here, {sorted(expected)} in the paper")
        cells = (f"{found[c]} ({expected[c]})" if c in found else "–" for c in clients)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Write the page."""
    data = Path(os.environ["SUTURE_DATA"])
    printed = tomllib.loads((Path(__file__).with_suffix(".toml")).read_text())
    nih = data / "nih_metadata"
    xrays = load_table(
        NihConfig(root=nih, table=nih / "Data_Entry_2017_v2020.csv.gz", split="official", seed=SEED)
    )
    skin = data / "ham10000_112px"
    lesions = load_table(
        IsicConfig(root=skin, table=skin / "HAM10000_metadata.csv", split="images", seed=SEED)
    )
    parts = [
        "# Positive training images at the sites of FedLSM's jobs",
        "`python benchmarks/fedlsm_counts.py`: labels alone, divided as by the presets `paper`; in brackets "
        "what the paper prints (Deng et al., MICCAI 2023). The sites identify the same classes but have "
        "other images, since the paper divides them at random with seeds of its own: counts differ by "
        "chance. Of NIH, patients stay together here.",
        "## NIH ChestX-ray14 (Table 5)",
        page(printed["nih"], counts(xrays, 8), "ABCDEFGH"),
        "## ISIC 2018 (Table 6)",
        f"{len(lesions):,} of its 10,015 images are here, so counts are about {len(lesions) / 10015:.0%} of "
        "the printed ones.",
        page(printed["isic"], counts(lesions, 5), "ABCDE"),
    ]
    target = ROOT / "docs/results/fedlsm_counts.md"
    atomic_write(target, ("\n\n".join(parts) + "\n").encode())
    print(f"written: {target}")


if __name__ == "__main__":
    main()
