"""An update out of all proportion is rejected: by the model, and by what was sent before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from between import Between
from rounds import conformant, reply_of
from suture.core.errors import RejectedUpdate
from suture.federation.loop import federate
from suture.federation.server.norms import Measure, NormBound, Norms
from suture.federation.server.server import Server
from suture.learning.training import LocalTraining
from suture.methods.surgical import SurgicalAggregation
from suture.protocol.egress import Egress
from suture.protocol.messages import TaskData, Update, ones
from suture.protocol.packing import VARIANCE, Packed, pack, unpack
from suture_synthetic.method_checks import SMALL
from suture_synthetic.trial import Trial

METHOD = SurgicalAggregation(local=LocalTraining(lr=1e-2, batch_size=8))


def test_norms_by_hand() -> None:
    received = TaskData("train", shared={"w": torch.tensor([3.0, 4.0])}, head={"b": torch.tensor([0.0])})
    update = Update(1, ("x",), {"w": torch.tensor([3.0, 6.0])}, {"b": torch.tensor([1.0])}, ones(("x",)))
    egress = Egress({}, {})
    assert Measure()(update, received, egress) == Norms(pytest.approx(5**0.5), 5.0)
    gradient = replace(update, kind="gradient")
    assert Measure()(gradient, received, egress) == Norms(pytest.approx(46**0.5), 5.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_of_several_blocks_leave_what_they_measure(dtype: torch.dtype) -> None:
    n = 2 * 2**15 + 3
    received = TaskData("train", shared={"w": torch.ones(n, dtype=dtype)})
    update = Update(1, (), {"w": torch.full((n,), 3.0, dtype=dtype)}, {}, ones(()))
    found = Measure()(update, received, Egress({}, {}))
    assert (found.update, found.model) == (pytest.approx(2 * n**0.5), pytest.approx(n**0.5))
    assert (update.shared["w"] == 3).all()
    assert (received.shared["w"] == 1).all()


def test_the_largest_floats_have_a_norm() -> None:
    received = TaskData("train", shared={"w": torch.full((4,), 3e38)})
    update = Update(1, (), {"w": torch.full((4,), -3e38)}, {}, ones(()))
    assert Measure()(update, received, Egress({}, {})).update == pytest.approx(1.2e39)


def refused(bound: NormBound, site: str, norms: Norms) -> str | None:
    try:
        bound.check(site, norms)
    except RejectedUpdate as error:
        return str(error)
    return None


def test_limits_by_hand() -> None:
    bound = NormBound(10.0, initial=2.0)
    assert refused(bound, "a", Norms(20.0, 1.0)) is None
    assert refused(bound, "a", Norms(40.0, 4.0)) is None
    assert refused(bound, "a", Norms(41.0, 4.0)) == (
        "an update of norm 41, more than 10 times the model's, 4 (max_update)"
    )
    assert refused(replace(bound, factor=None), "a", Norms(1e9, 4.0)) is None
    later = bound.after({"a": Norms(0.1, 1.0), "b": Norms(0.2, 1.0), "c": Norms(0.3, 1.0)})
    assert refused(later, "a", Norms(2.0, 1.0)) is None  # the median of all is .2
    assert "more than 10 times the usual one, 0.2 " in str(refused(later, "a", Norms(2.1, 1.0)))
    assert refused(later, "c", Norms(3.0, 1.0)) is None  # its own is .3
    assert refused(later, "new", Norms(20.0, 1.0)) is None
    assert refused(later.in_phase("next"), "a", Norms(20.0, 1.0)) is None
    smaller = later.after({"c": Norms(0.01, 1.0)})
    assert refused(smaller, "c", Norms(3.0, 1.0)) is None


def test_channels_are_bounded_by_the_norm_of_the_whole_model() -> None:
    """Of what is trained 3, of the frozen encoder 4, so 5 together: ten times 5."""
    bound = NormBound(10.0, initial=3.0, encoder=4.0)
    sent = Norms(1.0, 1.0, {"means": 50.0})
    assert refused(bound, "a", sent) is None
    assert "means of norm 51, more than 10 times the model's, 5 " in str(
        refused(bound, "a", replace(sent, channels={"means": 51.0}))
    )
    assert "an update of norm 31" in str(refused(bound, "a", replace(sent, update=31.0)))
    later = bound.after({site: replace(sent, channels={"means": 0.4}) for site in "abc"})
    assert "times the usual one, 0.4 " in str(refused(later, "a", replace(sent, channels={"means": 4.1})))


def test_the_server_measures_what_is_frozen_of_the_encoder() -> None:
    """Its parameters, not its batch norm's statistics; a model that is trained as a whole has none."""
    with Trial(METHOD, replace(SMALL, train="head"), "multilabel") as trial:
        trial.payload("alpha")
        fixed = {n: t for n, t in trial.server.model.fixed.items() if n.startswith("backbone.")}
        assert any("running" in n for n in fixed)
        parameters = [float(t.square().sum()) for n, t in fixed.items() if "running" not in n]
        assert trial.server.state.bound.encoder == pytest.approx(sum(parameters) ** 0.5)
        assert trial.server.state.bound.encoder > 1
    with Trial(METHOD, SMALL, "multilabel") as trial:
        trial.payload("alpha")
        assert trial.server.state.bound.encoder == 0


