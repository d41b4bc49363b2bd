"""A module of Lightning, whose last layer is `head`."""

import torch
from lightning import LightningModule
from torch import nn

HEAD = "head"


class Net(LightningModule):
    """Maps ``[n, 8]`` to logits ``[n, classes]``."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.head = nn.Linear(16, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return self.head(self.backbone(x))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return the loss of a batch."""
        x, y = batch
        return nn.functional.binary_cross_entropy_with_logits(self(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimiser."""
        return torch.optim.Adam(self.parameters(), lr=0.01)
