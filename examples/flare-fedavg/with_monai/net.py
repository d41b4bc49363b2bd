"""A small DenseNet of MONAI, whose last layer is `class_layers.out`, and its training."""

import torch
from monai.data import ArrayDataset, DataLoader
from monai.networks.nets import DenseNet
from monai.transforms import RandGaussianNoise

HEAD = "class_layers.out"


class Net(DenseNet):
    """Maps grey images ``[n, 1, h, w]`` to logits ``[n, classes]``."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__(
            spatial_dims=2,
            in_channels=1,
            out_channels=classes,
            init_features=8,
            growth_rate=4,
            block_config=(2, 2),
        )


def inputs(x: torch.Tensor) -> torch.Tensor:
    """Return images ``[n, 1, 8, 8]``."""
    return x[:, None, None].repeat(1, 1, 8, 1)


def train(model: Net, x: torch.Tensor, y: torch.Tensor) -> None:
    """Train a round."""
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = DataLoader(ArrayDataset(x, RandGaussianNoise(prob=0.5), y), batch_size=16)
    for _ in range(5):
        for image, label in loader:
            optimiser.zero_grad()
            torch.nn.functional.binary_cross_entropy_with_logits(model(image), label).backward()
            optimiser.step()
