"""How the global model begins and grows, what each site receives of it, and what is noted of a start."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
import torch
from parties import METHOD, history, record

from federated import same
from noted import noted
from one_step import equal
from suture.data.batch import Augmentation
from suture.federation.plan import Plan
from suture.federation.server.exchanges import Assigner, Task
from suture.federation.server.global_model import classifier, initial, pack_model, unpack_model, with_labels
from suture.federation.server.notes import method_notes
from suture.federation.server.registry import Agreement, agree
from suture.learning.training import LocalTraining
from suture.methods import METHODS
from suture.methods.base import ClassFacts, GlobalModel, Method
from suture.methods.fedavg import FedAvg
from suture.methods.surgical import SurgicalAggregation
from suture.models import ModelSpec
from suture.models.classifier import Layout, NormPolicy
from suture.protocol.check import AllowedReply
from suture.protocol.egress import CLASSES, Channel, Egress
from suture.protocol.messages import SiteInfo
from suture.protocol.records import Note
from suture_papers.fedlsm.fedlsm import FedLSM
from suture_papers.fedlsm.mean_teacher import Teaching


def plan(policy: str = "average") -> Plan:
    method = SurgicalAggregation(batch_norm=policy)  # type: ignore[arg-type]
    return Plan(method, ModelSpec("cnn", size=32), Augmentation(), 1, "e", "c")


def test_new_rows_begin_as_if_they_had_always_been_there_and_known_ones_are_kept() -> None:
    small, large = initial(plan(), ("Edema", "Mass")), initial(plan(), ("Edema", "Hernia", "Mass"))
    grown = with_labels(small, ("Edema", "Hernia", "Mass"), plan())
    assert equal(grown.head, large.head)
    for rows in small.head.values():
        rows.add_(1)
    grown = with_labels(small, ("Edema", "Hernia", "Mass"), plan())
    assert equal(grown.rows(("Mass", "Edema")), small.rows(("Mass", "Edema")))


def test_frozen_norm_is_fixed_and_nothing_is_lost() -> None:
    model = initial(plan("frozen"), ("Edema", "Mass"))
    assert len(model.fixed) == 16
    assert not model.fixed.keys() & model.shared.keys()
    network = classifier(model, plan("frozen")).state_dict()
    named = model.shared.keys() | model.head.keys() | model.fixed.keys()
    assert {k for k in network if not k.endswith("num_batches_tracked")} == named
    again = unpack_model(pack_model(model, {}))
    assert again.labels == model.labels
    assert equal(again.fixed, model.fixed)


# What each site receives


LABELS = ("Edema", "Mass", "Nodule", "Pleural Effusion")

SITES = {
    "a": SiteInfo(("Effusion", "Mass"), {"train": 7, "test": 2}, 1, "code"),
    "b": SiteInfo(("Nodule", "Edema"), {"test": 2}, 1, "code"),
}

VALUE = Channel("value", "facts", (CLASSES,))


class Own(SurgicalAggregation):
    """Sites see their own classes, and are told a value of each."""

    def egress(self, layout: Layout) -> Egress:
        return replace(super().egress(layout), channels=(VALUE,))


class All(FedAvg):
    """Sites see all classes, and are told a value of each."""

    def egress(self, layout: Layout) -> Egress:
        return replace(super().egress(layout), channels=(VALUE,))


def assigned(method: Method) -> dict[str, AllowedReply]:
    """The assignments of the sites, with the values 0, 10, 20 and 30 of the four classes."""
    values = torch.arange(4) * 10.0
    model = GlobalModel(LABELS, {"w": torch.zeros(2)}, {"head.bias": values + 1})
    registry = agree(SITES, Agreement())
    plan = Plan(method, ModelSpec("cnn", size=32), Augmentation(), 1, "e", "c")
    assigner = Assigner(plan, registry, model, 0, {"a": 0, "b": 0}, (), {"value": values})
    return assigner.assign(Task("train", 1, "main"))


def test_a_site_receives_its_own_classes_in_the_order_of_its_names_for_them() -> None:
    """Another order would tell that its effusions have a longer name elsewhere."""
    sent = {site: allowed.task for site, allowed in assigned(Own()).items()}
    assert sent["a"].labels == ("Effusion", "Mass")
    assert sent["a"].channels["value"].tolist() == [30, 10]
    assert sent["a"].head["head.bias"].tolist() == [31, 11]
    assert sent["b"].labels == ("Edema", "Nodule")
    assert sent["b"].channels["value"].tolist() == [0, 20]


def test_sites_that_see_all_classes_share_tensors_and_declaration() -> None:
    """So that memory grows neither with the number of sites times rows, nor with sites times tensors."""
    allowed = assigned(All())
    first, second = (one.task for one in allowed.values())
    assert first.labels == ("Edema", "Mass", "Nodule", "Effusion"), "its own spelling of what it knows"
    assert second.labels == LABELS
    assert first.head["head.bias"] is second.head["head.bias"]
    assert first.channels["value"] is second.channels["value"]
    assert first.channels["value"].tolist() == [0, 10, 20, 30]
    assert len({id(one.egress) for one in allowed.values()}) == 1
    assert {site: one.images for site, one in allowed.items()} == {"a": 7, "b": 0}, "as announced"
    assert allowed["a"].own == ("Effusion", "Mass")


@pytest.mark.complete
@pytest.mark.parametrize("name", ["surgical", "partial", "ark", "fedavg", "pfl"])
def test_the_order_of_a_sites_columns_changes_no_model(name: str, tiny: Any) -> None:
    method = METHODS[name](local=METHOD.local)
    before = tiny(method).run("before").model
    for config in tiny(method).configs.values():
        frame = pd.read_csv(config.data.table, dtype=str)
        first = ["image", "patient", "split"]
        frame[[*first, *sorted(set(frame) - {*first}, reverse=True)]].to_csv(config.data.table, index=False)
    after = tiny(method).run("after").model
    assert before.labels == after.labels
    assert same(before, after)


LSM = FedLSM(
    local=LocalTraining(lr=1e-2, iterations=3, batch_size=8),
    teaching=Teaching(start_round=1, positive=0.0, negative=0.0),
)
"""Every guess of the teacher is a positive pseudo-label: 3 steps of 8 - 4 images without the mixtures."""


@pytest.mark.complete
def test_a_run_writes_its_label_type_its_notes_and_the_weight_of_each_row(tiny: Any) -> None:
    """The site's own name of a class is not in the record, and no site has a Hernia: alpha guesses some."""
    labels = {"alpha": ("Mass", "Nodule"), "beta": ("Nodule", "Hernia")}
    table = tiny(LSM, labels).configs["beta"].data.table
    header, *rows = table.read_text().splitlines()
    rows = [row.rsplit(",", 1)[0] + ",0" for row in rows]
    table.write_text("\n".join([header.replace("Hernia", "Zwerchfellbruch"), *rows]) + "\n")
    server = tiny(LSM, labels, label_map={"Zwerchfellbruch": "Hernia"}, rounds=2).run()
    assert record(server, "run.json")["label_type"] == "multilabel"
    assert record(server, "run.json")["labels"] == ["Hernia", "Mass", "Nodule"]
    weight, run_away = noted(server)
    assert weight.startswith("Hernia has the class weight 1")
    assert run_away.startswith("Hernia: from round 1 ")
    assert "(in round 2: alpha)" in run_away
    assert len(history(server)) == 2
    for line in history(server):
        alpha, beta = line["sites"]["alpha"], line["sites"]["beta"]
        assert (alpha["status"], beta["status"]) == ("accepted", "accepted")
        assert alpha["weight"] == beta["weight"] == 15  # three fifths of 25 images train
        assert alpha["scalars"] == beta["scalars"] == {"pseudo_positive": 12, "pseudo_negative": 0}
        assert alpha["rows"].keys() == beta["rows"].keys() == {"Hernia", "Mass", "Nodule"}
        assert alpha["rows"]["Hernia"] == beta["rows"]["Mass"] == 12  # guessed
        assert beta["rows"]["Hernia"] == 0  # known, and never there
        assert 0 < alpha["rows"]["Mass"] < 12


