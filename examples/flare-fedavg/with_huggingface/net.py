"""A tiny BERT of Hugging Face with random weights, whose last layer is `classifier`, and its training."""

import torch
from transformers import BertConfig, BertForSequenceClassification

HEAD = "classifier"


class Net(BertForSequenceClassification):
    """Maps token ids ``[n, length]`` to logits ``[n, classes]``; with labels to the mean loss, its own."""

    def __init__(self, classes: int = 5) -> None:
        config = BertConfig(
            vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
        )
        config.num_labels, config.problem_type = classes, "multi_label_classification"
        super().__init__(config)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits, or the loss."""
        out = super().forward(tokens, labels=labels)
        return out.logits if labels is None else out.loss


def inputs(x: torch.Tensor) -> torch.Tensor:
    """Return ``[n, 8]``: a word for the sign of each number."""
    return 2 * torch.arange(8) + (x > 0).long()


def train(model: Net, x: torch.Tensor, y: torch.Tensor) -> None:
    """Train a round."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(20):
        optimiser.zero_grad()
        model(x, labels=y).backward()
        optimiser.step()
