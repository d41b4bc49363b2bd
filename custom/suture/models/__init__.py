"""The registry of models: a backbone by name, under a head whose rows are classes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import nn

from suture.errors import ConfigError, unknown
from suture.labels import LabelSet
from suture.messages import STRICT
from suture.models.classifier import Classifier, Preprocessing, head_rows, load_tensors
from suture.models.cnn import small_cnn
from suture.models.densenet import densenet121
from suture.seeds import seed_for, seeded

MODELS: dict[str, str] = {
    "cnn": "small CNN of four blocks, 98 thousand parameters, for the demo and tests",
    "densenet121": "MONAI DenseNet121, ImageNet weights from a path or by download",
}

_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass(frozen=True, config=STRICT)
class ModelSpec:
    """Which model, and what it reads.

    Attributes:
        name: a name of the registry.
        size: side of the images.
        color: whether the images are in colour.
        hidden: width of a Dense block between backbone and head, 0 for none (256 in the program of
            Surgical Aggregation).
        dropout: of that block.
        weights: path of pretrained weights, read at the server only; ``download`` fetches them.
        mean, std: normalisation per channel; ImageNet's for densenet121, else 0.5 and 0.25.
    """

    name: str = "cnn"
    size: Annotated[int, Field(ge=16, le=4096)] = 64
    color: bool = False
    hidden: Annotated[int, Field(ge=0)] = 0
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    weights: str | None = None
    mean: tuple[Annotated[float, Field(allow_inf_nan=False)], ...] | None = None
    std: tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...] | None = None

    def __post_init__(self) -> None:
        if self.name not in MODELS:
            raise unknown("model", self.name, MODELS)

    @property
    def preprocessing(self) -> Preprocessing:
        """How pixels become this model's input."""
        channels = 3 if self.color or self.name == "densenet121" else 1
        mean, std = _IMAGENET if self.name == "densenet121" else ((0.5,) * channels, (0.25,) * channels)
        return Preprocessing(self.size, self.color, channels, self.mean or mean, self.std or std)


def build(spec: ModelSpec, labels: LabelSet, seed: int, *, pretrained: bool) -> Classifier:
    """The model of a specification; the same seed gives the same tensors, and no global state changes.

    Args:
        pretrained: whether `spec.weights` are read; sites do not need them.

    Raises:
        ConfigError: the weights cannot be read or do not fit, or settings contradict each other.
    """
    _check(spec)
    with seeded(seed_for(seed, "model")):
        backbone, features = _backbone(spec, pretrained)
        model = Classifier(backbone, features, labels, spec.hidden, spec.dropout)
    load_tensors(model, head_rows(labels, model.head.in_features, seed))
    return model


def _backbone(spec: ModelSpec, pretrained: bool) -> tuple[nn.Module, int]:
    if spec.name == "densenet121":
        return densenet121(spec.weights if pretrained else None)
    return small_cnn(spec.preprocessing.channels)


def _check(spec: ModelSpec) -> None:
    """Settings that contradict each other; here, because `--set` changes them one at a time.

    Raises:
        ConfigError: naming the setting and the remedy.
    """
    if spec.name == "densenet121" and spec.size < 29:  # its last pooling would leave no pixel
        raise ConfigError(f"model.size {spec.size} is too small for densenet121; 29 or more")
    if spec.weights and spec.name == "cnn":
        raise ConfigError("model.weights: there are none for cnn; remove it, or set model.name=densenet121")
    if spec.dropout and not spec.hidden:
        raise ConfigError("model.dropout is that of the hidden block; set model.hidden, or remove it")
    for name in ("mean", "std"):
        given, channels = getattr(spec.preprocessing, name), spec.preprocessing.channels
        if len(given) != channels:
            raise ConfigError(f"model.{name} has {len(given)} values; {spec.name} takes {channels} channels")
