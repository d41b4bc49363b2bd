"""The stored results of runs: one JSON Lines file for each table, one run a line."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from suture.core.errors import ConfigError, DataError
from suture.core.files import atomic_write, hold, read_json, read_records, read_regular
from suture.core.validation import STRICT, flat, parse
from suture.execution.job import load_job, with_settings
from suture.learning.metrics import mean_defined
from suture_papers.tables.runs import Run
from suture_papers.tables.spec import DATA

_LOCK_SECONDS = 60.0
_COMPACT = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


@dataclass(frozen=True)
class ResultStore:
    """Records in a JSON Lines file, one a line, sorted by name. Processes may read and write at once.

    Attributes:
        folder: of the files.
        table: what the records are of; their file is ``TABLE.jsonl``.
    """

    folder: Path
    table: str

    @property
    def path(self) -> Path:
        """The file."""
        return self.folder / f"{self.table}.jsonl"

    def find(self, name: str) -> dict[str, Any] | None:
        """Return the record of that name, without the name; None if there is none.

        Raises:
            DataError: the file is damaged; names the line and the remedy.
        """
        line = _lines(self.path).get(name)
        if line is None:
            return None
        record: dict[str, Any] = json.loads(line)
        del record["name"]
        return record

    def every(self) -> dict[str, dict[str, Any]]:
        """Return all records by name, each with its name.

        Raises:
            DataError: as `find`.
        """
        return {name: json.loads(line) for name, line in _lines(self.path).items()}

    def holder(self, name: str) -> ResultStore:
        """Return the store of the folder that has the record, because tables share runs; by default this one.

        Raises:
            DataError: as `find`, of any file of the folder.
        """
        paths = [self.path, *sorted(self.folder.glob("*.jsonl"))]
        return next((ResultStore(self.folder, p.stem) for p in paths if name in _lines(p)), self)

    def put(self, name: str, record: Mapping[str, Any]) -> None:
        """Add a record, or replace the one of that name.

        Raises:
            DataError: as `find`, or a number of the record is not finite.
            SutureError: another process holds the folder's lock for longer than a minute.
        """
        try:
            line = _COMPACT.encode({"name": name} | {**record, "name": name})
        except ValueError as error:
            raise DataError(f"result {name}: {error}; write an undefined number as null") from error
        with hold(self.folder / ".lock", _LOCK_SECONDS):
            lines = {**_parse(self.path), name: line}  # anew: two versions may be of one time and size
            atomic_write(self.path, "".join(f"{lines[key]}\n" for key in sorted(lines)).encode())


def _lines(path: Path) -> Mapping[str, str]:
    """Return the lines of a file by the names of their records; parses again only a file that has changed."""
    if not path.exists():
        return {}
    now = path.stat()
    return _parse_version(path, now.st_mtime_ns, now.st_size, now.st_ino)


@lru_cache(maxsize=256)
def _parse_version(path: Path, *_version: int) -> Mapping[str, str]:
    return _parse(path)


def _parse(path: Path) -> Mapping[str, str]:
    lines: dict[str, str] = {}
    # Not splitlines(): JSON may hold U+2028, which that takes for the end of a line.
    for number, raw in enumerate(_content(path).split(b"\n"), 1):
        try:
            if not (line := raw.decode().strip()):
                continue
            name = json.loads(line, parse_constant=_refuse_constant)["name"]
            if not isinstance(name, str):
                raise TypeError(f"the name is {name!r}")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            why = f"{error!r:.300}"  # that of bytes that are not UTF-8 repeats the whole line
            raise DataError(
                f"{path}, line {number} cannot be read: {why}; delete the line, and its run is done again"
            ) from None
        if name in lines:
            raise DataError(f"{path}, line {number} is the second for {name}; delete the wrong one")
        lines[name] = line
    return lines


def _content(path: Path) -> bytes:
    try:
        return read_regular(path)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}; move it elsewhere") from error


def _refuse_constant(constant: str) -> float:
    raise ValueError(f"{constant} is not a number in JSON")


_BY_CLASSES = "server_balanced_accuracy"


@dataclass(frozen=True)
class Result:
    """What is stored of a finished run: its figures, and what they cost.

    Attributes:
        run: the job, the settings that differ from the job's own, and the circumstances of the run.
        metrics: of metrics.json, without intervals and counts.
        validation_auroc, validation_loss: of the selected models on validation data.
        seconds: the sum over rounds.
        tests: by test set and model (`GLOBAL`, or a site), as returned by `external_tests.figures`.
        tuned: by target, the figures of the fine-tuned models; `targets` of tuned.json.
        validation_balanced_accuracy: of a run whose round was selected by it, which is then also tuned by it.
        made_with: every setting of the run by dotted name, the job's own among them; empty in old results.
    """

    __pydantic_config__: ClassVar = STRICT

    run: dict[str, Any]
    metrics: dict[str, Any]
    validation_auroc: float | None
    validation_loss: float | None
    seconds: float
    tests: dict[str, dict[str, Any]] = field(default_factory=dict)
    tuned: dict[str, Any] = field(default_factory=dict)
    validation_balanced_accuracy: float | None = None
    made_with: dict[str, Any] = field(default_factory=dict)

    @property
    def validation(self) -> float | None:
        """The figure by which a setting is tuned; more is better."""
        by_classes = self.validation_balanced_accuracy
        return self.validation_auroc if by_classes is None else by_classes


def read_result(store: ResultStore, run: Run) -> Result | None:
    """Return the stored result of a run, in whichever table's file; None if it has not been done.

    Raises:
        ConfigError: the job has been edited since; names the setting.
        DataError: the record is not what `store_result` writes.
    """
    holder = store.holder(run.name)
    record = holder.find(run.name)
    if record is None:
        return None
    try:
        result = parse(Result, record, f"{holder.path}, {run.name} cannot be read")
    except ConfigError as error:
        raise DataError(f"{error!s:.500}; delete its line, and the run is done again") from None
    now = settings_now(run.job, run.arguments(None)[1::2]) if result.made_with else {}
    if key := find_change(result.made_with, now):
        raise ConfigError(
            f"{run.name} was run with {key}={result.made_with[key]}, and the job {run.job} now has "
            f"{key}={now.get(key)}. Set the job back. Or delete the run's line in {holder.path} "
            "and its folder in --work, and it is done again"
        )
    return result


def store_result(store: ResultStore, run: Run, result: Result) -> None:
    """Store a result, with numbers rounded to six digits.

    Raises:
        DataError: as `ResultStore.put`.
    """
    # Settings stay whole: a learning rate may differ in the seventh digit.
    store.put(run.name, {**_round(vars(result)), "made_with": result.made_with})


def result_of(run: Run, done: Path, data_root: Path | None = None) -> Result:
    """Take what is worth storing, a few kilobytes, from the folder of a finished run.

    Args:
        done: the folder of the run.
        data_root: what stood for ``{data}`` in the run's settings.

    Returns:
        The result, without figures on external tests.

    Raises:
        DataError: the run did not finish.
    """
    facts = _facts(done)
    history = read_records(done / "history.jsonl")
    measured = _validation(history, facts)
    by_server = measured.get("server_auroc")
    tuned = done / "tuned.json"
    return Result(
        run=_about(run, facts),
        metrics=_metrics(done),
        validation_auroc=measured["auroc"] if by_server is None else by_server,
        validation_loss=measured["loss"],
        seconds=round(sum(r["seconds"] for r in history), 1),
        tuned=read_json(tuned, "targets")["targets"] if tuned.exists() else {},
        validation_balanced_accuracy=(
            measured.get(_BY_CLASSES) if facts.get("selection") == _BY_CLASSES else None
        ),
        made_with=settings_done(done, settings_now(run.job, run.arguments(None)[1::2]), data_root),
    )


def _facts(done: Path) -> dict[str, Any]:
    facts = read_json(done / "run.json")
    if facts.get("status") != "finished":
        raise DataError(
            f"{done} does not contain a finished run ({facts.get('status')}: {facts.get('error')})"
        )
    return facts


def _metrics(done: Path) -> dict[str, Any]:
    metrics = read_json(done / "metrics.json")
    for key in ("intervals", "counts"):
        metrics.pop(key, None)
    if share := metrics.pop("weighting", {}).get("mean_share"):
        metrics["mean_share"] = share
    return metrics


def _validation(history: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the validation figures of the selected models: of one round, or of each site's best round."""
    if facts["method"]["personal"] != "model":
        selected = next((r for r in history if r["round"] == facts["selected_round"]), None)
        return selected["validation"] if selected else {"auroc": None, "loss": None}
    best: dict[str, Mapping[str, Any]] = {}
    for line in history:
        for site, own in line["sites"].items():
            loss = own.get("validation_loss")
            if loss is not None and (site not in best or loss < best[site]["validation_loss"]):
                best[site] = own
    return {
        key: mean_defined(own.get(f"validation_{key}") for own in best.values()) for key in ("auroc", "loss")
    }


