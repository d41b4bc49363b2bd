"""The runs of a table: tune on validation data, do the missing runs, and measure their models."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event, Lock

from suture.core.errors import ConfigError, FederationError, SutureError
from suture.core.files import make_folder, read_json
from suture.execution.job_files import job_file, refuse_code
from suture.execution.run import delete_files, files_of_run
from suture.execution.sites import this_machine
from suture_papers.tables.external_tests import check_tests, test_models
from suture_papers.tables.outcome import choose
from suture_papers.tables.results import Result, ResultStore, read_result, result_of, store_result
from suture_papers.tables.runs import Run, final_runs, tuning_runs
from suture_papers.tables.spec import DATA, Table


@dataclass(frozen=True)
class Session:
    """Where a table is conducted.

    Attributes:
        store: of the results.
        work: folder of the runs; a run that was interrupted there is resumed.
        data_root: the folder of the data sets, for which ``{data}`` stands.
        report: receives a line for each run that begins or ends, and for each warning.
        warned: the warnings of runs so far; a warning of several runs is reported once.
    """

    store: ResultStore
    work: Path
    data_root: Path | None
    report: Callable[[str], None]
    warned: set[str] = field(default_factory=set)

    def warn(self, text: str) -> None:
        """Report what a finished run wrote to its standard error."""
        for line in text.splitlines():
            if line.strip() and line not in self.warned:
                self.warned.add(line)
                self.report(f"warning: {line}")


def conduct(table: Table, session: Session, at_once: int) -> None:
    """Do the runs of a table that have no result yet.

    Args:
        at_once: as in `do_runs`.

    Raises:
        ConfigError: its job is code that is no part of this package; or the data root, or a folder or file
            of the runs under it, does not exist.
        ConfigError: a run that tunes a setting has no validation figure to tune it by.
        FederationError: a run failed.
    """
    refuse_code(job_file(table.spec.job, trust=True))  # here nobody has named the file on a command line
    _check_data(table, session)
    if table.preset.tune:
        tried = do_runs(tuning_runs(table), session, at_once)
        for run in tuning_runs(table):
            if tried[run.name].validation is None:
                raise ConfigError(
                    f"row {run.row!r}: its run {run.name} has no validation figure to tune "
                    f"{table.preset.tune.key} by. Give the validation data positives and negatives of a "
                    "class that the row trains, or let the preset skip the row"
                )
    do_runs(final_runs(table, choose(table, session.store)), session, at_once)


def _check_data(table: Table, session: Session) -> None:
    """Look for every path under the data root that the missing runs read, before the first of them.

    Raises:
        ConfigError: the data root is not given, or something under it does not exist; names it, with the rows
            that read it.
    """
    first = table.preset.tune.values[0] if table.preset.tune else None
    values = {(row, str(x)): first for row, x in table.cells} | choose(table, session.store)
    runs = [*tuning_runs(table), *final_runs(table, values)]
    used, root = [path for run in runs for path in run.paths()], session.data_root
    if used and (root is None or not root.is_dir()):
        raise ConfigError(
            f"this preset reads {used[0]}, and the data root is {root or 'not given'}; give the folder of "
            "the data sets with --data-root DIR, or set SUTURE_DATA"
        )
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

    Args:
        at_once: the number of processes, each with the threads of `this_machine`, by default one.

    Returns:
        The results of all runs, by name.

    Raises:
        ConfigError: a job has been edited since the result of a run was stored.
        DataError: the data of a test are absent or cannot be read; nothing has been run.
        FederationError: some runs failed; names them. The others have been done, unless two failed alike
            before anything was trained.
    """
    wanted = {run.name: run for run in runs}
    missing = [run for run in wanted.values() if read_result(session.store, run) is None]
    check_tests({name: test for run in missing for name, test in run.tests.items()}, session.data_root)
    session.report(f"{len(wanted)} runs, {len(wanted) - len(missing)} of them finished earlier")
    _do_all(missing, session, at_once)
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
    tests = test_models(run.tests, out, session.work, session.data_root)
    result = replace(result_of(run, out, session.data_root), tests=tests)
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
    names = {path: path.relative_to(out).as_posix() for path in own}
    delete_files(out, [path for path, name in names.items() if re.match(_TEMPORARY, name)])


_TEMPORARY = r"state/|sites/(?!server/[^/]+$)[^/]+/"


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
