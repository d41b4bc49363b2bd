"""Weights of a file in a network of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from suture.core.errors import ConfigError, as_word


def filled(
    made: Any, extra: Mapping[str, Any], network: Any, tensors: Mapping[str, Tensor], weights: str
) -> nn.Module:
    """Return a network of transformers with the tensors of a file, whose names it knows of all its versions.

    Args:
        made: class of the network.
        extra: further arguments of its constructor.
        weights: the file, for messages.

    Raises:
        ConfigError: the tensors are another network's; names the first.
    """
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        # With other shapes it would only point to a report that it prints.
        filled, found = made.from_pretrained(
            None,
            config=network.config,
            state_dict=dict(tensors),
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            local_files_only=True,
            **extra,
        )
    except (RuntimeError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{weights} cannot be read as {made.__name__}: {as_word(error)}; name the folder's own file"
        ) from error
    finally:
        logging.set_verbosity(level)
    layers = {name.partition(".")[0] for name in network.state_dict()} - {"embeddings"}
    prefix = f"{made.base_model_prefix}."
    wrong = [
        f"{name} is {list(has)} instead of {list(needs)}" for name, has, needs in found["mismatched_keys"]
    ]
    wrong += [f"{name} is missing" for name in found["missing_keys"]]
    module: nn.Module = filled.float()
    wrong += [f"{name} is not finite" for name, t in module.state_dict().items() if not t.isfinite().all()]
    for name in found["unexpected_keys"]:
        if name.removeprefix(prefix).partition(".")[0] in layers:
            wrong.append(f"it has {name}, too")
    if wrong:
        raise ConfigError(
            f"{weights} does not contain the {made.__name__} of the configuration: {as_word(min(wrong))}; "
            "name the folder's own file"
        )
    return module
