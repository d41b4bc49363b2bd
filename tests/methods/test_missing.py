"""What a site does not annotate, and what it does not know of its own classes, are two things."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from suture.core.labels import LabelSet
from suture.data.batch import Samples, columns
from suture.learning.samples import pool
from suture.methods import METHODS
from suture.methods.base import Method

NAN = float("nan")
OWN = LabelSet(("A", "B"))
UNION = LabelSet(("A", "B", "C"))
SITE = Samples({"x": torch.zeros(2, 1)}, torch.tensor([[1.0, NAN], [0.0, 1.0]]), ("p", "q"))
"""The site has not read B in its first image, and annotates no C."""


def gradient(method: Method, samples: Samples) -> Tensor:
    """Of the loss by the logits, all of which are 0."""
    logits = torch.zeros(samples.y.shape, requires_grad=True)
    method.loss(logits, *samples.targets(), "multilabel").backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    return logits.grad


@pytest.mark.parametrize("name", ["vanilla", "fedavg", "central"])
def test_missing_is_negative_and_unknown_stays_unknown(name: str) -> None:
    """Five entries teach: sigma(0) - y over 5; the one that nobody has read teaches nothing."""
    method = METHODS[name]()
    part = columns(SITE, OWN, UNION, absent=method.labels.unknown == "negative")
    assert_close(gradient(method, part), torch.tensor([[-0.1, 0.0, 0.1], [0.1, -0.1, 0.1]]))
    assert torch.isnan(part.y[:, 2]).all()  # no figure counts them as negatives


@pytest.mark.parametrize("name", ["surgical", "partial", "pfl", "individual", "central_full"])
def test_unknown_teaches_nothing(name: str) -> None:
    method = METHODS[name]()
    part = columns(SITE, OWN, UNION, absent=method.labels.unknown == "negative")
    assert_close(gradient(method, part), torch.tensor([[-1.0, 0.0, 0.0], [1.0, -1.0, 0.0]]) / 6)


def test_pooled_data_remember_who_annotates_what() -> None:
    """Also when they are cut to the model's classes afterwards, in another order."""
    splits = dict.fromkeys(("train", "validation", "test"), SITE)
    blank = Samples({"x": torch.zeros(1, 1)}, torch.tensor([[NAN]]), ("r",))
    other = LabelSet(("C",)), dict.fromkeys(splits, blank)
    labels, samples = pool({"one": (OWN, splits), "two": other}, absent=True)
    part = columns(samples["train"], labels, LabelSet(("C", "B", "A")))
    y, known = part.targets(torch.tensor([2, 0]))
    assert y.tolist() == [[0, 0, 0], [0, 0, 1]]
    assert known.tolist() == [[False, True, True], [True, False, True]]
    assert part.rows(torch.tensor([0])).targets()[1].tolist() == [[True, False, True]]
    none = pool({"one": (OWN, splits), "two": other})[1]["train"]
    assert none.taught is None
