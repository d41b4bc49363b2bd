"""The server's half: who answered an exchange, who is not waited for, and how a run ended."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import ReservedHeaderKey, make_reply
from nvflare.apis.signal import Signal

from own_clock import own_clock
from suture.core.errors import Aborted, FederationError
from suture.federation.server import collector as waiting
from suture.federation.server.collector import UpdateCollector
from suture.federation.server.record import Record
from suture.flare import controller
from suture.flare.codec import to_shareable
from suture.flare.controller import FederationController, FlareTransport
from suture.protocol.check import AllowedReply
from suture.protocol.egress import Egress
from suture.protocol.messages import TaskData, Update, ones
from suture.protocol.packing import pack

# The end of a run


def failing(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any) -> None:
        raise error

    return fail


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> tuple[FederationController, list[str]]:
    """A controller, and the reasons for which it has ended its job."""
    own, panics = FederationController("", ""), list[str]()
    monkeypatch.setattr(own, "system_panic", lambda reason, _: panics.append(reason))
    return own, panics


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (KeyError("noise"), "failed", "KeyError: 'noise'"),
        (FederationError("too few sites"), "failed", "too few sites"),
        (Aborted("the job was aborted"), "interrupted", "the job was aborted"),
    ],
)
def test_a_run_that_has_ended_is_never_running(
    error: Exception, status: str, says: str, made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, (own, panics) = Record(tmp_path), made
    record.update(status="running")
    server = SimpleNamespace(record=record, schedule=SimpleNamespace(round_timeout=1), collector=MagicMock())
    monkeypatch.setattr(controller, "federate", failing(error))
    monkeypatch.setattr(controller, "on_heartbeat", lambda *_: None)
    monkeypatch.setattr(controller, "JobGuard", lambda *_: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(controller, "if_installed", lambda _: lambda *_: None)
    monkeypatch.setattr(own, "_open", lambda _: server)
    monkeypatch.setattr(own, "_publish", lambda *_: None)
    own.control_flow(Signal(), FLContext())
    run = json.loads((tmp_path / "run.json").read_text())
    assert (run["status"], run["error"], panics) == (status, says, [says])


@pytest.mark.parametrize("error", [KeyError("noise"), FederationError("'noise'")])
def test_what_fails_before_the_folder_is_open_is_a_panic_with_its_text(
    error: Exception, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, panics = made
    monkeypatch.setattr(own, "_open", failing(error))
    own.control_flow(Signal(), FLContext())
    assert ["'noise'" in reason for reason in panics] == [True]


# An exchange


class Tasks:
    """FLARE's controller, as far as a transport uses it; a test says who answers what.

    Args:
        fetches: the sites that fetch their task, whether they answer or not.
        timeout: seconds after which FLARE retires what is left; None for never.
    """

    def __init__(self, answers: dict[str, Any], fetches: str = "", timeout: float | None = None) -> None:
        self.answers, self._fetches, self._timeout = answers, fetches, timeout
        self.open: dict[str, Any] = {}
        self.cancelled: list[str] = []
        self._end = float("inf")

    def send(self, task: Any, fl_ctx: Any, targets: list[str]) -> None:
        (site,) = targets
        self.open[site] = task
        if self._timeout is not None:
            self._end = time.monotonic() + self._timeout  # as FLARE, which counts from here
        if site in self._fetches:
            self.fetch(site)
        if site in self.answers:
            self.answer(site, self.answers[site])

    def answer(self, site: str, result: Any) -> None:
        """A result comes in."""
        client_task: Any = SimpleNamespace(client=SimpleNamespace(name=site), result=result)
        self.open[site].result_received_cb(client_task, None)

    def fetch(self, site: str) -> None:
        """A site fetches its task."""
        self.open[site].before_task_sent_cb(SimpleNamespace(client=SimpleNamespace(name=site)), None)

    def get_num_standing_tasks(self) -> int:
        return 0 if time.monotonic() > self._end else len(self.open) - len(self.cancelled)

    def cancel_task(self, task: Any, fl_ctx: Any) -> None:
        self.cancelled += [site for site, other in self.open.items() if other is task]


def good(number: int = 1) -> Any:
    return to_shareable(pack(Update(number, ("Mass",), {"w": torch.ones(2)}, {}, ones(("Mass",)))))


class Exchange:
    """Exchanges with three sites, some of which answer."""

    def __init__(self, folder: Path) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.collector = UpdateCollector(folder, lambda kind, **facts: self.events.append((kind, facts)))

    def transport(self, tasks: Tasks, timeout: int = 60, *, stopped: bool = False) -> FlareTransport:
        """With a bell that nobody hears."""
        engine = SimpleNamespace(fire_and_forget_aux_request=lambda *_, **__: None, asked_to_stop=stopped)
        fl_ctx: Any = SimpleNamespace(get_engine=lambda: engine)
        return FlareTransport(tasks, fl_ctx, Signal(), timeout, {})  # type: ignore[arg-type]

    def __call__(
        self,
        over: FlareTransport,
        quorum: int = 2,
        grace: float | None = None,
        number: int = 1,
    ) -> dict[str, str]:
        """Return who is missing, and why."""
        form = Egress({"w": ((2,), "torch.float32")}, {})
        allowed = AllowedReply(TaskData("train", number, labels=("Mass",)), form, ("Mass",))
        packed = self.collector.open(dict.fromkeys(("a", "b", "c"), allowed))
        return over.exchange("train", packed, self.collector.receiver(quorum, grace))


@pytest.fixture
def exchange(tmp_path: Path) -> Exchange:
    return Exchange(tmp_path / "spool")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A site has a fifth of a second to fetch its task."""
    monkeypatch.setattr(waiting, "FETCH_WITHIN", 0.2)


