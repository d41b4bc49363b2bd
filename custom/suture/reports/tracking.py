"""The history of a run in TensorBoard or MLflow: what the server's run folder holds, and nothing else.

`Tracking` reads history.jsonl and metrics.json on the machine of `suture run`. FLARE's tracking gets the same
from the server alone (`suture.flare.events`): sites would stream past the check of what may leave them.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from shlex import quote

from suture.core.files import read_json
from suture.core.validation import flat
from suture.protocol.records import Metrics, Round, read_history, read_metrics, read_run
from suture.reports.follow import followed
from suture.reports.trackers import Facts, Sink, Tracker, open_sink, part_of_name

log = logging.getLogger(__name__)

_NEWS = re.compile(r'"event": "(begin|validated|rolled_back)"')
"""Events after which history.jsonl has changed."""


class Tracking:
    """Writes the committed rounds of a run folder to a tracker, each once.

    Args:
        folder: of the run.

    Raises:
        ConfigError: the tracker is not installed.
    """

    def __init__(self, folder: Path, tracker: Tracker | Sink) -> None:
        self.folder = folder.resolve()
        self._sink = open_sink(tracker, self.folder) if isinstance(tracker, str) else tracker
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


@contextmanager
def tracked(folder: Path, tracker: Tracker) -> Iterator[None]:
    """Track a run while the block runs; a tracker that fails is reported, and does not fail the run.

    Raises:
        ConfigError: the tracker is not installed.
    """
    tracking, failed, begun = Tracking(folder, tracker), False, False

    def attempt(step: Callable[[], object]) -> None:
        nonlocal failed
        try:
            step()
        except Exception as error:
            failed = True
            log.debug("%s", folder, exc_info=True)
            log.warning(
                "the run continues, but %s failed (%s: %s); write the history afterwards: suture track %s %s",
                *(tracker, type(error).__name__, error, quote(str(folder)), tracker),
            )

    def take(text: str) -> None:
        nonlocal begun
        begun = True
        if not failed and _NEWS.search(text):
            attempt(tracking.update)

    try:
        with followed(folder / "events.jsonl", take):
            yield
    finally:
        if begun and not failed:
            attempt(tracking.finish)


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
