"""A saved model as one network of plain tensors, and as a file of torch.export."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from suture.core.errors import ConfigError, SutureError
from suture.core.files import replacing
from suture.learning.steps import probabilities
from suture.models import encoder_of
from suture_results.prediction import Model

BATCH = torch.export.Dim("batch", min=1)
"""The first axis of every input: any number of images."""

OUTPUT = "probabilities"
"""Name of the output, ``[n, c]``."""


TOLERANCE = 1e-5
"""By how much a probability of an exported file may differ from the model's."""

BATCHES = (1, 5)
"""Sizes of the batches on which an exported file is compared with the model."""

Run = Callable[[tuple[Tensor, ...]], Tensor]
"""An exported file at work: inputs as those of `Program` to probabilities ``[n, c]``."""


class Program(nn.Module):
    """What an exported file computes: a model with the normalisation of its images and its last function.

    Args:
        model: an opened model; its network is used as it is, in eval mode.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.network = model.network.eval()
        self.label_type = model.network.labels.label_type
        self.channels = model.prepare.channels
        self.register_buffer("mean", torch.tensor(model.prepare.mean).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(model.prepare.std).view(1, -1, 1, 1))

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return probabilities ``[n, c]``.

        Args:
            inputs: uint8 images ``[n, 1 or 3, size, size]``; words ``[n, L]`` and the length of each
                document ``[n]``; or vectors ``[n, d]``, as `input_names` says.
        """
        values = dict(zip(self.network.reads, inputs, strict=True))
        if "image" in values:
            values["image"] = self._normalise(values["image"])
        return probabilities(self.network(values), self.label_type)

    def _normalise(self, image: Tensor) -> Tensor:
        """Do what `Preprocessing` does, with tensors that travel in the file."""
        x = (image.float() / 255.0).expand(-1, self.channels, -1, -1)
        return (x - self.mean) / self.std


def input_names(model: Model) -> tuple[str, ...]:
    """Names of the inputs, in order: ``image``; ``tokens`` and ``length``; or ``vector``."""
    return encoder_of(model.spec).inputs


def example_inputs(model: Model, n: int, seed: int = 0) -> tuple[Tensor, ...]:
    """Return `n` random inputs of a model that reads images or vectors, as `Program` takes them.

    Raises:
        ConfigError: the model reads words.
    """
    if "tokens" in input_names(model):
        raise ConfigError(
            f"a model that reads words ({model.spec.name}) cannot be exported, because torch would fix "
            "the number and length of the documents. Use suture predict, or a model of vectors"
        )
    generator = torch.Generator().manual_seed(seed)
    if input_names(model) == ("vector",):
        return (torch.randn(n, model.spec.vector, generator=generator),)
    size, channels = model.prepare.size, 3 if model.prepare.color else 1
    return (torch.randint(0, 256, (n, channels, size, size), generator=generator, dtype=torch.uint8),)


def check(model: Model, run: Run, name: str) -> None:
    """Compare a file with the model it was made of, on random inputs in batches of two sizes.

    Raises:
        SutureError: a probability differs by more than `TOLERANCE`, or is no number.
    """
    own = Program(model)
    for n in BATCHES:
        inputs = example_inputs(model, n, seed=n)
        with torch.no_grad():
            difference = float((own(*inputs) - run(inputs)).abs().max())
        if not difference <= TOLERANCE:  # NaN too
            raise SutureError(
                f"{name} is not written: for {n} random inputs its probabilities differ by "
                f"{difference:.1e} from the model's, more than {TOLERANCE:.0e}. This version of torch "
                "exported a wrong graph"
            )


def export(model: Model) -> torch.export.ExportedProgram:
    """Return the graph of a model, for batches of any size; see `Program` for input and output."""
    inputs = example_inputs(model, 2)
    shapes = {"inputs": tuple({0: BATCH} for _ in inputs)}
    return torch.export.export(Program(model).eval(), inputs, dynamic_shapes=shapes)


def write_torch(model: Model, folder: Path) -> Path:
    """Write ``model.pt2``, which `torch.export.load` reads without Suture; return its path.

    Raises:
        ConfigError: the model reads words.
        SutureError: the file gives other probabilities than the model; it is then not written.
        DiskError: it cannot be written.
    """
    path, program = folder / "model.pt2", export(model)
    with replacing(path) as temporary:
        whole = io.BytesIO()  # torch ends the process where it writes to a disk that is full
        torch.export.save(program, whole)
        temporary.write_bytes(whole.getbuffer())
        loaded = torch.export.load(temporary).module()
        check(model, lambda inputs: cast(Tensor, loaded(*inputs)), path.name)
    return path
