"""The allocator: memory that was freed is used again, where the C library can be told so."""

from __future__ import annotations

import ctypes
import importlib
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from suture.core.processes import keep_memory, keeping_memory
from suture.execution import simulator
from suture.flare.kit import Kit
from suture_admin import processes

# Takes and frees 64 MB twenty times, written to, and counts the pages that the kernel had to give.
FAULTS = """
import resource, threading
from suture.core.processes import keep_memory
{first}
def use():
    for _ in range(20):
        bytearray(64_000_000)
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
{then}
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
IN_A_THREAD = "thread = threading.Thread(target=use); thread.start(); thread.join()"
PAGES = 64_000_000 // 4096
glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")


def faults(first: str = "", then: str = "use()", environment: dict[str, str] | None = None) -> int:
    program = FAULTS.format(first=first, then=then)
    plain = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=plain | (environment or {}), capture_output=True, check=True
    )
    return int(done.stdout)


@pytest.mark.complete
@glibc
def test_a_process_uses_its_freed_memory_again() -> None:
    assert faults() > 10 * PAGES  # else the test below shows nothing
    assert faults(first="assert keep_memory()") < PAGES


@pytest.mark.complete
@glibc
def test_so_does_each_thread_of_a_process_that_is_started_so() -> None:
    assert faults(then=IN_A_THREAD) > 10 * PAGES
    assert faults(then=IN_A_THREAD, environment=keeping_memory({})) < 2 * PAGES


@pytest.mark.complete
@glibc
def test_what_the_user_has_set_stays() -> None:
    environment = keeping_memory({"MALLOC_ARENA_MAX": "4", "PATH": "/bin"})
    assert environment["MALLOC_ARENA_MAX"] == "4"
    assert environment["PATH"] == "/bin"
    assert environment["MALLOC_TRIM_THRESHOLD_"] == str(2**30)
    given = {"MALLOC_MMAP_THRESHOLD_": "131072"}
    assert faults(first="assert not keep_memory()", environment=given) > 10 * PAGES


@pytest.mark.parametrize("library", [object(), None], ids=["no glibc", "no C library"])
def test_another_system_is_left_as_it_is(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(_: None) -> Any:
        if library is None:
            raise OSError("no library")
        return library

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert not keep_memory()


def test_the_command_line_and_the_processes_that_it_starts_keep_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[dict[str, str]] = []

    def start(*_: object, env: dict[str, str], **__: object) -> None:
        seen.append(env)
        raise InterruptedError

    monkeypatch.setattr(subprocess, "Popen", start)
    (tmp_path / "job.json").write_text('{"sites": []}')
    with pytest.raises(InterruptedError):
        simulator.simulate(tmp_path, 1)
    with pytest.raises(InterruptedError):
        processes.start(tmp_path, [Kit(tmp_path, "site", "alpha", "p", "host", 1, "server")])
    assert [env["MALLOC_ARENA_MAX"] for env in seen] == ["1", "1"]

    called: list[bool] = []
    app = importlib.import_module("suture.cli.app")  # not the Typer that its package shows under this name
    monkeypatch.setattr(app, "keep_memory", lambda: called.append(True))
    monkeypatch.setattr("sys.argv", ["suture", "--version"])
    with pytest.raises(SystemExit):
        app.main()
    assert called
