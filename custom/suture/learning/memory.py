"""What a training step needs of a GPU's memory at least, before the first one is taken."""

from __future__ import annotations

import torch
from torch import Tensor

from suture.core.errors import ConfigError
from suture.core.seeds import seeded
from suture.learning.training import Objective, SiteContext, ready_inputs

_COPIES = {"adam": 4, "adamw": 4, "sgd": 3}
"""Tensors of a weight's size in a step: weight, gradient and the optimiser's moments."""


def activations(site: SiteContext, objective: Objective) -> float:
    """The bytes that a forward pass keeps for the backward pass, for each image: of four less two, by two."""
    state = {name: tensor.clone() for name, tensor in site.model.state_dict().items()}
    site.model.train()
    with seeded(0, site.device):
        two, four = (_kept(site, objective, n) for n in (2, 4))
    site.model.load_state_dict(state)  # batch norm has seen the images
    return (four - two) / 2


def _kept(site: SiteContext, objective: Objective, n: int) -> int:
    """The bytes of all that is kept, a storage that several operations keep counted once."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    train = site.samples["train"]
    batch = ready_inputs(site, train.batch(torch.arange(n) % len(train)))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        graph = objective(site.model, batch)
    del graph  # held until here, that no storage takes the place of another
    return sum(kept.values())


def check_memory(
    site: SiteContext, objective: Objective, optimiser: str, size: int, free: int | None = None
) -> None:
    """Refuse a batch that cannot fit on the site's GPU; elsewhere, or without images, nothing is checked.

    What must be there at once is counted: weights, gradients, moments and activations, but no working memory.
    So a batch that passes may still not fit, and one that is refused does not.

    Args:
        size: images of the smallest batch that the site would try.
        free: bytes, by default those of the GPU.

    Raises:
        ConfigError: names what is needed and free, and the batch that may fit.
    """
    if (free is None and site.device.type != "cuda") or not len(site.samples["train"]):
        return
    if free is None:
        free = torch.cuda.mem_get_info(site.device)[0] + torch.cuda.memory_reserved(site.device)
    copies = ((_COPIES[optimiser] if p.requires_grad else 1, p) for p in site.model.parameters())
    weights = sum(n * p.numel() * p.element_size() for n, p in copies)
    each = activations(site, objective)
    needed = weights + size * each
    if needed <= free:
        return
    fits = int((free - weights) / each)
    remedy = f"set batch_size below {fits + 1}" if fits >= 2 else "take a smaller model or another device"
    raise ConfigError(
        f"{site.name}: a step of {size} images needs at least {needed / 2**30:.3g} GiB of {site.device}, "
        f"where {free / 2**30:.3g} GiB are free; {remedy} under [training], or end what else uses it"
    )
