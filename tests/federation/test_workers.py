"""Sites in processes of their own: the same bytes, and what a killed process costs."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from small_job import SMALL
from suture.core.errors import ConfigError, FederationError
from suture.execution.run import run_job
from suture.federation.site.releases import SiteAnswer
from suture.federation.workers import Workers, balanced_shares
from suture.protocol.messages import Abstain, TaskData, TaskName
from suture.protocol.packing import Packed, pack, unpack
from world import refused

TASK = pack(TaskData("handshake"))


@dataclass(frozen=True)
class OddSite:
    """A site that does what its name says."""

    name: str

    def answer(self, task: TaskData) -> SiteAnswer:
        if self.name == "fails":
            raise ZeroDivisionError("by its own code")
        if self.name == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        logging.getLogger("odd").warning("%s was asked", self.name)
        return SiteAnswer(pack(Abstain("data_fault", self.name)))


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    images = {"fails": 1, "killed": 2, "quiet": 3}
    openers: Mapping[str, Any] = {name: partial(OddSite, name) for name in images}
    made = Workers(4)
    made.open(openers, images, dict.fromkeys(images, "cpu"), tmp_path / "messages")
    everything = psutil.Process().children(recursive=True)
    assert len(spawned()) == 3
    yield made
    made.close()
    assert not any(_sites(process) for process in everything)
    assert not (tmp_path / "messages").exists()


def spawned() -> list[psutil.Process]:
    """The processes of sites that this one's server has forked."""
    servers = [p for p in psutil.Process().children() if "spawn_main" in " ".join(p.cmdline())]
    return [process for server in servers for process in server.children()]


def _sites(process: psutil.Process) -> bool:
    """Whether a process is one of sites, or their server, and still runs."""
    try:
        return "spawn_main" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


@pytest.mark.complete
def test_what_a_site_logs_and_how_it_fails_reaches_the_server(
    workers: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    received: dict[str, Any] = {}

    def ask(site: str) -> None:
        workers.exchange("handshake", {site: TASK}, lambda name, packed: received.update({name: packed}))  # type: ignore[arg-type]

    assert workers.sites == ["fails", "killed", "quiet"]
    ask("quiet")
    assert unpack(received["quiet"]) == Abstain("data_fault", "quiet")
    assert [record.getMessage() for record in caplog.records if record.name == "odd"] == ["quiet was asked"]
    with refused("fails", "ZeroDivisionError", "by its own code", by=FederationError):
        ask("fails")
    with refused("killed", "--workers", by=FederationError):
        ask("killed")
    assert list(received) == ["quiet"]


@pytest.mark.complete
def test_a_killed_process_costs_no_committed_round_and_no_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process is killed before round 2; the run is then continued with two others."""
    exchange, asked, folder = Workers.exchange, [], tmp_path / "whole"

    def killing(self: Workers, task: TaskName, payloads: Mapping[str, Packed], receive: Any) -> Any:
        asked.append(task)
        if len(asked) == 3:
            min(spawned(), key=lambda process: process.pid).kill()
        return exchange(self, task, payloads, receive)

    def results() -> list[bytes]:
        return [(folder / name).read_bytes() for name in ("metrics.json", "model/model.safetensors")]

    monkeypatch.setattr(Workers, "exchange", killing)
    with refused("killed", by=FederationError):
        run_job(SMALL, "local", folder, workers=2)
    assert asked == ["handshake", "train", "train"]
    assert not spawned()
    assert sorted(path.name[6:12] for path in (folder / "state").glob("round-*")) == ["000000", "000001"]
    run_job(SMALL, "local", folder, workers=2, resume=True)
    assert asked[3:] == ["handshake", "train", "evaluate", "evaluate"]
    parallel = results()
    run_job(SMALL, "local", folder, overwrite=True)
    assert results() == parallel
    assert json.loads((folder / "run.json").read_text())["status"] == "finished"


def test_images_are_divided_evenly_and_two_gpus_compute_at_a_time() -> None:
    images = {"a": 1, "b": 5, "c": 4, "d": 2, "e": 0}
    assert balanced_shares(images, 2, {}) == [["b", "a", "e"], ["c", "d"]]
    assert balanced_shares(images, 9, {}) == [["b"], ["c"], ["d"], ["a"], ["e"]]
    assert balanced_shares(images, 1, {}) == [["b", "c", "d", "a", "e"]]
    devices = {"a": "cuda:0", "b": "cuda:1", "c": "cuda:0", "d": "cuda:1"}
    images = {"a": 9, "b": 1, "c": 8, "d": 1}
    assert balanced_shares(images, 2, devices) == [["a", "c"], ["b", "d"]]
    assert balanced_shares(images, 3, devices) == [["a"], ["b", "d"], ["c"]]


@given(
    st.dictionaries(st.text("abcdefgh", min_size=1, max_size=2), st.integers(0, 9), min_size=1),
    st.integers(1, 6),
    st.integers(1, 4),
)
def test_a_process_has_sites_of_one_device_where_processes_suffice(
    images: dict[str, int], processes: int, gpus: int
) -> None:
    devices = {name: f"cuda:{i % gpus}" for i, name in enumerate(images)}
    shares = balanced_shares(images, processes, devices)
    assert sorted(name for share in shares for name in share) == sorted(images)
    assert all(shares)
    assert len(shares) <= processes
    if processes >= gpus:
        assert all(len({devices[name] for name in share}) == 1 for share in shares)


def test_a_method_that_other_processes_cannot_load_is_refused(tmp_path: Path) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Mine(type(SMALL.method)):  # type: ignore[misc]
        pass

    with refused("Mine", by=ConfigError):
        run_job(replace(SMALL, method=Mine()), "local", tmp_path / "r", workers=2)
    assert not list(tmp_path.iterdir())
