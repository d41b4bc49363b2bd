"""FedProx: a penalty holds each local model near the one that it received.

    Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith. Federated Optimization in Heterogeneous Networks.
    MLSys 2020; Eq. 2. As a baseline: Deng et al. (FedLSM), MICCAI 2023, Tables 1 and 2 (with owners' rows);
    Elbatel et al. (Fed-MAS), MICCAI 2023, Tables 1, 6 and 8.

    at site k:   minimise  h_k(w; w^t) = L_k(w) + mu/2 ||w - w^t||^2                      (Eq. 2)
    server:      as FedAvg

w are the parameters that are trained, rows of the head among them; statistics of batch norm are none. The
penalty is part of the loss, so the moments of Adam see it. The authors' program adds mu (w - w^t) to the step
of their optimiser, which is the same under plain SGD alone. Their stragglers, sites that train for fewer
epochs, are in no table here.
"""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass as validated
from torch import Tensor

from suture.core.validation import STRICT
from suture.learning.training import LocalRound, SiteContext
from suture.methods.base import About, hyperparameters
from suture.methods.composed import Composed, LossTerm, Step, Value


@validated(frozen=True, config=STRICT)
class Proximal(LossTerm):
    """mu/2 ||w - w^t||^2, a sum over all parameters in training (Eq. 2).

    Attributes:
        mu: its weight. The authors name no default and advise 0.001, 0.01, 0.1, 0.5 or 1.
    """

    mu: Annotated[float, Field(ge=0)] = 0.01

    @property
    def active(self) -> bool:
        return self.mu > 0

    def begin(self, site: SiteContext, round_: LocalRound) -> Value:
        return self._penalty

    def _penalty(self, step: Step) -> Tensor:
        both = zip(step.model.parameters(), step.received.parameters(), strict=True)
        pairs = [(w, received) for w, received in both if w.requires_grad]
        gaps = torch._foreach_sub([w for w, _ in pairs], [received for _, received in pairs])
        return self.mu / 2 * _SquaredLength.apply(*gaps)  # type: ignore[no-any-return]


class _SquaredLength(torch.autograd.Function):
    """The sum of the squares of tensors, in as few operations as a GPU starts for one of them."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.stack(torch._foreach_norm(tensors)).square().sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return torch._foreach_mul(ctx.saved_tensors, 2 * gradient)


@hyperparameters
class FedProx(Composed):
    """FedProx; see `Composed` for the other fields.

    Attributes:
        proximal: the penalty.
    """

    about = About(
        "fedprox",
        "FedProx",
        "Li et al., MLSys 2020, Eq. 2",
        question="sites differ",
        mixes_patients="weighs sites by their numbers of images",
    )
    proximal: Proximal = field(default_factory=Proximal)
