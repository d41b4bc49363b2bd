"""Sites that keep the models they trained, and measure them beside the global one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from suture.core.errors import ConfigError
from suture.federation.loop import Loop, Receiver, federate
from suture.federation.server.global_model import unpack_model
from suture.federation.state_files import Rounds
from suture.learning.training import LocalTraining
from suture.methods.fedavg import FedAvg
from suture.models import ModelSpec
from suture.models.saved import load_model
from suture.protocol.messages import TaskName
from suture.protocol.packing import Packed, load
from suture_papers.fedmas.fedmas import FedMAS
from suture_results.saved_models import evaluate

METHOD = FedAvg(local=LocalTraining(lr=1e-2, batch_size=8), class_weights="none", keep_local=True)


def metrics(federation: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((federation.folder / "run" / "metrics.json").read_text())
    return found


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


@pytest.mark.complete
def test_models_of_fed_mas_make_the_global_one_by_their_rescue_factors(tiny: Any) -> None:
    method = FedMAS(local=METHOD.local, keep_local=True)
    federation = tiny(method, model=ModelSpec("cnn", size=16, projection=128), selection="last")
    server = federation.run()
    lines = (federation.folder / "run" / "history.jsonl").read_text().splitlines()
    rescue = {site: line["weight"] for site, line in json.loads(lines[-1])["sites"].items()}
    assert len({*rescue.values()}) == 3
    model = unpack_model(load(server.states.best_path(2)))
    own = {site: local(state(federation, site, 2)) for site in rescue}
    for name, tensor in {**model.shared, **model.head}.items():
        if tensor.is_floating_point():
            total = torch.stack([rf * own[site][name].double() for site, rf in rescue.items()]).sum(dim=0)
            torch.testing.assert_close((total / sum(rescue.values())).to(tensor), tensor)
    assert list(metrics(federation)["local_models"]["sites"]) == ["alpha", "beta", "gamma"]


@pytest.mark.complete
@pytest.mark.parametrize(("transport", "selected"), [(Loop, 4), (FirstIsBest, 1)])
def test_the_kept_models_are_those_that_made_the_global_one(tiny: Any, transport: Any, selected: int) -> None:
    """The sites are of one size: the mean of their models is the global model of the selected round."""
    selection = "last" if transport is Loop else "site_loss"
    federation = tiny(METHOD, rounds=4, selection=selection)
    server = federation.server()
    federate(server, transport(federation.sites()))
    assert server.selected_round == selected
    model = unpack_model(load(server.states.best_path(server.selected_round)))
    own = [local(state(federation, site, server.selected_round)) for site in federation.sites()]
    assert set(own[0]) == set(model.shared) | set(model.head)
    for name, tensor in {**model.shared, **model.head}.items():
        mean = torch.stack([one[name].double() for one in own]).mean(dim=0)
        assert torch.allclose(mean, tensor.double(), atol=1e-6), name
    found = metrics(federation)["local_models"]
    assert list(found["sites"]) == ["alpha", "beta", "gamma"]
    for site, models in found["sites"].items():
        areas = [area for area in metrics(federation)["sites"][site].values() if area is not None]
        assert models["global"] == {"n": 5, "auroc": pytest.approx(sum(areas) / len(areas))}
        assert models["local"]["n"] == 5
    assert found["mean"]["local"]["auroc"] == pytest.approx(
        sum(models["local"]["auroc"] for models in found["sites"].values()) / 3
    )


@pytest.mark.complete
def test_a_site_ends_with_its_own_model_and_figures_are_of_the_right_one(tiny: Any) -> None:
    slow = LocalTraining(lr=1e-4, batch_size=8)
    federation = tiny(replace(METHOD, local=slow), selection="last", n=60)
    federation.run()
    folder = federation.folder / "run"
    at = folder / "sites" / "beta" / "model"
    own, (saved, _) = local(state(federation, "beta", 2)), load_model(at)
    assert all(torch.equal(tensor, own[name]) for name, tensor in saved.state_dict().items() if name in own)
    facts = json.loads((at / "model.json").read_text())
    assert (facts["site"], facts["round"]) == ("beta", 2)
    found = metrics(federation)["local_models"]["sites"]["beta"]
    for name, model in (("global", folder / "model"), ("local", at)):
        assert found[name] == {
            "n": 12,
            "auroc": pytest.approx(evaluate(model, federation.configs["beta"], "test").mean),
        }
    assert found["global"]["auroc"] != found["local"]["auroc"]


def test_what_rests_at_a_site_is_kept_once(tiny: Any) -> None:
    """Frozen batch norm is the site's already; it is not written a second time."""
    federation = tiny(replace(METHOD, batch_norm="frozen"), selection="last", rounds=1)
    federation.run()
    names = state(federation, "alpha", 1).tensors.keys()
    fixed, own = ({n.partition("/")[2] for n in names if n.startswith(g)} for g in ("fixed/", "local/"))
    assert fixed
    assert not fixed & own
    assert len(metrics(federation)["local_models"]["sites"]) == 3


class Losing(Loop):
    """A loop that loses what alpha trained in the last round."""

    def exchange(self, task: TaskName, payloads: Mapping[str, Packed], receive: Receiver) -> dict[str, str]:
        lost = {"alpha"} if task == "train" and payloads["alpha"].header["round"] == 2 else set()
        rest = {name: packed for name, packed in payloads.items() if name not in lost}
        return super().exchange(task, rest, receive) | dict.fromkeys(lost, "no answer")


@pytest.mark.complete
def test_a_site_that_missed_the_selected_round_has_no_model_of_it(tiny: Any) -> None:
    federation = tiny(METHOD, selection="last", min_sites=2)
    server = federation.server()
    federate(server, Losing(federation.sites()))
    assert list(metrics(federation)["local_models"]["sites"]) == ["beta", "gamma"]
    assert not (federation.folder / "run" / "sites" / "alpha" / "model").exists()


@pytest.mark.complete
def test_nothing_is_kept_unless_the_method_says_so(tiny: Any) -> None:
    federation = tiny(replace(METHOD, keep_local=False), selection="last", rounds=1)
    federation.run()
    assert metrics(federation)["local_models"] == {}
    assert local(state(federation, "alpha", 1)) == {}
    assert not (federation.folder / "run" / "sites" / "alpha" / "model").exists()


def test_the_report_declares_what_more_leaves(tiny: Any) -> None:
    for keep in (True, False):
        server = tiny(replace(METHOD, keep_local=keep)).server(f"keep-{keep}")
        fields = {entry["field"] for entry in server.record.run["egress"]}
        assert ("local_metrics" in fields) is keep


def test_a_group_of_unknown_classes_is_refused_before_any_training(tiny: Any, tmp_path: Path) -> None:
    labels = {"alpha": ("Mass", "Nodule"), "server": ("Mass", "Nodule")}
    cases = {
        "one": ({"head": ("Mass",), "tail": ("Nodul",)}, r"\[data\.groups\].*'Nodul'.*Nodule"),
        "two": (
            {"head": ("mass", "Nodule"), "tail": ("Mass",)},
            r"names 'Mass' twice under \[data\.groups\]",
        ),
    }
    for out, (groups, says) in cases.items():
        federation = tiny(METHOD, labels)
        config = federation.configs["server"]
        data = config.data.model_copy(update={"groups": groups})
        federation.configs["server"] = config.model_copy(update={"data": data})
        with pytest.raises(ConfigError, match=says):
            federation.run(out)
        assert not (federation.folder / out / "history.jsonl").exists()
