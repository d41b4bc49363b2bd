"""Faults of a federation of processes with TLS: killed, stopped and cut off, in mid-round.

Minutes each; `make faults` runs them.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pytest
from ledger import Found, rounds_lost
from poc import PROXIED, Poc, digest, small_job, tree, until
from replay import absent, clean, replayed

from suture.execution.job import Job, with_settings
from suture_admin.recovery import resume

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]

QUORUM = ("min_sites=2", "round_timeout=30", "rounds=24", "max_failed_rounds=5")
MOST_ABSENCES, MOST_MODELS = 20, 64
STALL = 30.0
SLOW = 0.02
"""Seconds that a piece of 64 KiB takes on a slow line: 28 MB take 9 s."""

SOME, MODEL = 4 * 2**20, 27 * 10**6
"""Bytes that a site has sent when it is killed, and those of the model."""

MOST_SECONDS = 90.0
"""From the death of a server to the next commit, with the documented command."""


@pytest.fixture(scope="module")
def poc(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Poc]:
    """One federation for all cases; each finds it whole."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("faults")
        patch.setenv("HOME", str(folder))
        patch.setenv("NVFLARE_POC_WORKSPACE", str(folder / "poc"))
        federation = Poc(folder / "poc")
        try:
            federation.up()
            yield federation
        finally:
            federation.down()


@pytest.fixture(scope="module")
def hashes() -> dict[str, str]:
    """Hashes of clean runs, made once."""
    return {}


class Trial:
    """One job that something happens to."""

    def __init__(self, poc: Poc, name: str, job: Job) -> None:
        poc.heal()
        self.poc, self.job = poc, job
        self.name = f"{name}-{time.time_ns() // 10**6}"
        self.id = poc.submit(self.name, job)
        self.hit = 0.0
        self._before = self._events = 0

    def strike(self) -> None:
        """Notes the moment of the fault."""
        self.hit, self._before = time.monotonic(), self.poc.committed(self.name)
        self._events = len(self.poc.lines(self.name, "events.jsonl"))

    def kill_job_process(self, party: str) -> psutil.Process:
        """kill -9 of the process in which a party runs the job."""
        process = self.poc.job_process(party, self.id)
        assert process
        self.poc.kill(process)
        self.strike()
        return process

    def kill_site(self, site: str) -> None:
        """kill -9 of a site and all its processes."""
        for process in tree(self.poc.process(site)):
            self.poc.kill(process)
        self.strike()

    def since(self) -> float:
        return time.monotonic() - self.hit

    def recovered(self) -> float:
        """Seconds from the fault to the next commit; to the end, where the last one had been before."""
        if self._before == self.job.rounds:
            self.poc.finished(self.name)
        else:
            until(lambda: self.poc.committed(self.name) > self._before, 300, "the next commit")
        return self.since()

    def restarted(self, site: str, killed: psutil.Process) -> float:
        """Waits until a site has another job process; returns how many seconds that took."""
        return until(
            lambda: (other := self.poc.job_process(site, self.id)) and other.pid != killed.pid,
            30,
            "another process",
        )

    def resume(self) -> None:
        """The documented command."""
        self.id, _ = resume(self.poc.admin, self.name, self.poc.root / "runs" / self.name, "poc")

    def end(self, tmp_path: Path, hashes: dict[str, str], detect: float | None, recover: float) -> Found:
        """Waits for the end, and holds the model against the one that must have come out.

        A round is lost if it began and had to begin again after the fault. An update is lost if its site did
        not count in a committed round.
        """
        self.poc.finished(self.name)
        history = self.poc.lines(self.name, "history.jsonl")
        assert [line["round"] for line in history if line["status"] == "committed"] == [
            *range(1, self.job.rounds + 1)
        ]
        missing, found = absent(history), digest(self.poc.folder(self.name))
        if not missing:
            key = f"{self.job.rounds} {self.job.model}"
            hashes[key] = hashes.get(key) or digest(clean(self.poc, self.job, tmp_path / "clean"))
            assert found == hashes[key]
        else:
            assert len(missing) <= MOST_ABSENCES
            assert found in islice(replayed(self.poc, self.job, missing, tmp_path), MOST_MODELS)
        again = rounds_lost(self.poc.folder(self.name), self._events)
        return Found(len(missing), again, detect, recover, found)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param((), marks=pytest.mark.case("job process of a site")),
        pytest.param(("min_sites=2", "grace=60"), marks=pytest.mark.case("job process of a site, quorum")),
    ],
    ids=["all", "quorum"],
)
def test_a_sites_job_process_is_killed(
    settings: tuple[str, ...], attempt: int, poc: Poc, hashes: dict[str, str], tmp_path: Path, note: Any
) -> None:
    trial = Trial(poc, "job-process", small_job(*settings))
    poc.in_round(trial.name, 2)
    killed = trial.kill_job_process("harbor")
    detect = trial.restarted("harbor", killed)
    found = trial.end(tmp_path, hashes, detect, trial.recovered())
    assert found.updates_lost <= 1
    assert settings or found.rounds_lost == 0
    note(found)


