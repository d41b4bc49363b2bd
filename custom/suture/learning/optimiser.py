"""An optimiser's state between rounds: what it remembers of each parameter, as named tensors."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)


def optimiser_state_of(optimiser: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The optimiser's state as ``parameter/field`` tensors."""
    return {
        f"{name}/{field}": value.detach().cpu()
        for name, parameter in model.named_parameters()
        for field, value in optimiser.state.get(parameter, {}).items()
        if value is not None
    }


def load_optimiser_state(
    optimiser: torch.optim.Optimizer, model: nn.Module, optimiser_state: Mapping[str, Tensor]
) -> None:
    """Hands saved moments over to the optimiser, which goes on to change them in place.

    Those of a parameter whose shape changed (new classes) start afresh.
    """
    trained = {id(p) for group in optimiser.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        saved = {
            k.removeprefix(f"{name}/"): v for k, v in optimiser_state.items() if k.startswith(f"{name}/")
        }
        if not saved or id(parameter) not in trained:
            continue
        if any(v.dim() and v.shape != parameter.shape for v in saved.values()):
            log.warning("the moments of %s start afresh: its shape is now %s", name, tuple(parameter.shape))
            continue
        optimiser.state[parameter] = {
            k: v if k == "step" else v.to(parameter.device) for k, v in saved.items()
        }