def test_a_model_of_zeros_bounds_nothing() -> None:
    """Others, who send next to nothing, would decide how large it is."""
    zeros = NormBound(10.0, initial=0.0).after({"b": Norms(1e-9, 0.0), "c": Norms(1e-9, 0.0)})
    assert refused(zeros, "a", Norms(1.0, 1e-9)) is None


def test_others_cannot_shrink_the_model_until_no_update_fits_it() -> None:
    assert refused(NormBound(10.0, initial=5.0), "a", Norms(1.0, 1e-6)) is None


def lied(tiny: Any, out: str, method: Any, factor: float | None, since: int = 1, **schedule: Any) -> Server:
    """A federation in which alpha scales its change from a round on; None loses its updates."""
    federation = tiny(method, **{"min_sites": 2, "selection": "last", **schedule})

    def lie(site: str, task: TaskData, answer: Packed) -> Packed | None:
        update = unpack(answer)
        if site != "alpha" or not isinstance(update, Update) or task.round < since:
            return answer
        if factor is None:
            return None
        base = task.shared if update.kind == "weights" else {}
        scaled = {k: _scaled(t, base.get(k), factor) for k, t in update.shared.items()}
        scaled = {k: t.clamp_min(0) if k.endswith(VARIANCE) and base else t for k, t in scaled.items()}
        return pack(replace(update, shared=scaled))

    server = federation.server(out)
    federate(server, Between(federation.sites(out), lie))
    return server


def model(server: Server) -> bytes:
    return (server.record.folder / "model" / "model.safetensors").read_bytes()


def test_small_updates_of_before_do_not_shut_a_site_out() -> None:
    """As of a stricter clip, or of colluders who send next to nothing: what the model outweighs is let in."""
    small = {site: {"": 0.001} for site in ("alpha", "beta", "gamma")}
    bound = NormBound(factor=100, initial=10.0, largest=small)
    bound.check("alpha", Norms(9.9, 10.0))
    with pytest.raises(RejectedUpdate, match="the usual one"):
        bound.check("alpha", Norms(10.1, 10.0))


@pytest.mark.complete
@pytest.mark.parametrize("name", ["surgical", "fedavg", "metafl"])
def test_an_update_a_thousand_times_too_large_costs_itself_alone(name: str, tiny: Any) -> None:
    """After an honest one; of methods that send weights, and of those that send gradients."""
    servers = [
        lied(tiny, out, conformant(name), x, since=2, rounds=3) for out, x in (("lied", 1e3), ("lost", None))
    ]
    assert model(servers[0]) == model(servers[1])
    events = (servers[0].record.folder / "events.jsonl").read_text()
    assert events.count("(max_update)") == 2


@pytest.mark.complete
def test_a_first_update_of_a_hundred_thousand_times_the_model_costs_itself_alone(tiny: Any) -> None:
    servers = [lied(tiny, out, METHOD, x) for out, x in (("lied", 1e5), ("lost", None))]
    assert model(servers[0]) == model(servers[1])


@pytest.mark.complete
@pytest.mark.parametrize("name", ["afl", "creff", "fedavg", "fedmlp", "metafl", "pfl", "surgical"])
def test_two_of_three_who_send_next_to_nothing_take_nobody_out(name: str) -> None:
    """Of sums, gradients beside a head of its own, all rows, prototypes, gradients, no head, and own rows."""
    method = conformant(name)
    with Trial(method, method.adapted(SMALL), method.labels.types[-1], rounds=2) as trial:
        federate(trial.server, Between(trial.sites, tiny_updates))
        lines = trial.history()
    assert lines
    assert {line["sites"]["alpha"]["status"] for line in lines} == {"accepted"}


def tiny_updates(site: str, task: TaskData, answer: Packed) -> Packed:
    """A millionth of the honest update, of each tensor."""
    update = unpack(answer)
    if site == "alpha" or not isinstance(update, Update):
        return answer
    base = {**task.shared, **task.head} if update.kind == "weights" else {}
    small = {
        group: {k: _scaled(t, base.get(k), 1e-6) for k, t in getattr(update, group).items()}
        for group in ("shared", "head", "channels")
    }
    return pack(replace(update, **small))


def _scaled(tensor: Tensor, base: Tensor | None, factor: float) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor * factor if base is None else (tensor - base) * factor + base


@pytest.mark.complete
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
        assert isinstance(task, TaskData)
        update = reply_of(sites[site], task)
        assert isinstance(update, Update)
        receive(site, pack(replace(update, shared={k: t * factor for k, t in update.shared.items()})))
    assert not receive.enough(["gamma"])
    gamma = unpack(packed["gamma"])
    assert isinstance(gamma, TaskData)
    receive("gamma", sites["gamma"].answer(gamma).packed)
    assert receive.enough([])
    server.close_round({})
    assert server.round == 1


def exchange(server: Server, sites: Any, packed: Any, missing: dict[str, str]) -> dict[str, str]:
    for site, payload in packed.items():
        task = unpack(payload)
        server.receiver()(site, sites[site].answer(task).packed)
    return missing
