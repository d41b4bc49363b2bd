"""Doing runs: several at a time, each in a process of its own; what is done is not done again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from suture.errors import FederationError, SutureError
from suture.experiment.runs import Result, Run, keep_result, read_result
from suture.experiment.testing import test_models


def do_runs(
    runs: Iterable[Run],
    results: Path,
    work: Path,
    data_root: Path | None,
    at_once: int,
    say: Callable[[str], None],
) -> dict[str, Result]:
    """Does the runs that have no result yet, and returns the results of all, by name.

    Args:
        results: folder of the kept results, one small file for each run.
        work: folder of the runs themselves; one that was cut off is continued.
        at_once: processes, each with one torch thread.
        say: told of each run that begins and ends.

    Raises:
        FederationError: naming the runs that failed; the others have been done.
    """
    wanted = {run.name: run for run in runs}
    missing = [run for name, run in wanted.items() if read_result(results, run) is None]
    say(f"{len(wanted)} runs, {len(wanted) - len(missing)} of them done before")
    failed: dict[str, list[str]] = {}  # the same error of many runs is told once
    with ThreadPoolExecutor(at_once) as pool:
        futures = {pool.submit(_do, run, results, work, data_root, say): run for run in missing}
        try:
            for future in as_completed(futures):
                try:
                    future.result()
                except SutureError as error:
                    failed.setdefault(str(error), []).append(futures[future].name)
                    say(f"failed: {futures[future].name}: {str(error).splitlines()[-1]}")
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if failed:
        told = "\n".join(f"{', '.join(names)}: {error}" for error, names in failed.items())
        raise FederationError(f"{sum(map(len, failed.values()))} of {len(missing)} runs failed\n{told}")
    found = {name: read_result(results, run) for name, run in wanted.items()}
    return {name: result for name, result in found.items() if result is not None}


def _do(run: Run, results: Path, work: Path, data_root: Path | None, say: Callable[[str], None]) -> None:
    out, began = work / run.name, time.monotonic()
    say(f"begins: {run.name} ({run.row}{'' if run.x is None else f', {run.x}'})")
    if not _finished(out):
        _start(run, out, data_root)
    result = keep_result(results, run, out, test_models(run, out, work, data_root))
    shutil.rmtree(out / "sites", ignore_errors=True)  # decoded images and states; the rest is small
    shutil.rmtree(out / "state", ignore_errors=True)
    area = result.metrics["mean_auroc"]
    reached = "" if area is None else f", mean AUROC {area:.3f}"
    say(f"done: {run.name}{reached}, {time.monotonic() - began:.0f} s")


def _finished(out: Path) -> bool:
    path = out / "run.json"
    if not path.exists() or json.loads(path.read_text()).get("status") != "finished":
        return False
    return not (out / "sites" / "targets").exists() or (out / "tuned.json").exists()


def _start(run: Run, out: Path, data_root: Path | None) -> None:
    if (out / "run.json").exists():
        how = ["--resume"]
    else:
        shutil.rmtree(out, ignore_errors=True)
        how = []
    out.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "suture.cli", "run", run.job, "--env", "local", "--out", str(out)]
    process = subprocess.run(
        [*command, *how, *run.arguments(data_root)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if process.returncode:
        raise FederationError(
            process.stderr.strip().removeprefix("error: ")[-2000:] or f"exit code {process.returncode}"
        )
