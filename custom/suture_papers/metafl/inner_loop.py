"""The steps of MetaFL, PMFL and the FedAvg that they are compared with; their files have the equations.

A round is one batch of each site: the b-th of B equal shares of its training data, the same in every pass,
since the data are put into a random order once and for all. Its first half is the support, on which a site
adapts; the rest is the query, on which it is judged. Rounds of one batch and the two halves are those of
PMFL's published program: its paper has no query set, and takes the loss of the last local epoch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Annotated, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass as validated
from torch import Tensor, nn
from torch.func import functional_call

from suture.core.errors import ConfigError, DataError
from suture.core.runtime import generator_for
from suture.core.validation import LIMIT, STRICT
from suture.data.batch import Batch, check_abort
from suture.learning.steps import SGD, Adam, LabelLoss, NonFiniteLoss
from suture.learning.training import Fitted, LocalRound, LocalTraining, SiteContext, ready_inputs
from suture.methods.averaging import WeightedMean, update_of
from suture.methods.base import GlobalModel, LabelUse, Method, RoundContext, SharingSpec, hyperparameters
from suture.models.classifier import NormPolicy, load_tensors, split_state, train_mode, train_parameters
from suture.protocol.egress import Channel, Egress, Layout
from suture.protocol.messages import TaskData, Update

Parameters = dict[str, Tensor]

_MOMENTS, _STEPS = ("exp_avg", "exp_avg_sq"), "step"
"""What Adam calls its state of each tensor."""

Objective = Callable[[Parameters, Batch], Tensor]
"""Parameters by name, and a batch, to a scalar."""

INNER = LocalTraining(lr=0.01, iterations=10, optimiser="sgd", momentum=0.0)
"""Ten steps of plain SGD, as in PMFL's published program; the paper prints ten epochs and a rate of 1e-3."""


@validated(frozen=True, config=STRICT)
class ServerStep:
    """How the server steps along the mean of the sites' gradients.

    Attributes:
        optimiser: ``adam`` as in PMFL's published program, or plain ``sgd`` as in Eq. 4.
        lr: beta, by default the program's; the paper prints 1e-2.
    """

    optimiser: Literal["adam", "sgd"] = "adam"
    lr: Annotated[float, Field(gt=0)] = 1e-3


def check_inner(local: LocalTraining, batch_norm: NormPolicy) -> None:
    """Refuses settings that the inner loop, plain SGD on one support half, would ignore.

    Raises:
        ConfigError: naming what it is.
    """
    if local.iterations is None:
        raise ConfigError(
            "the inner loop has no epochs: set method.local.iterations to the number of its steps"
        )
    own = replace(local, lr=INNER.lr, iterations=INNER.iterations)
    plain = [(part.name, getattr(INNER, part.name)) for part in fields(own)]
    if others := [f"method.local.{name}={json.dumps(v)}" for name, v in plain if getattr(own, name) != v]:
        raise ConfigError(
            "the inner loop is plain SGD on one half batch; leave out other settings of local training, or "
            f"set {', '.join(others)}"
        )
    if batch_norm != "frozen":
        raise ConfigError("the statistics of batch norm have no gradient: set batch_norm=frozen")


