"""The network of clinical text: embedding and a bidirectional LSTM."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

EMBEDDING, HIDDEN = 128, 32


class TextLSTM(nn.Module):
    """Embedding of 128, bidirectional LSTM of 32 units a direction, the last state of both: 64 features.

    Zhang et al. (PMFL), arXiv:2112.05321, Sec. IV-A, with sizes of the published program.

    Args:
        words: rows of the embedding.
        padding: whether the padding behind a document is read as words, as in the published program; else a
            document ends at its true length.
    """

    def __init__(self, words: int, *, padding: bool = False) -> None:
        super().__init__()
        self.padding = padding
        self.embedding = nn.Embedding(words, EMBEDDING)
        self.lstm = nn.LSTM(EMBEDDING, HIDDEN, batch_first=True, bidirectional=True)

    def forward(self, tokens: Tensor, length: Tensor) -> Tensor:
        """Tokens ``[n, L]`` and true lengths ``[n]`` to features ``[n, 64]``."""
        lengths = torch.full_like(length, tokens.shape[1]) if self.padding else length
        # Beyond the longest document of the batch there is nothing to embed.
        embedded = self.embedding(tokens[:, : int(lengths.max())])
        packed = pack_padded_sequence(embedded, lengths.cpu(), batch_first=True, enforce_sorted=False)
        last: Tensor = self.lstm(packed)[1][0]
        return torch.cat([last[0], last[1]], dim=1)


def text_lstm(words: int, *, padding: bool) -> tuple[nn.Module, int]:
    """The network and its number of features."""
    return TextLSTM(words, padding=padding), 2 * HIDDEN
