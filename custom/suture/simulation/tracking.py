"""The history of a run as numbers by round: what the server's run folder holds, and nothing else.

`Tracking` reads history.jsonl and metrics.json on the machine of `suture run`. FLARE's tracking gets the same
from the server alone (`suture.flare.events`): sites would stream past the check of what may leave them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from suture.core.files import read_json
from suture.core.validation import flat
from suture.protocol.records import Metrics, Round, read_history, read_metrics, read_run

_OTHER = re.compile(r"[^\w\- .]|^\.|^ ")
"""What a part of a name may not have; MLflow refuses it."""


@dataclass(frozen=True)
class Facts:
    """What a tracker is told of a run besides numbers.

    Attributes:
        settings: of the job, by dotted name.
        tags: experiment, method, version and code.
        started: seconds since 1970.
    """

    job: str
    experiment: str
    settings: dict[str, str]
    tags: dict[str, str]
    started: float


class Sink(Protocol):
    """Where numbers are written."""

    def begin(self, facts: Facts) -> None:
        """Delete what was written of this run before, and begin anew."""

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the numbers of a round."""

    def close(self, status: str) -> str:
        """End, with the status of run.json; return where everything is."""


def part_of_name(name: str) -> str:
    """Return a name as a part of a path that MLflow takes: ``Mass (left)`` is ``Mass _28_left_29_``."""
    return _OTHER.sub(lambda found: f"_{ord(found[0]):x}_", name)


class Tracking:
    """Writes the committed rounds of a run folder to a sink, each once."""

    def __init__(self, folder: Path, sink: Sink) -> None:
        self.folder, self._sink = folder.resolve(), sink
        self._written: list[Round] | None = None

    def update(self) -> None:
        """Write the rounds that are new; all of them where the run went back to an earlier one.

        Raises:
            DataError: a file of the run is absent or damaged.
        """
        rounds = [line for line in read_history(self.folder) if line.status == "committed"]
        if self._written is None or rounds[: len(self._written)] != self._written:
            self._sink.begin(facts(self.folder))
            self._written = []
        for line in rounds[len(self._written) :]:
            self._sink.write(line.round, of_round(line))
        self._written = rounds

    def finish(self) -> str:
        """Write what is left, and the test figures of a run that has ended; return where everything is.

        Raises:
            DataError: a file of the run is absent or damaged.
        """
        run, metrics = read_run(self.folder), read_metrics(self.folder)
        self.update()
        if metrics and run.status != "running":
            self._sink.write(metrics.selected_round or run.rounds, of_test(metrics))
        return self._sink.close(run.status)


def facts(folder: Path) -> Facts:
    """Return the settings and the tags of a run.

    Raises:
        DataError: run.json is absent or damaged.
    """
    run = read_run(folder)
    code = str(read_json(folder / "run.json").get("code", ""))
    settings = {
        **{key: getattr(run, key) for key in ("rounds", "seed", "selection", "label_type", "env")},
        **flat("method", {"name": run.method.name, **run.method.hyperparameters}),
        **flat("model", run.model),
        **flat("augmentation", run.augmentation),
    }
    tags = {
        "suture.experiment": run.experiment,
        "suture.method": run.method.name,
        "suture.version": run.versions.get("suture", ""),
        "suture.code": code,
    }
    shown = {key: value if isinstance(value, str) else json.dumps(value) for key, value in settings.items()}
    return Facts(run.job, run.experiment, shown, tags, run.started.timestamp())


def of_round(line: Round) -> dict[str, float]:
    """Return the numbers of a committed round by name: its validation, costs, and those of each site."""
    accepted = sum(site.status == "accepted" for site in line.sites.values())
    found = {
        **_named("validation", vars(line.validation)),
        **_named("round", {"seconds": line.seconds, "accepted": accepted}),
        **_named("round", {"bytes_down": line.bytes_down, "bytes_up": line.bytes_up}),
    }
    for name, site in line.sites.items():
        found |= _named(f"sites/{part_of_name(name)}", {**site.scalars, **vars(site)})
    return found


def of_test(metrics: Metrics) -> dict[str, float]:
    """Return the final figures by name: over all classes, by class, group and site."""
    found = {
        **_named("test", {"mean_auroc": metrics.mean_auroc, "loss": metrics.loss}),
        **_named("test/auroc", metrics.auroc),
        **_named("test/recall", metrics.recall),
        **_named("test/groups", metrics.groups),
        **_named("test/overall", metrics.overall),
    }
    for site, values in metrics.sites.items():
        found |= _named(f"test/sites/{part_of_name(site)}", values)
    return found


def _named(prefix: str, values: Mapping[str, object]) -> dict[str, float]:
    """The numbers among some values, by name."""
    numbers = {key: float(value) for key, value in values.items() if isinstance(value, (int, float))}
    return {f"{prefix}/{part_of_name(key)}": number for key, number in numbers.items()}
