"""Personalised FL: one backbone, a head at each site; and training that shares nothing at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from between import Between
from rounds import context_of
from suture.core.errors import ConfigError
from suture.core.files import read_json, read_records
from suture.federation.loop import Loop, federate
from suture.learning.training import LocalTraining
from suture.methods.base import GlobalModel, Phase, RoundContext
from suture.methods.individual import Individual
from suture.methods.pfl import PersonalisedFL
from suture.methods.surgical import SurgicalAggregation
from suture.models.saved import load_model
from suture.protocol.messages import TaskData, Update, ones
from suture.protocol.packing import Packed, load, unpack
from world import refused

FAST = LocalTraining(lr=1e-2, batch_size=8)


def states(folder: Any, site: str) -> dict[str, Tensor]:
    """What a site keeps after the newest round."""
    files = sorted((folder / "run" / "sites" / site).glob("round-*.safetensors"))
    return dict(load(files[-1]).tensors)


def test_only_the_backbone_is_averaged() -> None:
    before = GlobalModel(
        ("A", "B"), {"w": torch.tensor([0.0])}, {"head.weight": torch.tensor([[7.0], [8.0]])}
    )
    sent = [Update(1, (n,), {"w": torch.tensor([v])}, {}, ones((n,))) for n, v in (("A", 10.0), ("B", 30.0))]
    after = PersonalisedFL().aggregate(before, sent, RoundContext(1, Phase("main", 1), 0))
    assert after.shared["w"].tolist() == [20.0]
    assert torch.equal(after.head["head.weight"], before.head["head.weight"])


@pytest.mark.complete
def test_heads_never_leave_their_sites_while_batch_norm_is_averaged(tiny: Any) -> None:
    federation = tiny(PersonalisedFL(local=FAST))
    server, sites = federation.server(), federation.sites()
    seen: list[Any] = []

    def note(_: str, __: TaskData, answer: Packed) -> Packed:
        seen.append(unpack(answer))
        return answer

    federate(server, Between(sites, note))
    updates = [update for update in seen if isinstance(update, Update)]
    assert updates
    assert not [update for update in updates if update.head]
    kept = {site: states(federation.folder, site) for site in sites}
    rows = {site: state["fixed/head.weight"] for site, state in kept.items()}
    assert rows["alpha"].shape[0] == 2
    assert not torch.equal(rows["alpha"][0], rows["gamma"][2])  # Mass at both, trained apart
    assert not (server.record.folder / "model").exists()
    assert server.model.shared["backbone.norm1.running_mean"].any()
    assert not any("norm" in key for key in kept["alpha"] if key.startswith("fixed/"))


@pytest.mark.complete
def test_fedbn_keeps_batch_norm_at_the_site(tiny: Any) -> None:
    name = "fixed/backbone.norm1.running_mean"
    local = tiny(PersonalisedFL(local=FAST, batch_norm="local"))
    server = local.run()
    alpha, beta = (states(local.folder, site)[name] for site in ("alpha", "beta"))
    assert not torch.equal(alpha, beta)
    assert not any("norm" in key for key in server.model.shared)
    assert torch.equal(server.model.fixed["backbone.norm1.running_mean"], torch.zeros(16))


def test_what_needs_a_global_model_is_refused(tiny: Any) -> None:
    with refused("'site_loss'", by=ConfigError):
        tiny(PersonalisedFL(local=FAST), selection="server_metric").server()
    with refused(by=ConfigError):  # FedBN
        tiny(SurgicalAggregation(local=FAST, batch_norm="local"))


@pytest.mark.complete
def test_an_interrupted_run_goes_on_with_the_same_personal_tensors(tiny: Any) -> None:
    """All have answered, and the server dies before it commits."""
    whole = tiny(PersonalisedFL(local=FAST), rounds=4)
    whole.run()
    cut = tiny(PersonalisedFL(local=FAST), rounds=4)
    cut.folder = whole.folder / "again"

    def dies(site: str, task: TaskData, answer: Packed) -> Packed:
        if task.task == "train" and task.round == 2 and site == "gamma":
            raise KeyboardInterrupt
        return answer

    with pytest.raises(KeyboardInterrupt):
        federate(cut.server(), Between(cut.sites(), dies))
    cut.run()
    again, expected = states(cut.folder, "beta"), states(whole.folder, "beta")
    assert again.keys() == expected.keys()
    assert all(torch.equal(t, expected[k]) for k, t in again.items())


@pytest.mark.complete
def test_a_site_leaves_with_the_head_of_the_selected_round(tiny: Any) -> None:
    """A learning rate that overshoots makes an early round the best; its head is the one that is kept."""
    method = PersonalisedFL(local=LocalTraining(lr=0.3, batch_size=8))
    federation = tiny(method, rounds=5)
    server = federation.run()
    assert server.selected_round < 5
    shorter = tiny(method, rounds=server.selected_round)
    shorter.folder = federation.folder / "shorter"
    shorter.run()
    model, _ = load_model(federation.folder / "run" / "sites" / "alpha" / "model")
    assert torch.equal(model.head.weight, states(shorter.folder, "alpha")["fixed/head.weight"])
    measured = read_json(server.record.folder / "metrics.json")
    assert measured["source"] == "sites' test data"
    assert measured["selected_round"] == server.selected_round


def test_a_new_class_adds_a_row_to_a_personal_head(tiny: Any) -> None:
    labels = {"alpha": ("Mass",), "beta": ("Nodule",)}
    federation = tiny(PersonalisedFL(local=FAST), labels, rounds=1)
    federation.run()
    before = states(federation.folder, "beta")["fixed/head.weight"]
    table = federation.configs["beta"].data.table
    first, *lines = table.read_text().splitlines()
    table.write_text("\n".join([f"{first},Hernia", *(f"{line},{i % 2}" for i, line in enumerate(lines))]))
    server, loop = federation.server(), Loop(federation.sites())
    server.begin(loop.exchange("handshake", server.handshake(loop.sites), server.receiver()))
    task = unpack(server.assign_validation()["beta"])
    assert isinstance(task, TaskData)
    model = context_of(loop._sites["beta"], task).model
    assert set(model.labels) == {"Nodule", "Hernia"}
    assert torch.equal(model.head.weight[model.labels.index("Nodule")], before[0])


@pytest.mark.complete
def test_individual_models_do_not_touch_each_other(tiny: Any) -> None:
    """What a site ends with does not depend on who else is there, and each keeps its own best round."""
    method = Individual(local=LocalTraining(lr=0.05, batch_size=8))
    labels = {"alpha": ("Mass",), "beta": ("Nodule",)}
    both = tiny(method, labels, rounds=4)
    server = both.run()
    assert not server.model.shared
    alone = tiny(method, {"alpha": ("Mass",)}, rounds=4)
    alone.folder = both.folder / "alone"
    alone.run()
    together = states(both.folder, "alpha")
    for key, tensor in states(alone.folder, "alpha").items():
        assert torch.equal(tensor, together[key]), key
    lines = read_records(server.record.folder / "history.jsonl")
    for site in both.sites():
        losses = {line["round"]: line["sites"][site]["validation_loss"] for line in lines}
        best = min(losses, key=lambda r: (losses[r], r))
        assert server.state.standings.of(site) == best
        folder = both.folder / "run" / "sites" / site / "model"
        assert read_json(folder / "model.json")["round"] == best
        assert load_model(folder)[0].labels.names == labels[site]
