"""One exchange: what is taken, rejected or late, which sites it waits for, and what stays in memory."""

from __future__ import annotations

import errno
import weakref
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import suture.federation.server.collector as collecting
from own_clock import own_clock
from suture.core.errors import FederationError
from suture.federation.server.aggregator import Updates
from suture.federation.server.collector import (
    FETCH_WITHIN,
    GRACE,
    LATE,
    MOST_LATE,
    SILENT_AFTER,
    WAIT,
    Receiver,
    UpdateCollector,
)
from suture.federation.server.registry import Member, SiteRegistry
from suture.methods import averaging
from suture.methods.averaging import weighted_mean
from suture.methods.base import GlobalModel
from suture.protocol.check import AllowedReply
from suture.protocol.egress import Egress
from suture.protocol.messages import Abstain, Evaluation, Metrics, SiteNumbers, TaskData, Update, ones
from suture.protocol.packing import Packed, pack
from world import refused

SITES = ("a", "b", "c")
EGRESS = Egress({"w": ((2,), "torch.float32")}, {})
SIZE = 16
"""Of an update: two numbers of float32 and a class weight of float64."""


def update(number: int = 1, value: float = 1.0) -> Packed:
    return pack(Update(number, ("Mass",), {"w": torch.full((2,), value)}, {}, ones(("Mass",))))


@pytest.fixture
def collector(tmp_path: Path) -> UpdateCollector:
    return UpdateCollector(tmp_path / "spool", lambda *_, **__: None)


def open_round(collector: UpdateCollector, number: int = 1) -> None:
    allowed = AllowedReply(TaskData("train", number, number - 1, labels=("Mass",)), EGRESS, ("Mass",))
    collector.open(dict.fromkeys(SITES, allowed))


def test_each_number_that_a_site_sends_is_in_its_record(collector: UpdateCollector) -> None:
    numbers: dict[str, Any] = dict.fromkeys((one.name for one in fields(SiteNumbers)), 0.5)
    numbers["scalars"] = {"steps": 3.0}
    egress = replace(EGRESS, scalars={"steps": (0.0, 10.0)})
    collector.open({"a": AllowedReply(TaskData("train", 1, labels=("Mass",)), egress, ("Mass",))})
    sent = Update(1, ("Mass",), {"w": torch.ones(2)}, {}, ones(("Mass",)), **numbers)
    collector.receive("a", pack(sent))
    line = collector.close({})["a"]
    assert {name: getattr(line, name) for name in numbers} == numbers
    assert line.numbers == numbers | numbers.pop("scalars")


