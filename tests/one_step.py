"""What a part of local training is given in one step, by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from suture.core.labels import LabelSet, LabelType
from suture.data.batch import Augmentation, Batch, Samples
from suture.learning.training import SiteContext
from suture.methods.composed import Step
from suture.models import ModelSpec


class Answers(nn.Module):
    """A model whose inputs are its logits."""

    def features(self, inputs: dict[str, Tensor]) -> Tensor:
        return inputs["received"]

    def head(self, features: Tensor) -> Tensor:
        return 1 * features  # a tensor of its own, without gradient where none is computed


def site_of(label_type: LabelType, identified: list[bool] | Tensor, y: Tensor | None = None) -> Any:
    """A site of classes A, B, ... that annotates some, with training labels where a part looks at them."""
    names = tuple("ABCDEFGHIJ"[: len(identified)])
    return SimpleNamespace(
        model=SimpleNamespace(labels=LabelSet(names, label_type)),
        identified=torch.as_tensor(identified),
        device=torch.device("cpu"),
        samples={} if y is None else {"train": SimpleNamespace(y=y)},
    )


def context_with(model: Any, train: Samples, name: str = "alpha", **more: Any) -> SiteContext:
    """What a method is given at a site with training data alone, seen as they are."""
    samples, prepare = {"train": train}, ModelSpec("cnn", size=16).preprocessing
    return SiteContext(name, model, samples, prepare, Augmentation(), torch.device("cpu"), **more)


def step_of(
    z: Tensor,
    received: Tensor,
    y: Tensor,
    known: Tensor,
    rows: Tensor | None = None,
    strong: Tensor | None = None,
) -> Step:
    """One step in which the model answers z, and the received model `received`, ``[n, c]`` each."""
    model: Any = Answers()
    return Step(model, model, Batch({"received": received}, y, known), z, z, rows, strong)


def equal(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    """Whether two models have the same tensors, bit for bit."""
    return one.keys() == two.keys() and all(torch.equal(tensor, two[name]) for name, tensor in one.items())
