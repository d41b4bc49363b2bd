"""Faults of server and sites in a loop: hostile updates, drop-out, disks, and kills at any instant."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ledger import Found, rounds_lost
from poc import digest

import suture.core.files
import suture.federation.server.collector
import suture.protocol.packing
from between import Between
from killing import forked as start
from killing import killing
from suture.core.errors import FederationError
from suture.core.files import whole_lines
from suture.federation.loop import Loop, federate
from suture.federation.server.server import Server
from suture.federation.state_files import Rounds
from suture.learning.training import LocalTraining
from suture.methods.base import Method
from suture.methods.fedavg import FedAvg
from suture.methods.surgical import SurgicalAggregation
from suture.protocol.messages import Evaluation, TaskData, Update
from suture.protocol.packing import Packed, load, pack, unpack
from suture_papers.fedlsm.fedlsm import FedLSM

pytestmark = pytest.mark.complete

METHOD = SurgicalAggregation(local=LocalTraining(lr=1e-2, batch_size=8))
STEPS = LocalTraining(lr=1e-3, batch_size=8, iterations=2)

KNOWN: dict[str, Any] = {}
"""The hashes of models without a fault; every test has the same data."""

Change = Callable[[str, TaskData, Packed], Packed | None]


def lines(server: Server) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (server.record.folder / "history.jsonl").read_text().splitlines()]


def events(server: Server) -> int:
    """How many events a run has noted so far."""
    return len(whole_lines(server.record.folder / "events.jsonl"))


# Hostile updates


def first(update: Update, change: Callable[[torch.Tensor], torch.Tensor]) -> Packed:
    """The update with its first shared tensor changed."""
    name = next(iter(update.shared))
    return pack(replace(update, shared={**update.shared, name: change(update.shared[name])}))


def header(update: Update, **facts: Any) -> Packed:
    """The update with fields that no honest site can make."""
    packed = pack(update)
    return Packed(packed.tensors, {**packed.header, **facts})


def more(update: Update, name: str) -> Packed:
    """The update with a further tensor."""
    packed = pack(update)
    return Packed({**packed.tensors, name: torch.ones(1)}, packed.header)


def one(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Puts a value into one element."""

    def put(tensor: torch.Tensor) -> torch.Tensor:
        changed = tensor.clone()
        changed.view(-1)[-1] = value
        return changed

    return put


LIES: dict[str, tuple[Callable[[Update], Packed], str]] = {
    "NaN": (lambda u: first(u, one(float("nan"))), "finite"),
    "Inf": (lambda u: first(u, one(float("inf"))), "finite"),
    "wrong shape": (lambda u: first(u, lambda t: t.flatten()[:-1]), "shape"),
    "broadcastable shape": (lambda u: first(u, lambda t: t[:1]), "shape"),
    "broadcastable rows": (lambda u: pack(replace(u, head={k: t[:1] for k, t in u.head.items()})), "shape"),
    "wrong type": (lambda u: first(u, lambda t: t.double()), "torch.float64"),
    "extra tensor": (lambda u: more(u, "shared/more"), "more"),
    "extra group": (lambda u: more(u, "memory/more"), "memory"),
    "missing tensor": (lambda u: pack(replace(u, shared=dict(list(u.shared.items())[1:]))), "missing"),
    "no tensors": (lambda u: pack(replace(u, shared={}, head={})), "missing"),
    "oversize": (lambda u: first(u, lambda _: torch.zeros(4_000_000)), "shape"),
    "extra field": (lambda u: header(u, patients=["p1"]), "Update"),
    "unknown label": (lambda u: pack(replace(u, labels=("Hernia", *u.labels[1:]))), "'Hernia'"),
    "duplicate label": (lambda u: pack(replace(u, labels=(u.labels[0],) * len(u.labels))), "twice"),
    "look-alike label": (lambda u: header(u, labels=["Mass ", *u.labels[1:]]), "labels"),
    "other spelling": (lambda u: pack(replace(u, labels=("mass", *u.labels[1:]))), "'mass'"),
    "labels in another order": (lambda u: pack(replace(u, labels=u.labels[::-1])), "label"),
    "negative weight": (lambda u: header(u, weight=-1.0), "weight"),
    "huge weight": (lambda u: header(u, weight=1e30), "weight"),
    "NaN weight": (lambda u: header(u, weight=float("nan")), "weight"),
    "NaN weight of a class": (
        lambda u: pack(replace(u, class_weights=u.class_weights * float("nan"))),
        "class_weights",
    ),
    "negative weight of a class": (
        lambda u: pack(replace(u, class_weights=-u.class_weights)),
        "class_weights",
    ),
    "the largest floats": (lambda u: first(u, lambda t: torch.full_like(t, 3e38)), "100 times"),
    "a training loss of -1.8e308": (lambda u: header(u, train_loss=-1.7976931348623157e308), "train_loss"),
    "4 MiB of type": (lambda _: Packed({}, {"type": "\x1b[2K" * 1_000_000}), r"type '\x1b[2K"),
    "another round": (lambda u: pack(replace(u, round=u.round + 1)), "round"),
    "another kind": (lambda u: header(u, kind="gradient"), "kind"),
    "no update": (lambda _: Packed({}, {"type": "siteinfo"}), "SiteInfo"),
    "nonsense": (lambda _: Packed({"x": torch.ones(1)}, {"type": "pickle"}), "type"),
}


