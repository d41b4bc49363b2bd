"""Doing runs: several at a time, each in a process of its own; what is done is not done again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Lock

from suture.core.errors import FederationError, SutureError
from suture.experiments.runs import Result, Run, keep_result, read_result
from suture.experiments.testing import absent_tests, check_tests, test_models
from suture.simulation.machine import this_machine

SERVER = Path("sites") / "server"
"""Of a finished run: the description of the labelled data that a simulation holds out at the server."""


@dataclass(frozen=True)
class Place:
    """Where runs are done and kept.

    Attributes:
        results: folder of the kept results, one small file for each run.
        work: folder of the runs themselves; one that was cut off is continued.
        data_root: stands for ``{data}``.
        absent: tests whose data are not there, with the path that was looked for.
        say: told of each run that begins and ends.
        warned: what runs have warned of; the same of many runs is told once.
    """

    results: Path
    work: Path
    data_root: Path | None
    absent: Mapping[str, str]
    say: Callable[[str], None]
    warned: set[str] = field(default_factory=set)

    def warn(self, text: str) -> None:
        """Passes on what a finished run wrote to its standard error."""
        for line in text.splitlines():
            if line.strip() and line not in self.warned:
                self.warned.add(line)
                self.say(f"warning: {line}")


def do_runs(
    runs: Iterable[Run],
    results: Path,
    work: Path,
    data_root: Path | None,
    at_once: int,
    say: Callable[[str], None],
) -> dict[str, Result]:
    """Does the runs that have no result yet, and returns the results of all, by name.

    A test whose data are not there is left out. It is added to a kept result once they are, if the model of
    the run still lies in `work`.

    Args:
        results, work, data_root, say: as in `Place`.
        at_once: processes, each with the threads of `this_machine`, by default one.

    Raises:
        ConfigError: a job has been edited since a run of it was kept.
        DataError: the data of a test are there and cannot be read; nothing has been run.
        FederationError: naming the runs that failed. The others have been done, unless two failed alike
            before anything was trained.
    """
    wanted = {run.name: run for run in runs}
    missing = [run for run in wanted.values() if read_result(results, run) is None]
    tests = {name: test for run in wanted.values() for name, test in run.tests.items()}
    place = Place(results, work, data_root, absent_tests(tests, data_root), say)
    for name, path in place.absent.items():
        say(f"warning: test {name!r} is left out: there is no {path} (data root: {data_root})")
    needed = {name for run in missing for name in run.tests}
    check_tests({n: t for n, t in tests.items() if n in needed and n not in place.absent}, data_root)
    say(f"{len(wanted)} runs, {len(wanted) - len(missing)} of them done before")
    _do_all(missing, place, at_once)
    for run in wanted.values():
        _add_tests(run, place)
    found = {name: read_result(results, run) for name, run in wanted.items()}
    return {name: result for name, result in found.items() if result is not None}


def _do_all(runs: Sequence[Run], place: Place, at_once: int) -> None:
    failed: dict[str, list[str]] = {}  # the same error of many runs is told once
    left: list[Run] = []
    lock, hopeless = Lock(), Event()

    def attempt(run: Run) -> None:
        if hopeless.is_set():
            left.append(run)
            return
        try:
            _do(run, place)
        except SutureError as error:
            place.say(f"failed: {run.name}: {str(error).splitlines()[-1]}")
            with lock:
                alike = failed.setdefault(str(error), [])
                alike.append(run.name)
                if len(alike) > 1 and not (place.work / run.name / "history.jsonl").exists():
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
        told = "\n".join(f"{', '.join(names)}: {error}" for error, names in failed.items())
        others = f", {len(left)} were not begun" if left else ""
        raise FederationError(f"{sum(map(len, failed.values()))} of {len(runs)} runs failed{others}\n{told}")


def _do(run: Run, place: Place) -> None:
    out, began = place.work / run.name, time.monotonic()
    place.say(f"begins: {run.name} ({run.row}{'' if run.x is None else f', {run.x}'})")
    if not _finished(out):
        place.warn(_start(run, out, place.data_root))
    there = {name: test for name, test in run.tests.items() if name not in place.absent}
    tests = test_models(there, out, place.work, place.data_root)
    untested = {name: place.absent[name] for name in run.tests if name in place.absent}
    result = keep_result(place.results, run, out, place.data_root, tests, untested)
    _tidy(out)
    area = result.metrics["mean_auroc"]
    reached = "" if area is None else f", mean AUROC {area:.3f}"
    place.say(f"done: {run.name}{reached}, {time.monotonic() - began:.0f} s")


def _tidy(out: Path) -> None:
    """Deletes decoded images and states; the rest is small. What the server held out stays described."""
    shutil.rmtree(out / "state", ignore_errors=True)
    for place in (*(out / "sites").glob("*"), *(out / SERVER).glob("*")):
        if place.is_dir() and place != out / SERVER:
            shutil.rmtree(place, ignore_errors=True)


def _add_tests(run: Run, place: Place) -> None:
    """Adds to a kept result the tests whose data have come since."""
    result, out = read_result(place.results, run), place.work / run.name
    late = {name: run.tests[name] for name in (result.untested if result else {}) if name not in place.absent}
    if result is None or not late:
        return
    if not (out / "model" / "model.json").exists():
        place.say(
            f"warning: the models of {run.name} are gone, so {', '.join(late)} stays untested; to have it, "
            f"delete {place.results / run.name}.json and {out}, and the run is done again"
        )
        return
    tests = {**result.tests, **test_models(late, out, place.work, place.data_root)}
    untested = {name: path for name, path in result.untested.items() if name not in late}
    keep_result(place.results, run, out, place.data_root, tests, untested)
    place.say(f"tested: {run.name} on {', '.join(late)}")


def _finished(out: Path) -> bool:
    path = out / "run.json"
    if not path.exists() or json.loads(path.read_text()).get("status") != "finished":
        return False
    return not (out / "sites" / "targets").exists() or (out / "tuned.json").exists()


def _start(run: Run, out: Path, data_root: Path | None) -> str:
    """Does the run, and returns what it wrote to its standard error.

    Raises:
        FederationError: it failed; says what it wrote.
    """
    if (out / "run.json").exists():
        how = ["--resume"]
    else:
        shutil.rmtree(out, ignore_errors=True)
        how = []
    out.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "suture", "run", run.job, "--env", "local", "--out", str(out)]
    process = subprocess.run(
        [*command, *how, *run.arguments(data_root)],
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
