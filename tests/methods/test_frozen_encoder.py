"""Every method where the encoder is frozen, or adapters of it alone are trained: what moves and travels."""

from __future__ import annotations

from dataclasses import replace
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
from suture.models.classifier import ENCODER, Classifier, frozen_copy, train_mode
from suture.models.saved import load_model
from suture.protocol.messages import Update
from suture.protocol.packing import Packed, load
from suture_synthetic.method_checks import (
    SMALL,
    a_warm_up_trains_the_head_alone,
    federations_run_and_repeat,
    subject_of,
    unknown_labels_are_not_trained,
)
from suture_synthetic.trial import Trial
from world import refused

FROZEN = replace(SMALL, train="head")
NEEDS_A_BLOCK = {"pfl", "pmfl"}
"""Methods whose sites share what is before the head."""

CHECKS = (a_warm_up_trains_the_head_alone, federations_run_and_repeat, unknown_labels_are_not_trained)
"""Those of training; the others are of what does not depend on the part that is trained."""

CHECKED = ("combined", "fedavg", "fedlsm", "pmfl")
"""Those with training of their own: terms on the received model, plain, a teacher, some gradients."""


def model_of(kind: str, **settings: Any) -> ModelSpec:
    rank = {} if kind == "bias" else {"rank": 2}
    return replace(SMALL, train="adapters", adapters=Adapters(**({"kind": kind} | rank | settings)))


LORA, FFA, BIAS = map(model_of, ("lora", "ffa-lora", "bias"))
KINDS = pytest.mark.parametrize("model", [FROZEN, LORA, FFA, BIAS], ids=["head", "lora", "ffa-lora", "bias"])
HEAD = {"head.weight", "head.bias"}


def trained_names(model: ModelSpec) -> set[str]:
    """Written out from the network: four convolutions, each with batch norm."""
    kinds = {
        "lora": ["conv{}.lora_A.default.weight", "conv{}.lora_B.default.weight"],
        "ffa-lora": ["conv{}.lora_B.default.weight"],
        "bias": ["norm{}.weight", "norm{}.bias"],
    }
    names = kinds[model.adapters.kind] if model.adapters else []
    return {ENCODER + name.format(i) for name in names for i in (1, 2, 3, 4)}


def small(model: ModelSpec) -> Classifier:
    return build(model, LabelSet(("A", "B")), 0, pretrained=False)


def frozen_model(name: str) -> ModelSpec:
    model = replace(FROZEN, hidden=4) if name in NEEDS_A_BLOCK else FROZEN
    return replace(model, views=0) if METHODS[name].about.pixels else model


def plan(method: Method, model: ModelSpec) -> Plan:
    with Trial(method, model, method.labels.types[0]) as trial:
        return trial.plan


@pytest.mark.complete
@pytest.mark.parametrize("name", ["afl", *CHECKED])
def test_keeps_the_contract(name: str) -> None:
    """The first type of labels with a frozen encoder, the last one with adapters."""
    for model, types in ((frozen_model(name), slice(0, 1)), (LORA, slice(-1, None))):
        if name == "afl" and model is LORA:
            with refused("AFL", by=ConfigError):
                plan(conformant(name), LORA)
            continue
        subject = subject_of(conformant(name), model=model)
        subject = replace(subject, types=subject.label_types[types])
        for check in CHECKS:
            check(subject)


@pytest.mark.complete
@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_runs_and_its_encoder_stays_as_it_is(name: str) -> None:
    method = conformant(name)
    with Trial(method, frozen_model(name), method.labels.types[0], rounds=2) as trial:
        payload, update = trial.payload("alpha"), trial.update("alpha")
        encoder = {n: t for n, t in payload.fixed.items() if n.startswith(ENCODER)}
        held = trial.sites["alpha"].trainer.model(payload.labels)
        assert encoder.keys() == held.frozen_names - held.counters
        for n, tensor in encoder.items():
            assert torch.equal(held.state_dict()[n], tensor), n
        for names in (payload.shared, payload.channels, update.shared, update.channels):
            assert not [n for n in names if ENCODER in n]
    if name not in {"afl", *CHECKED}:
        with Trial(method, LORA, method.labels.types[-1], rounds=2) as trial:
            trial.run()
            assert {line["round"] for line in trial.history()} >= {1, 2}


def test_only_rows_leave_a_site_and_return() -> None:
    """14 classes would be 14 rows of 129 numbers; here a site has two or three."""
    with Trial(SurgicalAggregation(), FROZEN, "multilabel", rounds=2) as trial:
        for site, own in (("alpha", 2), ("gamma", 3)):
            for message in (trial.payload(site), trial.update(site)):
                assert not message.shared
                forms = {n: tuple(t.shape) for n, t in message.head.items()}
                assert forms == {"head.weight": (own, 128), "head.bias": (own,)}
    with Trial(SurgicalAggregation(), replace(FROZEN, hidden=4), "multilabel") as trial:
        assert set(trial.update("alpha").shared) == {"hidden.0.weight", "hidden.0.bias"}