def trained(site: str, answer: Packed) -> Update | None:
    """The update of the site that lies, in a training round."""
    update = unpack(answer)
    return update if site == "alpha" and isinstance(update, Update) else None


def lying(make: Callable[[Update], Packed | None]) -> Change:
    """Puts something in the place of alpha's updates."""
    return lambda site, _, answer: make(update) if (update := trained(site, answer)) else answer


def run(tiny: Any, out: str, change: Change, method: Method = METHOD, rounds: int = 2) -> Server:
    federation = tiny(method, min_sites=2, selection="last", rounds=rounds)
    server: Server = federation.server(out)
    federate(server, Between(federation.sites(out), change))
    return server


def rejected(lied: Server, without: str, words: str) -> Found:
    """What a lie cost: all updates of alpha, which are rejected with a reason, and nothing else."""
    found = digest(lied.record.folder)
    assert found == without
    for line in lines(lied):
        assert line["sites"]["alpha"]["status"] == "rejected"
        assert words in line["sites"]["alpha"]["reason"]
    return Found(updates_lost=len(lines(lied)), model=found)


@pytest.mark.case("hostile")
@pytest.mark.parametrize("kind", LIES)
def test_a_hostile_update_is_rejected_whole(kind: str, attempt: int, tiny: Any, note: Any) -> None:
    make, words = LIES[kind]
    lied = run(tiny, "lied", lying(make), rounds=1)
    if "lost" not in KNOWN:
        KNOWN["lost"] = digest(run(tiny, "lost", lying(lambda _: None), rounds=1).record.folder)
    note(rejected(lied, KNOWN["lost"], words))


@pytest.mark.case("hostile")
@pytest.mark.parametrize(
    "method",
    [
        FedAvg(local=METHOD.local),
        FedAvg(local=METHOD.local, rows="owners"),
        FedLSM(local=STEPS, proxies="owners"),
    ],
    ids=["FedAvg", "FedAvg of owners", "FedLSM of owners"],
)
def test_a_huge_weight_of_a_class_does_not_take_its_row_over(
    method: Method, attempt: int, tiny: Any, note: Any
) -> None:
    """Where sites count with their numbers of images, a row counts with the same."""
    huge = lying(lambda update: pack(replace(update, class_weights=update.class_weights * 1e6)))
    lied, lost = run(tiny, "lied", huge, method), run(tiny, "lost", lying(lambda _: None), method)
    note(rejected(lied, digest(lost.record.folder), "class weight"))


