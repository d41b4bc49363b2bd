"""The image encoder of CLIP ViT-B/32, in the format of its checkpoints.

Radford et al. Learning Transferable Visual Models From Natural Language Supervision. ICML 2021 (Sec. 2.4).
Dosovitskiy et al. An Image is Worth 16x16 Words. ICLR 2021 (Sec. 3.1).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from suture.core.errors import ConfigError
from suture.models.classifier import Preprocessing
from suture.models.priors.prior import Prior, freeze
from suture.models.priors.reading import read_part
from suture.models.weights import fill

PREPROCESSING = Preprocessing(
    224, True, 3, (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
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
"""The checkpoints' words, and PyTorch's or ours."""


def _gelu(x: Tensor) -> Tensor:
    """x sigma(1.702 x), the approximation that OpenAI's weights were trained with (Hendrycks and Gimpel)."""
    return x * torch.sigmoid(1.702 * x)


class VisionTower(nn.Module):
    """A vision transformer: images ``[n, 3, 224, 224]`` to ``[n, 512]``.

    It has one more layer norm than that of Dosovitskiy et al., before the first block.
    """

    def __init__(self, layers: int = 12, size: int = 224) -> None:
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
        """The projection of the class token after the last block."""
        patches = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), 1, -1), patches], dim=1) + self.places
        out: Tensor = self.project(self.after(self.blocks(self.before(tokens))[:, 0]))
        return out


def renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A checkpoint's tensors under the names of `VisionTower`."""
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
    """The image encoder: 224 px images to 512 features.

    Raises:
        ConfigError: the checkpoint is missing or does not fit, or another size is asked for.
    """
    if size not in (None, PREPROCESSING.size):
        raise ConfigError(
            f"prior.size={size}: clip_vitb32 knows the places of its patches at {PREPROCESSING.size} px "
            "alone; remove prior.size, or set prior.name"
        )
    tensors = read_part(path, "visual.", "CLIP ViT-B/32 (tensors visual.*)")
    network = VisionTower()
    fill(network.state_dict(), renamed(tensors), str(path), "image encoder of CLIP ViT-B/32")
    return freeze(
        "clip_vitb32", network, FEATURES, PREPROCESSING, "CLIP ViT-B/32, 400 million captioned images"
    )
