"""Diagnostics at the sites of a simulation: correct pseudo-labels, and a method's own figures of each class.

The correct labels are counted from a table that training does not read. The record stays in the site's
folder: no message has a field for it, so that the server would reject a site that sent it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from suture.core.files import atomic_write, read_records
from suture.core.labels import LabelSet
from suture.core.plain import read_regular
from suture.data.batch import Samples
from suture.data.config import SiteConfig
from suture.data.readers import load_table
from suture.learning.training import Observer

FILE = "diagnostics.jsonl"


class Diagnostics:
    """The diagnostics of one site.

    Args:
        site: its name.
        config: names the table of the correct labels.
        train: the training images, by their names in that table; None where no pseudo-labels are made.
        folder: of the experiment at the site.
    """

    def __init__(self, site: str, config: SiteConfig, train: Samples | None, folder: Path) -> None:
        self._site, self._path = site, folder / FILE
        self._truth: tuple[LabelSet, Tensor] | None = None
        if train is not None:
            table = load_table(config.data.model_copy(update={"table": config.data.truth, "labels": None}))
            row = {name: i for i, name in enumerate(table.images)}
            self._truth = table.labels, torch.from_numpy(table.y)[[row[name] for name in train.names]]

    def watching(self, labels: LabelSet) -> _Watch:
        """Return what observes one round.

        Args:
            labels: the classes of the model's columns.
        """
        truth = None
        if self._truth is not None:
            own, y = self._truth
            truth = y[:, own.align(labels)] == 1
        return _Watch(labels, truth, self._append)

    def _append(self, round_: int, facts: Mapping[str, Any]) -> None:
        """Append a round; a repeated one replaces its line and all later ones."""
        line = {"site": self._site, "round": round_, **facts}
        earlier = [other for other in read_records(self._path) if other["round"] < round_]
        lines = "".join(f"{json.dumps(one)}\n" for one in [*earlier, line])
        atomic_write(self._path, lines.encode(), private=True)


class _Watch:
    """Observes one round of a site: receives figures and pseudo-labels from the method, returns nothing.

    Args:
        labels: the classes of the columns.
        truth: correct labels of the training images, ``[n, c]``; None where pseudo-labels are not counted.
        append: writes the line of a round.
    """

    def __init__(
        self, labels: LabelSet, truth: Tensor | None, append: Callable[[int, Mapping[str, Any]], None]
    ) -> None:
        self._labels, self._truth, self._append = labels, truth, append
        self._made, self._right = (torch.zeros(len(labels), dtype=torch.long) for _ in range(2))
        self._figures: dict[str, dict[str, float]] = {}

    @property
    def observe(self) -> Observer | None:
        """The function that counts pseudo-labels, and the correct ones among them; None without labels."""
        return None if self._truth is None else partial(self._count, self._truth)

    def record(self, figures: Mapping[str, Tensor]) -> None:
        """Take figures of each class, ``[c]`` for each name."""
        for name, values in figures.items():
            self._figures[name] = dict(zip(self._labels.names, values.tolist(), strict=True))

    def _count(self, truth: Tensor, rows: Tensor, guessed: Tensor) -> None:
        self._made += guessed.sum(dim=0)
        self._right += (guessed & truth[rows]).sum(dim=0)

    def write(self, round_: int) -> None:
        """Write the diagnostics of the round, if there can be any."""
        classes = {
            name: {"made": int(made), "right": int(right)}
            for name, made, right in zip(self._labels.names, self._made, self._right, strict=True)
            if made
        }
        figures = {"figures": self._figures} if self._figures else {}
        if figures or self._truth is not None:
            self._append(round_, {"classes": classes, **figures})


def collect(run: Path) -> bool:
    """Join the diagnostics of a simulation's sites in one file of the run folder; False if there are none."""
    found = sorted(run.glob(f"sites/*/state/**/{FILE}"))
    if found:
        atomic_write(run / FILE, b"".join(map(read_regular, found)), private=True)
    return bool(found)
