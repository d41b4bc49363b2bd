"""How the global model begins and grows."""

from __future__ import annotations

import torch

from suture.data.batch import Augmentation
from suture.federation.plan import Plan
from suture.federation.server.global_model import classifier, initial, pack_model, unpack_model, with_labels
from suture.methods.surgical import SurgicalAggregation
from suture.models import ModelSpec


def plan(policy: str = "average") -> Plan:
    method = SurgicalAggregation(batch_norm=policy)  # type: ignore[arg-type]
    return Plan(method, ModelSpec("cnn", size=32), Augmentation(), 1, "e", "c")


def test_new_rows_begin_as_if_they_had_always_been_there() -> None:
    small, large = initial(plan(), ("Edema", "Mass")), initial(plan(), ("Edema", "Hernia", "Mass"))
    grown = with_labels(small, ("Edema", "Hernia", "Mass"), plan())
    for name, rows in grown.head.items():
        assert torch.equal(rows, large.head[name])


def test_known_rows_are_kept_bit_by_bit() -> None:
    model = initial(plan(), ("Edema", "Mass"))
    for rows in model.head.values():
        rows.add_(1)
    grown = with_labels(model, ("Edema", "Hernia", "Mass"), plan())
    for name, rows in grown.rows(("Mass", "Edema")).items():
        assert torch.equal(rows, model.rows(("Mass", "Edema"))[name])


def test_frozen_norm_is_fixed_and_nothing_is_lost() -> None:
    model = initial(plan("frozen"), ("Edema",))
    assert len(model.fixed) == 16
    assert not model.fixed.keys() & model.shared.keys()
    network = classifier(model, plan("frozen")).state_dict()
    named = model.shared.keys() | model.head.keys() | model.fixed.keys()
    assert {k for k in network if not k.endswith("num_batches_tracked")} == named


def test_state_round_trip() -> None:
    model = initial(plan("frozen"), ("Edema", "Mass"))
    again = unpack_model(pack_model(model, {}))
    assert again.labels == model.labels
    assert all(torch.equal(t, again.fixed[k]) for k, t in model.fixed.items())
