"""An entry of the registry of models, and the checks of a network that another library has built."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from suture.core.errors import ConfigError, as_word
from suture.models.backbones import Normalisation, channels_last

if TYPE_CHECKING:
    from suture.models import ModelSpec

_Reads = Literal["image", "text"]

_INPUTS: dict[_Reads, tuple[str, ...]] = {"image": ("image",), "text": ("tokens", "length")}
"""Names of the inputs of a backbone in a batch."""


@dataclasses.dataclass(frozen=True)
class Backbone:
    """An entry of the registry.

    Attributes:
        text: description for `suture list`.
        build: maps the specification and the initial weights to the network and its number of features.
        smallest: side of the smallest image that it takes, in pixels.
        weights: the words that `ModelSpec.weights` may be besides a path; None: it takes no weights.
        normalisation: mean and std of its pretraining, for each channel that it takes; None for a network
            that is made for gray images, or built for those of the job.
        reads: kind of its input.
        vectors: whether it reads a document as one vector rather than as words; see `documents.py`.
        size: side of the images of its pretraining, in pixels, or tokens that it reads of a document; None
            where it is not known.
        tokenise: maps documents, and the largest number of tokens of each, to tokens and lengths; None for a
            network of words of `ModelSpec.vocabulary`, or of images.
    """

    text: str
    build: Callable[[ModelSpec, str | None], tuple[nn.Module, int]]
    smallest: int = 16
    weights: tuple[str, ...] | None = None
    normalisation: Normalisation | None = None
    reads: _Reads = "image"
    vectors: bool = False
    size: int | None = None
    tokenise: Callable[[Sequence[str], int | None], tuple[Tensor, Tensor]] | None = None

    def __str__(self) -> str:
        """Return the line for `suture list`."""
        return self.text

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of its inputs in a batch."""
        return ("vector",) if self.vectors else _INPUTS[self.reads]


def without_classifier(network: nn.Module, name: str) -> str:
    """Replace the last linear layer, which is the classifier, by nothing; return its name.

    Raises:
        ConfigError: the network has no linear layer.
    """
    linear: list[str] = [path for path, module in network.named_modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise ConfigError(f"{name} has no linear classifier to replace; choose another model")
    network.set_submodule(linear[-1], nn.Identity())
    return linear[-1]


BUILD_ERRORS = (
    *(RuntimeError, ValueError, TypeError, ArithmeticError),
    *(LookupError, AttributeError, AssertionError),
)
"""What libraries raise for arguments, or for images, that a network does not take."""


def refused(spec: ModelSpec, size: int | None, error: Exception) -> ConfigError:
    """The error for a network that does not take images of the job's size.

    Args:
        size: side of the images of its pretraining, in pixels.
    """
    trained = f", pretrained at {size} px," if size else ""
    remedy = f"--set model.size={size}" if size not in (None, spec.size) else "set another model.size"
    if spec.train == "all" and "per channel when training" in str(error):
        remedy += ", or model.train='head'"
    return ConfigError(
        f"model.size {spec.size}: {spec.name}{trained} does not take images of that size "
        f"({as_word(error)}); {remedy}"
    )


def checked(network: nn.Module, spec: ModelSpec, size: int | None) -> tuple[nn.Module, int]:
    """Return a network, and its number of features, after one image of the job has passed through it.

    Integer tensors that are not counters of batch norm, such as tables of positions, follow from the network
    and become constants of it: they are neither sent nor averaged.

    Args:
        size: side of the images of its pretraining, in pixels.

    Raises:
        ConfigError: it does not take images of that size, or does not return one vector for each.
    """
    for module in network.modules():
        for name, buffer in [*module.named_buffers(recurse=False)]:
            if not buffer.is_floating_point() and name != "num_batches_tracked":
                module.register_buffer(name, buffer, persistent=False)
    first = next((module for module in network.modules() if isinstance(module, nn.Conv2d)), None)
    if first and first.kernel_size == first.stride and spec.size % first.stride[0]:
        patches = ValueError(f"not a multiple of its patches of {first.stride[0]} px")
        raise refused(spec, size, patches)
    image = torch.zeros(1, spec.preprocessing.channels, spec.size, spec.size)
    # In the mode of training, where batch norm refuses a single value, on copies of what it would change.
    changed = {name: buffer.clone() for name, buffer in network.named_buffers()}
    try:
        with torch.no_grad():
            out = torch.func.functional_call(network.train(spec.train == "all"), changed, (image,))
    except BUILD_ERRORS as error:
        raise refused(spec, size, error) from error
    if not isinstance(out, Tensor) or out.dim() != 2:
        got = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise ConfigError(f"{spec.name} gives {got} for an image instead of a vector; choose another model")
    return channels_last(network), out.shape[1]
