"""`suture export-model`: a model as files that other programs load."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from suture.cli.common import Model, print_line


class Format(StrEnum):
    """What a model is exported to."""

    onnx = "onnx"
    torch = "torch"
    monai = "monai"


def export_model(
    model: Model,
    to: Annotated[
        Format,
        typer.Option("--to", help="torch: a program for torch.export.load; monai: a MONAI bundle."),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder to write into.")],
    licence: Annotated[
        str, typer.Option("--license", help="Text of the LICENSE of a MONAI bundle; empty: not stated.")
    ] = "",
    opset: Annotated[int | None, typer.Option(help="Version of ONNX's operators.")] = None,
) -> None:
    """Write a model as files that other programs load without Suture."""
    print_line(f"written: {_write(model, to, out, licence, opset)}")


def _write(model: Path, to: Format, out: Path, licence: str, opset: int | None) -> Path:
    if opset is not None and to is not Format.onnx:
        raise typer.BadParameter("--opset is for --to onnx")
    if licence and to is not Format.monai:
        raise typer.BadParameter("--license is for --to monai")
    if to is Format.onnx:
        from suture.export.onnx import write_onnx

        return write_onnx(model, out, opset)
    if to is Format.monai:
        from suture.export.bundle import NO_LICENCE, write_bundle

        return write_bundle(model, out, licence or NO_LICENCE)
    from suture.export.torch_program import write_torch
    from suture.learning.prediction import open_model

    return write_torch(open_model(model), out)
