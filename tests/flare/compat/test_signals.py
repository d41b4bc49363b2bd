"""What wakes a site, what tells the server that it lives, and what becomes of processes that were killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.wf_comm_server import WFCommServer
from nvflare.apis.job_def import RunStatus
from nvflare.apis.job_launcher_spec import JobReturnCode
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.app_common.job_launcher.client_process_launcher import ClientProcessJobLauncher
from nvflare.app_common.job_launcher.process_launcher import ProcessHandle
from nvflare.private.fed.server.job_runner import JobRunner
from nvflare.private.fed.server.server_runner import ServerRunner

from flare_job import context
from suture.flare import PLAN
from suture.flare.compat import bell
from suture.flare.compat.bell import TOPIC, TaskNotifier, ring
from suture.flare.compat.heartbeats import on_heartbeat
from suture.flare.compat.launcher import TolerantHandle, TolerantLauncher
from suture.flare.compat.stale_jobs import StaleJobs
from suture.flare.executor import SiteExecutor

# The bell


class Hung:
    """A site's bell as FLARE drives it, and the part of FLARE's engines that it uses."""

    def __init__(self) -> None:
        self.handlers: dict[str, Any] = {}
        self.sent: list[tuple[Any, ...]] = []
        self.abort, self.bell = Signal(), TaskNotifier()

    def register_aux_message_handler(self, topic: str, message_handle_func: Any) -> None:
        self.handlers[topic] = message_handle_func

    def fire_and_forget_aux_request(
        self, targets: list[str], topic: str, request: Shareable, _: FLContext, optional: bool
    ) -> None:
        self.sent.append((targets, topic, request, optional))

    def context(self) -> FLContext:
        fl_ctx = FLContext()
        fl_ctx.get_engine = lambda: self
        return fl_ctx

    def event(self, *names: str) -> None:
        """Fire events of FLARE's."""
        for name in names:
            self.bell.handle_event(name, self.context())

    def poll(self) -> bool:
        """Poll as the site does; return whether the bell had rung."""
        return self.bell.wait(self.abort)

    def ring(self, message: Any = None) -> Shareable:
        return self.handlers[TOPIC](TOPIC, message, FLContext())


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> Hung:
    """A bell that has been polled once, and waits for 20 ms; the first poll waits for nothing."""
    monkeypatch.setattr(bell, "CAP", 0.02)
    made = Hung()
    made.event(EventType.START_RUN)
    assert made.poll()
    return made


def test_a_bell_is_kept_for_one_poll_and_that_of_the_task_in_hand_for_none(hung: Hung) -> None:
    assert not hung.poll()
    hung.ring()
    assert hung.poll()
    assert not hung.poll(), "one bell, one poll"
    hung.ring()
    hung.event(EventType.BEFORE_TASK_EXECUTION)
    assert not hung.poll()
    hung.event(EventType.BEFORE_TASK_EXECUTION)
    hung.ring()  # the next exchange, right after the answer
    hung.event(EventType.AFTER_SEND_TASK_RESULT)
    assert hung.poll()


@pytest.mark.parametrize("rings", [True, False])
def test_a_site_that_waits_wakes_at_a_bell_and_at_an_abort(
    rings: bool, hung: Hung, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bell, "CAP", 3600)
    threading.Timer(0.05, hung.ring if rings else lambda: hung.abort.trigger(True)).start()
    assert hung.poll() == rings


@pytest.mark.parametrize("message", [None, "text", Shareable({"a": [0] * 9}), {"topic": 1}])
def test_whatever_a_bell_holds_it_causes_one_poll_and_answers_nothing(hung: Hung, message: Any) -> None:
    for _ in range(1000):
        reply = hung.ring(message)
    assert reply.get_return_code() == ReturnCode.OK
    assert set(reply) == set(Shareable()), "the answer holds something"
    assert hung.poll()
    assert not hung.poll(), "a thousand bells before a poll are one"


def test_the_server_rings_at_the_sites_of_the_exchange_alone() -> None:
    engine = Hung()
    ring(["a", "b"], engine.context())
    ring([], engine.context())  # FLARE takes no targets for all of them
    assert engine.sent == [(["a", "b"], TOPIC, Shareable(), True)]


