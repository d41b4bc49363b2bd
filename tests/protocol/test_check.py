"""What a site's filter and the server refuse: an answer that differs in one thing from what was declared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, combinations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from suture.core.errors import ConfigError, LabelError, RejectedUpdate
from suture.core.labels import LabelSet
from suture.core.privacy import PrivacyConfig
from suture.data.batch import Augmentation
from suture.federation.plan import Plan
from suture.learning.training import LocalTraining
from suture.methods import METHODS
from suture.methods.averaging import LocalAveraging
from suture.methods.base import About, LabelUse, Method, hyperparameters
from suture.methods.fedavg import FedAvg
from suture.models import ModelSpec
from suture.protocol.check import AllowedReply, check_reply
from suture.protocol.decisions import CELLS, JOINED, Decided, DecidedClass, DecidedGroup, Decision
from suture.protocol.egress import (
    CLASSES,
    NUM_SAMPLES,
    VARIABLE,
    WEIGHT,
    Channel,
    Egress,
    Layout,
    Way,
    check_declared,
)
from suture.protocol.messages import (
    KEYS,
    LARGEST,
    Abstain,
    ClassScore,
    Evaluation,
    Figures,
    Masking,
    MaskKeys,
    MaskTask,
    Metrics,
    Scores,
    SiteInfo,
    Spent,
    TaskData,
    Update,
)
from suture.testing import check_method
from suture_papers.fedlsm.fedlsm import FedLSM
from suture_papers.fedmas.fedmas import FedMAS
from world import refused

FINE = 0.123456789
"""Further digits could spell a patient's number."""

LAYOUT = Layout({"w": ((2, 3), "torch.float32")}, {"head.weight": ((3,), "torch.float32")})
LIMITS = PrivacyConfig(min_count=10, min_loss=20, round_counts=5)
NO_LIMITS = PrivacyConfig(min_count=0, min_loss=0)


