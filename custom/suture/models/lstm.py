"""The network of clinical text: embedding and a bidirectional LSTM."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from suture.data.text import UNKNOWN

EMBEDDING, HIDDEN = 128, 32


class TextLSTM(nn.Module):
    """Embedding of 128, bidirectional LSTM of 32 units a direction, the last state of both: 64 features.

    Zhang et al. (PMFL), arXiv:2112.05321, Sec. IV-A, with sizes of the published program.

    Args:
        words: rows of the embedding.
        width: words that every document is filled up to, and read, as in the published program; None: a
            document ends at its true length.
    """

    def __init__(self, words: int, *, width: int | None = None) -> None:
        super().__init__()
        self.width = width
        self.embedding = nn.Embedding(words, EMBEDDING)
        self.lstm = nn.LSTM(EMBEDDING, HIDDEN, batch_first=True, bidirectional=True)

    def forward(self, tokens: Tensor, length: Tensor) -> Tensor:
        """Tokens ``[n, L]`` and true lengths ``[n]`` to features ``[n, 64]``."""
        n = length
        if self.width is not None:
            # Not to the longest of the batch: a document's features would depend on the others.
            tokens = pad(tokens, (0, self.width - tokens.shape[1]), value=UNKNOWN)
            n = torch.full_like(length, self.width)
        # Beyond the longest document of the batch there is nothing to embed.
        x = self.embedding(tokens[:, : int(n.max())])
        place = torch.arange(x.shape[1], device=x.device)
        backwards = torch.where(place < n[:, None], n[:, None] - 1 - place, place)
        turned = x.gather(1, backwards[..., None].expand_as(x))
        # Not a packed sequence, which the fused kernels do not take: it costs ten times as much. Each
        # direction reads from its own beginning, and its state at the last word has seen no padding.
        last = (torch.arange(len(x), device=x.device), n - 1)
        return torch.cat([self._read(x, "")[last], self._read(turned, "_reverse")[last]], dim=1)

    def _read(self, x: Tensor, suffix: str) -> Tensor:
        """The states of one direction, ``[n, l, 32]``."""
        names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
        weights = [getattr(self.lstm, name + suffix) for name in names]
        zero = x.new_zeros(1, x.shape[0], HIDDEN)
        states: Tensor = torch.lstm(x, (zero, zero), weights, True, 1, 0.0, self.training, False, True)[
            0
        ]  # biases, layers, dropout, train, bidirectional, batch first
        return states


def text_lstm(words: int, *, width: int | None) -> tuple[nn.Module, int]:
    """The network and its number of features."""
    return TextLSTM(words, width=width), 2 * HIDDEN
