"""Options of commands that simulate sites: what these compute on."""

from __future__ import annotations

from typing import Annotated

import typer

Device = Annotated[
    str | None,
    typer.Option(help="Where simulated sites compute: cpu, cuda, cuda:1; else SUTURE_DEVICE says it."),
]
SiteThreads = Annotated[int | None, typer.Option(min=1, help="Torch threads of a simulated site.")]
Amp = Annotated[bool, typer.Option("--amp", help="Simulated sites train in mixed precision.")]
