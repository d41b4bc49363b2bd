"""The published ResNet-50 of MoCo v2, in the format of its checkpoint.

He et al. Momentum Contrast for Unsupervised Visual Representation Learning. CVPR 2020.
Chen et al. Improved Baselines with Momentum Contrastive Learning. arXiv:2003.04297.
"""

from __future__ import annotations

from pathlib import Path

from torch import nn

from suture.models import IMAGENET
from suture.models.classifier import Preprocessing
from suture.models.priors.prior import Prior, freeze
from suture.models.priors.reading import read_part
from suture.models.weights import fill

SIZE = 224
FILE = "moco_v2_800ep_pretrain.pth.tar"
QUERY = "module.encoder_q."
"""The encoder that is kept; the checkpoint may hold its momentum copy and the queue as well."""


def moco_resnet50(path: Path, size: int | None = None) -> Prior:
    """ResNet-50 without its projection: images to 2048 features.

    Args:
        size: side of the images; None for the 224 px of its training.

    Raises:
        ConfigError: the checkpoint is missing or does not fit.
    """
    from torchvision.models import resnet50

    tensors = read_part(path, QUERY, f"MoCo v2 ({FILE})")
    network = resnet50()
    width: int = network.fc.in_features
    network.fc = nn.Identity()
    fill(network.state_dict(), tensors, str(path), f"ResNet-50 of MoCo v2; prior.path names {FILE}")
    mean, std = IMAGENET
    preprocessing = Preprocessing(size or SIZE, True, 3, mean, std)
    return freeze("resnet50", network, width, preprocessing, "MoCo v2, ResNet-50, ImageNet without labels")
