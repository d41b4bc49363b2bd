"""A model on disk: model.safetensors and model.json, everything that prediction needs."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shlex
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass as validated
from safetensors import SafetensorError
from safetensors.torch import save
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from suture.core import VERSION
from suture.core.errors import ConfigError, DataError, SutureError, as_word
from suture.core.escaping import printable
from suture.core.files import open_regular, read_json, replacing, write_json
from suture.core.labels import LabelSet, LabelType
from suture.core.validation import OPEN, parse
from suture.data.batch import Preprocessing
from suture.models import ModelSpec, build, check_portable, self_contained, without_adapters
from suture.models.classifier import Classifier, Coherence, Coherent, check_tensors
from suture.protocol.messages import Labels
from suture.protocol.packing import read_tensors


def save_model(model: Classifier, spec: ModelSpec, folder: Path, facts: Mapping[str, Any]) -> None:
    """Write the weights, and beside them their SHA-256, class names, backbone and preprocessing.

    Adapters are merged into the weights, so that whoever loads the model needs no peft.

    Args:
        facts: further entries of model.json (job, round).
    """
    model, spec = without_adapters(model, spec)
    weights = save({name: t.contiguous() for name, t in model.state_dict().items()})
    with replacing(folder / "model.safetensors") as temporary:
        temporary.write_bytes(weights)  # not `save_file`: only the owner may read its file
    description = {
        "format": 1,
        "suture": VERSION,
        "digest": hashlib.sha256(weights).hexdigest(),
        "labels": list(model.labels.names),
        "label_type": model.labels.label_type,
        "model": dataclasses.asdict(self_contained(spec)) | {"weights": None, "name_vectors": None},
        "preprocessing": dataclasses.asdict(spec.preprocessing),
        **facts,
    }
    write_json(folder / "model.json", description)


@validated(frozen=True, config=OPEN)
class _Description:
    """The content of model.json; it has more facts.

    Attributes:
        labels, label_type: the classes of the head's rows, in order.
        model: what the network is made of.
        preprocessing: of its images.
        digest: SHA-256 of model.safetensors.
        coherent, below: how predictions are made coherent, and the classes below each class; see `Coherent`.

    Raises:
        ConfigError: the preprocessing is that of another model, or a class of `below` is not one of `labels`
            or is there twice.
    """

    labels: Annotated[Labels, Field(min_length=1)]
    label_type: LabelType
    model: ModelSpec
    preprocessing: Preprocessing
    digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    coherent: Coherence = "none"
    below: dict[str, tuple[str, ...]] = Field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in (name for above, below in self.below.items() for name in (above, *below)):
            if name not in self.labels:
                raise ConfigError(f"below has the class {name!r}, which is not one of the labels")
        if twice := [above for above, below in self.below.items() if len({*below}) < len(below)]:
            raise ConfigError(f"below {twice[0]!r} is a class twice")
        made = self.model.preprocessing
        for name in ("size", "color", "channels"):
            has, needs = getattr(self.preprocessing, name), getattr(made, name)
            if has != needs:
                raise ConfigError(f"preprocessing.{name} is {has}, but the model needs {needs}")
        for name in ("mean", "std"):
            values = len(getattr(self.preprocessing, name))
            if values != made.channels:
                raise ConfigError(f"preprocessing.{name} has {values} values for {made.channels} channels")


def load_model(folder: Path) -> tuple[Classifier, Preprocessing]:
    """Return the model, in eval mode, and the preprocessing of its images.

    Raises:
        ConfigError: the folder holds no model of Suture, or a damaged one, or weights of another.
    """
    found, weights = _describe(folder), folder / "model.safetensors"
    if not weights.exists():
        raise ConfigError(f"{folder} has no {weights.name}; restore it from a backup")
    try:
        if found.digest != weights_digest(folder):
            raise ConfigError(
                "model.safetensors does not match the digest in model.json; restore both from a backup"
            )
        labels = LabelSet(found.labels, found.label_type)
        with _parameters_of_at_most(2 * weights.stat().st_size + _SPARE):
            model = build(found.model, labels, seed=0, pretrained=False)
        tensors = read_tensors(weights)
        check_tensors(tensors, model.state_dict(), str(weights))
    except (OSError, SutureError, SafetensorError) as error:
        why = str(error) if isinstance(error, SutureError) else as_word(error)
        raise ConfigError(f"{folder} cannot be read as a model: {why}") from error
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise ConfigError(f"{weights}: {name} is not finite; restore the file from a backup")
    model.load_state_dict(tensors)
    if found.coherent != "none":
        model.coherent = Coherent(found.coherent, model.labels, found.below)
    return model.eval(), found.preprocessing


_SPARE = 2**26
"""Bytes of parameters that a network has only while it is built: those of a library's classifier."""


