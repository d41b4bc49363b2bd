"""Small federations of a method, and one step of its local training, for tests that compare methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from suture.core.labels import LabelType
from suture.data.batch import Batch
from suture.learning.training import LocalRound, LocalTraining, SiteContext
from suture.methods.base import GlobalModel
from suture.methods.composed import Composed, _Training
from suture.models import ModelSpec
from suture.protocol.messages import TaskData, Update
from suture_synthetic.method_checks import SMALL
from suture_synthetic.trial import Trial

LOCAL = LocalTraining(lr=1e-2, batch_size=8)
ROUND = LocalRound(LOCAL, "average", seed=1, round=1)


def federated(
    method: Any, label_type: LabelType = "multilabel", *, model: ModelSpec = SMALL, rounds: int = 2
) -> GlobalModel:
    """The global model after some rounds of three sites that annotate different classes."""
    with Trial(method, model, label_type, rounds=rounds) as trial:
        trial.run()
        return trial.server.model


def same(one: GlobalModel | Update, two: GlobalModel | Update) -> bool:
    """Whether two models, or updates, have the same tensors, bit for bit."""
    a, b = ({**model.shared, **model.head} for model in (one, two))
    return a.keys() == b.keys() and all(torch.equal(tensor, b[name]) for name, tensor in a.items())


def at_site(
    method: Any, label_type: LabelType = "multilabel", site: str = "alpha"
) -> tuple[SiteContext, TaskData]:
    """What a site works with in round 1, with a model of double precision."""
    with Trial(method, SMALL, label_type) as trial:
        received = trial.payload(site)
        context = trial.context(site, received)
    context.model.double()
    return context, received


def objective_of(
    method: Composed, site: SiteContext, received: TaskData, round_: LocalRound = ROUND
) -> Callable[[Batch], Tensor]:
    """What a local step of the method minimises, for the site's model as it is then."""
    training = _Training(
        method.supervised, tuple(t for t in method.terms if t.active), site, received, round_
    )
    return lambda batch: training.objective(site.model, batch)


def random_batch(n: int, classes: int, label_type: LabelType, seed: int = 0) -> Batch:
    """Images of noise in double precision; a single-label image may be of none of the classes."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 2, (n, classes), generator=g).double()
    if label_type == "multiclass":
        y = torch.eye(classes + 1, dtype=torch.float64)[torch.randint(0, classes + 1, (n,), generator=g)]
        y = y[:, :classes]
    image = torch.randn(n, 1, 16, 16, generator=g, dtype=torch.float64)
    return Batch({"image": image}, y, torch.ones(n, classes, dtype=torch.bool))


def moved(model: torch.nn.Module, by: float = 0.1, seed: int = 0) -> None:
    """Move every parameter by noise."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += by * torch.randn(parameter.shape, generator=g, dtype=parameter.dtype)