def rows(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def check(answer: Any, allowed: AllowedReply, change: dict[str, Any], named: str) -> None:
    """The answer passes, and does not with the change."""
    check_reply(answer, allowed)
    with refused(named, by=RejectedUpdate):
        check_reply(replace(answer, **change), allowed)


# Updates


FORMS = st.tuples(
    st.lists(st.integers(1, 3), max_size=2).map(tuple),
    st.sampled_from(["torch.float32", "torch.float64", "torch.int64"]),
)


@st.composite
def declared(draw: st.DrawFn) -> tuple[Update, AllowedReply]:
    """A declaration, and an update that keeps it, of a site with 12 images that annotates A alone."""
    labels = tuple("ABC"[: draw(st.integers(2, 3))])
    shared = draw(st.dictionaries(st.sampled_from(["w", "b.bias", "n"]), FORMS, min_size=1))
    head = draw(st.dictionaries(st.sampled_from(["head.weight", "head.bias"]), FORMS, min_size=1))
    whose, scalars = draw(st.sampled_from(["own", "others"])), draw(st.sets(st.sampled_from("xyz")))
    channels = (
        Channel("told", "up", (CLASSES, 2), range=(0.0, 5.0), rows=whose),
        Channel("seen", "up", (CLASSES,), range=NUM_SAMPLES),
        Channel("kept", "site", (2,)),
    )
    egress = Egress(shared, head, channels, NUM_SAMPLES, WEIGHT, scalars=dict.fromkeys(scalars, (-1.0, 1.0)))
    known = torch.tensor([(label == "A") == (whose == "own") for label in labels]).float()
    sent = {"told": known.view(-1, 1).repeat(1, 2), "seen": torch.full((len(labels),), 12.0)}
    whole, of_rows = (
        {
            name: torch.ones((*first, *shape), dtype=getattr(torch, kind[6:]))
            for name, (shape, kind) in f.items()
        }
        for f, first in ((shared, ()), (head, (len(labels),)))
    )
    weights = torch.full((len(labels),), 12.0, dtype=torch.float64)
    update = Update(
        4, labels, whole, of_rows, weights, 12.0, channels=sent, scalars=dict.fromkeys(scalars, 0.5)
    )
    return update, AllowedReply(TaskData("train", 4, 3, labels=labels), egress, ("A",), images=12)


def deviations(update: Update, allowed: AllowedReply, place: int) -> Iterator[tuple[dict[str, Any], str]]:
    """Each thing that can be another one, and what a refusal names of it."""
    for group in ("shared", "head", "channels"):
        tensors = getattr(update, group)
        yield {group: {**tensors, "kept": torch.ones(2)}}, f"{group}/kept"
        for name, tensor in tensors.items():
            yield {group: {other: t for other, t in tensors.items() if other != name}}, f"{group}/{name}"
            wrong = [tensor.unsqueeze(0), tensor[:0] if tensor.dim() else tensor.view(1), tensor.half()]
            for number in (float("nan"), float("inf"), -float("inf")) if tensor.is_floating_point() else ():
                wrong.append(tensor.clone())
                wrong[-1].view(-1)[place % tensor.numel()] = number
            yield from (({group: {**tensors, name: one}}, f"{group}/{name}") for one in wrong)
    told = update.channels["told"]
    for other in (told - 1, told * 6, 1 - told):
        yield {"channels": {**update.channels, "told": other}}, "channels/told"
    yield {"channels": {**update.channels, "seen": update.channels["seen"] + 1}}, "channels/seen"
    yield {"scalars": {**update.scalars, "told": 0.5}}, "scalars/told"
    for name in update.scalars:
        yield {"scalars": {n: v for n, v in update.scalars.items() if n != name}}, f"scalars/{name}"
        yield from (({"scalars": {**update.scalars, name: v}}, name) for v in (1.5, -1.5, FINE))
    yield from (({"weight": weight}, "weight") for weight in (11.0, 13.0, -12.0, 1e9))
    yield {"class_weights": update.class_weights.float()}, "class_weights"
    yield {"class_weights": update.class_weights[:-1]}, "class_weights"
    for i, label in enumerate(update.labels):
        for weight in (0.0, 13.0, float("nan")):
            other = update.class_weights.clone()
            other[i] = weight
            yield {"class_weights": other}, "class_weights" if weight != weight else label
    first, *rest = update.labels
    yield {"labels": (*rest, first)}, "labels"
    yield {"labels": tuple(rest)}, "labels"
    yield {"labels": (first, first, *rest[1:])}, first
    yield {"labels": (*rest, "Z")}, "Z"
    yield {"round": 3}, "3"
    yield {"state": 4}, "4"
    yield {"kind": "gradient"}, "gradient"
    yield {"train_loss": FINE}, "train_loss"


@given(declared(), st.integers(0, 99))
def test_an_update_that_differs_in_one_thing_is_refused_by_its_name(
    pair: tuple[Update, AllowedReply], place: int
) -> None:
    update, allowed = pair
    check_reply(update, allowed)
    check_reply(replace(update, state=3), allowed)
    for change, named in deviations(update, allowed, place):
        with refused(named, by=RejectedUpdate):
            check_reply(replace(update, **change), allowed)


IN_PASSES = LocalTraining(epochs=2)
"""A rescue factor is at most 4 (the largest distance) squared, for each class of the site and epoch: 32."""


@pytest.mark.parametrize(
    ("method", "honest", "lies"),
    [
        (FedAvg(), (12.0, rows(12, 12)), [(12.0, rows(12, 1e9)), (12.0, rows(12, 0)), (12.0, rows(12, 13))]),
        (
            FedAvg(rows="owners"),
            (12.0, rows(12, 0)),
            [(12.0, rows(1e9, 0)), (12.0, rows(12, 1e9)), (12.0, rows(12, 12)), (12.0, rows(0, 0))],
        ),
        (FedLSM(), (12.0, rows(12800, 3)), [(12.0, rows(12801, 3)), (12.0, rows(-1, 3))]),
        (
            FedMAS(local=IN_PASSES),
            (32.0, rows(32, 32)),
            [(32.5, rows(32.5, 32.5)), (1e9, rows(1e9, 1e9)), (30.0, rows(30, 31)), (0.0, rows(0, 0))],
        ),
        (FedMAS(rescue="normalised"), (1.0, rows(1, 1)), [(1.5, rows(1.5, 1.5)), (1.0, rows(1, 2))]),
    ],
    ids=str,
)
def test_a_site_counts_as_it_may_and_no_more(
    method: Method, honest: tuple[float, Tensor], lies: list[tuple[float, Tensor]]
) -> None:
    """It announced 12 images, and annotates the first of the two classes. What it found stays with it."""
    allowed = AllowedReply(
        TaskData("train", 1, labels=("Mass", "Nodule")), method.egress(LAYOUT), ("Mass",), 12
    )
    scalars, shared = dict.fromkeys(allowed.egress.scalars, 0.0), {"w": torch.ones(2, 3)}
    update = Update(
        1,
        ("Mass", "Nodule"),
        shared,
        {"head.weight": torch.ones(2, 3)},
        honest[1],
        honest[0],
        scalars=scalars,
    )
    for weight, class_weights in lies:
        check(update, allowed, {"weight": weight, "class_weights": class_weights}, "weight")
    for leak in ("right", "divergence", "pseudo_right"):
        check(update, allowed, {"scalars": {**scalars, leak: 3.0}}, f"scalars/{leak}")
        check(update, allowed, {"channels": {leak: torch.tensor([3, 0])}}, f"channels/{leak}")


def test_a_round_of_other_parts_keeps_its_own_ranges() -> None:
    """Of a loss that may be withheld, of changes, of masks, of a method's own check, and of what varies."""
    losses, labels, weights = {"query_loss": (0.0, 5.0)}, ("A", "B"), torch.ones(2, dtype=torch.float64)
    wide = Channel("seen", "up", (CLASSES, VARIABLE))
    variance = {"w": ((2, 3), "torch.float32"), "n.running_var": ((1,), "torch.float32")}
    egress = Egress(variance, {}, (wide,), class_weight=(0.0, 2.0), losses=losses)
    allowed = AllowedReply(TaskData("train", labels=labels), egress, labels, 12, PrivacyConfig(min_loss=20))
    shared = {"w": torch.ones(2, 3), "n.running_var": torch.zeros(1)}
    update = Update(0, labels, shared, {}, weights, channels={"seen": torch.ones(2, 1)})
    for change, named in (
        ({"shared": {**shared, "n.running_var": torch.tensor([-1e-9])}}, "n.running_var"),
        ({"class_weights": rows(1, 2.5)}, "class_weights"),
        ({"class_weights": rows(1, float("nan"))}, "class_weights"),
        ({"channels": {"seen": torch.ones(2, 3)}}, "channels/seen"),  # more than there are classes
        ({"channels": {"seen": torch.full((2, 1), 2.0 * LARGEST)}}, "channels/seen"),
        ({"scalars": {"query_loss": 0.3}}, "query_loss"),  # of 12 images
        ({"train_loss": 0.3}, "train_loss"),
    ):
        check(update, allowed, change, named)
    check_reply(replace(update, scalars={"query_loss": 0.3}), replace(allowed, limits=None))
    check_reply(replace(update, train_loss=0.3), replace(allowed, images=400))

    gradients = replace(allowed, egress=replace(egress, kind="gradient"))
    check_reply(
        replace(update, kind="gradient", shared={**shared, "n.running_var": -torch.ones(1)}), gradients
    )

    def never(_: Update) -> None:
        raise RejectedUpdate("never")

    masked = replace(allowed, task=replace(allowed.task, mask=MaskTask("update", "0" * 64)))
    masked = replace(masked, egress=replace(egress, check=never))
    hidden = {"w": torch.full((2, 3), -(2**62)), "n.running_var": torch.tensor([-5])}
    check_reply(replace(update, shared=hidden), masked)
    with refused("shared/", by=RejectedUpdate):
        check_reply(update, masked)
    with refused("never", by=RejectedUpdate):
        check_reply(update, replace(allowed, egress=replace(egress, check=never)))


class Counted(str):
    """A name that counts how often one is compared with another."""

    times = 0

    def __eq__(self, other: object) -> bool:
        Counted.times += 1
        return super().__eq__(other)

    __hash__ = str.__hash__


def test_a_name_that_is_twice_among_thousands_is_found_at_once() -> None:
    names = tuple(Counted(f"Finding {i}") for i in (*range(9_999), 9_998))
    info = SiteInfo(("A",), {"train": 12}, 1, "code")
    for by, make in (
        (RejectedUpdate, lambda: check_reply(replace(info, labels=names), HANDSHAKE)),
        (LabelError, lambda: LabelSet(names)),
    ):
        with refused("'Finding 9998'", by=by):
            make()
    assert 0 < Counted.times < len(names), "each name is looked for among all others"


# The other answers


LEDGER = "0" * 64
HANDSHAKE = AllowedReply(TaskData("handshake"), Egress({}, {}))
ASKED = replace(HANDSHAKE, egress=Egress({}, {}, counts=("multilabel",), prior=True), ledger=LEDGER)
INFO = SiteInfo(
    ("Mass", "Nodule"),
    {"train": 12},
    1,
    "code",
    counts={"Mass": (3, 9), "Nodule": None},
    prior="digest",
    codes={"Mass": ("RADLEX:RID3874",)},
    ledger=LEDGER,
)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"labels": ()}, "label"),
        ({"labels": ("Mass", "Mass")}, "'Mass'"),
        ({"counts": {}}, "counts"),
        ({"counts": {"Mass": (3, 9)}}, "counts"),
        ({"counts": {**INFO.counts, "Hernia": (1, 1)}}, "counts"),
        ({"label_type": "multiclass"}, "counts"),  # which the task of these labels does not use
        ({"prior": None}, "prior"),
        ({"codes": {"Hernia": ("RADLEX:RID3874",)}}, "'Hernia'"),
        ({"codes": dict.fromkeys(INFO.labels, ("RADLEX:RID3874",))}, "RID3874"),
        ({"ledger": "1" * 64}, "ledger"),
        ({"ledger": None}, "ledger"),
    ],
)
def test_a_site_introduces_itself_as_it_was_asked_to(change: dict[str, Any], named: str) -> None:
    check(INFO, ASKED, change, named)
    unasked = replace(INFO, counts={}, prior=None)
    check(unasked, HANDSHAKE, {"counts": INFO.counts}, "counts")
    check(unasked, HANDSHAKE, {"prior": "digest"}, "prior")


