"""The runs of a table: tune on validation data, do the missing runs, measure and compare their models.

Source of the comparison of single classes: Kulkarni et al., MIDL 2023, Appendix B (Tables 3 and 4).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event, Lock
from typing import Any

from suture.core.errors import ConfigError, FederationError, SutureError
from suture.core.files import make_folder, read_json
from suture.data.config import SiteConfig, StorageConfig, load_site_config
from suture.execution.job_files import job_file, refuse_code
from suture.execution.run import delete_files, files_of_run
from suture.execution.sites import this_machine
from suture.protocol.messages import ClassScore
from suture_papers.tables.external_tests import absent_tests, check_tests, test_models
from suture_papers.tables.outcome import Outcome, choose, collect, compared_runs, comparison_name
from suture_papers.tables.plan import register
from suture_papers.tables.resampling import SCORES, resample
from suture_papers.tables.resampling import compared_classes as by_delong
from suture_papers.tables.results import Result, ResultStore, read_result, result_of, store_result
from suture_papers.tables.runs import Run, final_runs, tuning_runs
from suture_papers.tables.spec import DATA, Table
from suture_results.comparison import Compared, compare

SERVER = Path("sites") / "server"
"""In the folder of a finished run: the description of the labelled data that a simulation holds out."""


@dataclass(frozen=True)
class Session:
    """Where a table is conducted.

    Attributes:
        store: of the results.
        work: folder of the runs; a run that was interrupted there is resumed.
        data_root: the folder of the data sets, for which ``{data}`` stands.
        report: receives a line for each run that begins or ends, and for each warning.
        amend: why the plan of a study is changed after its first run; None refuses a changed plan.
        warned: the warnings of runs so far; a warning of several runs is reported once.
    """

    store: ResultStore
    work: Path
    data_root: Path | None
    report: Callable[[str], None]
    amend: str | None = None
    warned: set[str] = field(default_factory=set)

    def warn(self, text: str) -> None:
        """Report what a finished run wrote to its standard error."""
        for line in text.splitlines():
            if line.strip() and line not in self.warned:
                self.warned.add(line)
                self.report(f"warning: {line}")


def conduct(table: Table, session: Session, at_once: int) -> Outcome:
    """Do the runs of a table that have no result yet.

    Args:
        at_once: as in `do_runs`.

    Raises:
        ConfigError: its job is code that is no part of this package; or the data root, or a folder or file
            of the runs under it, does not exist.
        ConfigError: a run that tunes a setting has no validation figure to tune it by.
        ConfigError: the plan of a study has changed since its first run, or there is none to amend.
        FederationError: a run failed.
    """
    refuse_code(job_file(table.spec.job, trust=True))  # here nobody has named the file on a command line
    _check_data(table, session)
    if session.amend is not None and not table.spec.plan:
        raise ConfigError(f"{session.store.table} has no plan to amend; leave --amend out")
    if table.spec.plan:
        register(table, session.store, session.amend)
    if table.preset.tune:
        do_runs(tuning_runs(table), session, at_once)
        _refuse_unmeasured(table, session.store)
    do_runs(final_runs(table, choose(table, session.store)), session, at_once)
    return collect(table, session.store)


def _refuse_unmeasured(table: Table, store: ResultStore) -> None:
    tune = table.preset.tune
    for run in tuning_runs(table):
        result = read_result(store, run)
        if tune and (result is None or result.validation is None):
            raise ConfigError(
                f"row {run.row!r}: its run {run.name} has no validation figure to tune {tune.key} by. "
                "Give the validation data positives and negatives of a class that the row trains, or let the "
                "preset skip the row"
            )


def _check_data(table: Table, session: Session) -> None:
    """Look for every path under the data root that the missing runs read, before the first of them.

    Raises:
        ConfigError: the data root is not given, or something under it does not exist; names it, with the rows
            that read it.
    """
    tuned, grids = choose(table, session.store), {row: table.tried_grid(row) for row in table.rows}
    values = {(row, str(x)): grid.values[0] for row, x in table.cells if (grid := grids[row])} | tuned
    runs = [*tuning_runs(table), *final_runs(table, values)]
    used, root = [path for run in runs for path in run.paths()], session.data_root
    if used and root is None:
        raise ConfigError(f"this preset reads {used[0]}; give --data-root DIR, or set SUTURE_DATA")
    if used and root is not None and not root.is_dir():
        raise ConfigError(f"the data root {root} is not a folder; correct --data-root or SUTURE_DATA")
    lacking: dict[Path, dict[str, None]] = {}
    for run in runs:
        paths = [Path(path.replace(DATA, str(root))) for path in run.paths()]
        absent = [path for path in paths if not path.exists()]
        if absent and read_result(session.store, run) is None:
            for path in absent:
                lacking.setdefault(path, {})[run.row] = None
    if lacking:
        listed = "\n".join(f"{path}: {', '.join(rows)}" for path, rows in lacking.items())
        raise ConfigError(
            f"no run was started: these rows need data that are missing from the data root {root}. Put "
            f"them there, or let the preset skip them\n{listed}"
        )


def do_runs(runs: Iterable[Run], session: Session, at_once: int) -> dict[str, Result]:
    """Do the runs that have no result yet, several at a time, each in a process of its own.

    A test whose data are absent is left out. It is added to a stored result once they are there, if the model
    of the run still lies in the work folder.

    Args:
        at_once: the number of processes, each with the threads of `this_machine`, by default one.

    Returns:
        The results of all runs, by name.

    Raises:
        ConfigError: a job has been edited since the result of a run was stored.
        DataError: the data of a test are there and cannot be read; nothing has been run.
        FederationError: some runs failed; names them. The others have been done, unless two failed alike
            before anything was trained.
    """
    wanted = {run.name: run for run in runs}
    missing = [run for run in wanted.values() if read_result(session.store, run) is None]
    tests = {name: test for run in wanted.values() for name, test in run.tests.items()}
    absent = absent_tests(tests, session.data_root)
    for name, path in absent.items():
        session.report(
            f"warning: test {name!r} is left out: there is no {path} (data root: {session.data_root})"
        )
    needed = {name for run in missing for name in run.tests}
    present = {n: t for n, t in tests.items() if n in needed and n not in absent}
    check_tests(present, session.data_root)
    session.report(f"{len(wanted)} runs, {len(wanted) - len(missing)} of them finished earlier")
    _do_all(missing, session, at_once)
    for run in wanted.values():
        _add_tests(run, session)
        _add_draws(run, session)
    found = {name: read_result(session.store, run) for name, run in wanted.items()}
    return {name: result for name, result in found.items() if result is not None}


def _do_all(runs: Sequence[Run], session: Session, at_once: int) -> None:
    failed: dict[str, list[str]] = {}  # by error: many runs may fail alike
    not_begun: list[Run] = []
    lock, hopeless = Lock(), Event()

    def attempt(run: Run) -> None:
        if hopeless.is_set():
            not_begun.append(run)
            return
        try:
            _do(run, session)
        except SutureError as error:
            session.report(f"failed: {run.name}: {str(error).splitlines()[-1]}")
            with lock:
                alike = failed.setdefault(str(error), [])
                alike.append(run.name)
                if len(alike) > 1 and not (session.work / run.name / "history.jsonl").exists():
                    hopeless.set()

    with ThreadPoolExecutor(at_once) as pool:
        futures = [pool.submit(attempt, run) for run in runs]
        try:
            for future in as_completed(futures):
                future.result()
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if failed:
        listed = "\n".join(f"{', '.join(names)}: {error}" for error, names in failed.items())
        others = f", {len(not_begun)} were not started" if not_begun else ""
        raise FederationError(
            f"{sum(map(len, failed.values()))} of {len(runs)} runs failed{others}\n{listed}"
        )


def _do(run: Run, session: Session) -> None:
    out, began = session.work / run.name, time.monotonic()
    session.report(f"begins: {run.name} ({run.row}{'' if run.x is None else f', {run.x}'})")
    if not _is_finished(out):
        session.warn(_start(run, out, session.data_root))
    untested = absent_tests(run.tests, session.data_root)
    present = {name: test for name, test in run.tests.items() if name not in untested}
    tests = test_models(present, out, session.work, session.data_root)
    drawn = resample(out, run.metrics)
    result = replace(result_of(run, out, session.data_root), tests=tests, untested=untested, resampled=drawn)
    store_result(session.store, run, result)
    _tidy(out, session)
    area = result.metrics["mean_auroc"]
    reached = "" if area is None else f", mean AUROC {area:.3f}"
    session.report(f"done: {run.name}{reached}, {time.monotonic() - began:.0f} s")


def _tidy(out: Path, session: Session) -> None:
    """Delete a run's own decoded images and states; the description of the held-out data stays."""
    try:
        own, _ = files_of_run(out)
    except ConfigError as error:  # a link, or a folder that was copied: nothing of it is deleted
        session.report(f"warning: the decoded images and states of {out} stay: {error}")
        return
    parts = {path: path.relative_to(out).parts for path in own}
    within = {path: part[2:] if part[:2] == SERVER.parts else part[1:] for path, part in parts.items()}
    delete_files(
        out, [p for p in own if parts[p][0] == "state" or (parts[p][0] == "sites" and len(within[p]) > 1)]
    )