def test_a_quorum_and_its_grace_are_enough(
    collector: UpdateCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    own_clock(monkeypatch, "suture.federation.server.collector", monotonic=lambda: now)
    open_round(collector)
    take = collector.receiver(quorum=2, grace=5)
    take("a", update())
    now += 60
    assert not take.enough(SITES)
    take("b", update())
    now += 4.9
    assert not take.enough(SITES)
    now += 0.2
    assert take.enough(SITES)
    assert not collector.receiver(quorum=2, grace=None).enough(SITES)
    assert not collector.receiver(quorum=3, grace=0).enough(SITES)


def test_only_accepted_updates_count(collector: UpdateCollector) -> None:
    open_round(collector)
    take = collector.receiver(quorum=2, grace=0)
    take("a", update())
    take("b", update(value=float("nan")))
    take("c", pack(Abstain("out_of_memory", "MemoryError")))
    take("stranger", update())
    for again in ("a", "b", "c"):
        take(again, update())
    assert not take.enough(SITES)
    assert collector.accepted() == ["a"]
    assert [collector.lines[site].status for site in "abc"] == ["accepted", "rejected", "abstained"]


def test_a_late_update_is_dropped_with_a_line_and_never_counts_in_a_later_round(
    collector: UpdateCollector, caplog: pytest.LogCaptureFixture
) -> None:
    open_round(collector)
    late = collector.receiver(2, 0)
    late("a", update(value=1.0))
    late("b", update(value=1.0))
    assert collector.close({})["c"].status == "missing"
    late("c", update(value=9.0))
    # The same round is tried again: even an answer that would fit it is one to a closed exchange.
    open_round(collector)
    late("c", update(value=9.0))
    assert caplog.text.count("a late answer of c") == 2
    collector.receiver(2, 0)("c", update(value=2.0))
    assert collector.accepted() == ["c"]
    collector.close({})
    (accepted,) = collector.updates()
    assert torch.equal(accepted[1].shared["w"], torch.full((2,), 2.0))


def test_a_failed_disk_makes_no_quorum(collector: UpdateCollector, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(collecting, "IN_MEMORY", SIZE)
    open_round(collector)
    monkeypatch.setattr(collecting, "save", full)
    take = collector.receiver(2, 0)
    take("a", update())
    take("b", update())
    assert not take.enough(SITES)
    with refused("No space left", by=FederationError):
        collector.close({})


def test_beyond_its_limit_updates_wait_on_disk_and_come_back_the_same(
    collector: UpdateCollector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in (0, SIZE, 2 * SIZE, 3 * SIZE):
        monkeypatch.setattr(collecting, "IN_MEMORY", limit)
        for number in (1, 2):  # the second round has as much memory as the first
            open_round(collector, number)
            for site, value in zip(SITES, (1.0, 2.0, 3.0), strict=True):
                collector.receive(site, update(number, value))
            assert {len(held.shared) for held in collector.answers.values()} == {0}
            on_disk = sorted(path.name for path in (tmp_path / "spool").glob("*"))
            assert on_disk == [f"{site}.safetensors" for site in SITES[limit // SIZE :]]
            collector.close({})
        walks = [[(s, u.shared["w"].tolist()) for s, u in collector.updates()] for _ in range(2)]
        assert walks[0] == walks[1] == [("a", [1.0, 1.0]), ("b", [2.0, 2.0]), ("c", [3.0, 3.0])]
        collector.empty()
        assert not (tmp_path / "spool").exists()


def test_dropped_updates_leave_the_memory(collector: UpdateCollector) -> None:
    """Of a closed exchange when they are dropped, and of one that failed when the next one is opened."""
    for drop in (collector.empty, lambda: open_round(collector, 2)):
        open_round(collector)
        sent = update()
        alive = weakref.ref(sent.tensors["shared/w"])
        collector.receive("a", sent)
        collector.close({})
        del sent
        assert alive() is not None
        drop()
        assert alive() is None


def test_a_rejected_update_never_reaches_the_spool(
    collector: UpdateCollector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collecting, "IN_MEMORY", 0)
    open_round(collector)
    collector.receive("a", update(value=float("nan")))
    collector.receive("b", Packed({**update().tensors, "shared/more": torch.ones(1)}, update().header))
    assert not (tmp_path / "spool").exists()
    collector.receive("c", update())
    assert [path.name for path in (tmp_path / "spool").iterdir()] == ["c.safetensors"]


DEEP: Any = []


@pytest.mark.parametrize(
    "packed",
    [
        Packed({}, {"type": "handshake", "labels": DEEP}),
        Packed({}, {"type": "handshake", "labels": {1, 2}}),
        Packed({}, {"type": "handshake", "labels": torch.ones(2)}),
        Packed({}, {3: "handshake"}),  # type: ignore[dict-item]
        Packed({}, {"type": "handshake", "labels": ["Mass"] * 1_000_000}),
        Packed({"w": "no tensor"}, {"type": "update"}),  # type: ignore[dict-item]
        Packed({"shared/w": torch.zeros(2, device="meta")}, update().header),
        Packed({3: torch.zeros(3)}, {"type": "update"}),  # type: ignore[dict-item]
    ],
    ids=range(8),
)
def test_what_is_no_message_is_rejected_and_the_exchange_goes_on(
    packed: Packed, collector: UpdateCollector
) -> None:
    """A collector never raises, whatever it receives."""
    open_round(collector)
    collector.receive("a", packed)
    lines = collector.close({})
    assert lines["a"].status == "rejected"
    assert lines["a"].reason
    assert lines["b"].status == "missing"


def test_tensors_that_share_memory_are_spooled_apart(
    collector: UpdateCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collecting, "IN_MEMORY", 0)
    whole = torch.arange(8.0)
    egress = Egress({"v": ((3,), "torch.float32"), "w": ((2, 4), "torch.float32")}, {})
    sent = Update(1, ("Mass",), {"v": whole[:3], "w": whole.view(2, 4)}, {}, ones(("Mass",)))
    collector.open({"a": AllowedReply(TaskData("train", 1, labels=("Mass",)), egress, ("Mass",))})
    collector.receive("a", pack(sent))
    assert collector.close({})["a"].status == "accepted"
    ((_, read),) = collector.updates()
    assert all(torch.equal(tensor, sent.shared[name]) for name, tensor in read.shared.items())


class _Reading(UpdateCollector):
    """Reads updates as a collector does, and notes how many of those before are still held."""

    def __init__(self) -> None:
        self.held: list[int] = []

    def updates(self) -> Iterator[tuple[str, Update]]:
        read: list[weakref.ref[torch.Tensor]] = []

        def next_one() -> Update:
            self.held.append(sum(one() is not None for one in read))
            tensor = torch.ones(2)
            read.append(weakref.ref(tensor))
            return Update(1, ("Masse",), {"w": tensor}, {"b": torch.ones(1)}, ones(("Masse",)))

        for site in SITES:
            yield site, next_one()


@pytest.mark.parametrize(
    ("together", "waiting", "held"),
    [(9, 7, [0, 0, 0]), (9, 8, [0, 1, 0]), (9, 16, [0, 1, 2]), (0, 99, [0, 0, 0]), (1, 99, [0, 1, 0])],
)
def test_a_mean_lets_go_of_updates_before_the_next_one_is_read(
    together: int, waiting: int, held: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has 8 bytes."""
    monkeypatch.setattr(averaging, "_TOGETHER", together)
    monkeypatch.setattr(averaging, "_WAITING", waiting)
    member = Member(("Masse",), ("Mass",), {"train": 1}, 1)
    collector, registry = _Reading(), SiteRegistry(dict.fromkeys(SITES, member), ("Mass",))
    model = GlobalModel(("Mass",), {"w": torch.zeros(2)}, {"b": torch.zeros(1)})
    mean = weighted_mean(model, Updates(collector, registry))
    assert mean.head()["b"].tolist() == [1.0]
    assert mean.shared()["w"].tolist() == [1.0, 1.0]
    assert collector.held == held


class Rounds:
    """Exchanges with three sites, of which some fetch their tasks."""

    def __init__(self, folder: Path) -> None:
        self.events: list[tuple[str, str]] = []
        self.waited: list[tuple[list[str], int, list[str]]] = []
        self.collector = UpdateCollector(folder / "spool", self._note)
        self.now = 1000.0
        self.number = 0

    def _note(self, kind: str, **facts: Any) -> None:
        if kind == "waiting":
            self.waited.append((facts["sites"], facts["seconds"], facts["lost"]))
        elif kind in ("gone", "back"):
            self.events.append((kind, facts["site"]))

    def open(self, quorum: int = 2, grace: float | None = None, task: Any = "train") -> Receiver:
        self.number += 1
        allowed = AllowedReply(TaskData(task, self.number, labels=("Mass",)), EGRESS, ("Mass",))
        self.collector.open(dict.fromkeys(SITES, allowed))
        return self.collector.receiver(quorum, grace)

    def answer(self, take: Receiver, *sites: str) -> None:
        for site in sites:
            take.note_fetch(site)
            take(site, pack(Update(self.number, ("Mass",), {"w": torch.ones(2)}, {}, ones(("Mass",)))))

    def after(self, seconds: float, *sites: str, fetched: str = "", **how: Any) -> Receiver:
        """A round that some answer at once, so much later; c may have fetched its task."""
        take = self.open(**how)
        for site in fetched:
            take.note_fetch(site)
        self.answer(take, *sites or "ab")
        self.now += seconds
        return take

    def during(self, seconds: float, take: Receiver, waiting: list[str], heard: str = "") -> None:
        """Time in which a transport looks every ten seconds, and some sites send their heartbeats."""
        for _ in range(int(seconds / 10)):
            self.now += 10
            for site in heard:
                self.collector.attendance.heard(site)
            if take.enough(waiting):
                return
            take.waits(waiting)

    def c_is_gone(self) -> None:
        """A round in which c leaves its task unfetched for long."""
        assert not self.after(FETCH_WITHIN).enough(["c"]), "c was there until now"
        self.collector.close({})
        assert self.events == [("gone", "c")]


@pytest.fixture
def rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rounds:
    made = Rounds(tmp_path)
    own_clock(monkeypatch, "suture.federation.server.collector", monotonic=lambda: made.now)
    return made


def test_a_site_that_leaves_its_task_is_not_waited_for_in_later_rounds(rounds: Rounds) -> None:
    rounds.c_is_gone()
    take = rounds.open()
    rounds.answer(take, "a")
    assert not take.enough(["b", "c"]), "the others are waited for"
    rounds.answer(take, "b")
    assert take.enough(["c"])
    rounds.collector.close({})
    assert rounds.events == [("gone", "c")], "said once"
    take = rounds.open(task="evaluate")
    for site in "ab":
        take(site, pack(Evaluation(Metrics(rounds.number, "validation", 4, None, {}))))
    assert take.enough(["c"]), "an evaluation does not wait either"


def test_a_site_that_fetches_again_is_waited_for_at_once(rounds: Rounds) -> None:
    late = rounds.after(FETCH_WITHIN)
    rounds.collector.close({})
    take = rounds.open()
    late.note_fetch("c")
    assert rounds.events == [("gone", "c")], "by a task of this exchange"
    take.note_fetch("c")
    rounds.answer(take, "a", "b")
    assert not take.enough(["c"])
    assert rounds.events == [("gone", "c"), ("back", "c")]
    rounds.answer(take, "c")
    assert rounds.collector.accepted() == ["a", "b", "c"]


def test_a_site_that_is_gone_is_waited_for_while_a_quorum_needs_it(rounds: Rounds) -> None:
    rounds.c_is_gone()
    assert not rounds.after(3600, quorum=3).enough(["c"])
    take = rounds.after(0, "a")
    take("b", pack(Update(rounds.number, ("Mass",), {}, {}, ones(("Mass",)))))  # rejected
    assert not take.enough(["c"])


def test_a_site_that_works_for_long_is_not_gone(rounds: Rounds) -> None:
    rounds.after(3600, fetched="c")
    rounds.collector.close({})
    assert rounds.events == []
    assert not rounds.after(0).enough(["c"])


def test_short_rounds_add_up(rounds: Rounds) -> None:
    for _ in range(2):
        rounds.after(0.6 * FETCH_WITHIN, grace=0.0)
        rounds.collector.close({})
    assert rounds.events == [("gone", "c")]


@pytest.mark.parametrize("grace", [0.0, 1.0])
def test_a_short_grace_period_waits_for_a_site_whose_process_is_restarted(
    grace: float, rounds: Rounds
) -> None:
    """Its next process needs ten seconds; rounds of one second left it out eight times."""
    take = rounds.after(0.9 * FETCH_WITHIN, grace=grace)
    assert not take.enough(["c"])
    take.note_fetch("c")
    assert take.enough(["c"]) == (grace == 0)
    rounds.now += grace
    take.note_fetch("c")
    assert take.enough(["c"]), "a second fetch gains no time"
    rounds.answer(take, "c")
    rounds.collector.close({})
    assert rounds.events == []


def test_a_site_that_has_fetched_its_task_has_the_grace_period_only(rounds: Rounds) -> None:
    for _ in range(2):
        take = rounds.after(0.5, fetched="c", grace=1.0)
        assert not take.enough(["c"])
        rounds.now += 0.5
        assert take.enough(["c"])
        rounds.collector.close({})


def test_a_site_that_does_not_come_back_costs_one_wait(rounds: Rounds) -> None:
    assert rounds.after(FETCH_WITHIN, grace=1.0).enough(["c"])
    rounds.collector.close({})
    assert rounds.after(0, grace=1.0).enough(["c"])


def test_a_site_cannot_make_every_round_wait_for_its_fetch(rounds: Rounds) -> None:
    for _ in range(MOST_LATE):
        take = rounds.after(LATE, grace=1.0)
        assert not take.enough(["c"])
        rounds.answer(take, "c")
        rounds.collector.close({})
    assert rounds.after(1, grace=1.0).enough(["c"])


def test_a_site_that_fetches_at_once_is_never_late(rounds: Rounds) -> None:
    for _ in range(MOST_LATE + 1):
        rounds.after(FETCH_WITHIN, *SITES, grace=1.0)
        rounds.collector.close({})
    assert not rounds.after(FETCH_WITHIN - 1, grace=1.0).enough(["c"])


def test_a_site_lost_in_its_task_costs_one_grace_that_begins_with_the_loss(rounds: Rounds) -> None:
    """The whole site is killed; the round stayed open until its timeout, without a word."""
    take, begun = rounds.open(), rounds.now
    for site in SITES:
        take.note_fetch(site)
    rounds.during(600, take, ["a", "b", "c"], "abc")
    lost = rounds.now
    rounds.answer(take, "a", "b")
    rounds.during(3600, take, ["c"], "ab")
    assert rounds.now == lost + SILENT_AFTER + GRACE
    assert rounds.waited == [(["c"], WAIT, ["c"])], f"the sites trained from {begun} on, which is no news"
    assert take.note_loss("c") == "lost: not heard from for 3 min"
    assert not take.note_loss("b")
    rounds.collector.close({})
    assert rounds.events == [("gone", "c")]
    take = rounds.open()
    rounds.answer(take, "a", "b")
    assert take.enough(["c"]), "later rounds do not wait"
    take.note_fetch("c")
    assert rounds.events == [("gone", "c"), ("back", "c")]


@pytest.mark.parametrize(("heard", "quorum"), [("abc", 2), ("", 2), ("ab", 3)])
def test_a_slow_site_one_without_heartbeats_and_one_that_is_needed_are_waited_for(
    heard: str, quorum: int, rounds: Rounds
) -> None:
    take, begun = rounds.open(quorum), rounds.now
    take.note_fetch("c")
    if quorum == 3:
        rounds.collector.attendance.heard("c")
    rounds.answer(take, "a", "b")
    rounds.during(3600, take, ["c"], heard)
    assert rounds.now == begun + 3600
    lost = ["c"] if quorum == 3 else []
    minutes = [2, 4, 8, 16, 26, 36, 46, 56]
    assert rounds.waited == [(["c"], 60 * after, lost) for after in minutes]


def test_a_line_that_is_cut_for_less_than_the_grace_costs_nothing(rounds: Rounds) -> None:
    take = rounds.open()
    rounds.collector.attendance.heard("c")
    rounds.answer(take, "a", "b")
    rounds.during(SILENT_AFTER + GRACE - 10, take, ["c"], "ab")
    rounds.during(600, take, ["c"], "abc")
    assert not take.enough(["c"])
    rounds.answer(take, "c")
    rounds.collector.close({})
    assert rounds.events == []


def test_lost_sites_are_named_before_anybody_has_answered(rounds: Rounds) -> None:
    take = rounds.open()
    rounds.collector.attendance.heard("c")
    rounds.during(240, take, ["a", "b", "c"], "ab")
    assert rounds.waited == [(["c"], WAIT, ["c"])]