STEPS: dict[str, tuple[set[str], set[str]]] = {
    "keys": ({"keys"}, set()),
    "shares": ({"sealed"}, set()),
    "survivors": ({"signature"}, {"unopened"}),
    "reveal": ({"seeds"}, {"secrets"}),
}
"""What an answer to a step has, and may have."""

MASKED: dict[str, Any] = {
    "keys": MaskKeys(LEDGER, LEDGER, LEDGER, (7, 8), "certificate"),
    "sealed": {"b": "00"},
    "signature": "00",
    "unopened": ("b",),
    "seeds": {"b": "00"},
    "secrets": {"c": "00"},
}


@pytest.mark.parametrize("step", STEPS)
def test_a_step_of_secure_aggregation_has_what_is_asked_for_and_nothing_else(step: Any) -> None:
    needed, further = STEPS[step]
    asked = MaskTask(step, LEDGER, {"Mass": 7, "Nodule": 8})
    allowed = AllowedReply(TaskData("mask", mask=asked), Egress({}, {}))
    for sent in map(set, chain.from_iterable(combinations(MASKED, n) for n in range(len(MASKED) + 1))):
        answer = Masking(step, **{name: MASKED[name] for name in sent})
        if needed <= sent <= needed | further:
            check_reply(answer, allowed)
            for other in ({"mask": None}, {"mask": replace(asked, step="update")}):
                with refused(step, by=RejectedUpdate):
                    check_reply(answer, replace(allowed, task=replace(allowed.task, **other)))
        else:
            with refused(step, by=RejectedUpdate):
                check_reply(answer, allowed)
    if step == "keys":
        with refused("keys", by=RejectedUpdate):
            check_reply(Masking(step, keys=replace(MASKED["keys"], rows=(7,))), allowed)


