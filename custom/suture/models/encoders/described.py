"""What a job says of an encoder that comes from a file or folder, so that no other party needs that."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass as validated
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from suture.core.errors import ConfigError, SutureError, as_word, shown
from suture.core.plain import parse_json, read_bounded
from suture.core.validation import STRICT, parse
from suture.models.classifier import Mean, Std

if TYPE_CHECKING:
    from suture.models import ModelSpec

_Number = Annotated[int, Field(ge=-(2**20), le=2**20)] | Annotated[float, Field(ge=-(2**20), le=2**20)]
_Text = Annotated[str, Field(max_length=64)]
_Value = bool | _Number | _Text | Annotated[tuple[_Number | _Text, ...], Field(max_length=32)] | None
"""A plain value; no argument of a network is larger."""

_MOST_LAYERS = 256
"""Largest number in an argument that says how many layers or blocks there are."""

_LAYERS = ("num_hidden_layers", "n_layers", "depths", "layers", "block_config")

MOST_BYTES = 2**33
"""Most memory for an encoder and what it computes of one image: as much as a saved model may have."""


@validated(frozen=True, config=STRICT)
class Description:
    """An encoder but for its weights; `ModelSpec.encoder_config` holds it as JSON.

    Attributes:
        arguments: of the network, which is one of a list in this package.
        mean, std: normalisation of each channel, of values in [0, 1]; as many as the network takes. None for
            text.
        size: side of the images of its pretraining, in pixels, or tokens that it reads of a document; None
            where its maker does not say.
        labels: the classes of its pretraining, for information.
        tokeniser: of a network of text, as JSON of the library `tokenizers`; None for images.

    Raises:
        ConfigError: it would have more layers than any encoder, or reads neither images nor text.
    """

    arguments: dict[_Text, _Value]
    mean: Annotated[tuple[Mean, ...], Field(max_length=3)] = ()
    std: Annotated[tuple[Std, ...], Field(max_length=3)] = ()
    size: Annotated[int, Field(ge=1, le=4096)] | None = None
    labels: Annotated[tuple[Annotated[str, Field(max_length=200)], ...], Field(max_length=1000)] = ()
    tokeniser: str | None = None

    def __post_init__(self) -> None:
        for name in _LAYERS:
            value = self.arguments.get(name, 0)
            for number in value if isinstance(value, tuple) else (value,):
                if not isinstance(number, int) or number > _MOST_LAYERS:
                    raise ConfigError(f"{name} is {shown(value)}; at most {_MOST_LAYERS} layers can be built")
        if len(self.mean) != len(self.std):
            raise ConfigError(f"mean has {len(self.mean)} values and std {len(self.std)}; write as many")
        if bool(self.mean) == (self.tokeniser is not None):
            raise ConfigError(
                "an encoder of images needs mean and std, and one of text a tokeniser; write one"
            )

    def __str__(self) -> str:
        """Return it as JSON."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def read(cls, text: str, where: str) -> Description:
        """Read it from JSON.

        Raises:
            ConfigError: a value is missing, unknown or out of range.
        """
        try:
            return parse(cls, parse_json(text), where)
        except ValueError as error:
            raise ConfigError(f"{where} cannot be read: {as_word(error)}; export the job again") from error


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


def normalised(low: float, high: float, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation that map values in [0, 1] to those between `low` and `high`."""
    return (-low / (high - low),) * channels, (1 / (high - low),) * channels


def channels_of(value: object, where: Path) -> int:
    """Return a number of channels that a file states.

    Raises:
        ConfigError: it is no integer from 1 to 3.
    """
    if type(value) is int and 1 <= value <= 3:
        return value
    raise ConfigError(f"model.name: {where}: the number of channels is {shown(value)}; it must be 1, 2 or 3")


class _Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the size of the largest tensor that is computed, in bytes."""

    size = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.size = max([self.size, *(x.nbytes for x in tree_leaves(out) if isinstance(x, Tensor))])
        return out


def bounded(make: Callable[[], nn.Module], spec: ModelSpec, tokens: int = 0) -> nn.Module:
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
