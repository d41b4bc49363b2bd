"""A prior on disk: prior.safetensors, the backbone alone, and prior.json, all else that there is to know."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save

from suture import __version__
from suture.core.errors import ConfigError
from suture.core.files import atomic_write, write_json
from suture.core.validation import parse
from suture.models import MODELS, ModelSpec
from suture.models.classifier import Preprocessing
from suture.models.priors.prior import Prior, digest_of, freeze

FORMAT = 1
NAME = "prior"


def save_prior(folder: Path, kind: str, prior: Prior, licence: str | None, facts: Mapping[str, Any]) -> Path:
    """Writes a prior; the .json comes last and says that it is whole.

    Args:
        kind: the backbone's name in the registry of models.
        licence: under which others may have it.
        facts: how it came about.

    Returns:
        the path of the .json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    description = folder / f"{NAME}.json"
    description.unlink(missing_ok=True)  # it would speak of other tensors for a moment
    tensors = {key: tensor.contiguous() for key, tensor in prior.network.state_dict().items()}
    # Not `save_file`: what it writes is readable by its owner alone, and a prior is for others.
    atomic_write(folder / f"{NAME}.safetensors", save(tensors))
    write_json(
        description,
        {
            "format": FORMAT,
            "suture": __version__,
            "backbone": kind,
            "size": prior.preprocessing.size,
            "color": prior.preprocessing.color,
            "width": prior.width,
            "preprocessing": dataclasses.asdict(prior.preprocessing),
            "digest": prior.digest,
            "description": prior.description,
            "licence": licence,
            **facts,
        },
    )
    return description


def read_prior(folder: Path, size: int | None = None, name: str = NAME) -> Prior:
    """The prior that `save_prior` wrote.

    Args:
        size: side of the images that it is to read; None for that of its training.

    Raises:
        ConfigError: the folder holds none, or a broken one.
    """
    path, weights = folder / f"{name}.json", folder / f"{name}.safetensors"
    if not path.is_file():
        raise ConfigError(f"{folder} holds no {name}.json; prior.path names the folder of `suture pretrain`")
    try:
        facts = json.loads(path.read_text())
        kind, digest = facts["backbone"], facts["digest"]
        preprocessing = parse(Preprocessing, facts["preprocessing"], str(path))
        network, width = MODELS[kind].build(ModelSpec(kind, preprocessing.size, preprocessing.color), None)
        tensors = load_file(weights)
        network.load_state_dict(tensors)
        description = str(facts["description"])
    except (OSError, KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(
            f"{folder} cannot be read as a prior: {error}; copy {path.name} and {weights.name} again"
        ) from error
    found = digest_of(kind, tensors, preprocessing)
    if (found, width) != (digest, facts.get("width")):
        raise ConfigError(
            f"{weights} is not the file that {path.name} describes (SHA-256 {found[:12]}..., not "
            f"{str(digest)[:12]}...); copy both again"
        )
    if size is not None:
        preprocessing = dataclasses.replace(preprocessing, size=size)
    return freeze(kind, network, width, preprocessing, description)
