"""What every benchmark has: options, the line of the machine, tables, times, processes, and runs of jobs."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, get_args, get_origin

import psutil

if TYPE_CHECKING:
    from suture.execution.job import Job

ROOT = Path(__file__).resolve().parents[1]

_Result = TypeVar("_Result")
_Given = ParamSpec("_Given")


def command(main: Callable[..., object], **quick: object) -> None:
    """Call a function with the command line: its parameters are options, those without a default come first.

    Args:
        quick: the defaults with `--quick`: the smallest settings, to try the command.
    """
    page = sys.modules[main.__module__].__doc__
    parser = argparse.ArgumentParser(
        description=page, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--quick", action="store_true", help="the smallest settings, to try it")
    parameters = inspect.signature(main, eval_str=True).parameters
    for name, parameter in parameters.items():
        if name != "quick":
            first = parameter.default is parameter.empty
            flag = name if first else f"--{name.replace('_', '-')}"
            default = None if first else parameter.default
            parser.add_argument(flag, default=default, **_reads(parameter.annotation))
    if "--quick" in sys.argv:
        parser.set_defaults(**quick)
    given = vars(parser.parse_args())
    main(**{name: value for name, value in given.items() if name in parameters})


def _reads(annotation: Any) -> dict[str, Any]:
    """How `argparse` reads a parameter of a type: a flag, a choice, some values, or one."""
    if annotation is bool:
        return {"action": "store_true"}
    if get_origin(annotation) is tuple:
        return {"nargs": "*", **_reads(get_args(annotation)[0])}
    if get_origin(annotation) is Literal:
        return {"choices": get_args(annotation)}
    return {"type": next((kind for kind in get_args(annotation) if kind is not NoneType), annotation)}


# What a figure may depend on, and tables


def commit() -> str:
    """The commit of this checkout, and whether it was changed since."""
    git = ("git", "-C", str(ROOT))
    try:
        name = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True
        )
        changes = subprocess.run([*git, "status", "--porcelain"], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return "no commit"
    return f"commit {name.stdout.strip()}{', changed' if changes.stdout else ''}"


def machine() -> str:
    """Processor, cores, torch threads, load, versions and commit; every process measured has one thread."""
    from suture.core.processes import usable_cores
    from suture.core.runtime import versions

    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    cpu = names[0] if names else platform.machine()
    used = versions()
    return (
        f"{cpu}, {usable_cores()} cores, load {os.getloadavg()[0]:.1f}, {platform.system()}; "
        f"one torch thread a process; python {used['python']}, torch {used['torch build']}, "
        f"nvflare {used['nvflare']}, suture {used['suture']}, {commit()}"
    )


def line(cells: Iterable[object]) -> str:
    """A row of a table of Markdown."""
    return f"| {' | '.join(str(cell).replace('|', ' ') for cell in cells)} |"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """The lines of a table of Markdown."""
    yield line(head)
    yield "|---" * len(head) + "|"
    yield from map(line, rows)


def show(head: Sequence[str], rows: Iterable[Sequence[object]], *notes: str) -> None:
    """Print the machine and a table, each row as soon as it is measured."""
    print(machine(), *notes, sep="\n\n", end="\n\n")
    for text in table(head, rows):
        print(text, flush=True)


def interval(values: Sequence[float], digits: int = 3) -> str:
    """Mean and 95 % interval of paired differences, by Student's t; the mean alone of one."""
    from scipy.stats import t as student

    mean, n = statistics.mean(values), len(values)
    if n < 2:
        return f"{mean:+.{digits}f}"
    half = float(student.ppf(0.975, n - 1)) * statistics.stdev(values) / n**0.5
    return f"{mean:+.{digits}f} ({mean - half:+.{digits}f} to {mean + half:+.{digits}f})"


def ranged(values: Sequence[float]) -> str:
    """Mean and range."""
    return f"{statistics.mean(values):.3f} ({min(values):.3f}-{max(values):.3f})"


# Times and processes


@dataclass(frozen=True)
class Times:
    """Seconds of each repeat, by the clock and of the processor, of all threads of the process."""

    clock: tuple[float, ...]
    cpu: tuple[float, ...]

    def times(self, factor: float) -> Times:
        """In another unit, or divided by the number of things that a repeat does."""
        return Times(tuple(s * factor for s in self.clock), tuple(s * factor for s in self.cpu))

    def per(self, count: float) -> Times:
        """How many a second where a repeat does `count` of them."""
        return Times(tuple(count / s for s in self.clock), tuple(count / s for s in self.cpu))


