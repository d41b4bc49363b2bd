"""The runs of a table, named by their settings, so that no run is done twice."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from suture_papers.tables.spec import DATA, ExternalTest, Settings, Table, Value


@dataclass(frozen=True)
class Run:
    """One run of a job.

    Attributes:
        row: the table's row that the run belongs to.
        x: the value of the series, None without a series.
        job: the job whose settings the run changes.
        settings: those that differ from the job's own, the seed among them; paths with ``{data}``.
        tests: the external test sets on which the run's models are measured.
    """

    row: str
    x: Value
    job: str
    settings: Settings = field(hash=False)
    tests: Mapping[str, ExternalTest] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        """Job, method, seed and a hash of all settings: equal runs of two tables have one name."""
        content: list[Any] = [self.job, sorted(self.settings.items())]
        if self.tests:
            content.append({name: test.data for name, test in self.tests.items()})
        text = json.dumps(content, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:10]
        return f"{Path(self.job).name}-{self.settings.get('method', 'job')}-s{self.settings['seed']}-{digest}"

    @property
    def seed(self) -> int:
        """The seed of the run."""
        seed = self.settings["seed"]
        assert isinstance(seed, int)
        return seed

    def paths(self) -> Iterator[str]:
        """Yield the settings that are paths under the data root, with ``{data}``."""
        return (text for value in self.settings.values() for text in _texts(value) if text.startswith(DATA))

    def arguments(self, data_root: Path | None) -> list[str]:
        """Return the settings as options of `suture run`."""
        return [text for one in as_options(self.settings, data_root) for text in ("--set", one)]


def as_options(settings: Settings, data_root: Path | None) -> list[str]:
    """Return settings as ``key=value``, with the data root for ``{data}`` where it is given."""
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in settings.items()}
    root = DATA if data_root is None else str(data_root)
    return [f"{key}={text.replace(DATA, root)}" for key, text in texts.items()]


def _texts(value: Value) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)


def final_runs(table: Table, tuned: Mapping[tuple[str, str], Value]) -> Iterator[Run]:
    """Yield the runs that the table shows.

    Args:
        tuned: the chosen value of the tuned setting, by row and value of the series as text.
    """
    # Seed by seed, so that a table that is cut off still compares its rows.
    for seed in table.preset.seeds:
        for row, x in table.cells:
            tune = table.preset.tune
            yield _run(table, row, x, seed, {tune.key: tuned[row, str(x)]} if tune else {})


def tuning_runs(table: Table) -> Iterator[Run]:
    """Yield the runs that choose the tuned setting; the best of each row is also in the table."""
    if tune := table.preset.tune:
        for row, x in table.cells:
            for value in tune.values:
                yield _run(table, row, x, tune.seed, {tune.key: value})


def _run(table: Table, row: str, x: Value, seed: int, extra: Settings) -> Run:
    spec, preset = table.spec, table.preset
    at = table.values[0] if spec.rows[row].steady else x
    series: Settings = {spec.series.key: at} if spec.series else {}
    own = spec.rows[row].set
    # The method first: another one forgets hyperparameters that it does not have. What the row sets holds.
    settings = {
        **own,
        **spec.set,
        **preset.set,
        **own,
        **preset.rows.get(row, {}),
        **series,
        **extra,
        "seed": seed,
    }
    return Run(row, x, spec.job, settings, table.tests)
