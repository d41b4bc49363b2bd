"""What the site's filter and the server refuse: one malicious update of each kind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from suture.core.errors import LabelError, RejectedUpdate
from suture.core.labels import LabelSet
from suture.core.privacy import PrivacyConfig
from suture.learning.training import LocalTraining
from suture.methods.base import Method
from suture.methods.fedavg import FedAvg
from suture.models.classifier import Layout
from suture.protocol.check import AllowedReply, check_reply
from suture.protocol.egress import NUM_SAMPLES, Egress
from suture.protocol.messages import (
    Abstain,
    ClassScore,
    Evaluation,
    Figures,
    Metrics,
    SiteInfo,
    TaskData,
    Update,
    ones,
)
from suture.protocol.packing import pack, unpack
from suture_papers.fedlsm.fedlsm import FedLSM
from suture_papers.fedmas.fedmas import FedMAS

F32 = "torch.float32"
ALLOWED = AllowedReply(
    TaskData("train", 4, 3, labels=("Mass", "Nodule")),
    Egress({"w": ((2, 3), F32)}, {"head.weight": ((3,), F32), "head.bias": ((), F32)}),
    ("Mass", "Nodule"),
)


def to(**task: Any) -> AllowedReply:
    """What is allowed in reply to another task."""
    return replace(ALLOWED, task=replace(ALLOWED.task, **task))


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
    check_reply(GOOD, ALLOWED)
    check_reply(Abstain("out_of_memory", "MemoryError"), ALLOWED)


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
        ({"channels": {"counts": torch.ones(2)}}, "not declared"),
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
        check_reply(replace(GOOD, **change), ALLOWED)


class Counted(str):
    """A name that counts how often one is compared with another."""

    times = 0

    def __eq__(self, other: object) -> bool:
        Counted.times += 1
        return super().__eq__(other)

    __hash__ = str.__hash__


def test_a_name_that_is_twice_among_thousands_is_found_at_once() -> None:
    names = tuple(Counted(f"Finding {i}") for i in (*range(9_999), 9_998))
    with pytest.raises(RejectedUpdate, match="'Finding 9998' appears twice"):
        check_reply(replace(GOOD, labels=names), ALLOWED)
    with pytest.raises(LabelError, match="'Finding 9998' appears twice"):
        LabelSet(names)
    assert 0 < Counted.times < len(names), "each name is looked for among all others"


def test_the_wrong_kind_of_answer_is_refused() -> None:
    with pytest.raises(RejectedUpdate, match="is not an answer to 'train'"):
        check_reply(SiteInfo(("Mass",), {}, 1, "x"), ALLOWED)
    with pytest.raises(RejectedUpdate, match="is not an answer to 'train'"):
        check_reply(Evaluation(METRICS), ALLOWED)
    with pytest.raises(RejectedUpdate, match="no labels"):
        check_reply(SiteInfo((), {}, 1, "x"), to(task="handshake"))


LIMITED = replace(ALLOWED, images=400, limits=PrivacyConfig())
COARSE = Metrics(
    3, "validation", 400, 0.32, {"Mass": ClassScore(0.85, 0.8, 0.9, 40, 360)}, {"accuracy": 0.905}
)
FIGURE = COARSE.classes["Mass"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"metrics": replace(COARSE, loss=0.321)}, "loss has more digits than 400 images support"),
        ({"metrics": replace(COARSE, overall={"accuracy": 0.9049})}, "accuracy has more digits"),
        ({"metrics": replace(COARSE, classes={"Mass": replace(FIGURE, auroc=0.8512)})}, "AUROC has more"),
        ({"metrics": replace(COARSE, classes={"Mass": replace(FIGURE, low=0.8512)})}, "AUROC has more"),
        ({"metrics": replace(COARSE, classes={"Mass": replace(FIGURE, recall=0.8512)})}, "AUROC has more"),
        ({"train_loss": 0.321}, "train_loss has more digits"),
    ],
)
def test_the_sites_filter_refuses_figures_finer_than_its_limits(change: dict[str, Any], says: str) -> None:
    """The server cannot know the limits of a site; at a site without limits six digits leave."""
    reply = replace(GOOD, metrics=COARSE, train_loss=0.34)
    check_reply(reply, LIMITED)
    finer = replace(reply, **change)
    with pytest.raises(RejectedUpdate, match=says):
        check_reply(finer, LIMITED)
    check_reply(finer, ALLOWED)
    check_reply(finer, replace(LIMITED, limits=PrivacyConfig(min_count=0, min_loss=0)))


ASKED = replace(to(task="handshake"), egress=replace(ALLOWED.egress, counts=("multilabel",)))


@pytest.mark.parametrize(
    ("counts", "allowed"),
    [
        ({"Mass": (3, 9)}, to(task="handshake")),  # nobody asked
        ({}, ASKED),
        ({"Mass": (3, 9)}, ASKED),
        ({"Mass": (3, 9), "Nodule": None, "Hernia": (1, 1)}, ASKED),
    ],
)
def test_counts_are_of_the_sites_classes_and_only_where_they_are_asked_for(
    counts: dict[str, Any], allowed: AllowedReply
) -> None:
    info = SiteInfo(("Mass", "Nodule"), {"train": 12}, 1, "x", counts=counts)
    with pytest.raises(RejectedUpdate, match="counts of other classes than were asked for"):
        check_reply(info, allowed)
    check_reply(replace(info, counts={"Mass": (3, 9), "Nodule": None}), ASKED)
    check_reply(replace(info, counts={}), to(task="handshake"))


def test_counts_are_asked_of_the_tasks_that_use_them() -> None:
    info = SiteInfo(("Mass", "Nodule"), {"train": 12}, 1, "x", label_type="multiclass")
    check_reply(info, ASKED)
    with pytest.raises(RejectedUpdate, match="counts of other classes than were asked for"):
        check_reply(replace(info, counts={"Mass": (3, 9), "Nodule": None}), ASKED)


def test_a_weight_of_images_is_the_number_that_was_announced() -> None:
    allowed = replace(ALLOWED, egress=replace(ALLOWED.egress, weight=NUM_SAMPLES), images=12)
    check_reply(replace(GOOD, weight=12.0), allowed)
    for weight in (1.0, 11.0, 12.5):
        with pytest.raises(RejectedUpdate, match=rf"weight is {weight}, outside \[12.0, 12.0\]"):
            check_reply(replace(GOOD, weight=weight), allowed)


LAYOUT = Layout(ALLOWED.egress.shared, ALLOWED.egress.head)
IN_PASSES = LocalTraining(epochs=2)
"""A rescue factor is at most 4 (the largest distance) squared, for each class of the site and epoch: 32."""


def rows(*weights: float) -> torch.Tensor:
    return torch.tensor(weights, dtype=torch.float64)


@pytest.mark.parametrize(
    ("method", "honest", "lies"),
    [
        (FedAvg(), (12.0, rows(12, 12)), [(12.0, rows(12, 1e9)), (12.0, rows(12, 0)), (12.0, rows(12, 13))]),
        (
            FedAvg(rows="owners"),
            (12.0, rows(12, 0)),
            [(12.0, rows(1e9, 0)), (12.0, rows(12, 1e9)), (12.0, rows(12, 12)), (12.0, rows(0, 0))],
        ),
        (
            FedLSM(proxies="owners"),
            (12.0, rows(12, 0)),
            [(12.0, rows(1e9, 0)), (12.0, rows(12, 12)), (1e9, rows(1e9, 0))],
        ),
        (FedLSM(), (12.0, rows(12800, 3)), [(12.0, rows(12801, 3)), (12.0, rows(-1, 3))]),
        (
            FedMAS(local=IN_PASSES),
            (32.0, rows(32, 32)),
            [(32.5, rows(32.5, 32.5)), (1e9, rows(1e9, 1e9)), (30.0, rows(30, 31)), (0.0, rows(0, 0))],
        ),
        (
            FedMAS(local=IN_PASSES, rescue="normalised"),
            (1.0, rows(1, 1)),
            [(1.5, rows(1.5, 1.5)), (1.0, rows(1, 2))],
        ),
        (FedMAS(aggregation="images"), (12.0, rows(12, 12)), [(13.0, rows(13, 13)), (12.0, rows(1e9, 12))]),
    ],
    ids=str,
)
def test_a_site_counts_as_it_may_and_no_more(
    method: Method, honest: tuple[float, torch.Tensor], lies: list[tuple[float, torch.Tensor]]
) -> None:
    """It announced 12 images, and annotates the first of the two classes."""
    allowed = replace(ALLOWED, egress=method.egress(LAYOUT), images=12, own=("Mass",))
    scalars = dict.fromkeys(allowed.egress.scalars, 0.0)
    metrics = replace(METRICS, classes={})
    good = replace(GOOD, scalars=scalars, metrics=metrics)
    check_reply(replace(good, weight=honest[0], class_weights=honest[1]), allowed)
    for weight, class_weights in lies:
        with pytest.raises(RejectedUpdate, match="weight"):
            check_reply(replace(good, weight=weight, class_weights=class_weights), allowed)


def test_a_figure_that_was_not_asked_for_is_refused() -> None:
    tested = to(task="evaluate", round=3)
    for name in ("accuracy", "balanced_accuracy", "precision", "recall", "f1"):
        check_reply(Evaluation(replace(METRICS, overall={name: 0.5})), tested)
    secret = replace(METRICS, overall={"accuracy": 0.5, "mean_age": 61.5})
    with pytest.raises(RejectedUpdate, match="the metric 'mean_age' was not asked for"):
        check_reply(Evaluation(secret), tested)
    with pytest.raises(RejectedUpdate, match="the metric 'mean_age' was not asked for"):
        check_reply(replace(GOOD, metrics=secret), ALLOWED)


def test_figures_by_attribute_are_of_test_data_and_known_names() -> None:
    tested = to(task="evaluate", round=3, split="test")
    light = Figures(9, 0.5, {"balanced_accuracy": 0.5})
    found = replace(METRICS, split="test", attributes={"light": light})
    check_reply(Evaluation(found), tested)
    with pytest.raises(RejectedUpdate, match="figures by attribute are of test data alone"):
        check_reply(Evaluation(replace(found, split="validation")), to(task="evaluate", round=3))
    with pytest.raises(RejectedUpdate, match="figures by attribute are of test data alone"):
        check_reply(replace(GOOD, metrics=replace(METRICS, attributes={"light": light})), ALLOWED)
    secret = replace(found, attributes={"light": replace(light, overall={"mean_age": 61.5})})
    with pytest.raises(RejectedUpdate, match="the metric 'mean_age' was not asked for"):
        check_reply(Evaluation(secret), tested)
    many = pack(Evaluation(replace(found, attributes={})))
    each = {"n": 1, "auroc": None, "overall": {}}
    many.header["metrics"]["attributes"] = {f"patient {i}": each for i in range(21)}
    with pytest.raises(RejectedUpdate, match="at most 20 items"):
        unpack(many)


def test_a_local_model_is_measured_where_the_method_keeps_it_and_on_test_data() -> None:
    tested = replace(to(task="evaluate", round=3, split="test"), egress=replace(ALLOWED.egress, local=True))
    metrics = replace(METRICS, split="test")
    check_reply(Evaluation(metrics, metrics), tested)
    check_reply(Evaluation(metrics), tested)
    validation = replace(tested, task=replace(tested.task, split="validation"))
    for allowed in (to(task="evaluate", round=3, split="test"), validation):
        measured = replace(metrics, split=allowed.task.split)
        with pytest.raises(RejectedUpdate, match="figures of a local model that were not asked for"):
            check_reply(Evaluation(measured, measured), allowed)
    with pytest.raises(RejectedUpdate, match="metrics of round 2"):
        check_reply(Evaluation(metrics, replace(metrics, round=2)), tested)


def test_what_a_method_tells_of_classes_is_not_for_the_server() -> None:
    """Fed-MAS's divergences are written down at a simulated site; an update that carries them is refused."""
    allowed = replace(ALLOWED, egress=FedMAS().egress(Layout(ALLOWED.egress.shared, ALLOWED.egress.head)))
    fine = replace(GOOD, weight=22.0, class_weights=22.0 * GOOD.class_weights)
    check_reply(fine, allowed)
    divergence = {"divergence": torch.tensor([3.0, 2.0])}
    with pytest.raises(RejectedUpdate, match="channels/divergence was not declared"):
        check_reply(replace(fine, channels=divergence), allowed)
    with pytest.raises(RejectedUpdate, match="scalars/divergence was not declared"):
        check_reply(replace(fine, scalars={"divergence": 3.0}), allowed)


