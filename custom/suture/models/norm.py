"""Batch norm and its policies. Batch norm is recognised by module type, never by its name."""

from __future__ import annotations

from typing import Literal

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from suture.core.errors import ConfigError

NormPolicy = Literal["average", "local", "frozen"]
"""average: FedAvg, all four arrays are averaged. local: FedBN, they stay at the site (Li et al. 2021,
arXiv:2102.07623). frozen: FedBN+, they stay at their pretrained values (Kulkarni et al. 2023,
arXiv:2303.06180)."""


def _norms(model: nn.Module) -> dict[str, _BatchNorm]:
    return {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}


def counters(model: nn.Module) -> frozenset[str]:
    """Return the names of the integer counters of batch norm, which are never sent and never averaged."""
    return frozenset(f"{name}.num_batches_tracked" for name in _norms(model))


def norm_names(model: nn.Module) -> frozenset[str]:
    """Return the names of gamma, beta, mean and variance of every batch norm."""
    found = {f"{name}.{tensor}" for name, module in _norms(model).items() for tensor in module.state_dict()}
    return frozenset(found - counters(model))


def train_mode(model: nn.Module, policy: NormPolicy) -> None:
    """Set training mode; under `frozen` batch norm is in eval mode, and gamma and beta have no gradient."""
    model.train()
    if policy == "frozen":
        for module in _norms(model).values():
            module.eval()
            module.requires_grad_(False)


def set_momentum(model: nn.Module, momentum: float) -> None:
    """Set the momentum of every batch norm: new statistics = (1 - momentum) old + momentum batch.

    Raises:
        ConfigError: the model has no batch norm.
    """
    norms = _norms(model)
    if not norms:
        raise ConfigError("model.norm_momentum is that of batch norm, and this model has none; remove it")
    for module in norms.values():
        module.momentum = momentum
