"""Sites that keep the models they trained, and measure them beside the global one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from parties import METHOD, history, record
from torch import Tensor

from suture.core.errors import ConfigError
from suture.federation.loop import Loop, Receiver, federate
from suture.federation.server.global_model import unpack_model
from suture.federation.server.server import Server
from suture.federation.state_files import Rounds
from suture.methods.fedavg import FedAvg
from suture.models import ModelSpec
from suture.models.saved import load_model
from suture.protocol.messages import TaskName
from suture.protocol.packing import Packed, load
from suture_papers.fedmas.fedmas import FedMAS
from suture_results.saved_models import evaluate
from world import refused

KEEPING = FedAvg(local=METHOD.local, class_weights="none", keep_local=True)


def state(federation: Any, site: str, round_: int) -> Packed:
    """What a site keeps of a round."""
    rounds = Rounds(federation.folder / "run" / "sites" / site)
    return load(rounds.best_path(round_) if rounds.best_path(round_).exists() else rounds.path(round_))


def local(state: Packed) -> dict[str, Tensor]:
    tensors = {k.removeprefix("local/"): t for k, t in state.tensors.items() if k.startswith("local/")}
    return {name: t for name, t in tensors.items() if t.is_floating_point()}


class FirstIsBest(Loop):
    """A loop in which every site's validation loss is the number of the round."""

    def exchange(self, task: TaskName, payloads: Mapping[str, Packed], receive: Receiver) -> dict[str, str]:
        def hear(site: str, packed: Packed) -> None:
            metrics = packed.header.get("metrics")
            changed = {"metrics": {**metrics, "loss": float(metrics["round"])}} if metrics else {}
            receive(site, Packed(packed.tensors, {**packed.header, **changed}))

        return super().exchange(task, payloads, hear)


def mean_of(server: Server, own: Mapping[str, Mapping[str, Tensor]], weights: Mapping[str, float]) -> None:
    """The global model of the selected round is the weighted mean of what the sites have kept."""
    model = unpack_model(load(server.states.best_path(server.selected_round)))
    tensors = {**model.shared, **model.head}
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            total = sum(weight * own[site][name].double() for site, weight in weights.items())
            torch.testing.assert_close(
                (total / sum(weights.values())).to(tensor), tensor, atol=1e-6, rtol=1e-5
            )
    assert all(set(one) == {n for n, t in tensors.items() if t.is_floating_point()} for one in own.values())


@pytest.mark.complete
@pytest.mark.parametrize(
    ("method", "transport", "selected"), [(KEEPING, Loop, 4), (KEEPING, FirstIsBest, 1), (FedMAS, Loop, 4)]
)
def test_the_kept_models_are_those_that_made_the_global_one(
    method: Any, transport: Any, selected: int, tiny: Any
) -> None:
    """By their numbers of images, which are the same, or by the rescue factors of Fed-MAS."""
    settings: dict[str, Any] = {"rounds": 4, "selection": "last" if transport is Loop else "site_loss"}
    if method is FedMAS:
        method = FedMAS(local=METHOD.local, keep_local=True)
        settings["model"] = ModelSpec("cnn", size=16, projection=128)
    federation = tiny(method, **settings)
    server = federation.server()
    federate(server, transport(federation.sites()))
    assert server.selected_round == selected
    weights = {site: line["weight"] for site, line in history(server)[selected - 1]["sites"].items()}
    assert len({*weights.values()}) == (1 if method is KEEPING else 3)
    mean_of(server, {site: local(state(federation, site, selected)) for site in weights}, weights)
    metrics = record(server, "metrics.json")
    found = metrics["local_models"]
    assert list(found["sites"]) == ["alpha", "beta", "gamma"]
    for site, models in found["sites"].items():
        areas = [area for area in metrics["sites"][site].values() if area is not None]
        assert models["global"] == {"n": 5, "auroc": pytest.approx(sum(areas) / len(areas))}
        assert models["local"]["n"] == 5
    total = sum(models["local"]["auroc"] for models in found["sites"].values())
    assert found["mean"]["local"]["auroc"] == pytest.approx(total / 3)


