"""Events cross from the server to the run folder here: in order, each once, none of an earlier job."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import suture_admin.remote as remote
from own_clock import own_clock
from suture.flare.controller import EventFeed
from suture.flare.kit import Kit
from suture_admin.remote import Tail


def events(n: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"event": "round", "round": i} for i in range(start, n)]


def here(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def test_a_teller_tells_the_end_of_this_job(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text("".join(json.dumps(e) + "\n" for e in events(3)))
    teller = EventFeed(path)
    assert teller.recent() == {"first": 3, "events": [], "begin": None}
    with path.open("a") as file:
        file.write('{"event": "begin"}\n{"event": "rou')
    assert teller.recent() == {"first": 3, "events": [{"event": "begin"}], "begin": {"event": "begin"}}
    with path.open("a") as file:
        file.write('nd"}\n' + "".join(json.dumps(e) + "\n" for e in events(250)))
    told = teller.recent()
    assert len(told["events"]) == 100
    assert told["first"] == 3 + 2 + 150
    assert told["begin"] == {"event": "begin"}, "it says how many rounds there are"
    assert told["events"][-1]["round"] == 249


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8),
)
def test_each_event_once_and_in_order(spans: list[tuple[int, int]]) -> None:
    """Answers overlap or leave gaps, as polls and the server's window make them."""
    import tempfile

    everything = events(31)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tail = Tail(folder)
        for low, high in sorted((min(s), max(s)) for s in spans):
            tail.take(low, everything[low:high])
        tail.finish(everything)
        got = [e["round"] for e in here(folder)]
    assert got == sorted(set(got))
    if any(a != b for a, b in spans):
        assert got[-1] == 30


def test_a_run_that_was_never_heard_of_begins_at_its_beginning(tmp_path: Path) -> None:
    tail = Tail(tmp_path)
    tail.note("job 1")
    tail.note("job 1")
    tail.finish([{"event": "begin", "n": 1}, *events(2), {"event": "begin", "n": 2}, *events(1)])
    assert [e["event"] for e in here(tmp_path)] == ["note", "begin", "round"]
    assert here(tmp_path)[1]["n"] == 2


class Polled:
    """A server's answers to the polls of a run.

    Args:
        clock: seconds since its begin.
        ends: seconds that it lasts.
        rate: events a second.
    """

    def __init__(self, clock: list[float], ends: float, rate: float) -> None:
        self.clock, self.ends, self.rate = clock, ends, rate
        self.commands = 0

    def meta(self, job_id: str) -> dict[str, Any]:
        self.commands += 1
        return {"status": "FINISHED:COMPLETED" if self.clock[0] > self.ends else "RUNNING"}

    def recent(self, job_id: str) -> dict[str, Any]:
        self.commands += 1
        if self.clock[0] > self.ends:
            return {}
        number = int(self.clock[0] * self.rate)
        first = max(0, number - 100)
        return {"first": first, "events": events(number, first)}


@pytest.mark.parametrize(("rate", "hourly"), [(0.01, 500), (0.5, 500), (60.0, 3700)])
def test_a_run_that_is_followed_for_a_day_writes_few_lines_into_the_servers_audit(
    rate: float, hourly: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FLARE writes a line for each command and never begins the file anew; it was two a second."""
    clock = [0.0]
    server = Polled(clock, 86_400 if rate < 1 else 7_200, rate)
    moved = {"monotonic": lambda: clock[0], "sleep": lambda s: clock.__setitem__(0, clock[0] + s)}
    own_clock(monkeypatch, "suture_admin.remote", **moved)
    monkeypatch.setattr("suture_admin.session.connect", lambda _: nullcontext(server))
    monkeypatch.setattr(remote, "following", lambda *_: nullcontext())
    monkeypatch.setattr(remote, "download", lambda *_: None)
    gaps: list[int] = []

    def take(tail: Tail, first: int, new: list[dict[str, Any]]) -> None:
        gaps.extend([first] if first > tail.taken else [])
        tail._next = max(tail.taken, first + len(new))  # without its file

    monkeypatch.setattr(Tail, "take", take)
    kit = Kit(Path("x"), "admin", "a", "trial", "localhost", 8002)
    remote.follow("demo", "poc", kit, tmp_path, "j")
    assert server.commands < hourly * server.ends / 3600
    assert not gaps
    assert clock[0] - server.ends < 20
