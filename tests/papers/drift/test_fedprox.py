"""FedProx: the penalty by hand, where it is FedAvg, and Eq. 2 written out."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch
from torch import nn

from federated import LOCAL, at_site, federated, moved, objective_of, random_batch, same
from suture.core.labels import LabelType
from suture.execution.job import load_job, with_settings
from suture.learning.training import LocalTraining
from suture.methods.composed import Step
from suture.methods.fedavg import FedAvg
from suture_papers.drift.fedprox import FedProx, Proximal
from suture_synthetic.method_checks import SMALL
from suture_synthetic.trial import Trial

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


@pytest.mark.complete
@pytest.mark.parametrize(
    ("label_type", "settings"),
    [
        ("multilabel", {}),
        ("multilabel", {"label_view": "own", "weights": "equal"}),
        ("multiclass", {"rows": "owners", "softmax": "balanced"}),
    ],
)
def test_without_a_penalty_it_is_fedavg(label_type: LabelType, settings: dict[str, Any]) -> None:
    plain = federated(FedAvg(local=LOCAL, **settings), label_type)
    assert same(federated(FedProx(local=LOCAL, proximal=Proximal(0), **settings), label_type), plain)
    assert not same(federated(FedProx(local=LOCAL, proximal=Proximal(0.1), **settings), label_type), plain)


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


@pytest.mark.complete
def test_a_stronger_penalty_keeps_the_model_nearer() -> None:
    """The distance of what alpha sends from what it received, in one round of three steps."""
    apart = []
    for mu in (0.01, 0.1, 1.0, 10.0):
        with Trial(FedProx(local=LOCAL, proximal=Proximal(mu)), SMALL, "multilabel") as trial:
            received, sent = trial.payload("alpha").shared, trial.update("alpha").shared
        trained = [name for name in sent if "running" not in name]
        apart.append(math.fsum(float((sent[n] - received[n]).square().sum()) for n in trained))
    assert apart == sorted(apart, reverse=True)
    assert apart[-1] < 0.8 * apart[0]


@pytest.mark.parametrize("mu", [0.1, 0.01, 0.001])
def test_tables_6_and_8_of_fedmas_are_settings(mu: float) -> None:
    words = ["method=fedprox", f"method.proximal.mu={mu}", "method.softmax=balanced"]
    method = with_settings(load_job("fedmas_tones"), words).method
    assert isinstance(method, FedProx)
    assert (method.proximal, method.softmax) == (Proximal(mu), "balanced")
    assert method.labels.types == ("multiclass",)


def test_a_negative_penalty_is_refused() -> None:
    with pytest.raises(ValueError, match="greater than or equal to 0"):
        Proximal(-0.1)


def test_the_penalty_is_0_where_a_warm_up_begins_even_with_a_head_of_the_sites_own() -> None:
    """One step, of a whole epoch: the penalty's gradient at its start is 0, so that mu changes nothing."""
    own = LocalTraining(lr=1e-2, batch_size=64, warmup_epochs=1, warmup_init="independent")
    heads = []
    for mu in (0.0, 10.0):
        with Trial(FedProx(local=own, proximal=Proximal(mu)), SMALL, "multilabel") as trial:
            heads.append(trial.update("alpha").head["head.weight"])
    assert torch.equal(*heads)