@pytest.mark.complete
def test_a_site_ends_with_its_own_model_and_figures_are_of_the_right_one(tiny: Any) -> None:
    federation = tiny(replace(KEEPING, local=replace(METHOD.local, lr=1e-4)), selection="last", n=60)
    server = federation.run()
    folder = server.record.folder
    at = folder / "sites" / "beta" / "model"
    own, (saved, _) = local(state(federation, "beta", 2)), load_model(at)
    assert all(torch.equal(tensor, own[name]) for name, tensor in saved.state_dict().items() if name in own)
    facts = json.loads((at / "model.json").read_text())
    assert (facts["site"], facts["round"]) == ("beta", 2)
    found = record(server, "metrics.json")["local_models"]["sites"]["beta"]
    for name, model in (("global", folder / "model"), ("local", at)):
        area = evaluate(model, federation.configs["beta"], "test").mean
        assert found[name] == {"n": 12, "auroc": pytest.approx(area)}
    assert found["global"]["auroc"] != found["local"]["auroc"]


def test_what_rests_at_a_site_is_kept_once(tiny: Any) -> None:
    """Frozen batch norm is the site's already; it is not written a second time."""
    federation = tiny(replace(KEEPING, batch_norm="frozen"), selection="last", rounds=1)
    found = record(federation.run(), "metrics.json")
    names = state(federation, "alpha", 1).tensors.keys()
    fixed, own = ({n.partition("/")[2] for n in names if n.startswith(g)} for g in ("fixed/", "local/"))
    assert fixed
    assert not fixed & own
    assert len(found["local_models"]["sites"]) == 3


class Losing(Loop):
    """A loop that loses what alpha trained in the last round."""

    def exchange(self, task: TaskName, payloads: Mapping[str, Packed], receive: Receiver) -> dict[str, str]:
        lost = {"alpha"} if task == "train" and payloads["alpha"].header["round"] == 2 else set()
        rest = {name: packed for name, packed in payloads.items() if name not in lost}
        return super().exchange(task, rest, receive) | dict.fromkeys(lost, "no answer")


@pytest.mark.complete
def test_a_site_that_missed_the_selected_round_has_no_model_of_it(tiny: Any) -> None:
    federation = tiny(KEEPING, selection="last", min_sites=2)
    server = federation.server()
    federate(server, Losing(federation.sites()))
    assert list(record(server, "metrics.json")["local_models"]["sites"]) == ["beta", "gamma"]
    assert not (server.record.folder / "sites" / "alpha" / "model").exists()


@pytest.mark.complete
def test_nothing_is_kept_or_leaves_unless_the_method_says_so(tiny: Any) -> None:
    for keep in (True, False):
        federation = tiny(replace(KEEPING, keep_local=keep), selection="last", rounds=1)
        server = federation.run(f"keep-{keep}")
        assert ("local_metrics" in {entry["field"] for entry in server.record.run["egress"]}) is keep
        assert bool(record(server, "metrics.json")["local_models"]) is keep
        assert (server.record.folder / "sites" / "alpha" / "model").exists() is keep


@pytest.mark.parametrize(
    ("groups", "named"),
    [
        ({"head": ("Mass",), "tail": ("Nodul",)}, ("[data.groups]", "'Nodul'", "Nodule")),
        ({"head": ("mass", "Nodule"), "tail": ("Mass",)}, ("[data.groups]", "'Mass'")),
    ],
)
def test_a_group_of_unknown_classes_is_refused_before_any_training(
    groups: dict[str, tuple[str, ...]], named: tuple[str, ...], tiny: Any
) -> None:
    federation = tiny(KEEPING, {"alpha": ("Mass", "Nodule"), "server": ("Mass", "Nodule")})
    config = federation.configs["server"]
    data = config.data.model_copy(update={"groups": groups})
    federation.configs["server"] = config.model_copy(update={"data": data})
    with refused(*named, by=ConfigError):
        federation.run()
    assert not list(federation.folder.rglob("history.jsonl"))
