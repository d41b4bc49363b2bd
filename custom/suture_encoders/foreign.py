"""A network that another library builds: made within bounds, and checked; what its files say."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from suture.core.errors import ConfigError, SutureError, as_word, show_value
from suture.core.files import parse_json, read_bounded
from suture.models.classifier import channels_last

if TYPE_CHECKING:
    from suture.models import ModelSpec


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


def refusal(spec: ModelSpec, size: int | None, error: Exception) -> ConfigError:
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


def check_backbone(network: nn.Module, spec: ModelSpec, size: int | None) -> tuple[nn.Module, int]:
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
        raise refusal(spec, size, patches)
    image = torch.zeros(1, spec.preprocessing.channels, spec.size, spec.size)
    # In the mode of training, where batch norm refuses a single value, on copies of what it would change.
    changed = {name: buffer.clone() for name, buffer in network.named_buffers()}
    try:
        with torch.no_grad():
            out = torch.func.functional_call(network.train(spec.train == "all"), changed, (image,))
    except BUILD_ERRORS as error:
        raise refusal(spec, size, error) from error
    if not isinstance(out, Tensor) or out.dim() != 2:
        got = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise ConfigError(f"{spec.name} gives {got} for an image instead of a vector; choose another model")
    return channels_last(network), out.shape[1]


MOST_BYTES = 2**33
"""Most memory for an encoder and what it computes of one image: as much as a saved model may have."""


_NO_LIMIT = re.compile(rb"(:\s*)\d{20,}(?=\s*[,}])")
"""Such as int(1e30), by which transformers says that a tokeniser has no longest document."""


def read_config(path: Path) -> dict[str, Any]:
    """Read a JSON file of an encoder's folder.

    Raises:
        ConfigError: it is missing, or not a table in JSON.
    """
    try:
        found = parse_json(_NO_LIMIT.sub(rb"\1null", read_bounded(path)))
    except (OSError, ValueError, SutureError) as error:
        why = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {as_word(error)}"
        raise ConfigError(f"model.name: {path} {why}; name the folder of a whole model") from error
    if not isinstance(found, dict):
        raise ConfigError(f"model.name: {path} is not a table in JSON; name the folder of a whole model")
    return found


def read_normalisation(low: float, high: float, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation that map values in [0, 1] to those between `low` and `high`."""
    return (-low / (high - low),) * channels, (1 / (high - low),) * channels


def channels_of(value: object, where: Path) -> int:
    """Return a number of channels that a file states.

    Raises:
        ConfigError: it is no integer from 1 to 3.
    """
    if type(value) is int and 1 <= value <= 3:
        return value
    raise ConfigError(
        f"model.name: {where}: the number of channels is {show_value(value)}; it must be 1, 2 or 3"
    )


class _Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the size of the largest tensor that is computed, in bytes."""

    size = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.size = max([self.size, *(x.nbytes for x in tree_leaves(out) if isinstance(x, Tensor))])
        return out


def bound_network(make: Callable[[], nn.Module], spec: ModelSpec, tokens: int = 0) -> nn.Module:
    """Make a network that another party may have chosen, once it is known what memory it needs.

    Args:
        tokens: of the longest document that a network of text reads; 0 for images.

    Raises:
        ConfigError: the arguments do not go together, or not with the images of the job, or the network would
            be too large.
    """
    try:
        with torch.device("meta"):  # without memory
            network = make()
        check_footprint(network, spec, tokens)
        return make()
    except ConfigError:
        raise
    except Exception as error:  # whatever a library raises for arguments that it does not take
        raise ConfigError(
            f"{spec.name} cannot be built for {_input(spec, tokens)}: {as_word(error)}; correct one of them"
        ) from error


def check_footprint(network: nn.Module, spec: ModelSpec, tokens: int = 0) -> None:
    """Refuse a network that needs too much memory for one image or document; it is computed without any.

    Raises:
        ConfigError: names the size of the network, and what it needs.
        Exception: whatever the library raises for an input that the network does not take.
    """
    tensors = [*network.named_parameters(), *network.named_buffers()]
    needed = sum(tensor.nbytes for _, tensor in tensors)
    if needed <= MOST_BYTES:
        largest, mode = _Largest(), network.training  # type: ignore[no-untyped-call]
        image = (spec.preprocessing.channels, spec.size, spec.size)
        with torch.device("meta"), torch.no_grad(), largest:
            read = torch.zeros(1, tokens, dtype=torch.long) if tokens else torch.zeros(1, *image)
            empty = {name: tensor.to("meta") for name, tensor in tensors}
            torch.func.functional_call(network.eval(), empty, (read,))
        network.train(mode)
        needed += 2 * largest.size  # what the largest operation reads and gives
    if needed > MOST_BYTES:
        number = sum(tensor.numel() for tensor in network.parameters())
        raise ConfigError(
            f"{spec.name} with {number:,} parameters needs {needed / 1e9:,.1f} GB for "
            f"{_input(spec, tokens)}; at most {MOST_BYTES / 1e9:.1f} GB can be used; choose a smaller one"
        )


def _input(spec: ModelSpec, tokens: int) -> str:
    return f"a document of {tokens:,} tokens" if tokens else f"an image of model.size {spec.size}"