def histograms(first: int, last: int = 20, *, cells: int = CELLS, dtype: torch.dtype = torch.int32) -> Any:
    """Counts of a class in its first cell and in its last."""
    counts = torch.full((1, cells), JOINED, dtype=dtype)
    counts[0, 0], counts[0, -1] = first, last
    return {"positives": counts, "negatives": counts}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"round": 3}, "3"),
        ({"labels": ("Nodule",)}, "'Nodule'"),
        ({"labels": ("Mass", "Mass")}, "'Mass'"),
        ({"class_tensors": {"positives": histograms(10)["positives"]}}, "class_tensors/negatives"),
        ({"class_tensors": histograms(10, cells=3)}, "class_tensors/"),
        ({"class_tensors": histograms(10, dtype=torch.int64)}, "class_tensors/"),
        ({"class_tensors": histograms(5)}, "class_tensors/"),  # of fewer than 10 patients
        ({"class_tensors": histograms(12)}, "class_tensors/"),  # exact
        ({"class_tensors": histograms(10, JOINED)}, "class_tensors/"),  # joined with no other
        ({"class_tensors": histograms(LARGEST + 5)}, "class_tensors/"),
        ({"spent": Spent(1.234, 1, 1, 1, 1, 1)}, "ε"),
    ],
)
def test_scores_are_counts_of_enough_images(change: dict[str, Any], named: str) -> None:
    allowed = AllowedReply(TaskData("calibrate", 4), Egress({}, {}), ("Mass",), limits=LIMITS)
    scores = Scores(4, ("Mass",), histograms(10), Spent(1.23, 1, 1, 1, 1, 1))
    check(scores, allowed, change, named)
    check_reply(replace(scores, class_tensors=histograms(0)), replace(allowed, limits=None))
    exact = replace(allowed, limits=PrivacyConfig(min_count=3))
    check(scores, exact, {"class_tensors": histograms(2)}, "class_tensors/")
    check_reply(replace(scores, class_tensors=histograms(3)), exact)


