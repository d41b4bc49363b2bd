"""Phases of a run: warm-up and re-training of the head, falling learning rates, and patience."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from federated import LOCAL, federated, same
from rounds import step_by_step, train_round
from suture.core.errors import ConfigError
from suture.core.files import read_records
from suture.core.labels import LabelSet
from suture.core.runtime import generator_for, seed_for
from suture.data.batch import class_aware
from suture.execution.job import load_job, with_settings
from suture.federation.loop import Loop, federate
from suture.federation.plan import round_context
from suture.federation.server.server import Server
from suture.learning.training import BestEpoch, LocalRound, LocalTraining, SiteContext, fit, validation_loss
from suture.methods.base import (
    GlobalModel,
    Method,
    Phase,
    RoundContext,
    local_round,
    loss_of,
    resolve_training,
)
from suture.methods.composed import Composed, LossTerm, Step, Value
from suture.methods.fedavg import FedAvg
from suture.methods.retraining import RETRAINING, Retraining
from suture.methods.surgical import SurgicalAggregation
from suture.models import ModelSpec, build
from suture.models.classifier import head_rows, reinitialise_head
from suture.protocol.messages import Update
from suture.protocol.packing import Packed, load
from suture_papers.fedmas.fedmas import FedMAS
from suture_papers.rare_classes.crt import Decoupling
from suture_papers.rare_classes.ldam import LDAM
from suture_synthetic.trial import SITES, Trial, least_rounds
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
    assert [p.name for p in method.phases(1)] == ["warm-up"]
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


SMALL = ModelSpec("cnn", size=16)
RETRAIN = Retraining(rounds=2, epochs=2, batch_size=8)
CRT = Decoupling(local=LOCAL, retrain=RETRAIN)


def rounds_of(trial: Trial) -> Iterator[GlobalModel]:
    return step_by_step(trial.server, trial.sites)


def in_retraining(method: Method, phase_round: int = 1) -> RoundContext:
    """A round of the phase, after four others."""
    (phase,) = (p for p in method.phases(4 + least_rounds(method)) if p.name == RETRAINING)
    return RoundContext(5 + phase_round, phase, 1, phase_round)


def test_the_last_rounds_are_of_the_head_alone() -> None:
    phases = CRT.phases(7)
    assert [(p.name, p.rounds, p.trainable, p.reinit_head, p.selectable) for p in phases] == [
        ("main", 5, "all", False, False),
        ("retraining", 2, "head", True, True),
    ]
    local = phases[1].local
    assert local is not None
    assert (local.optimiser, local.momentum, local.weight_decay, local.sampling) == (
        *("sgd", 0.9, 5e-4, "class_aware"),
    )
    warm = replace(CRT, local=replace(LOCAL, warmup_epochs=1)).phases(4)
    assert [(p.name, p.rounds) for p in warm] == [("warm-up", 1), ("main", 1), ("retraining", 2)]
    assert FedAvg(local=LOCAL).phases(7)[0].selectable


def test_it_is_a_method_of_its_own_or_a_field_of_another_and_needs_rounds(tmp_path: Path) -> None:
    job = load_job("fedmas_tones")
    crt = with_settings(
        job, ["method=crt", "rounds=12", "method.retrain.rounds=3", "softmax=balanced"]
    ).method
    assert isinstance(crt, Decoupling)
    assert (crt.retrain, crt.softmax) == (Retraining(rounds=3), "balanced")
    assert with_settings(job, ['retrain={"rounds": 3}']).method.retrain == Retraining(rounds=3)
    with refused("retrain.rounds=10", "4", "11", by=ConfigError):
        with_settings(job, ["method=crt", "rounds=4"]).schedule()
    with Trial(CRT, SMALL, "multiclass") as trial, refused("2", "3", by=ConfigError):
        Server(trial.plan, replace(trial.server.schedule, rounds=2), tmp_path, None)


@pytest.mark.parametrize("method", [Decoupling(), FedAvg(retrain=RETRAIN), FedMAS(retrain=RETRAIN)])
def test_several_labels_an_image_are_refused(method: Method) -> None:
    assert method.labels.types == ("multiclass",)
    assert replace(method, retrain=None).labels.types == ("multilabel", "multiclass")  # type: ignore[type-var]
    with Trial(method, SMALL, "multilabel") as trial, refused(by=ConfigError):
        trial.payload("alpha")


@pytest.mark.complete
def test_before_it_begins_and_without_it_all_is_fedavg() -> None:
    """Two rounds of FedAvg give the bytes of two rounds before a re-training, and of none."""
    never = Decoupling(local=LOCAL, retrain=None)
    fedavg, without = (federated(one, "multiclass", model=SMALL) for one in (FedAvg(local=LOCAL), never))
    with Trial(CRT, SMALL, "multiclass", rounds=2) as trial:
        _, _, before, *after = rounds_of(trial)
    assert same(fedavg, without)
    assert same(fedavg, before)
    # The backbone rests then: the mean of equal tensors of three sites is that tensor, to the last bit.
    for one in after:
        assert all(torch.equal(t, before.shared[k]) for k, t in one.shared.items())
    heads = [one.head["head.weight"] for one in (before, *after)]
    assert not torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[1], heads[2])


def test_the_head_is_drawn_anew_for_all_sites_alike() -> None:
    """At a learning rate of nothing every site sends the rows that were drawn, which nobody had before."""
    method = replace(CRT, retrain=replace(RETRAIN, lr=1e-30))
    with Trial(method, SMALL, "multiclass") as trial:
        _, main, retrained, _ = rounds_of(trial)
    drawn = head_rows(LabelSet(main.labels), 128, seed_for(1, "head", 2))
    assert all(torch.equal(retrained.head[name], rows) for name, rows in drawn.items())
    assert not torch.equal(main.head["head.weight"], drawn["head.weight"])


def sent(method: Method, model: ModelSpec = SMALL) -> Update:
    """What alpha sends in a first round of re-training."""
    with Trial(method, model, "multiclass") as trial:
        payload = trial.payload("alpha")
        update, _ = train_round(method, trial.context("alpha", payload), payload, in_retraining(method))
        return update


class Loud(LossTerm):
    """A term that no re-training may begin."""

    def begin(self, site: SiteContext, round_: LocalRound) -> Value:
        raise AssertionError("a term was begun")

    def value(self, step: Step) -> Tensor:
        raise AssertionError


def test_losses_and_terms_of_the_method_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = sent(FedAvg(local=LOCAL, retrain=RETRAIN))
    others = [FedAvg(local=LOCAL, retrain=RETRAIN, softmax="balanced"), CRT]
    for other in others:
        assert same(sent(other), plain)
    cosine = replace(SMALL, head="cosine")
    assert same(
        sent(LDAM(local=LOCAL, retrain=RETRAIN), cosine), sent(FedAvg(local=LOCAL, retrain=RETRAIN), cosine)
    )
    monkeypatch.setattr(Composed, "terms", (Loud(),))
    assert same(sent(CRT), plain)
    with Trial(CRT, SMALL, "multiclass") as trial:
        site = trial.context("alpha", trial.payload("alpha"))
        before = round_context(CRT, trial.plan.seed, 9, 1)
        with pytest.raises(AssertionError, match="a term was begun"):
            train_round(CRT, site, trial.payload("alpha"), before)


def test_a_round_is_stochastic_gradient_descent_on_the_head_written_out() -> None:
    """Softmax, gradient, momentum (Nesterov's) and decay image by image and class by class, in double."""
    method = replace(CRT, retrain=replace(RETRAIN, batch_size=4))
    ctx, lr = in_retraining(method, 2), 0.1
    with Trial(CRT, SMALL, "multiclass") as trial:
        payload = trial.payload("alpha")
        site = trial.context("alpha", payload)
        site.model.double()
        prepare = site.prepare
        site = replace(site, prepare=lambda x: prepare(x).double())  # type: ignore[arg-type]
        train = site.samples["train"]
        with torch.no_grad():
            h = site.model.eval().features({"image": prepare(train.inputs["image"]).double()})
        w, b = (getattr(site.model.head, key).detach().clone() for key in ("weight", "bias"))
        update, _ = train_round(method, site, payload, ctx)
    known = [c for c in range(len(b)) if not train.y[:, c].isnan().any()]
    mw, mb = torch.zeros_like(w), torch.zeros_like(b)
    shuffle, steps = generator_for(1, "alpha", ctx.round, "shuffle"), 0
    for _ in range(2):
        for rows in class_aware(train.y, payload.labels, 4, shuffle):
            gw, gb = 5e-4 * w, 5e-4 * b
            for i in rows.tolist():
                z = {c: float(w[c] @ h[i] + b[c]) for c in known}
                for c in known:
                    p = math.exp(z[c]) / sum(map(math.exp, z.values()))
                    gw[c] += (p - float(train.y[i, c] == 1)) / len(rows) * h[i]
                    gb[c] += (p - float(train.y[i, c] == 1)) / len(rows)
            mw, mb = 0.9 * mw + gw, 0.9 * mb + gb
            w, b, steps = w - lr * (gw + 0.9 * mw), b - lr * (gb + 0.9 * mb), steps + 1
    assert steps > 2
    torch.testing.assert_close(update.head["head.weight"], w, atol=1e-10, rtol=0)
    torch.testing.assert_close(update.head["head.bias"], b, atol=1e-10, rtol=0)


def test_a_row_that_nobody_sends_and_a_site_without_images_of_a_class_change_nothing() -> None:
    before = GlobalModel(("A", "B"), {}, {"head.bias": torch.tensor([1.0, 2.0])})
    weights = torch.ones(1).double()
    updates = [Update(6, ("A",), {}, {"head.bias": torch.tensor([x])}, weights) for x in (3.0, 5.0)]
    for method in (CRT, FedMAS(retrain=RETRAIN)):
        after = method.aggregate(before, updates, in_retraining(method))
        assert after.head["head.bias"].tolist() == [4, 2]
    with Trial(CRT, SMALL, "multiclass") as trial:
        payload = trial.payload("alpha")
        site = trial.context("alpha", payload)
        train = site.samples["train"]
        site = replace(site, samples={"train": replace(train, y=torch.zeros_like(train.y))})
        update, _ = train_round(CRT, site, payload, in_retraining(CRT, 2))
    assert update.train_loss is None
    assert torch.equal(update.head["head.weight"], payload.head["head.weight"])


def losses(trial: Trial) -> list[float]:
    return [line["validation"]["loss"] for line in trial.history()]


@pytest.mark.complete
def test_the_result_is_a_model_after_the_retraining_even_where_one_before_is_better() -> None:
    """Rows that are hardly trained are worse than those of FedAvg; they are what the method gives.

    Nor does patience end a run before: at a learning rate of 0 nothing gets better in the main phase.
    """
    method = replace(CRT, retrain=replace(RETRAIN, lr=1e-9))
    with Trial(method, SMALL, "multiclass", rounds=4) as trial:
        trial.run()
        found = losses(trial)
        assert min(found[:4]) < min(found[4:])
        assert trial.server.selected_round in (5, 6)
    with Trial(replace(CRT, local=replace(LOCAL, lr=1e-30)), SMALL, "multiclass", rounds=4) as trial:
        trial.server.schedule = replace(trial.server.schedule, patience=1)
        trial.run()
        assert trial.server.round >= 5


@pytest.mark.complete
def test_so_it_is_where_the_server_measures() -> None:
    """By its labelled data every round is worse than the one before."""
    with Trial(CRT, SMALL, "multiclass", rounds=3) as trial:
        server, rounds = trial.server, itertools.count(1)
        data: Any = SimpleNamespace(validate=lambda _: {"server_auroc": {"Mass": 1 / next(rounds)}})
        data.check_groups = data.take_names = lambda _: None
        server.schedule = replace(server.schedule, selection="server_metric")
        server.aggregator = replace(server.aggregator, schedule=server.schedule, held_out=data)
        list(rounds_of(trial))
        assert server.selected_round == 4


def restarted(trial: Trial, after: int, rounds: int) -> None:
    """The parties of a trial that crashed after a round, for a run of so many."""
    list(itertools.islice(rounds_of(trial), after + 1))
    schedule = replace(trial.server.schedule, rounds=rounds)
    trial.server = Server(trial.plan, schedule, trial.folder / "run", None)
    trial.sites = {name: trial._site(name, rounds) for name in SITES}


@pytest.mark.complete
@pytest.mark.parametrize("stop", [2, 3])
def test_a_run_continues_within_the_retraining_with_the_same_bytes(stop: int) -> None:
    """After its last round before (2) and after the first of it (3), whose moments and head go on."""
    with (
        Trial(CRT, SMALL, "multiclass", rounds=2) as whole,
        Trial(CRT, SMALL, "multiclass", rounds=2) as cut,
    ):
        whole.run()
        restarted(cut, stop, 4)
        federate(cut.server, Loop(cut.sites))
        assert same(cut.server.model, whole.server.model)
        assert cut.server.selected_round == whole.server.selected_round
        assert losses(cut) == losses(whole)


@pytest.mark.complete
@pytest.mark.parametrize(("stop", "rounds"), [(3, 6), (2, 3)])
def test_rounds_that_change_phase_are_refused(stop: int, rounds: int) -> None:
    with Trial(CRT, SMALL, "multiclass", rounds=2) as trial:
        restarted(trial, stop, rounds)
        with refused(f"round {stop} ", f"{rounds} rounds", "main", "retraining", by=ConfigError):
            next(rounds_of(trial))
    with Trial(CRT, SMALL, "multiclass", rounds=2) as trial:
        restarted(trial, 1, 6)  # more rounds before the re-training are none of another phase
        federate(trial.server, Loop(trial.sites))
        assert [line["phase"] for line in trial.history()] == ["main"] * 4 + ["retraining"] * 2


def test_fed_mas_aggregates_by_the_rescue_factor_of_a_frozen_model() -> None:
    """v = E w, so RF = E sum of w squared; the prior has no part in the loss, and the projector rests."""
    method = FedMAS(local=LOCAL, retrain=RETRAIN)
    with Trial(method, SMALL, "multiclass") as trial:
        payload = trial.payload("alpha")
        site = trial.context("alpha", payload)
        noted: dict[str, Tensor] = {}
        site = replace(site, record=noted.update)
        update, _ = train_round(method, site, payload, in_retraining(method))
        without, _ = train_round(
            replace(method, distillation=0.0), trial.context("alpha", payload), payload, in_retraining(method)
        )
    assert update.weight == pytest.approx(2 * float(noted["divergence"].square().sum()))
    assert same(update, without)
    assert all(torch.equal(tensor, payload.shared[name]) for name, tensor in update.shared.items())
    assert update.class_weights.tolist() == [update.weight] * len(payload.labels)
