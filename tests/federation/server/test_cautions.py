"""What a figure of a run does not say: ties, coarse steps, and rounds that other sites have measured."""

from __future__ import annotations

from statistics import fmean

import pytest

from suture.federation.server.selection import Best, ModelSelection, classes_of
from suture.protocol.records import Round, Validation
from suture_results.notes import cautions
from suture_results.sentences import why_unmeasured


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
    withheld, none = (None, None), (0, 20)
    said = why_unmeasured({"alpha": withheld, "beta": none, "gamma": withheld})
    assert said.startswith("withheld, because fewer than min_count")
    assert "at alpha and gamma; no positive among 20 labelled cases at beta" in said


def best(round_: int, **losses: float) -> Best:
    """A round by the losses of some sites."""
    parts = {classes_of(site, ["Mass"]): -loss for site, loss in losses.items()}
    return Best(round_, fmean(parts.values()), parts=parts)


def test_a_round_is_compared_by_the_sites_that_measured_both() -> None:
    """A site with a high loss joins: the mean rises, and the model is better at the site that was there."""
    joined = best(2, old=0.5, new=1.3)
    standings = ModelSelection(best(1, old=0.6), improved=1).after_losses(joined)
    assert (standings.best, standings.improved) == (joined, 2)
    standings = standings.after_losses(best(3, old=0.55))
    assert standings.best == joined, "the site with the high loss is missing, and the other one lost"
    assert standings.after_losses(best(4, other=0.1)).best == joined, "nobody measured both"


def test_a_site_that_annotates_another_class_measures_another_loss() -> None:
    """The losses of beta are over one class, then over two; alpha alone can compare the rounds."""
    first = Best(1, -0.5, parts={classes_of("alpha", ["Mass"]): -0.6, classes_of("beta", ["Mass"]): -0.4})
    two = classes_of("beta", ["Nodule", "Mass"])
    assert two == classes_of("beta", ["Mass", "Nodule"])
    second = Best(2, -0.7, parts={classes_of("alpha", ["Mass"]): -0.5, two: -0.9})
    assert ModelSelection(first, improved=1).after_losses(second) == ModelSelection(second, improved=2)
    third = Best(3, -0.3, parts={classes_of("alpha", ["Mass"]): -0.55, classes_of("beta", ["Mass"]): -0.05})
    assert ModelSelection(second).after_losses(third).best == second


def test_a_model_of_a_site_that_annotates_another_class_is_selected_anew() -> None:
    one, two = ({classes_of("a", names): -1.0} for names in (["Mass"], ["Mass", "Nodule"]))
    standings = ModelSelection().after_own({"a": Best(1, -0.2, parts=one)})
    assert standings.after_own({"a": Best(2, -0.3, parts=one)}).of("a") == 1
    assert standings.after_own({"a": Best(2, -0.9, parts=two)}).of("a") == 2


def test_rounds_are_compared_by_the_classes_that_both_have() -> None:
    """A hard class joins: the mean over all falls from .80 to .70, the mean over the two before rises."""
    first = Best(1, 0.8, parts={"Mass": 0.7, "Nodule": 0.9})
    second = Best(2, 0.7, parts={"Mass": 0.72, "Nodule": 0.9, "Hernia": 0.48})
    standings = ModelSelection(first, improved=1).after(second)
    assert (standings.best, standings.improved) == (second, 2)
    third = Best(3, 0.69, parts={"Mass": 0.72, "Nodule": 0.9, "Hernia": 0.45})
    standings = standings.after(third)
    assert (standings.best, standings.over(3, 1)) == (second, True), "of the same classes the means compare"
    easy = Best(2, 0.85, parts={"Mass": 0.65, "Nodule": 0.9, "Cardiomegaly": 1.0})
    assert ModelSelection(first).after(easy).best == first, "an easy class does not make a model better"
