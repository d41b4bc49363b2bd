"""Batch-norm policies. Batch norm is recognised by module type, never by its name."""

from __future__ import annotations

from typing import Literal

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from suture.core.errors import ConfigError
from suture.models.classifier import HEADS

NormPolicy = Literal["average", "local", "frozen"]
"""average: FedAvg, all four arrays are averaged. local: FedBN, they stay at the site (Li et al. 2021,
arXiv:2102.07623). frozen: FedBN+, they stay at their pretrained values (Kulkarni et al. 2023,
arXiv:2303.06180)."""


def _norms(model: nn.Module) -> dict[str, _BatchNorm]:
    return {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}


def counters(model: nn.Module) -> frozenset[str]:
    """Names of the integer counters of batch norm; they are never sent and never averaged."""
    return frozenset(f"{name}.num_batches_tracked" for name in _norms(model))


def norm_names(model: nn.Module) -> frozenset[str]:
    """Names of gamma, beta, mean and variance of every batch norm."""
    found = {f"{name}.{tensor}" for name, module in _norms(model).items() for tensor in module.state_dict()}
    return frozenset(found - counters(model))


def shared_names(model: nn.Module, policy: NormPolicy) -> tuple[str, ...]:
    """Names of the tensors outside the head that cross each round, sorted."""
    kept = counters(model) | (frozenset() if policy == "average" else norm_names(model))
    return tuple(sorted(n for n in model.state_dict() if not n.startswith(HEADS) and n not in kept))


def train_mode(model: nn.Module, policy: NormPolicy) -> None:
    """Training mode; under `frozen` the batch norms rest: eval mode, and no gradient for gamma and beta."""
    model.train()
    if policy == "frozen":
        for module in _norms(model).values():
            module.eval()
            module.requires_grad_(False)


def set_momentum(model: nn.Module, momentum: float) -> None:
    """How far every batch norm's statistics move in a step: new = (1 - momentum) old + momentum batch.

    Raises:
        ConfigError: there is none.
    """
    norms = _norms(model)
    if not norms:
        raise ConfigError("model.norm_momentum is that of batch norm, and this model has none; remove it")
    for module in norms.values():
        module.momentum = momentum
