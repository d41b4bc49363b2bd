"""What each site receives of the rows and values of each class, and what the run records of it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
import torch

from noted import noted
from suture.data.batch import Augmentation
from suture.federation.plan import Plan
from suture.federation.server.exchanges import Assigner, Task
from suture.federation.server.registry import Agreement, agree
from suture.learning.training import LocalTraining
from suture.methods import METHODS
from suture.methods.base import GlobalModel, Method
from suture.methods.fedavg import FedAvg
from suture.methods.surgical import SurgicalAggregation
from suture.models import ModelSpec
from suture.models.classifier import Layout
from suture.protocol.check import AllowedReply
from suture.protocol.egress import CLASSES, Channel, Egress
from suture.protocol.messages import SiteInfo
from suture_papers.fedlsm.fedlsm import FedLSM
from suture_papers.fedlsm.mean_teacher import Teaching

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


@pytest.mark.complete
@pytest.mark.parametrize("name", ["surgical", "partial", "ark", "fedavg", "pfl"])
def test_the_order_of_a_sites_columns_changes_no_model(name: str, tiny: Any) -> None:
    kind: Any = METHODS[name]
    method = kind(local=LocalTraining(lr=1e-2, batch_size=8))
    before = tiny(method).run("before").model
    for config in tiny(method).configs.values():
        frame = pd.read_csv(config.data.table, dtype=str)
        others = [column for column in frame if column not in (*LABELS, "Fibrosis", "Hernia")]
        frame[[*others, *sorted(set(frame) - {*others}, reverse=True)]].to_csv(config.data.table, index=False)
    after = tiny(method).run("after").model
    assert before.labels == after.labels
    for one, two in ((before.shared, after.shared), (before.head, after.head)):
        assert all(torch.equal(tensor, two[key]) for key, tensor in one.items())


def test_a_site_that_sees_all_classes_receives_all() -> None:
    sent = {site: allowed.task for site, allowed in assigned(All()).items()}
    assert sent["a"].labels == ("Edema", "Mass", "Nodule", "Effusion")  # its own spelling of what it knows
    for payload in sent.values():
        assert payload.channels["value"].tolist() == [0, 10, 20, 30]


def test_sites_that_see_the_same_classes_share_tensors_and_declaration() -> None:
    """So that memory grows neither with the number of sites times rows, nor with sites times tensors."""
    allowed = assigned(All()).values()
    first, second = (one.task for one in allowed)
    assert first.labels != second.labels  # each in its own spelling
    assert first.head["head.bias"] is second.head["head.bias"]
    assert first.channels["value"] is second.channels["value"]
    assert len({id(one.egress) for one in allowed}) == 1


def test_a_site_is_held_to_the_images_that_it_announced() -> None:
    allowed = assigned(All())
    assert {site: one.images for site, one in allowed.items()} == {"a": 7, "b": 0}
    assert allowed["a"].own == ("Effusion", "Mass")
    assert allowed["a"].task.labels == ("Edema", "Mass", "Nodule", "Effusion")


METHOD = FedLSM(
    local=LocalTraining(lr=1e-2, iterations=3, batch_size=8),
    teaching=Teaching(start_round=1, positive=0.0, negative=0.0),
)
"""Every guess of the teacher is a positive pseudo-label: 3 steps of 8 - 4 images without the mixtures."""


@pytest.mark.complete
def test_a_run_writes_its_label_type_its_notes_and_the_weight_of_each_row(tiny: Any) -> None:
    """The site's own name of a class is not in the record, and no site has a Hernia: alpha guesses some."""
    labels = {"alpha": ("Mass", "Nodule"), "beta": ("Nodule", "Hernia")}
    table = tiny(METHOD, labels).configs["beta"].data.table
    header, *rows = table.read_text().splitlines()
    rows = [row.rsplit(",", 1)[0] + ",0" for row in rows]
    table.write_text("\n".join([header.replace("Hernia", "Zwerchfellbruch"), *rows]) + "\n")
    server = tiny(METHOD, labels, label_map={"Zwerchfellbruch": "Hernia"}, rounds=2).run()
    run = json.loads((server.record.folder / "run.json").read_text())
    assert run["label_type"] == "multilabel"
    weight, run_away = noted(server)
    assert weight == "Hernia has the class weight 1: no site has a positive and a negative."
    assert run_away.startswith("Hernia: from round 1 ")
    assert "(in round 2: alpha)" in run_away
    assert run["labels"] == ["Hernia", "Mass", "Nodule"]
    lines = [json.loads(x) for x in (server.record.folder / "history.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    for line in lines:
        alpha, beta = line["sites"]["alpha"], line["sites"]["beta"]
        assert (alpha["status"], beta["status"]) == ("accepted", "accepted")
        assert alpha["weight"] == beta["weight"] == 15  # three fifths of 25 images train
        assert alpha["scalars"] == beta["scalars"] == {"pseudo_positive": 12, "pseudo_negative": 0}
        assert alpha["rows"].keys() == beta["rows"].keys() == {"Hernia", "Mass", "Nodule"}
        assert alpha["rows"]["Hernia"] == beta["rows"]["Mass"] == 12  # guessed
        assert beta["rows"]["Hernia"] == 0  # known, and never there
        assert 0 < alpha["rows"]["Mass"] < 12
