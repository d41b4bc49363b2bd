"""`suture explain`: where a model looks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from suture.cli.common import MaxFailed, Model, print_line


def explain(
    model: Model,
    sources: Annotated[list[Path], typer.Argument(help="Images, or folders or archives of them.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder of the pictures.")],
    classes: Annotated[
        list[str] | None,
        typer.Option("--class", help="Class to explain; by default the three most likely. Repeatable."),
    ] = None,
    images: Annotated[int, typer.Option("-n", min=1, help="Maximum number of images.")] = 20,
    kind: Annotated[
        str, typer.Option("--map", help="Kind of map: grad-cam, grad-cam++ or occlusion.")
    ] = "grad-cam",
    max_failed: MaxFailed = 0,
) -> None:
    """Draw the regions that a prediction depends on: each image beside its maps, and a table of them."""
    from suture.core.errors import DataError
    from suture.core.printable import number_of
    from suture.simulation import actions

    done = actions.explain(model, sources, out, classes or (), images, kind)
    for name, reason in done.failed.items():
        print_line(f"left out: {name}: {reason}", style="yellow")
    for note in done.notes:
        print_line(f"note: {note}", style="yellow")
    if done.beyond:
        print_line(f"not drawn: {done.beyond} more images; -n draws more")
    print_line(f"{number_of(len(done.written), 'picture')}: {out}")
    if (failed := len(done.failed)) > max_failed:
        raise DataError(
            f"{failed} of {failed + len(done.written)} images cannot be used: the reasons are above. "
            f"The others are drawn; --max-failed {failed} accepts this"
        )
