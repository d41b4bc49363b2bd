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
    monai = "monai"


def export_model(
    model: Model,
    to: Annotated[
        Format,
        typer.Option("--to", help="torch: a program that torch.export.load reads; monai: a MONAI bundle."),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder to write into.")],
    licence: Annotated[
        str, typer.Option("--license", help="Text of the LICENSE of a MONAI bundle; empty: not stated.")
    ] = "",
) -> None:
    """Write a model as files that other programs load without Suture."""
    if to is Format.monai:
        from suture.export.bundle import NO_LICENCE, write_bundle

        print_line(f"written: {write_bundle(model, out, licence or NO_LICENCE)}")
        return
    from suture.export.torch_program import write_torch
    from suture.learning.prediction import open_model

    writers = {Format.torch: write_torch}
    print_line(f"written: {writers[to](open_model(model), out)}")
