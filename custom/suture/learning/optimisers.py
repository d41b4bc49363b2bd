"""torch's optimisers without its compiler.

torch excludes some of their functions from compilation, and the first call of any imports its compiler for
that: 1 to 1.7 s in every process that trains. Nothing here compiles a step of an optimiser, so these classes
have the functions as torch wrote them, before it wrapped them.
"""

from __future__ import annotations

from inspect import unwrap
from typing import TypeVar, cast

import torch

Kind = TypeVar("Kind", bound=torch.optim.Optimizer)


def _plain(kind: type[Kind]) -> type[Kind]:
    """Return the class with its own functions; `step` still computes without gradients."""
    own = {name: unwrap(getattr(kind, name)) for name in ("add_param_group", "zero_grad", "step")}
    return cast(type[Kind], type(kind.__name__, (kind,), {**own, "step": torch.no_grad()(own["step"])}))


Adam, AdamW, SGD = _plain(torch.optim.Adam), _plain(torch.optim.AdamW), _plain(torch.optim.SGD)
