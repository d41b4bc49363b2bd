"""``hf:FOLDER``: an encoder that transformers has saved to a folder, such as RAD-DINO; or one of text.

Only networks of a list are built, by transformers' own classes, from a configuration of plain values;
what the folder holds besides configuration and tensors is never read.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from suture.core.entry_points import needed
from suture.core.errors import ConfigError, check_known, show_value, unknown
from suture.core.validation import parse
from suture.models import Description
from suture.models.weights import read_weights
from suture_encoders.foreign import bound_network, channels_of, check_backbone, read_config
from suture_encoders.text_folder import TEXT_NETWORKS, build_text_network, read_text_folder
from suture_encoders.transformers_weights import filled

if TYPE_CHECKING:
    from suture.models import ModelSpec


_IMAGE_NETWORKS = {
    "vit": "ViTModel",
    "dinov2": "Dinov2Model",
    "dinov2_with_registers": "Dinov2WithRegistersModel",
    "convnext": "ConvNextModel",
    "convnextv2": "ConvNextV2Model",
    "swin": "SwinModel",
    "resnet": "ResNetModel",
}
"""The classes of the networks of images, by their `model_type` in config.json."""

NETWORKS = (*_IMAGE_NETWORKS, *TEXT_NETWORKS)
"""All that are built."""

_ARGUMENTS = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act"),
    *("layer_norm_eps", "patch_size", "num_channels", "qkv_bias", "mlp_ratio", "layerscale_value"),
    *("use_swiglu_ffn", "num_register_tokens", "drop_path_rate", "hidden_dropout_prob", "num_stages"),
    *("attention_probs_dropout_prob", "hidden_sizes", "depths", "layer_scale_init_value", "embed_dim"),
    *("num_heads", "window_size", "embedding_size", "layer_type", "downsample_in_first_stage"),
    "downsample_in_bottleneck",
)
"""Their own settings in config.json; the others are of training or of heads."""

_POSITIONED = ("vit", "dinov2", "dinov2_with_registers")
"""Those with positions of a fixed image size, which are called `_POSITIONS`."""

_POSITIONS = "embeddings.position_embeddings"


def read_folder(folder: Path) -> tuple[str, Description]:
    """Return the network of a folder: its `model_type`, configuration and preprocessing.

    Raises:
        ConfigError: it is no such folder, its model is of another type or has code of its own, or it does not
            say how images are normalised.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"model.name=hf:{folder}: there is no such folder, and Suture downloads nothing. Fetch the model "
            "on a machine with a network and name its folder"
        )
    nested = folder / "0_Transformer"  # of earlier versions of sentence-transformers
    config = read_config((nested if nested.is_dir() else folder) / "config.json")
    for key in ("auto_map", "quantization_config"):
        if key in config:
            raise ConfigError(
                f"model.name: {folder}/config.json has {key}: the model needs code or a format of its own, "
                "which Suture does not run; choose another model"
            )
    kind = str(config.get("model_type"))
    check_known(f"model_type in {folder}/config.json", kind, NETWORKS)
    if kind in TEXT_NETWORKS:
        return kind, read_text_folder(folder, kind, config)
    arguments = {name: value for name, value in config.items() if name in _ARGUMENTS}
    channels = channels_of(arguments.get("num_channels", 3), folder / "config.json")
    mean, std, size = _preprocessing(folder, channels)
    values = {"arguments": arguments, "mean": mean, "std": std, "size": config.get("image_size") or size}
    return kind, parse(Description, values, f"{folder}/config.json")


def _preprocessing(folder: Path, channels: int) -> tuple[Any, Any, Any]:
    """Return mean, std and size of the folder's preprocessor_config.json, for values in [0, 1]."""
    found = read_config(folder / "preprocessor_config.json")
    if found.get("do_normalize", True):
        mean, std = found.get("image_mean"), found.get("image_std")
    else:
        mean, std = [0.0] * channels, [1.0] * channels
    factor = found.get("rescale_factor", 1 / 255) if found.get("do_rescale", True) else 1.0
    if not isinstance(factor, (int, float)) or abs(factor * 255 - 1) > 1e-3:
        raise ConfigError(
            f"model.name: {folder}/preprocessor_config.json divides pixels by another number than 255 "
            f"(rescale_factor={show_value(factor)}), which Suture cannot do; choose another model"
        )
    size = found.get("crop_size") or found.get("size")
    if isinstance(size, dict):
        size = size.get("height", size.get("shortest_edge"))
    return mean, std, size


def build_network(
    kind: str, described: Description, spec: ModelSpec, weights: str | None
) -> tuple[nn.Module, int]:
    """Build a network of text, or one for images of the job's size, to which its positions are interpolated.

    Raises:
        ConfigError: transformers is not installed, or the weights are another network's.
    """
    if kind in TEXT_NETWORKS:
        return build_text_network(kind, described, spec, weights)
    transformers = needed("transformers", f"hf:{kind}", "encoders")
    made, arguments = getattr(transformers, _IMAGE_NETWORKS[kind]), dict(described.arguments)
    if wrong := arguments.keys() - {*_ARGUMENTS}:
        raise unknown(f"argument of hf:{kind}", min(wrong), _ARGUMENTS)
    extra = {"add_pooling_layer": False} if kind == "vit" else {}
    own_size = {"image_size": spec.size} if kind in _POSITIONED else {}
    network = bound_network(lambda: made(made.config_class(**arguments, **own_size), **extra), spec)
    if weights:
        tensors = dict(read_weights(weights))
        table = network.state_dict().get(_POSITIONS)
        for name, tensor in tensors.items():
            if table is not None and name.endswith(_POSITIONS) and tensor.dim() == 3:
                tensors[name] = resample(tensor, table.shape[1])
        network = filled(made, extra, network, tensors, weights)
    return check_backbone(_Pooled(network, token=kind == "vit"), spec, described.size)


def resample(table: Tensor, number: int) -> Tensor:
    """Return the positions of a vision transformer for another number of patches in a square.

    The first position is the class token's; the others are interpolated (bicubic), as in the forward pass of
    transformers.

    Args:
        table: ``[1, 1 + n * n, d]``.
        number: of positions that are needed, 1 + m * m.

    Returns:
        ``[1, number, d]``; the table itself where the numbers are equal or not of squares.
    """
    old, new = round(max(table.shape[1] - 1, 1) ** 0.5), round((number - 1) ** 0.5)
    if table.shape[1] == number or (len(table), old * old + 1, new * new + 1) != (1, table.shape[1], number):
        return table
    grid = table[:, 1:].float().reshape(1, old, old, -1).permute(0, 3, 1, 2)
    grid = nn.functional.interpolate(grid, (new, new), mode="bicubic", align_corners=False)
    return torch.cat([table[:, :1].float(), grid.flatten(2).transpose(1, 2)], dim=1)


class _Pooled(nn.Module):
    """The vector of an image: that of the class token, or what the network itself pools, ``[n, d]``."""

    def __init__(self, network: nn.Module, *, token: bool) -> None:
        super().__init__()
        self.network, self.token = network, token

    def forward(self, images: Tensor) -> Tensor:
        out = self.network(pixel_values=images)
        pooled: Tensor = out.last_hidden_state[:, 0] if self.token else out.pooler_output
        return pooled.flatten(1)