@pytest.mark.usefixtures("impatient")
def test_stragglers_are_not_waited_for_once_the_grace_is_over(exchange: Exchange) -> None:
    tasks = Tasks({"a": good(), "b": good()})
    missing = exchange(exchange.transport(tasks), grace=0.0)
    assert {site: why.split(":")[0] for site, why in missing.items()} == {"c": "not waited for"}
    assert tasks.cancelled == ["c"]
    exchange.collector.close(missing)
    tasks.answer("c", good())
    assert exchange.collector.accepted() == ["a", "b"]


def test_a_lost_site_is_not_waited_for_by_default_and_the_reason_says_so(
    exchange: Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "_LOOK", 0.01)
    for name in ("SILENT_AFTER", "GRACE", "WAIT"):
        monkeypatch.setattr(waiting, name, 0.01)
    exchange.collector.attendance.heard("c")
    tasks = Tasks({"a": good()})
    threading.Timer(0.2, lambda: tasks.answer("b", good())).start()
    missing = exchange(exchange.transport(tasks))
    assert missing.keys() == {"c"}
    assert missing["c"].startswith("lost: ")
    assert {"sites": ["b", "c"], "lost": ["c"], "seconds": 0} in [facts for _, facts in exchange.events]


@pytest.mark.usefixtures("impatient")
def test_an_answer_that_is_none_costs_its_site_and_nothing_else(exchange: Exchange) -> None:
    strange, broken, error = good(), good(), make_reply(ReturnCode.EXECUTION_EXCEPTION)
    strange["DXO"] = {"kind": 5}
    broken[ReservedHeaderKey.HEADERS] = 5
    for answer, named in ((strange, "5"), (broken, "ValueError"), (error, "EXECUTION_EXCEPTION")):
        tasks = Tasks({"a": good(), "b": answer, "c": error})
        missing = exchange(exchange.transport(tasks), quorum=1)
        assert missing.keys() == {"b", "c"}
        assert named in missing["b"]
        assert exchange.collector.accepted() == ["a"]


def test_all_are_waited_for_without_a_grace(exchange: Exchange, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    own_clock(monkeypatch, "suture.flare.controller", sleep=lambda _: None, monotonic=lambda: next(clock))
    monkeypatch.setattr(Tasks, "get_num_standing_tasks", lambda _: next(clock) < 20)
    missing = exchange(exchange.transport(Tasks({"a": good(), "b": good()}), timeout=5))
    assert missing.keys() == {"c"}
    assert "within 5 s" in missing["c"]


def test_the_job_of_a_dead_server_ends_at_once(exchange: Exchange) -> None:
    with pytest.raises(Aborted):
        exchange(exchange.transport(Tasks({"a": good()}), 3600, stopped=True))


def test_a_refused_answer_ends_its_own_task_at_once_and_keeps_the_reason(
    exchange: Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Site c fetches its task, and its answer is refused, before the others answer."""
    tasks = Tasks({})
    transport, standing = exchange.transport(tasks), tasks.get_num_standing_tasks

    def refusing() -> int:
        if not tasks.cancelled:
            tasks.fetch("c")
            transport.refuse("c", "it cannot be decoded")
            assert tasks.cancelled == ["c"], "FLARE would give the task to the site again"
            for site in ("a", "b"):
                tasks.answer(site, good())
            transport.refuse("a", "its answer has been taken")
        return standing()

    monkeypatch.setattr(tasks, "get_num_standing_tasks", refusing)
    missing = exchange(transport)
    assert missing == {"c": "it cannot be decoded"}
    assert exchange.collector.close(missing)["c"].reason == "it cannot be decoded"
    assert exchange.collector.accepted() == ["a", "b"]
    transport.refuse("a", "late")  # no exchange is open


def test_a_site_is_gone_until_it_fetches_a_task(exchange: Exchange, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "FETCH_WITHIN", 0.0)
    for number, timeout, fetches, why in (
        (1, 1, "ab", "no answer within"),
        (2, 60, "ab", "not waited for"),
        (3, 1, "abc", "no answer within"),
    ):
        tasks = Tasks({site: good(number) for site in "ab"}, fetches, timeout)
        missing = exchange(exchange.transport(tasks, timeout), number=number)
        assert missing["c"].startswith(why)
        exchange.collector.close(missing)
    events = [kind for kind, _ in exchange.events if kind != "answer"]
    assert events == ["fetched", "fetched", "gone", "fetched", "back"]  # of a and b; c is late
