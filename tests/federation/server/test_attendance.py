"""Which sites an exchange waits for; time is the test's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from own_clock import own_clock
from suture.federation.server.collector import (
    GRACE,
    LATE,
    MOST_LATE,
    PATIENCE,
    SILENT,
    WAIT,
    Receiver,
    UpdateCollector,
)
from suture.protocol.check import AllowedReply
from suture.protocol.egress import Egress
from suture.protocol.messages import Evaluation, Metrics, TaskData, Update, ones
from suture.protocol.packing import pack

SITES = ("a", "b", "c")


EGRESS = Egress({"w": ((2,), "torch.float32")}, {})


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
        assert not self.after(PATIENCE).enough(["c"]), "c was there until now"
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
    late = rounds.after(PATIENCE)
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
        rounds.after(0.6 * PATIENCE, grace=0.0)
        rounds.collector.close({})
    assert rounds.events == [("gone", "c")]


@pytest.mark.parametrize("grace", [0.0, 1.0])
def test_a_short_grace_period_waits_for_a_site_whose_process_is_restarted(
    grace: float, rounds: Rounds
) -> None:
    """Its next process needs ten seconds; rounds of one second left it out eight times."""
    take = rounds.after(0.9 * PATIENCE, grace=grace)
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
    assert rounds.after(PATIENCE, grace=1.0).enough(["c"])
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
        rounds.after(PATIENCE, *SITES, grace=1.0)
        rounds.collector.close({})
    assert not rounds.after(PATIENCE - 1, grace=1.0).enough(["c"])


def test_a_site_lost_in_its_task_costs_one_grace_that_begins_with_the_loss(rounds: Rounds) -> None:
    """The whole site is killed; the round stayed open until its timeout, without a word."""
    take, begun = rounds.open(), rounds.now
    for site in SITES:
        take.note_fetch(site)
    rounds.during(600, take, ["a", "b", "c"], "abc")
    lost = rounds.now
    rounds.answer(take, "a", "b")
    rounds.during(3600, take, ["c"], "ab")
    assert rounds.now == lost + SILENT + GRACE
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
    rounds.during(SILENT + GRACE - 10, take, ["c"], "ab")
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
