"""Class weights by hand."""

from __future__ import annotations

import math

import pytest
import torch

from suture.methods.class_weights import NAME, class_weights, weighted_bce
from suture.methods.contract import Census

CENSUS = Census(
    ("Edema", "Hernia", "Mass"),
    {"a": 100, "b": 60},
    {"a": {"Edema": (20, 80), "Mass": None}, "b": {"Edema": (10, 50), "Hernia": (0, 60)}},
)


def test_known_labels_alone_are_counted() -> None:
    facts = class_weights(CENSUS, "known")
    assert facts.tensors[NAME].tolist() == pytest.approx([130 / 30, 1.0, 1.0])


def test_the_program_takes_a_site_that_does_not_know_a_class_as_negative() -> None:
    census = Census(
        ("Edema", "Mass"), {"a": 100, "b": 60}, {"a": {"Edema": (20, 80)}, "b": {"Mass": (6, 54)}}
    )
    facts = class_weights(census, "program")
    assert facts.tensors[NAME].tolist() == pytest.approx([(80 + 60) / 20, (54 + 100) / 6])


def test_a_class_without_counts_weighs_one_and_the_report_says_so() -> None:
    hernia, mass = class_weights(CENSUS, "known").notes
    assert hernia == "Hernia has the class weight 1: no site has a positive and a negative."
    assert mass == "Mass has the class weight 1: withheld by a."
    assert class_weights(CENSUS, "none").tensors == {}


def test_weighted_cross_entropy_by_hand() -> None:
    loss = weighted_bce(torch.zeros(1, 2), torch.tensor([[1.0, 0.0]]), torch.tensor([3.0, 5.0]))
    assert loss.tolist() == [pytest.approx([3 * math.log(2), math.log(2)])]
