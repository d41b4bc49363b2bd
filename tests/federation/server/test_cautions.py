"""What a figure of a run does not say: ties, coarse steps, and rounds that other sites have measured."""

from __future__ import annotations

import pytest

from suture.federation.server.notes import cautions, why_unmeasured
from suture.federation.server.selection import Best, ModelSelection
from suture.protocol.messages import ClassScore
from suture.protocol.records import Round, Validation


def line(number: int, loss: float, step: float | None = None) -> Round:
    return Round(number, "main", "committed", 1.0, 0, 0, {}, Validation(loss, 0.7, loss_step=step))


def test_a_tie_is_named_with_its_rounds() -> None:
    history = [line(1, 0.8), line(2, 0.6), line(3, 0.6)]
    [caution] = cautions(history, "site_loss", 3)
    assert "rounds 2, 3 have the same validation loss" in caution
    assert cautions(history, "site_loss", 1) == []
    assert cautions(history, "last", 3) == []


@pytest.mark.parametrize(("step", "said"), [(0.05, False), (0.1, True)])
def test_steps_above_a_twentieth_are_told(step: float, said: bool) -> None:
    found = cautions([line(1, 0.8, step), line(2, 0.6)], "site_loss", 2)
    assert [f"loss {step:g}" in text for text in found] == [True] * said


def test_each_cause_has_its_sites() -> None:
    withheld, none = ClassScore(None, None, None, None, None), ClassScore(None, None, None, 0, 20)
    said = why_unmeasured({"alpha": withheld, "beta": none, "gamma": withheld})
    assert said.startswith("withheld, because fewer than min_count")
    assert "at alpha and gamma; no positive among 20 labelled cases at beta" in said


def test_a_round_is_compared_by_the_sites_that_measured_both() -> None:
    """A site with a high loss joins: the mean rises, and the model is better at the site that was there."""
    joined, seen = Best(2, -0.9), (Best(1, -0.6), Best(2, -0.5))
    standings = ModelSelection(Best(1, -0.6), improved=1).after_losses(joined, seen)
    assert (standings.best, standings.improved) == (joined, 2)
    standings = standings.after_losses(Best(3, -0.3), (Best(2, -0.5), Best(3, -0.55)))
    assert standings.best == joined, "the site with the high loss is missing, and the other one lost"
