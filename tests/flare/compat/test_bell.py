"""The bell wakes a site once, is never lost between a poll and the wait after it, and carries nothing."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from suture.flare import PLAN
from suture.flare.compat import bell
from suture.flare.compat.bell import TOPIC, TaskNotifier, ring
from suture.flare.executor import SiteExecutor


class Engine:
    """The part of FLARE's engines that the bell uses."""

    def __init__(self) -> None:
        self.handlers: dict[str, Any] = {}
        self.sent: list[tuple[list[str], str, Shareable, bool]] = []

    def register_aux_message_handler(self, topic: str, message_handle_func: Any) -> None:
        self.handlers[topic] = message_handle_func

    def fire_and_forget_aux_request(
        self, targets: list[str], topic: str, request: Shareable, fl_ctx: FLContext, optional: bool
    ) -> None:
        self.sent.append((targets, topic, request, optional))


class Hung:
    """A site's bell as FLARE drives it."""

    def __init__(self) -> None:
        self.engine, self.abort, self.bell = Engine(), Signal(), TaskNotifier()
        self.event(EventType.START_RUN)

    def event(self, name: str) -> None:
        """Fire an event of FLARE's."""
        fl_ctx = FLContext()
        fl_ctx.get_engine = lambda: self.engine
        self.bell.handle_event(name, fl_ctx)

    def poll(self) -> bool:
        """Poll as the site does; return whether the bell had rung."""
        return self.bell.wait(self.abort)

    def ring(self, message: Any = None) -> Shareable:
        return self.engine.handlers[TOPIC](TOPIC, message, FLContext())


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> Hung:
    monkeypatch.setattr(bell, "CAP", 0.02)
    return Hung()


def test_the_first_poll_waits_for_nothing_and_a_later_one_at_most_for_the_cap(hung: Hung) -> None:
    assert hung.poll()
    assert not hung.poll()


def test_a_bell_while_the_site_polls_is_kept(hung: Hung) -> None:
    hung.poll()
    hung.ring()
    assert hung.poll()
    assert not hung.poll(), "one bell, one poll"


def test_a_bell_wakes_the_site_that_waits(hung: Hung, monkeypatch: pytest.MonkeyPatch) -> None:
    hung.poll()
    monkeypatch.setattr(bell, "CAP", 3600)
    threading.Timer(0.05, hung.ring).start()
    assert hung.poll()


def test_the_bell_of_the_task_in_hand_is_not_taken_for_the_next_one(hung: Hung) -> None:
    hung.poll()
    hung.ring()
    hung.event(EventType.BEFORE_TASK_EXECUTION)
    assert not hung.poll()
    hung.event(EventType.BEFORE_TASK_EXECUTION)
    hung.ring()  # the next exchange, right after the answer
    hung.event(EventType.AFTER_SEND_TASK_RESULT)
    assert hung.poll()


def test_a_site_that_waits_ends_at_an_abort(hung: Hung, monkeypatch: pytest.MonkeyPatch) -> None:
    hung.poll()
    monkeypatch.setattr(bell, "CAP", 3600)
    threading.Timer(0.05, lambda: hung.abort.trigger(True)).start()
    assert not hung.poll()


@pytest.mark.parametrize("message", [None, "text", Shareable({"a": [0] * 9}), {"topic": 1}])
def test_whatever_a_bell_holds_it_causes_one_poll_and_answers_nothing(hung: Hung, message: Any) -> None:
    hung.poll()
    for _ in range(1000):
        reply = hung.ring(message)
    assert reply.get_return_code() == ReturnCode.OK
    assert set(reply) == set(Shareable()), "the answer holds something"
    assert hung.poll()
    assert not hung.poll(), "a thousand gaussian_kernels before a poll are one"


def test_the_server_rings_at_the_sites_of_the_exchange_alone() -> None:
    engine, fl_ctx = Engine(), FLContext()
    fl_ctx.get_engine = lambda: engine
    ring(["a", "b"], fl_ctx)
    ring([], fl_ctx)  # FLARE takes no targets for all of them
    [(targets, topic, request, optional)] = engine.sent
    assert (targets, topic, optional) == (["a", "b"], TOPIC, True)
    assert request == Shareable()


@pytest.mark.parametrize("waits", [True, False])
def test_a_site_that_shares_its_thread_does_not_wait(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    polls: list[Signal | None] = []
    monkeypatch.setattr(TaskNotifier, "wait", lambda _, abort: polls.append(abort))
    executor, engine, fl_ctx = SiteExecutor(PLAN, 1, bell=waits), Engine(), FLContext()
    fl_ctx.get_engine = lambda: engine
    for event in (EventType.START_RUN, EventType.BEFORE_PULL_TASK):
        executor.handle_event(event, fl_ctx)
    assert len(polls) == waits
    assert list(engine.handlers) == [TOPIC] * waits
