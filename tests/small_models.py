"""Models with random weights, built and saved as a run saves its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from suture.core.labels import LabelSet, LabelType
from suture.models import ModelSpec, build
from suture.models.classifier import Classifier
from suture.models.saved import save_model

EDEMA_MASS = ("Edema", "Mass")
CNN_16 = ModelSpec("cnn", size=16)
CNN_32 = ModelSpec("cnn", size=32)


def built_model(
    spec: ModelSpec = CNN_16,
    labels: tuple[str, ...] = EDEMA_MASS,
    label_type: LabelType = "multilabel",
    *,
    seed: int = 1,
    pretrained: bool = False,
) -> Classifier:
    return build(spec, LabelSet(labels, label_type), seed, pretrained=pretrained)


def saved_model(
    folder: Path,
    spec: ModelSpec = CNN_16,
    labels: tuple[str, ...] = EDEMA_MASS,
    label_type: LabelType = "multilabel",
    **facts: Any,
) -> Path:
    """Save a model with further facts of model.json; returns the folder."""
    save_model(built_model(spec, labels, label_type), spec, folder, facts)
    return folder
