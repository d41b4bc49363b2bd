"""Where a run can be tracked besides its folder: TensorBoard's event files, and MLflow."""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from time import time_ns
from typing import Any

from suture.cli.common import Tracker
from suture.core.errors import ConfigError
from suture.core.files import make_folder, note_own, own_note, writing
from suture.core.printable import printable
from suture.core.targets import markdown
from suture.simulation.follow import followed
from suture.simulation.tracking import Facts, Sink, Tracking, part_of_name

log = logging.getLogger(__name__)


def open_sink(tracker: Tracker, folder: Path) -> Sink:
    """Return where a tracker writes the numbers of a run folder.

    Raises:
        ConfigError: the tracker is not installed.
    """
    if find_spec(tracker) is None:
        raise ConfigError(
            f"tracking needs {tracker}, which is not installed: pip install 'suture[{tracker}]'"
        )
    return _TensorBoard(folder) if tracker == "tensorboard" else _MLflow(folder)


def _refuse_link(path: Path) -> None:
    """Refuse a link in a run folder: what a tracker deletes or writes would be of another folder.

    Raises:
        ConfigError: it is one.
    """
    if path.is_symlink():
        raise ConfigError(f"{path} is a link, and Suture does not follow links here; remove it")


class _TensorBoard:
    """Event files in tensorboard/ of the run folder; .suture.json there names the ending of ours."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "tensorboard"
        self._writer: Any = None

    def begin(self, facts: Facts) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if self._writer:
            self._writer.close()
        _refuse_link(self._folder)
        make_folder(self._folder)
        note, ending = self._folder / ".suture.json", f".{secrets.token_hex(8)}"
        former = str((own_note(note) or {}).get("ending") or "/")  # no file ends so
        found = list(self._folder.glob("events.out.tfevents.*"))
        with writing(self._folder):
            for path in (path for path in found if path.name.endswith(former)):
                path.unlink()
        if others := [path.name for path in found if not path.name.endswith(former)]:
            log.warning(
                "%s has files that this command did not write, and keeps them: %s",
                self._folder,
                ", ".join(map(printable, others)),
            )
        note_own(note, ending=ending)
        self._writer = SummaryWriter(str(self._folder), filename_suffix=ending)
        self._writer.add_text("settings", _table(facts.settings), 0)
        self._writer.add_text("tags", _table(facts.tags), 0)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, status: str) -> str:
        self._writer.add_text("status", status, 0)
        self._writer.close()
        return f"{self._folder}; look at it with: tensorboard --logdir {quote(str(self._folder))}"


def _table(values: Mapping[str, str]) -> str:
    """Return values as a table of Markdown."""
    rows = [f"| {markdown(key)} | {markdown(value)} |" for key, value in values.items()]
    return "\n".join(["| name | value |", "|---|---|", *rows])


class _MLflow:
    """A run at MLFLOW_TRACKING_URI, or in mlflow.db of the run folder; mlflow.json there keeps its id."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder / 'mlflow.db'}"
        self._client: Any = None
        self._run = ""

    def begin(self, facts: Facts) -> None:
        for name in ("mlflow.db", "mlruns"):
            _refuse_link(self._folder / name)
        client = self._client = self._connected()
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        note = self._folder / "mlflow.json"
        if before := own_note(note):
            try:
                client.delete_run(str(before.get("run_id")))
            except MlflowException:
                log.info("the run of %s is not at this server", note)
        experiment = client.get_experiment_by_name(facts.job)
        self._run = client.create_run(
            experiment.experiment_id if experiment else self._new_experiment(facts.job),
            start_time=int(1000 * facts.started),
            tags=facts.tags,
            run_name=facts.experiment,
        ).info.run_id
        note_own(note, run_id=self._run)
        params = [Param(part_of_name(key), value[:6000]) for key, value in facts.settings.items()]
        for first in range(0, len(params), 100):  # as many as MLflow takes at a time
            client.log_batch(self._run, params=params[first : first + 100])

    def _connected(self) -> Any:
        # No minutes of waiting for a server that is down, unless the user wants them.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        from mlflow.tracking import MlflowClient

        return MlflowClient(self._uri)

    def _new_experiment(self, job: str) -> str:
        local = self._uri.startswith("sqlite:///")
        place = (self._folder / "mlruns").as_uri() if local else None
        return str(self._client.create_experiment(job, artifact_location=place))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = time_ns() // 10**6
        metrics = [Metric(name, value, now, step) for name, value in scalars.items()]
        for first in range(0, len(metrics), 1000):
            self._client.log_batch(self._run, metrics=metrics[first : first + 1000])

    def close(self, status: str) -> str:
        ends = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
        if status in ends:
            self._client.set_terminated(self._run, ends[status])
        return f"run {self._run} of MLflow" + (
            f" in {self._folder / 'mlflow.db'}" if self._uri.startswith("sqlite:///") else ""
        )


_NEWS = re.compile(r'"event": "(begin|validated|rolled_back)"')
"""Events after which history.jsonl has changed."""


def tracking_of(folder: Path, tracker: Tracker) -> Tracking:
    """Return what writes the committed rounds of a run folder to a tracker.

    Raises:
        ConfigError: the tracker is not installed.
    """
    return Tracking(folder, open_sink(tracker, folder.resolve()))


@contextmanager
def tracked(folder: Path, tracker: Tracker) -> Iterator[None]:
    """Track a run while the block runs; a tracker that fails is reported, and does not fail the run.

    Raises:
        ConfigError: the tracker is not installed.
    """
    tracking, failed, begun = tracking_of(folder, tracker), False, False

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
