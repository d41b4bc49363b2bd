"""FLARE's Client API with class names: for a training script of a job with a `MethodAggregator`.

    while (model := receive(labels=["Mass", "Nodule"])) is not None:
        ...  # train model.params, whose head has the rows of model.meta["labels"]
        send(FLModel(params=trained), labels=model.meta["labels"])

Where a method sends other parts than the whole model, as PMFL does with half of each tensor, or gradients, as
MetaFL does, `load` takes the place of ``load_state_dict``, and `gradients` that of ``state_dict``.

Call ``nvflare.client.init()`` first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import nvflare.client as flare
import torch
from nvflare.app_common.abstract.fl_model import FLModel
from torch import Tensor, nn

from suture.core.errors import ConfigError
from suture.flare.components.contract import CHANNELS, COUNTS, IMAGES, LABELS, as_tensor
from suture.methods.base import Share
from suture.protocol.egress import round_figure


def receive(
    labels: Sequence[str],
    images: int = 0,
    counts: Mapping[str, tuple[int, int] | None] | None = None,
    timeout: float | None = None,
) -> FLModel | None:
    """Return the next model, whose rows are those of the site's classes; None where the job has ended.

    The first task asks for the classes: this answers it, and waits for the next one.

    Args:
        labels: the classes that the site annotates.
        images: number of training images, for a method that weights sites by it.
        counts: positive and negative images of each class, for a method that requests them; None withholds a
            pair.
        timeout: seconds to wait for a task; None waits until there is one, or the job has ended.

    Returns:
        the model. ``meta["labels"]`` names the rows: the site's own classes, or all where the method lets a
        site see all. ``meta["phase"]`` names the method's phase, and ``meta["channels"]`` has what the method
        sends down besides, as arrays by name.

    Raises:
        ConfigError: the server does not send rows by class, or has refused the site's classes.
    """
    model = flare.receive(timeout)
    if model is not None and not model.params and LABELS not in model.meta:
        about = {LABELS: list(labels), IMAGES: images}
        if counts:
            about[COUNTS] = {name: pair and list(pair) for name, pair in counts.items()}
        flare.send(FLModel(params={}, meta=about))
        model = flare.receive(timeout)
        if model is not None and not model.params:
            raise ConfigError("the server refuses the site's classes, images or counts; its log says why")
    if model is not None and LABELS not in model.meta:
        raise ConfigError("the model comes without class names; add SiteRowsFilter to the server's output")
    return model


def send(
    model: FLModel,
    labels: Sequence[str],
    weight: float | None = None,
    class_weights: Sequence[float] | None = None,
    scalars: Mapping[str, float] | None = None,
    train_loss: float | None = None,
    channels: Mapping[str, Tensor] | None = None,
) -> None:
    """Send a trained model, or a gradient, with the names of its rows.

    Scalars, losses and metrics are rounded to the six digits that may leave.

    Args:
        model: its `params` have the names and shapes that were received; `metrics` are those by which FLARE
            selects a model.
        labels: the classes of the head's rows, as received.

    The other arguments are what the method declares besides; see `Update`, and the page of what leaves a
    site. Weights may be left out only where the method fixes them.
    """
    arrays = {name: tensor.detach().cpu().numpy() for name, tensor in (channels or {}).items()}
    numbers: dict[str, Any] = {
        "weight": weight,
        "train_loss": round_figure(train_loss),
        CHANNELS: arrays or None,
    }
    numbers["class_weights"] = None if class_weights is None else [float(value) for value in class_weights]
    numbers["scalars"] = scalars and {name: round_figure(value) for name, value in scalars.items()}
    meta = {name: value for name, value in numbers.items() if value is not None}
    metrics = model.metrics and {name: round_figure(float(value)) for name, value in model.metrics.items()}
    flare.send(FLModel(params=model.params, metrics=metrics, meta={LABELS: list(labels), **meta}))


def load(model: nn.Module, received: FLModel, share: Share | None = None) -> None:
    """Load what has been received into a model; what has not stays as it is.

    Args:
        share: the method's, if it sends a part of each tensor; by default that of PMFL.

    Raises:
        ConfigError: the model has no such tensor, or one of another shape.
    """
    state = model.state_dict()
    for name, part in received.params.items():
        own = _part(state, name, part, share)
        state[name][own] = as_tensor(name, part).to(state[name])


def gradients(model: nn.Module, received: FLModel, share: Share | None = None) -> dict[str, Tensor]:
    """Return the gradients of what has been received, for `send`; 0 where the loss does not depend on it.

    The arguments and errors are those of `load`.
    """
    zeros = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    whole = {**zeros, **grads}
    return {name: whole[name][_part(whole, name, part, share)] for name, part in received.params.items()}


def _part(state: Mapping[str, Tensor], name: str, part: Any, share: Share | None) -> Any:
    """Return the index of the received part of a tensor of the model."""
    shape = state[name].shape if name in state else None
    if shape == part.shape:
        return ...
    rows = (share or Share()).rows(name, shape[0]) if shape else torch.arange(0)
    if shape is None or (len(rows), *shape[1:]) != tuple(part.shape):
        raise ConfigError(
            f"{name} has arrived with shape {tuple(part.shape)}, and the model has {shape and tuple(shape)}. "
            "Make it with the classes of meta['labels'], or name the share of the job's method"
        )
    return rows