def _about(run: Run, facts: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "job": run.job,
        "settings": run.settings,
        "env": facts.get("env"),
        "selected_round": facts["selected_round"],
        "sites": {name: site["labels"] for name, site in facts["sites"].items()},
        "versions": facts["versions"],
        "finished": facts["finished"],
    }


def _round(value: Any) -> Any:
    """Round numbers to six digits, at any depth."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {k: _round(v) for k, v in value.items()}
    return [_round(v) for v in value] if isinstance(value, list | tuple) else value


_SCHEDULE = ("rounds", "selection", "patience")
"""The part of the schedule that changes a model."""

_PLACE = "simulation.folder"
"""Where a study lies, which changes no figure."""


def settings_done(done: Path, planned: Mapping[str, Any], data_root: Path | None) -> dict[str, Any]:
    """Return all settings of the run in the folder `done`, by dotted name.

    Args:
        planned: by `settings_now`. Where it has ``{data}``, so has the result; other paths stay as they are,
            also below that root.
    """
    content = read_json(done / "job.json", "plan", "schedule")
    settings = _settings(content["plan"], content["schedule"], content.get("simulation", {}))
    for key in settings.keys() & planned.keys():
        text = json.dumps(planned[key], ensure_ascii=False).replace(DATA, str(data_root))
        settings[key] = planned[key] if json.loads(text) == settings[key] else settings[key]
    return settings


def settings_now(name: str, options: list[str]) -> dict[str, Any]:
    """Return all settings of a job as it stands, by dotted name.

    Args:
        options: ``key=value``, as of `suture run --set`.

    Raises:
        ConfigError: the job, or a setting, does not exist any more.
    """
    job = with_settings(load_job(name), options)
    # A simulation replaces the vocabulary by that of its documents, which only it has read.
    job = dataclasses.replace(job, model=dataclasses.replace(job.model, vocabulary="clinical"))
    simulation = dataclasses.asdict(job.simulation) if job.simulation else {}
    settings = _settings(job.plan("x").to_dict(), job.schedule().to_dict(), simulation)
    plain: dict[str, Any] = json.loads(json.dumps(settings))
    return plain


def find_change(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Return the first setting that differs, None without one; new ones do not count."""
    return next((key for key in sorted(before) if key not in now or now[key] != before[key]), None)


def _settings(
    plan: Mapping[str, Any], schedule: Mapping[str, Any], simulation: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "seed": plan["seed"],
        "method": plan["method"],
        **{key: schedule[key] for key in _SCHEDULE},
        **flat("method", plan["hyperparameters"]),
        **flat("model", {k: v for k, v in plan["model"].items() if k != "vocabulary"}),
        **flat("augmentation", plan["augmentation"]),
        **{k: v for k, v in flat("simulation", simulation).items() if simulation and k != _PLACE},
    }