def _add_tests(run: Run, session: Session) -> None:
    """Add to a stored result the tests whose data were absent and now are there."""
    result, out = read_result(session.store, run), session.work / run.name
    absent = absent_tests(run.tests, session.data_root)
    late = {name: run.tests[name] for name in (result.untested if result else {}) if name not in absent}
    if result is None or not late:
        return
    if not (out / "model" / "model.json").exists():
        session.report(
            f"warning: the models of {run.name} are gone, so {', '.join(late)} stays untested; to test "
            f"it, delete the run's line in {session.store.file_of(run.name)} and {out}; the run is then "
            "done again"
        )
        return
    tests = {**result.tests, **test_models(late, out, session.work, session.data_root)}
    untested = {name: path for name, path in result.untested.items() if name not in late}
    store_result(session.store, run, replace(result, tests=tests, untested=untested))
    session.report(f"tested: {run.name} on {', '.join(late)}")


def _add_draws(run: Run, session: Session) -> None:
    """Add a study's metrics to a stored result, if another table has done the run or the plan was amended."""
    result, out = read_result(session.store, run), session.work / run.name
    if result is None or all(metric in result.resampled for metric in run.metrics):
        return
    if not ((out / SCORES).exists() or (out / "model" / "model.json").exists()):
        session.report(
            f"warning: {run.name} lacks {', '.join(run.metrics)} and its models are gone, so it is omitted; "
            f"delete the run's line in {session.store.file_of(run.name)}, and it is done again"
        )
        return
    store_result(session.store, run, replace(result, resampled=resample(out, run.metrics)))


