"""Disks that are full, read-only or rotten: the old model is intact, and somebody says what is wrong."""

from __future__ import annotations

import json
import logging
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ledger import Found, rounds_lost
from poc import digest

from between import Between
from suture.core.errors import FederationError
from suture.core.files import whole_lines
from suture.federation.loop import Loop, federate
from suture.federation.server.server import Server
from suture.federation.state_files import Rounds
from suture.learning.training import LocalTraining
from suture.methods.surgical import SurgicalAggregation
from suture.protocol.messages import Evaluation, TaskData, Update
from suture.protocol.packing import Packed, load, pack, unpack

pytestmark = pytest.mark.complete


METHOD = SurgicalAggregation(local=LocalTraining(lr=1e-2, batch_size=8))
ROUNDS = 4


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts small file systems of memory; only root may, so the test is skipped for others."""
    made: list[Path] = []

    def mount(name: str, options: str) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        if os.geteuid() or subprocess.run(command, check=False, capture_output=True).returncode:
            pytest.skip("may not mount a file system")
        made.append(folder)
        return folder

    yield mount
    for folder in made:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def half(tiny: Any, out: str) -> tuple[Any, Server]:
    """A run that was stopped after half its rounds, and the whole federation."""
    federation = tiny(METHOD, rounds=ROUNDS, selection="last")
    begun = tiny(METHOD, rounds=ROUNDS // 2, selection="last")
    return federation, begun.run(out)


WHOLE: list[str] = []


def uninterrupted(tiny: Any) -> str:
    """The hash of the model of a run without a fault; every test has the same data."""
    if not WHOLE:
        WHOLE.append(digest(tiny(METHOD, rounds=ROUNDS, selection="last").run("whole").record.folder))
    return WHOLE[0]


def fill(folder: Path) -> Path:
    """Takes all the space that is left."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(b"\0" * 65536):
            pass
    return path


def remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)


def events(server: Server) -> int:
    """How many events a run has noted so far."""
    return len(whole_lines(server.record.folder / "events.jsonl"))


def states(folder: Path) -> dict[str, bytes]:
    """The committed states, whole."""
    return {path.name: path.read_bytes() for path in sorted((folder / "state").glob("*.safetensors"))}


@pytest.mark.parametrize("harm", ["full", "read only"])
@pytest.mark.parametrize(("where", "in_memory"), [("server", 2**27), ("server", 0), ("site", 2**27)])
@pytest.mark.case("disk full")
def test_the_model_is_intact_and_the_run_continues(
    harm: str,
    where: str,
    in_memory: int,
    attempt: int,
    tiny: Any,
    mounted: Any,
    note: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("suture.federation.server.collector.IN_MEMORY", in_memory)
    place = tmp_path / "runs" / ("cut" if where == "server" else "cut/sites/alpha")
    volume = mounted(f"runs/{place.relative_to(tmp_path / 'runs')}", "size=48m")
    federation, server = half(tiny, "cut")
    before = states(server.record.folder)
    filler = fill(volume) if harm == "full" else None
    if harm == "read only":
        remount(volume, "ro")
    try:
        sites = federation.sites("cut")
        if where == "server":
            with pytest.raises((OSError, FederationError), match=r"No space left|Read-only file system"):
                federate(federation.server("cut"), Loop(sites))
        else:
            reason = "disk_full" if harm == "full" else "read_only"
            with pytest.raises(FederationError, match=f"alpha: {reason}"):
                federate(federation.server("cut"), Loop(sites))
        assert states(server.record.folder) == before
    finally:
        if filler:
            filler.unlink()
        else:
            remount(volume, "rw")
    before = events(server)
    federate(again := federation.server("cut"), Loop(federation.sites("cut")))
    assert digest(again.record.folder) == uninterrupted(tiny)
    # Where the server's own disk failed, no event says which round had begun.
    lost = rounds_lost(again.record.folder, before) if where == "site" else None
    note(Found(rounds_lost=lost, model=digest(again.record.folder)))


def truncate(data: bytearray) -> None:
    del data[len(data) // 2 :]


def flip(data: bytearray) -> None:
    data[-len(data) // 3] ^= 8


@pytest.mark.parametrize("harm", [truncate, flip])
@pytest.mark.parametrize("where", ["server", "site"])
@pytest.mark.case("corrupt")
def test_a_corrupt_state_costs_a_round_and_no_byte(
    harm: Callable[[bytearray], None],
    where: str,
    attempt: int,
    tiny: Any,
    note: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    federation, server = half(tiny, "cut")
    folder = server.record.folder
    rounds = Rounds(folder / "state" if where == "server" else folder / "sites" / "alpha")
    path = rounds.path(ROUNDS // 2)
    data = bytearray(path.read_bytes())
    harm(data)
    path.write_bytes(bytes(data))
    best = folder / "state" / f"best-{ROUNDS // 2:06d}.safetensors"
    if where == "server" and best.exists():
        assert best.read_bytes() == bytes(data), "the best round is a link to the same file"
    before = events(server)
    with caplog.at_level(logging.WARNING):
        federate(again := federation.server("cut"), Loop(federation.sites("cut")))
    assert "the previous round" in caplog.text
    assert path.name in caplog.text or best.name in caplog.text
    line = [json.loads(text)["round"] for text in (folder / "history.jsonl").read_text().splitlines()]
    assert line == list(range(1, ROUNDS + 1))
    if where == "server":
        assert digest(again.record.folder) == uninterrupted(tiny)
    assert load(again.states.path(ROUNDS)).tensors
    lost = rounds_lost(folder, before)
    assert lost == int(where == "server")
    note(Found(rounds_lost=lost, model=digest(again.record.folder)))


@pytest.mark.case("corrupt")
def test_falling_back_finds_the_best_round_of_that_time(attempt: int, tiny: Any, note: Any) -> None:
    """Round 2 is the best until round 7 is committed; then 6 is, and round 7 rots."""
    losses = {1: 0.9, 2: 0.5, 3: 0.8, 4: 0.8, 5: 0.8, 6: 0.4, 7: 0.7, 8: 0.7}

    def with_losses(site: str, task: TaskData, answer: Packed) -> Packed:
        reply = unpack(answer)
        if not isinstance(reply, (Update, Evaluation)) or not reply.metrics or task.split == "test":
            return answer
        loss = losses.get(reply.metrics.round, 1.0)
        return pack(replace(reply, metrics=replace(reply.metrics, loss=loss)))

    def run(out: str, rounds: int) -> Server:
        federation = tiny(METHOD, rounds=rounds, selection="site_loss")
        federate(server := federation.server(out), Between(federation.sites(out), with_losses))
        return server

    whole, cut = run("whole", 8), run("cut", 7)
    assert whole.selected_round == cut.selected_round == 6
    path = cut.states.path(7)
    data = bytearray(path.read_bytes())
    flip(data)
    path.write_bytes(bytes(data))
    before = events(cut)
    again = run("cut", 8)
    assert again.selected_round == 6
    assert digest(again.record.folder) == digest(whole.record.folder)
    lost = rounds_lost(again.record.folder, before)
    assert lost == 1
    note(Found(rounds_lost=lost, model=digest(again.record.folder)))
