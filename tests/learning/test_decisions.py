"""Decisions of a site's images, and what of them may leave."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from suture.core.labels import LabelSet
from suture.core.privacy import PrivacyConfig
from suture.data.batch import Samples
from suture.learning.decisions import decide, decided_classes, operating, score_counts
from suture.learning.metrics import Curves
from suture.protocol.decisions import CELLS, Calibration, Decided, Decision, DecisionSettings, Operating
from suture.protocol.egress import may_be

OPEN = PrivacyConfig.of_public_data("own")


def point(threshold: float, **other: object) -> Operating:
    values = {"calibration": None, "prevalence": 0.5} | other
    return Operating(thresholds={"sensitivity": threshold}, **values)  # type: ignore[arg-type]


def test_figures_by_hand() -> None:
    """Positives .2, .6, .9, negatives .1, .4 and .7; one unknown."""
    y = np.array([1, 1, 1, 0, 0, 0, np.nan])
    p = np.array([0.2, 0.6, 0.9, 0.1, 0.4, 0.7, 0.99])
    found = decide(y, p, Decision(point(0.15), point(0.65)), "sensitivity")
    assert found.own == Decided(1.0, 1 / 3)
    assert found.pooled == Decided(1 / 3, 2 / 3)
    assert found.half == Decided(2 / 3, 2 / 3)
    assert found.ece[1] is None
    assert found.brier[0] == pytest.approx((0.64 + 0.16 + 0.01 + 0.01 + 0.16 + 0.49) / 6)


def test_the_sites_own_map_comes_before_that_of_all_sites() -> None:
    y, p = np.array([1.0, 0.0]), np.array([0.5, 0.5])
    own, pooled = Calibration(1.0, 1.0), Calibration(1.0, -1.0)
    both = Decision(point(0.5, calibration=own), point(0.5, calibration=pooled))
    alone = Decision(None, point(0.5, calibration=pooled))
    assert decide(y, p, both, "sensitivity").brier[1] == pytest.approx(
        decide(y[::-1], p, alone, "sensitivity").brier[1]
    )
    assert decide(y, p, alone, "sensitivity").own is None
    assert decide(y, p, alone, "youden").pooled is None  # no such threshold


def samples(n: int, seed: int = 0) -> tuple[Samples, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, 2, generator=g)
    y = (torch.rand(n, 2, generator=g) < torch.sigmoid(logits)).float()
    y[:5, 0] = torch.nan
    return Samples({}, y, tuple(f"p{i // 2}" for i in range(n))), logits


LABELS = LabelSet(("Edema", "Mass"))


def test_counts_are_of_known_labels_of_the_classes_asked_for() -> None:
    part, logits = samples(100)
    names, counts = score_counts(part, logits, LABELS, ["Mass", "Edema"], OPEN)
    assert names == ("Mass", "Edema")
    assert {k: tuple(t.shape) for k, t in counts.items()} == {
        "positives": (2, CELLS),
        "negatives": (2, CELLS),
    }
    assert counts["positives"].sum(dim=1).tolist() == (part.y == 1).sum(dim=0).flip(0).tolist()
    assert (counts["positives"] + counts["negatives"]).sum(dim=1).tolist() == [100, 95]


def test_a_multiclass_score_is_that_of_its_probability() -> None:
    part, logits = samples(200)
    y = torch.nn.functional.one_hot(logits.argmax(dim=1), 2).float()
    labels = LabelSet(("a", "b"), "multiclass")
    part = Samples({}, y, part.patients)
    _, counts = score_counts(part, logits, labels, ["a"], OPEN)
    curves = Curves.of([(counts["positives"][0].numpy(), counts["negatives"][0].numpy())])
    assert curves.positives.quantile(0.0) is not None
    assert curves.sensitivity()[192] == 1.0
    assert curves.specificity()[192] == 1.0


def test_a_site_with_few_patients_says_nothing() -> None:
    part, logits = samples(12)
    names, counts = score_counts(part, logits, LABELS, ["Mass"], PrivacyConfig())
    assert names == ()
    assert tuple(counts["positives"].shape) == (0, CELLS)


def test_figures_that_leave_lie_on_grids() -> None:
    part, logits = samples(400)
    limits = PrivacyConfig()
    decision = Decision(point(0.37, calibration=Calibration(0.9, 0.1)), point(0.41))
    found = decided_classes(part, logits, LABELS, {"Mass": decision}, "sensitivity", limits)["Mass"]
    exact = decided_classes(part, logits, LABELS, {"Mass": decision}, "sensitivity", OPEN)["Mass"]
    assert found.own is not None
    assert exact.own is not None
    for one, other in (
        (found.own.sensitivity, exact.own.sensitivity),
        (found.half.specificity, exact.half.specificity),
        (found.brier[1], exact.brier[1]),
        (found.ece[0], exact.ece[0]),
    ):
        assert one is not None
        assert other is not None
        assert may_be(one, 1 / 400)
        assert abs(one - other) <= 0.025


def test_settings_fit_an_operating_point() -> None:
    part, logits = samples(2_000)
    _, counts = score_counts(part, logits, LABELS, ["Mass"], OPEN)
    curves = Curves.of([(counts["positives"][0].numpy(), counts["negatives"][0].numpy())])
    found = operating(curves, DecisionSettings(sensitivity=0.8))
    assert found is not None
    assert found.calibration is not None
    p, y = torch.sigmoid(logits[:, 1]).numpy(), part.y[:, 1].numpy()
    assert (p[y == 1] >= found.thresholds["sensitivity"]).mean() == pytest.approx(0.8, abs=0.01)
    assert (p[y == 0] < found.thresholds["specificity"]).mean() == pytest.approx(0.9, abs=0.01)
    assert found.calibration.slope == pytest.approx(1.0, abs=0.15)
    assert set(found.thresholds) == {"sensitivity", "specificity", "youden", "cost"}
