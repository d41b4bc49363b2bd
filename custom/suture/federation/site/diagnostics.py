"""What a site notes for itself, which no message has a field for: diagnostics, and what it left out.

A simulation shows them, because it runs on the machine of the data. Diagnostics are of pseudo-labels, whose
correct labels are counted from a table that training does not read, and a method's own figures of each
class.

Compiled backbones (`torch.compile`) are measured here, and refused where they compute something else.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from suture.core.errors import ConfigError
from suture.core.files import atomic_write, read_json, read_records, read_regular, write_json
from suture.core.labels import LabelSet
from suture.core.runtime import out_of_memory, seed_torch
from suture.data.batch import Batch, Samples
from suture.data.config import SiteConfig
from suture.data.readers import load_table
from suture.federation.state_files import experiment_folder
from suture.learning.training import Objective, Observer, SiteContext, ready_inputs
from suture.models.classifier import Classifier

_Compile = Literal["no", "kernels", "cuda_graphs"]

OPTIONS: Mapping[_Compile, Mapping[str, Any]] = {"kernels": {}, "cuda_graphs": {"mode": "reduce-overhead"}}
"""The arguments of `torch.compile`."""

_TOLERANCE, _MIXED = 1e-3, 5e-2
"""The largest relative difference of the loss, and of the gradient over all parameters, between a compiled
backbone and itself: in single and in mixed precision, where fused operations round less often."""


def compile_backbone(site: SiteContext, objective: Objective, how: _Compile) -> None:
    """Compile the backbone of the site's model in place, if loss and gradient of one batch stay the same.

    The names of its tensors stay as they are, and copies of the model are not compiled.

    Args:
        objective: the loss to compare, of the site's first training images.

    Raises:
        ConfigError: it cannot be compiled here, or what it computes differs by more than the tolerance.
    """
    if how == "cuda_graphs" and site.device.type != "cuda":
        raise ConfigError(
            f'{site.name}: compile = "cuda_graphs" needs a GPU, and device is {str(site.device)!r}; write '
            'compile = "kernels" or "no" under [training]'
        )
    train = site.samples["train"]
    batch = ready_inputs(site, train.batch(torch.arange(min(len(train), site.batch_size or 64))))
    trial = copy.deepcopy(site.model)
    eager = _measure(site, trial, objective, batch)
    try:
        trial.backbone.compile(**OPTIONS[how])
        difference = max(map(_relative, eager, _measure(site, trial, objective, batch)))
    except Exception as error:  # of the compiler, which has many kinds
        if out_of_memory(error):
            raise
        why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}".removesuffix(": ")
        # Some versions of torch compute with graphs in a process's first thread only (pytorch issue 123177).
        kernels = 'compile = "kernels" or ' if how == "cuda_graphs" else ""
        raise ConfigError(
            f"{site.name}: the backbone cannot be compiled here ({why}); "
            f'write {kernels}compile = "no" under [training]'
        ) from error
    limit = _MIXED if site.model.amp_dtype else _TOLERANCE
    if not difference <= limit:
        raise ConfigError(
            f"{site.name}: when compiled, the loss or gradient of a batch changes by {difference:.2g} "
            f'of its value, more than {limit:g}; write compile = "no" under [training]'
        )
    site.model.backbone.compile(**OPTIONS[how])


def _measure(
    site: SiteContext, model: Classifier, objective: Objective, batch: Batch
) -> tuple[Tensor, Tensor]:
    """Loss and gradient in training, but without dropout, for which a compiler may draw other numbers."""
    model.train()
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.eval()
    model.zero_grad(set_to_none=True)
    with seed_torch(0, site.device):
        loss = objective(model, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = [p.grad.flatten().float() for p in model.parameters() if p.grad is not None]
    return loss.detach(), torch.cat(gradients)


def _relative(expected: Tensor, found: Tensor) -> float:
    """The length of the difference, over that of what is expected; NaN where either is no number."""
    return float((found - expected).norm() / expected.norm().clamp(min=1e-12))


LEFT_OUT_FILE = "left_out.json"


def write_left_out(folder: Path, sentences: list[str]) -> None:
    """Write what a site left out of its data beside its states.

    Args:
        folder: of the experiment at the site.

    Raises:
        DiskError: the folder cannot be written.
    """
    write_json(folder / LEFT_OUT_FILE, {"left_out": sentences}, private=True)


def read_left_out(run: Path, experiment: str) -> list[str]:
    """Return what the sites of a simulation left out of their data, each sentence with its site.

    Args:
        run: folder of the simulation's run.

    Raises:
        DataError: a file is damaged.
    """
    lines: list[str] = []
    for site in sorted((run / "sites").glob("*")):
        path = experiment_folder(site / "state", experiment) / LEFT_OUT_FILE
        sentences = read_json(path, "left_out")["left_out"] if path.is_file() else ()
        lines += [f"{site.name}: {sentence}" for sentence in sentences]
    return lines


DIAGNOSTICS_FILE = "diagnostics.jsonl"


class Diagnostics:
    """The diagnostics of one site.

    Args:
        site: its name.
        config: names the table of the correct labels.
        train: the training images, by their names in that table; None where no pseudo-labels are made.
        folder: of the experiment at the site.
    """

    def __init__(self, site: str, config: SiteConfig, train: Samples | None, folder: Path) -> None:
        self._site, self._path = site, folder / DIAGNOSTICS_FILE
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
    found = sorted(run.glob(f"sites/*/state/**/{DIAGNOSTICS_FILE}"))
    if found:
        atomic_write(run / DIAGNOSTICS_FILE, b"".join(map(read_regular, found)), private=True)
    return bool(found)
