"""The network of the example: its last layer has one row for each class."""

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