def in_turns(repeats: int, works: Mapping[str, Callable[[], Callable[[], object]]]) -> dict[str, Times]:
    """Time pieces of work in turns, so that what else the machine does weighs on all of them.

    Args:
        works: each prepares what is then timed. Every second time they are taken in the opposite order; the
            first time warms up and is left out.
    """
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for repeat in range(repeats + 1):
        for name in list(works)[:: 1 if repeat % 2 else -1]:
            work = works[name]()
            clock, cpu = time.perf_counter(), time.process_time()
            work()
            if repeat:
                found[name].append((time.perf_counter() - clock, time.process_time() - cpu))
    return {name: Times(*zip(*pairs, strict=True)) for name, pairs in found.items()}


def apart(work: Callable[_Given, _Result], *given: _Given.args, **named: _Given.kwargs) -> _Result:
    """Call a function of a module in a process of its own, which has done nothing before."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, *given, **named).result()


def program(*command: str, cwd: Path | None = None, **env: str) -> str:
    """Run a program with these variables of the environment; return what it prints, on either stream.

    Raises:
        RuntimeError: it fails; with its output.
    """
    done = subprocess.run(command, cwd=cwd, env=os.environ | env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def suture(*words: str, cwd: Path | None = None, **env: str) -> str:
    """Run a command of this package; as `program`."""
    return program(sys.executable, "-m", "suture", *words, cwd=cwd, **env)


@contextmanager
def every(seconds: float, look: Callable[[], None]) -> Iterator[None]:
    """Look again and again, in a thread, until the block ends; what looking raises is raised then."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(seconds):
            look()

    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(watch)
        try:
            yield
        finally:
            over.set()
        looking.result()


def tree(pid: int) -> list[psutil.Process]:
    """A process and all below it; none where it has ended."""
    with suppress(psutil.Error):
        top = psutil.Process(pid)
        return [top, *top.children(recursive=True)]
    return []


def tree_memory(pid: int) -> float:
    """Proportional set sizes of a process and all below it in MB: what they share counts once."""
    total = 0.0
    for process in tree(pid):
        with suppress(psutil.Error):
            total += process.memory_full_info().pss / 1e6
    return total


def tree_cpu(pid: int) -> dict[int, float]:
    """CPU seconds of a process and of each below it, without their children, by number; no zombie's."""
    found = {}
    for process in tree(pid):
        with suppress(psutil.Error):
            if seconds := sum(process.cpu_times()[:2]):
                found[process.pid] = float(seconds)
    return found


# Runs of jobs


@contextmanager
def ran(job: Job) -> Iterator[Path]:
    """Run a job as a plain loop; its folder is there within the block."""
    from suture.execution.run import run_job

    with tempfile.TemporaryDirectory() as folder:
        yield run_job(job, out=Path(folder) / "run")


def outcome(out: Path) -> dict[str, float]:
    """Of a run: the selected round and its AUROC, bytes of the last round and of all updates, seconds."""
    from suture.core.files import read_json, read_records

    metrics, lines = read_json(out / "metrics.json"), read_records(out / "history.jsonl")
    selected = metrics["selected_round"]
    return {
        "round": selected,
        "auroc": metrics["mean_auroc"],
        "validation": lines[selected - 1]["validation"]["auroc"],
        "bytes": lines[-1]["bytes_down"] + lines[-1]["bytes_up"],
        "bytes_up": sum(one["bytes_up"] for one in lines),
        "seconds": sum(one["seconds"] for one in lines),
    }


def recorded(records: Path, conditions: Mapping[str, Any], measure: Callable[[], Any]) -> Any:
    """What a file of records has of these conditions; measured and added where it has nothing."""
    for text in records.read_text().splitlines() if records.exists() else ():
        known = json.loads(text)
        if known["conditions"] == conditions:
            return known["measured"]
    result = measure()
    with records.open("a") as file:
        print(json.dumps({"conditions": conditions, "measured": result, "code": commit()}), file=file)
    return result
