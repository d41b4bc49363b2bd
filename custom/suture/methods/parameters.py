"""Shared and local parameters: what is exchanged each round, and what is sent once and stays at the site."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from suture.core.errors import ConfigError
from suture.methods.share import cut
from suture.models.classifier import HEADS, Classifier, Layout, shared_names, split_state
from suture.protocol.egress import blank, misfit

if TYPE_CHECKING:
    from suture.methods.base import GlobalModel, Method


def shared_parameters(model: Classifier, method: Method) -> tuple[str, ...]:
    """Names of the tensors outside the head that are exchanged each round, sorted."""
    return () if method.personal == "model" else shared_names(model, method.batch_norm)


def exchanged(model: Classifier, method: Method) -> Layout:
    """The layout of what a site exchanges each round, by its own model."""
    state, head = split_state(model.state_dict())
    shared = {name: state[name] for name in shared_parameters(model, method)}
    return Layout.of(*parts(method, shared, head), model.buffer_names)


def layout_of(model: GlobalModel, method: Method) -> Layout:
    """The layout of what is exchanged each round, by the server's model."""
    return Layout.of(*parts(method, model.shared, model.head), model.buffers)


def with_channels(model: GlobalModel, method: Method) -> GlobalModel:
    """The model with the channels of the method as they begin."""
    forms = method.egress(layout_of(model, method)).forms("down", "server")
    return replace(model, channels={name: blank(form, len(model.labels)) for name, form in forms.items()})


def check_channels(model: GlobalModel, method: Method) -> None:
    """Refuse a model of the server that lacks a channel, or has another than the method declares.

    Raises:
        ConfigError: names the first one.
    """
    forms = method.egress(layout_of(model, method)).forms("down", "server")
    found = dict.fromkeys(model.channels, "not declared")
    wrong = found | {n: misfit(form, model.channels.get(n), len(model.labels)) for n, form in forms.items()}
    if stray := {name: what for name, what in wrong.items() if what}:
        name = min(stray)
        raise ConfigError(
            f"{method.about.title} aggregates to a model whose channel {name!r} is {stray[name]}; return "
            "every channel that its egress declares as down or server, and no other"
        )


def parts(
    method: Method, shared: Mapping[str, Tensor], head: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The parts of the shared tensors and of the head's rows that are exchanged each round.

    Raises:
        ConfigError: the method shares a part of the model so small that no row is in it.
    """
    with_head = method.personal == "nothing" and (method.share is None or method.share.head)
    exchanged, rows = cut(method.share, shared), dict(head) if with_head else {}
    if method.share is not None and shared and not exchanged:
        raise ConfigError(
            f"method.share.fraction={method.share.fraction:g} is less than one row of every tensor of "
            "the model, so nothing would be shared; set it higher (0.5 is half)"
        )
    return exchanged, rows


def local_parameters(model: Classifier, method: Method) -> tuple[str, ...]:
    """Names of the tensors that a site receives once and that then stay there, sorted.

    These are batch norm where it is not averaged, and what is personal. Under partial sharing: the model.
    """
    if method.share is not None:  # the shared rows replace those of a whole model of the site's own
        return tuple(sorted(set(model.names) - model.counters))
    names = set(model.names)
    head = {name for name in names if name.startswith(HEADS)}
    away = (
        set(shared_parameters(model, method))
        | model.counters
        | (head if method.personal == "nothing" else set())
    )
    return tuple(sorted(names - away))


def stored_parameters(model: Classifier, method: Method) -> dict[str, Tensor]:
    """What a site stores of its trained model, which is the model before aggregation.

    Local parameters are under ``fixed/``; the rest is under ``local/``, where the method keeps local models.
    """
    fixed = local_parameters(model, method)
    rest = [name for name in model.names if name not in fixed] if method.keep_local else []
    stored = {f"fixed/{name}": name for name in fixed} | {f"local/{name}": name for name in rest}
    state = model.state_dict()
    return {key: state[name].detach().cpu() for key, name in stored.items()}
