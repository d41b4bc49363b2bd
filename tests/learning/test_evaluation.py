"""What a site measures, counts and withholds; and what it expects of classes known on one side."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from federated import ROUND
from fixed import Fixed
from suture.core.labels import LabelSet, LabelType
from suture.core.privacy import PrivacyConfig
from suture.data.batch import Augmentation, Samples
from suture.learning.evaluation import (
    NOTHING,
    Measurement,
    as_trained,
    class_scores,
    entropy,
    expect_context,
    given_absent,
    label_counts,
    mean_interval,
    measure,
    overall,
    ranking,
)
from suture.learning.steps import NonFiniteLoss
from suture.learning.training import SiteContext
from suture.methods.surgical import SurgicalAggregation
from suture.methods.vanilla import VanillaFL
from suture.models import ModelSpec
from suture.protocol.egress import on_grid, round_figure
from suture.protocol.messages import KEYS, ClassScore, Figures, Metrics
from suture_synthetic.method_checks import SMALL
from suture_synthetic.trial import Trial
from world import refused

NAN = float("nan")


def samples(logits: list[list[float]], y: list[list[float]]) -> Samples:
    return Samples({"logits": torch.tensor(logits)}, torch.tensor(y), tuple(f"p{i}" for i in range(len(y))))


def context(labels: tuple[str, ...], task: LabelType, part: Samples, split: Any = "test") -> SiteContext:
    model: Any = Fixed(LabelSet(labels, task))
    prepare = ModelSpec("cnn", size=16).preprocessing
    return SiteContext("a", model, {split: part}, prepare, Augmentation(), torch.device("cpu"))


def measured(
    site: SiteContext,
    own: LabelSet,
    min_count: int = 0,
    bootstrap: int = 0,
    *,
    split: Any = "test",
    min_loss: int = 0,
) -> Metrics:
    limits = PrivacyConfig(min_count=min_count, min_loss=min_loss)
    return measure(site, Measurement(SurgicalAggregation().loss, own, limits, 1), split, 3, bootstrap)


# Edema, Mass and Nodule, which the site does not annotate.
LOGITS = [[2.0, 0.0, 9.0], [1.0, 0.0, 9.0], [0.0, 0.0, 9.0], [-1.0, 0.0, 9.0]]
Y = [[1.0, 1.0, NAN], [0.0, 0.0, NAN], [1.0, 0.0, NAN], [0.0, 0.0, NAN]]
THREE = ("Edema", "Mass", "Nodule")
OWN = LabelSet(("Mass", "Edema"))


def test_a_multilabel_site_by_hand() -> None:
    site = context(THREE, "multilabel", samples(LOGITS, Y))
    found = measured(site, OWN)
    # Edema: 2 > 1, 2 > -1 and 0 > -1 of four pairs; Mass: all equal.
    assert found.classes == {
        "Mass": ClassScore(0.5, None, None, 1, 3),
        "Edema": ClassScore(0.75, None, None, 2, 2),
    }
    assert list(found.classes) == ["Mass", "Edema"]
    edema = [math.log1p(math.exp(s)) for s in (-2.0, 1.0, 0.0, -1.0)]
    assert found.loss == pytest.approx((sum(edema) + 4 * math.log(2)) / 8, abs=1e-6)
    assert (found.round, found.split, found.n, found.overall) == (3, "test", 4, {})
    few = measured(site, OWN, min_count=2)
    # Edema has 2 and 2, but each of the two patients moves a mean over two by more than a half.
    assert few.classes == {"Mass": NOTHING, "Edema": NOTHING}
    assert few.loss is None  # no label is left
    low = measured(site, OWN, bootstrap=50).classes["Edema"].low
    assert low is not None
    assert low <= 0.75


def test_a_test_loss_is_the_same_for_all_methods_and_none_without_a_label() -> None:
    """What vanilla FL trains on takes the unknown Nodule for absent; the figure leaves it out."""
    site = context(THREE, "multilabel", samples(LOGITS, Y))
    limits = PrivacyConfig(min_count=0, min_loss=0)
    losses = [
        measure(site, Measurement(method.loss, OWN, limits, 1), "test", 3).loss
        for method in (SurgicalAggregation(), VanillaFL())
    ]
    assert losses[0] == losses[1]
    unlabelled = samples(LOGITS, [[NAN] * 3] * 4)
    assert entropy(unlabelled, torch.tensor(LOGITS), "multilabel") is None
    assert entropy(samples(SINGLE, [[0.0, 0.0]] * 4), torch.tensor(SINGLE), "multiclass") is None


# A and B; the last image is of neither.
SINGLE = [[2.0, 1.0], [3.0, 9.0], [0.0, 1.0], [5.0, 0.0]]
ONE_HOT = [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 0.0]]


def test_a_multiclass_site_by_hand() -> None:
    own = LabelSet(("A", "B"), "multiclass")
    site = context(("A", "B"), "multiclass", samples(SINGLE, ONE_HOT))
    found = measured(site, own)
    # A - B is 1, -6, -1 and 5. A: 1 > -6 and -1 > -6 of four pairs (its logits alone: none); B: all three.
    assert {name: score.auroc for name, score in found.classes.items()} == {"A": 0.5, "B": 1.0}
    # -ln of the softmax at the label, of the three images that have one
    expected = (math.log1p(math.exp(-1)) + math.log1p(math.exp(-6)) + math.log1p(math.exp(1))) / 3
    assert found.loss == pytest.approx(expected, abs=1e-6)
    # Predicted A, B, B for A, B, A: A is right 1 of 1 and found 1 of 2, B right 1 of 2 and found.
    assert {name: score.recall for name, score in found.classes.items()} == {"A": 0.5, "B": 1.0}
    assert found.attributes == {}
    assert found.overall == {
        "accuracy": pytest.approx(2 / 3),
        "balanced_accuracy": pytest.approx(0.75),
        "precision": pytest.approx(0.75),
        "recall": pytest.approx(0.75),
        "f1": pytest.approx(2 / 3),
    }
    # Both classes are withheld.
    assert measured(site, own, min_count=1).overall == {}


def with_attributes(part: Samples, *values: str) -> Samples:
    return replace(part, attributes=values)


def test_figures_by_attribute_are_those_of_its_images_alone() -> None:
    """Light: A and B, both right. Dark: an A called B, and an image of neither. One has no attribute."""
    logits, y = [*SINGLE, [9.0, 0.0]], [*ONE_HOT, [0.0, 1.0]]
    part = with_attributes(samples(logits, y), "light", "light", "dark", "dark", "")
    own = LabelSet(("A", "B"), "multiclass")
    found = measured(context(("A", "B"), "multiclass", part), own)
    light, dark = found.attributes["light"], found.attributes["dark"]
    assert (light.n, light.auroc) == (2, 1.0)
    assert light.overall == dict.fromkeys(KEYS, 1.0)
    assert dark.n == 2
    assert dark.auroc == 0.0  # of A against the image of neither: -1 is below 5; B has no positive
    assert dark.overall == dict.fromkeys(KEYS, 0.0)
    assert found.overall["accuracy"] == 0.5


@pytest.mark.parametrize("of_c", [-9.0, 0.5, 9.0])
def test_multiclass_figures_of_a_site_are_among_its_own_classes(of_c: float) -> None:
    """So it does not matter whether the site sees C, the class of another."""
    own = LabelSet(("A", "B"), "multiclass")
    alone = with_attributes(samples(SINGLE, ONE_HOT), "light", "dark", "light", "dark")
    more = samples([[*row, of_c * i] for i, row in enumerate(SINGLE)], [[*row, NAN] for row in ONE_HOT])
    both = (("A", "B"), alone), (("A", "B", "C"), replace(more, attributes=alone.attributes))
    narrow, wide = (measured(context(names, "multiclass", part), own) for names, part in both)
    assert narrow == wide


def test_attributes_are_compared_on_the_classes_that_all_have() -> None:
    """Among the light images Edema is ranked wrongly and Mass rightly; no dark image lacks Edema."""
    logits, y = (
        [[0.0, 1.0], [1.0, 0.0], [2.0, 0.0], [0.0, 1.0]],
        [[1.0, 1.0], [0.0, 0.0], [1.0, 1.0], [1.0, 0.0]],
    )
    own, values = LabelSet(("Edema", "Mass")), ("light", "light", "dark", "dark")
    for n, light, dark in ((4, 1.0, 0.0), (3, 0.5, None)):  # a single dark image has no AUROC to compare
        part = with_attributes(samples(logits[:n], y[:n]), *values[:n])
        found = measured(context(("Edema", "Mass"), "multilabel", part), own).attributes
        assert {value: figures.auroc for value, figures in found.items()} == {"light": light, "dark": dark}


def test_an_attribute_of_few_images_is_not_even_named_and_validation_has_none() -> None:
    part = with_attributes(samples(LOGITS, Y), "light", "light", "light", "dark")
    site = context(THREE, "multilabel", part)
    assert set(measured(site, OWN).attributes) == {"light", "dark"}
    # One dark image would follow from four in all and three light ones.
    assert measured(site, OWN, min_count=2).attributes == {}
    # Edema: 2 and 0 against 1; Mass: all equal.
    assert measured(site, OWN).attributes["light"] == Figures(3, 0.5, {})
    validation = context(THREE, "multilabel", part, "validation")
    assert measured(validation, OWN, split="validation").attributes == {}


def test_classes_of_a_multiclass_task_compete_for_their_rank() -> None:
    """The second image has the higher logit of the first class, and is surely of the second."""
    logits = torch.tensor([[2.0, 0.0], [3.0, 9.0]])
    assert ranking(logits, "multilabel") is logits
    ranked = ranking(logits, "multiclass")
    assert ranked[0, 0] > ranked[1, 0]
    assert ranked[0, 0].item() == pytest.approx(1 / (1 + math.exp(-2)))
    assert ranked.sum(dim=1).tolist() == pytest.approx([1.0, 1.0])
    # Sure of both, but not equally: single precision would make them ties.
    sure = ranking(torch.tensor([[20.0, 0.0], [30.0, 0.0]]), "multiclass")
    assert sure[1, 0] > sure[0, 0]


def test_overall_needs_a_multiclass_task_and_enough_labels() -> None:
    part, logits = samples(SINGLE, ONE_HOT), torch.tensor(SINGLE)
    assert overall(part, logits, "multilabel") == {}
    assert overall(part, logits, "multiclass")["accuracy"] == pytest.approx(2 / 3)
    assert overall(part, logits, "multiclass", PrivacyConfig(min_count=0))["accuracy"] == 0.666667
    assert overall(part, logits, "multiclass", PrivacyConfig(min_count=3))["accuracy"] == 0.5
    assert overall(part, logits, "multiclass", PrivacyConfig(min_count=4)) == {}
    none = samples(SINGLE, [[0.0, NAN]] * 4)
    assert overall(none, logits, "multiclass") == {}


def test_an_empty_split_measures_nothing_and_a_model_without_numbers_is_named() -> None:
    own = LabelSet(("A", "B"), "multiclass")
    site = context(("A", "B"), "multiclass", Samples({"logits": torch.empty(0, 2)}, torch.empty(0, 2), ()))
    for split in ("test", "validation"):
        assert measured(site, own, split=split) == Metrics(3, split, 0, None, {})  # type: ignore[arg-type]
    broken = context(("A", "B"), "multiclass", samples([[NAN, 0.0]], [[1.0, 0.0]]))
    with refused("a: ", "round 3", by=NonFiniteLoss):
        measured(broken, own)


def test_counts_below_the_limit_stay_at_the_site_and_others_are_rounded() -> None:
    """Unknown is counted as neither: two with and two without Edema."""
    y = [[1.0, 0.0, 1.0], [1.0, 0.0, 1.0], [0.0, 1.0, 1.0], [0.0, 0.0, 1.0], [NAN, 0.0, 0.0]]
    own, train = LabelSet(THREE), samples([[0.0]] * 5, y)
    one, two, three = (label_counts(own, train, PrivacyConfig(min_count=limit)) for limit in (1, 2, 3))
    assert one == {"Edema": (2, 2), "Mass": (1, 4), "Nodule": (4, 1)}
    assert two == {"Edema": (2, 2), "Mass": None, "Nodule": None}
    assert three == dict.fromkeys(THREE)
    edema, train = LabelSet(("Edema",)), samples([[0.0]] * 21, [[1.0]] * 13 + [[0.0]] * 8)
    assert label_counts(edema, train, PrivacyConfig(round_counts=5)) == {"Edema": (15, 10)}
    # A loss over few is withheld.
    site = context(("A",), "multilabel", samples([[0.0]] * 4, [[1.0], [0.0], [1.0], [0.0]]))
    for least in (4, 5):
        assert (measured(site, LabelSet(("A",)), min_loss=least).loss is not None) is (least == 4)


def test_the_interval_of_a_mean_is_not_narrower_than_few_cases_allow() -> None:
    """Of one class it is that of the class; of several, as wide as they are together if independent."""
    labels = LabelSet(("A", "B"))
    logits = torch.stack([torch.arange(60.0), torch.arange(60.0) % 7], dim=1)
    y = torch.stack([(logits[:, 0] > 57).float(), (logits[:, 1] > 2).float()], dim=1)
    part = Samples({}, y, tuple(map(str, range(60))))
    of = class_scores(part, logits, labels, ("A", "B"), bootstrap=100)
    alone = mean_interval(part, logits, labels, {"A": of["A"]}, 100, 0)
    assert alone == pytest.approx((of["A"].low, of["A"].high))
    below = [(s.auroc or 0) - (s.low or 0) for s in of.values()]
    both = mean_interval(part, logits, labels, of, 100, 0)
    assert both is not None
    assert both[0] == pytest.approx(1 - math.hypot(*below) / 2)
    assert mean_interval(part, logits, labels, {"B": of["B"]}, 100, 0) == (of["B"].low, of["B"].high)


def of_counts(positives: int, negatives: int, limits: PrivacyConfig, each: int = 1) -> ClassScore:
    """What a site says of Edema; each patient has `each` images, and only every third is told apart."""
    logits = [[float(i % 3)] for i in range(positives + negatives)]
    part = samples(logits, [[1.0]] * positives + [[0.0]] * negatives)
    part = replace(part, patients=tuple(str(i // each) for i in range(positives + negatives)))
    labels = LabelSet(("Edema",))
    return class_scores(part, torch.tensor(logits), labels, labels.names, limits, bootstrap=20)["Edema"]


def test_figures_of_a_class_are_rounded_to_what_one_patient_moves() -> None:
    exact = of_counts(44, 27, PrivacyConfig(min_count=0))
    assert exact.auroc == round_figure(exact.auroc) != round(exact.auroc or 0, 2)
    # One of 27 moves a mean over them by 1/26 = 0.038.
    coarse = of_counts(44, 27, PrivacyConfig(round_counts=10))
    assert coarse == ClassScore(
        0.5, *(on_grid(v, 1 / 26) for v in (exact.low, exact.high)), 40, 30, step=0.05
    )
    assert coarse.low == round_figure(round((exact.low or 0) / 0.05) * 0.05)


def test_a_score_that_rests_on_few_images_or_one_patient_is_withheld_whole() -> None:
    assert of_counts(5, 40, PrivacyConfig(min_count=5)).positives == 5
    assert of_counts(5, 40, PrivacyConfig(min_count=6)) == NOTHING
    assert of_counts(40, 5, PrivacyConfig(min_count=6)) == NOTHING
    # A patient with 3 of 9 positives moves a mean over the other 6 by a half, one with 4 of 9 by more.
    assert of_counts(9, 60, PrivacyConfig(), each=3).positives == 9
    assert of_counts(9, 60, PrivacyConfig(), each=4) == NOTHING
    assert of_counts(9, 60, PrivacyConfig(min_count=0), each=4).positives == 9


# Classes of which a site knows positives alone


probability = st.floats(0.01, 0.99)


def test_by_hand() -> None:
    # Of 10 images like this, 6 show the class, 3 of these one below it, too: of the other 7, 3 show it.
    assert given_absent(torch.tensor([0.6]), 0.5).tolist() == pytest.approx([3 / 7])
    # The classes below are all that there are, whatever an untrained model says.
    assert given_absent(torch.tensor([0.6, 1.0]), 1.0).tolist() == [0, 0]
    # No image shows a class below: the labels say nothing.
    assert given_absent(torch.tensor([0.6, 1.0]), 0.0).tolist() == pytest.approx([0.6, 1.0])


@given(probability, st.floats(0, 1))
def test_positives_and_targets_balance_each_other(p: float, rho: float) -> None:
    q = float(given_absent(torch.tensor(p, dtype=torch.float64), rho))
    assert rho * p + (1 - rho * p) * q == pytest.approx(p)


def test_only_unknown_labels_of_images_without_any_class_below_get_a_target() -> None:
    with Trial(SurgicalAggregation(), SMALL, "multilabel", one_sided=True) as trial:
        received, site = trial.payload("beta"), trial.sites["beta"]
        context, own = site.trainer.context(received, site.states.before(received)), site.trainer.data[0]
    hernia, mass = (context.model.labels.index(name) for name in ("Hernia", "Mass"))
    assert own.one_sided == {"Mass": ("Hernia",)}
    before = context.samples["train"]
    y = before.y.clone()
    y[0] = torch.nan  # nothing is known of this image
    context = replace(context, samples={**context.samples, "train": replace(before, y=y)})
    after = expect_context(context, own, ROUND).samples["train"]
    assert after.taught is not None
    absent = y[:, hernia] == 0
    assert torch.equal(~after.taught[:, mass].isnan(), absent)
    p = torch.sigmoid(as_trained(context, ROUND).double())
    rho = float((y[:, hernia] == 1).sum() / p[1:, mass].sum())
    wanted = given_absent(p[:, mass], min(rho, 1.0))[absent]
    torch.testing.assert_close(after.taught[absent, mass].double(), wanted, atol=1e-6, rtol=0)
    taught, known = after.targets()
    assert torch.equal(known[:, mass], absent | (y[:, hernia] == 1))
    assert bool((taught[y[:, hernia] == 1, mass] == 1).all())
    assert torch.equal(after.y.nan_to_num(-1), y.nan_to_num(-1)), "labels stay what is known"
    plain = expect_context(context, LabelSet(own.names), ROUND).samples["train"]
    assert torch.equal(plain.y.isnan(), y.isnan())
    # Images of the class below beyond those that the model expects of the class leave nothing to the others.
    y[:], y[:-1, hernia], y[-1, hernia] = torch.nan, 1, 0
    context = replace(context, samples={"train": replace(before, y=y)})
    taught = expect_context(context, own, ROUND).samples["train"].targets()[0]
    assert taught[-1, mass] == 0


def test_validation_and_counts_know_nothing_of_them() -> None:
    with Trial(SurgicalAggregation(), SMALL, "multilabel", one_sided=True) as trial:
        trial.run()
        owners = trial.server.registry.owners()
        assert owners["Mass"] == ("alpha", "gamma")
        run = trial.server.record.run
        assert run["sites"]["beta"]["labels"] == ["Hernia", "Nodule"]
        assert {"code": "one_sided", "values": {"label": "Mass", "sites": ["beta"]}} in run["notes"]
