"""FPSL: the extractor learns from a head that another batch has just improved; rows over their owners.

    Dong et al. Federated Partially Supervised Learning with Limited Decentralized Medical Images. IEEE TMI
    2022; FPSL in Tables 1 and 2 of Deng et al. (FedLSM), MICCAI 2023.

What was available of the paper does not suffice. It names task-dependent aggregation, which is FedAvg with
the rows of owners, and a bi-level "task-agnostic decoupling learning" of the extractor, whose equations are
reconstructed here. f is the extractor, psi the head, L the loss of known labels, eta the learning rate.

    at site k:   each step has two batches, A and B
                 psi' = psi - eta grad_psi L(A; f, psi)                                  f is fixed
                 f   by the optimiser along grad_f L(B; f, psi')                         psi' is fixed
                 psi by the optimiser along grad_psi L(A; f, psi)                        f of before the step
    server:      w     = sum_k n_k w_k / sum_k n_k
                 psi_c = the same over the sites that annotate class c

The step in psi' is plain, and its own derivative is left out (first order). A is what FedAvg would draw, B a
second draw of the same images, so a round has as many steps as FedAvg's and nearly twice the cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor
from torch.func import functional_call

from suture.core.runtime import generator_for
from suture.data.batch import Batch
from suture.learning.training import LocalRound, Loss, SiteContext, fit, training_batches
from suture.methods.base import About, hyperparameters
from suture.methods.composed import Composed
from suture.methods.retraining import RETRAINING
from suture.models.classifier import Classifier
from suture.protocol.messages import TaskData, Update


def bilevel_loss(model: Classifier, a: Batch, b: Batch, loss: Loss, eta: float) -> Tensor:
    """L(A; f, psi) + L(B; f, psi'); psi has the gradient of the first alone, f that of the second.

    Args:
        loss: L, of known labels.
        eta: length of the step from psi to psi'.

    Returns:
        a scalar.
    """
    # Detached, not under no_grad: in mixed precision torch 2.9 would keep weights without gradient for B.
    of_a = loss(model.head(model.features(a.inputs).detach()), a.y, a.known)
    psi = dict(model.head.named_parameters())
    gradient = torch.autograd.grad(of_a, list(psi.values()), retain_graph=True)
    ahead = {name: p.detach() - eta * g for (name, p), g in zip(psi.items(), gradient, strict=True)}
    of_b = loss(functional_call(model.head, ahead, (model.features(b.inputs),)), b.y, b.known)
    return of_a + of_b


def join(a: Batch, b: Batch) -> Batch:
    """Both batches as one, A first."""
    inputs = {name: torch.cat([tensor, b.inputs[name]]) for name, tensor in a.inputs.items()}
    return Batch(inputs, torch.cat([a.y, b.y]), torch.cat([a.known, b.known]))


def halves(batch: Batch) -> tuple[Batch, Batch]:
    """A and B of what `join` has joined."""
    n = len(batch) // 2
    a, b = (
        Batch({name: t[part] for name, t in batch.inputs.items()}, batch.y[part], batch.known[part])
        for part in (slice(n), slice(n, None))
    )
    return a, b


@hyperparameters
class FPSL(Composed):
    """FPSL; see `Composed` for the other fields. The reported training loss is L(A) + L(B).

    Attributes:
        rows: of the head, by default those of the ``owners`` of a class.
        unknown: by default ``masked``: the loss is over known labels.
    """

    about = About(
        "fpsl",
        "FPSL (reconstruction)",
        "Dong et al., IEEE TMI 2022; Deng et al., MICCAI 2023",
        mixes_patients="weighs sites by their numbers of images",
    )

    rows: Literal["all", "owners"] = "owners"
    unknown: Literal["negative", "masked"] = "masked"

    def train(
        self, site: SiteContext, received: TaskData, round_: LocalRound
    ) -> tuple[Update, dict[str, Tensor]]:
        if round_.phase == RETRAINING:
            return super().train(site, received, round_)
        loss = self.supervised.of(site, received, round_)
        second = generator_for(round_.seed, site.name, round_.round, "second batch")

        def batches(shuffle: torch.Generator, noise: torch.Generator) -> Iterator[Batch]:
            of_a = training_batches(site, round_.local, shuffle, noise)
            return map(join, of_a, training_batches(site, round_.local, second, second))

        def objective(model: Classifier, batch: Batch) -> Tensor:
            return bilevel_loss(model, *halves(batch), loss, round_.local.lr)

        fitted = fit(site, objective, round_, batches=batches)
        return self.weigh(site, received, round_, fitted), fitted.optimiser_state
