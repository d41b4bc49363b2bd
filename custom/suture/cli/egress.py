"""`suture egress`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def egress(
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Markdown file to write.")] = None,
) -> None:
    """Show all that leaves a site, by method: the allow-list of the site's filter."""
    from suture.core.files import atomic_write
    from suture.reports.egress_page import page

    if out is None:
        typer.echo(page(), nl=False)
    else:
        atomic_write(out, page().encode())