POINT = Decided(0.85, 0.8)
DECIDED = DecidedClass(
    POINT, POINT, POINT, (0.1, 0.05), (0.1, None), {"light": DecidedGroup(20, 20, 0.9, None)}
)
SCORE = ClassScore(0.85, 0.8, 0.9, 40, 360, 0.75, step=0.05)
FIGURES = Metrics(
    3,
    "test",
    400,
    0.32,
    {"Mass": SCORE},
    dict.fromkeys(KEYS, 0.905),
    {"light": Figures(200, 0.85, {"accuracy": 0.91})},
    {"Mass": DECIDED},
    loss_step=0.02,
)
TESTED = AllowedReply(
    TaskData("evaluate", 3, split="test", decisions={"Mass": Decision(None, None)}),
    Egress({}, {}, local=True),
    ("Mass",),
    limits=PrivacyConfig(),
)


def scored(**change: Any) -> dict[str, Any]:
    return {"classes": {"Mass": replace(SCORE, **change)}}


def decided(**change: Any) -> dict[str, Any]:
    return {"decided": {"Mass": replace(DECIDED, **change)}}


def in_light(**change: Any) -> dict[str, Any]:
    return {"attributes": {"light": replace(FIGURES.attributes["light"], **change)}}


NO_FIGURE: list[tuple[dict[str, Any], str]] = [
    ({"round": 2}, "2"),
    ({"split": "validation"}, "validation"),
    ({"classes": {"Hernia": SCORE}}, "'Hernia'"),
    ({"decided": {"Hernia": DECIDED}}, "'Hernia'"),
    ({"attributes": {}}, "'light'"),
    ({"overall": {"mean_age": 0.5}}, "'mean_age'"),
    (in_light(overall={"mean_age": 0.5}), "'mean_age'"),
    ({"overall": {"accuracy": 1.5}}, "accuracy"),
    ({"overall": {"accuracy": FINE}}, "accuracy"),
    ({"loss": FINE, "loss_step": None}, "loss"),
    ({"loss": 0.33}, "loss"),
    ({"loss_step": 0.03}, "loss"),
    (scored(auroc=1.5, step=None), "AUROC"),
    (scored(auroc=float("nan"), step=None), "AUROC"),
    (scored(low=-0.1, step=None), "AUROC"),
    (scored(high=FINE, step=None), "AUROC"),
    (scored(recall=0.76), "AUROC"),
    (scored(positives=-1), "-1"),
    (scored(negatives=LARGEST + 1), str(LARGEST + 1)),
    (in_light(auroc=1.5), "AUROC"),
    (in_light(n=LARGEST + 1), str(LARGEST + 1)),
    ({"n": LARGEST + 1}, str(LARGEST + 1)),
    *((decided(**{part: Decided(FINE, None)}), "decisions") for part in ("own", "pooled", "half")),
    (decided(ece=(FINE, None)), "decisions"),
    (decided(brier=(None, FINE)), "decisions"),
    (decided(groups={"light": DecidedGroup(20, 20, None, FINE)}), "decisions"),
    (decided(groups={"dark": DecidedGroup(20, 20, None, None)}), "'dark'"),
]

