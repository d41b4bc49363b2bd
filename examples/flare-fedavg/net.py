"""The network of the example: its last layer, `head`, has one row for each class."""

from collections import OrderedDict

import torch
from torch import nn


class Net(nn.Module):
    """Maps ``[n, 8]`` to logits ``[n, classes]``."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.backbone = nn.Sequential(OrderedDict(first=nn.Linear(8, 16), relu=nn.ReLU()))
        self.head = nn.Linear(16, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        logits: torch.Tensor = self.head(self.backbone(x))
        return logits
