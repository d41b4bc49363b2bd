"""Class weights by hand."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from suture.core.errors import ConfigError
from suture.federation.site.site import Site
from suture.learning.losses import weighted_bce
from suture.learning.training import LocalTraining
from suture.methods import METHODS
from suture.methods.base import ClassFacts, LabelStatistics
from suture.methods.composed import NAME, class_weights, received_weights
from suture.models.classifier import Layout
from suture.protocol.messages import TaskData

CENSUS = LabelStatistics(
    ("Edema", "Hernia", "Mass"),
    {"a": 100, "b": 60},
    {"a": {"Edema": (20, 80), "Mass": None}, "b": {"Edema": (10, 50), "Hernia": (0, 60)}},
)


def test_known_labels_alone_are_counted() -> None:
    facts = class_weights(CENSUS, "known")
    assert facts.tensors[NAME].tolist() == pytest.approx([130 / 30, 1.0, 1.0])


def test_the_program_takes_a_site_that_does_not_know_a_class_as_negative() -> None:
    statistics = LabelStatistics(
        ("Edema", "Mass"), {"a": 100, "b": 60}, {"a": {"Edema": (20, 80)}, "b": {"Mass": (6, 54)}}
    )
    facts = class_weights(statistics, "program")
    assert facts.tensors[NAME].tolist() == pytest.approx([(80 + 60) / 20, (54 + 100) / 6])


def test_a_site_that_withholds_a_count_is_not_taken_as_negative() -> None:
    counts = {"a": {"Mass": (20, 80)}, "b": {"Mass": None}, "c": {"Edema": (5, 25)}}
    statistics = LabelStatistics(("Mass",), {"a": 100, "b": 60, "c": 30}, counts)
    assert class_weights(statistics, "program").tensors[NAME].tolist() == [(80 + 30) / 20]


def test_a_class_without_counts_weighs_one_and_the_report_says_so() -> None:
    hernia, mass = class_weights(CENSUS, "known").notes
    assert hernia == "Hernia has the class weight 1: no site has a positive and a negative."
    assert mass == "Mass has the class weight 1: withheld by a."
    assert class_weights(CENSUS, "none").tensors == {}


def test_weighted_cross_entropy_by_hand() -> None:
    loss = weighted_bce(torch.zeros(1, 2), torch.tensor([[1.0, 0.0]]), torch.tensor([3.0, 5.0]))
    assert loss.tolist() == [pytest.approx([3 * math.log(2), math.log(2)])]


def test_a_task_of_one_label_has_no_weights_and_no_notes() -> None:
    """Nobody counts there, which is not the same as counts that are withheld."""
    assert class_weights(replace(CENSUS, label_type="multiclass"), "known") == ClassFacts()


@pytest.mark.parametrize("name", ["fedavg", "fedlsm"])
def test_counts_are_asked_for_where_there_are_weights(name: str) -> None:
    kind: Any = METHODS[name]
    for rule, tasks in (("known", ("multilabel",)), ("program", ("multilabel",)), ("none", ())):
        egress = kind(class_weights=rule).egress(Layout({}, {}))
        assert egress.counts == tasks
        assert ("counts" in egress.why) == bool(tasks)


def test_weights_that_were_asked_for_and_not_told_stop_the_site() -> None:
    weight = torch.tensor([2.0, 1.0])
    told, silent = TaskData("train", 3, channels={NAME: weight}), TaskData("train", 3)
    assert received_weights(told, "known", "multilabel") is weight
    with pytest.raises(ConfigError, match="sent no positive_weight with round 3, but class_weights='known'"):
        received_weights(silent, "known", "multilabel")
    assert received_weights(silent, "none", "multilabel") is None
    assert received_weights(silent, "known", "multiclass") is None


@pytest.mark.complete
@pytest.mark.parametrize("name", ["fedavg", "fedlsm"])
def test_every_payload_of_a_federation_carries_them(
    name: str, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negatives by positives of the sites that know a class, counted here from their tables."""
    seen: list[TaskData] = []
    answer = Site.answer
    monkeypatch.setattr(Site, "answer", lambda self, task: seen.append(task) or answer(self, task))
    kind: Any = METHODS[name]
    federation = tiny(kind(local=LocalTraining(lr=1e-2, iterations=1, batch_size=8)), rounds=2)
    server = federation.run()
    labels: dict[str, list[int]] = {}
    for config in federation.configs.values():
        with Path(config.data.table).open(newline="") as file:
            for row in csv.DictReader(file):
                for label in server.registry.labels if row["split"] == "train" else ():
                    labels.setdefault(label, []).extend([int(row[label])] if label in row else [])
    expected = {label: y.count(0) / y.count(1) for label, y in labels.items()}
    trained = [payload for payload in seen if payload.task == "train"]
    assert len(trained) == 2 * 3
    for payload in trained:
        assert payload.channels[NAME].tolist() == pytest.approx([expected[x] for x in payload.labels])
    assert len({round(weight, 3) for weight in expected.values()}) > 1
