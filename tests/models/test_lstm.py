"""The network of text: as a packed bidirectional LSTM gives it, and blind to what pads a document."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from suture.core.errors import ConfigError
from suture.core.labels import LabelSet
from suture.models import ModelSpec, build
from suture.models.encoders import TextLSTM

TOKENS = torch.randint(0, 50, (5, 12), generator=torch.Generator().manual_seed(0))
LENGTH = torch.tensor([12, 1, 7, 3, 9])


def network(width: int | None = None) -> TextLSTM:
    torch.manual_seed(1)
    return TextLSTM(50, width=width).double()


def packed(model: TextLSTM, length: Tensor) -> Tensor:
    """PyTorch's own reading of true lengths."""
    x = pack_padded_sequence(model.embedding(TOKENS), length, batch_first=True, enforce_sorted=False)
    last = model.lstm(x)[1][0]
    return torch.cat([last[0], last[1]], dim=1)


@pytest.mark.parametrize("width", [12, None])
def test_equals_a_packed_sequence_to_the_second_derivative(width: int | None) -> None:
    model = network(width)
    parameters = list(model.parameters())
    found = []
    for out in (
        model(TOKENS, LENGTH),
        packed(model, LENGTH if width is None else torch.full_like(LENGTH, width)),
    ):
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


def test_documents_are_filled_up_to_one_width_whatever_the_batch() -> None:
    """As in the published program, where the width is that of the longest document of all."""
    model, filled = network(width=20), torch.zeros(5, 20, dtype=torch.int64)
    filled[:, :12] = TOKENS
    torch.testing.assert_close(model(TOKENS, LENGTH), network()(filled, torch.full_like(LENGTH, 20)))
    short = TOKENS[3:4, :3]  # the tokens of a document in a batch of its own, or of short ones
    beside = torch.cat([short, torch.zeros(1, 9, dtype=torch.int64)], dim=1)
    torch.testing.assert_close(model(short, LENGTH[3:4]), model(beside, LENGTH[3:4]))


def test_filling_up_needs_a_width() -> None:
    spec = ModelSpec("lstm", vocabulary=("a", "b"), padding=True)
    with pytest.raises(ConfigError, match=r"padding .*model\.longest"):
        build(spec, LabelSet(("x",)), 1, pretrained=False)
    backbone = build(replace(spec, longest=7), LabelSet(("x",)), 1, pretrained=False).backbone
    assert isinstance(backbone, TextLSTM)
    assert backbone.width == 7


def test_its_parameters_are_those_of_the_paper() -> None:
    assert sum(p.numel() for p in network().parameters()) == 41_537 - 65 + 128 * 50
    assert isinstance(network().lstm, nn.LSTM)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_mixed_precision_leaves_it_in_single_precision(half: torch.dtype) -> None:
    """Not every CPU has a short kernel of an LSTM, and cuDNN's computes in float16 whatever is asked."""
    found = []
    for asked in (None, half):
        model = build(ModelSpec("lstm"), LabelSet(("Mass",)), 1, pretrained=False)
        model.compute_in(asked)
        logits = model({"tokens": TOKENS, "length": LENGTH})
        logits.sum().backward()  # type: ignore[no-untyped-call]
        found.append([logits, *(p.grad for p in model.parameters())])
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)
