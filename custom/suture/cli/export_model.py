"""`suture export-model`: a model as files that other programs load."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from suture.cli.common import Model, print_line


class Format(StrEnum):
    """What a model is exported to."""

    torch = "torch"


def export_model(
    model: Model,
    to: Annotated[Format, typer.Option("--to", help="torch: a program that torch.export.load reads.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder to write into.")],
) -> None:
    """Write a model as files that other programs load without Suture."""
    from suture.export.torch_program import write_torch
    from suture.learning.prediction import open_model

    writers = {Format.torch: write_torch}
    print_line(f"written: {writers[to](open_model(model), out)}")