@pytest.mark.case("hostile")
@pytest.mark.parametrize("kind", ["replay", "twice"])
def test_an_update_counts_in_its_round_and_once(kind: str, attempt: int, tiny: Any, note: Any) -> None:
    kept: list[Packed] = []

    def replay(site: str, task: TaskData, answer: Packed) -> Packed:
        kept.extend([answer] if trained(site, answer) else [])
        return kept[0] if trained(site, answer) else answer

    def after_the_first(site: str, task: TaskData, answer: Packed) -> Packed | None:
        return None if trained(site, answer) and task.round > 1 else answer

    def as_it_is(site: str, task: TaskData, answer: Packed) -> Packed:
        return answer

    class Twice(Between):
        """Sends every answer of alpha a second time, as another one."""

        def exchange(self, task: Any, payloads: Any, receive: Any) -> dict[str, str]:
            def both(site: str, answer: Packed) -> None:
                receive(site, answer)
                if update := trained(site, answer):
                    receive(site, first(update, lambda t: t + 1))

            return super().exchange(task, payloads, both)  # type: ignore[arg-type]

    if kind == "replay":
        lied, honest = run(tiny, "lied", replay), run(tiny, "honest", after_the_first)
        assert [line["sites"]["alpha"]["status"] for line in lines(lied)] == ["accepted", "rejected"]
        assert "round 1 instead of 2" in lines(lied)[1]["sites"]["alpha"]["reason"]
    else:
        federation = tiny(METHOD, min_sites=2, selection="last")
        lied, honest = federation.server("lied"), run(tiny, "honest", as_it_is)
        federate(lied, Twice(federation.sites("lied"), as_it_is))
    assert digest(lied.record.folder) == digest(honest.record.folder)
    note(Found(updates_lost=int(kind == "replay"), model=digest(lied.record.folder)))


# Drop-out

PAIRS = (("Mass", "Nodule"), ("Nodule", "Hernia"), ("Fibrosis", "Nodule", "Mass"))


@pytest.mark.case("drop-out")
@pytest.mark.parametrize("share", [0.1, 0.3])
def test_ten_sites_of_which_some_drop_out(share: float, attempt: int, tiny: Any, note: Any) -> None:
    sites = {f"site-{i:02d}": PAIRS[i % 3] for i in range(10)}
    federation = tiny(METHOD, sites, n=10, rounds=4, min_sites=4, max_failed_rounds=5)
    lost = 0

    def drop(site: str, task: TaskData, answer: Packed) -> Packed | None:
        nonlocal lost
        # Not the order of asking, but who and when: a second run loses the same answers.
        if task.task == "train" and random.Random(f"{attempt}{site}{task.round}").random() < share:
            lost += 1
            return None
        return answer

    models = []
    for out in ("one", "two"):
        server = federation.server(out)
        federate(server, Between(federation.sites(out), drop))
        missing = sum(f["status"] == "missing" for line in lines(server) for f in line["sites"].values())
        models.append(digest(server.record.folder))
    assert missing
    assert 2 * missing == lost
    assert models[0] == models[1]
    note(Found(updates_lost=missing, model=models[0]))


# Disks: the old model is intact, and somebody says what is wrong