@pytest.mark.case("job process of a site, short grace")
def test_a_site_killed_after_its_answer_is_back_in_the_next_round_but_one(
    attempt: int, poc: Poc, hashes: dict[str, str], tmp_path: Path, note: Any
) -> None:
    """Its restart takes as long as many of these rounds."""
    trial = Trial(poc, "grace", small_job("min_sites=2", "grace=1", "rounds=20", "epochs=2"))
    poc.in_round(trial.name, 3)
    until(lambda: "harbor" in poc.answered(trial.name), 60, "the answer of harbor")
    time.sleep(0.05)
    trial.kill_job_process("harbor")
    found = trial.end(tmp_path, hashes, None, trial.recovered())
    assert found.updates_lost <= 1
    note(found)


@pytest.mark.case("bell")
def test_a_site_is_killed_while_it_waits_for_the_bell(
    attempt: int, poc: Poc, hashes: dict[str, str], tmp_path: Path, note: Any
) -> None:
    """The round waits for a stopped site, and harbor, whose answer is in, for the bell of its next task."""
    trial = Trial(poc, "bell", small_job())
    poc.in_round(trial.name, 2)
    slow = poc.job_process("lakeside", trial.id)
    assert slow
    slow.suspend()
    try:
        until(lambda: "harbor" in poc.answered(trial.name), 60, "the answer of harbor")
        time.sleep(1)
        assert poc.answered(trial.name) <= {"harbor", "northfield"}
        detect = trial.restarted("harbor", trial.kill_job_process("harbor"))
    finally:
        slow.resume()
    found = trial.end(tmp_path, hashes, detect, trial.recovered())
    assert found.rounds_lost == 0
    note(found)


@pytest.mark.case("load")
def test_a_hundred_rounds_beside_other_work(
    attempt: int, poc: Poc, hashes: dict[str, str], tmp_path: Path, note: Any
) -> None:
    others = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))
    ]
    try:
        trial = Trial(poc, "load", small_job("rounds=100", "epochs=1"))
        poc.in_round(trial.name, 2)
        trial.strike()
        poc.finished(trial.name, 840)
    finally:
        for other in others:
            other.kill()
    found = trial.end(tmp_path, hashes, None, 0.0)
    assert found.updates_lost == found.rounds_lost == 0
    assert not poc.noted(trial.name, "gone")
    note(replace(found, recover=None))


@pytest.mark.case("sending")
def test_a_sites_job_process_is_killed_while_it_sends_tensors(
    attempt: int, poc: Poc, hashes: dict[str, str], tmp_path: Path, note: Any
) -> None:
    trial = Trial(
        poc,
        "sending",
        small_job("min_sites=2", "grace=60", "rounds=4", "model.hidden=2300", "model.projection=600"),
    )
    poc.in_round(trial.name, 2)
    before = poc.proxy.sent
    try:
        poc.proxy.delay = SLOW
        until(lambda: poc.proxy.sent - before > SOME, 120, "the transfer")
        killed = trial.kill_job_process(PROXIED)
        time.sleep(1)
        part = poc.proxy.sent - before
    finally:
        poc.proxy.delay = 0.0
    assert part < MODEL, "the whole answer had been sent"
    detect = trial.restarted(PROXIED, killed)
    found = trial.end(tmp_path, hashes, detect, trial.recovered())
    assert found.updates_lost <= 1
    assert not list(poc.root.rglob("ERRORLOG*")), "a site's log is at the server"
    note(found)


@pytest.mark.case("gone")
def test_a_site_that_is_gone_costs_two_deadlines_and_no_more(attempt: int, poc: Poc, note: Any) -> None:
    trial = Trial(poc, "gone", small_job(*QUORUM))
    poc.in_round(trial.name, 2)
    trial.kill_site("harbor")
    recover = trial.recovered()
    poc.finished(trial.name)
    history = poc.lines(trial.name, "history.jsonl")
    out = [line for line in history if line["sites"]["harbor"]["status"] != "accepted"]
    waited = [line["seconds"] for line in out if line["seconds"] >= trial.job.round_timeout]
    assert len(waited) <= 2
    assert len(out) >= 20
    assert all(line["seconds"] < trial.job.round_timeout / 2 for line in out[2:])
    assert poc.noted(trial.name, "gone") == ["harbor"]
    note(Found(len(out), 0, None, recover, digest(poc.folder(trial.name))))


