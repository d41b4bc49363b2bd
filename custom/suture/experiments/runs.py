"""The runs of an experiment: named by their settings, so that none is done twice."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from suture.core.errors import ConfigError, DataError
from suture.core.files import write_json
from suture.experiments.settings import changed, settings_done, settings_now
from suture.experiments.spec import DATA, Experiment, ExternalTest, Preset, Settings, Value
from suture.learning.metrics import mean_defined

GLOBAL = "global"
"""The model of a run that leaves one, among the models of a test."""


@dataclass(frozen=True)
class Run:
    """One run of a job.

    Attributes:
        row: of the experiment.
        x: value of the series, None without one.
        settings: all that differ from the job's own, the seed among them; paths still with ``{data}``.
        tests: test sets on which its models are measured.
    """

    row: str
    x: Value
    job: str
    settings: Settings = field(hash=False)
    tests: Mapping[str, ExternalTest] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        """Job, method and a hash of all settings: equal runs of two experiments have one name."""
        content: list[Any] = [self.job, sorted(self.settings.items())]
        if self.tests:
            content.append({name: test.data for name, test in self.tests.items()})
        text = json.dumps(content, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:10]
        return f"{self.job}-{self.settings.get('method', 'job')}-s{self.settings['seed']}-{digest}"

    def paths(self) -> Iterator[str]:
        """The settings that lie under the data root, still with ``{data}``."""
        return (text for value in self.settings.values() for text in _texts(value) if text.startswith(DATA))

    def arguments(self, data_root: Path | None) -> list[str]:
        """The settings as options of `suture run`."""
        options = []
        for key, value in self.settings.items():
            text = value if isinstance(value, str) else json.dumps(value)
            if data_root is not None:
                text = text.replace(DATA, str(data_root))
            options += ["--set", f"{key}={text}"]
        return options


def _texts(value: Value) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)


def final_runs(
    experiment: Experiment, preset: Preset, tuned: Mapping[tuple[str, str], Value]
) -> Iterator[Run]:
    """The runs that make the table.

    Args:
        tuned: the chosen value of the tuned setting, by row and value of the series.
    """
    # Seed by seed, so that an experiment that is cut off still compares its rows.
    for seed in preset.seeds:
        for row, x in cells(experiment, preset):
            extra = {preset.tune.key: tuned[row, str(x)]} if preset.tune else {}
            yield _run(experiment, preset, row, x, seed, extra)


def tuning_runs(experiment: Experiment, preset: Preset) -> Iterator[Run]:
    """The runs that choose the tuned setting; one of each row also counts in the table."""
    if preset.tune is None:
        return
    for row, x in cells(experiment, preset):
        for value in preset.tune.values:
            yield _run(experiment, preset, row, x, preset.tune.seed, {preset.tune.key: value})


def cells(experiment: Experiment, preset: Preset) -> Iterator[tuple[str, Value]]:
    """Rows and values of the series, in the order of the file; every row of one value before the next."""
    for x in values_of(experiment, preset):
        for row in experiment.rows:
            if row not in preset.skip:
                yield row, x


def values_of(experiment: Experiment, preset: Preset) -> tuple[Value, ...]:
    """The values of the series, or a single None."""
    return (preset.series or experiment.series.values) if experiment.series else (None,)


def _run(experiment: Experiment, preset: Preset, row: str, x: Value, seed: int, extra: Settings) -> Run:
    at = values_of(experiment, preset)[0] if experiment.rows[row].steady else x
    series: Settings = {experiment.series.key: at} if experiment.series else {}
    # The method first: another one forgets hyperparameters that it does not have.
    settings = {
        **experiment.rows[row].set,
        **experiment.set,
        **preset.set,
        **preset.rows.get(row, {}),
        **series,
        **extra,
        "seed": seed,
    }
    return Run(row, x, experiment.job, settings, experiment.tests_in(preset))


_BY_CLASSES = "server_balanced_accuracy"


@dataclass(frozen=True)
class Result:
    """What is kept of a finished run: its figures, and what they cost.

    Attributes:
        tests: by test set and model (`GLOBAL`, or a site), as of `suture.experiments.testing.figures`.
        tuned: by task, what the model became where it was fine-tuned; `targets` of tuned.json.
        validation_balanced_accuracy: of a run whose rounds were selected by it, which then also tunes.
        untested: of test sets that were not there, the path that was looked for, with ``{data}``.
        made_with: every setting of the run by dotted name, the job's own among them; empty in old results.
    """

    run: dict[str, Any]
    metrics: dict[str, Any]
    validation_auroc: float | None
    validation_loss: float | None
    seconds: float
    tests: dict[str, dict[str, Any]] = field(default_factory=dict)
    tuned: dict[str, Any] = field(default_factory=dict)
    validation_balanced_accuracy: float | None = None
    untested: dict[str, str] = field(default_factory=dict)
    made_with: dict[str, Any] = field(default_factory=dict)

    @property
    def validation(self) -> float | None:
        """The figure that tunes; more is better."""
        by_classes = self.validation_balanced_accuracy
        return self.validation_auroc if by_classes is None else by_classes


def read_result(folder: Path, run: Run) -> Result | None:
    """The result of a run, None if it has not been done.

    Raises:
        ConfigError: the job has been edited since; names the setting.
        DataError: the file is not what `keep_result` writes.
    """
    path = folder / f"{run.name}.json"
    if not path.exists():
        return None
    try:
        result = Result(**json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise DataError(f"{path} cannot be read: {error}; delete it, and the run is done again") from error
    _refuse_edited(run, result, path)
    return result


def _refuse_edited(run: Run, result: Result, path: Path) -> None:
    if not result.made_with:
        return
    now = settings_now(run.job, run.arguments(None)[1::2])
    if key := changed(result.made_with, now):
        raise ConfigError(
            f"{run.name} was run with {key}={result.made_with[key]}, and the job {run.job} now has "
            f"{key}={now.get(key)}; set the job back, or delete {path} and the run's folder in --work, and "
            "it is done again"
        )


def keep_result(
    folder: Path,
    run: Run,
    done: Path,
    data_root: Path | None = None,
    tests: dict[str, dict[str, Any]] | None = None,
    untested: dict[str, str] | None = None,
) -> Result:
    """Takes from the folder of a finished run what is worth keeping, a few kilobytes.

    Args:
        done: folder of the run.
        data_root: what stood for ``{data}`` in its settings.
        tests, untested: as in `Result`.

    Raises:
        DataError: the run did not finish.
    """
    facts = _facts(done)
    history = [json.loads(line) for line in (done / "history.jsonl").read_text().splitlines()]
    measured = _validation(history, facts)
    auroc = measured["auroc"] if measured.get("server_auroc") is None else measured["server_auroc"]
    metrics = json.loads((done / "metrics.json").read_text())
    for key in ("intervals", "counts"):
        metrics.pop(key, None)
    if share := metrics.pop("weighting", {}).get("mean_share"):
        metrics["mean_share"] = share
    path = done / "tuned.json"
    result = Result(
        _about(run, facts),
        metrics,
        auroc,
        measured["loss"],
        round(sum(r["seconds"] for r in history), 1),
        tests or {},
        json.loads(path.read_text())["targets"] if path.exists() else {},
        measured.get(_BY_CLASSES) if facts.get("selection") == _BY_CLASSES else None,
        untested or {},
        settings_done(done, data_root),
    )
    folder.mkdir(parents=True, exist_ok=True)
    # Settings stay whole: a learning rate may differ in the seventh digit.
    write_json(folder / f"{run.name}.json", {**_rounded(vars(result)), "made_with": result.made_with})
    return result


def _facts(done: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((done / "run.json").read_text())
    if facts.get("status") != "finished":
        raise DataError(f"{done} holds no finished run ({facts.get('status')}: {facts.get('error')})")
    return facts


def _validation(history: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """The validation figures of the models that are kept: of one round, or of each site's own best one."""
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


def _rounded(value: Any) -> Any:
    """Numbers to six digits: more would pretend."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, list | tuple) else value
