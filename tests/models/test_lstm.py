"""The network of text: as a packed bidirectional LSTM gives it, and blind to what pads a document."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from suture.models.lstm import TextLSTM

TOKENS = torch.randint(0, 50, (5, 12), generator=torch.Generator().manual_seed(0))
LENGTH = torch.tensor([12, 1, 7, 3, 9])


def network(padding: bool = False) -> TextLSTM:
    torch.manual_seed(1)
    return TextLSTM(50, padding=padding).double()


def packed(model: TextLSTM, length: Tensor) -> Tensor:
    """PyTorch's own reading of true lengths."""
    x = pack_padded_sequence(model.embedding(TOKENS), length, batch_first=True, enforce_sorted=False)
    last = model.lstm(x)[1][0]
    return torch.cat([last[0], last[1]], dim=1)


@pytest.mark.parametrize("padding", [True, False])
def test_equals_a_packed_sequence_to_the_second_derivative(padding: bool) -> None:
    model = network(padding)
    parameters = list(model.parameters())
    found = []
    for out in (model(TOKENS, LENGTH), packed(model, torch.full_like(LENGTH, 12) if padding else LENGTH)):
        first = torch.autograd.grad(out.square().sum(), parameters, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), parameters)
        found.append([out, *first, *second])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)


def test_what_pads_a_document_changes_nothing() -> None:
    model = network()
    other = TOKENS.clone()
    for row, n in enumerate(LENGTH.tolist()):
        other[row, n:] = 49
    assert torch.equal(model(TOKENS, LENGTH), model(other, LENGTH))
    alone = model(TOKENS[2:3], LENGTH[2:3])
    torch.testing.assert_close(alone, model(TOKENS, LENGTH)[2:3])


def test_its_parameters_are_those_of_the_paper() -> None:
    assert sum(p.numel() for p in network().parameters()) == 41_537 - 65 + 128 * 50
    assert isinstance(network().lstm, nn.LSTM)