@contextmanager
def _parameters_of_at_most(most: int) -> Iterator[None]:
    """Stop this thread's building of a network once its parameters have more bytes than its file explains.

    Raises:
        ConfigError: they have.
    """
    here, total = threading.get_ident(), {True: 0, False: 0}  # first without memory, where a library can

    def count(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> None:
        if threading.get_ident() == here and parameter is not None:
            total[parameter.is_meta] += parameter.nbytes
            if total[parameter.is_meta] > most:
                raise ConfigError(
                    "model.json describes a larger network than model.safetensors has; restore both from a "
                    "backup"
                )

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


_LARGEST_WEIGHTS = 2**33
"""Largest number of bytes of a model's weights; those of the largest backbone have a tenth of it."""


def weights_digest(folder: Path) -> str:
    """Return the SHA-256 of a model's weights, in hexadecimal digits.

    Raises:
        OSError: they cannot be read.
        DataError: they are more than any model has.
    """
    path = folder / "model.safetensors"
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > _LARGEST_WEIGHTS:
            raise DataError(f"{path} has {size:,} bytes; the limit is {_LARGEST_WEIGHTS:,}; restore it")
        return hashlib.file_digest(file, "sha256").hexdigest()


def stated_digest(folder: Path) -> str:
    """Return the SHA-256 of the weights that model.json states.

    Raises:
        ConfigError: the folder holds no model of Suture, or a damaged one.
    """
    return _describe(folder).digest


def load_spec(folder: Path) -> ModelSpec:
    """Return the specification of a saved model.

    Raises:
        ConfigError: the folder holds no model of Suture, or a damaged one.
    """
    return _describe(folder).model


def _describe(folder: Path) -> _Description:
    path = folder / "model.json"
    if (folder / "run.json").is_file() and not path.is_file():
        at_sites = sorted(folder.glob("sites/*/state/**/model/model.json"))
        remedy = f"name a site's, as {at_sites[0].parent}" if at_sites else _how_to_get(folder)
        raise ConfigError(f"the run {folder} has no model of all sites; {remedy}")
    if folder.is_file():
        raise ConfigError(
            f"{folder} is a file; name the model/ folder of a finished run. Exports, such as ONNX, are for "
            "other programs"
        )
    if not path.is_file():
        lacks = "does not contain model.json" if folder.exists() else "does not exist"
        raise ConfigError(f"{folder} {lacks}; name a finished run, or its model/ folder")
    try:
        found = parse(_Description, read_json(path), "model.json")
        check_portable(found.model, str(path))
    except SutureError as error:
        raise ConfigError(f"{folder} cannot be read as a model: {error}") from error
    return found


def _how_to_get(run: Path) -> str:
    """What a person does about a run without a model."""
    about, out = read_json(run / "run.json"), shlex.quote(str(run))
    if about.get("env") not in ("local", "sim"):
        return "it exists once the job has ended and `suture results JOB_ID` has fetched it"
    command = printable(about.get("command") or "suture run JOB", 4_000)
    if about.get("status") == "finished":
        return f"it is lost; train it again: {command}"
    stopped = "if that was stopped"
    if about.get("status") == "failed":
        stopped = f"that failed: {printable(about.get('error'))}. Once it is corrected"
    return f"it exists at the end of the run; {stopped}, continue it: {command} --out {out} --resume"
