"""A federation whose weights travel in 16 or 8 bits: what each party holds, bytes, noise, and continuing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from one_step import equal
from rounds import configured, conformant
from suture.core.errors import ConfigError
from suture.federation.loop import Loop, federate
from suture.federation.server.state import check_unchanged, fixed_settings
from suture.learning.training import LocalTraining
from suture.methods.surgical import SurgicalAggregation
from suture.models import ModelSpec
from suture.protocol.messages import Update
from suture.protocol.packing import Packed, Transport, digest, narrow, pack, unpack
from suture_synthetic.trial import Trial
from world import refused

SMALL = ModelSpec("cnn", size=16)


def trial(transport: Transport = "float16", **more: Any) -> Trial:
    return Trial(conformant("surgical"), SMALL, "multilabel", transport=transport, **more)


class Watched(Loop):
    """The loop, keeping what travels."""

    def __init__(self, sites: Mapping[str, Any]) -> None:
        super().__init__(sites)
        self.down: list[tuple[str, Packed]] = []
        self.up: list[tuple[str, Packed]] = []

    def exchange(self, task: Any, payloads: Mapping[str, Packed], receive: Any) -> dict[str, str]:
        def keep(site: str, packed: Packed) -> None:
            self.up.append((site, packed))
            receive(site, packed)

        self.down += payloads.items()
        return super().exchange(task, payloads, keep)


@pytest.mark.complete
def test_a_round_travels_in_halves_and_an_evaluation_in_full() -> None:
    with trial(rounds=2) as run:
        loop = Watched(run.sites)
        federate(run.server, loop)
        of_task: dict[str, set[torch.dtype]] = {"handshake": set(), "train": set(), "evaluate": set()}
        for _, packed in loop.down:
            groups = (t for name, t in packed.tensors.items() if name.startswith(("shared/", "head/")))
            of_task[packed.header["task"]] |= {t.dtype for t in groups if t.is_floating_point()}
        assert of_task == {"handshake": set(), "train": {torch.float16}, "evaluate": {torch.float32}}
        for line in run.history():
            up = [packed.nbytes for _, packed in loop.up if packed.header.get("round") == line["round"]]
            assert line["bytes_up"] == sum(up[:3])
        assert {t.dtype for t in run.server.model.shared.values() if t.is_floating_point()} == {torch.float32}


def test_sites_that_train_nothing_leave_the_servers_model_as_it_is_to_the_bit() -> None:
    idle = SurgicalAggregation(local=LocalTraining(epochs=0), batch_norm="frozen")
    with Trial(idle, SMALL, "multilabel", rounds=3, transport="float16") as run:
        run.payload("alpha")
        begun = {name: t.clone() for name, t in {**run.server.model.shared, **run.server.model.head}.items()}
        assert any(not torch.equal(narrow(t, "float16").float(), t) for t in begun.values())
        federate(run.server, Loop(run.sites))
        after = {**run.server.model.shared, **run.server.model.head}
        assert all(torch.equal(after[name], t) for name, t in begun.items())


def test_the_ledger_has_the_digest_of_the_halves_and_the_same_task_gets_the_same_bytes() -> None:
    with trial() as run:
        one, two = (unpack(run.answer("beta").packed) for _ in range(2))
        assert isinstance(one, Update)
        assert {t.dtype for t in one.shared.values() if t.is_floating_point()} == {torch.float16}
        assert digest(pack(one)) == digest(pack(two))
        kept = replace(one, ledger=None)
        assert digest(pack(kept)) == run.sites["beta"].releases.ledger.releases()[-1].answer


@pytest.mark.complete
def test_a_run_that_stops_in_between_ends_with_the_same_bytes() -> None:
    with trial(rounds=3) as whole, trial(rounds=3) as parted:
        whole.run()
        loop, receive = Loop(parted.sites), parted.server.receiver
        parted.server.begin(loop.exchange("handshake", parted.server.handshake(loop.sites), receive()))
        parted.server.close_round(loop.exchange("train", parted.server.assign(), receive()))
        loop.close()
        again = type(parted.server)(parted.plan, parted.server.schedule, parted.folder / "run", None)
        federate(again, loop)
        assert equal(whole.server.model.shared, again.model.shared)
        assert whole.metrics() == parted.metrics()
        full = replace(parted.plan, transport="float32")
        with refused("transport", "float16", by=ConfigError):  # it continues with its own alone
            check_unchanged(fixed_settings(parted.plan), fixed_settings(full), "run")


@pytest.mark.parametrize("transport", ["float16", "int8"])
def test_noise_is_drawn_before_the_rounding(transport: Transport) -> None:
    with trial(transport) as run:
        run.sites["alpha"] = configured(run.sites["alpha"], privacy={"clip": 1e-3, "noise": 0.0})
        change, received = run.update("alpha"), run.payload("alpha")
        base, sent = {**received.shared, **received.head}, {**change.shared, **change.head}
        moved = [(sent[n] - t).double().flatten() for n, t in base.items() if t.is_floating_point()]
        # Of 16 bits the rounding adds at most 2^-11 of each number, or 2^-25 to it.
        rest = 2**-25 * sum(t.numel() for t in moved) ** 0.5
        norm = torch.cat(moved).norm().item()
        assert 0.9e-3 < norm < (1.1e-3 if transport == "int8" else 1e-3 * (1 + 2**-11) + 2 * rest)


WORK = ("train", "update")


@pytest.mark.complete
def test_eight_bits_travel_both_ways_and_the_run_repeats_and_learns() -> None:
    with trial("int8", rounds=3) as run, trial("int8", rounds=3) as again, trial("float32", rounds=3) as full:
        loop = Watched(run.sites)
        federate(run.server, loop)
        again.run()
        full.run()
        trained = [p for _, p in (*loop.down, *loop.up) if p.header.get("task", p.header["type"]) in WORK]
        kinds = {t.dtype for p in trained for n, t in p.tensors.items() if n.endswith("conv.weight")}
        assert kinds <= {torch.int8}
        assert any(t.dtype == torch.int8 for p in trained for t in p.tensors.values())
        vectors = [t for p in trained for n, t in p.tensors.items() if n.endswith((".bias", ".running_var"))]
        assert {t.dtype for t in vectors} == {torch.float16}
        for name, tensor in run.server.model.shared.items():
            assert torch.equal(tensor, again.server.model.shared[name])
            assert tensor.dtype == full.server.model.shared[name].dtype
        one, two = (trial.history()[-1]["validation"]["loss"] for trial in (run, full))
        assert abs(one - two) < 0.02
        assert run.history()[-1]["bytes_up"] < 0.5 * full.history()[-1]["bytes_up"]
