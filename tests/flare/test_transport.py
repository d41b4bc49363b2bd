"""An exchange over FLARE's tasks: who answered, who is not waited for, and when it ends at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import ReservedHeaderKey, make_reply
from nvflare.apis.signal import Signal

from own_clock import own_clock
from suture.federation.server.collector import UpdateCollector
from suture.flare.codec import to_shareable
from suture.flare.controller import Aborted, FlareTransport
from suture.protocol.check import AllowedReply
from suture.protocol.egress import Egress
from suture.protocol.messages import TaskData, Update, ones
from suture.protocol.packing import Packed, pack

EGRESS = Egress({"w": ((2,), "torch.float32")}, {})
UPDATE = pack(Update(1, ("Mass",), {"w": torch.ones(2)}, {}, ones(("Mass",))))


def silent(**facts: object) -> SimpleNamespace:
    """An engine whose bell nobody hears."""
    return SimpleNamespace(fire_and_forget_aux_request=lambda *_, **__: None, **facts)


class Tasks:
    """FLARE's controller, as far as a transport uses it; a test says who answers what."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers
        self.open: dict[str, Any] = {}
        self.cancelled: list[str] = []

    def send(self, task: Any, fl_ctx: Any, targets: list[str]) -> None:
        self.open[targets[0]] = task
        if targets[0] in self.answers:
            self.answer(targets[0], self.answers[targets[0]])

    def answer(self, site: str, result: Any) -> None:
        """A result comes in."""
        task = self.open[site]
        task.result_received_cb(SimpleNamespace(client=SimpleNamespace(name=site), result=result), None)

    def fetch(self, site: str) -> None:
        """A site fetches its task."""
        self.open[site].before_task_sent_cb(SimpleNamespace(client=SimpleNamespace(name=site)), None)

    def get_num_standing_tasks(self) -> int:
        return len(self.open) - len(self.cancelled)

    def cancel_task(self, task: Any, fl_ctx: Any) -> None:
        self.cancelled += [site for site, other in self.open.items() if other is task]