@pytest.mark.complete
@KINDS
def test_only_what_is_trained_travels(model: ModelSpec) -> None:
    names, built = trained_names(model), small(model)
    assert {n for n, p in built.named_parameters() if p.requires_grad} == names | HEAD
    assert built.frozen_names == set(built.names) - names - HEAD
    with Trial(conformant("surgical"), model, "multilabel", rounds=2) as trial:
        payload, update = trial.payload("alpha"), trial.update("alpha")
        assert set(payload.shared) == set(update.shared) == names
        assert set(payload.fixed) == built.frozen_names - built.counters
        assert not names or any(not torch.equal(update.shared[n], payload.shared[n]) for n in names)
    with Trial(conformant("surgical"), model, "multilabel", rounds=2) as trial:
        trial.run()
        served = classifier(trial.server.model, trial.plan)
        for name, tensor in trial.server.model.fixed.items():
            assert torch.equal(tensor, payload.fixed[name]), name
        state = trial.folder / "run" / "state"
        assert set(load(state / "constant.safetensors").tensors) == {f"fixed/{n}" for n in payload.fixed}
        rounds = [load(path).tensors for path in state.glob("round-*.safetensors")]
        assert rounds
        assert not [n for tensors in rounds for n in tensors if n.startswith("fixed/")]
        saved, _ = load_model(trial.folder / "run" / "model")
    # The saved model has the figures of the last round.
    assert not [name for name in saved.state_dict() if "lora" in name]
    images = {"image": torch.randn(5, 1, 16, 16)}
    with torch.no_grad():
        assert (saved(images) - served(images)).abs().max() <= 1e-6


@KINDS
def test_the_encoder_is_in_eval_mode_and_copies_share_what_is_frozen(model: ModelSpec) -> None:
    images, network = {"image": torch.rand(3, 1, 16, 16)}, small(model)
    for policy in ("average",) if model is BIAS else ("frozen", "average"):
        train_mode(network, policy)
        assert network.training
        assert network.head.training
        assert not any(module.training for module in network.backbone.modules())
    copy = frozen_copy(network)
    one, two = (m.state_dict(keep_vars=True) for m in (network, copy))
    assert {name for name in one if one[name] is two[name]} == network.frozen_names
    with torch.no_grad():  # and the first model is that of the encoder itself
        assert torch.equal(copy(images), network.eval()(images))
        assert torch.equal(copy(images), small(FROZEN).eval()(images))
    assert all(p.requires_grad for n, p in network.named_parameters() if n not in network.frozen_names)
    assert not small(SMALL).frozen_names


def test_a_model_of_other_classes_gets_the_encoder_that_the_site_holds() -> None:
    """As when a class joins late: the site makes a new model, and the server sends no encoder again."""
    with Trial(SurgicalAggregation(), FROZEN, "multilabel") as trial:
        payload = trial.payload("alpha")
        trial.update("alpha")
        later = build(replace(FROZEN), LabelSet(("Mass",)), 5, pretrained=False)
        states = trial.sites["alpha"].states
        states.own_part(replace(payload, fixed={}), Packed({}, {}), later)
        state = later.state_dict()
        assert all(torch.equal(state[name], tensor) for name, tensor in payload.fixed.items())


@pytest.mark.parametrize("model", [FROZEN, model_of("ffa-lora")], ids=["frozen", "adapters"])
def test_half_precision_leaves_the_encoder_exact(model: ModelSpec) -> None:
    with Trial(conformant("fedavg"), model, "multilabel", transport="float16") as trial:
        trial.update("alpha")
        held = trial.sites["alpha"].trainer.model(trial.payload("alpha").labels).state_dict()
        assert all(torch.equal(held[n], t) for n, t in trial.server.model.fixed.items())


def test_what_is_declared_and_clipped_is_what_is_trained() -> None:
    method = conformant("fedavg")
    for model in (FROZEN, LORA):
        egress = method.egress(method.sharing.layout(small(model)))
        assert (set(egress.shared), set(egress.head)) == (trained_names(model), HEAD)
    with Trial(method, LORA, "multilabel") as trial:
        payload = trial.payload("alpha")
        trial.sites["alpha"] = configured(trial.sites["alpha"], privacy={"clip": 1e-3, "noise": 0.0})
        update = trial.update("alpha")
        moved = [update.shared[n] - payload.shared[n] for n in update.shared]
        moved += [update.head[n] - payload.head[n] for n in update.head]
        assert float(torch.cat([t.flatten() for t in moved]).norm()) == pytest.approx(1e-3, rel=1e-3)


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


def test_a_method_that_contradicts_what_is_trained_is_refused() -> None:
    for method, policy, model, named in (
        ("individual", "local", LORA, "model.train='adapters'"),
        ("individual", "local", FROZEN, "FedBN"),
        ("fedavg", "frozen", model_of("bias"), "kind='bias'"),
        ("pfl", "", FROZEN, "head"),
        ("pmfl", "", FROZEN, "model.hidden"),
    ):
        value: Any = conformant(method)
        value = replace(value, batch_norm=policy) if policy else value
        with refused(named, by=ConfigError):
            plan(value, model)
        plan(value, SMALL)


def test_a_momentum_without_effect_is_refused() -> None:
    labels = LabelSet(("A", "B"))
    with refused("norm_momentum", by=ConfigError):
        build(replace(FROZEN, norm_momentum=0.1), labels, 0, pretrained=False)
    build(replace(FROZEN, norm_momentum=0.1, projection=8), labels, 0, pretrained=False)
