"""``bundle:FOLDER``: the network of a MONAI bundle that classifies images of two dimensions.

Nothing of its configuration is evaluated: the network must be one of `MONAI_NETS`, and its arguments literal.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from suture.core.errors import ConfigError, check_known, show_value
from suture.core.validation import parse
from suture.models import Description
from suture_encoders.foreign import bound_network, channels_of, read_config, read_normalisation
from suture_encoders.libraries import MONAI_CHANNELS, MONAI_NETS, filled_monai, monai_network

if TYPE_CHECKING:
    from suture.models import ModelSpec

_CONFIGS = ("inference.json", "evaluate.json", "train.json")
_NAMES = ("network_def", "network", "net")
"""How bundles call the definition of the network."""


def read_bundle(folder: Path) -> tuple[str, Description]:
    """Return the network of a bundle: its name in MONAI, arguments, and the range of its input.

    Raises:
        ConfigError: it is no bundle, its network is another one or has an expression as argument, or its
            metadata do not say what it reads.
    """
    if not folder.is_dir():
        raise ConfigError(f"model.name=bundle:{folder}: there is no such folder; name that of a bundle")
    path, defined = _definition(folder)
    name = str(defined.get("_target_")).rpartition(".")[2]
    check_known(f"2-D network of MONAI in {path}", name, MONAI_NETS)
    arguments = {key: value for key, value in defined.items() if key not in _LEFT_OUT}
    for key, value in arguments.items():
        if key.startswith("_") or (isinstance(value, str) and value.startswith(("$", "@", "%"))):
            raise ConfigError(
                f"model.name: {path}: the network's {key}={show_value(value)} is an expression, which Suture "
                "does not evaluate; write its value"
            )
    channels = next((arguments[key] for key in MONAI_CHANNELS if key in arguments), 3)
    values = _input(folder, channels_of(channels, path)) | {"arguments": arguments}
    return name, parse(Description, values, str(path))


_LEFT_OUT = ("_target_", "_desc_", "pretrained", "progress")
"""Entries that are no arguments, and those by which MONAI would download weights."""


def _definition(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return the configuration that defines the network, and the definition."""
    for name in _CONFIGS:
        path = folder / "configs" / name
        if path.is_file():
            config = read_config(path)
            for key in _NAMES:
                if isinstance(found := config.get(key), dict) and "_target_" in found:
                    return path, found
    raise ConfigError(
        f"model.name=bundle:{folder}: none of {', '.join(_CONFIGS)} in its configs defines a network "
        f"({' or '.join(_NAMES)} with a _target_). Write a YAML configuration as JSON, or choose another "
        "bundle"
    )


def _input(folder: Path, channels: int) -> dict[str, Any]:
    """Return normalisation and size of the images that metadata.json describes."""
    path = folder / "configs" / "metadata.json"
    try:
        image = read_config(path)["network_data_format"]["inputs"]["image"]
        low, high = (float(value) for value in image["value_range"])
        mean, std = read_normalisation(low, high, channels)
        size, other = image["spatial_shape"]
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(
            f"model.name: {path} does not state value_range and spatial_shape of a 2-D image "
            f"({type(error).__name__}: {error}); add them"
        ) from error
    return {"mean": mean, "std": std, "size": size if size == other and isinstance(size, int) else None}


def build_network(
    kind: str, described: Description, spec: ModelSpec, weights: str | None
) -> tuple[nn.Module, int]:
    """Build the network of a bundle.

    Raises:
        ConfigError: the arguments do not go together, or the weights are another network's.
    """
    network = bound_network(lambda: monai_network(kind, described.arguments), spec)
    return filled_monai(network, kind, spec, weights, described.size)