# Notes of a start


FROZEN = replace(METHOD, batch_norm="frozen")


@pytest.mark.parametrize(
    ("policy", "model", "count"),
    [
        ("frozen", ModelSpec("cnn", size=16), 1),
        ("average", ModelSpec("cnn", size=16), 0),
        ("frozen", ModelSpec("lstm"), 0),  # it has no batch norm, and the methods of text ask for it
        ("frozen", ModelSpec("efficientnet_lite0", size=32, weights="package"), 0),
    ],
)
def test_only_frozen_norms_without_pretraining_are(
    policy: NormPolicy, model: ModelSpec, count: int, tiny: Any
) -> None:
    plan = replace(tiny(replace(FROZEN, batch_norm=policy)).plan, model=model)
    first = initial(replace(plan, model=replace(model, weights=None)), ("Mass",))
    *notes, last = method_notes(first, plan, ClassFacts(notes=("Mass is rare.",)))
    assert [note.code for note in notes] == ["frozen_batch_norm"] * count
    assert last == Note("method", {"text": "Mass is rare."})


def test_a_model_without_batch_norm_and_a_size_that_is_not_the_pretraining_s_are_noted(tiny: Any) -> None:
    model = ModelSpec("timm:test_vit", size=32, weights="vit.safetensors")
    plan = replace(tiny(replace(FROZEN, batch_norm="frozen")).plan, model=model)
    first = initial(replace(plan, model=replace(model, weights=None)), ("Mass",))
    assert [*method_notes(first, plan, ClassFacts())] == [
        Note("pretrained_size", {"model": "timm:test_vit", "pretrained": 160, "size": 32}),
        Note("no_batch_norm", {"model": "timm:test_vit", "policy": "frozen"}),
    ]
    usual = replace(plan, method=replace(FROZEN, batch_norm="average"), model=replace(model, size=160))
    assert [*method_notes(first, usual, ClassFacts())] == []
