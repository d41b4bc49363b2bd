"""The runs of a study: each row is tuned on fold 1, then trained in every fold. What is stored is not run."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from suture.core.errors import ConfigError, FederationError, SutureError
from suture.core.files import make_folder
from suture.execution.job import load_job, with_settings
from suture.execution.run import run_job
from suture_papers.studies.design import Design, Metric, Record, Run, Tuning
from suture_papers.studies.measure import record_test, record_validation
from suture_papers.studies.plan import register
from suture_papers.tables.results import ResultStore
from suture_papers.tables.spec import Settings

Measure = Callable[[Path, Metric], dict[str, Any]]
"""What is stored of the run in a folder."""

FIRST = 1
"""The fold whose validation data tune."""


@dataclass(frozen=True)
class Tuned:
    """What a row has been tuned to.

    Attributes:
        value: of the tuned setting.
        rounds: the number after which the validation AUROC was highest.
        inside: whether neither lies at the end of what was tried.
        auroc: of the validation data, mean over seeds.
    """

    value: float
    rounds: int
    inside: bool
    auroc: float


@dataclass(frozen=True)
class Conduct:
    """Where a study is run.

    Attributes:
        store: of its records.
        work: folder of the runs; each is deleted once its record is stored.
        data_root: the folder of the data sets.
        at_once: runs at a time.
        report: receives a line for each run that ends.
        amend: why the plan has changed since its first run; None refuses a changed plan.
    """

    store: ResultStore
    work: Path
    data_root: Path
    at_once: int
    report: Callable[[str], None]
    amend: str | None = None


def conduct(design: Design, to: Conduct) -> None:
    """Do the runs of a design that have no record yet.

    Raises:
        ConfigError: the plan has changed since its first run.
        FederationError: some runs failed; names them. The others have been done.
    """
    register(design, to.store, to.amend)
    make_folder(to.work)
    # Decoded images are the same in all runs.
    os.environ.setdefault("SUTURE_CACHE", str(to.work / "cache"))
    context = multiprocessing.get_context("forkserver")  # whose runs need not import torch again
    context.set_forkserver_preload(["suture.execution.run", "suture_papers.studies.measure"])
    processes = ProcessPoolExecutor(to.at_once, context, max_tasks_per_child=1)
    threads = ThreadPoolExecutor(to.at_once)

    def done(run: Run, what: Measure) -> Record:
        record = to.store.find(run.name)
        if record is None:
            arguments = (run.job, run.options(to.data_root), to.work / run.name, what, design.study.metric)
            record = processes.submit(_run, *arguments).result() | {"row": run.row}
            to.store.put(run.name, record)
            best = max((value for value in record["validation"] if value is not None), default=None)
            to.report(f"{run.name}: {record.get('mean', best)}")
        return record

    def tune(row: str) -> None:
        tuned(design, row, lambda run: done(run, record_validation))

    try:
        own = [row for row, one in design.rows.items() if not one.like]
        failed = _all(to, {row: threads.submit(tune, row) for row in own})
        runs = {run.name: run for run in final_runs(design, stored(to.store))}
        failed |= _all(to, {name: threads.submit(done, run, record_test) for name, run in runs.items()})
    finally:  # an interruption does not wait for the runs that have not begun
        threads.shutdown(wait=False, cancel_futures=True)
        processes.shutdown(wait=False, cancel_futures=True)
    if failed:
        listed = "\n".join(f"{name}: {error}" for name, error in failed.items())
        raise FederationError(f"{len(failed)} runs failed; all others have been done\n{listed}")


def _all(to: Conduct, futures: Mapping[str, Future[Any]]) -> dict[str, str]:
    """Wait for all, and return the errors of those that failed, by name."""
    names, failed = {future: name for name, future in futures.items()}, {}
    for future in as_completed(names):
        try:
            future.result()
        except SutureError as error:
            failed[names[future]] = str(error)
            to.report(f"failed: {names[future]}: {error}")
    return failed


def _run(job: str, options: list[str], out: Path, measure: Measure, metric: Metric) -> dict[str, Any]:
    """Do a run in this process, and return its record."""
    run_job(with_settings(load_job(job), options), "local", out, overwrite=True)
    found = measure(out, metric)
    shutil.rmtree(out)
    return found


Find = Callable[[Run], Record | None]


def stored(store: ResultStore) -> Find:
    """Return what finds the stored record of a run."""
    return lambda run: store.find(run.name)


def tuned(design: Design, row: str, find: Find) -> Tuned | None:
    """Return what a row is tuned to, by the mean validation AUROC over seeds.

    Args:
        find: returns the record of a run, or does it; None where there is none yet.

    Returns:
        None as soon as a record is missing.

    Raises:
        ConfigError: the validation data define no AUROC.
    """
    row, tuning = design.rows[row].like or row, design.tuning(row)
    tried, rounds = [-1, 0, 1], tuning.rounds
    while True:
        curves: dict[int, np.ndarray] = {}
        for k in tried:
            runs = [_tuning_run(design, row, tuning, k, rounds, seed) for seed in tuning.seeds]
            records = [find(run) for run in runs]
            lines = [np.array(record["validation"], dtype=np.float64) for record in records if record]
            if len(lines) < len(runs):
                return None
            curves[k] = np.mean(lines, axis=0)
        if any(np.isnan(curve).any() for curve in curves.values()):
            raise ConfigError(
                f"row {row!r}: the validation data define no AUROC to tune {tuning.key} by; "
                "give them ten positives of a class that the row trains"
            )
        best = max(curves, key=lambda k: float(curves[k].max()))
        at = int(curves[best].argmax()) + 1
        edge = best in (min(tried), max(tried))
        if edge and len(tried) < tuning.most:
            tried = sorted([*tried, best - 1 if best == min(tried) else best + 1])
        elif at == rounds and 1 < rounds < tuning.most_rounds:
            rounds, tried = 2 * rounds, [best - 1, best, best + 1]
        else:
            inside = not edge and (rounds == 1 or at < rounds)
            return Tuned(tuning.value(best), at, inside, float(curves[best].max()))


def _tuning_run(design: Design, row: str, tuning: Tuning, k: int, rounds: int, seed: int) -> Run:
    by = "server_metric" if design.study.metric == "auroc" else "server_balanced_accuracy"
    extra: Settings = {tuning.key: tuning.value(k), "rounds": rounds, "selection": by}
    return design.run(row, FIRST, seed, extra)


def final_runs(design: Design, find: Find) -> Iterable[Run]:
    """Yield the runs that are tested, fold by fold; those of a row that is not tuned yet are left out."""
    found = {row: tuned(design, row, find) for row in design.rows}
    for fold in design.folds(design.study.control):
        for row, one in found.items():
            if one is None or fold not in design.folds(row):
                continue
            for seed in design.study.seeds:
                yield final_run(design, row, fold, seed, one)


def final_run(design: Design, row: str, fold: int, seed: int, one: Tuned) -> Run:
    """Return the run of a row in a fold, as it has been tuned."""
    key = design.tuning(row).key
    return design.run(row, fold, seed, {key: one.value, "rounds": one.rounds, "selection": "last"})
