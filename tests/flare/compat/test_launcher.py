"""A site's launcher: a killed job process is started again, any other end is FLARE's business."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from nvflare.apis.job_launcher_spec import JobReturnCode
from nvflare.app_common.job_launcher.client_process_launcher import ClientProcessJobLauncher
from nvflare.app_common.job_launcher.process_launcher import ProcessHandle

from suture.flare.compat.launcher import TolerantHandle, TolerantLauncher


class Machine:
    """Starts processes that each do what the next script says, and counts them."""

    def __init__(self, *scripts: str) -> None:
        self.scripts = list(scripts)
        self.started: list[subprocess.Popen[bytes]] = []

    def launch(self) -> ProcessHandle:
        script = self.scripts[len(self.started)]
        process = subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
        self.started.append(process)
        return ProcessHandle(process=process)


DIE = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
WELL = "pass"
WRONG = "raise SystemExit(1)"
LONG = "import time; time.sleep(60)"


@pytest.mark.complete
@pytest.mark.parametrize(
    ("scripts", "restarts", "starts", "code"),
    [
        ((WELL,), 3, 1, JobReturnCode.SUCCESS),
        ((WRONG,), 3, 1, JobReturnCode.EXECUTION_ERROR),
        ((DIE, WELL), 3, 2, JobReturnCode.SUCCESS),
        ((DIE, WRONG), 3, 2, JobReturnCode.EXECUTION_ERROR),
        ((DIE, DIE, DIE), 2, 3, JobReturnCode.UNKNOWN),
        ((DIE,), 0, 1, JobReturnCode.UNKNOWN),
    ],
)
def test_only_a_killed_process_is_started_again(
    scripts: tuple[str, ...], restarts: int, starts: int, code: Any
) -> None:
    machine = Machine(*scripts)
    handle = TolerantHandle(machine.launch, restarts)
    handle.wait()
    assert len(machine.started) == starts
    assert handle.poll() == code


@pytest.mark.complete
def test_a_running_process_has_no_code_and_an_aborted_one_stays_dead() -> None:
    machine = Machine(LONG)
    handle = TolerantHandle(machine.launch, 3)
    assert handle.poll() == JobReturnCode.UNKNOWN
    waiting = threading.Thread(target=handle.wait)
    waiting.start()
    handle.terminate()
    waiting.join()
    assert len(machine.started) == 1
    assert handle.poll() == JobReturnCode.UNKNOWN


@pytest.mark.complete
def test_the_process_that_took_the_place_is_the_one_that_is_ended() -> None:
    machine = Machine(LONG, LONG)
    handle = TolerantHandle(machine.launch, 3)
    waiting = threading.Thread(target=handle.wait)
    waiting.start()
    os.kill(machine.started[0].pid, signal.SIGKILL)
    while len(machine.started) < 2:
        time.sleep(0.01)
    handle.terminate()
    waiting.join()
    assert machine.started[1].poll() == -signal.SIGKILL


@pytest.mark.complete
def test_the_launcher_starts_what_flares_own_would(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, asked = Machine(DIE, WELL), []

    def launch_job(self: object, job_meta: object, fl_ctx: object) -> ProcessHandle:
        asked.append((job_meta, fl_ctx))
        return machine.launch()

    monkeypatch.setattr(ClientProcessJobLauncher, "launch_job", launch_job)
    context: Any = object()
    handle = TolerantLauncher().launch_job({"job_id": "j"}, context)
    handle.wait()
    assert asked == [({"job_id": "j"}, context)] * 2


@pytest.mark.complete
@pytest.mark.parametrize(("set_before", "found"), [(None, "45"), ("900", "900")])
def test_a_lost_piece_is_asked_for_again_when_the_launcher_or_the_environment_says(
    set_before: str | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = "NVFLARE_TENSOR_STREAMING_PER_REQUEST_TIMEOUT"
    monkeypatch.setattr(os, "environ", {variable: set_before} if set_before else {})
    machine = Machine(WELL)
    monkeypatch.setattr(ClientProcessJobLauncher, "launch_job", lambda *_: machine.launch())
    context: Any = object()
    TolerantLauncher(overdue=45).launch_job({"job_id": "j"}, context).wait()
    assert os.environ[variable] == found


def test_arguments_survive_flares_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    machine: Callable[..., Any] = TolerantLauncher
    assert machine(restarts=5).restarts == 5
