"""The attacks of benchmarks/attacks, each in a small run: what works without a defence, and fails with it."""

from __future__ import annotations

import importlib
import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from suture.data.batch import FEATURES
from suture.methods.base import GlobalModel
from suture.protocol.messages import Update


@pytest.fixture(scope="module")
def attacks() -> Any:
    names = ("averaging", "inversion", "liars", "membership", "secure", "site_labels", "table")
    return SimpleNamespace(**{name: importlib.import_module(name) for name in names})


@pytest.fixture
def small(attacks: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """400 candidates with features of noise, 3 classes, and few shadow runs."""
    g = torch.Generator().manual_seed(0)
    features, y = torch.randn(500, 1280, generator=g), torch.randint(0, 2, (500, 3), generator=g).float()
    own = attacks.membership
    pool = own.Pool(features[:400], y[:400], np.arange(400), features[400:], y[400:], ("A", "B", "C"))
    monkeypatch.setattr(own, "everybody", lambda _: pool)
    monkeypatch.setattr(own, "TEST", 100)
    monkeypatch.setattr(own, "SHADOWS", 12)
    monkeypatch.setattr(own, "TARGETS", 3)
    monkeypatch.setattr(own, "ROUNDS", 3)
    own.pool.cache_clear()
    yield own
    own.pool.cache_clear()


@pytest.mark.complete
def test_membership_shows_without_noise_and_not_above_epsilon_with_it(small: Any) -> None:
    """Labels of noise can only be learnt by heart."""
    reader, server = small.attack("noise", 2, "none", [1])
    for record in (reader, server):
        assert record["membership_auroc"] > 0.7
        assert record["success"] > 0.05
    assert server["least_epsilon"] > 1
    for record in small.attack("noise", 2, "ε 1", [1]):
        assert record["least_epsilon"] <= 1
        assert 0.4 < record["membership_auroc"] < 0.6


def test_the_bound_on_epsilon_by_hand(attacks: Any) -> None:
    """All 100 guesses right: the share is at least .04^(1/100) = .968; half of them show nothing."""
    share = 0.04**0.01
    assert attacks.membership.lower_bound(100, 100) == pytest.approx(math.log(share / (1 - share)))
    assert attacks.membership.lower_bound(50, 100) == attacks.membership.lower_bound(0, 100) == 0


@pytest.mark.complete
def test_a_gradient_shows_the_image_and_a_noisy_one_does_not(
    attacks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, edge = attacks.inversion, torch.linspace(0, 1, 16)
    ramps = torch.stack([(edge[:, None] * a + edge * (1 - a))[None] for a in torch.linspace(0, 1, 200)])
    y = (torch.arange(200)[:, None] // torch.tensor([1, 2]) % 2).float()
    monkeypatch.setattr(own, "images", lambda _: (ramps.flip(0)[torch.arange(200) * 7 % 200], y, ("A", "B")))
    monkeypatch.setattr(own, "VICTIMS", 1)
    monkeypatch.setattr(own, "SEARCH", 150)
    clear, noisy = (own.inverted("ramps", "step", defence, 3)["success"] for defence in ("none", "ε 8"))
    assert clear > 25
    assert noisy < 15


@pytest.mark.parametrize(
    ("features", "defence", "least", "most"),
    [
        (torch.rand(200, 40, generator=torch.Generator().manual_seed(1)), "ε 1", -1.0, 0.7),
        (torch.eye(200), "secure aggregation", 0.48, 0.52),  # of a sum the server reads no site's features
    ],
)
def test_the_row_of_one_image_is_its_features(
    features: torch.Tensor, defence: str, least: float, most: float, attacks: Any, monkeypatch: Any
) -> None:
    own = attacks.inversion
    monkeypatch.setattr(own.liars, "inputs_of", lambda _: {"features": features})
    monkeypatch.setattr(own.liars, "pool", lambda _: (None, torch.ones(200, 2), ("A", "B")))
    monkeypatch.setattr(own, "FEATURES", "features")
    plain = own.change
    monkeypatch.setattr(own, "change", lambda m, x, *rest: plain(m, {FEATURES: x["features"]}, *rest))
    assert own.feature("noise", "none", 1)["success"] == pytest.approx(1, abs=1e-5)
    assert least <= own.feature("noise", defence, 1)["success"] <= most


@pytest.mark.complete
@pytest.mark.parametrize(
    ("kind", "defence", "asked", "answers", "least", "most"),
    [
        ("same", "none", 6, 1, 0, 5),
        ("moved", "limits", 6, 4, 0, 10),
        ("new", "limits", 6, 4, 0, 10),
        ("moved", "ε 8", 6, 1, 0, 8),
        ("new", "none", 16, 16, 20, math.inf),  # without budgets the noise is averaged away
    ],
)
def test_a_server_gets_few_answers_to_average(
    kind: str,
    defence: str,
    asked: int,
    answers: int,
    least: float,
    most: float,
    attacks: Any,
    monkeypatch: Any,
) -> None:
    """Four answers leave half of the noise: three `reanswers`, or as many updates as max_epsilon pays for."""
    monkeypatch.setattr(attacks.averaging, "ASKED", asked)
    found = attacks.averaging.averaged(kind, defence, 1)
    assert found["answers"] == answers
    assert found["success"] == pytest.approx(1 - answers**-0.5, abs=0.02)
    assert least < found["epsilon"] <= most


def test_with_masks_the_server_has_the_mean_of_a_rows_owners_and_rows_of_two_sites_stay(attacks: Any) -> None:
    """Numbers 1, 2, 3 with these weights; row A with 1, 1, 2; row B of two sites, which is too few."""
    owners = {"one": ("A", "B"), "two": ("A", "B"), "three": ("A",)}
    updates = {
        site: Update(
            k, labels, {"w": torch.full((2,), float(k))}, {"head.bias": torch.full((len(labels),), float(k))},
            torch.tensor([2.0 if site == "three" else 1.0] * len(labels)), weight=float(k),
        )
        for k, (site, labels) in enumerate(owners.items(), 1)
    }  # fmt: skip
    previous = GlobalModel(("A", "B"), {"w": torch.zeros(2)}, {"head.bias": torch.tensor([9.0, 9.0])})
    found = attacks.secure.summed(previous, updates)
    assert found.model.shared["w"] == pytest.approx([14 / 6] * 2)
    assert found.model.head["head.bias"] == pytest.approx([9 / 4, 9])
    assert [float(update.head["head.bias"][0]) for update in found] == pytest.approx([9 / 4] * 3)


def test_a_free_riders_noise_is_as_long_as_the_others_changes(attacks: Any) -> None:
    """Two others with changes of lengths 3 and 5: their mean is 4."""
    key = ("w", "")
    changes = {n: {key: torch.tensor([0.0, v])} for n, v in (("liar", 9.0), ("a", 3.0), ("b", 5.0))}
    sent = attacks.liars.lied("free noise", "liar", changes, torch.Generator().manual_seed(1))
    assert float(sent[key].norm()) == pytest.approx(4)


def test_the_page_of_attacks_is_that_of_its_records(attacks: Any) -> None:
    own = attacks.table
    records = [json.loads(line) for line in own.RECORDS.read_text().splitlines()]
    assert own.page(records) == own.PAGE.read_text()


@pytest.mark.complete
def test_five_answers_were_all_labels_and_are_few(attacks: Any) -> None:
    """With six digits a loss is 16 labels; on its grid the same questions, or better ones, tell little."""
    own = attacks.site_labels
    assert own.right(own.bits, own.EXACT, 5, 1) == 72
    assert own.right(own.bits, own.STRICT, 5, 1) < 54
    assert own.right(own.dense, own.STRICT, 5, 1) < 58


@pytest.mark.complete
def test_what_a_server_still_learns_is_in_the_threat_model(attacks: Any) -> None:
    """Many answers are still many labels: no grid replaces a limit of answers."""
    own = attacks.site_labels
    after_fifteen = [own.right(own.dense, own.STRICT, 15, seed) for seed in (1, 2)]
    assert 44 < np.mean(after_fifteen) < 66
    assert own.right(own.single, own.STRICT, 72, 1) == 72
