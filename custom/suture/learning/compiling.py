"""Compiled backbones: made by `torch.compile`, and refused where they compute something else."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from suture.core.devices import out_of_memory
from suture.core.errors import ConfigError
from suture.core.seeds import seeded
from suture.data.batch import Batch
from suture.learning.training import Objective, SiteContext, ready_inputs
from suture.models.classifier import Classifier

_Compile = Literal["no", "kernels", "cuda_graphs"]

OPTIONS: Mapping[_Compile, Mapping[str, Any]] = {"kernels": {}, "cuda_graphs": {"mode": "reduce-overhead"}}
"""The arguments of `torch.compile`."""

_TOLERANCE, _MIXED = 1e-3, 5e-2
"""The largest relative difference of the loss, and of the gradient over all parameters, between a compiled
backbone and itself: in single and in mixed precision, where fused operations round less often."""


def compile_backbone(site: SiteContext, objective: Objective, how: _Compile) -> None:
    """Compile the backbone of the site's model in place, if loss and gradient of one batch stay the same.

    The names of its tensors stay as they are, and copies of the model are not compiled.

    Args:
        objective: the loss to compare, of the site's first training images.

    Raises:
        ConfigError: it cannot be compiled here, or what it computes differs by more than the tolerance.
    """
    if how == "cuda_graphs" and site.device.type != "cuda":
        raise ConfigError(
            f'{site.name}: compile = "cuda_graphs" needs a GPU, and device is {str(site.device)!r}; write '
            'compile = "kernels" or "no" under [training]'
        )
    train = site.samples["train"]
    batch = ready_inputs(site, train.batch(torch.arange(min(len(train), site.batch_size or 64))))
    trial = copy.deepcopy(site.model)
    eager = _measured(site, trial, objective, batch)
    try:
        trial.backbone.compile(**OPTIONS[how])
        difference = max(map(_relative, eager, _measured(site, trial, objective, batch)))
    except Exception as error:  # of the compiler, which has many kinds
        if out_of_memory(error):
            raise
        why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}".removesuffix(": ")
        # Some versions of torch compute with graphs in a process's first thread only (pytorch issue 123177).
        kernels = 'compile = "kernels" or ' if how == "cuda_graphs" else ""
        raise ConfigError(
            f"{site.name}: the backbone cannot be compiled here ({why}); "
            f'write {kernels}compile = "no" under [training]'
        ) from error
    limit = _MIXED if site.model.amp_dtype else _TOLERANCE
    if not difference <= limit:
        raise ConfigError(
            f"{site.name}: when compiled, the loss or gradient of a batch changes by {difference:.2g} "
            f'of its value, more than {limit:g}; write compile = "no" under [training]'
        )
    site.model.backbone.compile(**OPTIONS[how])


def _measured(
    site: SiteContext, model: Classifier, objective: Objective, batch: Batch
) -> tuple[Tensor, Tensor]:
    """Loss and gradient in training, but without dropout, for which a compiler may draw other numbers."""
    model.train()
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.eval()
    model.zero_grad(set_to_none=True)
    with seeded(0, site.device):
        loss = objective(model, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = [p.grad.flatten().float() for p in model.parameters() if p.grad is not None]
    return loss.detach(), torch.cat(gradients)


def _relative(expected: Tensor, found: Tensor) -> float:
    """The length of the difference, over that of what is expected; NaN where either is no number."""
    return float((found - expected).norm() / expected.norm().clamp(min=1e-12))