ROUNDS = 4


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts small file systems of memory; only root may, so the test is skipped for others."""
    made: list[Path] = []

    def mount(folder: Path) -> Path:
        folder.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(folder)]
        if os.geteuid() or subprocess.run(command, check=False, capture_output=True).returncode:
            pytest.skip("may not mount a file system")
        made.append(folder)
        return folder

    yield mount
    for folder in made:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Takes all the space that is left."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(b"\0" * 65536):
            pass
    return path


def half(tiny: Any, out: str) -> tuple[Any, Server]:
    """A run that was stopped after half its rounds, and the whole federation."""
    begun = tiny(METHOD, rounds=ROUNDS // 2, selection="last")
    return tiny(METHOD, rounds=ROUNDS, selection="last"), begun.run(out)


def uninterrupted(tiny: Any) -> str:
    """The hash of the model of a run without a fault."""
    if "whole" not in KNOWN:
        KNOWN["whole"] = digest(tiny(METHOD, rounds=ROUNDS, selection="last").run("whole").record.folder)
    return str(KNOWN["whole"])


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
    volume = mounted(tmp_path / "runs" / ("cut" if where == "server" else "cut/sites/alpha"))
    federation, server = half(tiny, "cut")
    before = states(server.record.folder)
    filler = fill(volume) if harm == "full" else None
    if harm == "read only":
        remount(volume, "ro")
    reason = "disk_full" if harm == "full" else "read_only"
    says = "No space left|Read-only file system" if where == "server" else f"alpha: {reason}"
    try:
        sites = federation.sites("cut")
        with pytest.raises((OSError, FederationError), match=says):
            federate(federation.server("cut"), Loop(sites))
        assert states(server.record.folder) == before
    finally:
        if filler:
            filler.unlink()
        else:
            remount(volume, "rw")
    noted = events(server)
    federate(again := federation.server("cut"), Loop(federation.sites("cut")))
    assert digest(again.record.folder) == uninterrupted(tiny)
    # Where the server's own disk failed, no event says which round had begun.
    lost = rounds_lost(again.record.folder, noted) if where == "site" else None
    note(Found(rounds_lost=lost, model=digest(again.record.folder)))


def truncate(data: bytearray) -> None:
    del data[len(data) // 2 :]


def flip(data: bytearray) -> None:
    data[-len(data) // 3] ^= 8


def rot(path: Path, harm: Callable[[bytearray], None]) -> bytes:
    """Damages a file; returns what it then holds."""
    data = bytearray(path.read_bytes())
    harm(data)
    path.write_bytes(data)
    return bytes(data)


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
    data = rot(path, harm)
    best = folder / "state" / f"best-{ROUNDS // 2:06d}.safetensors"
    if where == "server" and best.exists():
        assert best.read_bytes() == data, "the best round is a link to the same file"
    before = events(server)
    with caplog.at_level(logging.WARNING):
        federate(again := federation.server("cut"), Loop(federation.sites("cut")))
    assert path.name in caplog.text or best.name in caplog.text
    assert [line["round"] for line in lines(again)] == list(range(1, ROUNDS + 1))
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

    def to(out: str, rounds: int) -> Server:
        federation = tiny(METHOD, rounds=rounds, selection="site_loss")
        federate(server := federation.server(out), Between(federation.sites(out), with_losses))
        return server

    whole, cut = to("whole", 8), to("cut", 7)
    assert whole.selected_round == cut.selected_round == 6
    rot(cut.states.path(7), flip)
    before = events(cut)
    again = to("cut", 8)
    assert again.selected_round == 6
    assert digest(again.record.folder) == digest(whole.record.folder)
    lost = rounds_lost(again.record.folder, before)
    assert lost == 1
    note(Found(rounds_lost=lost, model=digest(again.record.folder)))


# Kill -9 at any instant, within a save too

LIMITS = (0, 600_000, 2**27)
"""Bytes of updates in memory: none, those of one of three sites, all; the clean run has all."""


def forked(work: Callable[[], object], kill_after: float | None = None) -> int:
    """Does work in a process of its own; returns how it ended.

    Args:
        kill_after: seconds after which it is killed.
    """
    child = start(work)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def dying(work: Callable[[], object], step: int) -> Callable[[], object]:
    """Work that is killed at the n-th step of its saves: before or after a write, a sync, a rename."""

    def killed() -> None:
        counted = killing(step)
        suture.protocol.packing.save_file = counted(suture.protocol.packing.save_file)  # type: ignore[attr-defined]
        suture.core.files.os.fsync = counted(os.fsync)  # type: ignore[attr-defined]
        suture.core.files.os.replace = counted(os.replace)  # type: ignore[attr-defined]
        work()

    return killed


@pytest.mark.case("instants")
@pytest.mark.parametrize(
    "number", [*range(4), *(pytest.param(number, marks=pytest.mark.faults) for number in range(4, 20))]
)
def test_a_killed_federation_continues_to_the_same_bytes(
    number: int, tiny: Any, tmp_path: Path, note: Any
) -> None:
    federation = tiny(METHOD, rounds=4)
    if "clean" not in KNOWN:
        begun = time.monotonic()
        assert forked(lambda: federation.run("clean")) == 0
        KNOWN["clean"] = time.monotonic() - begun, digest(tmp_path / "runs" / "clean")
    seconds, clean = KNOWN["clean"]
    draw = random.Random(number)

    def work() -> object:
        suture.federation.server.collector.IN_MEMORY = LIMITS[number % 3]
        return federation.run("cut")

    if number % 2:
        code = forked(dying(work, draw.randrange(1, 120)))
    else:
        code = forked(work, kill_after=draw.uniform(0, seconds))
    assert code in (-signal.SIGKILL, 0)
    folder = tmp_path / "runs" / "cut"
    before = len(whole_lines(folder / "events.jsonl"))
    assert forked(lambda: federation.run("cut")) == 0
    lost = rounds_lost(folder, before)
    assert digest(folder) == clean
    assert lost <= 1
    note(Found(rounds_lost=lost, model=clean))
