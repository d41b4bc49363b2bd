"""A module of Lightning, whose last layer is `head`, and its training."""

import torch
from lightning import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

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


def inputs(x: torch.Tensor) -> torch.Tensor:
    """Return what the network reads: all of it."""
    return x


def train(model: Net, x: torch.Tensor, y: torch.Tensor) -> None:
    """Train a round."""
    trainer = Trainer(max_epochs=5, accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.fit(model, DataLoader(TensorDataset(x, y), batch_size=16))
