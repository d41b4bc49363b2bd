"""A model on disk: model.safetensors and model.json, everything that prediction needs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save

from suture.core import VERSION
from suture.core.errors import ConfigError
from suture.core.files import make_folder, replacing, write_json
from suture.core.labels import LabelSet
from suture.core.validation import parse
from suture.models import ModelSpec, build
from suture.models.classifier import Classifier, Preprocessing


def save_model(model: Classifier, spec: ModelSpec, folder: Path, facts: Mapping[str, Any]) -> None:
    """Write the weights, and beside them class names, backbone and preprocessing.

    Args:
        facts: further entries of model.json (job, round).
    """
    make_folder(folder)
    with replacing(folder / "model.safetensors") as temporary:
        # Not `save_file`: only the owner may read its file.
        temporary.write_bytes(save({name: t.contiguous() for name, t in model.state_dict().items()}))
    description = {
        "format": 1,
        "suture": VERSION,
        "labels": list(model.labels.names),
        "label_type": model.labels.label_type,
        "model": dataclasses.asdict(spec) | {"weights": None},
        "preprocessing": dataclasses.asdict(spec.preprocessing),
        **facts,
    }
    write_json(folder / "model.json", description)


def load_model(folder: Path) -> tuple[Classifier, Preprocessing]:
    """Return the model, in eval mode, and the preprocessing of its images.

    Raises:
        ConfigError: the folder holds no model of Suture, or a damaged one.
    """
    path = folder / "model.json"
    if not path.is_file():
        raise ConfigError(f"{folder} holds no model.json; name the model/ folder of a finished run")
    try:
        description = json.loads(path.read_text())
        labels = LabelSet(tuple(description["labels"]), description.get("label_type") or description["task"])
        spec = parse(ModelSpec, description["model"], str(path))
        preprocessing = parse(Preprocessing, description["preprocessing"], str(path))
        model = build(spec, labels, seed=0, pretrained=False)
        model.load_state_dict(load_file(folder / "model.safetensors"))
    except (OSError, KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"{folder} cannot be read as a model: {error}") from error
    return model.eval(), preprocessing


def load_spec(folder: Path) -> ModelSpec:
    """Return the specification of a saved model.

    Raises:
        ConfigError: the folder holds no model of Suture, or a damaged one.
    """
    path = folder / "model.json"
    try:
        return parse(ModelSpec, json.loads(path.read_text())["model"], str(path))
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{folder} cannot be read as a model: {error}") from error
