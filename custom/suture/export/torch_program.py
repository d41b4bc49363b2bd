"""A saved model as a file of `torch.export`."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from suture.core.files import make_folder, replacing
from suture.export.program import Program, check, example_inputs
from suture.learning.prediction import Model

BATCH = torch.export.Dim("batch", min=1)
"""The first axis of every input: any number of images."""


def exported(model: Model) -> torch.export.ExportedProgram:
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
    make_folder(folder)
    path = folder / "model.pt2"
    with replacing(path) as temporary:
        torch.export.save(exported(model), temporary)
        program = torch.export.load(temporary).module()
        check(model, lambda inputs: cast(Tensor, program(*inputs)), path.name)
    return path
