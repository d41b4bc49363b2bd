"""Warm-up of the head, falling learning rates, and patience."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rounds import step_by_step
from suture.core.errors import ConfigError
from suture.core.files import read_records
from suture.core.labels import LabelSet
from suture.core.runtime import seed_for
from suture.federation.plan import round_context
from suture.learning.training import BestEpoch, LocalTraining, fit, validation_loss
from suture.methods.base import Phase, RoundContext, local_round, loss_of, resolve_training
from suture.methods.surgical import SurgicalAggregation
from suture.models import ModelSpec, build
from suture.models.classifier import head_rows, reinitialise_head
from suture.protocol.packing import Packed, load
from suture_synthetic.trial import Trial
from world import refused


@pytest.mark.parametrize(
    ("local", "phase", "rounds", "rates"),
    [
        # HyperKvasir's, 200 rounds: methods with a schedule start just below the first value.
        (LocalTraining(lr=0.1, final_lr=1e-4), Phase("main", 200), (1, 100, 200), [0.0999938, 0.05005, 1e-4]),
        (LocalTraining(lr=0.1), Phase("main", 200), (7,), [0.1]),
    ],
)
def test_a_learning_rate_falls_along_half_a_cosine(
    local: LocalTraining, phase: Phase, rounds: tuple[int, ...], rates: list[float]
) -> None:
    found = [resolve_training(local, RoundContext(r, phase, 1, r)).lr for r in rounds]
    assert found == pytest.approx(rates, abs=1e-7)


@pytest.mark.parametrize(
    ("rounds", "rates"),
    [
        (1, [0.2]),
        (2, [0.2, 0.1]),
        (5, [0.2, 0.180902, 0.130902, 0.069098, 0.019098]),
    ],
)
def test_an_annealed_phase_begins_with_its_rate_and_ends_above_0(rounds: int, rates: list[float]) -> None:
    """Also where it has a single round, which would teach nothing at a rate of 0."""
    phase = Phase("later", rounds, lr=0.2, annealed=True)
    found = [
        resolve_training(LocalTraining(lr=7.0), RoundContext(9, phase, 1, r + 1)).lr for r in range(rounds)
    ]
    assert found == pytest.approx(rates, abs=1e-6)


def test_a_sites_own_learning_rate_falls_to_the_same_last_one() -> None:
    local, phase = LocalTraining(lr=0.1, final_lr=1e-4), Phase("main", 2)
    found = [resolve_training(local, RoundContext(r, phase, 1, r), lr=0.5, batch_size=2) for r in (1, 2)]
    assert [one.lr for one in found] == pytest.approx([(0.5 + 1e-4) / 2, 1e-4])
    assert {one.batch_size for one in found} == {2}


def test_the_warm_up_is_the_first_round_and_has_its_own_learning_rate(tiny: Any) -> None:
    method = SurgicalAggregation(local=LocalTraining(lr=1e-2, iterations=9, warmup_epochs=4, warmup_lr=5e-2))
    assert [(p.name, p.rounds, p.trainable) for p in method.phases(5)] == [
        ("warm-up", 1, "head"),
        ("main", 4, "all"),
    ]
    first, second, third = (round_context(method, 1, 5, number) for number in (1, 2, 3))
    assert first.phase.name == "warm-up"
    assert (third.phase.name, third.phase_round) == ("main", 2)
    warm, main = (resolve_training(method.local, ctx, lr=0.3) for ctx in (first, second))
    assert (warm.lr, warm.epochs, warm.iterations) == (5e-2, 4, None)
    assert (main.lr, main.epochs, main.iterations) == (0.3, 1, 9)
    with refused("warmup_epochs", by=ConfigError):
        tiny(SurgicalAggregation(local=LocalTraining(warmup_init="independent")))


@pytest.mark.complete
def test_the_backbone_rests_while_the_head_warms_up_and_moments_end_with_it(tiny: Any) -> None:
    local = LocalTraining(lr=1e-2, batch_size=8, warmup_epochs=3)
    federation = tiny(SurgicalAggregation(local=local), rounds=2)
    before, warm, main = step_by_step(federation.server(), federation.sites())
    assert all(torch.equal(t, before.shared[k]) for k, t in warm.shared.items())
    assert not torch.equal(warm.head["head.weight"], before.head["head.weight"])
    assert not torch.equal(main.shared["backbone.conv1.weight"], warm.shared["backbone.conv1.weight"])
    # Adam of the main phase begins afresh: it has taken a step for each of the 2 batches of 15 images.
    newest = sorted((federation.folder / "run" / "sites" / "alpha").glob("round-*"))[-1]
    assert float(load(newest).tensors["optimiser/head.weight/step"]) == 2


def test_sites_without_a_common_start_average_what_each_has_drawn(tiny: Any) -> None:
    """Each site's own hidden block and rows, hardly trained: the mean of the units, and the owner's row."""
    local = LocalTraining(lr=1e-2, batch_size=8, warmup_epochs=1, warmup_lr=1e-9, warmup_init="independent")
    labels = {"alpha": ("Mass",), "beta": ("Nodule",)}
    model = ModelSpec("cnn", size=16, hidden=8)
    federation = tiny(SurgicalAggregation(local=local), labels, model=model, rounds=1)
    after = federation.run().model
    drawn = {}
    for name, own in labels.items():
        drawn[name] = build(model, LabelSet(own), 5, pretrained=False)
        reinitialise_head(drawn[name], seed_for(1, name, "init"))
    mean = torch.stack([d.state_dict()["hidden.0.weight"] for d in drawn.values()]).mean(0)
    torch.testing.assert_close(after.shared["hidden.0.weight"], mean, atol=1e-6, rtol=0)
    rows = {name: d.head.weight[0] for name, d in drawn.items()}
    for name, own in labels.items():
        row = after.labels.index(own[0])
        torch.testing.assert_close(after.head["head.weight"][row], rows[name], atol=1e-6, rtol=0)
    common = build(model, LabelSet(("Mass",)), 1, pretrained=False)
    assert not torch.allclose(rows["alpha"], common.head.weight[0], atol=1e-3)


def test_a_phase_may_have_local_training_of_its_own() -> None:
    """The site's own batches hold in it too; its learning rate is the phase's, where that names one."""
    method = SurgicalAggregation(local=LocalTraining(lr=1e-2, epochs=3, batch_size=8))
    own = LocalTraining(lr=0.3, batch_size=512, optimiser="sgd", sampling="class_aware")
    with Trial(method, ModelSpec("cnn", size=16), "multiclass") as trial:
        site = replace(trial.context("alpha", trial.payload("alpha")), lr=1e-4, batch_size=4)

    def of(phase: Phase) -> LocalTraining:
        return local_round(method, site, Packed({}, {}), RoundContext(1, phase, 1)).local

    assert of(Phase("main", 2)) == replace(method.local, lr=1e-4, batch_size=4)
    assert of(Phase("later", 2, local=own)) == replace(own, lr=1e-4, batch_size=4)
    assert of(Phase("later", 2, lr=0.2, epochs=5, local=own)) == replace(own, lr=0.2, epochs=5, batch_size=4)


def test_a_fresh_head_is_the_same_at_every_site_and_drawn_once() -> None:
    method = SurgicalAggregation()
    phase = Phase("later", 2, "head", lr=1e-30, reinit_head=True, local=LocalTraining(optimiser="sgd"))
    with Trial(method, ModelSpec("cnn", size=16, hidden=8), "multiclass") as trial:
        sent = {}
        for name in ("alpha", "gamma"):
            for phase_round in (1, 2):
                site = trial.context(name, trial.payload(name))
                ctx = RoundContext(4 + phase_round, phase, 1, phase_round)
                received = {key: tensor.clone() for key, tensor in site.model.state_dict().items()}
                round_ = local_round(method, site, Packed({}, {}), ctx)
                fit(site, lambda model, batch: model(batch.inputs).sum(), round_)
                state = site.model.state_dict()
                assert all(torch.equal(t, received[k]) for k, t in state.items() if k.startswith("backbone."))
                same = torch.equal(state["head.weight"], received["head.weight"])
                assert same is torch.equal(state["hidden.0.weight"], received["hidden.0.weight"])
                assert same is (phase_round == 2)
                sent[name, phase_round] = (site.model.labels, state)
    labels, state = sent["alpha", 1]
    other, there = sent["gamma", 1]
    assert torch.equal(state["hidden.0.weight"], there["hidden.0.weight"])
    for name in set(labels) & set(other):
        row, same_row = labels.names.index(name), other.names.index(name)
        assert torch.equal(state["head.weight"][row], there["head.weight"][same_row])
    assert torch.equal(state["head.weight"], head_rows(labels, 8, seed_for(1, "head", 5))["head.weight"])


def test_the_best_epoch_is_kept() -> None:
    method = SurgicalAggregation()
    with Trial(method, ModelSpec("cnn", size=16), "multilabel") as trial:
        context = trial.context("alpha", trial.payload("alpha"))
    loss = loss_of(method.loss, "multilabel")
    best = BestEpoch(context, loss)
    best()
    good = validation_loss(context, loss)
    with torch.no_grad():
        context.model.head.bias += 9
    best()
    worse = validation_loss(context, loss)
    best.restore()
    assert validation_loss(context, loss) == good
    assert (worse or 0) > (good or 0) > 0
    assert validation_loss(replace(context, samples={"train": context.samples["train"]}), loss) is None


@pytest.mark.complete
def test_patience_stops_a_run_that_gets_no_better(tiny: Any) -> None:
    method = SurgicalAggregation(local=LocalTraining(lr=0.2, batch_size=8))
    server = tiny(method, rounds=30, patience=3).run()
    losses = [line["validation"]["loss"] for line in read_records(server.record.folder / "history.jsonl")]
    assert server.round < 30
    assert server.selected_round == losses.index(min(losses)) + 1
    # One round late: a model is measured when the next one is trained.
    assert server.round == server.selected_round + 3 + 1
