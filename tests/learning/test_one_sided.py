"""The targets of classes of which a site knows positives alone."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from federated import ROUND
from suture.core.labels import LabelSet
from suture.learning import evaluation as one_sided
from suture.learning.evaluation import as_trained, expect_context, given_absent
from suture.methods.surgical import SurgicalAggregation
from suture_synthetic.method_checks import SMALL
from suture_synthetic.trial import Trial

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
    method = SurgicalAggregation()
    with Trial(method, SMALL, "multilabel", one_sided=True) as trial:
        received = trial.payload("beta")
        site = trial.sites["beta"]
        context = site.trainer.context(received, site.states.before(received))
        own = site.trainer.data[0]
    assert own.one_sided == {"Mass": ("Hernia",)}
    hernia, mass = (context.model.labels.index(name) for name in ("Hernia", "Mass"))
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
    assert torch.equal(
        expect_context(context, LabelSet(own.names), ROUND).samples["train"].y.isnan(), y.isnan()
    )


def test_a_class_below_in_every_image_of_the_class_leaves_nothing_to_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half of the images show it, and the mean of p is a half: rho = 1, and so q = 0."""
    monkeypatch.setattr(one_sided, "as_trained", lambda site, _: torch.zeros(site.samples["train"].y.shape))
    with Trial(SurgicalAggregation(), SMALL, "multilabel", one_sided=True) as trial:
        received = trial.payload("beta")
        site = trial.sites["beta"]
        context, own = site.trainer.context(received, site.states.before(received)), site.trainer.data[0]
    hernia, mass = (context.model.labels.index(name) for name in ("Hernia", "Mass"))
    train = context.samples["train"]
    half = len(train) // 2
    y = train.y[: 2 * half].clone()
    y[:half, hernia], y[half:, hernia], y[:, mass] = 1, 0, torch.nan
    part = replace(train.rows(torch.arange(2 * half)), y=y)
    taught = expect_context(replace(context, samples={"train": part}), own, ROUND).samples["train"].taught
    assert taught is not None
    assert taught[half:, mass].tolist() == [0] * half


def test_validation_and_counts_know_nothing_of_them() -> None:
    with Trial(SurgicalAggregation(), SMALL, "multilabel", one_sided=True) as trial:
        trial.run()
        owners = trial.server.registry.owners()
        assert owners["Mass"] == ("alpha", "gamma")
        run = trial.server.record.run
        assert run["sites"]["beta"]["labels"] == ["Hernia", "Nodule"]
        assert run["notes"] == [{"code": "one_sided", "values": {"label": "Mass", "sites": ["beta"]}}]