@pytest.mark.case("site")
def test_a_whole_site_is_killed_and_comes_back(
    attempt: int, poc: Poc, hashes: dict[str, str], tmp_path: Path, note: Any
) -> None:
    trial = Trial(poc, "site", small_job(*QUORUM))
    poc.in_round(trial.name, 2)
    trial.kill_site("harbor")
    recover = trial.recovered()
    assert recover <= trial.job.round_timeout + 5
    poc.heal()
    trial.resume()
    before = poc.committed(trial.name)
    until(lambda: poc.committed(trial.name) > before, 240, "a round of the new job")
    found = trial.end(tmp_path, hashes, recover, recover)
    history = poc.lines(trial.name, "history.jsonl")
    last = max(line["round"] for line in history if line["sites"]["harbor"]["status"] != "accepted")
    assert all(line["sites"]["harbor"]["status"] == "accepted" for line in history if line["round"] > last)
    assert last < trial.job.rounds
    note(found)


@pytest.mark.parametrize(
    "random_instant",
    [
        pytest.param(False, marks=pytest.mark.case("job process of the server")),
        pytest.param(True, marks=pytest.mark.case("instants, processes")),
    ],
)
def test_the_servers_job_process_is_killed(
    random_instant: bool, attempt: int, poc: Poc, hashes: dict[str, str], tmp_path: Path, note: Any
) -> None:
    trial = Trial(poc, "server-job", small_job())
    draw = random.Random(attempt)
    poc.in_round(trial.name, draw.randrange(2, 6) if random_instant else 3)
    time.sleep(draw.uniform(0, 3) if random_instant else 0)
    trial.kill_job_process("server")
    until(lambda: poc.status(trial.id).startswith("FINISHED"), 60, "FLARE notices")
    detect = trial.since()
    trial.resume()
    recover = trial.recovered()
    assert recover <= MOST_SECONDS
    found = trial.end(tmp_path, hashes, detect, recover)
    assert found.rounds_lost <= 1
    note(found)


@pytest.mark.case("server")
def test_the_server_is_killed(
    attempt: int, poc: Poc, hashes: dict[str, str], tmp_path: Path, note: Any
) -> None:
    trial = Trial(poc, "server", small_job())
    poc.in_round(trial.name, 3)
    first, job = trial.id, poc.job_process("server", trial.id)
    assert job
    poc.kill(poc.process("server"))
    trial.strike()
    poc.heal()
    detect = trial.since()
    assert poc.status(first) == "FINISHED:ABNORMAL"
    trial.resume()
    recover = trial.recovered()
    assert recover <= MOST_SECONDS
    found = trial.end(tmp_path, hashes, detect, recover)
    assert not psutil.pid_exists(job.pid), "the job process of the killed server still lives"
    assert found.rounds_lost <= 1
    note(found)


@pytest.mark.case("stopped")
def test_a_stopped_site_is_left_out_and_comes_back(
    attempt: int, poc: Poc, hashes: dict[str, str], tmp_path: Path, note: Any
) -> None:
    deadline = 25
    settings = ("min_sites=2", f"round_timeout={deadline}", "rounds=24", "max_failed_rounds=6")
    trial = Trial(poc, "stopped", small_job(*settings))
    # The first deadline must not be one for starting.
    poc.in_round(trial.name, 2)
    stopped = tree(poc.process("harbor"))
    for process in stopped:
        os.kill(process.pid, signal.SIGSTOP)
    trial.strike()
    try:
        recover = trial.recovered()
        until(lambda: poc.noted(trial.name, "gone"), 2 * deadline, "the server gives harbor up")
        before = poc.committed(trial.name)
        until(lambda: poc.committed(trial.name) > before, deadline / 2, "a round that does not wait")
    finally:
        for process in stopped:
            os.kill(process.pid, signal.SIGCONT)
    until(lambda: poc.noted(trial.name, "back"), 30, "the site is back")
    found = trial.end(tmp_path, hashes, None, recover)
    assert recover <= deadline + 5
    assert poc.lines(trial.name, "history.jsonl")[-1]["sites"]["harbor"]["status"] == "accepted"
    note(found)


@pytest.mark.case("network")
def test_a_bad_network_costs_time_and_no_update(
    attempt: int, poc: Poc, hashes: dict[str, str], tmp_path: Path, note: Any
) -> None:
    # So many that the job still runs when the line is held up.
    trial = Trial(poc, "network", with_settings(small_job(), ["rounds=16"]))
    poc.in_round(trial.name, 2)
    trial.strike()
    assert poc.proxy.connections, f"{PROXIED} does not go through the proxy"
    try:
        poc.proxy.delay = 0.2
        cut = []
        for _ in range(5):
            time.sleep(2)
            cut.append(poc.proxy.reset())
        assert cut[0], "there was no connection to cut"
        recover = trial.recovered()
        assert poc.committed(trial.name) < trial.job.rounds, "the job had ended before the line was held up"
        poc.proxy.stall(STALL)
        stalled = time.monotonic()
        found = trial.end(tmp_path, hashes, None, recover)
        assert poc.proxy.held, "nothing was held up"
        assert time.monotonic() - stalled >= STALL
    finally:
        poc.proxy.delay = 0.0
        poc.proxy.stall(0)
    history = poc.lines(trial.name, "history.jsonl")
    assert all(list(line["sites"]) == poc.sites for line in history)
    assert found.updates_lost == 0
    note(found)
