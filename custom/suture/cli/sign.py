"""`suture sign` and `suture verify`: who made a model, and whether it is still the same."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from suture.cli.common import Model, print_line


def sign(
    model: Model,
    key: Annotated[Path, typer.Option("--key", help="Private key in PEM, of the curve P-256.")],
) -> None:
    """Sign a model folder, so that a changed, missing or added file is noticed."""
    from suture.export.signature import sign as sign_folder

    print_line(f"written: {sign_folder(model, key)}")


def verify(
    model: Model,
    key: Annotated[
        Path | None,
        typer.Option("--key", help="Public key of the signer; without it only the weights are compared."),
    ] = None,
) -> None:
    """Check that a model folder is what its maker signed."""
    from suture.export.signature import check_digest
    from suture.export.signature import verify as verify_folder

    digest = check_digest(model)
    if key is None:
        print_line(f"the weights are those that model.json states ({digest}); who made them is not checked")
        return
    verify_folder(model, key)
    print_line(f"signed by the owner of {key}, and unchanged since: every file of {model}, weights {digest}")