@pytest.mark.parametrize(
    ("score", "says"),
    [
        (ClassScore(1.5, None, None, 4, 5), "AUROC is 1.5"),
        (ClassScore(float("nan"), None, None, 4, 5), "AUROC is nan"),
        (ClassScore(0.5, -0.1, None, 4, 5), "AUROC is -0.1"),
        (ClassScore(0.123456789, None, None, 4, 5), "more than six digits"),
        (ClassScore(0.5, None, None, -1, 5), "a count is -1"),
        (ClassScore(0.5, None, None, 4, 10**12), "a count is"),
    ],
)
def test_a_figure_that_is_none_is_refused(score: ClassScore, says: str) -> None:
    with pytest.raises(RejectedUpdate, match=says):
        check_reply(replace(GOOD, metrics=replace(METRICS, classes={"Mass": score})), ALLOWED)


@pytest.mark.parametrize(
    "change",
    [
        {"train_loss": 0.123456789},
        {"metrics": replace(METRICS, loss=0.123456789)},
        {"metrics": replace(METRICS, overall={"accuracy": 0.123456789})},
        {"scalars": {"query_loss": 0.123456789}},
    ],
    ids=str,
)
def test_digits_that_nobody_needs_do_not_cross(change: dict[str, Any]) -> None:
    """They could spell a patient's number."""
    scalars = {"query_loss": (0.0, 1.0)} if "scalars" in change else {}
    allowed = replace(ALLOWED, egress=replace(ALLOWED.egress, scalars=scalars))
    with pytest.raises(RejectedUpdate, match="more than six digits"):
        check_reply(replace(GOOD, **change), allowed)


def test_figures_of_the_test_data_wait_until_they_are_asked_for() -> None:
    with pytest.raises(RejectedUpdate, match=r"metrics of round 3 \(test\) were not asked for"):
        check_reply(replace(GOOD, metrics=replace(METRICS, split="test")), ALLOWED)


def test_how_many_pseudo_labels_were_right_is_not_for_the_server() -> None:
    """A site that knows the truth, as in a simulation, has no way to send what it counted."""
    egress = FedLSM().egress(Layout(ALLOWED.egress.shared, ALLOWED.egress.head))
    allowed = replace(ALLOWED, egress=egress, images=12)
    made = {"pseudo_positive": 5.0, "pseudo_negative": 0.0}
    fine = replace(GOOD, weight=12.0, scalars=made)
    check_reply(fine, allowed)
    for leak in ({"pseudo_right": 3.0}, {"Mass": 3.0}):
        with pytest.raises(RejectedUpdate, match=f"scalars/{min(leak)} was not declared"):
            check_reply(replace(fine, scalars=made | leak), allowed)
    right = {"right": torch.tensor([3, 0])}
    with pytest.raises(RejectedUpdate, match="channels/right was not declared"):
        check_reply(replace(fine, channels=right), allowed)
