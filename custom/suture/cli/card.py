"""`suture card`: what a model is, from its run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from suture.cli.common import print_line


def card(
    directory: Annotated[Path, typer.Argument(help="Folder of a run.")],
    licence: Annotated[
        str | None, typer.Option("--license", help="Of the model, as Hugging Face names it.")
    ] = None,
) -> None:
    """Write the model card, model/README.md of a run: sites, figures, thresholds, limits, hashes.

    A signed folder has to be signed again.
    """
    from suture.export.card import write_card

    print_line(f"written: {write_card(directory, licence)}")
