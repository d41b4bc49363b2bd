"""Ctrl-C while a run is prepared: no process, no folder and no temporary file is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from suture.execution.run import PREPARING

pytestmark = pytest.mark.complete


RUN = ("run", "demo", "--rounds", "1", "--set", "images=1500")

# Python runs a module of this name at the start of every process: FLARE's simulator is then still importing.
IMPORTING = """
import signal, sys
if "suture.flare.simulate" in sys.orig_argv:
    signal.pause()
"""


def below(pid: int) -> list[psutil.Process]:
    """The processes below another one, but for what cleans up after multiprocessing and ends by itself."""
    found = []
    for one in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            found += [] if "resource_tracker" in " ".join(one.cmdline()) else [one]
    return found


def runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("words", [("--env", "sim"), ("--env", "local", "--workers", "2")], ids=" ".join)
@pytest.mark.parametrize("sites", [0, 1], ids=["while it imports", "while images are drawn"])
def test_ctrl_c_before_the_first_round_leaves_nothing(
    words: Sequence[str], sites: int, tmp_path: Path
) -> None:
    out, temporary, start = (tmp_path / name for name in ("r", "tmp", "start"))
    temporary.mkdir()
    start.mkdir()
    (start / "sitecustomize.py").write_text(IMPORTING)
    command = [sys.executable, "-m", "suture", *RUN, *words, "--out", str(out)]
    path = os.pathsep.join([str(start), os.getenv("PYTHONPATH", "")])
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": path}
    process = subprocess.Popen(
        command,
        env=environment,
        start_new_session=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    started: list[psutil.Process] = []
    while not (started and (out / PREPARING).exists() and len(list(out.glob("sites/[a-z]*"))) >= sites):
        assert process.poll() is None
        time.sleep(0.02)
        started = below(process.pid)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    said, _ = process.communicate()
    assert process.returncode == 130
    assert "no files are left" in said
    assert not [one.cmdline() for one in started if runs(one)]
    assert not out.exists()
    assert not list(temporary.iterdir())
