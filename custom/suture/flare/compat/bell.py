"""The bell: the server rings when a site's task is ready, and a site waits for it before it asks for one.

FLARE 2.9.0: a site polls, and sleeps after each poll that finds nothing: 0.5 s in the simulator, the
server's `task_request_interval` elsewhere. A site that waits before it asks finds its task at the first
try. The bell is a message without content beside FLARE's own path of tasks, which stays as it is, with its
filters. Whoever rings it causes one poll and nothing else; a bell that is lost is made up for by the
ordinary poll after `CAP`. FLARE's metrics of a job do not time the wait: an exported job lists its executor
before its components, and FLARE tells them of a poll in that order.
Where: nvflare/private/fed/app/simulator/simulator_worker.py: do_one_task
Where: nvflare/private/fed/client/client_runner.py: _try_run
Expires with: test_a_site_of_flare_sleeps_after_a_poll_that_finds_nothing
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal

TOPIC = "suture.bell"

CAP = 2.0
"""Seconds that a site waits for the bell at most; FLARE's own interval between two polls."""

_LOOK = 0.1
"""Seconds between two looks at whether the job was aborted."""


def ring(sites: Sequence[str], fl_ctx: FLContext) -> None:
    """Ring at some of the clients, without waiting for any; a client that is gone is passed over."""
    if sites:
        engine = fl_ctx.get_engine()
        engine.fire_and_forget_aux_request(list(sites), TOPIC, Shareable(), fl_ctx, optional=True)


class TaskNotifier:
    """A site's bell. It has rung when it is made, so that the first poll waits for nothing."""

    def __init__(self) -> None:
        self._rung = threading.Event()
        self._rung.set()

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Follow FLARE's events: hang up the bell, wait for it before each poll, and still it.

        It is stilled before the poll, so that one which rings meanwhile counts; and again once the task has
        come, because the bell of that task may have rung after the poll. The next one rings only after the
        answer.
        """
        if event_type == EventType.START_RUN:
            fl_ctx.get_engine().register_aux_message_handler(TOPIC, self._ring)
        elif event_type == EventType.BEFORE_PULL_TASK:
            self.wait(fl_ctx.get_run_abort_signal())
        elif event_type == EventType.BEFORE_TASK_EXECUTION:
            self._rung.clear()

    def wait(self, abort: Signal | None) -> bool:
        """Wait for the bell until the job is aborted or `CAP` seconds have passed; return whether it rang."""
        until = time.monotonic() + CAP
        rung = self._rung.wait(min(_LOOK, CAP))
        while not rung and time.monotonic() < until and not (abort and abort.triggered):
            rung = self._rung.wait(_LOOK)
        self._rung.clear()
        return rung

    def _ring(self, topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
        """Ring, as FLARE's handler of the topic; what the message holds is not looked at."""
        self._rung.set()
        return make_reply(ReturnCode.OK)
