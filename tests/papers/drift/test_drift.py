"""FedProx and MOON: their terms by hand and written out, and the model that a site of MOON keeps."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from federated import LOCAL, ROUND, at_site, moved, objective_of, random_batch
from rounds import reply_of
from suture.core.labels import LabelType
from suture.federation.loop import Loop
from suture.learning.training import LocalTraining, SiteContext
from suture.methods.composed import Step
from suture.methods.fedavg import FedAvg
from suture.models.classifier import split_state
from suture.protocol.messages import TaskData
from suture.protocol.packing import load, unpack
from suture_papers.drift.fedprox import FedProx, Proximal
from suture_papers.drift.moon import MOON, Contrastive, contrast
from suture_synthetic.method_checks import SMALL
from suture_synthetic.trial import Trial

# FedProx

NONE = torch.zeros(0)


class Two(nn.Module):
    """Two weights that are trained, one that rests, and a statistic that moves by itself."""

    def __init__(self, *weights: float, frozen: float = 0.0, statistic: float = 0.0) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.tensor(weights))
        self.frozen = nn.Parameter(torch.tensor([frozen]), requires_grad=False)
        self.register_buffer("statistic", torch.tensor([statistic]))


def step_of(model: nn.Module, received: nn.Module) -> Step:
    return Step(cast(Any, model), cast(Any, received), cast(Any, None), NONE, NONE)


def test_the_penalty_and_a_step_of_sgd_by_hand() -> None:
    """w = (1, 2), w^t = (0, 1), mu = .1: .1/2 (1 + 1) = .1; (1 - .5 (.2 + .1), 2 - .5 (-.4 + .1))."""
    model, received = Two(1.0, 2.0, frozen=7.0, statistic=9.0), Two(0.0, 1.0)
    penalty = Proximal(0.1).begin(cast(Any, None), cast(Any, None))(step_of(model, received))
    assert penalty.item() == pytest.approx(0.1)
    loss = (torch.tensor([0.2, -0.4]) * model.weights).sum() + penalty
    loss.backward()  # type: ignore[no-untyped-call]
    torch.optim.SGD([model.weights], lr=0.5).step()
    assert model.weights.tolist() == pytest.approx([0.85, 2.15])


@pytest.mark.parametrize("label_type", ["multilabel", "multiclass"])
def test_the_loss_is_equation_2(label_type: LabelType) -> None:
    """L_k + mu/2 times a sum over every entry of every parameter, rows of the head among them."""
    site, task = at_site(FedProx(local=LOCAL), label_type)
    mean_loss = objective_of(FedAvg(class_weights="none"), site, task)
    method = FedProx(class_weights="none", proximal=Proximal(0.37))
    objective = objective_of(method, site, task)
    received = {name: tensor.clone() for name, tensor in site.model.state_dict().items()}
    moved(site.model)
    site.model.eval()
    batch = random_batch(6, len(task.labels), label_type)
    expected = mean_loss(batch).item()
    for name, parameter in site.model.named_parameters():
        for w, anchor in zip(parameter.flatten().tolist(), received[name].flatten().tolist(), strict=True):
            expected += 0.37 / 2 * (w - anchor) ** 2
    assert objective(batch).item() == pytest.approx(expected, abs=1e-10)


def test_the_penalty_is_0_where_a_warm_up_begins_even_with_a_head_of_the_sites_own() -> None:
    """One step, of a whole epoch: the penalty's gradient at its start is 0, so that mu changes nothing."""
    own = LocalTraining(lr=1e-2, batch_size=64, warmup_epochs=1, warmup_init="independent")
    heads = []
    for mu in (0.0, 10.0):
        with Trial(FedProx(local=own, proximal=Proximal(mu)), SMALL, "multilabel") as trial:
            heads.append(trial.update("alpha").head["head.weight"])
    assert torch.equal(*heads)


# MOON


def sent_last_time(site: SiteContext) -> dict[str, Tensor]:
    """The site's model as it keeps it."""
    return {name: t.clone() for name, t in Contrastive().kept(site.model).items()}


