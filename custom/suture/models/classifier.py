"""A backbone with a head whose rows are classes with names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from pydantic.dataclasses import dataclass as validated
from torch import Tensor, nn

from suture.core.labels import LabelSet
from suture.core.seeds import generator_for, seeded
from suture.core.validation import STRICT

Shapes = Mapping[str, tuple[tuple[int, ...], str]]

HEADS = ("head.", "second_head.")
"""How the names of tensors begin whose rows are classes."""


@dataclass(frozen=True)
class Layout:
    """Shapes and types of what a model shares: whole tensors, and one row of each tensor of the head."""

    shared: Shapes
    head: Shapes

    @classmethod
    def of(cls, shared: Mapping[str, Tensor], head: Mapping[str, Tensor]) -> Layout:
        """That of tensors, the head's with a row for each class."""
        return cls(
            {name: (tuple(t.shape), str(t.dtype)) for name, t in shared.items()},
            {name: (tuple(t.shape[1:]), str(t.dtype)) for name, t in head.items()},
        )


@validated(frozen=True, config=STRICT)
class Preprocessing:
    """How pixels become a model's input; recorded with the model.

    Attributes:
        size: side of the square image.
        color: whether images have three channels of their own; gray ones are repeated where a backbone
            takes three.
        channels: what the backbone takes.
        mean, std: of each channel, of values in [0, 1].
    """

    size: int
    color: bool
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, image: Tensor) -> Tensor:
        """uint8 ``[n, 1 or 3, h, w]`` to normalised float ``[n, channels, h, w]``."""
        x = image.float().div_(255.0)
        if x.shape[1] != self.channels:
            x = x.expand(-1, self.channels, -1, -1)
        mean = torch.tensor(self.mean, device=x.device).view(1, -1, 1, 1)
        std = torch.tensor(self.std, device=x.device).view(1, -1, 1, 1)
        return (x - mean).div_(std)

    def undone(self, image: Tensor) -> Tensor:
        """Normalised float images as values in [0, 1] again."""
        mean = torch.tensor(self.mean, device=image.device).view(1, -1, 1, 1)
        std = torch.tensor(self.std, device=image.device).view(1, -1, 1, 1)
        return image * std + mean


class Classifier(nn.Module):
    """Backbone, an optional hidden block, and a linear head with one row per class.

    Its tensors are named ``backbone.*``, ``hidden.*``, ``head.weight`` [c, d] and ``head.bias`` [c]. The
    hidden block is ordinary shared representation: only the head's rows belong to classes.

    Args:
        backbone: inputs to features ``[n, features]``.
        labels: names the head's rows, in order.
        hidden: width of the hidden block (Dense, ReLU, Dropout); 0 for none.
        projection: width of a projector beside the head (Linear, batch norm, ReLU, Linear; ``projector.*``),
            for methods that compare features; 0 for none.
        second_head: whether the projection has a head of its own, one row per class (``second_head.*``); it
            is trained beside the other and predicts nothing.
        reads: names of the inputs that the backbone takes, in order.

    Attributes:
        projected: width of what the projector gives, that of the head's input where there is none.
    """

    def __init__(
        self,
        backbone: nn.Module,
        features: int,
        labels: LabelSet,
        hidden: int = 0,
        dropout: float = 0.0,
        projection: int = 0,
        second_head: bool = False,
        reads: tuple[str, ...] = ("image",),
    ) -> None:
        super().__init__()
        self.labels = labels
        self.reads = reads
        self.backbone = backbone
        self.hidden: nn.Module = (
            nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Dropout(dropout))
            if hidden
            else nn.Identity()
        )
        width = hidden or features
        self.head = nn.Linear(width, len(labels))
        self.projector: nn.Module = (
            nn.Sequential(
                nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, projection)
            )
            if projection
            else nn.Identity()
        )
        self.projected = projection or width
        self.second_head = nn.Linear(projection, len(labels)) if second_head else None

    def features(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """What the head reads: ``[n, d]``."""
        out: Tensor = self.hidden(self.backbone(*(inputs[name] for name in self.reads)))
        return out

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Logits ``[n, c]``."""
        out: Tensor = self.head(self.features(inputs))
        return out


def redraw_head(model: Classifier, seed: int) -> None:
    """Another initial hidden block and head, as a model of that seed would have them."""
    fresh = head_rows(model.labels, model.head.in_features, seed)
    for name, layer in model.hidden.named_children():
        if isinstance(layer, nn.Linear):
            with seeded(seed):
                drawn = nn.Linear(layer.in_features, layer.out_features)
            fresh |= {f"hidden.{name}.{key}": tensor for key, tensor in drawn.state_dict().items()}
    load_tensors(model, fresh)


def head_rows(labels: LabelSet, features: int, seed: int, head: str = "head") -> dict[str, Tensor]:
    """Initial rows of a head, each from a seed of its own class name.

    A class begins with the same row whatever other classes there are, and in whatever order.

    Returns:
        ``head.weight`` [c, features] and ``head.bias`` [c], or those of the head that is named, uniform in
        +-1/sqrt(features) as `nn.Linear`'s.
    """
    bound = features**-0.5
    rows = [
        torch.empty(features + 1).uniform_(-bound, bound, generator=generator_for(seed, head, name))
        for name in labels.names
    ]
    stacked = torch.stack(rows)
    return {f"{head}.weight": stacked[:, :-1].contiguous(), f"{head}.bias": stacked[:, -1].contiguous()}


def relabelled(
    head: Mapping[str, Tensor], before: tuple[str, ...], labels: tuple[str, ...], seed: int
) -> dict[str, Tensor]:
    """The rows of `labels`: classes known before keep theirs, new ones are initialised.

    Args:
        head: of each head ``weight`` [len(before), d] and ``bias`` [len(before)], under their full names.
    """
    if before == labels:
        return dict(head)
    fresh: dict[str, Tensor] = {}
    for name, rows in head.items():
        if name.endswith(".weight"):
            fresh |= head_rows(LabelSet(labels), rows.shape[1], seed, name.removesuffix(".weight"))
    known = [name for name in labels if name in before]
    to = torch.tensor([labels.index(name) for name in known], dtype=torch.long)
    source = torch.tensor([before.index(name) for name in known], dtype=torch.long)
    for name, rows in head.items():
        fresh[name][to] = rows[source]
    return fresh


def split_state(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A state dict as its shared tensors and the rows of its heads."""
    head = {name: t for name, t in state.items() if name.startswith(HEADS)}
    return {name: t for name, t in state.items() if name not in head}, head


def load_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copies tensors into the model by name; those that it lacks are passed over."""
    with torch.no_grad():
        for name, target in model.state_dict().items():
            if name in tensors:
                target.copy_(tensors[name])