@pytest.mark.parametrize("waits", [True, False])
def test_a_site_that_shares_its_thread_does_not_wait(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    polls: list[Signal | None] = []
    monkeypatch.setattr(TaskNotifier, "wait", lambda _, abort: polls.append(abort))
    executor, engine = SiteExecutor(PLAN, 1, bell=waits), Hung()
    for event in (EventType.START_RUN, EventType.BEFORE_PULL_TASK):
        executor.handle_event(event, engine.context())
    assert len(polls) == waits
    assert list(engine.handlers) == [TOPIC] * waits


# Heartbeats, and jobs of a server that was killed


def test_a_heartbeat_alone_is_heard_and_flare_still_hears_everything() -> None:
    heard: list[str] = []
    communicator = WFCommServer()
    on_heartbeat(communicator, heard.append)
    runner: Any = object.__new__(ServerRunner)
    controller = SimpleNamespace(communicator=communicator)
    runner.current_wf, runner.wf_lock = SimpleNamespace(controller=controller), threading.RLock()
    for site in ("alpha", "beta"):
        communicator.process_dead_client_report(site, context(site))
    runner._handle_job_heartbeat("topic", Shareable(), context("alpha"))
    runner._report_client_active("getTask", context("beta"))  # all that the simulator's sites send
    assert heard == ["alpha"]
    assert not communicator._dead_clients


class Store:
    """A server's job store, as far as its runner asks it."""

    def __init__(self, **jobs: RunStatus) -> None:
        self.jobs: dict[str, Any] = dict(jobs)

    def get_jobs_by_status(self, statuses: list[RunStatus], fl_ctx: Any) -> list[Any]:
        return [SimpleNamespace(job_id=name) for name, status in self.jobs.items() if status in statuses]

    def set_status(self, job_id: str, status: RunStatus, fl_ctx: Any) -> None:
        self.jobs[job_id] = status

    def tell(self, component: Any, event: str) -> None:
        """Fire an event of the server with this store."""
        components = {"job_runner": JobRunner(""), "job_manager": self}
        fl_ctx: Any = SimpleNamespace(get_engine=lambda: SimpleNamespace(get_component=components.get))
        component.handle_event(event, fl_ctx)


def test_running_jobs_of_an_earlier_life_end_and_others_stay() -> None:
    store = Store(old=RunStatus.RUNNING, sent=RunStatus.DISPATCHED, new=RunStatus.SUBMITTED)
    store.tell(StaleJobs(), EventType.SYSTEM_END)
    assert store.jobs["old"] is RunStatus.RUNNING
    store.tell(StaleJobs(), EventType.SYSTEM_START)
    ended = RunStatus.FINISHED_ABNORMAL
    assert store.jobs == {"old": ended, "sent": ended, "new": RunStatus.SUBMITTED}


# The launcher


class Machine:
    """Starts processes that each do what the next script says, and counts them."""

    def __init__(self, *scripts: str) -> None:
        self.scripts = list(scripts)
        self.started: list[subprocess.Popen[bytes]] = []

    def launch(self, *_: object) -> ProcessHandle:
        script = self.scripts[len(self.started)]
        self.started.append(subprocess.Popen([sys.executable, "-S", "-c", script], start_new_session=True))
        return ProcessHandle(process=self.started[-1])


DIE = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
WELL = "pass"
WRONG = "raise SystemExit(1)"
LONG = "import time; time.sleep(60)"


@pytest.mark.complete
@pytest.mark.parametrize(
    ("scripts", "restarts", "code"),
    [
        ((WRONG,), 3, JobReturnCode.EXECUTION_ERROR),
        ((DIE, WELL), 3, JobReturnCode.SUCCESS),
        ((DIE, WRONG), 3, JobReturnCode.EXECUTION_ERROR),
        ((DIE, DIE, DIE), 2, JobReturnCode.UNKNOWN),
        ((DIE,), 0, JobReturnCode.UNKNOWN),
    ],
)
def test_only_a_killed_process_is_started_again(scripts: tuple[str, ...], restarts: int, code: Any) -> None:
    machine = Machine(*scripts)
    handle = TolerantHandle(machine.launch, restarts)
    handle.wait()
    assert len(machine.started) == len(scripts)
    assert handle.poll() == code


@pytest.mark.complete
@pytest.mark.parametrize("killed", [0, 1])
def test_the_process_that_runs_is_the_one_that_is_ended_for_good(killed: int) -> None:
    machine = Machine(LONG, LONG)
    handle = TolerantHandle(machine.launch, 3)
    assert handle.poll() == JobReturnCode.UNKNOWN
    waiting = threading.Thread(target=handle.wait)
    waiting.start()
    if killed:
        os.kill(machine.started[0].pid, signal.SIGKILL)
    while len(machine.started) <= killed:
        time.sleep(0.01)
    handle.terminate()
    waiting.join()
    assert len(machine.started) == 1 + killed
    assert machine.started[-1].poll() == -signal.SIGKILL
    assert handle.poll() == JobReturnCode.UNKNOWN


@pytest.mark.complete
@pytest.mark.parametrize(("set_before", "found"), [(None, "45"), ("900", "900")])
def test_the_launcher_starts_what_flares_own_would(
    set_before: str | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost piece is asked for again when the launcher, or the environment, says."""
    variable, machine, asked = "NVFLARE_TENSOR_STREAMING_PER_REQUEST_TIMEOUT", Machine(DIE, WELL), []

    def launch_job(self: object, job_meta: object, fl_ctx: object) -> ProcessHandle:
        asked.append((job_meta, fl_ctx))
        return machine.launch()

    monkeypatch.setattr(os, "environ", {variable: set_before} if set_before else {})
    monkeypatch.setattr(ClientProcessJobLauncher, "launch_job", launch_job)
    fl_ctx: Any = object()
    launcher = TolerantLauncher(restarts=5, overdue=45)
    assert launcher.restarts == 5  # under its own name, for FLARE's configuration
    launcher.launch_job({"job_id": "j"}, fl_ctx).wait()
    assert asked == [({"job_id": "j"}, fl_ctx)] * 2
    assert os.environ[variable] == found
