"""The network of the example, whose last layer has one row for each class, and its training."""

import torch
from torch import nn

HEAD = "head"


class Net(nn.Module):
    """Maps ``[n, 8]`` to logits ``[n, classes]``."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.head = nn.Linear(16, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return self.head(self.backbone(x))


def inputs(x: torch.Tensor) -> torch.Tensor:
    """Return what the network reads of the site's data ``[n, 8]``."""
    return x


def train(model: Net, x: torch.Tensor, y: torch.Tensor) -> None:
    """Train a round."""
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(20):
        optimiser.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(model(x), y).backward()
        optimiser.step()
