"""The registry of priors: frozen networks of which every site has the same copy, never trained or sent.

A prior on disk is prior.safetensors, the backbone alone, and prior.json, which holds everything else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass as validated
from safetensors import SafetensorError
from safetensors.torch import save

from suture.core import VERSION
from suture.core.entry_points import PRIOR_GROUP, Registry
from suture.core.errors import ConfigError, check_known
from suture.core.files import atomic_write, write_json
from suture.core.plain import parse_json, read_bounded
from suture.core.seeds import seeded
from suture.core.validation import NAMED_FILE, STRICT, parse
from suture.models import MODELS, ModelSpec
from suture.models.classifier import Preprocessing
from suture.models.priors.prior import Prior as Prior
from suture.models.priors.prior import digest_of, freeze
from suture.protocol.packing import read_tensors

_FORMAT = 1
_NAME = "prior"


def save_prior(folder: Path, kind: str, prior: Prior, licence: str | None, facts: Mapping[str, Any]) -> Path:
    """Write a prior; the .json is written last and marks it as complete.

    Args:
        kind: name of the backbone in the registry of models.
        licence: under which others may use it.
        facts: how it was trained.

    Returns:
        the path of the .json.
    """
    description = folder / f"{_NAME}.json"
    description.unlink(missing_ok=True)  # it would describe other tensors for a moment
    tensors = {key: tensor.contiguous() for key, tensor in prior.network.state_dict().items()}
    # Not `save_file`: what it writes is readable by its owner alone, and a prior is for others.
    atomic_write(folder / f"{_NAME}.safetensors", save(tensors))
    write_json(
        description,
        {
            "format": _FORMAT,
            "suture": VERSION,
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


def read_prior(folder: Path, size: int | None = None, name: str = _NAME) -> Prior:
    """Read a prior that `save_prior` wrote.

    Args:
        size: side of the images that it reads; None for that of its training.

    Raises:
        ConfigError: the folder holds no prior, or a damaged one.
    """
    path, weights = folder / f"{name}.json", folder / f"{name}.safetensors"
    if not path.is_file():
        raise ConfigError(
            f"{folder} does not contain {name}.json; set prior.path to the folder that `suture pretrain` "
            "wrote"
        )
    try:
        facts = parse_json(read_bounded(path))
        kind, digest = facts["backbone"], facts["digest"]
        preprocessing = parse(Preprocessing, facts["preprocessing"], str(path))
        network, width = MODELS[kind].build(ModelSpec(kind, preprocessing.size, preprocessing.color), None)
        tensors = read_tensors(weights)
        network.load_state_dict(tensors)
        description = str(facts["description"])
    except (OSError, KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(
            f"{folder} cannot be read as a prior: {error}; copy {path.name} and {weights.name} again"
        ) from error
    found = digest_of(kind, tensors, preprocessing)
    if (found, width) != (digest, facts.get("width")):
        raise ConfigError(
            f"{weights} does not match {path.name} (SHA-256 {found[:12]}..., not "
            f"{str(digest)[:12]}...); copy both again"
        )
    if size is not None:
        preprocessing = dataclasses.replace(preprocessing, size=size)
    return freeze(kind, network, width, preprocessing, description)


@dataclasses.dataclass(frozen=True)
class PriorEntry:
    """An entry of the registry.

    Attributes:
        text: description for `suture list`.
        load: reads the prior from `PriorSpec.path`, where it needs one, for images of `PriorSpec.size`.
        width: number of features; None where its folder defines it.
        size: side of the images in its training, in pixels; None where its folder defines it.
        licence: of its weights, as text.
        needs: what the path names; None for a prior that comes with a package.
    """

    text: str
    load: Callable[[Path, int | None], Prior]
    width: int | None
    size: int | None
    licence: str
    needs: str | None = None

    def __str__(self) -> str:
        """Return the line for `suture list`."""
        width = f"{self.width} features of {self.size} px" if self.width else "its backbone's features"
        needs = f"; needs {self.needs}" if self.needs else ""
        return f"{self.text}: {width}{needs}; weights: {self.licence}"


PRIORS: Registry[PriorEntry] = Registry(
    PRIOR_GROUP,
    "prior",
    {
        "phantoms": PriorEntry(
            "small CNN, MoCo v2 on the demo's phantoms; inside this package",
            lambda _path, size: read_prior(Path(__file__).parent, size, "phantoms"),
            128,
            64,
            "Apache-2.0",
        ),
        "checkpoint": PriorEntry(
            "what `suture pretrain` wrote",
            read_prior,
            None,
            None,
            "as stated by --licence",
            "the folder that it wrote",
        ),
    },
    "a suture.models.priors.Entry",
    lambda entry: isinstance(entry, PriorEntry),
)


@validated(frozen=True, config=STRICT)
class PriorSpec:
    """Which prior.

    Attributes:
        name: a name of the registry.
        path: of its file or folder in a simulation; at a real site its bare name in the folder ``[storage]
            files``. None for a prior that comes with a package.
        size: side of the images that it reads, in pixels; None for that of its training.
    """

    name: str = "phantoms"
    path: Annotated[str | None, NAMED_FILE] = None
    size: Annotated[int, Field(ge=32, le=1024)] | None = None

    def __post_init__(self) -> None:
        check_known("prior", self.name, PRIORS.names())


def load_prior(spec: PriorSpec) -> Prior:
    """Return the prior of a specification, on the CPU; no global state changes.

    Raises:
        ConfigError: its file is missing or does not fit, its package is not installed, or it takes no path
            or no other size.
    """
    entry = PRIORS.find(spec.name)
    if entry.needs and spec.path is None:
        raise ConfigError(f"prior.path is missing: {spec.name} needs {entry.needs}")
    if spec.path is not None and not entry.needs:
        raise ConfigError(f"prior.path: {spec.name} comes with a package; remove it, or set prior.name")
    with seeded(0):  # a network draws its first weights, which are then replaced, from the global generator
        return entry.load(Path(spec.path or "").expanduser(), spec.size)
