"""Every method where the encoder is frozen: what is trained, and what travels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rounds import conformant
from suture.core.errors import ConfigError
from suture.core.labels import LabelSet
from suture.federation.plan import Plan
from suture.methods import METHODS
from suture.methods.base import Method
from suture.methods.surgical import SurgicalAggregation
from suture.models import ModelSpec, build
from suture.models.classifier import ENCODER, frozen_copy, train_mode
from suture.protocol.egress import Layout
from suture.protocol.packing import Packed
from suture_synthetic.method_checks import (
    SMALL,
    a_warm_up_trains_the_head_alone,
    federations_run_and_repeat,
    subject_of,
    unknown_labels_are_not_trained,
)
from suture_synthetic.trial import Trial

FROZEN = replace(SMALL, train="head")
NEEDS_A_BLOCK = {"pfl", "pmfl"}
"""Methods whose sites share what is before the head."""

ALL = pytest.mark.parametrize("name", sorted(METHODS))
CHECKS = (a_warm_up_trains_the_head_alone, federations_run_and_repeat, unknown_labels_are_not_trained)
"""Those of training; the others are of what does not depend on the part that is trained."""

CHECKED = ("afl", "combined", "fedavg", "fedlsm", "pmfl")
"""Those with training of their own: sums, terms on the received model, plain, a teacher, some gradients."""


def model_of(name: str) -> ModelSpec:
    model = replace(FROZEN, hidden=4) if name in NEEDS_A_BLOCK else FROZEN
    return replace(model, views=0) if METHODS[name].about.pixels else model


def plan(method: Method, model: ModelSpec) -> Plan:
    with Trial(method, model, method.labels.types[0]) as trial:
        return trial.plan


@pytest.mark.complete
@pytest.mark.parametrize("name", CHECKED)
def test_keeps_the_contract(name: str) -> None:
    subject = subject_of(conformant(name), model=model_of(name))
    subject = replace(subject, types=subject.label_types[:1])  # the last one is tried with adapters
    for check in CHECKS:
        check(subject)


@pytest.mark.complete
@ALL
def test_the_encoder_is_sent_once_and_stays_as_it_is(name: str) -> None:
    method = conformant(name)
    with Trial(method, model_of(name), method.labels.types[0], rounds=2) as trial:
        payload, update = trial.payload("alpha"), trial.update("alpha")
        encoder = {n: t for n, t in payload.fixed.items() if n.startswith(ENCODER)}
        held = trial.sites["alpha"].trainer.model(payload.labels)
        assert encoder.keys() == held.frozen_names - held.counters
        for n, tensor in encoder.items():
            assert torch.equal(held.state_dict()[n], tensor), n
        for names in (payload.shared, payload.channels, update.shared, update.channels):
            assert not [n for n in names if ENCODER in n]
    with Trial(method, model_of(name), method.labels.types[0], rounds=2) as trial:
        trial.run()
        assert all(torch.equal(trial.server.model.fixed[n], tensor) for n, tensor in encoder.items())


def test_only_rows_leave_a_site_and_return() -> None:
    """14 classes would be 14 rows of 129 numbers; here a site has two or three."""
    with Trial(SurgicalAggregation(), FROZEN, "multilabel", rounds=2) as trial:
        for site, own in (("alpha", 2), ("gamma", 3)):
            for message in (trial.payload(site), trial.update(site)):
                assert not message.shared
                assert {n: tuple(t.shape) for n, t in message.head.items()} == {
                    "head.weight": (own, 128),
                    "head.bias": (own,),
                }
    with Trial(SurgicalAggregation(), replace(FROZEN, hidden=4), "multilabel") as trial:
        assert set(trial.update("alpha").shared) == {"hidden.0.weight", "hidden.0.bias"}


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


def test_sites_that_draw_their_own_part_have_the_same_encoder() -> None:
    method = conformant("pmfl")
    method = replace(method, share=replace(method.share, init="own"))
    with Trial(method, replace(FROZEN, hidden=4), "multilabel") as trial:
        held = []
        for site in ("alpha", "beta"):
            trial.update(site)
            held.append(trial.sites[site].trainer.model(trial.payload(site).labels).state_dict())
        for name, tensor in trial.server.model.fixed.items():
            assert torch.equal(held[0][name], tensor), name
            assert torch.equal(held[1][name], tensor), name


def test_half_precision_leaves_the_encoder_exact() -> None:
    with Trial(SurgicalAggregation(), FROZEN, "multilabel", transport="float16") as trial:
        trial.update("alpha")
        held = trial.sites["alpha"].trainer.model(trial.payload("alpha").labels).state_dict()
        assert all(torch.equal(held[n], t) for n, t in trial.server.model.fixed.items())


def test_the_encoder_is_in_eval_mode_and_shared_by_copies() -> None:
    model = build(replace(FROZEN, projection=8), LabelSet(("A", "B")), 0, pretrained=False)
    for policy in ("average", "frozen"):
        train_mode(model, policy)
        assert model.training
        assert model.head.training
        assert not any(module.training for module in model.backbone.modules())
    assert {n.partition(".")[0] for n, p in model.named_parameters() if p.requires_grad} == {
        "head",
        "projector",
    }
    copy = frozen_copy(model)
    assert copy.backbone is model.backbone
    assert copy.head is not model.head
    whole = build(SMALL, LabelSet(("A", "B")), 0, pretrained=False)
    assert frozen_copy(whole).backbone is not whole.backbone
    assert not whole.frozen_names


def test_nothing_of_a_frozen_encoder_is_declared() -> None:
    """What may leave, the bound of norms and the clipping of a site follow this declaration."""
    method = SurgicalAggregation()
    model = build(FROZEN, LabelSet(("A", "B")), 0, pretrained=False)
    egress = method.egress(method.sharing.layout(model))
    assert egress.shared == {}
    assert set(egress.head) == {"head.weight", "head.bias"}
    assert method.egress(Layout({}, {})).shared == {}


@pytest.mark.parametrize(
    ("method", "model", "told"),
    [
        ("individual", FROZEN, "FedBN"),
        ("pfl", FROZEN, "keeps the head at each site"),
        ("pmfl", FROZEN, "set model.hidden"),
    ],
)
def test_a_method_that_is_about_the_backbone_is_refused(method: str, model: ModelSpec, told: str) -> None:
    value = conformant(method)
    if told == "FedBN":
        value = replace(value, batch_norm="local")
    with pytest.raises(ConfigError, match=told):
        plan(value, model)
    plan(value, replace(model, train="all"))


def test_a_momentum_without_effect_is_refused() -> None:
    labels = LabelSet(("A", "B"))
    with pytest.raises(ConfigError, match="norm_momentum"):
        build(replace(FROZEN, norm_momentum=0.1), labels, 0, pretrained=False)
    build(replace(FROZEN, norm_momentum=0.1, projection=8), labels, 0, pretrained=False)
