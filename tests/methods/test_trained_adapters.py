"""Every method with adapters: what is trained, what travels, and what is averaged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rounds import configured, conformant
from suture.core.errors import ConfigError
from suture.core.labels import LabelSet
from suture.federation.plan import Plan
from suture.federation.server.global_model import classifier
from suture.methods import METHODS
from suture.methods.base import GlobalModel, Method, Phase, RoundContext
from suture.methods.fedavg import FedAvg
from suture.methods.surgical import SurgicalAggregation
from suture.models import ModelSpec, build
from suture.models.adapters import Adapters, add_adapters, merge_adapters
from suture.models.classifier import ENCODER, Classifier, frozen_copy
from suture.models.saved import load_model, weights_digest
from suture.protocol.messages import Update
from suture.protocol.packing import load
from suture_results.model_export.bundle import write_bundle
from suture_results.model_export.onnx import write_onnx
from suture_results.model_export.program import write_torch
from suture_results.prediction import open_model
from suture_synthetic.method_checks import (
    SMALL,
    a_warm_up_trains_the_head_alone,
    federations_run_and_repeat,
    subject_of,
    unknown_labels_are_not_trained,
)
from suture_synthetic.trial import Trial

ALL = pytest.mark.parametrize("name", sorted(METHODS))
CHECKS = (a_warm_up_trains_the_head_alone, federations_run_and_repeat, unknown_labels_are_not_trained)
"""Those of training; the others are of what does not depend on the part that is trained."""

CHECKED = ("combined", "fedavg", "fedlsm", "pmfl")
"""Those with training of their own: terms on the received model, plain, a teacher, some gradients."""


def model_of(kind: str, **settings: Any) -> ModelSpec:
    rank = {} if kind == "bias" else {"rank": 2}
    return replace(SMALL, train="adapters", adapters=Adapters(**({"kind": kind} | rank | settings)))


LORA, FFA, BIAS = (model_of(kind) for kind in ("lora", "ffa-lora", "bias"))
KINDS = pytest.mark.parametrize("model", [LORA, FFA, BIAS], ids=["lora", "ffa-lora", "bias"])
HEAD = {"head.weight", "head.bias"}


def trained_names(model: ModelSpec) -> set[str]:
    """Written out from the network: four convolutions, each with batch norm."""
    kinds = {
        "lora": ["conv{}.lora_A.default.weight", "conv{}.lora_B.default.weight"],
        "ffa-lora": ["conv{}.lora_B.default.weight"],
        "bias": ["norm{}.weight", "norm{}.bias"],
    }
    assert model.adapters is not None
    return {ENCODER + name.format(i) for name in kinds[model.adapters.kind] for i in (1, 2, 3, 4)}


def small(model: ModelSpec) -> Classifier:
    return build(model, LabelSet(("A", "B")), 0, pretrained=False)


@pytest.mark.complete
@ALL
def test_a_federation_runs(name: str) -> None:
    if name == "afl":
        with pytest.raises(ConfigError, match="AFL trains no part of the encoder"):
            plan(conformant(name), LORA)
        return
    method = conformant(name)
    with Trial(method, LORA, method.labels.types[-1], rounds=2) as trial:  # the first one: a frozen encoder
        trial.run()
        assert {line["round"] for line in trial.history()} >= {1, 2}


@pytest.mark.complete
@pytest.mark.parametrize("name", CHECKED)
def test_keeps_the_contract(name: str) -> None:
    subject = subject_of(conformant(name), model=LORA)
    subject = replace(subject, types=subject.label_types[-1:])  # the first one is tried with a frozen encoder
    for check in CHECKS:
        check(subject)


@pytest.mark.complete
@KINDS
def test_only_adapters_and_the_head_are_trained_and_travel(model: ModelSpec) -> None:
    names = trained_names(model)
    built = small(model)
    assert {n for n, p in built.named_parameters() if p.requires_grad} == names | HEAD
    assert built.frozen_names == set(built.names) - names - HEAD
    method = SurgicalAggregation(local=conformant("surgical").local)
    egress = method.egress(method.sharing.layout(built))
    assert (set(egress.shared), set(egress.head)) == (names, HEAD)
    with Trial(method, model, "multilabel", rounds=2) as trial:
        payload, update = trial.payload("alpha"), trial.update("alpha")
        assert set(payload.shared) == set(update.shared) == names
        assert set(payload.fixed) == built.frozen_names - built.counters
        assert any(not torch.equal(update.shared[name], payload.shared[name]) for name in names)
    with Trial(method, model, "multilabel", rounds=2) as trial:
        first = trial.payload("alpha").fixed
    with Trial(method, model, "multilabel", rounds=2) as trial:
        trial.run()
        for name, tensor in trial.server.model.fixed.items():
            assert torch.equal(tensor, first[name]), name
        state = trial.folder / "run" / "state"
        assert set(load(state / "constant.safetensors").tensors) == {f"fixed/{name}" for name in first}
        rounds = [load(path).tensors for path in state.glob("round-*.safetensors")]
        assert rounds
        assert all(not [n for n in tensors if n.startswith("fixed/")] for tensors in rounds)


@KINDS
def test_the_first_model_is_the_encoder_itself(model: ModelSpec) -> None:
    images = {"image": torch.rand(3, 1, 16, 16)}
    with torch.no_grad():
        found, plain = (small(m).eval()(images) for m in (model, replace(SMALL, train="head")))
    assert torch.equal(found, plain)


@KINDS
def test_the_encoder_is_in_eval_mode_and_copies_share_what_is_frozen(model: ModelSpec) -> None:
    network = small(model).train()
    assert network.head.training
    assert not any(module.training for module in network.backbone.modules())
    copy = frozen_copy(network)
    one, two = (m.state_dict(keep_vars=True) for m in (network, copy))
    assert {name for name in one if one[name] is two[name]} == network.frozen_names
    images = {"image": torch.rand(3, 1, 16, 16)}
    assert torch.equal(copy(images), network.eval()(images))
    assert all(p.requires_grad for n, p in network.named_parameters() if n not in network.frozen_names)


@pytest.mark.complete
@KINDS
def test_the_saved_model_has_the_figures_of_the_last_round(model: ModelSpec) -> None:
    with Trial(conformant("surgical"), model, "multilabel", rounds=2) as trial:
        trial.run()
        served = classifier(trial.server.model, trial.plan)
        saved, _ = load_model(trial.folder / "run" / "model")
    assert not [name for name in saved.state_dict() if "lora" in name]
    images = {"image": torch.randn(5, 1, 16, 16)}
    with torch.no_grad():
        assert (saved(images) - served(images)).abs().max() <= 1e-6


@pytest.mark.complete
def test_exports_have_the_figures_of_the_last_round(tmp_path: Path) -> None:
    """As ONNX, as a program and as a bundle: encoder, merged adapters and head."""
    import onnxruntime as ort

    model = replace(LORA, name="timm:test_vit")
    with Trial(conformant("surgical"), model, "multilabel") as trial:
        trial.run()
        served, folder = classifier(trial.server.model, trial.plan), trial.folder / "run" / "model"
        paths = write_onnx(folder, tmp_path), write_torch(open_model(folder), tmp_path)
        bundle = write_bundle(folder, tmp_path / "bundle")
        digest = weights_digest(folder)
    assert any(tensor.any() for name, tensor in served.state_dict().items() if ".lora_B." in name)
    images = torch.randint(0, 256, (4, 1, 16, 16), dtype=torch.uint8)
    with torch.no_grad():
        wanted = served({"image": model.preprocessing(images)}).sigmoid()
        program = torch.export.load(paths[1]).module()(images)
    session = ort.InferenceSession(str(paths[0]), providers=["CPUExecutionProvider"])
    found = torch.from_numpy(session.run(None, {"image": images.numpy()})[0])
    assert (found - wanted).abs().max() <= 1e-5
    assert (program - wanted).abs().max() <= 1e-6
    assert digest in "".join(p.read_text() for p in bundle.rglob("*.json"))


def factors(kind: str, a: list[float], b: list[float]) -> tuple[nn.Module, dict[str, Tensor]]:
    """A linear layer of zeros with factors A (a row) and B (a column), and its tensors that are trained."""
    layer = nn.Sequential(nn.Linear(2, 2, bias=False))
    nn.init.zeros_(layer[0].weight)  # type: ignore[arg-type]
    names = add_adapters(layer, Adapters(kind=kind, rank=1), "a layer", 0, (torch.zeros(1, 2),))  # type: ignore[arg-type]
    state = layer.state_dict()
    state["0.lora_A.default.weight"].copy_(torch.tensor([a]))
    state["0.lora_B.default.weight"].copy_(torch.tensor([b]).T)
    return layer, {name: state[name].clone() for name in names}


def averaged(kind: str, sites: list[tuple[list[float], list[float]]]) -> tuple[Tensor, Tensor]:
    """The weight that FedAvg's mean of two sites gives, and the mean of the two sites' weights."""
    made = [factors(kind, a, b) for a, b in sites]
    model, one = GlobalModel(("A",), made[0][1], {}), torch.ones(1).double()
    updates = [Update(1, ("A",), trained, {}, one, 1.0) for _, trained in made]
    after = FedAvg().aggregate(model, updates, RoundContext(1, Phase("main", 1), 0)).shared
    weights = [merge_adapters(layer).state_dict()["0.weight"] for layer, _ in made]
    made[0][0].load_state_dict(after, strict=False)
    return merge_adapters(made[0][0]).state_dict()["0.weight"], (weights[0] + weights[1]) / 2


def test_the_mean_of_factors_is_not_the_mean_of_products() -> None:
    """Products [[1, 0], [0, 0]] and [[0, 0], [0, 1]]; the mean factors are (1/2, 1/2), their product 1/4."""
    found, exact = averaged("lora", [([1.0, 0.0], [1.0, 0.0]), ([0.0, 1.0], [0.0, 1.0])])
    assert exact.tolist() == [[0.5, 0.0], [0.0, 0.5]]
    assert found.tolist() == [[0.25, 0.25], [0.25, 0.25]]


def test_with_one_factor_frozen_it_is() -> None:
    """A = (1, 2); B of the sites (1, 0) and (3, 4): products [[1, 2], [0, 0]] and [[3, 6], [4, 8]]."""
    found, exact = averaged("ffa-lora", [([1.0, 2.0], [1.0, 0.0]), ([1.0, 2.0], [3.0, 4.0])])
    assert exact.tolist() == [[2.0, 4.0], [2.0, 4.0]]
    assert found.tolist() == exact.tolist()


def test_clipping_covers_the_adapters_and_nothing_else() -> None:
    with Trial(conformant("fedavg"), FFA, "multilabel") as trial:
        payload = trial.payload("alpha")
        trial.sites["alpha"] = configured(trial.sites["alpha"], privacy={"clip": 1e-3, "noise": 0.0})
        update = trial.update("alpha")
        moved = [update.shared[n] - payload.shared[n] for n in update.shared]
        moved += [update.head[n] - payload.head[n] for n in update.head]
        assert float(torch.cat([t.flatten() for t in moved]).norm()) == pytest.approx(1e-3, rel=1e-3)
        assert set(update.shared) == trained_names(FFA)


def test_half_precision_carries_the_adapters_and_leaves_the_encoder_exact() -> None:
    with Trial(conformant("fedavg"), FFA, "multilabel", transport="float16") as trial:
        trial.update("alpha")
        held = trial.sites["alpha"].trainer.model(trial.payload("alpha").labels).state_dict()
        assert all(torch.equal(held[n], t) for n, t in trial.server.model.fixed.items())


def plan(method: Method, model: ModelSpec) -> Plan:
    with Trial(method, model, method.labels.types[0]) as trial:
        return trial.plan


@pytest.mark.parametrize(
    ("method", "policy", "model", "told"),
    [
        ("individual", "local", LORA, r"FedBN\).*model.train='adapters' freezes its statistics"),
        ("fedavg", "frozen", BIAS, r"FedBN\+\).*kind='bias' trains it"),
    ],
)
def test_batch_norm_that_contradicts_the_adapters_is_refused(
    method: str, policy: str, model: ModelSpec, told: str
) -> None:
    value: Any = replace(conformant(method), batch_norm=policy)
    with pytest.raises(ConfigError, match=told):
        plan(value, model)
    plan(value, replace(SMALL))


def test_a_personal_head_shares_the_adapters() -> None:
    """With a frozen encoder and nothing else, sites of PFL would exchange nothing."""
    with Trial(conformant("pfl"), LORA, "multilabel") as trial:
        update = trial.update("alpha")
        assert set(update.shared) == trained_names(LORA)
        assert not update.head
