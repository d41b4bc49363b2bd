"""FedNML without its leak: soft labels of what is unknown begin as 0, those of noisy images are replaced."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from federated import same
from rounds import begun, train_round
from small_hospitals import EVERY
from suture.core.runtime import seed_for
from suture.data.batch import Batch
from suture.learning.steps import optimiser_of
from suture.learning.training import LocalTraining, SiteContext, predict
from suture.methods.base import Phase, RoundContext
from suture.protocol.messages import Update
from suture.protocol.packing import Packed
from suture_papers.missing_labels import fednml
from suture_papers.missing_labels.fednml import FedNML, SoftLabels, agreement, noisy_images, objective
from suture_synthetic.method_checks import SMALL
from suture_synthetic.trial import SITES, Trial

LOCAL = LocalTraining(lr=1e-2, batch_size=8, optimiser="adamw")
METHOD = FedNML(local=LOCAL)


def soft_round(
    tiny: Any, number: int, state: Mapping[str, Tensor] | None = None, method: FedNML = METHOD
) -> tuple[SiteContext, Update, dict[str, Tensor]]:
    """A round of the second phase of 10, from a state."""
    context, task = begun(tiny, METHOD)
    packed = Packed(dict(state or {}), {"labels": list(EVERY), "phase": "soft"})
    ctx = RoundContext(number, Phase("soft", 10), 3, number)
    return context, *train_round(method, context, task, ctx, packed)


def logit(p: Tensor) -> Tensor:
    return torch.log(p / (1 - p))


def saying(z: Tensor) -> Any:
    """A model of these logits, whatever it sees."""
    return lambda _: z


# By hand


def test_omega_rises_to_its_largest_over_the_rounds() -> None:
    """Rounds 10, 55 and 100 of 100: .8 e^-2, .8 e^-.5 and .8."""
    found = [SoftLabels().omega(r, 90) for r in (0, 45, 90)]
    assert found == pytest.approx([0.108268, 0.485225, 0.8], abs=1e-6)


def test_agreement_by_hand() -> None:
    """y = (1, 0), p = (.9, .2): A = (.9 + .8) / 2, B = (ln .9 + ln .8) / 2; of the first class .9, ln .9."""
    z, y = logit(torch.tensor([[0.9, 0.2]])), torch.tensor([[1.0, 0.0]])
    for seen, a, b in (([True, True], 0.85, -0.164252), ([True, False], 0.9, -0.105361)):
        found = agreement(z, y, torch.tensor([seen]))
        assert [float(value) for value in found] == pytest.approx([a, b], abs=1e-6)


def test_soft_labels_by_hand() -> None:
    """Unknown: .2 x 1, .2 x .5 and .2 x 0, the next time .36; known: replaced in a noisy image alone."""
    p = torch.tensor([[0.95, 0.5, 0.05, 0.95]] * 2)
    labelled, noisy = torch.tensor([[False, False, False, True]] * 2), torch.tensor([False, True])
    one = SoftLabels().refined(torch.zeros(2, 4), p, labelled, noisy)
    assert one.flatten().tolist() == pytest.approx([0.2, 0.1, 0, 0, 0.2, 0.1, 0, 1])
    two = SoftLabels().refined(one, p, labelled, noisy)
    assert two[0].tolist() == pytest.approx([0.36, 0.18, 0, 0])


def test_a_step_by_hand() -> None:
    """z = 0, pi = .25, y = 1, p = .5, omega = .5: a = ln .25, sigma(a) = .2, ½ .916291 + ½ 1.609438."""
    batch = Batch({}, torch.tensor([[1.0]]), torch.tensor([[True]]))
    value = objective(saying(torch.zeros(1, 1)), torch.tensor([0.25]), 0.5)  # type: ignore[arg-type]
    assert float(value(saying(torch.zeros(1, 1)), batch)) == pytest.approx(1.262864, abs=1e-6)


def test_phases() -> None:
    """10 of 100 rounds learn known labels alone."""
    assert [(p.name, p.rounds) for p in FedNML().phases(100)] == [("known", 10), ("soft", 90)]
    assert [(p.name, p.rounds) for p in FedNML(start=0.0).phases(2)] == [("soft", 2)]
    warm = FedNML(local=LocalTraining(warmup_epochs=1))
    assert [(p.name, p.rounds) for p in warm.phases(3)] == [("warm-up", 1), ("known", 1), ("soft", 1)]
    assert [p.name for p in warm.phases(1)] == ["warm-up"]


# Noisy images


def test_noisy_images_are_those_that_agree_less() -> None:
    g = torch.Generator().manual_seed(0)
    a = torch.cat([0.9 + 0.02 * torch.randn(60, generator=g), 0.3 + 0.02 * torch.randn(20, generator=g)])
    found = noisy_images(a, torch.log(a.clamp(max=1)), seed=1)
    assert torch.equal(found, torch.arange(80) >= 60)
    assert torch.equal(found, noisy_images(a, torch.log(a.clamp(max=1)), seed=1))


@pytest.mark.parametrize("n", [0, 1, 5])
def test_no_image_is_noisy_where_all_are_alike(n: int) -> None:
    assert noisy_images(torch.full((n,), 0.5), torch.full((n,), -0.7), seed=1).tolist() == [False] * n


# The leak


def test_unknown_labels_begin_as_0(tiny: Any) -> None:
    """After the first refinement they are .2 q, so at most .2; a withheld label would enter with .8."""
    context, _, kept = soft_round(tiny, 1)
    y, soft = context.samples["train"].y, kept["soft"].T
    assert y.isnan().any()
    assert float(soft[y.isnan()].max()) <= 0.2
    assert (soft == y).any()  # not every known label is replaced


@pytest.mark.complete
def test_what_stands_at_an_unknown_label_changes_nothing() -> None:
    """In rounds with soft labels, with 0 or .5 there in every batch: the same update and the same state."""
    one, two = (Trial(FedNML(local=LOCAL, start=0.0), SMALL, "multilabel", hidden=v) for v in (0.0, 0.5))
    for site in SITES:
        a, b = one.update(site), two.update(site)
        assert a.train_loss == b.train_loss
        assert same(a, b)


# Rounds at a site


@pytest.mark.complete
def test_labels_are_refined_every_fifth_round(tiny: Any) -> None:
    _, _, one = soft_round(tiny, 1)
    changed = []
    for number in (2, 3, 4, 5, 6, 7):
        _, _, after = soft_round(tiny, number, one)
        changed.append(not torch.equal(after["soft"], one["soft"]))
        assert torch.equal(after["counts"], one["counts"]) != changed[-1]
    assert changed == [False] * 4 + [True, False]


def test_a_label_that_comes_later_is_taken_as_it_is(tiny: Any) -> None:
    """Two classes were unknown when the state was made; one of them is a class of the site's now."""
    context, _, one = soft_round(tiny, 1)
    own = EVERY.index("Mass")
    held = dict(one) | {"soft": one["soft"].clone()}
    held["soft"][own] = 0.15
    held["labelled"] = one["labelled"].clone()
    held["labelled"][own] = False
    _, _, after = soft_round(tiny, 2, held)
    assert torch.equal(after["soft"][own], context.samples["train"].y[:, own])
    assert torch.equal(after["soft"][0], one["soft"][0])


