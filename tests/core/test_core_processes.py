"""The end of a process is waited for, whoever its parent is."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from suture.core.processes import python_child, wait_for_end, without_interrupts


@pytest.mark.complete
def test_a_process_that_nobody_has_asked_for_its_exit_code_has_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    try:
        process, began = psutil.Process(child.pid), time.monotonic()
        wait_for_end([process], 0.2)
        assert time.monotonic() - began >= 0.2
        assert process.status() != psutil.STATUS_ZOMBIE
        child.kill()
        wait_for_end([process], math.inf)
        assert process.status() == psutil.STATUS_ZOMBIE
    finally:
        child.kill()
        child.wait()
    wait_for_end([process])


@pytest.mark.parametrize("other", [False, True], ids=["this thread", "a library's thread"])
def test_ctrl_c_waits_until_what_is_started_is_known(other: bool) -> None:
    """A thread that does not block the signal, as one of a library, receives it."""
    known, release = [], threading.Event()

    def start() -> None:
        with without_interrupts():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
            known.append("started")
        time.sleep(0.2)
        known.append("went on")

    if other:
        threading.Thread(target=release.wait).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            start()
    finally:
        release.set()
    assert known == ["started"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.complete
@pytest.mark.skipif(sys.platform != "linux", reason="Darwin does not hold to limits of memory")
@pytest.mark.parametrize(
    ("limit", "work", "said"),
    [
        ("limit_memory(2**26)", "bytearray(2**27)", "MemoryError"),
        ("limit_memory(2**28)", "bytearray(2**27)", ""),
        ("limit_seconds(0)", "while True: pass", "killed"),
    ],
)
def test_a_process_limits_itself(limit: str, work: str, said: str) -> None:
    code = f"from suture.core.processes import limit_memory, limit_seconds\n{limit}\n{work}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == {"": 0, "MemoryError": 1, "killed": -signal.SIGXCPU}[said]
    assert said in (done.stderr or "killed")


@pytest.mark.complete
def test_a_child_ends_with_its_block() -> None:
    with python_child(
        "timeit", "-n", "1", "-s", "import time", "time.sleep(60)", stdin=subprocess.DEVNULL
    ) as child:
        assert child.poll() is None
    assert child.returncode == -signal.SIGKILL
