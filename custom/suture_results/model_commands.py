"""`suture model`: a finished model as files for other programs, its card, and its signature."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from suture.cli.common import print_line
from suture_results.run_options import Model, RunFolder

model_app = typer.Typer(name="model", help="Export, describe, sign and verify a model.", no_args_is_help=True)


@model_app.command()
def export(
    model: Model,
    to: Annotated[
        Literal["onnx", "torch", "monai"],
        typer.Option("--to", help="torch: a program for torch.export.load; monai: a MONAI bundle."),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder to write into.")],
    licence: Annotated[
        str,
        typer.Option(
            "--license", "--licence", help="Text of the LICENSE of a MONAI bundle; by default not stated."
        ),
    ] = "",
    opset: Annotated[int | None, typer.Option(help="Version of the ONNX operators.")] = None,
) -> None:
    """Write a model as files that other programs load without Suture."""
    from suture_results import actions

    print_line(f"written: {actions.export(model, to, out, licence=licence, opset=opset)}")


@model_app.command()
def card(
    run: RunFolder,
    licence: Annotated[
        str | None,
        typer.Option("--license", "--licence", help="Licence of the model, as Hugging Face names it."),
    ] = None,
) -> None:
    """Write the model card, model/README.md of a run: sites, figures, thresholds, limits, hashes.

    If the folder was signed, sign it again afterwards.
    """
    from suture_results.card import write_card

    print_line(f"written: {write_card(run, licence)}")


@model_app.command()
def sign(
    model: Model, key: Annotated[Path, typer.Option("--key", help="Private key in PEM, of the curve P-256.")]
) -> None:
    """Sign a model folder, so that a changed, missing or added file is detected."""
    from suture_results.model_export.signature import sign as sign_folder

    print_line(f"written: {sign_folder(model, key)}")


@model_app.command()
def verify(
    model: Model,
    key: Annotated[
        Path | None,
        typer.Option("--key", help="Public key of the signer; without it only the weights are checked."),
    ] = None,
) -> None:
    """Check that a model folder is unchanged and was signed with a key."""
    from suture_results.model_export.signature import check_digest
    from suture_results.model_export.signature import verify as verify_folder

    digest = check_digest(model)
    if key is None:
        print_line(f"the weights match model.json ({digest}); the signer was not checked (no --key)")
        return
    verify_folder(model, key)
    print_line(f"signed with the key of {key}, and unchanged since: every file of {model}, weights {digest}")
