"""What the site's filter and the server refuse: one malicious update of each kind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from suture.check import Expectation, check_reply
from suture.errors import RejectedUpdate
from suture.evaluation.metrics import ClassScore
from suture.messages import Abstain, Evaluation, Hello, Metrics, Update, ones
from suture.methods.contract import Egress

F32 = "torch.float32"
EXPECTED = Expectation(
    "train",
    4,
    3,
    "validation",
    ("Mass", "Nodule"),
    ("Mass", "Nodule"),
    Egress({"w": ((2, 3), F32)}, {"head.weight": ((3,), F32), "head.bias": ((), F32)}),
)
METRICS = Metrics(3, "validation", 9, 0.3, {"Mass": ClassScore(0.5, None, None, 4, 5)})
GOOD = Update(
    4,
    ("Mass", "Nodule"),
    {"w": torch.ones(2, 3)},
    {"head.weight": torch.ones(2, 3), "head.bias": torch.ones(2)},
    ones(("Mass", "Nodule")),
    metrics=METRICS,
)


def test_what_was_declared_passes() -> None:
    check_reply(GOOD, EXPECTED)
    check_reply(Abstain("out_of_memory", "MemoryError"), EXPECTED)


def nan() -> torch.Tensor:
    tensor = torch.ones(2, 3)
    tensor[1, 1] = float("nan")
    return tensor


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"round": 3}, "round 3 instead of 4"),
        ({"kind": "gradient"}, "kind"),
        ({"labels": ("Mass", "Mass")}, "appears twice"),
        ({"labels": ("Mass", "Hernia")}, "unknown label 'Hernia'"),
        ({"labels": ("Nodule", "Mass")}, "labels"),
        ({"labels": ("Mass",)}, "labels of 1 rows"),
        ({"shared": {}}, "shared/w is missing"),
        ({"shared": {"w": torch.ones(2, 3), "x": torch.ones(1)}}, "shared/x was not declared"),
        ({"shared": {"w": torch.ones(3, 2)}}, "shape"),
        ({"shared": {"w": torch.ones(2, 3, dtype=torch.float64)}}, "float64"),
        ({"shared": {"w": nan()}}, "not finite"),
        ({"shared": {"w": torch.full((2, 3), float("inf"))}}, "not finite"),
        ({"head": {"head.weight": torch.ones(1, 3), "head.bias": torch.ones(2)}}, "shape"),
        ({"class_tensors": {"counts": torch.ones(2)}}, "not declared"),
        ({"weight": 1e6}, "weight is 1000000.0"),
        ({"weight": -1.0}, "weight"),
        ({"class_weights": torch.tensor([1.0, 9.0], dtype=torch.float64)}, "class_weights outside"),
        ({"class_weights": torch.tensor([1.0, float("nan")], dtype=torch.float64)}, "not finite"),
        ({"class_weights": ones(("Mass",))}, "shape"),
        ({"scalars": {"leak": 1.0}}, "scalars/leak was not declared"),
        ({"metrics": replace(METRICS, round=2)}, "not asked for"),
        (
            {"metrics": replace(METRICS, classes={"Hernia": ClassScore(0.5, None, None, 1, 1)})},
            "unknown label",
        ),
    ],
)
def test_malicious_update_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(RejectedUpdate, match=says):
        check_reply(replace(GOOD, **change), EXPECTED)


def test_the_wrong_kind_of_answer_is_refused() -> None:
    with pytest.raises(RejectedUpdate, match="no answer to 'train'"):
        check_reply(Hello(("Mass",), {}, 1, "x"), EXPECTED)
    with pytest.raises(RejectedUpdate, match="no answer to 'train'"):
        check_reply(Evaluation(METRICS), EXPECTED)
    with pytest.raises(RejectedUpdate, match="no labels"):
        check_reply(Hello((), {}, 1, "x"), replace(EXPECTED, task="hello"))