def batch_of(site: SiteContext, round_: int, batches: int, seed: int) -> tuple[Batch, Batch]:
    """Support and query of a round.

    Args:
        round_: from 1.
        batches: B, of one pass over the training data; a remainder is left out.
        seed: with the site's name it settles the order of the data, which is the same in every pass: a table
            that is sorted by its label would give batches of one class.

    Raises:
        DataError: a batch would have fewer than two rows.
    """
    train = site.samples["train"]
    size = len(train) // batches
    if size < 2:
        raise DataError(
            f"{site.name} has {len(train)} training samples, too few for {batches} batches of at least 2; "
            f"set method.batches={max(len(train) // 8, 1)} or less"
        )
    start = (round_ - 1) % batches * size
    cuts = (start, start + size // 2, start + size)
    order = torch.randperm(len(train), generator=generator_for(seed, site.name, "batches"))
    halves = [train.batch(order[a:b]) for a, b in pairwise(cuts)]
    support, query = (ready_inputs(site, half).to(site.device) for half in halves)
    return support, query


def adapt(
    objective: Objective, start: Parameters, batch: Batch, lr: float, steps: int, *, second_order: bool
) -> tuple[Parameters, list[float]]:
    """phi_{s+1} = phi_s - alpha grad L(phi_s) on one batch (Eq. 3), from phi_0 = `start`.

    Args:
        start: leaves that require gradients.
        second_order: keep the graph, so that phi_S is a function of `start`; else `start` itself takes the
            steps, in place, and is phi_S.

    Returns:
        phi_S, and the loss before each step, read from the device after the last one.
    """
    phi, losses = start, list[Tensor]()
    for _ in range(steps):
        check_abort()
        loss = objective(phi, batch)
        losses.append(loss.detach())
        grads = torch.autograd.grad(loss, list(phi.values()), create_graph=second_order)
        if second_order:
            phi = {name: torch.add(p, g, alpha=-lr) for (name, p), g in zip(phi.items(), grads, strict=True)}
        else:
            with torch.no_grad():
                torch._foreach_add_(list(phi.values()), grads, alpha=-lr)
    return phi, torch.stack(losses).tolist() if losses else []


@dataclass(frozen=True)
class _Adapted:
    """A site's round: the losses on either half, and by what that of the query is to be differentiated.

    Attributes:
        wanted: theta as received in the second order, phi after the inner loop in the first.
        fitted: the inner loop.
    """

    wanted: Parameters
    fitted: Fitted
    query_loss: Tensor


def adapt_model(
    site: SiteContext, loss: LabelLoss, round_: LocalRound, batches: int, *, second_order: bool
) -> _Adapted:
    """Run the inner loop from the received model; the site's model then holds phi.

    Raises:
        DataError: the site has too few samples.
        NonFiniteLoss: naming site and round; the model is to be thrown away, as a site does.
    """
    model, local = site.model, round_.local
    support, query = batch_of(site, round_.round, batches, round_.seed)
    train_parameters(model)
    train_mode(model, "frozen")

    def cost(parameters: Parameters, batch: Batch) -> Tensor:
        # In the first order they are the model's own, in their place.
        logits = functional_call(model, parameters, (batch.inputs,)) if second_order else model(batch.inputs)
        return loss(logits, batch.y, batch.known, model.labels.label_type)

    theta: Parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if second_order:
        theta = {name: p.detach().clone().requires_grad_() for name, p in theta.items()}
    with twice_differentiable(model) if second_order else nullcontext():
        phi, losses = adapt(cost, theta, support, local.lr, local.iterations or 0, second_order=second_order)
        query_loss = cost(phi, query)
    if not all(map(math.isfinite, [*losses, query_loss.item()])):
        raise NonFiniteLoss(f"{site.name}: the loss of round {round_.round} is not finite; lower local.lr")
    if second_order:
        load_tensors(model, {name: p.detach() for name, p in phi.items()})
    fitted = Fitted(sum(losses) / len(losses) if losses else None, {}, len(losses))
    return _Adapted(theta, fitted, query_loss)


def twice_differentiable(model: nn.Module) -> AbstractContextManager[None]:
    """Where second derivatives are wanted: without cuDNN for an LSTM, of which it has none.

    Convolutions keep cuDNN, without which they are many times slower.
    """
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    return torch.backends.cudnn.flags(enabled=False) if recurrent else nullcontext()


@hyperparameters
class MetaLearning(Method):
    """What MetaFL and PMFL share: sites send gradients of the query loss, the server steps along the mean.

    Attributes:
        local: the inner loop, plain SGD: alpha is its `lr`, S its `iterations`.
        server: the step of the server.
        order: of the gradient, 1 or 2.
        batches: B, batches of one pass over a site's data; a round takes one of each site.
        batch_norm: ``frozen`` alone; statistics have no gradient.
    """

    labels = LabelUse(view="target", types=("multilabel",))

    local: LocalTraining = INNER
    server: ServerStep = field(default_factory=ServerStep)
    order: Literal[1, 2] = 1
    batches: Annotated[int, Field(ge=1, le=LIMIT)] = 100
    batch_norm: NormPolicy = "frozen"

    def __post_init__(self) -> None:
        check_inner(self.local, self.batch_norm)

    def egress(self, layout: Layout) -> Egress:
        losses = {"query_loss": (0.0, 1e6)}
        moments = tuple(Channel(name, "server", layout) for name in _MOMENTS)
        adam = (*moments, Channel(_STEPS, "server")) if self.server.optimiser == "adam" else ()
        return Egress(
            layout.shared,
            layout.head,
            adam,
            kind="gradient",
            losses=losses,
            loss_parts=2 * self.batches,
            why=WHY,
        )

    def train(
        self, site: SiteContext, received: TaskData, round_: LocalRound
    ) -> tuple[Update, dict[str, Tensor]]:
        """L_k and its gradient, of the shared rows: with respect to phi (first order) or theta (second)."""
        done = adapt_model(site, self.loss, round_, self.batches, second_order=self.order == 2)
        grads = torch.autograd.grad(done.query_loss, list(done.wanted.values()))
        gradient = {name: g.detach().cpu() for name, g in zip(done.wanted, grads, strict=True)}
        shared, head = self.sharing.parts(*split_state(gradient))
        update = update_of(received, round_, done.fitted, shared, head)
        return replace(update, kind="gradient", scalars={"query_loss": done.query_loss.item()}), {}

    def aggregate(self, previous: GlobalModel, updates: Iterable[Update], ctx: RoundContext) -> GlobalModel:
        return take_step(self.sharing, previous, updates, self.server)


def take_step(
    sharing: SharingSpec, previous: GlobalModel, updates: Iterable[Update], step: ServerStep
) -> GlobalModel:
    """theta after one step along the mean gradient (Eq. 4); rows that do not cross keep their very bits."""
    shared, head = sharing.parts(previous.shared, previous.head)
    # A class that nobody sent has a gradient of 0, not its previous row.
    zeros = [{name: torch.zeros_like(t) for name, t in group.items()} for group in (shared, head)]
    mean = WeightedMean(previous.labels, *zeros)
    for update in updates:
        mean.add(update)
    theta = {name: t.clone().requires_grad_() for name, t in {**shared, **head}.items()}
    for name, gradient in {**mean.shared(), **mean.head()}.items():
        theta[name].grad = gradient
    channels = _take_step(theta, previous, step)
    whole = sharing.put({**previous.shared, **previous.head}, {n: t.detach() for n, t in theta.items()})
    new_shared, new_head = split_state(whole)
    return replace(previous, shared=new_shared, head=new_head, channels=channels)


def _take_step(theta: Parameters, previous: GlobalModel, step: ServerStep) -> dict[str, Tensor]:
    """Steps in place with the optimiser's moments from the round before; returns its state as channels."""
    if step.optimiser == "sgd":
        SGD(theta.values(), step.lr).step()
        return {}
    optimiser, steps = Adam(theta.values(), step.lr), previous.channels[_STEPS]
    for name, tensor in theta.items():
        moments = {key: previous.channels[f"{key}/{name}"].clone() for key in _MOMENTS}
        optimiser.state[tensor] = {_STEPS: steps.clone(), **moments}
    optimiser.step()
    moved = {
        f"{key}/{name}": optimiser.state[t][key].detach() for key in _MOMENTS for name, t in theta.items()
    }
    return {_STEPS: steps + 1, **moved}


WHY = {
    "shared": "gradient of the query loss for the shared rows; the server takes a step along the mean",
    "head": "the same, of the one row that every site's own task shares",
    "query_loss": "L_k, the loss on the query half after the inner loop",
    "train_loss": "mean loss on the support half",
    "metrics": "the received model on the site's validation data, if it has any",
}
