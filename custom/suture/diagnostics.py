"""How many pseudo-labels are right: counted at a simulated site, from a truth that training cannot read.

The record stays in the site's folder. No message has a field for it, so a site that sent it would be refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from suture.config import SiteConfig
from suture.data import load_table
from suture.data.batch import Samples
from suture.files import atomic_write
from suture.labels import LabelSet
from suture.training import Observer

FILE = "diagnostics.jsonl"


class Diagnostics:
    """The record of one site.

    Args:
        site: its name.
        config: names the table of the truth.
        train: the training images, by the names that the truth has too.
        folder: where the record is kept.
    """

    def __init__(self, site: str, config: SiteConfig, train: Samples, folder: Path) -> None:
        data = config.data.model_copy(update={"table": config.data.truth, "labels": None})
        table = load_table(data)
        row = {name: i for i, name in enumerate(table.images)}
        self._site, self._path = site, folder / FILE
        self._labels = table.labels
        self._truth = torch.from_numpy(table.y)[[row[name] for name in train.names]]

    def watching(self, labels: LabelSet) -> tuple[Observer, Callable[[int], None]]:
        """An observer of a round's positive pseudo-labels, and what writes the round down.

        Args:
            labels: the classes of the pseudo-labels' columns.
        """
        truth = self._truth[:, self._labels.align(labels)] == 1
        made, right = (torch.zeros(len(labels), dtype=torch.long) for _ in range(2))

        def observe(rows: Tensor, guessed: Tensor) -> None:
            made.add_(guessed.sum(dim=0))
            right.add_((guessed & truth[rows]).sum(dim=0))

        def write(round_: int) -> None:
            classes = {
                name: {"made": int(m), "right": int(r)}
                for name, m, r in zip(labels.names, made, right, strict=True)
                if m
            }
            self._append({"site": self._site, "round": round_, "classes": classes})

        return observe, write

    def _append(self, line: dict[str, object]) -> None:
        """Adds a round; one that is done again replaces its line and those after it."""
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        self._path.parent.mkdir(parents=True, exist_ok=True)
        kept = [text for text in lines if json.loads(text)["round"] < line["round"]]
        atomic_write(self._path, "".join(f"{text}\n" for text in [*kept, json.dumps(line)]).encode())


def collect(run: Path) -> bool:
    """Brings the records of a simulation's sites together as one file of the run folder, if there are any."""
    found = sorted(run.glob(f"sites/*/state/*/{FILE}"))
    if found:
        atomic_write(run / FILE, b"".join(path.read_bytes() for path in found))
    return bool(found)