def _is_finished(out: Path) -> bool:
    path = out / "run.json"
    if not path.exists() or read_json(path).get("status") != "finished":
        return False
    return not (out / "sites" / "targets").exists() or (out / "tuned.json").exists()


def _start(run: Run, out: Path, data_root: Path | None) -> str:
    """Do the run, and return what it wrote to its standard error.

    Raises:
        FederationError: it failed; with the end of what it wrote.
    """
    resume = ["--resume"] if (out / "run.json").exists() else []
    make_folder(out.parent)
    command = [sys.executable, "-m", "suture", "run", run.job, "--env", "local", "--out", str(out)]
    process = subprocess.run(
        [*command, *resume, *run.arguments(data_root)],
        env={**os.environ, "OMP_NUM_THREADS": str(this_machine().threads)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if process.returncode:
        raise FederationError(
            process.stderr.strip().removeprefix("error: ")[-2000:] or f"exit code {process.returncode}"
        )
    return process.stderr


def compare_classes(table: Table, session: Session) -> None:
    """Compare the models of the first seed, class by class, on the images that their simulation held out.

    The comparison is stored beside the results of runs and done once. Where a model is gone, a warning is
    reported and nothing is stored.

    Raises:
        SutureError: the images cannot be read.
    """
    runs = compared_runs(table, session.store)
    if runs is None or session.store.find(name := comparison_name(runs)) is not None:
        return
    folders = [session.work / run.name for run in runs.values()]
    described = folders[0] / SERVER / "suture.toml"
    for needed in (described, *(folder / "model" / "model.json" for folder in folders)):
        if not needed.exists():
            session.report(
                f"warning: single classes are not compared: there is no {needed}; delete the run's line in "
                f"{session.store.folder} and its folder, and it is done again"
            )
            return
    storage = StorageConfig(state=session.work, cache=session.work / "tests")
    config = SiteConfig(data=load_site_config(described).data, storage=storage)
    models = {row: folder / "model" for row, folder in zip(runs, folders, strict=True)}
    if table.spec.plan:
        rows = by_delong(dict(zip(runs, folders, strict=True)))
    else:
        rows = _compare_with_first(models, config)
    session.store.put(name, {"runs": {row: run.name for row, run in runs.items()}, "rows": rows})
    session.report(f"compared, class by class: {', '.join(runs)}")


def _compare_with_first(models: Mapping[str, Path], config: SiteConfig) -> dict[str, dict[str, Any]]:
    first, *others = models
    found: dict[str, dict[str, Any]] = {}
    for row in others:
        compared = compare(models[first], models[row], config, "test", this_machine().device).classes
        found[first] = {name: _score(one.a) for name, one in compared.items()}
        found[row] = {name: _score(one.b) | {"p": _p(one)} for name, one in compared.items()}
    return found


def _score(score: ClassScore) -> dict[str, float | None]:
    return {key: _six_digits(getattr(score, key)) for key in ("auroc", "low", "high")}


def _p(one: Compared) -> float | None:
    p = one.difference.p
    return None if p != p else _six_digits(p)


def _six_digits(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