TOO_FINE: list[tuple[dict[str, Any], str]] = [
    ({"loss": 0.321, "loss_step": None}, "loss"),
    ({"overall": {"accuracy": 0.9049}}, "accuracy"),
    (in_light(overall={"accuracy": 0.901}), "accuracy"),
    *((scored(**{figure: 0.8512, "step": None}), "AUROC") for figure in ("auroc", "low", "high", "recall")),
    (decided(half=Decided(None, 0.8512)), "decisions"),
]
"""More digits than 400 images support, or than the 200 of a group."""


@pytest.mark.parametrize(("change", "named"), [*NO_FIGURE, *TOO_FINE])
def test_a_figure_that_is_none_or_was_not_asked_for_is_refused(change: dict[str, Any], named: str) -> None:
    """Of the model that all have, and of the site's own."""
    answer = Evaluation(FIGURES, FIGURES)
    other = replace(FIGURES, **change)
    check(answer, TESTED, {"metrics": other}, named)
    check(answer, TESTED, {"local": other}, named)
    if (change, named) in TOO_FINE:  # the server cannot know the limits of a site
        for limits in (None, NO_LIMITS):
            check_reply(replace(answer, metrics=other), replace(TESTED, limits=limits))


def test_what_is_of_test_data_alone_comes_with_no_other() -> None:
    plain = replace(FIGURES, split="validation", attributes={}, decided={})
    validation = replace(TESTED, task=replace(TESTED.task, split="validation"))
    check(Evaluation(plain), validation, {"local": plain}, "local")
    check(
        Evaluation(plain), validation, {"metrics": replace(plain, attributes=FIGURES.attributes)}, "attribute"
    )
    check(Evaluation(plain), validation, {"metrics": replace(plain, decided=FIGURES.decided)}, "'Mass'")
    check(Evaluation(FIGURES), replace(TESTED, egress=Egress({}, {})), {"local": FIGURES}, "local")
    check(Evaluation(FIGURES), TESTED, {"spent": Spent(1.234, 1, 1, 1, 1, 1)}, "ε")
    trains = AllowedReply(TaskData("train", 4, 3), Egress({}, {}), ("Mass",))
    update = Update(4, (), {}, {}, torch.empty(0, dtype=torch.float64), metrics=plain)
    for change in ({"round": 4}, {"split": "test"}, {"attributes": FIGURES.attributes}):
        check(update, trains, {"metrics": replace(plain, **change)}, "")
    check(update, trains, {"spent": Spent(1.234, 1, 1, 1, 1, 1)}, "ε")