Ask = Callable[..., tuple[Tasks, UpdateCollector, dict[str, str]]]


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    """Makes an exchange with three sites, some of which answer."""

    def ask(
        answers: dict[str, Any],
        *,
        quorum: int = 2,
        grace: float | None = None,
        timeout: int = 1,
        stopped: bool = False,
    ) -> tuple[Tasks, UpdateCollector, dict[str, str]]:
        tasks, collector = Tasks(answers), UpdateCollector(tmp_path / "spool", lambda *_, **__: None)
        allowed = AllowedReply(TaskData("train", 1, labels=("Mass",)), EGRESS, ("Mass",))
        packed = collector.open(dict.fromkeys(("a", "b", "c"), allowed))
        engine = silent(asked_to_stop=stopped)
        fl_ctx: Any = SimpleNamespace(get_engine=lambda: engine)
        transport = FlareTransport(tasks, fl_ctx, Signal(), timeout, {})  # type: ignore[arg-type]
        return tasks, collector, transport.exchange("train", packed, collector.receiver(quorum, grace))

    return ask


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A site has a fifth of a second to fetch its task."""
    monkeypatch.setattr("suture.federation.server.collector.PATIENCE", 0.2)


def good() -> Any:
    return to_shareable(Packed(UPDATE.tensors, UPDATE.header))


@pytest.mark.usefixtures("impatient")
def test_stragglers_are_not_waited_for_once_the_grace_is_over(ask: Ask) -> None:
    tasks, collector, missing = ask({"a": good(), "b": good()}, grace=0.0, timeout=60)
    assert missing == {"c": "not waited for: enough others had answered"}
    assert tasks.cancelled == ["c"]
    collector.close(missing)
    tasks.answer("c", good())
    assert collector.accepted() == ["a", "b"]


def test_a_lost_site_is_not_waited_for_by_default_and_the_reason_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[dict[str, Any]] = []
    monkeypatch.setattr("suture.flare.controller._LOOK", 0.01)
    for name in ("SILENT", "GRACE", "WAIT"):
        monkeypatch.setattr(f"suture.federation.server.collector.{name}", 0.01)
    collector = UpdateCollector(tmp_path / "spool", lambda _, **facts: events.append(facts))
    collector.attendance.heard("c")
    allowed = AllowedReply(TaskData("train", 1, labels=("Mass",)), EGRESS, ("Mass",))
    packed = collector.open(dict.fromkeys(("a", "b", "c"), allowed))
    fl_ctx: Any = SimpleNamespace(get_engine=lambda: silent(asked_to_stop=False))
    tasks = Tasks({"a": good()})
    transport = FlareTransport(tasks, fl_ctx, Signal(), 60, {})  # type: ignore[arg-type]
    threading.Timer(0.2, tasks.answer, ("b", good())).start()
    missing = transport.exchange("train", packed, collector.receiver(2, None))
    assert missing.keys() == {"c"}
    assert missing["c"].startswith("lost: ")
    assert {"sites": ["b", "c"], "lost": ["c"], "seconds": 0} in events


@pytest.mark.usefixtures("impatient")
def test_an_error_code_is_no_update_and_keeps_its_name(ask: Ask) -> None:
    error = make_reply(ReturnCode.EXECUTION_EXCEPTION)
    _, collector, missing = ask({"a": good(), "b": error}, quorum=1, grace=0.0, timeout=60)
    assert missing["b"] == "FLARE answered EXECUTION_EXCEPTION"
    assert missing["c"].startswith("not waited for")
    assert collector.accepted() == ["a"]


def test_an_answer_that_cannot_be_read_costs_its_site_and_nothing_else(ask: Ask) -> None:
    strange = good()
    strange["DXO"] = {"kind": 5}
    broken = good()
    broken[ReservedHeaderKey.HEADERS] = 5
    _, collector, missing = ask({"a": good(), "b": strange, "c": broken}, quorum=1, timeout=60)
    assert missing["b"] == "unexpected kind of data 5"
    assert missing["c"] == "the answer could not be read (ValueError)"
    assert collector.accepted() == ["a"]


def test_all_are_waited_for_without_a_grace(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    own_clock(monkeypatch, "suture.flare.controller", sleep=lambda _: None, monotonic=lambda: next(clock))
    monkeypatch.setattr(Tasks, "get_num_standing_tasks", lambda _: next(clock) < 20)
    _, _, missing = ask({"a": good(), "b": good()}, grace=None, timeout=5)
    assert missing == {"c": "no answer within 5 s"}


def test_the_job_of_a_dead_server_ends_at_once(ask: Ask) -> None:
    with pytest.raises(Aborted, match="server has died"):
        ask({"a": good()}, stopped=True, timeout=3600)


class Refusing(Tasks):
    """Site c fetches its task, and its answer is refused, before the others answer."""

    transport: FlareTransport

    def get_num_standing_tasks(self) -> int:
        if not self.cancelled:
            self.fetch("c")
            self.transport.refuse("c", "the answer could not be decoded (ValueError)")
            assert self.cancelled == ["c"], "FLARE would give the task to the site again"
            for site in ("a", "b"):
                self.answer(site, good())
        return super().get_num_standing_tasks()


def test_a_refused_answer_ends_its_own_task_at_once_and_keeps_the_reason(tmp_path: Path) -> None:
    tasks, collector = Refusing({}), UpdateCollector(tmp_path / "spool", lambda *_, **__: None)
    allowed = AllowedReply(TaskData("train", 1, labels=("Mass",)), EGRESS, ("Mass",))
    packed = collector.open(dict.fromkeys(("a", "b", "c"), allowed))
    fl_ctx: Any = SimpleNamespace(get_engine=lambda: silent(asked_to_stop=False))
    tasks.transport = FlareTransport(tasks, fl_ctx, Signal(), 60, {})  # type: ignore[arg-type]
    missing = tasks.transport.exchange("train", packed, collector.receiver(2, None))
    assert missing == {"c": "the answer could not be decoded (ValueError)"}
    lines = collector.close(missing)
    assert lines["c"].reason == "the answer could not be decoded (ValueError)"
    assert collector.accepted() == ["a", "b"]
    tasks.transport.refuse("a", "late")  # no exchange is open


def test_a_site_is_gone_until_it_fetches_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("suture.federation.server.collector.PATIENCE", 0.0)
    events: list[str] = []
    collector = UpdateCollector(tmp_path / "spool", lambda kind, **_: events.append(kind))
    fl_ctx: Any = SimpleNamespace(get_engine=lambda: silent(asked_to_stop=False))
    for number, timeout, fetches in ((1, 1, ()), (2, 60, ()), (3, 1, ("c",))):
        allowed = AllowedReply(TaskData("train", number, labels=("Mass",)), EGRESS, ("Mass",))
        packed = collector.open(dict.fromkeys(("a", "b", "c"), allowed))
        update = pack(Update(number, ("Mass",), {"w": torch.ones(2)}, {}, ones(("Mass",))))
        tasks = Fetching({site: to_shareable(update) for site in ("a", "b")}, fetches, timeout)
        transport = FlareTransport(tasks, fl_ctx, Signal(), timeout, {})  # type: ignore[arg-type]
        missing = transport.exchange("train", packed, collector.receiver(2, None))
        why = {1: "no answer within", 2: "not waited for", 3: "no answer within"}[number]
        assert missing["c"].startswith(why)
        collector.close(missing)
    expected_events = ["fetched", "fetched", "gone", "fetched", "back"]  # of a and b; c is late
    assert [kind for kind in events if kind != "answer"] == expected_events


class Fetching(Tasks):
    """Sites that answer, and sites that only fetch; FLARE retires what is left at the deadline."""

    def __init__(self, answers: dict[str, Any], fetches: tuple[str, ...], timeout: int) -> None:
        super().__init__(answers)
        self._fetches, self._timeout, self._end = fetches, timeout, 0.0

    def send(self, task: Any, fl_ctx: Any, targets: list[str]) -> None:
        self._end = time.monotonic() + self._timeout  # as FLARE, which counts from here
        self.open[targets[0]] = task
        if targets[0] in (*self.answers, *self._fetches):
            self.fetch(targets[0])
        if targets[0] in self.answers:
            self.answer(targets[0], self.answers[targets[0]])

    def get_num_standing_tasks(self) -> int:
        return 0 if time.monotonic() > self._end else 1
