"""An update out of all proportion is rejected: by the round's median, and by the received model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from between import Between
from rounds import conformant
from suture.federation.loop import federate
from suture.federation.server.norm_bound import Measure, Norms, too_large
from suture.federation.server.server import Server
from suture.learning.training import LocalTraining
from suture.methods.surgical import SurgicalAggregation
from suture.protocol.egress import Egress
from suture.protocol.messages import Payload, Update, ones
from suture.protocol.packing import Packed, pack, unpack

METHOD = SurgicalAggregation(local=LocalTraining(lr=1e-2, batch_size=8))


def test_norms_by_hand() -> None:
    received = Payload("train", shared={"w": torch.tensor([3.0, 4.0])}, head={"b": torch.tensor([0.0])})
    update = Update(1, (), {"w": torch.tensor([3.0, 6.0])}, {"b": torch.tensor([1.0])}, ones(()))
    egress = Egress({}, {})
    assert Measure()(update, received, egress) == Norms(pytest.approx(5**0.5), 5.0)
    gradient = replace(update, kind="gradient")
    assert Measure()(gradient, received, egress) == Norms(pytest.approx(46**0.5), 5.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_of_several_blocks_leave_what_they_measure(dtype: torch.dtype) -> None:
    n = 2 * 2**15 + 3
    received = Payload("train", shared={"w": torch.ones(n, dtype=dtype)})
    update = Update(1, (), {"w": torch.full((n,), 3.0, dtype=dtype)}, {}, ones(()))
    found = Measure()(update, received, Egress({}, {}))
    assert (found.update, found.model) == (pytest.approx(2 * n**0.5), pytest.approx(n**0.5))
    assert (update.shared["w"] == 3).all()
    assert (received.shared["w"] == 1).all()


def test_the_largest_floats_have_a_norm() -> None:
    received = Payload("train", shared={"w": torch.full((4,), 3e38)})
    update = Update(1, (), {"w": torch.full((4,), -3e38)}, {}, ones(()))
    assert Measure()(update, received, Egress({}, {})).update == pytest.approx(1.2e39)


def test_limits_by_hand() -> None:
    norms = {"a": Norms(1.0, 10.0), "b": Norms(2.0, 10.0), "c": Norms(21.0, 10.0)}
    assert too_large(norms, 10.5) == {}
    assert list(too_large(norms, 10.0)) == ["c"]
    assert "more than 10 times the round's median, 2 " in too_large(norms, 10.0)["c"]
    assert too_large(norms, None) == {}
    two = {"a": Norms(1.0, 10.0), "b": Norms(101.0, 10.0)}
    assert list(too_large(two, 10.0)) == ["b"]
    assert "of the received model" in too_large(two, 10.0)["b"]
    assert too_large({"a": Norms(100.0, 10.0), "b": Norms(1.0, 10.0)}, 10.0) == {}
    assert too_large(dict.fromkeys("abc", Norms(0.0, 0.0)), 10.0) == {}


def lied(tiny: Any, out: str, method: Any, factor: float | None, **schedule: Any) -> Server:
    """A federation in which alpha scales its change; None loses its updates."""
    federation = tiny(method, **{"min_sites": 2, "selection": "last", **schedule})

    def lie(site: str, task: Payload, answer: Packed) -> Packed | None:
        update = unpack(answer)
        if site != "alpha" or not isinstance(update, Update):
            return answer
        if factor is None:
            return None
        base = task.shared if update.kind == "weights" else {}
        scaled = {k: (t - base.get(k, 0)) * factor + base.get(k, 0) for k, t in update.shared.items()}
        return pack(replace(update, shared=scaled))

    server = federation.server(out)
    federate(server, Between(federation.sites(out), lie))
    return server


def model(server: Server) -> bytes:
    return (server.record.folder / "model" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("name", ["surgical", "fedavg", "metafl"])
def test_an_update_a_thousand_times_too_large_costs_itself_alone(name: str, tiny: Any) -> None:
    """Of methods that send weights, and of those that send gradients."""
    servers = [lied(tiny, out, conformant(name), x) for out, x in (("lied", 1e3), ("lost", None))]
    assert model(servers[0]) == model(servers[1])
    events = (servers[0].record.folder / "events.jsonl").read_text()
    assert events.count("times the round's median") == 2


def test_the_job_sets_the_bound(tiny: Any) -> None:
    honest = lied(tiny, "honest", METHOD, 1.0, rounds=1)
    assert model(honest) == model(lied(tiny, "unbounded", METHOD, 1.0, rounds=1, max_update=None))
    assert model(honest) != model(lied(tiny, "other", METHOD, 1e3, rounds=1, max_update=None))


def test_what_is_too_large_does_not_end_the_wait_for_others(tiny: Any) -> None:
    """With a grace period the exchange would otherwise end early, and then lack an update."""
    federation = tiny(METHOD, min_sites=2, grace=0.0)
    server, sites = federation.server(), federation.sites()
    server.begin(exchange(server, sites, server.handshake(list(sites)), {}))
    packed = server.assign()
    receive = server.receiver()
    for site, factor in (("beta", 1.0), ("alpha", 1e30)):
        task = unpack(packed[site])
        assert isinstance(task, Payload)
        update = sites[site].answer(task)
        assert isinstance(update, Update)
        receive(site, pack(replace(update, shared={k: t * factor for k, t in update.shared.items()})))
    assert not receive.enough(["gamma"])
    gamma = unpack(packed["gamma"])
    assert isinstance(gamma, Payload)
    receive("gamma", pack(sites["gamma"].answer(gamma)))
    assert receive.enough([])
    server.close_round({})
    assert server.round == 1


def exchange(server: Server, sites: Any, packed: Any, missing: dict[str, str]) -> dict[str, str]:
    for site, payload in packed.items():
        task = unpack(payload)
        server.receiver()(site, pack(sites[site].answer(task)))
    return missing