def test_an_answer_to_another_task_is_refused_and_an_abstention_never() -> None:
    answers = {
        "handshake": INFO,
        "mask": Masking("keys", keys=MASKED["keys"]),
        "evaluate": Evaluation(FIGURES),
    }
    answers["calibrate"] = Scores(0, ("Mass",), histograms(10))
    answers["train"] = Update(0, (), {}, {}, torch.empty(0, dtype=torch.float64))
    for task in answers:
        allowed = AllowedReply(TaskData(task), Egress({}, {}))
        check_reply(Abstain("out_of_memory", "MemoryError"), allowed)
        for answer in (one for name, one in answers.items() if name != task):
            with refused(type(answer).__name__, repr(task), by=RejectedUpdate):
                check_reply(answer, allowed)


# Declarations


ODD: Any = "sideways"
WRONG = [
    ((Channel("a", "up"), Channel("a", "up", (3,))), "'a'"),
    ((Channel("a", "down", LAYOUT), Channel("a/w", "server")), "'a/w'"),
    ((Channel("a", "facts", (CLASSES,)), Channel("a", "down")), "'a'"),
    ((Channel("a", ODD),), "'sideways'"),
    ((Channel("a", "up", (2,), "torch.complex64"),), "'torch.complex64'"),
    ((Channel("a", "up", (2,), "float32"),), "'float32'"),
    ((Channel("a", "up", LAYOUT, rows="own"),), "rows"),
    ((Channel("a", "up", (2, CLASSES), rows="own"),), "rows"),
    ((Channel("a", "facts", (2, CLASSES)),), "CLASSES"),
    ((Channel("a", "down", (CLASSES, VARIABLE)),), "VARIABLE"),
    ((Channel("a", "server", (CLASSES, VARIABLE)),), "VARIABLE"),
]


@pytest.mark.parametrize(("channels", "named"), WRONG)
def test_a_channel_that_cannot_hold_what_it_is_declared_for_is_refused(
    channels: tuple[Channel, ...], named: str
) -> None:
    with refused("Any declares the channel", named, by=ConfigError):
        check_declared(Egress({}, {}, channels), "Any")


@hyperparameters
class Declaring(LocalAveraging):
    """Declares what cannot hold."""

    about = About("declaring", "Declaring", "none")
    labels = LabelUse()

    def egress(self, layout: Layout) -> Egress:
        return replace(super().egress(layout), channels=(Channel("a", ODD),))


def test_every_plan_and_check_of_a_method_looks_at_its_channels() -> None:
    for make in (
        lambda: Plan(Declaring(), ModelSpec("cnn", size=16), Augmentation(), 1, "x", "code"),
        lambda: check_method(Declaring()),
    ):
        with refused("Declaring", "'a'", by=ConfigError):
            make()


def test_every_method_declares_channels_that_hold() -> None:
    """What goes up may be called as what goes down, and what is kept."""
    ways: tuple[Way, ...] = ("up", "down", "site")
    check_declared(Egress({}, {}, tuple(Channel("a", way, (CLASSES, 2)) for way in ways)), "Any")
    for name, method in METHODS.items():
        check_declared(method().egress(LAYOUT), name)