def test_a_new_class_begins_with_its_labels_and_their_count(tiny: Any) -> None:
    """The state has every class but Nodule, which the site annotates."""
    context, _, one = soft_round(tiny, 1)
    held = {k: t[:3] if k in ("soft", "labelled", "counts") else t for k, t in one.items()}
    fresh, task = begun(tiny, METHOD)
    packed = Packed(held, {"labels": list(EVERY[:3]), "phase": "soft"})
    _, after = train_round(METHOD, fresh, task, RoundContext(2, Phase("soft", 10), 3, 2), packed)
    y = context.samples["train"].y[:, 3]
    assert torch.equal(after["soft"][3], y)
    assert after["counts"][3] == y.sum()


def test_positive_guesses_are_observed(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulation counts those that are right; a soft label above one half is one."""
    heard: list[Tensor] = []
    for name in ("STAY", "POSITIVE", "NEGATIVE"):
        monkeypatch.setattr(fednml, name, 0.0)
    method = FedNML(local=LOCAL)
    context, task = begun(tiny, METHOD)
    context = replace(context, observe=lambda _, guessed: heard.append(guessed))
    train_round(method, context, task, RoundContext(1, Phase("soft", 10), 3, 1))
    assert torch.equal(heard[0], context.samples["train"].y.isnan())


def test_the_first_agreement_is_over_own_classes(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last five images disagree with their own labels, the first ten with what is not annotated.

    A is .95 and .05 over own classes; over all it is .48 and .52, as unknown labels begin as 0.
    """
    context, task = begun(tiny, METHOD)
    y = context.samples["train"].y
    unknown, last = y.isnan(), (torch.arange(15) >= 10)[:, None]
    agreed = torch.where(y == 1, 0.95, 0.05)
    p = torch.where(last, 1 - agreed, agreed)
    p = torch.where(unknown, torch.where(last, 0.01, 0.99), p)
    monkeypatch.setattr(fednml, "predict", lambda *_: logit(p))
    _, kept = train_round(METHOD, context, task, RoundContext(1, Phase("soft", 10), 3))
    changed = (y != kept["soft"].T) & ~unknown
    assert changed.any(dim=1).tolist() == last.flatten().tolist()


# The equations as written


def literal_step(z: Tensor, p: Tensor, y: Tensor, prior: Tensor, omega: float) -> float:
    total = 0.0
    for i in range(len(z)):
        for c in range(z.shape[1]):
            pi = float(prior[c])
            a = float(z[i, c]) + math.log(pi if y[i, c] == 1 else 1 - pi)
            s = 1 / (1 + math.exp(-a))
            for w, t in ((omega, float(p[i, c])), (1 - omega, float(y[i, c]))):
                total -= w * (t * math.log(s) + (1 - t) * math.log(1 - s))
    return total / z.numel()


def literal_agreement(p: Tensor, y: Tensor, seen: Tensor) -> list[tuple[float, float]]:
    found = []
    for i in range(len(p)):
        classes = [c for c in range(p.shape[1]) if seen[i, c]]
        a = sum(float(y[i, c] * p[i, c] + (1 - y[i, c]) * (1 - p[i, c])) for c in classes)
        b = sum(
            float(y[i, c]) * math.log(p[i, c]) + (1 - float(y[i, c])) * math.log(1 - p[i, c]) for c in classes
        )
        found.append((a / max(len(classes), 1), b / max(len(classes), 1)))
    return found


def literal_refined(y: Tensor, p: Tensor, labelled: Tensor, noisy: Tensor) -> list[list[float]]:
    new = y.tolist()
    for i in range(len(y)):
        for c in range(y.shape[1]):
            q = 1.0 if p[i, c] > 0.9 else 0.0 if p[i, c] < 0.1 else float(p[i, c])
            if not labelled[i, c]:
                new[i][c] = 0.2 * q + 0.8 * float(y[i, c])
            elif noisy[i]:
                new[i][c] = q
    return new


@given(st.integers(0, 10**6))
def test_the_equations_as_written(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=g, dtype=torch.float64)

    n, c = 9, 4
    z, p, prior, omega = 4 * drawn(n, c) - 2, drawn(n, c), 0.05 + 0.9 * drawn(c), float(drawn(1))
    y = torch.where(drawn(n, c) < 0.4, 1.0, drawn(n, c))
    batch = Batch({}, y, torch.ones(n, c, dtype=torch.bool))
    received: Any = saying(logit(p))
    found = objective(received, prior, omega)(saying(z), batch)
    assert float(found) == pytest.approx(literal_step(z, p, y, prior, omega), abs=1e-10)

    seen = drawn(n, c) < 0.5
    for one, other in zip(
        literal_agreement(p, y, seen), zip(*agreement(logit(p), y, seen), strict=True), strict=True
    ):
        assert [float(value) for value in other] == pytest.approx(one, abs=1e-10)

    noisy = drawn(n) < 0.5
    for one, row in zip(
        literal_refined(y, p, seen, noisy), SoftLabels().refined(y, p, seen, noisy), strict=True
    ):
        assert row.tolist() == pytest.approx(one, abs=1e-10)


def test_a_round_as_written(tiny: Any) -> None:
    """Soft labels and counts after the 1st and the 6th round, from the received model's probabilities."""
    context, _ = begun(tiny, METHOD)
    start = context.samples["train"].y
    labelled, y = ~start.isnan(), torch.nan_to_num(start)
    p = torch.sigmoid(predict(context, context.samples["train"]))
    counts, state = [float(y[:, c].sum()) for c in range(4)], None
    for number in (1, 6):
        points = literal_agreement(p, y, labelled if number == 1 else torch.ones_like(labelled))
        a, b = (torch.tensor(values) for values in zip(*points, strict=True))
        noisy = noisy_images(a, b, seed_for(3, "alpha", number, "mixture") % 2**32)
        y = torch.tensor(literal_refined(y, p, labelled, noisy))
        omega = 0.8 * math.exp(-2 * (1 - (number - 1) / 10) ** 2)
        counts = [omega * float(y[:, c].sum()) + (1 - omega) * counts[c] for c in range(4)]
        _, _, state = soft_round(tiny, number, state)
        assert torch.allclose(state["soft"].T, y, atol=1e-5)
        assert state["counts"].tolist() == pytest.approx(counts, rel=1e-5)


def test_adamw_decays_weights_apart_from_the_gradient() -> None:
    """w = 2, no gradient, rate .1, decay .25: 2 (1 - .025); a step of Adam is .1 whatever the decay."""
    for optimiser, after in (("adamw", 1.95), ("adam", 1.9)):
        layer = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(layer.weight, 2.0)
        layer.weight.grad = torch.zeros(1, 1)
        local = LocalTraining(lr=0.1, weight_decay=0.25, optimiser=optimiser)  # type: ignore[arg-type]
        optimiser_of(layer, local).step()
        assert layer.weight.item() == pytest.approx(after)
