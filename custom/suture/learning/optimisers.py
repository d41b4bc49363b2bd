"""torch's optimisers without its compiler; and their state, which a site keeps from round to round.

torch excludes some of their functions from compilation, and the first call of any imports its compiler for
that: 1 to 1.7 s in every process that trains. Nothing here compiles a step of an optimiser, so these classes
have the functions as torch wrote them, before it wrapped them.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping
from inspect import unwrap
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)

Kind = TypeVar("Kind", bound=torch.optim.Optimizer)


def _plain(kind: type[Kind]) -> type[Kind]:
    """Return the class with its own functions; `step` still computes without gradients."""
    own = {name: unwrap(getattr(kind, name)) for name in ("add_param_group", "zero_grad", "step")}
    return cast(type[Kind], type(kind.__name__, (kind,), {**own, "step": torch.no_grad()(own["step"])}))


Adam, AdamW, SGD = _plain(torch.optim.Adam), _plain(torch.optim.AdamW), _plain(torch.optim.SGD)


def clip_gradient(trained: list[nn.Parameter], limit: float, *_: object) -> None:
    """Clip the gradient of all that is trained to a norm; a hook before an optimiser's step."""
    nn.utils.clip_grad_norm_(trained, limit)


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
    of: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for key, value in optimiser_state.items():
        name, _, moment = key.rpartition("/")
        of[name][moment] = value
    for name, parameter in model.named_parameters():
        saved = of.get(name)
        if not saved or id(parameter) not in trained:
            continue
        if any(v.dim() and v.shape != parameter.shape for v in saved.values()):
            log.warning(
                "the optimiser's moments of %s are reset, because its shape is now %s",
                name,
                tuple(parameter.shape),
            )
            continue
        optimiser.state[parameter] = {
            k: v if k == "step" else v.to(parameter.device) for k, v in saved.items()
        }