@pytest.mark.parametrize(
    ("z", "received", "previous", "expected"),
    [
        ((3.0, 4.0), (4.0, 3.0), (-4.0, 3.0), 0.136807),  # cosines .96 and 0: ln(1 + e^(-1.92))
        ((1.0, 0.0), (0.8, 0.6), (0.6, 0.8), 0.513015),  # cosines .8 and .6: ln(1 + e^(-.4))
        ((3.0, 4.0), (4.0, 3.0), (4.0, 3.0), 0.693147),  # ln 2
    ],
)
def test_the_contrast_by_hand(
    z: tuple[float, ...], received: tuple[float, ...], previous: tuple[float, ...], expected: float
) -> None:
    one, two, three = (torch.tensor([v], dtype=torch.float64) for v in (z, received, previous))
    assert contrast(one, two, three, 0.5).item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("label_type", ["multilabel", "multiclass"])
def test_the_loss_is_that_of_equations_1_and_3(label_type: LabelType) -> None:
    """Image by image, with the cosine and the exponentials written out."""
    site, task = at_site(MOON(local=LOCAL), label_type)
    batch = random_batch(7, len(task.labels), label_type)
    supervised = objective_of(FedAvg(class_weights="none"), site, task)
    moved(site.model, seed=1)
    kept, previous = sent_last_time(site), site.model.eval().features(batch.inputs).tolist()
    moved(site.model, seed=2)
    received = site.model.eval().features(batch.inputs).tolist()
    method = MOON(class_weights="none", contrastive=Contrastive(mu=0.7, tau=0.3))
    objective = objective_of(method, site, task, replace(ROUND, kept=kept))
    moved(site.model, seed=3)
    z = site.model.eval().features(batch.inputs).tolist()

    def sim(a: list[float], b: list[float]) -> float:
        dot = sum(x * y for x, y in zip(a, b, strict=True))
        return dot / math.sqrt(sum(x * x for x in a)) / math.sqrt(sum(y * y for y in b))

    total = 0.0
    for i in range(len(batch)):
        near, far = math.exp(sim(z[i], received[i]) / 0.3), math.exp(sim(z[i], previous[i]) / 0.3)
        total += -math.log(near / (near + far))
    expected = supervised(batch).item() + 0.7 * total / len(batch)
    assert objective(batch).item() == pytest.approx(expected, abs=1e-10)


def test_a_site_keeps_what_it_sent_and_not_the_merge(tiny: Any) -> None:
    """The model in the state of round 1 is that of alpha's update, tensor by tensor; no row is in it."""
    federation = tiny(MOON(local=LOCAL), rounds=1)
    server, sites = federation.server(), federation.sites()
    loop = Loop(sites)
    server.begin(loop.exchange("handshake", server.handshake(loop.sites), server.receiver()))
    task = unpack(server.assign()["alpha"])
    assert isinstance(task, TaskData)
    update: Any = reply_of(sites["alpha"], task)
    (path,) = sites["alpha"].folder.glob("round-000001*")
    prefix = "kept/previous/"
    kept = {k.removeprefix(prefix): t for k, t in load(path).tensors.items() if k.startswith(prefix)}
    assert all(torch.equal(kept[name], tensor) for name, tensor in update.shared.items())
    assert kept.keys() == update.shared.keys()


def test_received_and_previous_model_are_in_eval_mode_and_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Batch norm would move with every batch that they see."""
    seen = []
    plain = Contrastive._of

    def watched(self: Contrastive, step: Any, previous: Any) -> Tensor:
        seen.append((step.received, previous))
        return plain(self, step, previous)

    monkeypatch.setattr(Contrastive, "_of", watched)
    method = MOON(local=LOCAL)
    site, task = at_site(method)
    site.model.float()
    before = {name: t.clone() for name, t in split_state(site.model.state_dict())[0].items()}
    method.train(site, task, replace(ROUND, kept=sent_last_time(site)))
    assert len(seen) == 3
    for models in seen:
        for model in models:
            assert not model.training
            assert not any(p.requires_grad for p in model.parameters())
            assert all(torch.equal(t, before[k]) for k, t in split_state(model.state_dict())[0].items())
    trained = split_state(site.model.state_dict())[0]
    assert all(not torch.equal(t, before[name]) for name, t in trained.items() if "running_mean" in name)
