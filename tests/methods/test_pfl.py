"""Personalised FL: one backbone, a head at each site; and training that shares nothing at all."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from rounds import context_of
from suture.core.errors import ConfigError
from suture.federation.loop import Loop, federate
from suture.learning.training import LocalTraining
from suture.methods.base import GlobalModel, Phase, RoundContext
from suture.methods.individual import Individual
from suture.methods.pfl import PersonalisedFL
from suture.methods.surgical import SurgicalAggregation
from suture.models.saved import load_model
from suture.protocol.messages import TaskData, Update, ones
from suture.protocol.packing import load, unpack

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
def test_heads_never_leave_their_sites(tiny: Any) -> None:
    federation = tiny(PersonalisedFL(local=FAST))
    server, sites = federation.server(), federation.sites()
    seen: list[Any] = []

    class Watching(Loop):
        def exchange(self, task: Any, payloads: Any, receive: Any) -> dict[str, str]:
            def keep(site: str, packed: Any) -> None:
                seen.append(unpack(packed))
                receive(site, packed)

            return super().exchange(task, payloads, keep)

    federate(server, Watching(sites))
    assert all(not update.head for update in seen if isinstance(update, Update))
    rows = {site: states(federation.folder, site)["fixed/head.weight"] for site in sites}
    assert rows["alpha"].shape[0] == 2
    assert not torch.equal(rows["alpha"][0], rows["gamma"][2])  # Mass at both, trained apart
    assert not (server.record.folder / "model").exists()


@pytest.mark.complete
def test_fedbn_keeps_batch_norm_at_the_site(tiny: Any) -> None:
    name = "fixed/backbone.norm1.running_mean"
    local = tiny(PersonalisedFL(local=FAST, batch_norm="local"))
    server = local.run()
    alpha, beta = (states(local.folder, site)[name] for site in ("alpha", "beta"))
    assert not torch.equal(alpha, beta)
    assert not any("norm" in key for key in server.model.shared)
    assert torch.equal(server.model.fixed["backbone.norm1.running_mean"], torch.zeros(16))


@pytest.mark.complete
def test_fedavg_averages_batch_norm_and_keeps_the_head_alone(tiny: Any) -> None:
    averaged = tiny(PersonalisedFL(local=FAST))
    server, kept = averaged.run(), states(averaged.folder, "alpha")
    assert not torch.equal(server.model.shared["backbone.norm1.running_mean"], torch.zeros(16))
    assert "fixed/head.weight" in kept
    assert not any("norm" in key for key in kept if key.startswith("fixed/"))


def test_the_server_cannot_select_models_that_lie_at_the_sites(tiny: Any) -> None:
    with pytest.raises(ConfigError, match=r"keeps its models at the sites.*selection = 'site_loss'"):
        tiny(PersonalisedFL(local=FAST), selection="server_metric").server()


def test_fedbn_of_a_global_method_is_refused(tiny: Any) -> None:
    with pytest.raises(ConfigError, match="leaves no global model to evaluate"):
        tiny(SurgicalAggregation(local=FAST, batch_norm="local"))


@pytest.mark.complete
@pytest.mark.parametrize("method", [PersonalisedFL(local=FAST), Individual(local=FAST)])
def test_an_interrupted_run_goes_on_with_the_same_personal_tensors(method: Any, tiny: Any) -> None:
    whole = tiny(method, rounds=4)
    whole.run()
    expected = states(whole.folder, "beta")
    cut = tiny(method, rounds=4)
    cut.folder = whole.folder / "again"
    server, sites = cut.server(), cut.sites()

    class Dies(Loop):
        def exchange(self, task: Any, payloads: Any, receive: Any) -> dict[str, str]:
            if server.round == 2:
                # Everyone has answered, and the server dies before it commits.
                super().exchange(task, payloads, lambda *_: None)
                raise KeyboardInterrupt
            return super().exchange(task, payloads, receive)

    with pytest.raises(KeyboardInterrupt):
        federate(server, Dies(sites))
    cut.run()
    again = states(cut.folder, "beta")
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
    measured = json.loads((server.record.folder / "metrics.json").read_text())
    assert measured["source"] == "sites' test data"
    assert measured["selected_round"] == server.selected_round


def test_a_new_class_adds_a_row_to_a_personal_head(tiny: Any) -> None:
    method = PersonalisedFL(local=FAST)
    tiny(method, {"alpha": ("Mass",), "beta": ("Nodule",)}, rounds=1).run()
    federation = tiny(method, {"alpha": ("Mass",), "beta": ("Nodule",)}, rounds=1)
    before = states(federation.folder, "beta")["fixed/head.weight"]
    table = federation.configs["beta"].data.table
    lines = table.read_text().splitlines()
    table.write_text(
        "\n".join([lines[0] + ",Hernia", *(f"{line},{i % 2}" for i, line in enumerate(lines[1:]))])
    )
    site = federation.sites()["beta"]
    server = federation.server()
    server.begin(Loop({"beta": site, "alpha": federation.sites()["alpha"]}).exchange(
        "handshake", server.handshake(["alpha", "beta"]), server.collector.receive))  # fmt: skip
    packed = server.assign_validation()["beta"]
    task = unpack(packed)
    assert isinstance(task, TaskData)
    context = context_of(site, task)
    labels = context.model.labels
    assert set(labels) == {"Nodule", "Hernia"}
    assert torch.equal(context.model.head.weight[labels.index("Nodule")], before[0])


@pytest.mark.complete
def test_individual_models_do_not_touch_each_other(tiny: Any) -> None:
    """What a site ends with does not depend on who else is there."""
    both = tiny(Individual(local=FAST), {"alpha": ("Mass",), "beta": ("Nodule",)}, rounds=3)
    both.run()
    together = states(both.folder, "alpha")
    alone = tiny(Individual(local=FAST), {"alpha": ("Mass",)}, rounds=3)
    alone.folder = both.folder / "alone"
    server = alone.run()
    for key, tensor in states(alone.folder, "alpha").items():
        assert torch.equal(tensor, together[key]), key
    assert not server.model.shared
    model, _ = load_model(both.folder / "run" / "sites" / "alpha" / "model")
    assert model.labels.names == ("Mass",)


@pytest.mark.complete
def test_each_site_keeps_its_own_best_round(tiny: Any) -> None:
    federation = tiny(Individual(local=LocalTraining(lr=0.05, batch_size=8)), rounds=6)
    server = federation.run()
    lines = [json.loads(x) for x in (server.record.folder / "history.jsonl").read_text().splitlines()]
    for site in federation.sites():
        losses = {line["round"]: line["sites"][site]["validation_loss"] for line in lines}
        assert server.state.standings.of(site) == min(losses, key=lambda r: (losses[r], r))
        assert all(0 <= line["sites"][site]["validation_auroc"] <= 1 for line in lines)
        described = json.loads(
            (federation.folder / "run" / "sites" / site / "model" / "model.json").read_text()
        )
        assert described["round"] == server.state.standings.of(site)
