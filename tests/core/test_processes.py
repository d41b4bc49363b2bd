"""The end of a process is waited for, whoever its parent is."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil

from suture.core.processes import wait_for_end


def test_a_process_that_nobody_has_asked_for_its_exit_code_has_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        process, began = psutil.Process(child.pid), time.monotonic()
        wait_for_end([process], 0.2)
        assert 0.2 <= time.monotonic() - began < 5
        child.kill()
        wait_for_end([process], 30)
        assert process.status() == psutil.STATUS_ZOMBIE
        assert time.monotonic() - began < 20
    finally:
        child.kill()
        child.wait()
    wait_for_end([process])
