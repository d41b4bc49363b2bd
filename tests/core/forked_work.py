"""What forked processes do in tests of their server: it must be importable in another process."""

from __future__ import annotations

import os
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from suture.core.processes import ForkServer


def answer(line: Connection) -> None:
    """Say what this process is, then obey."""
    line.send((os.getpid(), os.getppid(), os.environ.get("SUTURE_TRIAL")))
    word = line.recv()
    if word == "fail":
        raise ZeroDivisionError("by its own code")
    if word == "die":
        os.kill(os.getpid(), signal.SIGKILL)


def main(path: Path) -> None:
    """Start two processes, write their numbers and that of their server, and wait to be killed."""
    server = ForkServer(answer, 2)
    found = [line.recv() for line in server.lines]
    path.with_suffix(".tmp").write_text(" ".join(str(pid) for pid in (found[0][1], *(f[0] for f in found))))
    path.with_suffix(".tmp").replace(path)
    signal.pause()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
