"""Published networks as priors: CLIP ViT-B/32, ResNet-50 of MoCo v2, and EfficientNet-Lite0.

Radford et al. Learning Transferable Visual Models From Natural Language Supervision. ICML 2021 (Sec. 2.4).
Dosovitskiy et al. An Image is Worth 16x16 Words. ICLR 2021 (Sec. 3.1).
He et al. Momentum Contrast for Unsupervised Visual Representation Learning. CVPR 2020.
Chen et al. Improved Baselines with Momentum Contrastive Learning. arXiv:2003.04297.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from suture.core.errors import ConfigError
from suture.data.batch import Preprocessing
from suture.models.encoders import IMAGENET, LITE, efficientnet_lite0
from suture.models.priors import Prior, PriorEntry, freeze
from suture.models.weights import fill, read_checkpoint

SIZE = 224
"""Side of the images with which the networks of this module were trained, in pixels."""

_MOCO_FILE = "moco_v2_800ep_pretrain.pth.tar"
_MOCO_ENCODER = "module.encoder_q."
"""How names begin of the tensors of the encoder that is used; a checkpoint may also hold its momentum copy
and the queue."""

_CLIP_PREPROCESSING = Preprocessing(
    SIZE, True, 3, (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
)
WIDTH, HEADS, PATCH, FEATURES = 768, 12, 32, 512

_NAMES = {
    "conv1.": "patches.",
    "class_embedding": "token",
    "positional_embedding": "places",
    "ln_pre.": "before.",
    "ln_post.": "after.",
    "transformer.resblocks.": "blocks.",
    ".attn.": ".self_attn.",
    ".ln_": ".norm",
    ".mlp.c_fc.": ".linear1.",
    ".mlp.c_proj.": ".linear2.",
}
"""Parts of tensor names in CLIP's checkpoints, and those of `VisionTower`, on which the digest depends."""


def _gelu(x: Tensor) -> Tensor:
    """Return x sigma(1.702 x): GELU as approximated in the training of OpenAI's weights."""
    return x * torch.sigmoid(1.702 * x)


class VisionTower(nn.Module):
    """A vision transformer: images ``[n, 3, 224, 224]`` to ``[n, 512]``.

    It has one more layer norm than that of Dosovitskiy et al., before the first block.
    """

    def __init__(self, layers: int = 12, size: int = SIZE) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH, bias=False)
        self.token = nn.Parameter(torch.zeros(WIDTH))
        self.places = nn.Parameter(torch.zeros((size // PATCH) ** 2 + 1, WIDTH))
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.blocks = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(
                    WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation=_gelu, batch_first=True, norm_first=True
                )
                for _ in range(layers)
            )
        )
        self.project = nn.Linear(WIDTH, FEATURES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the projection of the class token after the last block, ``[n, 512]``."""
        patches = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), 1, -1), patches], dim=1) + self.places
        out: Tensor = self.project(self.after(self.blocks(self.before(tokens))[:, 0]))
        return out


def rename_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a CLIP checkpoint under the names of `VisionTower`."""
    out = {}
    for name, tensor in tensors.items():
        if name == "proj":  # written as the factor on the right, not as a layer's weight
            out["project.weight"] = tensor.T
            continue
        for theirs, ours in _NAMES.items():
            name = name.replace(theirs, ours)
        out[name] = tensor
    return out


def clip_vitb32(path: Path, size: int | None = None) -> Prior:
    """Return the image encoder of CLIP ViT-B/32: 224 px images to 512 features.

    Raises:
        ConfigError: the checkpoint is missing or does not fit, or `size` is another one.
    """
    if size not in (None, SIZE):
        raise ConfigError(
            f"prior.size={size}: clip_vitb32 supports {SIZE} px only; remove prior.size, or set prior.name"
        )
    tensors = _read_part(path, "visual.", "CLIP ViT-B/32 (tensors visual.*)")
    network = VisionTower()
    fill(network.state_dict(), rename_tensors(tensors), str(path), "image encoder of CLIP ViT-B/32")
    return freeze(
        "clip_vitb32", network, FEATURES, _CLIP_PREPROCESSING, "CLIP ViT-B/32, 400 million captioned images"
    )


def moco_resnet50(path: Path, size: int | None = None) -> Prior:
    """Return ResNet-50 of MoCo v2 without its projection: images to 2048 features.

    Args:
        size: side of the images; None for the 224 px of its training.

    Raises:
        ConfigError: the checkpoint is missing or does not fit.
    """
    from torchvision.models import resnet50

    tensors = _read_part(path, _MOCO_ENCODER, f"MoCo v2 ({_MOCO_FILE})")
    network = resnet50()
    width: int = network.fc.in_features
    network.fc = nn.Identity()
    fill(network.state_dict(), tensors, str(path), f"ResNet-50 of MoCo v2; prior.path names {_MOCO_FILE}")
    mean, std = IMAGENET
    preprocessing = Preprocessing(size or SIZE, True, 3, mean, std)
    return freeze("resnet50", network, width, preprocessing, "MoCo v2, ResNet-50, ImageNet without labels")


def efficientnet_lite0_prior(_path: Path, size: int | None = None) -> Prior:
    """Return EfficientNet-Lite0 with the weights of its package: images to 1280 features.

    Args:
        size: side of the images; None for 224 px.

    Raises:
        ConfigError: the package is not installed.
    """
    mean, std = LITE
    preprocessing = Preprocessing(size or SIZE, True, 3, mean, std)
    network, width = efficientnet_lite0(preprocessing.size, "package")
    return freeze(
        "efficientnet_lite0", network, width, preprocessing, "EfficientNet-Lite0, ImageNet with labels"
    )


def _read_part(path: Path, prefix: str, what: str) -> dict[str, Tensor]:
    """Read the tensors of one part of a checkpoint; their names lose the prefix.

    Args:
        path: a safetensors file, or a torch file with tensors by name, at its top or under ``state_dict``.
            Nothing but tensors and plain values is unpickled.
        prefix: of the names that belong to the part.
        what: the name of the expected checkpoint, for errors.

    Raises:
        ConfigError: naming the file and the remedy.
    """
    if not path.exists():
        raise ConfigError(f"the prior {path} does not exist; set prior.path to the file of {what}")
    loaded = read_checkpoint(path, what)
    state = loaded.get("state_dict", loaded)
    tensors = state.items() if isinstance(state, Mapping) else ()
    part = {str(k).removeprefix(prefix): t for k, t in tensors if str(k).startswith(prefix)}
    if not part:
        raise ConfigError(f"{path} has no tensors {prefix}*; set prior.path to the file of {what}")
    return {name: tensor for name, tensor in part.items() if isinstance(tensor, Tensor)}


MOCO_RESNET50 = PriorEntry(
    "ResNet-50, MoCo v2 on ImageNet, 800 epochs",
    moco_resnet50,
    2048,
    224,
    "CC BY-NC 4.0, no commercial use",
    f"the file {_MOCO_FILE}",
)

CLIP_VITB32 = PriorEntry(
    "image encoder of CLIP ViT-B/32",
    clip_vitb32,
    512,
    224,
    "see docs/priors.md",
    "a file with its tensors visual.* (docs/priors.md)",
)

EFFICIENTNET_LITE0 = PriorEntry(
    "EfficientNet-Lite0 with the ImageNet weights of its package (suture[lite])",
    efficientnet_lite0_prior,
    1280,
    224,
    "Apache-2.0",
)
